"""Encoder layers in one call: against float64, and number by number what their parts give one after the other."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from encoder_parts import HEADS, SCALE, SIZES, check_layer, check_norm, codes_of, encoder_layer, layer_of, native
from encoder_parts import normed as run_norm
from samples import random_codes
from support import RUNNABLE, pairwise
from torch import Tensor

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.formats import as_format
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.transformer import attend_whole, embed, encoder
from halfbyte.ops.transformer.embed import NormedEmbeddings
from halfbyte.ops.transformer.encoder import run_layers
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import Weight


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_norms(isa: ISA) -> None:
    for k in (1, 7, 32, 64, 77, 384):
        check_norm(k, 7, native(isa, 1 + k % 2))


def normed(x: Tensor, norm: Norm) -> Tensor:
    """As the kernel does it."""
    out = torch.empty_like(x)
    assert norm.bias is not None
    run_norm(native(current(), 1), x.flatten(0, 1), out.flatten(0, 1), norm.weight, norm.bias, norm.eps)
    return out


def by_parts(x: Tensor, scores: tuple[Tensor | None, Tensor | None], weights: list[Weight], norms: list[Norm], *, before: bool) -> Tensor:
    def linear(x: Tensor, i: int, residual: Tensor | None = None) -> Tensor:
        w = weights[i]
        if i == 2:
            return ops.linear_gelu(x, w.packed, w.bias, compute=w.compute)
        return ops.linear(x, w.packed, w.bias, compute=w.compute, residual=residual)

    first = normed(x, norms[0]) if before else x
    q, k, v = linear(first, 0).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    mask, bias = scores
    h = linear(attend_whole.attend(q, k, v, mask, SCALE, bias).flatten(2), 1, x)
    if before:
        return linear(linear(normed(h, norms[1]), 2), 3, h)
    h = normed(h, norms[0])
    return normed(linear(linear(h, 2), 3, h), norms[1])


CASES = pairwise(
    ("q8_0", "int4_g20_zp"), ("int8", "float"), (False, True), ("none", "keys", "all"), ((3, 1), (5, 3), (1, 40)), (True, False)
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_layers_are_their_parts(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, compute, before, seen, (batch, tokens), biased = CASES[number]
    torch.manual_seed(number)
    monkeypatch.setattr(runtime, "threads", lambda: 1 + number % 2)
    monkeypatch.setattr(encoder, "WORK_A_THREAD", 1)
    for most in ("_BYTES", "_LANE_BYTES"):
        monkeypatch.setattr(encoder, most, 1 if number % 2 else 1 << 20)  # sequence by sequence, or all at once
    monkeypatch.setattr(encoder, "_SEQUENCES_A_LANE", 1 + number % 4)  # a few for each thread, or all for all
    built = [layer_of(codes_of(name, i), compute, before=before, biased=biased) for i in range(3)]
    x, mask, bias = torch.randn(batch, tokens, SIZES["k"]), None, None
    if number % 3 == 0:
        bias = torch.randn(batch if number % 2 else 1, HEADS, tokens, tokens)
    if seen != "none":
        mask = torch.rand(batch if number % 2 else 1, 1, tokens if seen == "all" else 1, tokens) < 0.6
    for _ in range(2):  # plans are made, and taken from the cache
        wanted = x
        for count, (layer, weights, norms) in enumerate(built, 1):
            alone = layer(wanted, mask, bias)
            wanted = by_parts(wanted, (mask, bias), weights, norms, before=before)
            assert torch.equal(run_layers([layer for layer, _, _ in built[:count]], x, mask, bias), wanted)
            assert torch.equal(alone, wanted)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("computes", [("int8", "float"), ("float", "int8")])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 7), (2, 64), (16, 9)])
def test_layers_of_one_call_may_differ_in_compute_and_scale(before: bool, computes: tuple[str, str], batch: int, tokens: int) -> None:
    """Rows of float activations take more memory than those of int8 ones, whichever layer comes first."""
    torch.manual_seed(6)
    layers = [wide_layer(compute, scale, before=before) for compute, scale in zip(computes, (0.3, 0.05), strict=True)]
    x = torch.randn(batch, tokens, 264)
    assert torch.equal(run_layers(layers, x, None), layers[1](layers[0](x)))


def wide_layer(compute: str, scale: float, *, before: bool) -> Any:
    k, width, inner = 264, 192, 400
    codes = [ops.quantize(torch.randn(n, of) / 20, "q8_0") for n, of in ((3 * width, k), (k, width), (inner, k), (k, inner))]
    weights = [Weight(ops.pack(c), torch.randn(c.shape[0]), compute, "block") for c in codes]
    norms = [Norm(torch.rand(k) + 0.5, 1e-5, layer_norm=True, bias=torch.randn(k)) for _ in range(2)]
    return encoder_layer(weights, norms, before=before, scale=scale)


@pytest.mark.parametrize("computes", [("int8", "float"), ("float", "int8")])
def test_sequences_at_a_time_by_the_layer_with_the_largest_rows(computes: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of intermediate results of two sequences, one: whichever layer comes first."""
    monkeypatch.setattr(runtime, "threads", lambda: 1)
    monkeypatch.setattr(encoder, "_SEQUENCES_A_LANE", 99)
    layers, tokens = [wide_layer(compute, 0.3, before=False) for compute in computes], 5
    rows = [layer._native.row_bytes for layer in layers]
    assert min(rows) < max(rows)
    monkeypatch.setattr(encoder, "_BYTES", tokens * (max(rows) + min(rows)))
    run_layers(layers, torch.randn(2, tokens, 264), None)
    assert [size.batch for size in layers[0]._native.plans.entries] == [1]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_against_float64(before: bool, masked: bool) -> None:
    check_layer(lambda _: nullcontext(), before=before, masked=masked)


