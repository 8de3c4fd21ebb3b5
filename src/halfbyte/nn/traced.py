"""What torch.fx finds in convolutional networks: operations that more than one rewriter looks for."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

SAME = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Identity)  # in evaluation
ADDS = (operator.add, operator.iadd, torch.add)
RELUS = (torch.relu, nn.functional.relu, "relu", "relu_")


class _Proxy(fx.Proxy):
    """torch.fx's own proxy takes `x += y` for `x = x + y`, which leaves what else is called x as it was."""

    def __iadd__(self, other: Any) -> Any:
        return self._written(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._written(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._written(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._written(operator.itruediv, other)

    def _written(self, by: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", by, (self, other), {})


class Tracer(fx.Tracer):
    """torch.fx's tracer, of which operations that write to their first operand are nodes of their own (operator.iadd)."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)
