"""/v1/completions and /v1/chat/completions: from a validated request to a JSON response or a stream of server-sent events.

`app.py` parses a request (`protocol.py`) and calls `TextService.complete` or `chat`, which

    1. tokenize the prompts and compile the JSON schema, in a thread: `_prepare` -> one `Job` of the engine for each sequence
    2. give the jobs to the engine (`engine.py`), whose thread decodes them, and wait for the first token
    3. turn the engine's updates into chunks (`_events`) or one document (`_whole`), in the shapes of `formats.py`

An error before the first token is answered with its HTTP status, a later one is the last event of the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Receive

from halfbyte.errors import ArgumentError, HalfbyteError
from halfbyte.language.model import LanguageModel
from halfbyte.language.sampling.sampler import Choice
from halfbyte.serve.chat import Answer, forced_call, prompt
from halfbyte.serve.engine import Engine, Job, Processor, Request, Update
from halfbyte.serve.formats import Calls, ChatFormat, CompletionFormat, TokenTexts, usage
from halfbyte.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest, ResponseFormat
from halfbyte.serve.replies import DONE, ApiError, EventStream, event, json_reply, watching
from halfbyte.serve.settings import Settings
from halfbyte.serve.structured import Bias, Grammars

_DEFAULT_NEW_TOKENS = 16  # of /v1/completions, as in OpenAI's API


class _Prepared(NamedTuple):
    """A request that is tokenized and ready for the engine.

    Attributes:
        engine_request: The engine's request, with a job for each sequence: `n` sequences of the first prompt, then `n` of the next one, ….
        echoes: The prompt's text for each sequence if the request has `echo`, else "".
        prompt_tokens: Tokens of all prompts together, each counted once, for `usage`.
        names: Functions that the answer of a chat may call; empty: none.
        most_calls: How many calls it may have; None: any number.
    """

    engine_request: Request
    echoes: list[str]
    prompt_tokens: int
    names: list[str]
    most_calls: int | None


class TextService:
    """Answers requests for completions and chats with one model."""

    def __init__(
        self, name: str, model: LanguageModel, engine: Engine, settings: Settings, defaults: dict[str, object], executor: Executor
    ) -> None:
        """Make a service.

        Args:
            name: The model's name in responses.
            model: The model, of which the service uses the tokenizer, chat template and sizes; the engine runs it.
            engine: Decodes the sequences.
            settings: Limits of requests.
            defaults: Sampling settings of the model's generation_config.json, for fields that a request leaves out.
            executor: Runs `_prepare`: tokenizing and compiling a schema take up to a second, for which they would block the event loop.
        """
        self.name, self.engine = name, engine
        self._model, self._settings, self._executor = model, settings, executor
        self._defaults = {"temperature": settings.temperature, **defaults}
        self._tokens = TokenTexts(model.tokenizer)
        # Characters, for a lower bound of the number of tokens of a text.
        self._longest_token = max(map(len, model.tokenizer.backend.get_vocab(with_added_tokens=True)), default=1)
        self._grammars = Grammars(model.tokenizer, model.spec.vocabulary)

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        return "default" in self._model.tokenizer.chat_templates

    @property
    def positions(self) -> int | None:
        """Tokens of prompt and answer together that the model has positions for; None: no limit."""
        return self._model.spec.max_positions

    async def complete(self, request: CompletionRequest, receive: Receive) -> Response:
        """Answer POST /v1/completions.

        Args:
            request: The request.
            receive: ASGI's, by which a client that disconnects is noticed.

        Raises:
            ApiError: The request cannot be answered.
        """
        if request.best_of not in (None, request.n or 1):
            raise ApiError(400, f"best_of is n, {request.n or 1}, here, got {request.best_of}: leave it out", param="best_of")
        if request.echo and request.logprobs is not None:
            raise ApiError(400, "echo has no log probabilities of the prompt here: leave out echo or logprobs", param="echo")
        return await self._answer(request, CompletionFormat(self.name, self._tokens), receive)

    async def chat(self, request: ChatRequest, receive: Receive) -> Response:
        """Answer POST /v1/chat/completions; arguments and errors are those of `complete`."""
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set logprobs to true", param="top_logprobs")
        return await self._answer(request, ChatFormat(self.name, self._tokens), receive)

    # Preparation, in a thread of the executor

    def _prepare(self, request: GenerationRequest, engine_request: Request) -> _Prepared:
        """Tokenize the prompts, check the limits, and compile the schema that constrains the answer.

        Args:
            request: The request as it was received.
            engine_request: The engine's request, to which jobs are added.

        Raises:
            ApiError: The request exceeds a limit, or has fields that contradict each other.
            ArgumentError: A sampling setting, a logit bias or the JSON schema is invalid.
            HalfbyteError: The tokenizer or the chat template does not take the prompt.
        """
        n, names, schema, most_calls = request.n or 1, list[str](), _schema(request.response_format), None
        if isinstance(request, ChatRequest):
            prompts: Sequence[str | list[int]] = [prompt(self._model, request)]
            if request.tools and request.tool_choice != "none":
                names = [tool.function.name for tool in request.tools]
            most_calls = 1 if request.parallel_tool_calls is False else None
            schema = forced_call(request) or schema  # a call that tool_choice demands wins over response_format
        else:
            assert isinstance(request, CompletionRequest)
            prompts = request.prompts
        bias = [Bias(request.logit_bias, self._model.spec.vocabulary)] if request.logit_bias else []
        grammar = None if schema is None else self._grammars.json_schema(schema)
        is_chat = isinstance(request, ChatRequest)  # whose template writes its own special tokens
        special = not is_chat if request.add_special_tokens is None else request.add_special_tokens
        echoes, total = [], 0
        for text in prompts:
            ids = self._ids(text, special)
            total += len(ids)
            new_tokens = self._new_tokens(request, len(ids))
            echo = isinstance(request, CompletionRequest) and request.echo
            echoed = (text if isinstance(text, str) else self._model.tokenizer.decode(ids)) if echo else ""
            for _ in range(n):
                index = len(engine_request.jobs)  # also chooses the seed: sequences of one prompt differ
                sampling = request.sampling(self._defaults, new_tokens, index)
                processors: list[Processor] = [*bias, *([] if grammar is None else [grammar.copy()])]  # a grammar follows its sequence
                engine_request.jobs.append(Job(index, ids, sampling, processors, is_chat))
                echoes.append(echoed)
        return _Prepared(engine_request, echoes, total, names, most_calls)

    def _ids(self, text: str | list[int], special: bool) -> list[int]:
        """Tokenize a prompt and check its length.

        Args:
            text: Text, or token ids, which are checked and returned.
            special: Whether the tokenizer adds its special tokens, such as BOS.

        Raises:
            ApiError: A token id is outside of the vocabulary, or the prompt is too long.
        """
        most = self._settings.prompt_tokens or self.positions
        if isinstance(text, list):
            ids, vocabulary = text, self._model.spec.vocabulary
            if min(ids) < 0 or max(ids) >= vocabulary:
                raise ApiError(
                    400, f"token ids are 0 to {vocabulary - 1}, got {min(ids)} to {max(ids)}: use the model's tokens", param="prompt"
                )
        else:
            if most is not None and len(text) > most * self._longest_token:  # too long for certain: refuse before tokenizing
                what = f"a prompt has {most} tokens of {self._longest_token} characters at most here, got {len(text)} characters"
                raise ApiError(400, f"{what}: use a shorter text", "context_length_exceeded")
            ids = self._model.tokenizer.encode(text, add_special_tokens=special)
        if most is not None and len(ids) > most:
            raise ApiError(400, f"a prompt has {most} tokens at most here, got {len(ids)}: use a shorter text", "context_length_exceeded")
        if self.positions is not None and len(ids) >= self.positions:  # one is needed for a new token
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, and a sequence at most {self.positions} with its answer: use a shorter text",
                "context_length_exceeded",
            )
        return ids

    def _new_tokens(self, request: GenerationRequest, prompt_tokens: int) -> int:
        """Return the most tokens that a sequence may generate.

        A request that does not say gets 16 for a completion, as in OpenAI's API, and all that the limits allow for a chat.

        Args:
            request: The request.
            prompt_tokens: Tokens of the prompt, which take positions of the model, too.

        Raises:
            ApiError: It asks for less than 1, or more than the server's or the model's limit allows.
        """
        room = None if self.positions is None else self.positions - prompt_tokens
        limits = [limit for limit in (room, self._settings.new_tokens) if limit is not None]
        wanted = request.most_new_tokens
        if wanted is None and not isinstance(request, ChatRequest):
            wanted = min([_DEFAULT_NEW_TOKENS, *limits])
        if wanted is None:
            return min(limits, default=4096)  # a chat with a model that has no limit of positions
        if wanted < 1:
            raise ApiError(400, f"max_tokens is 1 or more, got {wanted}: ask for at least one token", param="max_tokens")
        if limits and wanted > min(limits):
            raise ApiError(
                400,
                f"max_tokens is {min(limits)} at most after a prompt of {prompt_tokens} tokens, got {wanted}: ask for fewer",
                "context_length_exceeded",
                "max_tokens",
            )
        return wanted

    # The answer, on the event loop

    async def _answer(self, request: GenerationRequest, format: CompletionFormat, receive: Receive) -> Response:
        """Prepare a request, submit it to the engine, and return its response once the first token is there.

        Args:
            request: The request.
            format: The JSON of the endpoint.
            receive: ASGI's, by which a client that disconnects is noticed; its request is cancelled then, at any point.

        Raises:
            ApiError: The request cannot be answered, or the engine has failed before the first token.
        """
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options needs stream: set stream to true, or leave it out", param="stream_options")
        engine_request = Request(time.monotonic() + self._settings.seconds)
        headers = {"halfbyte-ignored": ", ".join(request.ignored)[:1000]} if request.ignored else {}
        count = (request.n or 1) * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
        if count > self._settings.choices:
            raise ApiError(400, f"a request has {self._settings.choices} sequences at most, got {count}: ask several times", param="n")
        async with watching(receive, engine_request.cancel):
            with self.engine.admit(engine_request, count):
                prepared = await self._prepared(request, engine_request)
            if engine_request.cancelled:  # the client has disconnected and reads no response; 499 is for the log
                return Response(status_code=499)
            try:
                await engine_request.started()
                if request.stream:
                    with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
                    events = self._events(prepared, format, request, with_usage)
                    # It notices a disconnection itself, as it is sent after this block. When the request's time is over, the engine
                    # fails it, which is the stream's last event; a client that has not read this within a second is cut off.
                    return EventStream(events, engine_request.cancel, self._settings.seconds + 1, _ascii(headers))
                return await self._whole(prepared, format, request, _ascii(headers))
            except BaseException:  # also asyncio.CancelledError: the engine must not decode for a request without a response
                engine_request.cancel()
                raise

    async def _prepared(self, request: GenerationRequest, engine_request: Request) -> _Prepared:
        """Return what `_prepare` does; its errors are those of the client."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, partial(self._prepare, request, engine_request))
        except ArgumentError as e:
            raise ApiError(400, str(e), "invalid_value") from e
        except HalfbyteError as e:  # of the model's template or tokenizer
            raise ApiError(400, str(e), "unsupported_value") from e

    def _shown(self, request: GenerationRequest, update: Update) -> list[Choice] | None:
        """Return the new tokens whose log probabilities the response lists; None if the request asks for none.

        The end-of-sequence token is left out, as the text of the answer has no place for it.
        """
        if request.most_likely is None:
            return None
        ends = update.finish_reason == "stop" and update.choices and update.choices[-1].id in self._model.tokenizer.eos_ids
        return update.choices[:-1] if ends else update.choices

    async def _events(
        self, prepared: _Prepared, format: CompletionFormat, request: GenerationRequest, with_usage: bool
    ) -> AsyncIterator[bytes]:
        """Yield the server-sent events of a streamed answer.

        Each sequence has a first chunk (the role, for a chat), the echo, chunks of new text, one of tool calls, and a last one with its
        finish_reason; chunks of several sequences are interleaved. Then come the usage, if asked for, and [DONE], or an error alone.
        """
        engine_request = prepared.engine_request
        answers = [Answer(prepared.names, prepared.most_calls) for _ in engine_request.jobs]
        empty = {"usage": None} if with_usage else {}  # OpenAI's API: null in all chunks but the last

        def chunk(choice: dict[str, object]) -> bytes:
            return format.chunk([choice], **empty)

        def delta(index: int, text: str, choices: list[Choice] | None) -> bytes:
            if choices is None:
                return format.text_chunk(index, text, **empty)
            return chunk(format.delta(index, text, choices, None, []))

        for index, echo in enumerate(prepared.echoes):
            if (choice := format.first(index)) is not None:
                yield chunk(choice)
            if echo:
                yield delta(index, echo, None)
        try:
            async for update in engine_request.updates():
                text, calls = answers[update.sequence].push(update.text), Calls()
                choices = self._shown(request, update)
                if update.finish_reason is not None:
                    rest, calls = answers[update.sequence].finish()  # text that might have become a tool call
                    text += rest
                    if text or choices:
                        yield delta(update.sequence, text, choices)
                    if calls:
                        yield chunk(format.delta(update.sequence, "", None, None, calls))
                    # `calls` sets the finish_reason "tool_calls"; the calls themselves are in the chunk before.
                    last = format.delta(update.sequence, "", None, update.finish_reason, calls)
                    if isinstance(changes := last.get("delta"), dict):
                        changes.pop("tool_calls", None)
                    yield chunk(last)
                elif text or choices:
                    yield delta(update.sequence, text, choices)
        except ApiError as e:  # the status 200 has been sent
            yield event(e.document())
            return
        if engine_request.cancelled:
            return
        if with_usage:
            yield format.chunk([], usage=usage(engine_request, prepared.prompt_tokens))
        yield DONE

    async def _whole(self, prepared: _Prepared, format: CompletionFormat, request: GenerationRequest, headers: dict[str, str]) -> Response:
        """Wait for all sequences and return one JSON document.

        Raises:
            ApiError: The engine has failed, or the time of the request is over.
        """
        engine_request = prepared.engine_request
        texts = list(prepared.echoes)
        reasons: list[str | None] = [None for _ in engine_request.jobs]
        tokens: list[list[Choice]] = [[] for _ in engine_request.jobs]
        answers: list[str] = ["" for _ in engine_request.jobs]
        async for update in engine_request.updates():
            answers[update.sequence] += update.text
            tokens[update.sequence] += self._shown(request, update) or []
            reasons[update.sequence] = update.finish_reason or reasons[update.sequence]
        if engine_request.cancelled:
            return Response(status_code=499)
        choices = []
        for index, reason in enumerate(reasons):
            answer = Answer(prepared.names, prepared.most_calls)
            text = answer.push(answers[index])
            rest, calls = answer.finish()
            logprobs = tokens[index] if request.most_likely is not None else None
            choices.append(format.whole(index, texts[index] + text + rest, logprobs, reason, calls))
        return json_reply(format.document(choices, usage(engine_request, prepared.prompt_tokens), chunk=False), headers=headers)


def _schema(format: ResponseFormat | None) -> dict[str, object] | None:
    """Return the JSON schema that response_format asks for; None: any text.

    Raises:
        ApiError: It is of type json_schema without a schema.
    """
    match format:
        case None:
            return None
        case ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object"):
            return {"type": "object"}
        case ResponseFormat(json_schema=None):
            raise ApiError(400, "response_format of type json_schema has a json_schema: add it", param="response_format.json_schema")
        case ResponseFormat(json_schema=named):
            schema = named.schema_ if named is not None else True
            # JSON Schema has booleans, too: true allows any value, as {} does, and false none.
            return schema if isinstance(schema, dict) else ({} if schema else {"not": {}})


def _ascii(headers: dict[str, str]) -> dict[str, str]:
    """Replace characters that HTTP headers may not have: `halfbyte-ignored` repeats names of fields that the client chose."""
    return {name: "".join(c if " " <= c <= "~" else "?" for c in value) for name, value in headers.items()}
