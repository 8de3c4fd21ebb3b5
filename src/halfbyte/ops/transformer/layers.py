"""The weights of a transformer layer, by address: what native programs that run a whole layer, or a whole model, read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

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


@dataclass
class _Copied:
    """A float32 copy of a tensor of another type.

    version  torch's version counter of the tensor when it was copied; None: not looked at, the tensor is copied by each `refresh`
    """

    copy: Tensor
    source: Tensor
    version: int | None = None


class TensorAddresses:
    """Addresses of the tensors that a native program reads on the CPU, which live as long as this object.

    Programs read small tensors as float32. One of another type is copied, and `refresh` has to be called before the program runs, so that
    what was written to the tensor meanwhile is seen.
    """

    def __init__(self) -> None:
        self._copied: list[_Copied] = []
        self._kept: list[Tensor] = []

    def as_float32(self, tensor: Tensor) -> int:
        """The address of a tensor's elements in float32: its own, or that of a copy."""
        return self._as_float32(tensor).data_ptr()

    def _as_float32(self, tensor: Tensor, version: int | None = None) -> Tensor:
        tensor = tensor.detach()
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            with torch.inference_mode(False):  # it is written again, and not always in that mode
                copy = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
            copy.copy_(tensor)
            self._copied.append(_Copied(copy, tensor, version))
            tensor = copy
        self._kept.append(tensor)
        return tensor

    def as_stored(self, tensor: Tensor) -> int:
        """The address of a contiguous tensor's elements, in their own type."""
        self._kept.append(tensor.detach())
        return tensor.data_ptr()

    def product(self, weight: Weight, *, gelu: Gelu = "") -> Product:
        """The product of float32 activations and a weight, followed by GELU if `gelu`.

        Of stacked weights [E, N, K] it is that of the first; a program finds the others behind it.
        """
        from halfbyte.dispatch.choose import cpu_kernel  # as llvmlite is imported for CPU kernels alone
        from halfbyte.kernels.cpu.step_sequence import Product

        n, k = weight.packed.shape[-2:]
        sparse = weight.packed.layout == cpu_tiles.SPARSE
        fmt, compute = weight.packed.format, check_compute(weight.compute)
        kernel = cpu_kernel(Problem("linear", 1, n, k, fmt, torch.float32, compute, weight.activation, sparse=sparse), gelu=gelu)
        self._kept.append(weight.packed.data)
        bias = 0 if weight.bias is None else self._bias(weight.bias).data_ptr()
        return Product(kernel, weight.packed.data.data_ptr(), bias)

    def _bias(self, bias: Tensor) -> Tensor:
        """The bias [N] of a layer, or those of all experts [E, N], in float32.

        Copying those of all experts for each token takes too long: they are copied when torch's version counter says that they were
        written to, which does not see writes through `.data`.
        """
        counted = bias.dim() > 1 and not bias.is_inference()
        return self._as_float32(bias, bias._version if counted else None)

    @property
    def has_copies(self) -> bool:
        """Whether there is anything to refresh."""
        return bool(self._copied)

    def refresh(self) -> None:
        """Copy tensors of other types again, where they may have been written to."""
        for copied in self._copied:
            if copied.version is None:
                copied.copy.copy_(copied.source)
            elif copied.source._version != copied.version:
                copied.version = copied.source._version
                copied.copy.copy_(copied.source)


def why_not_packed(weights: Sequence[Packed]) -> str | None:
    """Why kernels of whole layers do not support these weights; None if they do."""
    if any(weight.layout not in (cpu_tiles.NAME, cpu_tiles.SPARSE) for weight in weights):
        return "its weights are not packed for CPUs"
    if any(weight.data.data_ptr() % 64 or not weight.data.is_contiguous() for weight in weights):
        return "its packed weights do not begin at multiples of 64 bytes"
    return None
