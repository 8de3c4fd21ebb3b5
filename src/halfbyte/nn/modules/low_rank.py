"""Linear layers of which a product of low rank takes the outliers, so that the rest can have 4 bits: `Config(low_rank=...)`.

The rest is an ordinary Linear inside, called `residual`, which is quantized, saved and reported like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfbyte.errors import ArgumentError
from halfbyte.nn.modules.quantized import QuantLinear, has_hooks
from halfbyte.ops.row_codes import adds_low_rank
from halfbyte.quantizers.low_rank import low_rank


class LowRankLinear(nn.Module):
    """y = z R^T + (z A^T) B^T + bias with z = x * input_scale, in place of a Linear with the weight W = (R + B A) * input_scale.

    A, B and input_scale have the dtype of the float weight; the second product is added to the sums of the first before these are rounded.

    Args:
        linear: The float layer, whose sizes, dtype, device and bias it takes.
        rank: Of B A.
        scaled: Whether its inputs have a scale.

    Attributes:
        residual: The layer with the weight R and the bias.
        low_rank_in: A [rank, K].
        low_rank_out: B [N, rank].
        input_scale: [K] or None.
    """

    residual: nn.Linear | QuantLinear
    low_rank_in: nn.Parameter
    low_rank_out: nn.Parameter
    input_scale: nn.Parameter | None

    def __init__(self, linear: nn.Linear, rank: int, *, scaled: bool) -> None:
        super().__init__()
        n, k = self.out_features, self.in_features = linear.out_features, linear.in_features
        if not 0 < rank < min(n, k):
            raise ArgumentError(f"the rank of a branch of a weight [{n}, {k}] is from 1 to {min(n, k) - 1}, got {rank}")
        self.residual = nn.Linear(k, n, bias=False, device="meta", dtype=linear.weight.dtype)
        self.residual.bias = linear.bias
        self.low_rank_in, self.low_rank_out = _parameter(linear, rank, k), _parameter(linear, n, rank)
        self.input_scale = _parameter(linear, k) if scaled else None
        self.train(linear.training)

    @classmethod
    @torch.no_grad()
    def of(cls, linear: nn.Linear, rank: int, scale: Tensor | None = None) -> LowRankLinear:
        """The branch of a float layer; scale: of its inputs. Its residual still has the weight W, until `rest` takes that place."""
        module = cls(linear, rank, scaled=scale is not None)
        if scale is not None and module.input_scale is not None:
            module.input_scale.copy_(scale)
        out, into = low_rank(module._scaled(linear.weight), rank)
        module.low_rank_out.copy_(out)
        module.low_rank_in.copy_(into)
        module.residual.register_parameter("weight", linear.get_parameter("weight"))
        return module

    @torch.no_grad()
    def rest(self) -> Tensor:
        """R in float32, of a branch whose residual has the weight W: what A and B leave of it, as they are stored."""
        return self._scaled(self.residual.get_parameter("weight")) - self.low_rank_out.float() @ self.low_rank_in.float()

    def _scaled(self, weight: Tensor) -> Tensor:
        return weight.float() if self.input_scale is None else weight.float() / self.input_scale.float()

    @property
    def bias(self) -> Tensor | None:
        return self.residual.bias

    @property
    def weight(self) -> Tensor:
        """The float weight [N, K] that it computes with; computed when it is used."""
        weight = self.residual.weight.float() + self.low_rank_out.float() @ self.low_rank_in.float()
        return (weight if self.input_scale is None else weight * self.input_scale.float()).to(self.low_rank_in.dtype)

    def merged(self) -> nn.Linear:
        """A float Linear with this weight."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight)
        linear.register_parameter("bias", self.residual.bias)
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] of the same dtype."""
        if self.input_scale is not None:
            x = x * self.input_scale.to(x.dtype)
        into, out = self.low_rank_in.to(x.dtype), self.low_rank_out.to(x.dtype)
        residual = self.residual
        # Hooks take the residual's own output: with some, the branch is added after them.
        adding = residual if isinstance(residual, QuantLinear) and not has_hooks(residual) else None
        if adding is not None and adds_low_rank(x, adding.bias, adding.compute, into, out):
            return adding.with_low_rank(x, into, out)
        branch = functional.linear(functional.linear(x, into), out)
        if type(adding) is QuantLinear:
            return adding(x, added=branch)  # type: ignore[no-any-return]
        return residual(x) + branch  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={len(self.low_rank_in)}"


def _parameter(linear: nn.Linear, *shape: int) -> nn.Parameter:
    return nn.Parameter(linear.weight.new_empty(shape), requires_grad=False)


@contextmanager
def placed(model: nn.Module, branches: Mapping[str, nn.Module]) -> Iterator[None]:
    """A context in which these modules are in the places of others, and after it, unless there is an error."""
    before = {name: model.get_submodule(name) for name in branches}
    for name, branch in branches.items():
        model.set_submodule(name, branch)
    try:
        yield
    except BaseException:
        for name, module in before.items():
            model.set_submodule(name, module)
        raise


def expected(model: nn.Module, ranks: Mapping[str, tuple[int, bool]]) -> dict[str, nn.Module]:
    """Branches without data for float layers of a model: name -> the rank, and whether inputs have a scale. What cannot have that rank is
    left, so that readers miss its residual."""
    layers = {name: layer for name, layer in model.named_modules() if name in ranks and isinstance(layer, nn.Linear)}
    fitting = {name: layer for name, layer in layers.items() if 0 < ranks[name][0] < min(layer.weight.shape)}
    return {name: LowRankLinear(layer, ranks[name][0], scaled=ranks[name][1]) for name, layer in fitting.items()}
