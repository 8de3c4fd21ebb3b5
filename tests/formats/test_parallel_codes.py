"""Codes cut into parts and put together again: exact, for any format, shape and cut; and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes
from halfbyte.formats.dense import to_dense
from halfbyte.formats.sharding import even_ranges, shard, stored_ranges, take, unshard

BLOCKS = ["q4_0", "q4_1", "q8_0", "int4_g128_zp", "int4_g7", "int4_g7_offset", "int8_g5_zp"]
FORMATS = [*BLOCKS, "int5_g32", "int6_g14_offset", "int4_channel", "int8_channel_zp", "int4_tensor"]


def make(fmt: str, *shape: int) -> Codes:
    return hb.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))), fmt)


def same(a: Codes, b: Codes) -> bool:
    tensors = a.tensors().keys() == b.tensors().keys() and all(torch.equal(t, b.tensors()[n]) for n, t in a.tensors().items())
    return a.format == b.format and a.shape == b.shape and tensors


@given(st.sampled_from(FORMATS), st.integers(1, 9), st.integers(1, 90), st.integers(1, 4), st.integers(0, 1), st.booleans())
def test_parts_are_slices_and_go_together_again(name: str, n: int, k: int, of: int, along_k: int, stacked: bool) -> None:
    codes = make(name, 3, n, k) if stacked else make(name, n, k)
    dim = -1 if along_k else -2
    blocks = -(-k // codes.format.block) if isinstance(codes.format.block, int) else k
    if along_k and blocks < of:
        with pytest.raises(FormatError, match=f"{blocks} blocks a row: cut K into at most {blocks} parts"):
            shard(codes, dim, 0, of)
        return
    parts = [shard(codes, dim, i, of) for i in range(of)]
    assert same(unshard(parts, dim), codes)
    sizes = [part.shape[dim] for part in parts]
    unit = codes.format.block if along_k and isinstance(codes.format.block, int) else 1
    counts = [-(-size // unit) for size in sizes]
    assert max(counts) - min(counts) <= 1, "as even as whole rows or blocks allow"
    whole = codes.dequantize(torch.float64).split(sizes, dim)
    for part, wanted in zip(parts, whole, strict=True):
        assert torch.equal(part.dequantize(torch.float64), wanted)
        part.check_values()
        assert all(t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes for t in part.tensors().values()), "no view of the whole"


def test_stacked_codes_are_cut_by_experts() -> None:
    codes = make("q4_0", 5, 6, 64)
    parts = [shard(codes, 0, i, 2) for i in range(2)]
    assert [part.shape for part in parts] == [(3, 6, 64), (2, 6, 64)]
    assert same(unshard(parts, 0), codes)


@given(st.sampled_from(FORMATS), st.data())
def test_any_ranges_are_taken(name: str, data: st.DataObject) -> None:
    codes = make(name, 6, 70)
    dim = data.draw(st.sampled_from([0, 1]))
    unit = codes.format.block if dim == 1 and isinstance(codes.format.block, int) else 1
    last = codes.shape[dim] // unit - (dim == 1 and codes.format.block == "channel")  # a part of rows without inputs would have no scale
    bounds = sorted(data.draw(st.sets(st.integers(0, last), max_size=3)) | {0})
    edges = [*(bound * unit for bound in bounds), codes.shape[dim]]
    ranges = list(pairwise(edges))
    assert same(unshard([take(codes, dim, (one,)) for one in ranges], dim), codes), "of any sizes"
    ranges = tuple(ranges[::2])
    taken, whole = take(codes, dim, ranges), codes.dequantize()
    assert torch.equal(taken.dequantize(), torch.cat([whole.narrow(dim, a, b - a) for a, b in ranges], dim))
    # What a reader of files takes is the same, where it begins and ends with bytes.
    if (slices := stored_ranges(codes.format, codes.shape, dim, ranges)) is not None:
        for part, tensor in to_dense(codes).items():
            chosen = slices[part]
            read = tensor if chosen is None else torch.cat([tensor.narrow(dim, a, b - a) for a, b in chosen], dim)
            assert torch.equal(read, to_dense(taken)[part])
    else:
        assert any(edge * codes.format.stored_bits % 8 for edge in edges)


def test_what_is_refused() -> None:
    codes = make("q4_0", 4, 96)
    for call, words in (
        (lambda: take(codes, 1, ((0, 48),)), "after whole blocks, at multiples of 32, got 0 … 48 of 96"),
        (lambda: take(codes, 0, ((2, 5),)), r"lies in 0 … 4, got 2 … 5"),
        (lambda: take(make("int4_channel", 6, 70), 1, ((70, 70),)), "parts of one input at least"),
        (lambda: take(codes, 2, ((0, 1),)), "dimensions 0 … 1, got 2"),
        (lambda: shard(codes, 0, 2, 2), "one of 0 … 1, got 2"),
        (lambda: unshard([], 0), "no parts"),
        (lambda: unshard([make("q8_0", 4, 64).reshape((2, 2, 64)), make("q8_0", 2, 64)], 2), r"has 3 dimensions, got \[2, 64\]"),
        (lambda: unshard([codes, make("q8_0", 4, 96)], 0), r"is q4_0 \[4, 96\], got q8_0 \[4, 96\]"),
        (lambda: unshard([take(codes, 1, ((64, 96),)), make("q4_0", 4, 33)], 0), r"is q4_0 \[4, 32\], got q4_0 \[4, 33\]"),
        (lambda: unshard([make("q4_0", 4, 33), codes], 1), "after whole blocks, at multiples of 32, got 0 … 33 of 129"),
        (lambda: unshard([make("int8_channel", 2, 3), make("int8_channel", 2, 4)], 1), "one scale for what is cut along dimension 1"),
    ):
        with pytest.raises(FormatError, match=words):
            call()


def test_even_ranges() -> None:
    assert even_ranges(10, 3) == [(0, 4), (4, 7), (7, 10)]
    assert even_ranges(10, 3, 4) == [(0, 4), (4, 8), (8, 10)]
    assert even_ranges(1, 2) == [(0, 1), (1, 1)]
