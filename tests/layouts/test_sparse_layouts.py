"""2:4 sparsity is found where it is, and only there."""

from __future__ import annotations

import pytest
import torch

import halfbyte as hb
from halfbyte.layouts.sparse import why_not_sparse
from halfbyte.quantizers.sparse import as_sparsity, prune


@pytest.mark.parametrize("format", ["int4_g128", "int4_g128_zp", "int8_channel", "int8_g64_zp", "q8_0", "int4_channel_zp", "int4_tensor"])
@pytest.mark.parametrize("shape", [(3, 7), (70, 1022), (2, 33, 256)])
def test_one_more_code_of_a_group_is_found(format: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    pruned = prune(weight.flatten(0, -2), as_sparsity("2:4"), "magnitude").view(shape)
    assert why_not_sparse(hb.quantize(pruned, format)) is None
    more = pruned.clone()
    more.view(-1, shape[-1])[-1, :3] = pruned.abs().max()
    assert "more than 2 are not 0" in str(why_not_sparse(hb.quantize(more, format)))


@pytest.mark.parametrize("format", ["int4_g128", "int8_channel", "int8_g64_zp"])
def test_the_strides_of_codes_do_not_matter(format: str) -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    codes = hb.quantize(prune(weight, as_sparsity("2:4"), "magnitude"), format)
    by_column = {name: tensor.T.contiguous().T for name, tensor in codes.tensors().items()}
    transposed = hb.Codes.from_tensors(codes.format, codes.shape, by_column)
    assert transposed.data.stride(0) == 1
    assert why_not_sparse(transposed) is None
    assert torch.equal(hb.pack(transposed).data, hb.pack(codes).data)


def test_a_format_without_groups_is_named() -> None:
    zeros = torch.zeros(4, 64, dtype=torch.float32, device="cpu")
    assert "no code that means 0" in str(why_not_sparse(hb.quantize(zeros, "q4_1")))
    assert "blocks of 6" in str(why_not_sparse(hb.quantize(zeros, "int4_g6")))
    assert why_not_sparse(hb.quantize(zeros, "int4_g128")) is None
    assert "no codes" in str(why_not_sparse(hb.quantize(zeros[:0], "int4_g128")))
