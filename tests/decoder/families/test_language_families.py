"""Decoders computed without transformers say what transformers' own code says, for every family, from a halfbyte folder; so do their
programs, whose kernels are those that dispatch chooses."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from program_reference import interpret
from tiny_decoders import CASES, vary_
from transformers import PreTrainedTokenizerBase  # noqa: F401 - transformers is the oracle

import halfbyte as hb
from halfbyte.decoder import kernels_gpu, lower_cpu
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.families import FAMILIES
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.decoder.program import TORCH, Lowered, program_of
from halfbyte.dispatch import choose as dispatch
from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.gpu import packs_code_pairs
from halfbyte.kernels.cpu.step_sequence import StepSequence
from halfbyte.kernels.problem import Problem
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.machine import GPUS
from halfbyte.ops.transformer.weights import Weight

SHARED = "Gemma4TextDecoderLayer, shared keys"
TOKENS = 24  # longer than windows of 5, 6, 7 and 9 tokens
# Relative to the norm of all logits. float: float32 sums in another order in two to four layers. int8: an activation that lies between
# two codes may get the other one, which moves an output by 1/127 of the largest activation of a block times a weight.
TOLERANCES = {"float": 1e-4, "int8": 0.03}
LAYERS = {family.layer_class: family for family in FAMILIES.values()}


Opened = tuple[Any, CpuModel]


@functools.cache
def causal_cases() -> list[str]:
    return [case for case in CASES if LAYERS[case.partition(",")[0]].model_class is not None]


def make(case: str, compute: str, folder: Path) -> Opened:
    torch.manual_seed(7)
    model = CASES[case]().eval()
    vary_(model)
    hb.quantize_(model, hb.Config("q8_0", compute=compute))
    hb.save(model, folder)
    config, tensors = open_checkpoint(folder)
    return model, CpuModel(build_spec(config, tensors))


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A model of transformers, and the same without it."""
    case, compute = request.param
    return make(case, compute, tmp_path_factory.mktemp("family") / "model")


def families(*computes: str, only: Sequence[str] = ()) -> pytest.MarkDecorator:
    params = [(case, compute) for compute in computes for case in only or causal_cases()]
    return pytest.mark.parametrize("opened", params, indirect=True, scope="module", ids=map(" ".join, params))


def test_every_family_is_tested() -> None:
    assert {case.partition(",")[0] for case in causal_cases()} == {
        name for name, family in LAYERS.items() if family.model_class is not None
    }


@families("float", "int8")
def test_logits_are_those_of_transformers(opened: Opened, request: pytest.FixtureRequest) -> None:
    model, actual = opened
    ids = torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids).logits[0].float()
    whole = actual.prefill(ids[0].tolist(), Cache(actual.spec), every=True)
    cache, steps = Cache(actual.spec), []
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 15), *((i, i + 1) for i in range(15, TOKENS))):
        some = ids[0, start:stop].tolist()
        steps.append(actual.decode(some, cache) if stop == start + 1 else actual.prefill(some, cache, every=True))
    assert cache.length == TOKENS
    for found in (whole, torch.cat(steps)):
        assert torch.isfinite(found).all()
        assert float((found - expected).norm() / expected.norm()) < TOLERANCES[request.node.callspec.params["opened"][1]]


@families("float", only=["Gemma4TextDecoderLayer", SHARED, "PhiDecoderLayer", "GptOssDecoderLayer"])
def test_a_cache_in_8_bits_changes_little(opened: Opened) -> None:
    """Keys and values are within 1/254 of the largest of their blocks of 32: some four standard deviations, so 1.6 % of a typical one at
    most, of either sign, in two to four layers."""
    model, actual = opened
    ids = torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids).logits[0].float()
    cache, found = Cache(actual.spec, int8=True), []
    for start, stop in ((0, 15), *((i, i + 1) for i in range(15, TOKENS))):
        some = ids[0, start:stop].tolist()
        found.append(actual.decode(some, cache) if stop == start + 1 else actual.prefill(some, cache, every=True))
    assert 1e-5 < float((torch.cat(found) - expected).norm() / expected.norm()) < 0.06


