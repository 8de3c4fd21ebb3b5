"""The model card of a checkpoint: README.md, with the front matter that the Hub reads.

Called by saving.py and integrations/transformers/model_card.py. A README.md that somebody wrote, or changed, is never replaced: a card ends
with a comment that has a checksum of its text, and only a card whose checksum is right is written anew.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeGuard
from zlib import crc32

from halfbyte import __version__
from halfbyte.errors import unwritable
from halfbyte.formats.spec import Format
from halfbyte.io.files import write_whole
from halfbyte.memory import size_text

CARD = "README.md"
_MARK = re.compile(r"<!-- halfbyte model card ([0-9a-f]{8}) -->\n\Z")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CLASS = re.compile(r"[A-Za-z_]\w*")
_MOST_CARD_BYTES = 1 << 20  # a longer README.md is no card


class CardWeight(NamedTuple):
    """A quantized weight as the card's table counts it.

    Attributes:
        kind: The kind of its module, such as "Linear".
        format: The format of its codes.
        elements: Number of weights.
        nbytes: Bytes in the files.
        error: Relative error when it was quantized, if known.
    """

    kind: str
    format: Format
    elements: int
    nbytes: int
    error: float | None


def model_card(
    title: str,
    weights: Iterable[CardWeight],
    *,
    total_bytes: int,
    config: Mapping[str, object],
    base_model: str | None = None,
    tags: Iterable[str] = (),
) -> str:
    """Return the text of a model card.

    Args:
        title: The name of the model: that of its folder, or of its place on the Hub.
        weights: The quantized weights.
        total_bytes: Bytes of all tensors in the files.
        config: config.json, of which the name of the class is used.
        base_model: The model that was quantized; named only where it is a name on the Hub and not a path.
        tags: Further tags of the front matter.
    """
    weights = list(weights)
    found = config.get("architectures")
    name = found[0] if isinstance(found, list) and found and isinstance(found[0], str) else ""
    architecture = name if _CLASS.fullmatch(name) else ""
    writes_text = architecture.endswith("ForCausalLM")
    base = base_model if _is_on_the_hub(base_model) else None
    title = re.sub(r"[^\w ./-]", "", title).strip() or "Model"
    formats = list(dict.fromkeys(str(one.format) for one in weights))
    lines = ["---", f"library_name: {'transformers' if architecture else 'halfbyte'}"]
    if base:
        lines += [f"base_model: {base}", "base_model_relation: quantized"]
    if writes_text:
        lines.append("pipeline_tag: text-generation")
    all_tags = dict.fromkeys(["halfbyte", "quantized", *formats, *filter(_CLASS.fullmatch, tags)])
    lines += ["tags:", *(f"- {tag}" for tag in all_tags), "---", ""]
    what = f"`{architecture}`" if architecture else "A model"
    lines += [f"# {title}", "", f"{base or what}, quantized with halfbyte {__version__}.", "", *_table(weights, total_bytes), ""]
    lines += ["## Use", "", *_usage(title, architecture, writes_text), ""]
    return _marked("\n".join(lines))


def write_card(folder: Path, text: str, *, published: Path | None = None) -> None:
    """Write a card into `folder`, unless a README.md that is no unchanged card is there, or in the folder that it will become part of.

    Raises:
        CheckpointError: It cannot be written; what was there is unchanged.
    """
    if all(_is_replaceable(place / CARD) for place in (folder, published or folder)):
        try:
            write_whole(folder / CARD, text.encode())
        except OSError as e:
            raise unwritable(published or folder / CARD, e) from e


def _is_on_the_hub(name: str | None) -> TypeGuard[str]:
    """Whether this looks like "organization/model" and not like a path on this machine."""
    return isinstance(name, str) and _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _table(weights: list[CardWeight], total_bytes: int) -> list[str]:
    groups: dict[tuple[str, str], list[CardWeight]] = defaultdict(list)
    for one in weights:
        groups[str(one.format), one.kind].append(one)
    lines = ["| format | layers | weights | bits per weight | size | mean relative error |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for (name, kind), some in groups.items():
        count, nbytes = sum(one.elements for one in some), sum(one.nbytes for one in some)
        errors = [one.error for one in some if one.error is not None]
        error = f"{sum(errors) / len(errors):.4f}" if len(errors) == len(some) else ""
        bits = f"{nbytes * 8 / count:.2f}" if count else ""
        lines.append(f"| `{name}` | {len(some)} {kind} | {count:,} | {bits} | {size_text(nbytes)} | {error} |")
    rest = total_bytes - sum(one.nbytes for one in weights)
    return [*lines, f"| not quantized | | | | {size_text(rest)} | |", f"| **all** | | | | **{size_text(total_bytes)}** | |"]


def _usage(title: str, architecture: str, writes_text: bool) -> list[str]:
    if writes_text:
        return [
            "On a CPU or an NVIDIA GPU, `pip install 'halfbyte[language]'`:",
            "",
            "```python",
            "import halfbyte as hb",
            "",
            f'model = hb.LanguageModel.open("{title}")    # the folder of these files',
            'print(model.generate("Once upon a time", max_new_tokens=64).text)',
            "```",
            "",
            "With transformers, `pip install 'halfbyte[transformers]'`:",
            "",
            "```python",
            "import halfbyte",
            "from transformers import AutoModelForCausalLM",
            "",
            f'model = AutoModelForCausalLM.from_pretrained("{title}")',
            "```",
        ]
    argument = "" if architecture else ", model=model"
    comment = "" if architecture else "    # `model` is the network in floating point, which is filled"
    return ["```python", "import halfbyte as hb", "", f'model = hb.load("{title}"{argument}){comment}', "```"]


def _marked(text: str) -> str:
    return f"{text}<!-- halfbyte model card {crc32(text.encode()):08x} -->\n"


def _is_replaceable(path: Path) -> bool:
    """Whether there is no such file, or a card as it was written."""
    if not path.is_file():
        return not path.exists() and not path.is_symlink()
    if path.stat().st_size > _MOST_CARD_BYTES:
        return False
    text = path.read_bytes().decode("utf-8", "replace")
    mark = _MARK.search(text)
    return mark is not None and text == _marked(text[: mark.start()])
