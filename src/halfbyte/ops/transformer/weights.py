"""The weights of a transformer layer, and their addresses.

Whole layers and whole models run on the CPU as one native program (decoder.py, encoder.py, experts.py, embed.py,
whole_model_decode.py), which reads weights, norms and biases by address. `TensorAddresses` hands the addresses out, keeps the memory
alive, and copies what is stored in another type than the program reads. `Weight` also describes the layers of GPU steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from halfbyte.bounded import version_of
from halfbyte.kernels.layer_kinds import Gelu
from halfbyte.kernels.problem import Activation, Problem, check_compute
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.step_sequence import Product


class Weight(NamedTuple):
    """A linear layer, weight [N, K] and bias [N], or stacked ones of experts, [E, N, K] and [E, N]; computed as in `ops.linear`."""

    packed: Packed
    bias: Tensor | None
    compute: str
    activation: Activation


@dataclass
class _Float32Copy:
    """A float32 copy of a tensor that is stored otherwise.

    version  torch's version counter of the tensor when it was copied; None: it is copied again by each `refresh`
    """

    copy: Tensor
    source: Tensor
    version: int | None

    def refresh(self) -> None:
        version = None if self.version is None else self.source._version
        if version is None or version != self.version:
            self.version = version
            self.copy.copy_(self.source)


class TensorAddresses:
    """Addresses of CPU tensors that a native program reads; the memory lives as long as this object.

    Programs read norms and biases as float32. Those of another type are copied: call `refresh` before the program runs, so that it reads
    what was written to them since.
    """

    def __init__(self) -> None:
        self._copies: list[_Float32Copy] = []
        self._alive: list[Tensor] = []

    def as_float32(self, tensor: Tensor) -> int:
        """Return the address of the tensor's elements, contiguous and in float32: its own, or that of a copy."""
        return self._float32(tensor)

    def as_stored(self, tensor: Tensor) -> int:
        """Return the address of the elements of a contiguous tensor, in its own type."""
        assert tensor.is_cpu
        assert tensor.is_contiguous()
        self._alive.append(tensor.detach())
        return tensor.data_ptr()

    def product(self, weight: Weight, *, gelu: Gelu = "") -> Product:
        """Return the product of float32 activations [M, K] and a weight, followed by GELU if `gelu`.

        For stacked weights [E, N, K] it is the product with the first one; a program computes the addresses of the others from it.
        """
        from halfbyte.dispatch.choose import cpu_kernel  # llvmlite is imported for CPU kernels alone
        from halfbyte.kernels.cpu.step_sequence import Product

        n, k = weight.packed.shape[-2:]
        sparse = weight.packed.layout == cpu_tiles.SPARSE
        fmt, compute = weight.packed.format, check_compute(weight.compute)
        kernel = cpu_kernel(Problem("linear", 1, n, k, fmt, torch.float32, compute, weight.activation, sparse=sparse), gelu=gelu)
        return Product(kernel, self.as_stored(weight.packed.data), 0 if weight.bias is None else self._bias(weight.bias))

    def _bias(self, bias: Tensor) -> int:
        """Return the address of a bias [N], or of those of all experts [E, N], in float32.

        Copying all experts' for each token takes too long: they are copied when torch's version counter says that they were written to,
        which does not see writes through `.data`.
        """
        return self._float32(bias, by_version=bias.dim() > 1)

    def _float32(self, tensor: Tensor, *, by_version: bool = False) -> int:
        assert tensor.is_cpu
        tensor = tensor.detach()
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            with torch.inference_mode(False):  # `refresh` writes to the copy, not always in that mode
                copy = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
            copy.copy_(tensor)
            self._copies.append(_Float32Copy(copy, tensor, version_of(tensor) if by_version else None))
            tensor = copy
        self._alive.append(tensor)
        return tensor.data_ptr()

    @property
    def has_copies(self) -> bool:
        """Whether there is anything to refresh."""
        return bool(self._copies)

    def refresh(self) -> None:
        """Copy tensors of other types again, where they may have been written to."""
        for copy in self._copies:
            copy.refresh()


def why_not_packed(weights: Sequence[Packed]) -> str | None:
    """Return why native programs of whole layers do not support these weights; None if they do."""
    if any(weight.layout not in (cpu_tiles.NAME, cpu_tiles.SPARSE) for weight in weights):
        return "its weights are not packed for CPUs"
    if any(weight.data.data_ptr() % 64 or not weight.data.is_contiguous() for weight in weights):
        return "its packed weights do not begin at multiples of 64 bytes"
    return None
