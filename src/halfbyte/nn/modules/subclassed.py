"""Subclasses of torch's convolutions whose forward calls `super().forward`, such as the causal ones of video models, which pad time and
keep frames for the next call.

They are quantized by a class that derives from theirs and from a quantized convolution, which follows it in the method resolution order:
the subclass's forward runs as it is, and its `super().forward` is the quantized one. Code that asks for its instances finds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import get_args

import torch
from torch import nn

from halfbyte.layouts.convolution import PackedConv
from halfbyte.nn.modules.conv import QUANT_CONVOLUTIONS, FloatConv, QuantConv2d

_SAME_AS_BASE = (".FalconLinear", "timm.layers.linear.Linear")
_KINDS = ("Conv1d", "Conv2d", "Conv3d")
_HARMLESS = {"forward", "extra_repr", "reset_parameters"}


def is_same_as_base(module: nn.Module) -> bool:
    """Whether a module is of a known subclass whose forward, though its own, computes the same as that of its base class."""
    return "forward" not in vars(module) and f"{type(module).__module__}.{type(module).__name__}".endswith(_SAME_AS_BASE)


def with_signature(function: FunctionType, like: Callable[..., object]) -> FunctionType:
    """Return a copy of a forward with the signature of another one, where torch.export, transformers and peft find a model's arguments."""
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__["__signature__"] = inspect.signature(like)
    return copied


def why_not_forward(module: nn.Module, base: type[nn.Module]) -> str | None:
    """The reason why a subclass of torch's `base` with a forward of its own is not quantized; None where that only calls `super().forward`
    on whatever it makes of its input."""
    name = type(module).__name__
    kind = base.__name__
    if kind not in _KINDS or type(module).__call__ is not nn.Module.__call__ or "forward" in vars(module):
        return f"{name} has a forward of its own"
    classes = type(module).__mro__[: type(module).__mro__.index(base)]
    for cls in classes:
        if (forward := vars(cls).get("forward")) is None:
            continue
        names = set(_names(getattr(forward, "__code__", None)))
        if "weight" in names or not {"super", "forward"} <= names:
            return f"{name} has a forward of its own, which {'reads its weight' if 'weight' in names else 'does not call super().forward'}"
    if any(True for child in module.children()) or {*module._parameters, *module._buffers} != {"weight", "bias"}:
        return f"{name} has a forward of its own, and more than a weight and a bias"
    form = QUANT_CONVOLUTIONS[kind]
    taken = {*dir(form), *(key for cls in form.__mro__ for key in getattr(cls, "__annotations__", ()))} - _HARMLESS
    added = {key for cls in classes for key in vars(cls) if not key.startswith("__")} | vars(module).keys() - _plain(kind)
    clash = min(added & taken, default=None)
    return None if clash is None else f"{name} has a {clash} of its own, and so has its quantized form"


def form_of(module: FloatConv | QuantConv2d) -> type[QuantConv2d]:
    """The class of the quantized form of a convolution that `why_not_forward` finds no fault with, or that is quantized."""
    if isinstance(module, QuantConv2d):
        return QUANT_CONVOLUTIONS[module.kind] if module.float_class is None else type(module)
    float_class: type[nn.Module] = getattr(module, "float_class", type(module))  # in training a module has another class
    base = next(base for base in get_args(FloatConv) if issubclass(float_class, base))
    return QUANT_CONVOLUTIONS[base.__name__] if float_class.forward is base.forward else _derived(float_class, base.__name__)  # type: ignore[arg-type]


def float_skeleton(module: QuantConv2d, **settings: object) -> nn.Module:
    """The float convolution of the class of the one that `module` replaced; settings: of torch's constructor."""
    base: type[nn.Module] = getattr(nn, module.kind)
    if module.float_class is None:
        return base(**settings)
    convolution = module.float_class.__new__(module.float_class)
    base.__init__(convolution, **settings)
    _take(convolution, module)
    return convolution


@cache
def _derived(float_class: type, kind: str) -> type[QuantConv2d]:
    form = QUANT_CONVOLUTIONS[kind]

    def init(
        self: QuantConv2d,
        packed: PackedConv,
        like: FloatConv | QuantConv2d,
        *settings: str,
        dtype: torch.dtype,
        error: float | None = None,
    ) -> None:
        form.__init__(self, packed, like, *settings, dtype=dtype, error=error)
        _take(self, like)

    def reduce(self: QuantConv2d, protocol: object) -> tuple[object, ...]:
        return _empty, (float_class, kind), self.__dict__

    members = {"__init__": init, "__reduce_ex__": reduce, "float_class": float_class, "__module__": __name__}
    ordered = type(form.__name__, (form, getattr(nn, kind)), {})  # so that torch's class follows the quantized one
    return type(f"Quant{float_class.__name__}", (float_class, ordered), members)


def _empty(float_class: type[nn.Module], kind: str) -> QuantConv2d:
    """One without attributes, for pickle and copy."""
    form = _derived(float_class, kind)  # type: ignore[arg-type]
    return form.__new__(form)


def _take(module: nn.Module, like: nn.Module) -> None:
    """Give a module what another one of the same subclass has beyond a convolution."""
    for name in vars(like).keys() - vars(module).keys() - _QUANTIZED:
        setattr(module, name, vars(like)[name])


_QUANTIZED = {"error", "fold", "compute", "activation", "_packed", "_checked", "_zeros", "packed_for", "transposed"}


@cache
def _plain(kind: str) -> set[str]:
    return set(vars(getattr(nn, kind)(1, 1, 1, device="meta")))


def _names(code: CodeType | None) -> Iterator[str]:
    """What a function's code reads by name, its comprehensions and inner functions included."""
    if code is not None:
        yield from (*code.co_names, *(name for name in code.co_consts if isinstance(name, str)))
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from _names(inner)
