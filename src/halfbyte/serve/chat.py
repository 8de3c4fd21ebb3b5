"""Messages → the prompt of a chat, and the text of an answer → tool calls.

Models write calls as they were trained to: `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen), or the whole answer is
such an object, with "arguments" or "parameters", or a list of them (Llama 3, Mistral).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence

from halfbyte.errors import CheckpointError
from halfbyte.language.model import LanguageModel
from halfbyte.serve.protocol import ChatRequest, Message, NamedTool
from halfbyte.serve.replies import ApiError

_TAG = "<tool_call>"
_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


def prompt(model: LanguageModel, request: ChatRequest) -> str:
    """Render the messages of a request, and its tools, with the model's chat template.

    Args:
        model: The model, whose chat template is taken.
        request: The request; its `chat_template_kwargs` are further variables of the template.

    Returns:
        The prompt, special tokens included.

    Raises:
        ApiError: `chat_template_kwargs` has a variable that the template gets anyway, or the template ignores tools.
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
    if not request.tools or request.tool_choice == "none":
        return model.chat_prompt(messages, **variables)
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
    text = model.chat_prompt(messages, **{**variables, "tools": tools})
    if request.tool_choice in (None, "auto") and text == _without_tools(model, messages, variables):
        raise ApiError(
            400,
            "the chat template of this model ignores tools: leave them out, or demand a call by tool_choice",
            "unsupported_value",
            "tools",
        )
    return text


def _without_tools(model: LanguageModel, messages: Sequence[dict[str, object]], variables: dict[str, object]) -> str | None:
    """Return the prompt of the template without tools; None where it has no such prompt, and so reads tools."""
    if "tool_use" in model.tokenizer.chat_templates:  # the template for requests with tools: without them, another one is rendered
        return None
    try:
        return model.chat_prompt(messages, **{**variables, "tools": None})
    except CheckpointError:  # the template demands tools
        return None


def _plain(message: Message) -> dict[str, object]:
    """Return a message as templates read it: content as one text, and the arguments of calls as objects."""
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
    """Return the JSON schema of an answer that must be a call; None where `tool_choice` does not demand one.

    Raises:
        ApiError: `tool_choice` names a function that is not among the tools, or demands a call where there are none.
    """
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
    """Yield the definitions of a tool's schema, which move to the root, where its references point."""
    if isinstance(schema, dict) and isinstance(definitions := schema.get("$defs"), dict):
        yield from definitions.items()


class Answer:
    """The text of an answer, in which there may be tool calls.

    Text that may be a call is held back until the end, as text that was sent cannot be taken back.
    """

    def __init__(self, names: Sequence[str], most_calls: int | None = None) -> None:
        """Begin an answer.

        Args:
            names: The functions that may be called; none: all is text.
            most_calls: Calls that are given out, at most; None: all of them.
        """
        self._names, self._most_calls, self._pending, self._has_text = frozenset(names), most_calls, "", False

    def push(self, text: str) -> str:
        """Append text of the answer, and return the text that can be sent, as it is certainly no part of a call."""
        if not self._names:
            return text
        self._pending += text
        begins = self._pending.lstrip()[:1]
        if not self._has_text and (not begins or begins in "{["):
            return ""
        end = self._pending.find(_TAG)
        if end < 0:
            partial = (
                i for i in range(max(0, len(self._pending) - len(_TAG) + 1), len(self._pending)) if _TAG.startswith(self._pending[i:])
            )
            end = next(partial, len(self._pending))
        text, self._pending = self._pending[:end], self._pending[end:]
        self._has_text = self._has_text or bool(text.strip())
        return text

    def finish(self) -> tuple[str, list[dict[str, object]]]:
        """End the answer.

        Returns:
            The text that was held back and is no call, and the calls in OpenAI's shape.
        """
        pending, self._pending = self._pending, ""
        calls, rest = [], pending
        if _TAG in pending:
            calls = [call for match in _BLOCK.finditer(pending) for call in self._calls(match[1])]
            rest = _BLOCK.sub("", pending).strip() if calls else pending
        elif pending.lstrip()[:1] in ("{", "["):
            calls = list(self._calls(pending))
            rest = "" if calls else pending
        return rest, calls[: self._most_calls]

    def _calls(self, text: str) -> Iterator[dict[str, object]]:
        """Yield the calls of a JSON document; none where it is not JSON, or calls functions that are not offered."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return
        for call in document if isinstance(document, list) else [document]:
            arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
            if arguments is None or call.get("name") not in self._names:
                continue
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            yield {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": call["name"], "arguments": text}}
