"""Checks, before every call, whether a module still has the parts whose addresses are in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfbyte.integrations.ahead import watched
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules import QuantLinear, QuantModule
from halfbyte.nn.weight_view import Changes

Setting = tuple[Any, str]  # an object and the name of an attribute
_get: Callable[[Any, str], Any] = dict.get
_version = attrgetter("_version")


class Unchanged:
    """A snapshot of what a module computes with: its parts, with the dictionaries and names to find each again, and their tensors.

    Once weights have passed through the caches the check waits for memory at each step: so what lies side by side is compared in C, and
    what is counted, attributes of quantized modules and hooks, is not looked at unless its count differs.
    """

    def __init__(self, module: Any, read: Iterable[nn.Module], settings: Iterable[Setting] = (), counted: Iterable[Setting] = ()) -> None:
        """
        read      the parts whose tensors matter, and of linear layers how they compute
        settings  other attributes that do
        counted   attributes that do, of objects whose changes `Changes` counts
        """
        read = tuple(read)
        inner = [(parent._modules, name, child) for parent in module.modules() for name, child in parent._modules.items()]
        self._sizes = [(parent._modules, len(parent._modules)) for parent in module.modules() if isinstance(parent, nn.ModuleList)]
        self._parts = [child for _, _, child in inner if child is not None]
        tensors = [entry for part in read for entry in _tensors(part)]
        values = [(owner, name, getattr(owner, name)) for owner, name in settings]
        own = [(owner.__dict__, name, value) for owner, name, value in values if name in vars(owner)]
        found = [*inner, *own, *((place, name, tensor) for place, name, tensor in tensors if place is not None)]
        self._places, self._names, self._values = ([entry[i] for entry in found] for i in range(3))
        self._tensors = [tensor for _, _, tensor in tensors]
        groups = {id(part.biases): part.biases for part in read if isinstance(part, FusedLinear) and part.together[1] is not None}
        self._biases = [(biases, [*biases]) for biases in groups.values()]
        joined = [bias for biases in groups.values() for bias in biases if bias is not None]
        self._counting = [bias for bias in joined if not bias.is_inference()]
        self._versions = list(map(_version, self._counting))
        self._tensors += joined
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        computes = [(part, name) for part in read if isinstance(part, QuantLinear) for name in ("compute", "activation")]
        self._packed = [(part, _packed(part)) for part in read if isinstance(part, QuantModule)]
        self._settings = tuple(setting for setting in values if setting[1] not in vars(setting[0]))
        self._counted = tuple((owner, name, getattr(owner, name)) for owner, name in (*computes, *counted))
        self._hooks = [hooks for part in self._parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._hooked = any(self._hooks)
        self._forwards = [vars(part).get("forward") for part in self._parts]
        self._seen = RemovableHandle.next_id, Changes.count

    def is_still(self) -> bool:
        if self._seen != (now := (RemovableHandle.next_id, Changes.count)):
            if not self._are_still():
                return False
            self._seen = now
        if not all(map(is_, map(_get, self._places, self._names), self._values)):
            return False
        if list(map(Tensor.data_ptr, self._tensors)) != self._addresses:
            return False
        for biases, before in self._biases:
            if not all(map(is_, biases, before)):
                return False
        if list(map(_version, self._counting)) != self._versions:
            return False
        for owner, name, value in self._settings:
            if getattr(owner, name) != value:
                return False
        for place, size in self._sizes:
            if len(place) != size:
                return False
        return not (self._hooked and any(map(watched, self._parts)))

    def _are_still(self) -> bool:
        """What is counted."""
        self._hooked = any(self._hooks)
        if any(getattr(owner, name) != value for owner, name, value in self._counted):
            return False
        if not all(vars(part).get("forward") is forward for part, forward in zip(self._parts, self._forwards, strict=True)):
            return False
        return all(_packed(part) is packed for part, packed in self._packed)


def _packed(part: Any) -> Any:
    return part.together[0] if isinstance(part, QuantLinear) else part.packed


def _tensors(part: Any) -> Iterator[tuple[dict[str, Any] | None, str, Tensor]]:
    """A part's tensors with their places."""
    if isinstance(part, QuantModule):
        yield part._buffers, "packed_data", part.packed_data
    else:
        yield from ((part._buffers, name, tensor) for name, tensor in part._buffers.items() if tensor is not None)
    yield from ((part._parameters, name, tensor) for name, tensor in part._parameters.items() if tensor is not None)
