"""The loaded codes of one vLLM layer, packed for halfbyte's kernels. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfbyte import ops
from halfbyte.formats.codes import Codes
from halfbyte.kernels.problem import Problem, check_compute


@dataclass(frozen=True)
class Part:
    """The rows that one module of the checkpoint contributes to a layer.

    Attributes:
        weight: Codes [N, K], or a float weight.
        compute, activation: As in `halfbyte.linear`.
        input_order: Column j of the weight belongs to input `input_order[j]`; None where they are in order.
    """

    weight: Codes | Tensor
    compute: str = "auto"
    activation: str = "block"
    input_order: Tensor | None = None

    def shares_product(self, other: Part) -> bool:
        """Whether the rows of both can be in one product."""
        if not isinstance(self.weight, Codes) or not isinstance(other.weight, Codes):
            return not isinstance(self.weight, Codes) and not isinstance(other.weight, Codes)
        settings = [(part.compute, part.activation, part.input_order is None) for part in (self, other)]
        same_order = self.input_order is None or other.input_order is None or torch.equal(self.input_order, other.input_order)
        return _by_row(self.weight).format == _by_row(other.weight).format and settings[0] == settings[1] and same_order


class PackedRows(nn.Module):
    """Rows of a layer that one product computes: y = x · Wᵀ + bias."""

    input_order: Tensor | None
    weight: Tensor  # where it is in floating point

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        first = parts[0]
        codes = [_by_row(part.weight) if len(parts) > 1 else part.weight for part in parts if isinstance(part.weight, Codes)]
        self.compute, self.activation = first.compute, first.activation
        self.register_buffer("input_order", first.input_order, persistent=False)
        if codes:
            self.packed = ops.pack(codes[0] if len(codes) == 1 else Codes.joined(codes, torch.cat), codes[0].data.device)
            self.rows = self.packed.shape[0]
        else:
            weights = [part.weight for part in parts if isinstance(part.weight, Tensor)]
            self.register_buffer("weight", torch.cat(weights), persistent=False)
            self.rows = sum(map(len, weights))

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.input_order is not None:
            x = x.index_select(-1, self.input_order)
        if hasattr(self, "packed"):
            return ops.linear(x, self.packed, bias, compute=self.compute, activation=self.activation)
        return functional.linear(x, self.weight, bias)


class PackedLayer(nn.Module):
    """A linear layer, the rows of whose parts are in one product where their formats and settings are the same.

    Mixed formats are usual in files of llama.cpp: in Q4_K_M, values have other ones than queries and keys.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        runs: list[list[Part]] = []
        for part in parts:
            if runs and runs[-1][0].shares_product(part):
                runs[-1].append(part)
            else:
                runs.append([part])
        self.products = nn.ModuleList(map(PackedRows, runs))
        self.sizes = [product.rows for product in self.products]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K], bias [N] or None -> [..., N]."""
        if len(self.sizes) == 1:
            return self.products[0](x, bias)  # type: ignore[no-any-return]
        biases = [None] * len(self.sizes) if bias is None else bias.split(self.sizes)
        return torch.cat([product(x, one) for product, one in zip(self.products, biases, strict=True)], dim=-1)

    def describe(self, dtype: torch.dtype) -> str:
        """Say in which formats the weights are and which kernel multiplies, for the log."""
        return " and ".join(text for text, _ in groupby(describe(rows, dtype) for rows in self.products if isinstance(rows, PackedRows)))


def describe(rows: PackedRows, dtype: torch.dtype) -> str:
    """Say how a product is computed for activations of `dtype`: the weight's format and the kernel."""
    if not hasattr(rows, "packed"):
        return "floating point"
    if not rows.packed.data.is_cpu:
        return f"{rows.packed.codes_format} (a GPU kernel by shape, see `halfbyte explain`)"
    from halfbyte.dispatch.choose import choose
    from halfbyte.kernels.cpu.codegen.isas import current

    n, k = rows.packed.shape
    option = choose(Problem("linear", 1, n, k, rows.packed.format, dtype, check_compute(rows.compute)), current()).options[0]
    return f"{rows.packed.codes_format} ({option.candidate.summary}; {current().name})"


def _by_row(codes: Codes) -> Codes:
    """The same numbers with a scale for each row where the codes have one for the tensor: rows of several tensors can then be joined."""
    if codes.format.block != "tensor":
        return codes
    n, k = codes.shape
    scales = {name: tensor.expand(n, 1).contiguous() for name, tensor in codes.tensors().items() if name != "data"}
    return Codes.from_tensors(replace(codes.format, block="channel"), (n, k), {"data": codes.data, **scales})
