"""Messages → a prompt, by a model's chat template.

Called by the commands that chat and by the server. Templates are programs in jinja2, from wherever the model is from: they run in
template_limits.py's environment, with the same functions and variables as in transformers.

Source: transformers, utils/chat_template_utils.py
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from halfbyte.errors import ArgumentError, CheckpointError, HalfbyteError

if TYPE_CHECKING:
    from jinja2 import Template

    from halfbyte.language.template_limits import LimitedEnvironment

_LONGEST = 1 << 20  # characters of a template; the longest in use have some 20 000
_MORE_STEPS, _MORE_CHARACTERS = 200, 100  # than the usual limits, for each element and each character of the conversation
# Names under which a message's reasoning is passed; templates read the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render(
    template: str,
    messages: Sequence[Mapping[str, object]],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    documents: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    bos_token: str | None = None,
    eos_token: str | None = None,
    **variables: object,
) -> str:
    """Render a conversation as the text that the model was trained on, as transformers' `apply_chat_template` does.

    Args:
        template: A chat template, for example `tokenizer.chat_templates["default"]`.
        messages: Messages, each with "role" and "content", and what else the template knows, such as "tool_calls".
        tools: JSON schemas of functions that the model may call.
        documents: Documents for retrieval-augmented generation, each with "title" and "text".
        add_generation_prompt: End with what begins the model's answer.
        bos_token: Text of the token that begins a text; None where the model has none.
        eos_token: Text of the token that ends an answer; None where the model has none.
        **variables: Further variables of the template, such as `enable_thinking=False`.

    Returns:
        The prompt, special tokens included: encode it with `add_special_tokens=False`.

    Raises:
        ArgumentError: There are no messages, or they are not dicts.
        CheckpointError: The template is none, refuses the conversation, or runs for too long or makes too much text.

    Example:
        prompt = render(tokenizer.chat_templates["default"], [{"role": "user", "content": "Hello"}], **tokenizer.special_tokens)
    """
    _check_mappings("messages", messages)
    if not messages:
        raise ArgumentError("a conversation has one message or more, got none: pass a message")
    for name, listed in (("tools", tools), ("documents", documents)):
        _check_mappings(name, listed or ())
    if len(template) > _LONGEST:
        raise CheckpointError(f"the chat template has {len(template)} characters, at most {_LONGEST} are read: take the model's own")
    tokens = {name: text for name, text in (("bos_token", bos_token), ("eos_token", eos_token)) if text is not None}

    from halfbyte.language.template_limits import Limits, TemplateLimitError, limited

    try:
        context: dict[str, object] = {
            **tokens,
            **{name: _plain(value) for name, value in variables.items()},
            "messages": [_message(message) for message in messages],
            "tools": _plain(tools),
            "documents": _plain(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        elements, characters = _size(context)
        usual = Limits()
        limits = Limits(usual.steps + _MORE_STEPS * elements, usual.characters + _MORE_CHARACTERS * characters, usual.seconds)
        with limited(limits):
            return _compiled(template).render(context)
    except TemplateLimitError as e:
        raise CheckpointError(f"the chat template was stopped because {e}: take the one of the model's authors, or repair it") from e
    except HalfbyteError:
        raise
    except Exception as e:  # a template can raise anything
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        raise CheckpointError(f"the chat template does not take this conversation ({why}): change the messages, or repair it") from e


def _check_mappings(name: str, values: object) -> None:
    """Raise ArgumentError where values are not a list of dicts."""
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable) or not all(isinstance(value, Mapping) for value in values):
        raise ArgumentError(f"{name} are a list of dicts, got {type(values).__name__}: pass one dict for each of them")


def _message(message: Mapping[str, object]) -> dict[str, object]:
    """Return a message as templates get it: without keys that are None, its reasoning under all names."""
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: object) -> object:
    """Return a value in JSON's types alone, whose methods the sandbox knows; anything else becomes its type's name."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return f"<{type(value).__name__}>"


def _size(value: object) -> tuple[int, int]:
    """Return the numbers of elements and of characters of a value."""
    if isinstance(value, str):
        return 1, len(value)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, list | tuple):
        return 1, 0
    sizes = [_size(item) for item in value]
    return 1 + sum(elements for elements, _ in sizes), sum(characters for _, characters in sizes)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> LimitedEnvironment:
    """Return the environment that transformers renders chat templates in, with limits."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.utils import Namespace

    from halfbyte.language.template_limits import LimitedEnvironment

    class Generation(Extension):
        """{% generation %} … {% endgeneration %}, which marks the model's own text for training: here its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return [nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)]

        def _content(self, caller: Any) -> object:
            return caller()

    class TemplateDict:
        """The global `dict`, of which attributes lead nowhere."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[object, Any]:
            environment.count_value(args)
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            environment.count_value(args)
            return dict.fromkeys(*args)

    class TemplateNamespace(Namespace):
        """The global `namespace`, without attributes that begin with an underscore."""

        def __init__(*args: object, **kwargs: object) -> None:  # so that `self` can be an attribute
            self, *rest = args
            environment.count_value(rest)
            attributes = dict(*rest, **kwargs)
            for name in attributes:
                _check_name(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: object) -> None:
            _check_name(name)
            Namespace.__setitem__(self, name, value)

    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"namespaces have no attributes that begin with an underscore, got {name!r}")

    def raise_exception(message: object) -> None:
        raise TemplateError(environment.concatenate(message))

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.add_extension(Generation)
    environment.add_filter("tojson", tojson)
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": TemplateDict(),
        "namespace": TemplateNamespace,
    }
    return environment
