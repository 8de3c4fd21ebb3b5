"""Prompts on a GPU: rows behind their tokens, and several side by side; in torch's operations on a CPU, as in `test_lower_gpu.py`."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("transformers")

from test_lower_gpu import SLOTS, TOLERANCE, _read, assert_close, both, graphs, ids_of, models  # noqa: F401

from halfbyte.decoder import lower_gpu
from halfbyte.decoder.cache import Cache, Slots
from halfbyte.language.generate import Batch, run
from halfbyte.language.sampling.sampler import Sampling


@pytest.mark.parametrize("int8", [False, True])
def test_prompts_are_read_in_few_numbers_of_rows(int8: bool, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Rows behind the last token change nothing, and lie behind the sequence in the cache, whose window moves in between."""
    cpu, gpu = models("Gemma3DecoderLayer")
    name, read = ("prefill_with" if int8 else "prefill"), set[int]()
    run = getattr(lower_gpu, name)

    def counted(layer: Any, x: Tensor, *others: Any) -> Any:
        read.add(x.shape[1])
        return run(layer, x, *others)

    monkeypatch.setattr(lower_gpu, name, counted)
    for lengths in ((1, 3, 5, 12), (9, 7, 2), (60, 11), (14, 31, 1, 3)):
        caches, ids = [Cache(model.spec, int8=int8, where=model.where) for model in (cpu, gpu)], ids_of(90)
        for length in lengths:
            found = [model.prefill(ids[:length], cache, every=True) for model, cache in zip((cpu, gpu), caches, strict=True)]
            assert_close(found[1], found[0], TOLERANCE[int8])
            ids = ids[length:]
        assert caches[0].length == caches[1].length == sum(lengths)
    assert read == {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", [*SLOTS, "GptOssDecoderLayer", "Qwen2MoeDecoderLayer"])
def test_prompts_that_are_read_together(kind: str, int8: bool, models: Any) -> None:  # noqa: F811
    """Prompts of different lengths beside one that runs: their logits, and those of tokens after them in slots."""
    cpu, gpu = models(kind)
    texts = [ids_of(count, seed) for seed, count in enumerate((11, 5, 1, 30, 9))]
    slots = Slots(gpu.spec, 6, int8=int8, where=gpu.where)
    slots.join(_read(gpu, texts[0], int8=int8))
    cache = Cache(gpu.spec, 4, int8=int8, most=32, where=gpu.where)
    for found, text in zip(gpu.prefill_together(texts[1:], cache), texts[1:], strict=True):
        assert_close(found, cpu.prefill(text, Cache(cpu.spec, int8=int8)), TOLERANCE[int8])
    slots.join(cache, [len(text) for text in texts[1:]])
    for step in range(12):
        for index, text in enumerate(texts):
            text.append(3 + (5 * index + step) % 80)
        logits = gpu.decode([text[-1] for text in texts], slots)
        for text, found in zip(texts, logits, strict=True):
            assert_close(found, cpu.decode(text[-1:], _read(cpu, text[:-1], int8=int8))[0], TOLERANCE[int8])


@pytest.mark.parametrize("prefix_bytes", [0, 1 << 20])
def test_a_batch_reads_short_prompts_together(prefix_bytes: int, both: Any, graphs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    cpu, gpu, tokenizer = both
    sampling, read, together = Sampling(max_new_tokens=6, ignore_eos=True), [], gpu.prefill_together

    def counted(prompts: list[list[int]], cache: Cache) -> Tensor:
        read.append([len(prompt) for prompt in prompts])
        if len(read) == 2:
            raise RuntimeError("a kernel has failed")
        return together(prompts, cache)  # type: ignore[no-any-return]

    monkeypatch.setattr(gpu, "prefill_together", counted)
    prompts = [ids_of(count, count) for count in (5, 7, 100, 6, 9, 3, 4)]
    monkeypatch.setattr(gpu, "prefill_chunk", 128)
    found = []
    for model in (cpu, gpu):
        batch = Batch(model, tokenizer, slots=6, prefix_bytes=prefix_bytes)
        started = [batch.submit(prompt, sampling) for prompt in prompts]
        if model is gpu:
            with pytest.raises(RuntimeError, match="a kernel has failed"):
                list(iter(batch.step, None))
            assert batch.failed == started[3:5]
        for _ in run(batch, started):
            pass
        found.append([one.ids for one in started])
    assert found[0] == found[1]
    assert read[:2] == [[5, 7], [6, 9]], "the prompt of 100 tokens is read alone: with others, each would have as many rows"
    batch = Batch(gpu, tokenizer, slots=6, prefix_bytes=prefix_bytes)
    running, _ = batch.submit(prompts[0], sampling), batch.step()
    batch.submit(ids_of(100, 3) + ids_of(25, 4), Sampling(max_new_tokens=2, ignore_eos=True))
    monkeypatch.setattr(gpu, "prefill_chunk", 64)
    batch.step()
    assert batch._prefill is not None
    monkeypatch.setattr(gpu, "decode_tokens", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.step()
    assert not batch.failed, "a step of other sequences failed, not the prompt that is being read"
    monkeypatch.undo()
    assert running.finish_reason is None
    batch = Batch(gpu, tokenizer, slots=6, prefix_bytes=prefix_bytes)
    monkeypatch.setattr(gpu, "prefill_together", counted)
    read.clear()
    first = batch.submit(prompts[0], sampling)
    while batch.running:
        batch.step()
    again = [batch.submit([*prompts[0], 5], sampling) for _ in range(2)]
    while batch.running:
        batch.step()
    assert first.cached_tokens == 0
    assert again[0].cached_tokens == 5, "a prefix that is cached is not read again"
    assert not read