@families("float", only=[SHARED, "Gemma3DecoderLayer"])
def test_the_last_logits_of_a_prompt_are_those_of_all(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that reuse keys and values compute no more than these."""
    monkeypatch.setattr(lower_cpu, "_CHUNK", 9)
    actual = opened[1]
    ids = torch.randint(3, 90, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    caches = Cache(actual.spec), Cache(actual.spec)
    whole, last = actual.prefill(ids, caches[0], every=True)[-1], actual.prefill(ids, caches[1])
    assert float((last - whole).norm() / whole.norm()) < TOLERANCES["float"]
    after = [actual.decode([7], cache)[0] for cache in caches]
    assert float((after[1] - after[0]).norm() / after[0].norm()) < TOLERANCES["float"]


def test_only_tokens_that_are_wanted_take_layers_that_reuse_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actual, real, tokens = make(SHARED, "float", tmp_path / "model")[1], lower_cpu.run_layers, list[int]()
    monkeypatch.setattr(lower_cpu, "run_layers", lambda layers, x, *more: (tokens.append(x.shape[1]), real(layers, x, *more))[1])
    monkeypatch.setattr(lower_cpu, "_CHUNK", 9)
    actual.prefill(list(range(3, 21)), Cache(actual.spec))
    assert tokens == [9, 9, 9, 9, 1, 1]


@pytest.mark.parametrize("skip", [["lm_head"], ["lm_head", "model.embed_tokens"]])
def test_a_bias_of_an_output_embedding_in_floating_point(skip: list[str], tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = CASES["PhiDecoderLayer"]().eval()
    vary_(model)
    hb.save(hb.quantize_(model, hb.Config("q8_0", compute="float", skip=skip)), tmp_path / "m")
    actual, ids = CpuModel(build_spec(*open_checkpoint(tmp_path / "m"))), list(range(3, 20))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    found = actual.prefill(ids[:-1], cache := Cache(actual.spec), every=True)
    for logits in (torch.cat((found, actual.decode(ids[-1:], cache))), interpret(program_of(actual.spec), torch.tensor(ids))):
        assert float((logits - expected).norm() / expected.norm()) < TOLERANCES["float"]


# Programs


def linear_layers(kernels: Sequence[Lowered]) -> Iterator[tuple[Lowered, Weight]]:
    for lowered in kernels:
        if lowered.op.kind in ("linear", "experts"):
            assert isinstance(lowered.op.part, Weight)
            yield lowered, lowered.op.part


@families("float")
def test_the_program_computes_what_transformers_does(opened: Opened) -> None:
    model, actual = opened
    ids = torch.randint(3, 90, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = model(ids[None]).logits[0].float(), interpret(program_of(actual.spec), ids)
    assert float((found - expected).norm() / expected.norm()) < TOLERANCES["float"]


@families("float")
def test_ops_read_what_was_computed_and_everything_is_read(opened: Opened) -> None:
    for layer, ops in program_of(opened[1].spec).scopes():
        before = {"ids", "x", "per_layer_input"}
        for op in ops:
            assert op.name not in before
            assert {*op.reads} <= before
            assert op.device == "cpu"
            before.add(op.name)
        unread = before - {name for op in ops for name in op.reads} - {"ids", "x", "per_layer_input"}
        assert unread == {ops[-1].name}
        last = "mlp_residual" if opened[1].spec.per_layer_inputs is None else "per_layer_residual"
        assert layer is None or ops[-1].name == last


@families("float")
def test_kernels_on_a_cpu_are_those_of_the_model(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[tuple[str, int, int, str]] = set()

    def spy(problem: Problem, **settings: Any) -> Any:
        kernel = real(problem, **settings)
        taken.add((str(problem.format), problem.n, problem.k, kernel.inner))
        return kernel

    real = dispatch.cpu_kernel
    monkeypatch.setattr(dispatch, "cpu_kernel", spy)
    CpuModel(opened[1].spec)
    kernels = lower_cpu.decode_kernels(program_of(opened[1].spec))
    assert {(part.packed.name, *part.packed.shape[-2:], lowered.kernel) for lowered, part in linear_layers(kernels)} == taken
    assert all(lowered.call == "decode step" and lowered.kernel != TORCH for lowered in kernels)


@families("float")
def test_steps_of_a_token_on_a_cpu_are_those_of_the_native_call(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences: list[Any] = []
    run, (_, actual) = StepSequence.run, opened
    monkeypatch.setattr(StepSequence, "run", lambda self: (sequences.append(self), run(self))[1])
    actual.decode([5], Cache(actual.spec))
    kernels = lower_cpu.decode_kernels(program_of(actual.spec))
    unfused = [lowered.op for lowered in kernels if lowered.fused_into is None]
    # Logits of a router and the choice; norms of queries and of keys; rows of a table and their factor.
    in_two = [op for op in unfused if op.kind in ("router", "qk_norm") or (op.kind == "embedding" and op.setting("multiplier") is not None)]
    (sequence,) = sequences
    assert len(sequence._blocks) == len(unfused) + len(in_two)
    by_place = {(lowered.op.layer, lowered.op.name): lowered for lowered in kernels}
    assert all(by_place[one.op.layer, one.fused_into].kernel for one in kernels if one.fused_into is not None)


@families("float")
def test_kernels_on_a_gpu_are_those_that_dispatch_chooses(opened: Opened) -> None:
    pytest.importorskip("triton")
    here, program = GPUS["sm_90"], program_of(opened[1].spec, "cuda")
    kernels = kernels_gpu.decode_kernels(program, here, rows=3)
    by_place = {(lowered.op.layer, lowered.op.name): lowered for lowered in kernels}
    capped = {op.layer for op in program.ops if op.kind == "attention" and op.setting("softcap") is not None}
    for lowered, part in linear_layers(kernels):
        op, (*stack, n, k) = lowered.op, part.packed.shape
        if stack:
            rows = 3 * by_place[op.layer, "router"].op.setting("top_k")
            problem = Problem("grouped_linear", rows, n, k, part.packed.format, torch.bfloat16, experts=stack[0])
        else:
            problem = Problem(
                "linear", 3, n, k, part.packed.format, torch.bfloat16, paired=packs_code_pairs(part.packed.format, (n, k), here)
            )
        taken = choose(problem, here).taken
        assert taken is not None
        fused = [other for other in kernels if (other.op.layer, other.fused_into) == (op.layer, op.name)]
        assert lowered.kernel == ("skinny" if any(other.op.kind == "rms_norm" for other in fused) else taken.candidate.name)
    for lowered in kernels:
        if lowered.fused_into is not None:
            into = by_place[lowered.op.layer, lowered.fused_into]
            assert into.fused_into is None
            assert into.kernel != TORCH
        assert (lowered.kernel == "") == (lowered.fused_into is not None)
        of_attention = lowered.op.kind in ("rope", "attention")  # of these tiny models torch's operations have nothing else in layers
        assert (lowered.kernel == TORCH) == (lowered.op.kind in ("softcap", "logit_scale") or (of_attention and lowered.op.layer in capped))
