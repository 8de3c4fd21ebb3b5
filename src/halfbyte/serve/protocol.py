"""Requests of OpenAI's API, as pydantic models. What a field means: https://platform.openai.com/docs/api-reference.

A field that would change the answer and is not supported is refused; any other unknown one is ignored, and named in the response header
`halfbyte-ignored`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Json, StrictBool, StrictInt, StrictStr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from halfbyte.language.sampling.sampler import Sampling
from halfbyte.serve.replies import ApiError

_NO_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}  # of OpenAI's own service
_REFUSED = {"suffix", "functions", "function_call", "audio", "modalities", "prediction", "web_search_options"}
# Extensions by vLLM's, llama.cpp's and Cohere's servers: without them, the answer is not what was asked for.
_REFUSED |= {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar", "json_schema"}
_REFUSED |= {"stop_token_ids", "min_tokens", "bad_words", "prompt_logprobs", "use_beam_search", "allowed_token_ids", "logprob_token_ids"}
_REFUSED |= {"echo", "continue_final_message", "documents", "chat_template", "prompt_embeds", "include_stop_str_in_output"}
_REFUSED |= {"return_token_ids", "return_tokens_as_token_ids", "thinking_token_budget", "truncate_prompt_tokens", "max_tokens_per_doc"}
_REFUSED |= {"n_predict", "repeat_penalty", "typical_p", "mirostat"}
# Values that clients send as defaults, and that do not change an answer, besides None, 0, False and empty ones.
_NEUTRAL = {"modalities": ["text"], "n_predict": -1, "repeat_penalty": 1.0, "typical_p": 1.0}
_NAMES_HERE = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_REFUSED_IF_FALSE = {"skip_special_tokens", "add_generation_prompt"}

TokenIds = Annotated[list[StrictInt], Field(min_length=1)]


class ApiRequest(BaseModel):
    """The fields of all requests. Unknown fields are kept, in `model_extra`, to be refused or named."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: StrictStr | None = None

    @property
    def ignored(self) -> list[str]:
        """Names of unknown fields, which are ignored; those that only OpenAI's own service has a use for are not listed."""
        return sorted(name for name in self.model_extra or {} if name not in _NO_EFFECT)


class StreamOptions(BaseModel):
    """Whether the last chunk of a stream has the usage."""

    include_usage: StrictBool | None = None


class JsonSchema(BaseModel):
    """A JSON schema, and the name that clients give it, which has no effect."""

    name: StrictStr = "schema"
    schema_: dict[str, object] | StrictBool = Field(default=True, alias="schema")


