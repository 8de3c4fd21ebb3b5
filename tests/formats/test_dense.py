"""Codes of 5 and 6 bits in files: bit by bit as docs/engineering/checkpoint.md has it, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import random_codes

from halfbyte.errors import FormatError
from halfbyte.formats import as_format
from halfbyte.formats.codes import Codes
from halfbyte.formats.dense import dense_tensors, from_dense, stored_bytes, to_dense

LIMITED = ("int5_g32", "int6_g16", "int5_g32_offset_f32", "int6_g24_offset")


def bit_by_bit(codes: Codes) -> list[list[int]]:
    """The bytes of each row."""
    bits, rows = codes.format.packed_bits, []
    for row in codes.values().reshape(-1, codes.shape[-1]).tolist():
        stream = sum((q - codes.format.q_min) << bits * j for j, q in enumerate(row))
        rows.append(list(stream.to_bytes(-(-bits * len(row) // 8), "little")))
    return rows


def same(a: Codes, b: Codes) -> bool:
    actual, expected = a.tensors(), b.tensors()
    return (a.format, a.shape) == (b.format, b.shape) and all(torch.equal(actual[part], expected[part]) for part in actual)


@given(st.sampled_from(LIMITED), st.integers(1, 4), st.integers(1, 100), st.booleans())
def test_rows_are_streams_of_bits(name: str, n: int, k: int, stacked: bool) -> None:
    codes = random_codes(as_format(name), (3, n, k) if stacked else (n, k), seed=k)
    filed = to_dense(codes)
    assert {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in filed.items()} == dense_tensors(codes.format, codes.shape)
    assert filed["data"].flatten(0, -2).tolist() == bit_by_bit(codes)
    assert sum(tensor.nbytes for tensor in filed.values()) == stored_bytes(codes.format, codes.shape)
    assert same(from_dense(codes.format, codes.shape, filed), codes)


@pytest.mark.parametrize("shape", [(700, 512), (2, 200_001), (0, 64), (3, 0), (0, 0)])
def test_many_codes_and_none(shape: tuple[int, ...]) -> None:
    codes = random_codes(as_format("int6_g16"), shape)
    assert same(from_dense(codes.format, shape, to_dense(codes)), codes)


@pytest.mark.parametrize("name", ["q4_0", "int8_channel", "int4_g32_zp", "iq4_nl"])
def test_other_codes_are_as_they_are(name: str) -> None:
    codes = random_codes(as_format(name), (3, 33))
    filed = to_dense(codes)
    assert all(filed[part] is tensor for part, tensor in codes.tensors().items())
    assert same(from_dense(codes.format, codes.shape, filed), codes)


def test_what_is_refused() -> None:
    codes = random_codes(as_format("int5_g32"), (2, 33))  # rows of 165 bits in 21 bytes: three are left
    filed = to_dense(codes)
    with pytest.raises(FormatError, match=r"codes lie in \[-16, 15\]"):
        to_dense(Codes(codes.format, codes.shape, codes.data + 1, codes.scale))
    with pytest.raises(FormatError, match=r"is torch.uint8 \[2, 21\] in files, got torch.int8 \[2, 33\]"):
        from_dense(codes.format, codes.shape, codes.tensors())
    with pytest.raises(FormatError, match="lack their scale"):
        from_dense(codes.format, codes.shape, {"data": filed["data"]})
    for bit in (5, 6, 7):
        data = filed["data"].clone()
        data[1, -1] |= 1 << bit
        with pytest.raises(FormatError, match="unused last bits"):
            from_dense(codes.format, codes.shape, {**filed, "data": data})
