"""HTML and SVG elements as text. Whatever is not Markup already is escaped, so that no name from a file becomes markup."""

from __future__ import annotations

from html import escape

# Elements without content, which have no end tag.
_VOID = frozenset({"meta", "br", "hr", "img", "input"})


class Markup(str):
    """Text that is HTML: made by `element`, `join` and by this project's own files alone."""

    __slots__ = ()


def element(tag: str, *children: str | float | Markup, **attributes: str | float | bool | None) -> Markup:
    """Return one element. A name of an attribute may end in _ (class_) and has - for _; None and False leave it out."""
    shown = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = name.rstrip("_").replace("_", "-")
        shown.append(f" {key}" if value is True else f' {key}="{escape(_number(value))}"')
    opening = f"<{tag}{''.join(shown)}>"
    return Markup(opening if tag in _VOID else f"{opening}{join(*children)}</{tag}>")


def join(*children: str | float | Markup) -> Markup:
    return Markup("".join(child if isinstance(child, Markup) else escape(_number(child)) for child in children))


def _number(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
