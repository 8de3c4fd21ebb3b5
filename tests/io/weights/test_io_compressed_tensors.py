"""compressed-tensors' weights, against its own decompression where it is installed, and against the definition."""

from __future__ import annotations

import pytest
import torch
from samples import random_codes
from test_io_awq import same
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats import as_format
from halfbyte.io.weights import compressed_tensors as ct

FORMATS = ("q4_0", "int4_g16_zp", "int4_channel_zp_bf16", "int4_channel", "q8_0", "int8_g32_zp_bf16", "int8_channel_bf16")
SHAPES = ((16, 64), (5, 96), (3, 32))


def definition(parts: dict[str, Tensor], bits: int) -> Tensor:
    scale = parts["weight_scale"].double()
    if "weight" in parts:
        n, k = parts["weight"].shape
    else:
        n, k = parts["weight_shape"].tolist()
    w = torch.empty(n, k, dtype=torch.float64)
    per, half, mask = 32 // bits, 1 << (bits - 1), (1 << bits) - 1
    g_idx = parts.get("weight_g_idx", torch.arange(k) // (k // scale.shape[1]))
    for row in range(n):
        for column in range(k):
            if "weight" in parts:
                q = int(parts["weight"][row, column])
            else:
                q = (int(parts["weight_packed"][row, column // per]) >> bits * (column % per) & mask) - half
            group, z = int(g_idx[column]), 0
            if (points := parts.get("weight_zero_point")) is not None:
                packed = points.dtype == torch.int32
                z = (int(points[row // per, group]) >> bits * (row % per) & mask) - half if packed else int(points[row, group])
            w[row, column] = (q - z) * scale[row, group]
    return w


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_what_is_written_is_the_definition_and_is_read(fmt: str, shape: tuple[int, int], shuffled: bool) -> None:
    codes, k = random_codes(as_format(fmt), shape), shape[1]
    block = codes.format.block_size(k)
    order = torch.randperm(k).view(-1, block).sort(dim=1).values.flatten().to(torch.int32) if shuffled and block < k else None
    for packed in (True, False)[: 1 + (codes.format.bits == 8)]:
        parts = ct.write(codes, order, packed=packed)
        w = torch.empty(shape, dtype=torch.float64)
        w[:, slice(None) if order is None else order.long()] = codes.dequantize(torch.float64)
        assert torch.equal(definition(parts, codes.format.bits), w)
        back, its_order = ct.read(parts, codes.format.bits, None, "m")
        assert same(back, codes)
        assert (its_order is None and order is None) or torch.equal(its_order, order)  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != "int8_channel_bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_library_dequantizes_the_same(fmt: str, shape: tuple[int, int]) -> None:
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    codes = random_codes(as_format(fmt), shape)
    grouped = isinstance(codes.format.block, int)
    settings = {"strategy": "group", "group_size": codes.format.block} if grouped else {"strategy": "channel"}
    arguments = quantization.QuantizationArgs(num_bits=codes.format.bits, symmetric=codes.zero is None, **settings)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    parts = ct.write(codes, None, packed=True)
    expected = library.PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"]
    # It multiplies in the scales' dtype, so that a product is rounded once.
    assert torch.equal(expected, codes.dequantize(expected.dtype))


def test_one_scale_for_all_and_points_that_are_not_packed() -> None:
    weight, scale = torch.randint(-128, 128, (4, 6), dtype=torch.int8), torch.tensor([0.5])
    for parts in ({"weight": weight, "weight_scale": scale}, {"weight": weight, "weight_scale": scale[0]}):
        codes, _ = ct.read(parts, 8, None, "m")
        assert str(codes.format) == "int8_channel"
        assert torch.equal(codes.dequantize(), weight * 0.5)
    four = random_codes(as_format("int4_g16_zp"), (5, 32))
    parts = ct.write(four, None, packed=True)
    assert four.zero is not None
    assert same(ct.read(parts | {"weight_zero_point": (four.zero.to(torch.int16) - 8).to(torch.int8)}, 4, None, "m")[0], four)


@pytest.mark.parametrize("fmt", ["int4_g32", "int4_g64_zp", "int8_g64"])
@pytest.mark.parametrize("k", [80, 96, 100, 128])
def test_groups_of_the_config_that_do_not_divide_the_inputs(fmt: str, k: int) -> None:
    codes = random_codes(as_format(fmt), (5, k))
    size = codes.format.block
    parts = ct.write(codes, None, packed=True)
    assert same(ct.read(parts, codes.format.bits, size, "m")[0], codes)
    # Another size than the tensor's: that of the tensor, if there is one.
    if k % codes.scale.shape[1] == 0:
        assert ct.read(parts, codes.format.bits, 16, "m")[0].format.block == k // codes.scale.shape[1]
    parts["weight_scale"] = torch.ones(5, 7)
    with pytest.raises(CheckpointError, match="7 scales for each"):
        ct.read(parts, codes.format.bits, size, "m")


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_zero_point", "weight_shape"])
def test_damaged_parts(part: str) -> None:
    parts = ct.write(random_codes(as_format("int4_g16_zp"), (16, 64)), None, packed=True)
    for value in (parts[part].double() + 0.5, parts[part][:-1], parts[part][None]):
        with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
            ct.read(parts | {part: value}, 4, None, "m")
    for points in (torch.zeros(16, 3), torch.zeros(5), torch.zeros(0, 4), torch.zeros(16, 4, 2)):  # not packed
        with pytest.raises(CheckpointError, match=r"m\.weight_zero_point is int8 .*: the checkpoint is damaged"):
            ct.read(parts | {"weight_zero_point": points.to(torch.int8)}, 4, None, "m")
    for missing in ("weight_shape", "weight_scale"):
        with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
            ct.read({name: tensor for name, tensor in parts.items() if name != missing}, 4, None, "m")
