"""Building blocks of whole layers in one call: products with packed weights, and small tensors, passed by address."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfbyte.kernels.layer_kinds import Gelu
from halfbyte.kernels.problem import Activation, Problem, check_compute
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.step_sequence import Product


class Weight(NamedTuple):
    """A linear layer: its weight [N, K], its bias [N] or None, and how it computes, as in `ops.linear`."""

    packed: Packed
    bias: Tensor | None
    compute: str
    activation: Activation


class LayerNorm(NamedTuple):
    """Weight and bias, [K] each, and eps, which is added to the variance."""

    weight: Tensor
    bias: Tensor
    eps: float


# Unrounded float32 outputs of layers by the 16-bit tensors that they returned, so that layers called one by one compute the same as in one
# native call: one for each output, as long as it lives. `exactly` compares both, as the output may have been written to. An output is known
# to the thread that computed it, so that no two threads add one entry.
_unrounded: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def exactly(x: Tensor) -> Tensor:
    """x in float32, contiguous; the unrounded values if x is an unchanged output of a layer."""
    exact = _unrounded.get(x) if x.dtype != torch.float32 else None
    return x.float().contiguous() if exact is None or not torch.equal(exact.to(x.dtype), x) else exact


def given(outputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What layers give, in `dtype`; the last of it will be known `exactly`."""
    rounded = tuple(y.to(dtype) for y in outputs)
    if dtype != torch.float32:
        _unrounded[rounded[-1]] = outputs[-1]
    return rounded


class Addresses:
    """Keeps alive the tensors whose addresses a layer uses."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._counted: list[tuple[Tensor, Tensor, list[int]]] = []
        self._kept: list[Tensor] = []

    def of(self, tensor: Tensor) -> int:
        """The address of its elements as float32: its own, or that of a copy that `refresh` updates."""
        tensor = tensor.detach()
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            with torch.inference_mode(False):  # it is written again, and not always in that mode
                copy = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
            copy.copy_(tensor)
            self._copies.append((copy, tensor))
            tensor = copy
        self._kept.append(tensor)
        return tensor.data_ptr()

    def same(self, tensor: Tensor) -> int:
        """The address of a contiguous tensor's elements, as they are."""
        self._kept.append(tensor.detach())
        return tensor.data_ptr()

    def product(self, weight: Weight, *, gelu: Gelu = "") -> Product:
        """The product of float32 activations and this weight, followed by GELU if `gelu`; of stacked weights that of the first."""
        from halfbyte.dispatch.choose import cpu_kernel
        from halfbyte.kernels.cpu.step_sequence import Product

        n, k = weight.packed.shape[-2:]
        sparse = weight.packed.layout == cpu_tiles.SPARSE
        fmt, compute = weight.packed.format, check_compute(weight.compute)
        kernel = cpu_kernel(Problem("linear", 1, n, k, fmt, torch.float32, compute, weight.activation, sparse=sparse), gelu=gelu)
        self._kept.append(weight.packed.data)
        bias = 0
        if weight.bias is not None:
            bias = self._of_many(weight.bias) if weight.bias.dim() > 1 else self.of(weight.bias)
        return Product(kernel, weight.packed.data.data_ptr(), bias)

    def _of_many(self, biases: Tensor) -> int:
        """`of` for the biases of all experts: copied only when torch's version counters change, as copying them per token costs too
        much."""
        address = self.of(biases)
        if self._copies and self._copies[-1][0].data_ptr() == address and not biases.is_inference():
            copy, source = self._copies.pop()
            self._counted.append((copy, source, [source._version]))
        return address

    @property
    def copied(self) -> bool:
        """Whether there is anything to refresh."""
        return bool(self._copies or self._counted)

    def refresh(self) -> None:
        """Updates the copies."""
        for copy, source in self._copies:
            copy.copy_(source)
        for copy, source, version in self._counted:
            if source._version != version[0]:
                version[0] = source._version
                copy.copy_(source)


def why_not_packed(weights: Sequence[Packed]) -> str | None:
    """Why kernels of whole layers do not support these weights; None if they do."""
    if any(weight.layout not in (cpu_tiles.NAME, cpu_tiles.SPARSE) for weight in weights):
        return "its weights are not packed for CPUs"
    if any(weight.data.data_ptr() % 64 or not weight.data.is_contiguous() for weight in weights):
        return "its packed weights do not begin at multiples of 64 bytes"
    return None
