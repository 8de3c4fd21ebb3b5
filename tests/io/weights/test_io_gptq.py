"""GPTQ's tensors against their definition, written out element by element."""

from __future__ import annotations

import pytest
import torch
from samples import random_codes
from test_io_awq import same
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats import as_format
from halfbyte.io.weights import gptq


def definition(parts: dict[str, Tensor], bits: int, version: int) -> Tensor:
    """w [N, K]; a stored point of version 1 is one less than it is, modulo 2^bits."""
    per, mask = 32 // bits, (1 << bits) - 1
    qweight, qzeros, scales, g_idx = (parts[name] for name in ("qweight", "qzeros", "scales", "g_idx"))
    k, n = len(g_idx), qweight.shape[1]
    w = torch.empty(n, k, dtype=torch.float64)
    for row in range(k):
        for column in range(n):
            group = int(g_idx[row])
            q = int(qweight[row // per, column]) >> bits * (row % per) & mask
            z = int(qzeros[group, column // per]) >> bits * (column % per) & mask
            w[column, row] = (q - (z if version == 2 else z + 1 & mask)) * float(scales[group, column])
    return w


def random_parts(k: int, n: int, group: int, bits: int, shuffled: bool) -> dict[str, Tensor]:
    words = torch.iinfo(torch.int32)
    g_idx = torch.arange(k, dtype=torch.int32) // group
    return {
        "qweight": torch.randint(words.min, words.max, (k * bits // 32, n), dtype=torch.int32),
        "qzeros": torch.randint(words.min, words.max, (-(-k // group), n * bits // 32), dtype=torch.int32),
        "scales": torch.rand(-(-k // group), n).half(),
        "g_idx": g_idx[torch.randperm(k)] if shuffled else g_idx,
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("k", "n", "group"), [(64, 16, 32), (40, 8, 16)])
def test_a_weight_is_what_the_definition_says(bits: int, version: int, shuffled: bool, k: int, n: int, group: int) -> None:
    parts = random_parts(k, n, group, bits, shuffled)
    codes, order = gptq.read(parts, bits, group, version, "m")
    assert (codes.format.bits, codes.format.block, codes.format.zero) == (bits, group, "point")
    assert (order is not None) == shuffled
    w = torch.empty(n, k, dtype=torch.float64)
    w[:, slice(None) if order is None else order.long()] = codes.dequantize(torch.float64)
    assert torch.equal(w, definition(parts, bits, version))
    written = gptq.write(codes, order, version)
    assert all(torch.equal(written[name], parts[name]) for name in parts)
    assert written.keys() == parts.keys()


@pytest.mark.parametrize("fmt", ["q4_0", "int4_g16_zp", "int4_channel_zp_f16", "q8_0", "int8_g64_zp", "int8_channel_bf16"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_what_is_written_is_read(fmt: str, version: int, shuffled: bool) -> None:
    codes = random_codes(as_format(fmt), (16, 64))
    assert gptq.why_not(codes.format, codes.shape) is None
    size = -1 if isinstance(codes.format.block, str) else codes.format.block
    order = None
    if shuffled and size == 16:  # sorted by block, and within a block, as the reader finds it
        order = torch.randperm(64).view(4, 16).sort(dim=1).values.flatten().to(torch.int32)
    back, its_order = gptq.read(gptq.write(codes, order, version), codes.format.bits, size, version, "m")
    assert same(back, codes)
    assert (its_order is None and order is None) or torch.equal(its_order, order)  # type: ignore[arg-type]


def test_the_version_is_judged_by_the_points() -> None:
    def stored(points: Tensor, version: int) -> Tensor:
        return (points - int(version == 1)).to(torch.uint8)

    for claimed in (1, 2):
        for true in (1, 2):
            symmetric = stored(torch.full((4, 64), 8), true)
            assert gptq.version_of(symmetric, 4, True, claimed) == true
            assert gptq.version_of(symmetric, 4, False, claimed) == true
            assert gptq.version_of(stored(torch.full((4, 64), 128), true), 8, True, claimed) == true
            # The points of Gaussian weights, as GPTQ finds them.
            w = torch.randn(20_000, 128)
            low, high = w.amin(1), w.amax(1)
            asymmetric = stored(torch.round(-low * 15 / (high - low)), true)
            assert gptq.version_of(asymmetric, 4, False, claimed) == true
            # Too few, or of no real weight: the claim stands.
            assert gptq.version_of(asymmetric[:100], 4, False, claimed) == claimed
            assert gptq.version_of(torch.randint(0, 16, (9999,), dtype=torch.uint8), 4, False, claimed) == claimed
        assert gptq.version_of(torch.empty(0, 8, dtype=torch.uint8), 4, True, claimed) == claimed


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
def test_damaged_parts(part: str) -> None:
    parts = random_parts(64, 16, 32, 4, shuffled=True)
    values: list[Tensor | None] = [None, parts[part].double(), parts[part][:-1], parts[part][:1]]
    if part == "g_idx":
        values = [parts[part].double(), parts[part][:-1], parts[part] + 1, parts[part] - 1, parts[part] * 0]
    for value in values:
        damaged = {name: tensor for name, tensor in {**parts, part: value}.items() if tensor is not None}
        with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
            gptq.read(damaged, 4, 32, 1, "m")
