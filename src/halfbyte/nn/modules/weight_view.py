"""The weight of a quantized module as other code sees it: `module.weight` reads like a float tensor, and refuses what would be lost.

Called by `quantized.py`, which holds the packed weight. `WeightView` is the weight outside of torch.compile, `TracedWeight` within.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_map_only

from halfbyte import ops
from halfbyte.bounded import ByTensor, count_write
from halfbyte.errors import UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.layouts.base import Packed
from halfbyte.layouts.convolution import PackedConv
from halfbyte.nn.modules.packed_check import digest
from halfbyte.ops.conv.functions import pack_conv

if TYPE_CHECKING:
    import numpy
    from torch._ops import OpOverload


AnyPacked = Packed | PackedConv


_FROZEN = "a quantized weight is frozen"
_REMEDY = "change the float weight and quantize again"
NOT_SET = f"{_FROZEN}, and cannot be set: {_REMEDY}"
_NOT_TRACED = f"{_FROZEN} within torch.compile: write to it before, as a first call of the model outside of torch.compile does"


class Step(NamedTuple):
    """An operation that makes a view of a weight, and which of its results that is, where it has several."""

    function: Callable[..., Any]
    arguments: tuple[object, ...]
    keywords: Mapping[str, object]
    which: int | None

    def of(self, base: Tensor) -> Tensor:
        result = self.function(base, *self.arguments, **self.keywords)
        return result if self.which is None else result[self.which]  # type: ignore[no-any-return]


class WeightView(Tensor):
    """A packed weight that behaves like a float tensor: it has shape, dtype and device, and is dequantized when it is used.

    Each operation dequantizes the weight again: code that reads `module.weight.dtype` costs nothing, code that multiplies by
    `module.weight` gets the correct product slowly. It is read-only, and so are its views (`weight[0]`, `weight.T`), except that the whole
    weight can be multiplied or divided in place by a number, which acts on its scales and offsets: RWKV does that when it first runs.
    `scale` and `zero` are those of the codes, as a state_dict names them.

    rows    those of `packed` that are the weight, if not all
    check   the `packed_check` of the weight
    steps   the operations that give the view, in their order, if it is not of the whole weight as it is
    base    the shape of the weight before these
    """

    packed: AnyPacked
    rows: slice | None
    steps: tuple[Step, ...]
    base: Sequence[int]
    check: Tensor | None
    _reference: weakref.ref[WeightView]

    @staticmethod
    def __new__(
        cls,
        packed: AnyPacked,
        dtype: torch.dtype,
        shape: Sequence[int],
        rows: slice | None = None,
        check: Tensor | None = None,
        steps: tuple[Step, ...] = (),
        strides: Sequence[int] | None = None,
        base: Sequence[int] | None = None,
    ) -> WeightView:
        view: WeightView = Tensor._make_wrapper_subclass(cls, shape, strides, dtype=dtype, device=packed.device)
        view.packed, view.rows, view.check, view.steps = packed, rows, check, steps
        view.base = shape if base is None else base  # the shape before the steps
        view._reference = weakref.ref(view)  # torch.utils.swap_tensors refuses tensors that have one
        return view

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    @property
    def scale(self) -> Tensor:
        return self._part_of_codes("scale")

    @property
    def zero(self) -> Tensor:
        return self._part_of_codes("zero")

    def _part_of_codes(self, name: str) -> Tensor:
        codes = ops.unpack(self.packed)
        tensors = (codes if self.rows is None else codes.select(self.rows)).tensors()
        if name not in tensors:
            raise AttributeError(f"a weight in {self.packed.codes_format} has no {name}")
        return tensors[name]

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not self.is_same(value):  # as after `weight.data *= 2`
            raise UnsupportedError(NOT_SET)

    def is_same(self, other: object) -> bool:
        """Whether `other` is a view of the same weight."""
        return isinstance(other, WeightView) and other.packed.data is self.packed.data and not (other.steps or self.steps)

    def _numbers(self) -> Tensor:
        numbers = ops.dequantize(self.packed, self.dtype)
        if self.rows is not None:
            numbers = numbers[self.rows]
        else:
            numbers = numbers.view(tuple(self.base))
        for step in self.steps:
            numbers = step.of(numbers)
        return numbers

    def _viewed(self, function: Callable[..., Any], arguments: tuple[object, ...], keywords: Mapping[str, object]) -> object:
        """The result of an operation that makes views of its first argument, this weight."""
        result = function(torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta"), *arguments, **keywords)

        def view(layout: Tensor, index: int | None) -> WeightView:
            steps = (*self.steps, Step(function, arguments, keywords, index))
            return WeightView(self.packed, self.dtype, layout.shape, self.rows, self.check, steps, layout.stride(), self.base)

        return view(result, None) if isinstance(result, Tensor) else [view(layout, i) for i, layout in enumerate(result)]

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        """Call torch's function. That the method exists keeps nn.TransformerEncoderLayer from its fast path, which would read all weights
        (dequantizing each) instead of calling the modules."""
        kwargs = kwargs or {}
        if (recorder := _recorder()) is not None and func in _WRITES and isinstance(args[0], cls):
            _refuse(recorder, func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling() and (func in _VIEWS or func.__name__ != "__get__"):  # torch.export takes no subclass
                if func in _VIEWS:
                    return args[0]._viewed(func, args[1:], kwargs)
                args, kwargs = tree_map_only(cls, cls._numbers, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> object:  # type: ignore[override]
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        for written in _written(func, args, kwargs):
            if isinstance(written, WeightView):
                _write(written, func, args)
                return written
        if func is torch.ops.aten.detach.default:  # `weight.data` refuses writes too
            return cls(first.packed, first.dtype, first.shape, first.rows, first.check, first.steps, first.stride(), first.base)
        if isinstance(first, WeightView) and any(result.alias_info is not None for result in func._schema.returns):
            # Within torch.inference_mode composite operations come here whole: `to` and `reshape`, which need not return a view.
            parts = func.decompose(*args, **kwargs)
            return first._viewed(func, args[1:], kwargs) if parts is NotImplemented else parts
        args, kwargs = tree_map_only(cls, cls._numbers, (args, kwargs))
        return func(*args, **kwargs)

    def __setitem__(self, index: object, value: object) -> None:
        raise UnsupportedError(f"{_FROZEN}: {_REMEDY}")

    def __deepcopy__(self, memo: object) -> Tensor:
        return self._numbers()

    def numpy(self, *, force: bool = False) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.generic]]:  # torch gives no subclass's
        return self._numbers().numpy(force=force)

    def tolist(self) -> Any:
        return self._numbers().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WeightView(shape={list(self.shape)}, dtype={self.dtype}, format={self.packed.codes_format})"


def _written(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    """The arguments to which an operation writes."""
    if not func._schema.is_mutable:
        return []
    places = [(i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    written = [kwargs.get(name) if name in kwargs or i >= len(args) else args[i] for i, name in places]
    return [one for value in written for one in (value if isinstance(value, list | tuple) else (value,))]


def _write(view: WeightView, func: OpOverload, args: Sequence[object]) -> None:
    """Carries out an operation that writes to a quantized weight, or raises UnsupportedError."""
    whole = view.rows is None and not view.steps  # not one of several fused weights, nor a part
    if (factor := _factor(func, args)) is None or not whole or not isinstance(view.packed, Packed):
        raise UnsupportedError(f"{_FROZEN}, and {func} would write to it: {_REMEDY}")
    if type(view.packed.data) is not Tensor or is_in_torch_dispatch_mode():
        _refuse("a dispatch mode such as FakeTensorMode", str(func))
    _multiply(view.packed, factor, view.check)


def _recorder() -> str | None:
    """What records operations at the moment, by their functions; None where they run."""
    if torch.compiler.is_compiling():
        return "torch.export"
    return None if torch._C._get_tracing_state() is None else "torch.jit.trace"


def _refuse(recorder: str, write: str) -> NoReturn:
    raise UnsupportedError(
        f"a quantized weight is written to when the operation runs, which {recorder} does not record, got {write}: call the model once "
        "before, outside of it, so that its weights are changed"
    )


def _factor(func: OpOverload, args: Sequence[Any]) -> float | None:
    """The number by which an operation multiplies a quantized weight in place; None for any other operation."""
    name = func._schema.name
    if name not in ("aten::mul_", "aten::div_") or func._overloadname not in ("Tensor", "Scalar"):
        return None
    if isinstance(args[1], Tensor) and (args[1].dim() or args[1].is_meta):
        return None
    number = float(args[1])
    if name == "aten::mul_":
        return number
    return 1 / number if number else None


_IN_PLACE_OPERATORS = "add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"
_NO_WRITES = "requires_grad_", "detach_", "share_memory_"
# Tuples, as torch.compile of torch 2.8 has no sets of functions.
_WRITES: tuple[object, ...] = (
    *(
        getattr(Tensor, name)
        for name in (
            *(name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES),
            *(f"__i{name}__" for name in _IN_PLACE_OPERATORS),
            "__setitem__",
        )
        if hasattr(Tensor, name)
    ),
    Tensor.data.__set__,  # type: ignore[attr-defined]
)
_WHOLE: tuple[object, ...] = Tensor.detach, Tensor.data.__get__  # type: ignore[attr-defined]
_VIEWS: tuple[object, ...] = (
    *(
        getattr(Tensor, name)
        for name in (
            *("__getitem__", "chunk", "expand", "flatten", "narrow", "permute", "reshape", "select", "split", "squeeze", "t", "transpose"),
            *("unbind", "unflatten", "unsqueeze", "view"),
        )
    ),
    *(*_WHOLE, Tensor.T.__get__, Tensor.mT.__get__, torch.t, torch.transpose),  # type: ignore[attr-defined]
)


class TracedWeight(Tensor):
    """The dequantized weight within torch.compile. Where code writes to it, torch.compile breaks its graph, and the write acts on the
    `owner`'s weight, too; it fails under fullgraph=True, and for parts of the weight.

    owner   the quantized module, where it is the whole weight
    """

    owner: nn.Module | None

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func in _WRITES and isinstance(args[0], cls):
            if torch.compiler.is_dynamo_compiling():
                torch._dynamo.graph_break(msg=_NOT_TRACED)
            from halfbyte.nn.modules.under_compile import write_outside

            return write_outside(func, args, kwargs or {}, _NOT_TRACED)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _VIEWS and isinstance(result, Tensor):
            return traced(result, args[0].owner if func in _WHOLE else None)
        return result

    def __setitem__(self, index: object, value: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(msg=_NOT_TRACED)
        raise UnsupportedError(_NOT_TRACED)


def traced(weight: Tensor, owner: nn.Module | None) -> Tensor:
    """A dequantized weight within torch.compile; see `TracedWeight`."""
    view = TracedWeight(weight[...])  # torch.compile makes none of an attribute, such as weight.T, itself
    view.owner = owner
    return view


def _multiply(packed: Packed, factor: float, check: Tensor | None) -> None:
    """Multiplies a weight in place, for all modules that share it, and updates its `packed_check`. Raises UnsupportedError where its scales
    cannot hold the result."""
    codes = ops.unpack(packed)
    tensors = codes.tensors()
    for name in ("scale", "zero") if codes.format.zero == "offset" else ("scale",):
        exact = tensors[name].double() * factor
        tensors[name] = exact.to(tensors[name].dtype)
        # A rounding to bfloat16 changes a number by 2^-9 of it at most; more is lost where it becomes subnormal or overflows.
        if not bool(((tensors[name].double() - exact).abs() <= exact.abs() * 2**-8).all()):
            kind = str(codes.format.scale).removeprefix("torch.")
            raise UnsupportedError(
                f"a weight in {codes.format} cannot be multiplied by {factor:.6g} in place, as its {kind} scales cannot hold the result: "
                "quantize it with float32 scales, or leave it in floating point with skip"
            )
    changed = pack_like(packed, Codes.from_tensors(codes.format, codes.shape, tensors), packed.device)
    packed.data.copy_(changed.data)
    count_write(packed.data)
    if check is not None:
        check.copy_(digest(packed.data))


@dataclass(slots=True)
class _Successors:
    """What a weight became last: packed for another device, and with other codes."""

    moved: AnyPacked | None = None
    loaded: AnyPacked | None = None


# Successors by the bytes of a weight, for as long as these live and are not written to, at most two for each: modules that share a weight
# still share it after each of them was moved, or loaded. Threads that move one module at the same time may pack its weight twice.
_successors = ByTensor[_Successors]()


def _successors_of(packed: AnyPacked) -> _Successors:
    return _successors.get(packed.data) or _successors.put(packed.data, _Successors())


def repacked(packed: AnyPacked, device: torch.device) -> AnyPacked:
    """The same weight, packed for another device."""
    successors = _successors_of(packed)
    if successors.moved is None or successors.moved.device != device:
        successors.moved = pack_like(packed, ops.unpack(packed), device)
    return successors.moved


def with_codes(packed: AnyPacked, codes: Codes) -> AnyPacked:
    """A weight with other codes, in place of `packed`."""
    wanted, successors = codes.to(packed.device).tensors(), _successors_of(packed)
    loaded = successors.loaded
    if loaded is None or not all(torch.equal(tensor, wanted[name]) for name, tensor in ops.unpack(loaded).tensors().items()):
        loaded = successors.loaded = pack_like(packed, codes, packed.device)
    return loaded


def pack_like(packed: AnyPacked, codes: Codes, device: torch.device) -> AnyPacked:
    """`codes` of the same shape as those of `packed`, packed for `device`."""
    if isinstance(packed, PackedConv):
        return pack_conv(codes, packed.sizes.kernel, packed.sizes.groups, device)
    return ops.pack(codes, device, sparse=packed.sparse)
