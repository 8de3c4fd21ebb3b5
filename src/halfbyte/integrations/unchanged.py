"""Checks, before every call, whether a module still has the parts whose addresses are in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from halfbyte.integrations.ahead import watched
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules import QuantLinear


@dataclass(frozen=True, eq=False, slots=True)
class Unchanged:
    """A snapshot of a module's parts and tensors, with the dictionaries and names to find each again, and of biases that are joined."""

    modules: tuple[tuple[dict[str, Any], str, Any], ...]
    hooks: tuple[Mapping[int, Any], ...]
    tensors: tuple[tuple[dict[str, Any], str, Tensor, int], ...]
    biases: tuple[tuple[FusedLinear, Tensor], ...]
    settings: tuple[tuple[Any, str, Any], ...]

    @classmethod
    def of(cls, module: Any, read: Iterable[nn.Module], settings: Iterable[tuple[Any, str]] = ()) -> Unchanged:
        """`read`: the parts whose tensors matter, and of linear layers how they compute; `settings`: other attributes that do."""
        read = tuple(read)
        computes = ((part, name) for part in read if isinstance(part, QuantLinear) for name in ("compute", "activation"))
        inner = tuple((parent._modules, name, child) for parent in module.modules() for name, child in parent._modules.items())
        return cls(
            inner,
            tuple(hooks for _, _, part in inner for hooks in (part._forward_hooks, part._forward_pre_hooks)),
            tuple(
                (place, name, tensor, tensor.data_ptr())
                for part in read
                for place in (part._parameters, part._buffers)
                for name, tensor in place.items()
                if tensor is not None and name != "dtype_mark"
            ),
            tuple((part, bias) for part in read if isinstance(part, FusedLinear) and (bias := part.together[1]) is not None),
            tuple((owner, name, getattr(owner, name)) for owner, name in (*computes, *settings)),
        )

    def is_still(self) -> bool:
        """Runs with cold caches: plain loops, few calls."""
        for place, name, module in self.modules:
            if place.get(name) is not module:
                return False
        for place, name, tensor, address in self.tensors:
            if place.get(name) is not tensor or tensor.data_ptr() != address:
                return False
        for linear, bias in self.biases:
            if linear.together[1] is not bias:
                return False
        for owner, name, value in self.settings:
            if getattr(owner, name) != value:
                return False
        return not (any(self.hooks) and any(watched(module) for _, _, module in self.modules))
