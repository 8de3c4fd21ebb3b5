"""OpenAI's API, asked by OpenAI's own client, and what it answers to what is wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import language_model
import pytest
import transformers
from serving import POSITIONS, Server, make_model, serve
from test_gguf_tokenizer import with_byte_tokens

from halfbyte.language.model import LanguageModel
from halfbyte.serve import completions
from halfbyte.serve.chat import Answer
from halfbyte.serve.formats import TokenTexts
from halfbyte.serve.structured import Grammars

openai = pytest.importorskip("openai")

PROMPT = "the quick brown fox"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: LanguageModel) -> Iterator[Server]:
    with serve(model) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


# Text


def test_models(client: Any) -> None:
    (found,) = client.models.list().data
    assert (found.id, found.owned_by, found.max_model_len) == ("tiny", "halfbyte", POSITIONS)
    assert client.models.retrieve("tiny") == found
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_a_completion_is_that_of_the_model(client: Any, model: LanguageModel) -> None:
    expected = model.generate(PROMPT, max_new_tokens=12)
    found = client.completions.create(prompt=PROMPT, **GREEDY)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(expected.prompt_ids), len(expected.ids))
    assert client.completions.create(prompt=expected.prompt_ids, **GREEDY).choices[0].text == expected.text


def test_a_chat_is_that_of_the_model(client: Any, model: LanguageModel) -> None:
    messages = [{"role": "system", "content": "the lazy dog"}, {"role": "user", "content": PROMPT}]
    expected = model.generate(messages, max_new_tokens=12)
    found = client.chat.completions.create(messages=messages, **GREEDY)
    assert (found.choices[0].message.role, found.choices[0].message.content) == ("assistant", expected.text)
    assert found.usage.prompt_tokens == len(expected.prompt_ids)
    parts = [{"role": "developer", "content": "the lazy dog"}, {"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    assert client.chat.completions.create(messages=parts, **GREEDY).choices[0].message.content == expected.text


def test_a_completion_goes_on_with_the_space_of_its_first_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece removes the space that begins a text: that of a completion is in the middle of one."""
    settings = {"bos_token": "<s>", "eos_token": "<|x|>", "chat_template": language_model.TEMPLATE}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=with_byte_tokens(True), **settings)  # type: ignore[no-untyped-call]
    monkeypatch.setattr(language_model, "make_tokenizer", lambda: tokenizer)
    model = make_model(tmp_path / "sentencepiece")
    word = model.tokenizer.encode("the", add_special_tokens=False)[0]
    text, always = model.tokenizer.decode([word]), {"logit_bias": {str(word): 100}, "max_tokens": 2}
    with serve(model) as server:
        assert server.complete("on", echo=True, **always).json()["choices"][0]["text"] == f"on {text} {text}"
        assert server.complete(model.tokenizer.encode("on"), **always).json()["choices"][0]["text"] == f" {text} {text}"
        assert server.chat(**always).json()["choices"][0]["message"]["content"] == f"{text} {text}"
    said = model.generate("on", max_new_tokens=4)
    assert f"on{said.text}" == model.tokenizer.decode([*said.prompt_ids, *said.ids])


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole_answer_in_pieces(client: Any, n: int) -> None:
    settings = {**GREEDY, "temperature": 1.0, "seed": 5, "n": n, "messages": [{"role": "user", "content": PROMPT}]}
    whole = client.chat.completions.create(**settings)
    assert len({choice.message.content for choice in whole.choices}) == n, "each has a seed of its own"
    texts, reasons, usage = [""] * n, [None] * n, None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **settings):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_a_stream_of_completions(client: Any) -> None:
    whole = client.completions.create(prompt=[PROMPT, "an old oak"], echo=True, **GREEDY)
    texts = ["", ""]
    for chunk in client.completions.create(prompt=[PROMPT, "an old oak"], echo=True, stream=True, **GREEDY):
        assert chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[1].startswith("an old oak")


