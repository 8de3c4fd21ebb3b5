"""Tool calls in the text of answers, and the messages of a prompt."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("pydantic")

from halfbyte.serve.chat import Answer, _plain, forced_call
from halfbyte.serve.protocol import ChatRequest, Message, parse

CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


def read(text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer that comes in pieces of a size."""
    answer = Answer(["weather", "time"])
    given = "".join(answer.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = answer.finish()
    return given + rest, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "left", "calls"),
    [
        ("It rains.", "It rains.", 0),
        ("", "", 0),
        (f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
        (f"I look. <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "I look. ", 2),
        (f"<tool_call>{CALL}", "", 1),
        (CALL, "", 1),
        ('\n{"name": "weather", "parameters": {"city": "Oslo"}}', "", 1),
        (f"[{CALL}, {CALL}]", "", 2),
        ('{"name": "rocket", "arguments": {}}', '{"name": "rocket", "arguments": {}}', 0),
        ('{"name": "weather"}', '{"name": "weather"}', 0),
        ("[1, 2", "[1, 2", 0),
        ("<tool_call>no</tool_call>", "<tool_call>no</tool_call>", 0),
        ("a < b and <tool_kit>", "a < b and <tool_kit>", 0),
        ("{" * 5000, "{" * 5000, 0),
    ],
)
def test_calls_are_found_in_whatever_pieces(text: str, left: str, calls: int, size: int) -> None:
    given, found = read(text, size)
    assert given == left
    assert [(name, json.loads(arguments)) for name, arguments in found] == [("weather", {"city": "Oslo"})] * calls


def test_one_call_at_a_time() -> None:
    answer = Answer(["weather"], 1)
    answer.push(f"[{CALL}, {CALL}]")
    assert len(answer.finish()[1]) == 1


def test_text_is_given_out_at_once() -> None:
    answer = Answer(["weather"])
    assert [answer.push(piece) for piece in ("It ", "rains <", "b> <tool", "_call>")] == ["It ", "rains ", "<b> ", ""]
    assert Answer([]).push('{"a') == '{"a'


def test_messages_as_templates_read_them() -> None:
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    plain = _plain(Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}))
    assert plain["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert (plain["content"], plain["reasoning_content"]) == ("", "hm")
    plain = _plain(Message.model_validate({"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}))
    assert plain == {"role": "system", "content": "ab"}


def test_a_call_that_is_required() -> None:
    tools = [{"function": {"name": name, "parameters": {"$defs": {name: {}}, "$ref": f"#/$defs/{name}"}}} for name in ("a", "b")]
    request = parse(ChatRequest, json.dumps({"messages": [{"role": "user"}], "tools": tools, "tool_choice": "required"}).encode())
    schema = forced_call(request)
    assert schema is not None
    assert [call["properties"]["name"] for call in schema["anyOf"]] == [{"const": "a"}, {"const": "b"}]
    assert schema["$defs"] == {"a": {}, "b": {}}
    request.tool_choice = "auto"
    assert forced_call(request) is None
