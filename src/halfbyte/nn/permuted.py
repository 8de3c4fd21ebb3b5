"""A linear layer whose weight keeps its columns in another order than its inputs have."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.layouts.base import Packed
from halfbyte.nn.modules import QuantLinear

ORDER = "input_order"


class PermutedLinear(QuantLinear):
    """y = x[..., order] W^T + bias: column j of W belongs to input order[j].

    GPTQ with activation order gives weights whose blocks are not runs of inputs. Sorted by block they are, without a number changed,
    at the price of reordering x.

    input_order  int32 [in_features], a permutation
    """

    input_order: Tensor

    def __init__(
        self,
        packed: Packed,
        input_order: Tensor,
        bias: Tensor | None = None,
        compute: str = "auto",
        activation: str = "block",
        *,
        dtype: torch.dtype | None = None,
        error: float | None = None,
    ) -> None:
        super().__init__(packed, bias, compute, activation, dtype=dtype, error=error)
        check_order(input_order, self.in_features)
        self.register_buffer(ORDER, input_order.to(torch.int32))

    @classmethod
    def of(cls, linear: QuantLinear, input_order: Tensor) -> PermutedLinear:
        """`linear` with its columns understood as those of inputs `input_order`."""
        settings = {"dtype": linear.dtype, "error": linear.error}
        made = cls(linear.packed, input_order, linear.bias, linear.compute, linear.activation, **settings)  # type: ignore[arg-type]
        made.transposed = linear.transposed
        return made.train(linear.training)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight [N, K], columns in the order of the inputs; computed when it is read."""
        return ops.dequantize(self.packed, self.dtype)[:, self.input_order.long().argsort()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.index_select(-1, self.input_order))


def check_order(order: Tensor, k: int) -> None:
    """Raises ArgumentError for what is not a permutation of `k` inputs."""
    sound = order.dim() == 1 and order.dtype in (torch.int32, torch.int64)
    if not sound or not torch.equal(order.long().sort().values, torch.arange(k, device=order.device)):
        raise ArgumentError(f"an input order is a permutation of 0 … {k - 1}, got {order.dtype} {list(order.shape)} with other values")
