"""Weights of layers: native programs read small tensors as float32, in place or from copies; what layers of experts refuse."""

import ctypes

import pytest
import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.norms import add_normed, norm_in_torch, normed
from halfbyte.ops.transformer.routing import add_experts
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import TensorAddresses, Weight


def _read(address: int, count: int) -> Tensor:
    return torch.tensor(list((ctypes.c_float * count).from_address(address)))


def test_float32_is_read_in_place() -> None:
    addresses, norm = TensorAddresses(), torch.randn(8)
    assert addresses.as_float32(norm) == norm.data_ptr()
    assert not addresses.has_copies


def test_copies_follow_their_source() -> None:
    addresses, norm = TensorAddresses(), torch.randn(16).bfloat16()
    at, strided = addresses.as_float32(norm), addresses.as_float32(norm.float()[::2])
    assert addresses.has_copies
    assert torch.equal(_read(at, 16), norm.float())
    assert torch.equal(_read(strided, 8), norm.float()[::2])
    norm.data.mul_(2)
    assert not torch.equal(_read(at, 16), norm.float())
    addresses.refresh()
    assert torch.equal(_read(at, 16), norm.float())


def test_biases_of_experts_are_copied_where_the_version_counter_moved() -> None:
    addresses, biases = TensorAddresses(), torch.randn(2, 8).bfloat16()
    packed = ops.pack(ops.quantize(torch.randn(2, 8, 32), "q4_0"))
    product = addresses.product(Weight(packed, biases, "float", "block"))
    assert torch.equal(_read(product.bias, 16), biases.float().flatten())
    before = biases.float().flatten()
    biases.data.add_(1)  # which the version counter of `biases` does not count
    addresses.refresh()
    assert torch.equal(_read(product.bias, 16), before)
    biases.add_(1)
    addresses.refresh()
    assert torch.equal(_read(product.bias, 16), biases.float().flatten())


def test_experts_behind_a_layer_norm_are_refused() -> None:
    """Their op has an RMS norm alone, which it computed in place of a layer norm."""
    gate_up, down = (ops.pack(ops.quantize(torch.randn(2, n, k), "q4_0")) for n, k in ((64, 32), (32, 32)))
    stacks = (Weight(packed, None, "float", "block") for packed in (gate_up, down))
    half = Experts(*stacks, torch.randn(2, 32), 1, True, Norm(torch.ones(32), 1e-6))
    assert half.why_not() is None
    assert add_experts(torch.randn(3, 32), half).isfinite().all()
    half = half._replace(pre_norm=half.pre_norm._replace(layer_norm=True))
    assert half.why_not() is None  # native layers have kernels for it
    with pytest.raises(ArgumentError, match="got a layer norm"):
        add_experts(torch.randn(3, 32), half)


def test_norms_of_two_kinds_are_refused() -> None:
    """One kernel applies both norms of `add_normed` with or without the unit offset."""
    x, residual, norm = torch.randn(3, 8), torch.randn(3, 8), Norm(torch.randn(8), 1e-6, unit_offset=True)
    h, z = add_normed(x, residual, norm, norm)
    assert torch.equal(h, residual + norm_in_torch(x, norm))
    assert z is not None
    assert torch.equal(z, normed(h, norm))
    with pytest.raises(ArgumentError, match="one unit_offset, got True and False"):
        add_normed(x, residual, norm, norm._replace(unit_offset=False))
