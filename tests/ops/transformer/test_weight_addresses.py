"""Native programs read small tensors as float32: at their own address, or from a copy that `refresh` brings up to date."""

import ctypes

import torch
from torch import Tensor

from halfbyte import ops
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
