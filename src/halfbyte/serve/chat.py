"""Messages → the prompt of a chat, and the text of an answer → tool calls.

Models write calls as they were trained to: `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen), or the whole answer is
such an object, with "arguments" or "parameters", or a list of them (Llama 3, Mistral).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence

from halfbyte.language.model import LanguageModel
from halfbyte.serve.protocol import ChatRequest, Message, NamedTool
from halfbyte.serve.replies import ApiError

_MARK = "<tool_call>"
_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


def prompt(model: LanguageModel, request: ChatRequest) -> str:
    """Render the messages of a request, and its tools, with the model's chat template.

    Raises:
        UnsupportedError: The model has no chat template.
        CheckpointError: The template does not take these messages.
    """
    messages = [_plain(message) for message in request.messages]
    variables: dict[str, object] = dict(request.chat_template_kwargs or {})
    for name in ("self", "messages", "template"):
        if name in variables:
            raise ApiError(
                400, f"chat_template_kwargs has the template's own variables, got {name}: leave it out", param="chat_template_kwargs"
            )
    if request.tools and request.tool_choice != "none":
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
    return model.chat_prompt(messages, **variables)


def _plain(message: Message) -> dict[str, object]:
    """A message as templates read it: one text, and arguments of calls as objects."""
    plain = message.model_dump(exclude_none=True)
    plain["role"] = "system" if message.role == "developer" else message.role
    if not isinstance(message.content, str):
        plain["content"] = "".join(part.text for part in message.content or ())
    for call in plain.get("tool_calls", ()):
        try:
            arguments = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            call["function"]["arguments"] = arguments
    return plain


def forced_call(request: ChatRequest) -> dict[str, object] | None:
    """Return the JSON schema of an answer that has to be a call, or None where it need not be one."""
    choice, tools = request.tool_choice, request.tools or []
    if choice in (None, "none", "auto"):
        return None
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if not tools:
        what = f"names the function {choice.function.name!r}" if isinstance(choice, NamedTool) else "is required"
        raise ApiError(400, f"tool_choice {what}, and tools has none such: list it in tools", param="tool_choice")
    calls = []
    for tool in tools:
        fields = {"name": {"const": tool.function.name}, "arguments": tool.function.parameters or {"type": "object"}}
        calls.append({"type": "object", "properties": fields, "required": ["name", "arguments"], "additionalProperties": False})
    definitions = {key: value for call in calls for key, value in _definitions(call["properties"]["arguments"])}  # type: ignore[index]
    return {"anyOf": calls, **({"$defs": definitions} if definitions else {})}


def _definitions(schema: object) -> Iterator[tuple[str, object]]:
    """The definitions of a tool's schema, to which its references point from the root."""
    if isinstance(schema, dict) and isinstance(found := schema.get("$defs"), dict):
        yield from found.items()


class Answer:
    """The text of an answer, in which there may be tool calls.

    What may be a call is pending back until the end: text that was given out is never taken back.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Begin. names: of the functions that may be called; none: all is text."""
        self._names, self._pending, self._given = frozenset(names), "", False

    def push(self, text: str) -> str:
        """Take more text; return what is no call for certain."""
        if not self._names:
            return text
        self._pending += text
        begins = self._pending.lstrip()[:1]
        if not self._given and (not begins or begins in "{["):
            return ""
        end = self._pending.find(_MARK)
        if end < 0:
            partial = (
                i for i in range(max(0, len(self._pending) - len(_MARK) + 1), len(self._pending)) if _MARK.startswith(self._pending[i:])
            )
            end = next(partial, len(self._pending))
        given, self._pending = self._pending[:end], self._pending[end:]
        self._given = self._given or bool(given.strip())
        return given

    def finish(self) -> tuple[str, list[dict[str, object]]]:
        """Return the text that was pending back and is no call, and the calls."""
        pending, self._pending = self._pending, ""
        calls, rest = [], pending
        if _MARK in pending:
            calls = [call for match in _BLOCK.finditer(pending) for call in self._calls(match[1])]
            rest = _BLOCK.sub("", pending).strip() if calls else pending
        elif pending.lstrip()[:1] in ("{", "["):
            calls = list(self._calls(pending))
            rest = "" if calls else pending
        return rest, calls

    def _calls(self, text: str) -> Iterator[dict[str, object]]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return
        for call in found if isinstance(found, list) else [found]:
            arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
            if arguments is None or call.get("name") not in self._names:
                continue
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            yield {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": call["name"], "arguments": text}}
