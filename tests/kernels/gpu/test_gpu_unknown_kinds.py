"""As `tests/test_unknown_kinds.py`, of GPU kernels: an unknown kind is an error before a kernel is compiled, or when it is."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from halfbyte.errors import KernelError, UnsupportedError
from halfbyte.formats import spec
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.gpu.conv import tile as conv_tile
from halfbyte.kernels.gpu.experts import routing
from halfbyte.kernels.gpu.hopper import tile as hopper_tile
from halfbyte.kernels.gpu.linear import skinny, skinny_hopper_config
from halfbyte.kernels.gpu.linear.skinny_config import compiled_for
from halfbyte.kernels.gpu.quantize import activations, dequantize, quantize
from halfbyte.kernels.gpu.transformer import attend, gates
from halfbyte.kernels.problem import ConvProblem, Problem, Window
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.convolution import Filter
from halfbyte.machine import GPUS, Gpu

NEW: Any = "new"
HOPPER = GPUS["sm_90"]


def new_formats(monkeypatch: pytest.MonkeyPatch) -> dict[str, Format]:
    """Formats that can be stored, with a kind that no kernel decodes, by what the error says."""
    monkeypatch.setitem(spec._ZERO_SUFFIXES, NEW, "_new")
    monkeypatch.setitem(spec._ZEROS, "_new", NEW)
    monkeypatch.setitem(spec._SCALE_NAMES, torch.float8_e5m2, "f8")
    monkeypatch.setitem(spec.CODEBOOKS, "nf4", tuple(range(-120, 121, 16)))
    monkeypatch.setattr(Format, "zero_dtype", property(lambda self: None if self.zero == "none" else torch.float16))
    return {
        "zero of a format on a GPU, 'new'": Format(4, 128, NEW),
        "dtype of scales on a GPU, torch.float8_e5m2": Format(4, 128, scale=torch.float8_e5m2),
        "codebook on a GPU, 'nf4'": Format(4, 128, family=cast(Any, "nf4")),
    }


def test_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    for what, fmt in new_formats(monkeypatch).items():
        problem = Problem("linear", 1, 256, 256, fmt, torch.bfloat16)
        geo = gpu_tiles.geometry(fmt, (256, 256))
        data, out = (torch.empty(geo.nbytes, dtype=torch.uint8, device="meta"), torch.empty(256, 256, device="meta"))
        calls: list[Any] = [
            lambda p=problem: compiled_for(p, skinny.configs(p, HOPPER)[0], clamps=False),
            lambda p=problem: skinny_hopper_config.compiled_for(p, skinny_hopper_config.configs(p, HOPPER)[0], clamp=False),
            lambda g=geo: hopper_tile.of_weight(g),
            lambda g=geo, d=data, o=out: dequantize.write(gpu_tiles.views(d, g), g, o),
        ]
        if not fmt.codebook:
            calls.append(lambda p=problem: activations.plan(Problem("linear", 1, 256, 256, p.format, torch.bfloat16, "int8")))
            convolution = ConvProblem(Filter(fmt, 64, 128, (3, 3)), Window(), 1, (8, 8), torch.bfloat16)
            config = conv_tile.Config(64, 64, 128, 1, 4, 1)
            x = torch.empty(1, 8, 8, 128, dtype=torch.bfloat16)
            calls.append(lambda c=convolution, s=config, x=x: conv_tile.compiled_for(c, s, x, "weights", clamp=False))
        for call in calls:
            with pytest.raises(UnsupportedError, match=what):
                call()


def test_a_scaling_of_activations() -> None:
    problem = Problem("linear", 1, 256, 256, as_format("int4_g128"), torch.bfloat16, "int8", NEW)
    with pytest.raises(UnsupportedError, match="scaling of activations 'new'"):
        activations.plan(problem)


def test_a_gate_function(device: torch.device, gpu: Gpu) -> None:
    x, out = torch.ones(2, 64, device=device), torch.zeros(2, 32, device=device)
    with pytest.raises(KernelError, match="a gate function that has no code for GPUs"):
        gates.launch(gpu, x, out, NEW)
    assert not out.any()


def test_scores_of_a_router(device: torch.device, gpu: Gpu) -> None:
    logits, weights = torch.ones(1, 8, device=device), torch.zeros(1, 2, device=device)
    ids = torch.zeros(1, 2, dtype=torch.int32, device=device)
    with pytest.raises(KernelError, match="scores that have no code for GPUs"):
        routing.launch_choice(gpu, logits, ids, weights, routing.Choice(True, NEW))
    assert not weights.any()


def test_interleaving_of_rope() -> None:
    static = attend.Static(64, 64, 2, 16, 32, 4, 1, False, 64, rope_interleaved=NEW)
    with pytest.raises(UnsupportedError, match="interleaving of rope, 'new'"):
        _ = static.neighbours


def test_a_family(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setitem(spec._FOREIGN, "new_q4", (4, 32, "none", torch.float16, NEW, False))
    monkeypatch.setitem(quantize._FAMILIES, NEW, 3)
    with pytest.raises(KernelError, match="a family whose rounding has no code for GPUs"):
        quantize.quantize(torch.ones(2, 64, device=device), Format(4, 32, family=NEW))
