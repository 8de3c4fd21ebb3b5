"""A linear layer whose weight has its columns in another order than its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.nn.described import ORDER
from halfbyte.nn.modules.quantized import DerivedLinear, QuantLinear
from halfbyte.nn.modules.weight_view import Step, WeightView, traced


class PermutedLinear(DerivedLinear):
    """y = x[..., order] W^T + bias: column j of W belongs to input order[j].

    In weights of GPTQ with activation order the blocks are not contiguous inputs. Sorting the columns by block makes them contiguous and
    changes no number; x is reordered at each call instead.

    linear       the layer to take over; its columns belong to the inputs `input_order`
    input_order  int32 [in_features], a permutation
    """

    input_order: Tensor

    def __init__(self, linear: QuantLinear, input_order: Tensor) -> None:
        super().__init__(linear)
        check_order(input_order, self.in_features)
        self.register_buffer(ORDER, input_order.to(torch.int32))

    @property
    def weight(self) -> Tensor:
        """The dequantized weight [N, K], columns in the order of the inputs; computed when it is used."""
        in_order = self.input_order.long().argsort()
        if torch.compiler.is_dynamo_compiling():
            return traced(ops.dequantize(self.packed, self.dtype)[:, in_order], self)
        sorted_ = Step(torch.index_select, (1, in_order), {}, None)
        return WeightView(self.packed, self.dtype, self.weight_shape, steps=(sorted_,))

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        return super().forward(x.index_select(-1, self.input_order), added)


def check_order(order: Tensor, k: int) -> None:
    """Raise ArgumentError for what is not a permutation of `k` inputs."""
    sound = order.dim() == 1 and order.dtype in (torch.int32, torch.int64)
    if not sound or not torch.equal(order.long().sort().values, torch.arange(k, device=order.device)):
        raise ArgumentError(f"an input order is a permutation of 0 … {k - 1}, got {order.dtype} {list(order.shape)} with other values")
