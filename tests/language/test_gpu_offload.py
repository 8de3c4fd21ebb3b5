"""Routed experts on the CPU next to a GPU: logits are those of the GPU alone, a step is captured in pieces, memory is as planned."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("transformers")

from language_model import make_tokenizer
from tiny_decoders import CASES, vary_

import halfbyte as hb
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache, Slots
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.decoder.offload import crossing
from halfbyte.decoder.offload.placement import Request, plan_of
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.language.model import LanguageModel

# Relative to the norm of all logits: as of `test_gpu_model.py`.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 8e-2}
KINDS = ["Qwen2MoeDecoderLayer", "GptOssDecoderLayer"]  # with and without a shared expert


def folder_of(kind: str, root: Path) -> Path:
    torch.manual_seed(7)
    model = CASES[kind]().eval()
    vary_(model)
    hb.save(hb.quantize_(model, hb.Config("q8_0", compute="float")), root / "model")
    return root / "model"


def opened(folder: Path, dtype: torch.dtype, experts: int | None, gpu_layers: int | None = None) -> GpuModel:
    config, tensors = open_checkpoint(folder, device=torch.device("cuda", 0), dtype=dtype, offloads=True)
    plan = plan_of(build_spec(config, tensors.sized()), Request(None, 200, experts, gpu_layers, sequences=8), dtype)
    tensors.placement = plan.placement
    return GpuModel(build_spec(config, tensors), "cuda", dtype, plan)


def ids_of(count: int, seed: int = 1) -> list[int]:
    found: list[int] = torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert torch.isfinite(found).all()
    assert float((found - expected).norm() / expected.norm()) < TOLERANCES[dtype]


def graphs_of_equal_steps(one: GpuModel, split: GpuModel, ids: list[int], dtype: torch.dtype) -> int:
    """The CUDA graphs of a decode step of `split`, whose logits of a prompt and of tokens after it are those of `one`."""
    caches = [Cache(model.spec, where=model.where) for model in (one, split)]
    expected, found = (model.prefill(ids, cache, every=True) for model, cache in zip((one, split), caches, strict=True))
    assert_close(found, expected, dtype)
    for token in ids[:5]:
        assert_close(split.decode([token], caches[1]), one.decode([token], caches[0]), dtype)
    (step,) = split._steps.values()
    assert step._graph is not None, split.notes
    return len(step._graph._graphs)


@pytest.mark.parametrize("waits", [False, True], ids=["copies", "waits"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_gpu_alone(
    kind: str, dtype: torch.dtype, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossing, "GPU_WAITS", waits)
    folder, ids = folder_of(kind, tmp_path), ids_of(90)
    one, split = opened(folder, dtype, 0), opened(folder, dtype, -1)
    assert len(split._host) > 0 == len(one._host)
    assert split._host._crossing.waits == waits
    assert (graphs_of_equal_steps(one, split, ids, dtype) == 1) == waits
    slots = [Slots(model.spec, 3, where=model.where) for model in (one, split)]
    for seed in range(3):
        for model, some in zip((one, split), slots, strict=True):
            cache = Cache(model.spec, where=model.where)
            model.prefill(ids_of(5 + 9 * seed, seed), cache)
            some.join(cache)
    for step_index in range(4):
        tokens = ids_of(3, step_index)
        both = [model.decode(tokens, some) for model, some in zip((one, split), slots, strict=True)]
        assert_close(both[1], both[0], dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", [*KINDS, "Qwen3MoeDecoderLayer"])
def test_prompts_whose_experts_cross(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Prompts one after the other, while experts of the last one may still be read."""
    folder = folder_of(kind, tmp_path)
    one, split = opened(folder, dtype, 0), opened(folder, dtype, -1)
    assert split._host._streamed is not None
    for seed, count in enumerate((70, 100, 65, 90)):
        ids = ids_of(count, seed)
        found = [model.prefill(ids, Cache(model.spec, where=model.where), every=True) for model in (one, split)]
        assert_close(found[1], found[0], dtype)


@pytest.mark.parametrize("kind", ["Gemma3DecoderLayer", "LlamaDecoderLayer"])
def test_layers_on_the_cpu(kind: str, tmp_path: Path) -> None:
    """One stretch of launches before the layers on the CPU, and one after them."""
    folder, ids, dtype = folder_of(kind, tmp_path), ids_of(90), torch.float32
    one, split = opened(folder, dtype, None), opened(folder, dtype, None, 1)
    assert graphs_of_equal_steps(one, split, ids, dtype) == 2


def test_greedy_text_and_memory(tmp_path: Path) -> None:
    """Pinned memory and the GPU's are given back with the model; not more than planned is taken."""
    folder = folder_of("Qwen3MoeDecoderLayer", tmp_path)
    make_tokenizer().save_pretrained(folder)
    expected = LanguageModel.open(folder, device="cuda", dtype=torch.float32).generate(ids_of(20), max_new_tokens=30, ignore_eos=True).ids
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = LanguageModel.open(folder, device={"experts": "cpu"}, dtype=torch.float32, context=200)
    assert model.plan is not None
    assert model.generate(ids_of(20), max_new_tokens=30, ignore_eos=True).ids == expected
    assert torch.cuda.max_memory_allocated() - before <= model.plan.gpu_bytes
    assert not [note for note in model.notes if "attention of prompts" not in note]
    pinned = model._model._host._crossing._rows if isinstance(model._model, GpuModel) else {}
    assert all(one.is_pinned() for rows in pinned.values() for one in rows)
    del model, pinned
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 64 << 20  # scratch buffers of kernels stay
