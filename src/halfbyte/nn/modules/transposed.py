"""Weights that transformers' float modules keep inputs first: those of Conv1D, [K, N], in GPT-2 and similar models, and those of gpt-oss's
experts, [E, K, N].

Codes are always [N, K] and [E, N, K]. The attribute `transposed` of a quantized module tells that the weight of its float form is
transposed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.nn.modules.quantized import share_hooks

TRANSPOSED = "transposed"  # this attribute, of float and of quantized modules


class Conv1DLinear(nn.Linear):
    """A Conv1D as a Linear: weight [N, K] is a view of the Conv1D's, bias and hooks are the same. See expanded.py.

    `weight` is the transposed view, passed in so that modules that share a weight also share its view.
    """

    transposed = True

    def __init__(self, module: Any, weight: nn.Parameter) -> None:
        nn.Module.__init__(self)
        self._float = (module,)  # in a tuple, so that torch does not register it as a child
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, module.bias
        share_hooks(module, self)
        self.train(module.training)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D itself, y = x W + b with W [K, N]; transformers is not imported for this."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils" and "forward" not in vars(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether the float form of a module has its weight inputs first."""
    transposed_convolution = isinstance(module, nn.modules.conv._ConvNd)  # torch has this attribute too
    return is_conv1d(module) or (getattr(module, TRANSPOSED, False) and not transposed_convolution)


def transposed_parameter(parameter: Tensor) -> nn.Parameter:
    """A view of a parameter with its last two dimensions exchanged."""
    return nn.Parameter(parameter.detach().mT, requires_grad=parameter.requires_grad)


def conv1d(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The Conv1D of a weight [N, K]."""
    from transformers import pytorch_utils

    n, k = weight.shape
    form: Any = pytorch_utils.Conv1D
    with torch.device("meta"):
        module: nn.Module = form(n, k)
    module.weight = nn.Parameter(weight.detach().T.contiguous(), requires_grad=weight.requires_grad)
    module.bias = bias  # type: ignore[assignment]
    return module