def test_transformers_chat(
    server: Server, model: LanguageModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks whether the model is loaded, and sends its settings as a generation_config."""
    chat = pytest.importorskip("transformers.cli.chat")
    monkeypatch.setattr(chat.RichInterface, "clear", lambda self: None)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n!set max_new_tokens=5\nan old oak\nn\n!exit\n"))
    chat.Chat("tiny", server.url, ["max_new_tokens=7", "do_sample=False"], user="me")
    shown = " ".join(capsys.readouterr().out.split())
    messages = [{"role": "user", "content": PROMPT}]
    first = model.generate(messages, max_new_tokens=7)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "an old oak"}]
    second = model.generate(messages, max_new_tokens=5)
    assert f"<tiny>: {' '.join(first.text.split())}" in shown
    assert f"<tiny>: {' '.join(second.text.split())}" in shown
    with pytest.raises(Exception, match="404"):
        chat.Chat("large", server.url, user="me")


@pytest.mark.parametrize(
    ("config", "status", "tokens"),
    [
        ({"max_new_tokens": 3, "do_sample": True, "top_k": 1, "transformers_version": "5"}, 200, 3),
        ({"max_new_tokens": 3, "top_p": 7.0}, 400, 0),
        ("{", 400, 0),
        ({"max_new_tokens": "3"}, 400, 0),
    ],
)
def test_settings_of_transformers(server: Server, config: Any, status: int, tokens: int) -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    messages = [{"role": "user", "content": PROMPT}]
    found = server.post("/v1/chat/completions", messages=messages, generation_config=text, ignore_eos=True)
    assert found.status_code == status, found.text
    if tokens:
        assert found.json()["usage"]["completion_tokens"] == tokens
        assert "halfbyte-ignored" not in found.headers
        found = server.post("/v1/chat/completions", messages=messages, generation_config=text, ignore_eos=True, max_tokens=2)
        assert found.json()["usage"]["completion_tokens"] == 2, "a field of the request's own comes first"


def test_an_answer_ends_at_a_stop_string(client: Any, model: LanguageModel) -> None:
    text = model.generate(PROMPT, max_new_tokens=12).text
    found = client.completions.create(prompt=PROMPT, stop=text[3:6], **GREEDY).choices[0]
    assert (found.text, found.finish_reason) == (text[: text.index(text[3:6])], "stop")


def test_log_probabilities(client: Any, model: LanguageModel) -> None:
    expected = model.generate(PROMPT, max_new_tokens=12, logprobs=3)
    content = client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=3, **GREEDY)
    entries = content.choices[0].logprobs.content
    assert len(entries) == content.usage.completion_tokens - (content.choices[0].finish_reason == "stop")
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob >= entry.top_logprobs[2].logprob for entry in entries)
    found = client.completions.create(prompt=PROMPT, logprobs=3, **GREEDY).choices[0]
    assert found.logprobs.token_logprobs == pytest.approx([choice.logprob for choice in expected.choices], abs=1e-5)
    texts = TokenTexts(model.tokenizer)
    assert found.logprobs.tokens == [texts.text(choice.id) for choice in expected.choices]
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode("utf-8", "replace") == content.choices[0].message.content
    for token, offset in zip(found.logprobs.tokens, found.logprobs.text_offset, strict=True):
        assert found.text.startswith(token, offset) or token == "<s>" or "\ufffd" in found.text[: offset + 1]


def test_a_seed_decides_and_bias_excludes(client: Any, model: LanguageModel) -> None:
    def text(**more: Any) -> str:
        return str(client.completions.create(prompt=PROMPT, **{**GREEDY, "temperature": 1.5, **more}).choices[0].text)

    assert text(seed=1) == text(seed=1) != text(seed=2)
    first = model.generate(PROMPT, max_new_tokens=1).ids[0]
    without = client.completions.create(prompt=PROMPT, logit_bias={str(first): -100}, logprobs=0, **{**GREEDY, "max_tokens": 1})
    assert without.choices[0].logprobs.token_logprobs[0] < 0
    assert without.choices[0].text != model.tokenizer.decode([first])


def test_defaults_of_the_model_are_taken(model: LanguageModel) -> None:
    with serve(model, defaults={"top_k": 1}, temperature=1.3) as other:
        sampled = other.post("/v1/completions", prompt=PROMPT, max_tokens=12).json()
    assert sampled["choices"][0]["text"] == model.generate(PROMPT, max_new_tokens=12).text, "of one candidate the most likely is drawn"


# Structure

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_a_schema(client: Any, stream: bool) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    settings = {**GREEDY, "max_tokens": 200, "temperature": 1.0, "seed": 3, "response_format": format}
    found = client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], stream=stream, **settings)
    text = "".join(c.choices[0].delta.content or "" for c in found) if stream else found.choices[0].message.content
    person = json.loads(text)
    assert set(person) == {"name", "age"}
    assert len(person["name"]) <= 5
    assert 0 <= person["age"] <= 99


def test_a_schema_is_compiled_once_for_all_sequences(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_schema = list[object](), Grammars.json_schema

    def counted(self: Grammars, schema: Any) -> Any:
        compiled.append(schema)
        return compile_schema(self, schema)

    monkeypatch.setattr(Grammars, "json_schema", counted)
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    settings = {**GREEDY, "max_tokens": 200, "temperature": 1.0, "seed": 3, "response_format": format}
    found = client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], n=4, **settings)
    people = [json.loads(choice.message.content) for choice in found.choices]
    assert all(set(person) == {"name", "age"} for person in people), "each sequence has a state of its own"
    assert len({str(person) for person in people}) == 4
    assert len(compiled) == 1


def test_an_answer_is_a_json_object(client: Any) -> None:
    found = client.chat.completions.create(
        messages=[{"role": "user", "content": PROMPT}], response_format={"type": "json_object"}, **{**GREEDY, "max_tokens": 600}
    )
    choice = found.choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_that_has_to_be_called(client: Any, choice: Any) -> None:
    settings = {**GREEDY, "max_tokens": 200, "tools": [WEATHER], "tool_choice": choice, "messages": [{"role": "user", "content": PROMPT}]}
    found = client.chat.completions.create(**settings).choices[0]
    assert found.finish_reason == "tool_calls"
    (call,) = found.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    streamed = [c.choices[0] for c in client.chat.completions.create(stream=True, **settings)]
    calls = [call for choice in streamed for call in choice.delta.tool_calls or ()]
    assert [(call.index, call.function.arguments) for call in calls] == [(0, found.message.tool_calls[0].function.arguments)]
    assert streamed[-1].finish_reason == "tool_calls"
    again = [
        *settings["messages"],
        found.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    assert client.chat.completions.create(messages=again, **GREEDY).choices[0].finish_reason


def test_calls_in_parallel_can_be_excluded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int | None] = []

    def answer(names: list[str], most_calls: int | None) -> Answer:
        most.append(most_calls)
        return Answer(names, most_calls)

    monkeypatch.setattr(completions, "Answer", answer)
    tried: list[dict[str, Any]] = [
        {},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"parallel_tool_calls": False, "stream": True},
    ]
    for settings in tried:
        assert server.chat(tools=[WEATHER], **settings).status_code == 200
    assert most == [None, None, 1, 1]


def test_a_template_that_ignores_tools(server: Server, model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt_tokens = server.chat(tools=[WEATHER]).json()["usage"]["prompt_tokens"]
    monkeypatch.setitem(model.tokenizer.chat_templates, "tool_use", model.tokenizer.chat_templates["default"])
    monkeypatch.setitem(model.tokenizer.chat_templates, "default", "<s>user: {{ messages[0].content }}</s>")
    assert server.chat(tools=[WEATHER]).json()["usage"]["prompt_tokens"] == prompt_tokens
    assert server.chat().json()["usage"]["prompt_tokens"] < prompt_tokens
    monkeypatch.delitem(model.tokenizer.chat_templates, "tool_use")
    found = server.chat(tools=[WEATHER])
    assert (found.status_code, found.json()["error"]["param"]) == (400, "tools")
    assert "ignores tools: leave them out, or demand a call by tool_choice" in found.json()["error"]["message"]
    assert server.chat(tools=[WEATHER], tool_choice="none").status_code == 200
    assert server.chat(tools=[WEATHER], tool_choice="required", max_tokens=200).json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("others", [{}, {"default": "{{ raise_exception('roles must alternate') }}"}])
def test_a_template_for_tools_is_rendered_alone(
    server: Server, model: LanguageModel, monkeypatch: pytest.MonkeyPatch, others: dict[str, str]
) -> None:
    monkeypatch.setattr(model.tokenizer, "chat_templates", {"tool_use": language_model.TEMPLATE, **others})
    assert server.chat(tools=[WEATHER]).status_code == 200


def test_a_template_that_demands_tools(server: Server, model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% if not tools %}{{ raise_exception('tools are missing') }}{% endif %}" + model.tokenizer.chat_templates["default"]
    monkeypatch.setitem(model.tokenizer.chat_templates, "default", template)
    assert server.chat(tools=[WEATHER]).status_code == 200
    assert "tools are missing" in server.chat().json()["error"]["message"]


# What is refused

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "not JSON"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2, "temperature": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens is 1 or more"),
    ({"max_tokens": 10**9}, "max_tokens is"),
    ({"n": 17}, "16 sequences"),
    ({"n": 0}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"top_logprobs": 2}, "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"seed": 1 << 70}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"audio": {"voice": "x"}}, "audio is not supported"),
    ({"functions": [{"name": "x"}]}, "functions is not supported"),
    ({"guided_json": {"type": "integer"}}, "guided_json is not supported"),
    ({"min_tokens": 4}, "min_tokens is not supported"),
    ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens is not supported"),
    ({"skip_special_tokens": False}, "skip_special_tokens is not supported"),
    ({"add_generation_prompt": False}, "add_generation_prompt is not supported"),
    ({"continue_final_message": True}, "continue_final_message is not supported"),
    ({"echo": True}, "echo is not supported"),
    ({"n_predict": 4}, "n_predict is not supported here: use max_tokens"),
    ({"repeat_penalty": 1.1}, "repeat_penalty is not supported here: use repetition_penalty"),
    ({"typical_p": 0.9}, "typical_p is not supported here: leave it out"),
    ({"modalities": ["text", "audio"]}, "modalities is not supported"),
    ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "add it"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, "schema"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "time"}}}, "'time'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, " tool_choice.type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"documents": 1}}, "documents"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED, ids=[f"{next(iter(s))}-{i}" for i, (s, _) in enumerate(REFUSED)])
def test_what_is_wrong_is_said(server: Server, settings: dict[str, Any], said: str) -> None:
    found = server.client.post(
        "/v1/chat/completions",
        content=json.dumps({"messages": [{"role": "user", "content": PROMPT}], **settings}),
        headers={"Content-Type": "application/json"},
    )
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert said in f"{error['message']} {error['param']}"
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("chats", "settings"),
    [
        (True, {"stream": True, "stream_options": {"include_usage": None}}),
        (True, {"logprobs": False, "top_logprobs": 0}),
        (True, {"ignore_eos": None}),
        (True, {"modalities": ["text"]}),
        (True, {"repeat_penalty": 1.0, "typical_p": 1.0, "n_predict": -1, "mirostat": 0}),
        (False, {"repeat_penalty": 1, "typical_p": 1, "n_predict": -1}),
        (True, {"repetition_penalty": 1.1, "max_tokens": 4}),
        (True, {"guided_json": None, "min_tokens": 0, "stop_token_ids": [], "use_beam_search": False, "response_format": {"type": "text"}}),
        (True, {"skip_special_tokens": True, "add_generation_prompt": None, "echo": False}),
        (False, {"echo": None, "logprobs": None, "best_of": None, "suffix": ""}),
    ],
)
def test_what_changes_nothing_is_taken(server: Server, chats: bool, settings: dict[str, Any]) -> None:
    found = server.chat(**settings) if chats else server.complete(**settings)
    assert found.status_code == 200, found.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompt": ""}, "no tokens"),
        ({"prompt": []}, "prompt: List should have at least 1 item"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, -1]}, "token ids"),
        ({"prompt": [1, 10**30]}, "token ids"),
        ({"prompt": ["a", 1]}, "prompt.1: Input should be a valid string"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": ["a"] * 17}, "16 sequences"),
        ({}, "prompt"),
    ],
)
def test_wrong_completions(server: Server, settings: dict[str, Any], said: str) -> None:
    found = server.post("/v1/completions", **settings)
    assert found.status_code == 400, found.text
    assert said in found.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, b'{"a":' * 50_000])
def test_no_json(server: Server, body: bytes) -> None:
    found = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == 400
    assert found.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v2", None),
        ("GET", "/v1/completions", {"POST"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("GET", "/page.html", None),
        ("GET", "/../engine.py", None),
    ],
)
def test_other_paths_and_methods(server: Server, method: str, path: str, allowed: set[str] | None) -> None:
    found = server.client.request(method, path)
    error = found.json()["error"]
    assert f"{method} " in error["message"]
    assert (found.status_code, error["code"]) == ((404, "not_found") if allowed is None else (405, "method_not_allowed"))
    if allowed is not None:
        assert set(error["message"].partition("; use ")[2].split(", ")) == allowed
        assert set(found.headers["allow"].split(", ")) == allowed


def test_clients_of_the_responses_api_are_told_what_to_use(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="does not have the Responses API; use /v1/chat/completions"):
        client.responses.create(model="tiny", input="a")


def test_an_unknown_model_and_a_service_that_is_not_there(server: Server, client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="ask for tiny"):
        client.completions.create(**{**GREEDY, "model": "large"}, prompt="a")
    with pytest.raises(openai.NotFoundError, match="does not embed"):
        client.embeddings.create(model="tiny", input="a")
    assert server.complete(model=None).status_code == 200


def test_a_body_is_json_by_its_type(server: Server) -> None:
    found = server.client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert (found.status_code, "Content-Type" in found.text) == (400, True)


def test_unknown_fields_are_named(server: Server) -> None:
    found = server.complete(keep_alive=2, user="me")
    assert (found.status_code, found.headers["halfbyte-ignored"]) == (200, "keep_alive")
    assert server.complete(min_tokens=0, prompt_logprobs=None, stop_token_ids=[]).status_code == 200, "what other servers take for none"
    split: dict[str, Any] = {"x\r\nSet-Cookie: a": 1}
    assert server.complete(**split).headers["halfbyte-ignored"] == "x??Set-Cookie: a"
