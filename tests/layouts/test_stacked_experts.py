"""Stacks of matrices are packed together, and have the bytes that each matrix has alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import as_format
from halfbyte.layouts import cpu_tiles, experts, gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.ops.functions import pack_dense, quantize

Pack, Unpack = Callable[[Codes], Packed], Callable[[Packed], Codes]
LAYOUTS: dict[str, tuple[Pack, Unpack]] = {
    cpu_tiles.NAME: (pack_dense, cpu_tiles.unpack),
    gpu_tiles.NAME: (gpu_tiles.pack, gpu_tiles.unpack),
}
FORMATS = ("q4_0", "q4_1", "int8_channel", "int4_tensor", "int8_tensor", "int4_g24_zp", "int8_g16", "nvfp4", "int4_g128_offset")


def stack(name: str, shape: tuple[int, ...]) -> Codes:
    return quantize(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))), name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("shape", "piece"), [((5, 64, 96), 1), ((5, 128, 256), 2 * 128 * 256), ((3, 64, 70), 1 << 26), ((4, 33, 70), 9000)]
)
def test_each_matrix_is_packed_as_alone(
    name: str, shape: tuple[int, ...], piece: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert by expert, some at a time, and all at once."""
    monkeypatch.setattr(experts, "_PIECE", piece)
    codes, (pack, unpack) = stack(name, shape), LAYOUTS[layout]
    packed = experts.pack(codes, pack, layout)
    alone = torch.cat([pack(codes.select(e)).data for e in range(len(codes.data))])
    if codes.format.block == "tensor" and shape[1] % 32:  # rows of padding have the tensor's scale, and q = 0
        assert packed.data.shape == alone.shape
    else:
        assert torch.equal(packed.data, alone)
    for e, matrix in enumerate(experts.matrices(packed)):
        assert torch.equal(unpack(matrix).data, codes.select(e).data)
    found = experts.unpack(packed, unpack).tensors()
    assert all(torch.equal(found[part], tensor) for part, tensor in codes.tensors().items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 64, 64), (2, 0, 64), (2, 64, 0)])
def test_stacks_without_elements(shape: tuple[int, ...], layout: str) -> None:
    codes, (pack, unpack) = Codes.zeros(as_format("q4_0"), shape), LAYOUTS[layout]
    packed = experts.pack(codes, pack, layout)
    assert packed.nbytes == 0
    assert experts.unpack(packed, unpack).shape == shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_that_do_not_fit(layout: str) -> None:
    pack, unpack = LAYOUTS[layout]
    packed = experts.pack(stack("q8_0", (3, 64, 64)), pack, layout)
    with pytest.raises(FormatError, match=r"3 matrices \[64, 64\] of q8_0 take \d+ bytes each in layout \w+, got \d+ in layout stacked_"):
        experts.unpack(replace(packed, data=packed.data[:-1]), unpack)
    with pytest.raises(FormatError, match="stacked experts have a layout that begins with stacked_, got gpu_tiles"):
        experts.unpack(replace(packed, layout=gpu_tiles.NAME), unpack)
    with pytest.raises(FormatError, match="stacked matrices are in layout cpu_tiles or gpu_tiles, got rows"):
        experts.unpack(replace(packed, layout="stacked_rows"), unpack)
