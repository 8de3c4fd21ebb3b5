"""The loop that writes tokens says what transformers' own says: on a CPU, and with the steps of a GPU, whose graphs are imitated here."""

from __future__ import annotations

import copy
import functools
import gc
import json
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import make_decoder, make_tokenizer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from halfbyte.errors import ArgumentError
from halfbyte.integrations.transformers import text
from halfbyte.integrations.transformers.generate import generating, graphs
from halfbyte.integrations.transformers.generate.generating import generate_fast
from halfbyte.integrations.transformers.generate.steps import Step, StepArguments
from halfbyte.integrations.transformers.optimize.calls import cache_name
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.integrations.transformers.optimize.replaced import original

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512}


def make(kind: str = "Llama", **settings: Any) -> Any:
    torch.manual_seed(3)
    model = make_decoder(kind, **{**SMALL, "eos_token_id": 7, "pad_token_id": 0, **settings}).eval()
    generate_fast(model)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return make()


class Captured(TorchFunctionMode):
    """Refuses what a capture refuses: to make tensors of Python's numbers, and to wait for the GPU."""

    REFUSED = ("tensor", "as_tensor", "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "equal")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.REFUSED:
            raise RuntimeError(f"{func.__name__} cannot be captured")
        return func(*args, **(kwargs or {}))


class Imitated:
    """A CUDA graph's behaviour without one: a capture runs no operation, a replay runs them again, and Python's part only once."""

    count = 0

    def __init__(self, device: torch.device) -> None:
        self.closed = False
        Imitated.count += 1

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        step = run.__closure__  # what it changes: the arguments and the cache of its step
        assert step is not None
        inputs, owner = (
            next(c.cell_contents for c in step if isinstance(c.cell_contents, kind)) for kind in (StepArguments, graphs.GraphStep)
        )
        self.run, self.cache = run, owner._cache
        tensors = [*_tensors(inputs.values), inputs._index, owner._graph_tokens]
        tensors += [t for layer in graphs.layers_with_states(self.cache) for t in (layer.keys, layer.values, layer.cumulative_length)]
        before = [t.clone() for t in tensors]
        random = torch.get_rng_state()
        with Captured():
            self.found = run()
        torch.set_rng_state(random)
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        self.layers = list(self.cache.layers)
        self.counted = [getattr(layer, "cumulative_length_int", None) for layer in self.layers]
        return self.found

    def replay(self) -> None:
        assert not self.closed
        assert all(a is b for a, b in zip(self.layers, self.cache.layers, strict=True))
        now = [getattr(layer, "cumulative_length_int", None) for layer in self.layers]
        for layer, n in zip(self.layers, self.counted, strict=True):
            if n is not None:
                layer.cumulative_length_int = n - 1  # as the capture saw it
        found = self.run()
        if found is not self.found:
            self.found.copy_(found)
        for layer, n in zip(self.layers, now, strict=True):
            if n is not None:
                layer.cumulative_length_int = n

    def close(self) -> None:
        self.closed = True


def _tensors(values: dict[str, Any]) -> Iterator[Tensor]:
    for value in values.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value


@pytest.fixture(params=["steps", "graphs"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the steps of a CPU, and of a GPU."""
    if request.param == "graphs":
        monkeypatch.setattr(generating, "_on_gpu", lambda device: True)
        monkeypatch.setattr(graphs, "CapturedGraph", Imitated)
        monkeypatch.setattr(Imitated, "count", 0)
    return str(request.param)


@contextmanager
def unpatched(model: Any) -> Iterator[Any]:
    fast = model.__class__
    model.__class__ = original(model)
    try:
        yield model
    finally:
        model.__class__ = fast


def test_a_prompt_without_tokens(model: Any) -> None:
    for shape in ((1, 0), (0, 3)):
        with pytest.raises(ArgumentError, match=rf"the prompt has no tokens, got input_ids \[{shape[0]}, {shape[1]}\]: write some text"):
            model.generate(torch.zeros(shape, dtype=torch.int64), max_new_tokens=3)
    embedded = model.get_input_embeddings()(torch.tensor([[5, 6]]))
    told = model.generate(torch.zeros((1, 0), dtype=torch.int64), inputs_embeds=embedded, max_new_tokens=3)
    assert told.tolist() == model.generate(torch.tensor([[5, 6]]), max_new_tokens=3)[:, 2:].tolist()


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.tolist())

    def end(self) -> None:
        self.pieces.append("end")


def both(model: Any, settings: Callable[[], dict[str, Any]] | dict[str, Any], seed: int = 5) -> tuple[Any, Any]:
    """What the loop of this package returns, and transformers' own, which hears the same."""
    answers, heard = [], []
    for is_custom in (False, True):
        asked = settings() if callable(settings) else dict(settings)
        if len(asked["input_ids"]) == 1:
            asked["streamer"] = Heard()
        torch.manual_seed(seed)
        if is_custom:
            with unpatched(model):
                answers.append(model.generate(**asked))
        else:
            answers.append(model.generate(**asked))
        heard.append(asked["streamer"].pieces if "streamer" in asked else None)
    assert heard[0] == heard[1]
    return answers[0], answers[1]


def prompt(*lengths: int) -> dict[str, Tensor]:
    """Random tokens, with padding on the left."""
    longest = max(lengths)
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.int64), torch.zeros(len(lengths), longest, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(10, 99, (length,), generator=torch.Generator().manual_seed(length))
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


ASKED = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "hot": {"do_sample": True, "temperature": 5.0, "top_k": 0, "min_p": 0.01},
    "penalty": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "sampled with a penalty": {"do_sample": True, "repetition_penalty": 1.5},
    "at least": {"min_new_tokens": 9, "eos_token_id": list(range(40))},
    "ends": {"eos_token_id": list(range(12)), "do_sample": True, "temperature": 3.0},
    "no end": {"eos_token_id": None},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "max_length": {"max_new_tokens": None, "max_length": 23},
    "time": {"max_time": 60.0},
    "several of one": {"num_return_sequences": 3, "do_sample": True, "temperature": 2.0, "eos_token_id": list(range(12))},
    "a static cache": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
@pytest.mark.parametrize("lengths", [(9,), (9, 5, 1)])
def test_tokens_are_transformers_own(model: Any, kind: str, lengths: tuple[int, ...], asked: dict[str, Any]) -> None:
    found, expected = both(model, {**prompt(*lengths), "max_new_tokens": 25, **asked})
    assert torch.equal(found, expected)
    if kind == "graphs":
        assert Imitated.count == (found.shape[1] - max(lengths) > 2)


FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 16},
    "Gemma3": {"sliding_window": 16, "head_dim": 16, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Gemma4": {"sliding_window": 16, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 99},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]},
    "Qwen3": {"head_dim": 16},
    "GptOss": {"sliding_window": 16, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPTNeoX": {},
    "Phi3": {},
}


def make_family(family: str) -> Any:
    if family not in ("Gemma3", "Gemma4"):
        return make(family, **FAMILIES[family])
    torch.manual_seed(3)
    settings = {**SMALL, **FAMILIES[family], "vocab_size": 99, "initializer_range": 0.2, "eos_token_id": 7, "pad_token_id": 0}
    config: Any = (Gemma3TextConfig if family == "Gemma3" else Gemma4TextConfig)(**settings)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    generate_fast(model)
    return model


@functools.cache
def shared_family(family: str) -> Any:
    """For tests that do not change the model."""
    return make_family(family)


# Each two of: one prompt or several, a window that is full before or becomes so, a cache of any kind or a static one.
STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}
WINDOWS: list[tuple[tuple[int, ...], dict[str, Any]]] = [((5,), {}), ((30, 5, 13), {}), ((30,), STATIC), ((9, 5, 1), STATIC)]


@pytest.mark.parametrize(("lengths", "more"), WINDOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_windows(kind: str, family: str, lengths: tuple[int, ...], more: dict[str, Any]) -> None:
    """Windows that become full while tokens are written, and those that are full before."""
    found, expected = both(shared_family(family), {**prompt(*lengths), "max_new_tokens": 20, "eos_token_id": None, **more})
    assert torch.equal(found, expected)
    if kind == "graphs":
        assert Imitated.count == 1 + (max(lengths) < 16 and "sliding_window" in FAMILIES[family])


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3", "Gemma4"])
@pytest.mark.parametrize("ends", [False, True])
def test_a_cache_of_the_caller(kind: str, family: str, ends: bool) -> None:
    """It has what was read and written but the last token, and another call goes on with it."""
    model = make() if family == "Llama" else make_family(family)
    cache, asked = DynamicCache(config=model.config), prompt(9)
    with unpatched(model):
        free = model.generate(**asked, max_new_tokens=30, eos_token_id=None)
    eos = int(free[0, 20]) if ends else None
    first = model.generate(**asked, max_new_tokens=20, past_key_values=cache, eos_token_id=eos)
    assert cache.get_seq_length() == first.shape[1] - 1
    longer = {"input_ids": torch.cat((first, torch.tensor([[11, 12, 13]])), 1)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    settings = {"max_new_tokens": 30, "eos_token_id": None}
    found = model.generate(**longer, past_key_values=cache, **settings)
    assert torch.equal(found, model.generate(**longer, **settings))
    with unpatched(model):
        assert torch.equal(found, model.generate(**longer, **settings))


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_conversation(kind: str, family: str) -> None:
    """Each turn reads what is new; with graphs all of it, into a cache of fixed size."""
    model, tokenizer = make() if family == "Llama" else make_family(family), make_tokenizer()
    cache, ids = generating.new_cache(model), prompt(9)["input_ids"]
    assert (cache is None) == (kind == "graphs")
    for round_index in range(3):
        eos = None if round_index == 1 else [*range(0, 99, 3)]
        settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": eos}
        done = text.generate(model, tokenizer, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, len, cache=cache, **settings)
        assert done.prompt_tokens == (ids.shape[1] if round_index == 0 or cache is None else 4)
        with unpatched(model):
            assert torch.equal(done.tokens, model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0])
        ids = torch.cat((done.tokens, torch.tensor([11, 12, 13])))[None]
    assert cache is None or cache.get_seq_length() == len(done.tokens) - 1


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_nothing_is_kept(kind: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a cache is free at once, not when garbage is collected."""
    caches: list[Any] = []
    begin = Step.__init__

    def seen(self: Any, model: Any, arguments: dict[str, Any], *args: Any) -> None:
        caches.append(weakref.ref(arguments[cache_name(arguments)]))
        begin(self, model, arguments, *args)

    monkeypatch.setattr(Step, "__init__", seen)
    model = make() if family == "Llama" else make_family(family)
    gc.collect()
    gc.disable()
    try:
        for lengths in ((9,), (9, 4)):
            model.generate(**prompt(*lengths), max_new_tokens=20, eos_token_id=None)
        assert len(caches) == 2
        assert [cache() for cache in caches] == [None, None]
    finally:
        gc.enable()


def test_what_is_returned(model: Any, kind: str) -> None:
    asked = {**prompt(9, 3), "max_new_tokens": 9, "return_dict_in_generate": True}
    found, expected = both(model, asked)
    assert torch.equal(found.sequences, expected.sequences)
    assert int(found.past_key_values.get_seq_length()) == found.sequences.shape[1] - 1
    found, expected = both(model, {**asked, "output_scores": True})
    assert len(found.scores) == len(expected.scores) == 9


class Odd(LogitsProcessor):
    """Writes to the scores, and looks at all that was written."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids[:, -1]] = -1e9
        scores[:, input_ids.shape[1]] += 5
        return scores


class AfterThree(StoppingCriteria):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seen.append(input_ids.tolist())
        return (input_ids[:, -3:] > 30).all(1)


@pytest.mark.parametrize("lengths", [(9,), (9, 5, 1)])
def test_processors_and_criteria_of_the_caller(model: Any, kind: str, lengths: tuple[int, ...]) -> None:
    count: list[AfterThree] = []

    def settings() -> dict[str, Any]:
        count.append(AfterThree())
        return {
            **prompt(*lengths),
            "max_new_tokens": 20,
            "logits_processor": LogitsProcessorList([Odd()]),
            "stopping_criteria": StoppingCriteriaList([count[-1]]),
            "eos_token_id": None,
        }

    found, expected = both(model, settings)
    assert torch.equal(found, expected)
    assert count[0].seen == count[1].seen


def test_stop_strings(model: Any, kind: str) -> None:
    tokenizer = make_tokenizer()
    stop = tokenizer.decode(model.generate(**prompt(9), max_new_tokens=20, eos_token_id=None)[0, 15:17])
    settings = {**prompt(9), "max_new_tokens": 20, "eos_token_id": None, "stop_strings": [stop], "tokenizer": tokenizer}
    found, expected = both(model, settings)
    assert torch.equal(found, expected)
    assert 9 < found.shape[1] < 29


def test_what_is_transformers_own(model: Any, kind: str) -> None:
    """Beams, prompt lookup and calls without a cache are not for this loop; they work as ever."""
    for asked in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"use_cache": False}, {"num_beams": 2, "do_sample": True}):
        found, expected = both(
            model,
            {**prompt(9), "max_new_tokens": 12, **asked, "streamer": None}
            if "num_beams" not in asked
            else lambda asked=asked: {**prompt(9, 9), "max_new_tokens": 12, **asked},
        )
        assert torch.equal(found, expected)


class Stubborn(Imitated):
    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")


def test_what_cannot_be_captured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text goes on, and it is said once."""
    if kind != "graphs":
        pytest.skip("of graphs")
    monkeypatch.setattr(graphs, "CapturedGraph", Stubborn)
    model = make_family("Mistral")
    settings = {**prompt(9, 2), "max_new_tokens": 20}
    with pytest.warns(UserWarning, match="MistralForCausalLM .* as torch cannot capture its step .operation not permitted when"):
        found, expected = both(model, settings)
    assert torch.equal(found, expected)
    found, expected = both(model, settings)
    assert torch.equal(found, expected)


def test_the_model_is_still_itself(model: Any, tmp_path: Path) -> None:
    generate_fast(model)
    assert type(model).__mro__[1] is not type(model).__mro__[0]
    assert type(model).__name__ == "LlamaForCausalLM"
    assert "LlamaForCausalLM" in repr(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    settings = {**prompt(9), "max_new_tokens": 12}
    expected = model.generate(**settings)
    pickled = pickle.loads(pickle.dumps(model))  # noqa: S301
    for other in (copy.deepcopy(model), pickled, replace_forwards_(copy.deepcopy(model))):
        assert type(other) is type(model)
        assert torch.equal(other.generate(**settings), expected)
