"""AWQ's tensors against its definition, written out element by element."""

from __future__ import annotations

import pytest
import torch
from samples import random_codes
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats import Codes, as_format
from halfbyte.io.weights import awq


def definition(parts: dict[str, Tensor], group: int) -> Tensor:
    """w [N, K], as AutoAWQ's dequantize_gemm has it: nibble i of a word is output ORDER[i] of its eight."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight, qzeros, scales = (parts[name] for name in ("qweight", "qzeros", "scales"))
    k, n = qweight.shape[0], scales.shape[1]
    w = torch.empty(n, k, dtype=torch.float64)
    for row in range(k):
        for word in range(n // 8):
            for nibble in range(8):
                column = 8 * word + order[nibble]
                q = int(qweight[row, word]) >> 4 * nibble & 15
                z = int(qzeros[row // group, word]) >> 4 * nibble & 15
                w[column, row] = (q - z) * float(scales[row // group, column])
    return w


def random_parts(k: int, n: int, group: int) -> dict[str, Tensor]:
    words = torch.iinfo(torch.int32)
    return {
        "qweight": torch.randint(words.min, words.max, (k, n // 8), dtype=torch.int32),
        "qzeros": torch.randint(words.min, words.max, (k // group, n // 8), dtype=torch.int32),
        "scales": torch.rand(k // group, n).half(),
    }


@pytest.mark.parametrize(("k", "n", "group"), [(64, 16, 32), (48, 8, 16), (32, 24, 32)])
def test_a_weight_is_what_the_definition_says(k: int, n: int, group: int) -> None:
    parts = random_parts(k, n, group)
    codes = awq.read(parts, group, "m")
    assert (codes.format.bits, codes.format.block, codes.format.zero, codes.shape) == (4, group, "point", (n, k))
    assert torch.equal(codes.dequantize(torch.float64), definition(parts, group))


@pytest.mark.parametrize("group", [16, -1])
def test_what_is_read_is_written(group: int) -> None:
    parts = random_parts(64, 16, 64 if group == -1 else group)
    written = awq.write(awq.read(parts, group, "m"))
    assert written.keys() == parts.keys()
    assert all(torch.equal(written[name], parts[name]) for name in parts)


@pytest.mark.parametrize("fmt", ["q4_0", "int4_g16_zp", "int4_channel_zp_f16", "int4_g64_bf16"])
def test_what_is_written_is_read(fmt: str) -> None:
    codes = random_codes(as_format(fmt), (16, 64))
    assert awq.why_not(codes.format, codes.shape) is None
    back = awq.read(awq.write(codes), -1 if isinstance(codes.format.block, str) else codes.format.block, "m")
    assert same(back, codes)
    assert (back.zero is None) == (codes.zero is None)


def same(a: Codes, b: Codes) -> bool:
    """Code for code and scale for scale; the name of the format may be another."""
    tensors = a.tensors(), b.tensors()
    return tensors[0].keys() == tensors[1].keys() and all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@pytest.mark.parametrize(
    ("fmt", "shape", "why"),
    [
        ("q8_0", (16, 64), "8 bits"),
        ("q4_1", (16, 64), "offsets"),
        ("int4_g32_zp", (12, 64), "rows"),
        ("int4_g24_zp", (16, 64), "do not divide"),
        ("int4_tensor", (16, 64), "one scale"),
    ],
)
def test_what_cannot_be_written(fmt: str, shape: tuple[int, int], why: str) -> None:
    assert why in (awq.why_not(as_format(fmt), shape) or "")


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_damaged_parts(part: str) -> None:
    parts = random_parts(64, 16, 32)
    for value in (None, parts[part].double(), parts[part][:-1], parts[part][0], parts[part][:, :1]):
        damaged = {name: tensor for name, tensor in {**parts, part: value}.items() if tensor is not None}
        with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
            awq.read(damaged, 32, "m")


@pytest.mark.parametrize(("block", "columns"), [(128, 64), (32, 48), (64, 96)])
def test_blocks_that_do_not_divide_a_row_are_not_written(block: int, columns: int) -> None:
    """AWQ has no group size of its own for a row that is shorter than a block, or a shorter last block."""
    reason = awq.why_not(as_format(f"int4_g{block}_zp"), (16, columns))
    assert reason == f"its blocks of {block} do not divide its {columns} columns"