def test_nan_stays_in_its_sequence() -> None:
    layer, _, _ = layer_of(codes_of("q8_0"), "int8", before=False)
    x = torch.randn(2, 5, SIZES["k"])
    wanted = layer(x)
    x[1, 3, 2] = math.nan
    y = layer(x)
    assert torch.equal(y[0], wanted[0])
    assert bool(y[1].isnan().all())


def test_small_floats_are_converted() -> None:
    codes, k = codes_of("q8_0"), SIZES["k"]
    weights = [Weight(ops.pack(c), torch.randn(c.shape[0]).bfloat16(), "float", "block") for c in codes]
    norms = [Norm(torch.rand(k).bfloat16(), 1e-5, layer_norm=True, bias=torch.randn(k).bfloat16()) for _ in range(2)]
    layer = encoder_layer(weights, norms, before=False)
    wide = encoder_layer(
        [w._replace(bias=None if w.bias is None else w.bias.float()) for w in weights],
        [Norm(n.weight.float(), n.eps, layer_norm=True, bias=None if n.bias is None else n.bias.float()) for n in norms],
        before=False,
    )
    x = torch.randn(2, 5, k).bfloat16()
    assert layer(x).dtype == torch.float32
    assert torch.equal(layer(x), wide(x.float()))
    norms[0].weight.add_(1)  # what is copied is copied again
    assert torch.equal(layer(x)[0].isnan(), layer(x)[0].isnan())
    assert not torch.equal(layer(x), wide(x.float()))


def test_arguments() -> None:
    layer, weights, norms = layer_of(codes_of("q8_0"), "int8", before=False)
    k = SIZES["k"]
    x, mask = torch.randn(2, 5, k), torch.ones(2, 1, 1, 5, dtype=torch.bool)
    assert layer(x, mask).shape == x.shape
    assert layer(x, mask.expand(2, 1, 5, 5).mT).shape == x.shape
    for wrong in (
        (x[..., :32], None), (x[0], None), (x[:0], None), (x.double(), None), (x[:, :0], None), (x, mask.float()),
        (x, mask[..., :4]), (x, mask.expand(2, 3, 1, 5)), (x, mask[:, 0]), (x, mask.expand(2, 1, 5, 5)[:, :, :3]),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="layers of one size take on the CPU x"):
            layer(*wrong)
    other, _, _ = layer_of(codes_of("q8_0"), "int8", before=True)
    with pytest.raises(ArgumentError, match="got 2 sizes"):
        run_layers([layer, other], x, None)
    with pytest.raises(ArgumentError, match="an encoder layer takes weights"):
        encoder_layer(weights[::-1], norms, before=False)
    with pytest.raises(ArgumentError, match="a divisor of 24 heads"):
        encoder_layer(weights, norms, before=False, count=5)
    with pytest.raises(ArgumentError, match="heads of 2 are not a multiple of 4"):
        encoder_layer(weights, norms, before=False, count=12)


@pytest.mark.parametrize("names", [("q8_0",), ("int4_g20_zp", "q4_0"), ("int4_g64_offset_bf16", "int8_channel", "q4_1")])
def test_embeddings_are_their_parts(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    monkeypatch.setattr(embed, "_ELEMENTS_A_THREAD", 64)
    k = SIZES["k"]
    codes = [random_codes(as_format(name), (40 + i, k), i) for i, name in enumerate(names)]
    norm = Norm(torch.rand(k) + 0.5, 1e-5, layer_norm=True, bias=torch.randn(k))
    embeddings = NormedEmbeddings([ops.pack(c) for c in codes], norm)
    ids = [torch.randint(0, 40, (3, 14))[:, ::2], torch.randint(0, 40, (1, 7)), torch.zeros(1, 1, dtype=torch.int64).expand(3, 7)]
    rows = [c.dequantize()[which].expand(3, 7, k) for c, which in zip(codes, ids, strict=False)]
    assert torch.equal(embeddings(ids[: len(names)]), normed(sum(rows[1:], rows[0]).contiguous(), norm))
    assert embeddings([which[:, :0] for which in ids[: len(names)]]).shape == (3, 0, k)
    for wrong in (-1, 40):
        with pytest.raises(ArgumentError, match="ids lie in 0 … 39"):
            embeddings([ids[0].where(ids[0] != ids[0][1, 3], wrong), *ids[1 : len(names)]])
    with pytest.raises(ArgumentError, match=r"tables take on the CPU ids int64 \[B, T\]"):
        embeddings([which.int() for which in ids[: len(names)]])
    with pytest.raises(ArgumentError, match="one to 3 tables"):
        NormedEmbeddings([], norm)