class ResponseFormat(BaseModel):
    """The form of an answer: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(ApiRequest):
    """The fields of requests for text. None: the server's, or the model's, default."""

    max_tokens: StrictInt | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: StrictInt | None = None
    min_p: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    logit_bias: dict[str, FiniteFloat] | None = None
    seed: StrictInt | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=16)] | None = None
    n: Annotated[StrictInt, Field(ge=1)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: StrictBool | None = None
    ignore_eos: StrictBool | None = None

    @property
    def most_new_tokens(self) -> int | None:
        """Tokens of an answer that the request allows, at most; None: it does not say."""
        return self.max_tokens

    @property
    def most_likely(self) -> int | None:
        """Number of most likely tokens with log probabilities; None: no log probabilities."""
        raise NotImplementedError

    def sampling(self, defaults: dict[str, object], new_tokens: int, index: int) -> Sampling:
        """Return the settings of one of the request's sequences.

        Args:
            defaults: Settings for fields that the request leaves out; a temperature is among them.
            new_tokens: Tokens of the answer, at most.
            index: Number of the sequence, which is added to the seed: sequences of one request differ.

        Raises:
            ArgumentError: A value is out of its range.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        settings = {**defaults, **{name: value for name in names if (value := getattr(self, name)) is not None}}
        if settings.get("top_k") in (-1, 0):  # as other servers spell "all tokens"
            del settings["top_k"]
        Sampling(**{**settings, "temperature": settings["temperature"] or 1.0})  # what has no effect is checked, too
        if not settings["temperature"]:
            settings = {name: value for name, value in settings.items() if name not in ("top_p", "top_k", "min_p")}
        return Sampling(
            **settings,
            seed=None if self.seed is None else self.seed + index,
            max_new_tokens=new_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop or (),
            logprobs=self.most_likely,
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: StrictStr | TokenIds | Annotated[list[StrictStr], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool | None = None
    best_of: StrictInt | None = None

    @property
    def most_likely(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class Part(BaseModel):
    """A part of a message's content: text alone is supported."""

    type: Literal["text"]
    text: StrictStr


class FunctionCall(BaseModel):
    """A function and its arguments, JSON as a text."""

    name: StrictStr
    arguments: StrictStr = "{}"


class ToolCall(BaseModel):
    """A call that an earlier answer asked for."""

    id: StrictStr | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[Part] | None = None
    name: StrictStr | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: StrictStr | None = None


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[StrictStr, Field(min_length=1, max_length=256)]
    description: StrictStr | None = None
    parameters: dict[str, object] | None = None


class Tool(BaseModel):
    """A function that the model may call, as OpenAI's API wraps it."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(BaseModel):
    """The name of a function."""

    name: StrictStr


class NamedTool(BaseModel):
    """The tool that has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class GenerationConfig(BaseModel):
    """Settings as `transformers chat` sends them, a JSON document in a text."""

    max_new_tokens: StrictInt | None = None
    do_sample: StrictBool | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: StrictInt | None = None
    min_p: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None

    def fields(self) -> dict[str, object]:
        """Return the settings as fields of a request; without sampling, temperature is 0."""
        fields: dict[str, object] = self.model_dump(exclude_none=True, exclude={"max_new_tokens", "do_sample"})
        if self.max_new_tokens is not None:
            fields["max_tokens"] = self.max_new_tokens
        return {**fields, "temperature": 0.0} if self.do_sample is False else fields


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    generation_config: Json[GenerationConfig] | None = None

    @model_validator(mode="after")
    def _take_generation_config(self) -> Self:
        """Take from `generation_config` what the request has no field of its own for."""
        for name, value in self.generation_config.fields().items() if self.generation_config is not None else ():
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self

    @property
    def most_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_likely(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class LoadRequest(ApiRequest):
    """POST /load_model, of transformers' server"""


class EmbeddingRequest(ApiRequest):
    """POST /v1/embeddings"""

    input: StrictStr | TokenIds | Annotated[list[StrictStr], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: StrictInt | None = None


class Document(BaseModel):
    """A document, as some clients write it."""

    text: StrictStr


class RerankRequest(ApiRequest):
    """POST /v1/rerank, of Cohere's and Jina's APIs"""

    query: StrictStr
    documents: Annotated[list[StrictStr | Document], Field(min_length=1)]
    top_n: Annotated[StrictInt, Field(ge=1)] | None = None
    return_documents: StrictBool | None = None


R = TypeVar("R", bound=ApiRequest)


def parse(kind: type[R], body: bytes) -> R:
    """Parse the body of a request.

    Args:
        kind: The request's model.
        body: JSON.

    Raises:
        ApiError: It is no JSON object, or a field has a wrong type or is not supported.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as e:
        raise _invalid(e) from e
    for name, value in (request.model_extra or {}).items():
        is_refused = value is False if name in _REFUSED_IF_FALSE else name in _REFUSED and value
        if is_refused and value != _NEUTRAL.get(name):
            remedy = f"use {_NAMES_HERE[name]}" if _NAMES_HERE.get(name) in kind.model_fields else "leave it out"
            raise ApiError(400, f"{name} is not supported here: {remedy}", "unsupported_parameter", name)
    return request


def _invalid(error: ValidationError) -> ApiError:
    """Return the error for the first invalid field; of a union's alternatives that for the one that matches farthest."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = max((each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]), key=_reach)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON ({first['msg']}): send one JSON object", "invalid_json")
    place = [str(part) for part in first["loc"] if not _is_alternative(part)]
    param = ".".join(place)[:200] or None
    what = f"{param}: {first['msg']}" if param else f"the body is a JSON object: {first['msg']}"
    return ApiError(400, f"{what}; see the API's reference for what is allowed", "invalid_type", param)


def _reach(error: ErrorDetails) -> tuple[int, bool, list[int]]:
    """Return the sort key of an error: depth of its field, whether the type is right, indices in lists."""
    place = [part for part in error["loc"] if not _is_alternative(part)]
    return len(place), not error["type"].endswith("_type"), [part for part in place if isinstance(part, int)]


def _is_alternative(part: int | str) -> bool:
    """Return whether a part of a field's place is not a name in the request, but pydantic's for an alternative of a union."""
    models = (NamedTool.__name__, Document.__name__)
    return isinstance(part, str) and (not part.isidentifier() or part in ("str", "int", "bool", *models))
