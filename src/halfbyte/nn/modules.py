"""Modules whose weight is packed: QuantLinear in place of nn.Linear, QuantEmbedding and QuantEmbeddingBag in place of torch's.

The weight is frozen. Gradients flow to the activations. In a state_dict it appears in canonical order, as `weight.data`,
`weight.scale` and, where the format has one, `weight.zero` (see `Codes`), so that it means the same on every machine. `weight` itself is a
guard there, on which loading into a float module fails.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as module_file
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from halfbyte import ops
from halfbyte.errors import ArgumentError, FormatError, UnsupportedError
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.layouts.base import Packed
from halfbyte.layouts.convolution import PackedConv
from halfbyte.nn.described import check_compute
from halfbyte.nn.scaled import Factor, scaled, set_factor
from halfbyte.ops.conv import pack_conv

AnyPacked = Packed | PackedConv
# The attribute that describes a module's part of a weight that is distributed over processes (see parallel.py).
PART = "_halfbyte_part"


# Where torch keeps the hooks of a module, by what runs them.
_HOOKS = {
    "forward": ("_forward_hooks", "_forward_pre_hooks"),
    "backward": ("_backward_hooks", "_backward_pre_hooks"),
    "state_dict": ("_state_dict_hooks", "_state_dict_pre_hooks"),
    "load_state_dict": ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
}
CALLED = (*_HOOKS["forward"], *_HOOKS["backward"])  # those that a call of the module runs, or its gradient
_HOOK_SETTINGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_is_full_backward_hook")


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that run before or after its forward or its gradient."""
    return any(getattr(module, name) for name in CALLED)


def has_global_hooks() -> bool:
    """Whether hooks of all modules are registered, as by torch.nn.modules.module.register_module_forward_hook."""
    found = module_file._global_forward_pre_hooks, module_file._global_forward_hooks
    return any((*found, module_file._global_backward_pre_hooks, module_file._global_backward_hooks))


def why_not_hooks(module: nn.Module) -> str | None:
    """The reason why a module with hooks, of whatever kind, cannot be replaced by another one; None where it has no hooks."""
    kinds = [kind for kind, names in _HOOKS.items() if any(getattr(module, name) for name in names)]
    return f"it has {' and '.join(kinds)} hooks, which would be lost" if kinds else None


def share_hooks(module: nn.Module, other: nn.Module) -> None:
    """Gives another module the hooks of a module, in the same dictionaries, so that handles that torch returned remove them there too."""
    for name in (*(name for names in _HOOKS.values() for name in names), *_HOOK_SETTINGS):
        setattr(other, name, getattr(module, name))


def keep_hooks(module: nn.Module, replacement: nn.Module) -> None:
    """Gives the replacement of a module its hooks."""
    if why_not_hooks(module) is None:
        return
    share_hooks(module, replacement)
    hook: Any
    for hook in replacement._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):  # which torch calls with the module that it was registered for
            hook.module = weakref.ref(replacement)


def version(bias: Tensor | None) -> tuple[int, int] | None:
    """A value that changes when the bias is changed in place or replaced; torch does not count writes by way of `.data`."""
    return None if bias is None else (bias.data_ptr(), 0 if bias.is_inference() else bias._version)


def _version_of(data: Tensor) -> int | None:
    return None if data.is_inference() else data._version


class Changes:
    """Counts how often an attribute of a quantized module, or of another class that calls `add`, was set in this process: as long as
    `count` is the same, none has changed."""

    count: ClassVar[int] = 0
    _numbers: ClassVar[Iterator[int]] = itertools.count(1)

    @classmethod
    def add(cls) -> None:
        """To be called after a change, so that nobody sees the new count with the old value; threads never set the same number."""
        cls.count = next(cls._numbers)


def guard(device: torch.device | str = "cpu") -> Tensor:
    """The tensor stored under the name of a quantized weight itself: a reader that takes it for the weight fails because of its shape.

    Without it a reader that does not know halfbyte finds no weight, and leaves one that was initialized randomly, with a warning at most.
    """
    return torch.zeros(1, dtype=torch.uint8, device=device)


_SAMPLES = 4096  # bytes of a packed weight that `digest` reads


def digest(data: Tensor) -> Tensor:
    """Sum of squares of evenly spaced bytes, int64 [1]: not that of bytes that were averaged or scaled, as it is not linear."""
    bytes_ = data.reshape(-1).view(torch.uint8)
    sample = bytes_[:: max(1, len(bytes_) // _SAMPLES) | 1].long()
    return (sample * sample).sum().view(1)


_FROZEN = "a quantized weight is frozen"
_NOT_SET = f"{_FROZEN}, and cannot be set: change the float weight and quantize again"


class WeightView(Tensor):
    """A packed weight that behaves like a float tensor: it has shape, dtype and device, and is dequantized when it is used.

    Each operation dequantizes the weight again: code that reads `module.weight.dtype` costs nothing, code that multiplies by
    `module.weight` gets the correct product slowly. It is read-only, except that it can be multiplied or divided in place by a number,
    which acts on its scales and offsets: RWKV does that when it first runs. `scale` and `zero` are those of the codes, as a state_dict
    names them.

    rows   those of `packed` that are the weight, if not all
    """

    packed: AnyPacked
    rows: slice | None

    @staticmethod
    def __new__(cls, packed: AnyPacked, dtype: torch.dtype, shape: tuple[int, ...], rows: slice | None = None) -> WeightView:
        view: WeightView = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        view.packed, view.rows = packed, rows
        return view

    def __init__(self, packed: AnyPacked, dtype: torch.dtype, shape: tuple[int, ...], rows: slice | None = None) -> None:
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
            raise UnsupportedError(_NOT_SET)

    def is_same(self, other: object) -> bool:
        """Whether `other` is a view of the same weight."""
        return isinstance(other, WeightView) and other.packed.data is self.packed.data

    def _numbers(self) -> Tensor:
        if self.rows is not None:
            return ops.dequantize(self.packed, self.dtype)[self.rows]
        return ops.dequantize(self.packed, self.dtype).view(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls torch's function. That the method exists keeps nn.TransformerEncoderLayer from its fast path, which would read all weights
        (dequantizing each) instead of calling the modules."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._schema.is_mutable:
            whole = getattr(args[0], "rows", None) is None  # not one of several fused weights
            if (factor := _factor(func, args)) is None or not whole or not isinstance(packed := args[0].packed, Packed):
                raise UnsupportedError(f"{_FROZEN}, and {func} would write to it: change the float weight and quantize again")
            _multiply(packed, factor)
            return args[0]
        if func is torch.ops.aten.detach.default:  # `weight.data` refuses writes too
            return cls(args[0].packed, args[0].dtype, args[0].shape, args[0].rows)
        args, kwargs = tree_map_only(cls, cls._numbers, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise UnsupportedError("a quantized weight is frozen: change the float weight and quantize again")

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._numbers()

    def numpy(self, *, force: bool = False) -> Any:  # torch gives no subclass's
        return self._numbers().numpy(force=force)

    def tolist(self) -> Any:
        return self._numbers().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WeightView(shape={list(self.shape)}, dtype={self.dtype}, format={self.packed.codes_format})"


def _factor(func: Any, args: Sequence[Any]) -> float | None:
    """The number by which an operation multiplies a quantized weight in place; None for any other operation."""
    name = func._schema.name
    if name not in ("aten::mul_", "aten::div_") or func._overloadname not in ("Tensor", "Scalar") or not isinstance(args[0], WeightView):
        return None
    if isinstance(args[1], Tensor) and (args[1].dim() or args[1].is_meta):
        return None
    number = float(args[1])
    if name == "aten::mul_":
        return number
    return 1 / number if number else None


def _multiply(packed: Packed, factor: float) -> None:
    """Multiplies a weight in place, for all modules that share it. Raises UnsupportedError where its scales cannot hold the result."""
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
    for cache in (_moved, _loaded):
        cache.pop(packed.data, None)
    Changes.add()


# Weights that have moved to another device or got other codes, by their bytes before: modules that share one still share it afterwards.
_moved: MutableMapping[Tensor, AnyPacked] = WeakTensorKeyDictionary()
_loaded: MutableMapping[Tensor, AnyPacked] = WeakTensorKeyDictionary()


def _repacked(packed: AnyPacked, device: torch.device) -> AnyPacked:
    """The same weight, packed for another device."""
    if (there := _moved.get(packed.data)) is None or there.device != device:
        there = _moved[packed.data] = pack_like(packed, ops.unpack(packed), device)
    return there


def _with_codes(packed: AnyPacked, codes: Codes) -> AnyPacked:
    """A weight with other codes, in place of `packed`."""
    wanted, made = codes.to(packed.device).tensors(), _loaded.get(packed.data)
    if made is None or not all(torch.equal(tensor, wanted[name]) for name, tensor in ops.unpack(made).tensors().items()):
        made = _loaded[packed.data] = pack_like(packed, codes, packed.device)
    return made


def pack_like(packed: AnyPacked, codes: Codes, device: torch.device) -> AnyPacked:
    """`codes` of the same shape as those of `packed`, packed for `device`."""
    if isinstance(packed, PackedConv):
        return pack_conv(codes, packed.sizes.kernel, packed.sizes.groups, device)
    return ops.pack(codes, device, sparse=packed.sparse)


class QuantModule(nn.Module):
    """Base of the quantized modules: the packed weight, its representation in buffers and state_dict, and `.to`.

    packed  the weight: [N, K], that of a convolution, or those of experts
    dtype   of the float weight that it replaces; follows `.to(dtype)`, which does not change the packed bytes
    error   ||float weight - packed weight|| / ||float weight|| (Frobenius) when it was quantized, if known
    kind    the kind of the float module, such as "Linear"
    dimensions   how many the weight has, unless it is a convolution's
    transposed   whether the float module keeps its weight inputs first; see transposed.py
    """

    kind: ClassVar[str]
    dimensions: ClassVar[int] = 2
    transposed: bool = False
    packed_data: Tensor
    packed_check: Tensor
    dtype_mark: Tensor
    _checked: int | None = -1  # of packed_data when it was last checked: None where it has none, -1 where it was not checked

    def __init__(self, packed: AnyPacked, dtype: torch.dtype, error: float | None) -> None:
        super().__init__()
        if isinstance(packed, Packed) and len(packed.shape) != self.dimensions:
            wanted = "[N, K]" if self.dimensions == 2 else "[E, N, K]"
            raise ArgumentError(f"the weight of {type(self).__name__} is {wanted}, got shape {list(packed.shape)}")
        self.error = error
        # A buffer, so that torch counts and compiles it as part of the module; not persistent, as a layout is never stored.
        self.register_buffer("packed_data", packed.data, persistent=False)
        self.register_buffer("packed_check", digest(packed.data), persistent=False)
        self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype, device=packed.device), persistent=False)
        self._packed = packed
        self._checked = _version_of(packed.data)

    @property
    def packed(self) -> AnyPacked:
        """The weight: the bytes in `packed_data`, also where other code has put them there. Raises ArgumentError if they were computed."""
        if torch.compiler.is_compiling():
            return self._packed
        data: Any = self._buffers["packed_data"]
        packed, checked = self._packed, self._checked
        if data is packed.data and (checked is None or (checked >= 0 and data._version == checked)):
            return packed
        return self._follow(data)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._checked = -1  # a copy's tensors count from the beginning

    def _follow(self, data: Any) -> AnyPacked:
        """Takes over `packed_data` after it was replaced or written to."""
        if type(data) is not Tensor or data.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(data):
            return replace(self._packed, data=data)  # for this call only
        was, check = self._packed.data, self._buffers.get("packed_check")
        if (data.dtype, data.shape, data.device) != (was.dtype, was.shape, was.device):
            got, wanted = (f"{t.dtype} {list(t.shape)} on {t.device}" for t in (data, was))
            raise ArgumentError(f"packed_data of a {type(self).__name__} is {wanted}, got {got}: move and load the module, not its bytes")
        if check is not None and not torch.equal(digest(data), check):
            raise ArgumentError(
                f"packed_data of a {type(self).__name__} does not match packed_check: packed codes cannot be averaged or computed with, "
                "and both are copied together: average parameters alone (use_buffers=False), or float models, and quantize the result"
            )
        self._set_packed(replace(self._packed, data=data))
        self.refresh()
        return self._packed

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """The shape of the weight's codes."""
        return self._packed.shape if isinstance(self._packed, Packed) else self._packed.sizes.codes_shape

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the float weight that it replaces."""
        return self._packed.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.dtype_mark.dtype

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, for code that reads it; computed when it is used."""
        if torch.compiler.is_compiling():
            return ops.dequantize(self._packed, self.dtype).view(self.weight_shape)
        return WeightView(self.packed, self.dtype, self.weight_shape)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # torch's own errors do not say why
            if isinstance(value, WeightView) and value.packed.data is self._packed.data:  # as after `module.weight *= 2`
                return
            raise UnsupportedError(_NOT_SET)
        super().__setattr__(name, value)
        Changes.add()

    def codes(self) -> Codes:
        """The weight in canonical order."""
        return ops.unpack(self.packed)

    def _set_packed(self, packed: AnyPacked) -> None:
        self.packed_data = packed.data
        self.packed_check = digest(packed.data)
        self._packed = packed
        self._checked = _version_of(packed.data)

    def _set_codes(self, codes: Codes) -> None:
        """Replaces the weight by codes of the same format and shape."""
        self._set_packed(_with_codes(self._packed, codes))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantModule:
        device = fn(torch.empty(0, dtype=torch.uint8, device=self._packed.device)).device
        if device != self._packed.device:
            self._set_packed(_repacked(self._packed, device))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._set_packed(replace(self._packed, data=self.packed_data))
        self.refresh()
        return self

    def refresh(self) -> None:
        """Recomputes what depends on the weight and the bias, after either has changed."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = guard(self._packed.device)
        for name, tensor in self.codes().tensors().items():
            destination[f"{prefix}weight.{name}"] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        fmt, shape = self._packed.codes_format, self.codes_shape
        names = {name: f"{prefix}weight.{name}" for name in stored_tensors(fmt, shape)}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        # After hooks, which may change it.
        found = {name: state_dict[key] for name, key in names.items() if key in state_dict}
        given, whole = state_dict.get(f"{prefix}weight"), f"{prefix}weight"
        guarded = isinstance(given, Tensor) and given.shape == guard().shape
        mine = {*names.values(), *([whole] if guarded else ())}
        unexpected_keys[:] = [key for key in unexpected_keys if key not in mine]
        if len(found) < len(names):
            if not found and given is not None and not guarded:
                what = f"{whole} is in floating point there, and this module takes {fmt} codes"
                error_msgs.append(f"{what}: load the state into the float model, and quantize that")
            missing_keys.extend(key for name, key in names.items() if name not in found)
            return
        try:
            codes = Codes.from_tensors(fmt, shape, found)
            codes.check_values()
        except FormatError as e:
            error_msgs.append(f"{prefix}weight: {e}")
            return
        self._set_codes(codes)
        self.error = None
        self.refresh()


class QuantLinear(QuantModule):
    """y = x W^T + bias, as nn.Linear, with a quantized W.

    packed      W, [out_features, in_features]
    bias        [out_features] or None; kept in floating point, frozen
    compute     "float": W is dequantized in registers. "int8": x is quantized on the fly. "auto": the faster for the format
    activation  how "int8" quantizes x: per "block" or "row" of it, with an offset or without
    """

    kind = "Linear"
    packed: Packed
    bias: nn.Parameter | None

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None = None,
        compute: str = "auto",
        activation: str = "block",
        *,
        dtype: torch.dtype | None = None,
        error: float | None = None,
    ) -> None:
        super().__init__(packed, dtype or (torch.float32 if bias is None else bias.dtype), error)
        self.out_features, self.in_features = packed.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise ArgumentError(f"the bias of a weight of shape {list(packed.shape)} is [{self.out_features}], got {list(bias.shape)}")
        check_compute(compute, activation)
        self.compute = compute
        self.activation = activation
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias if bias is None else bias.requires_grad_(False))  # type: ignore[arg-type]

    @property
    def together(self) -> tuple[Packed, Tensor | None]:
        """The concatenated weight and bias of the layers that it is fused with; here, of a layer that is not fused, its own."""
        return self.packed, self.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features], float32, bfloat16 or float16 -> [..., out_features] of the same dtype."""
        return ops.linear(x, self.packed, self.bias, compute=self.compute, activation=self.activation)

    def extra_repr(self) -> str:
        fmt = self._packed.codes_format
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, format={fmt}"


class DerivedLinear(QuantLinear):
    """A QuantLinear made from another one, with its settings and its part of a distributed weight; by default with its weight."""

    def __init__(self, linear: QuantLinear, packed: Packed | None = None) -> None:
        super().__init__(packed or linear.packed, linear.bias, linear.compute, linear.activation, dtype=linear.dtype, error=linear.error)
        self.transposed = linear.transposed
        setattr(self, PART, getattr(linear, PART, None))
        keep_hooks(linear, self)
        self.train(linear.training)


class QuantEmbedding(QuantModule):
    """Rows of a quantized weight, as nn.Embedding: ids [...] -> [..., embedding_dim] of the module's dtype.

    embed_scale   a factor of the rows, if any (see scaled.py)
    """

    kind = "Embedding"
    packed: Packed
    embed_scale: Factor | None

    def __init__(
        self,
        packed: Packed,
        padding_idx: int | None = None,
        *,
        embed_scale: Factor | None = None,
        dtype: torch.dtype = torch.float32,
        error: float | None = None,
    ) -> None:
        super().__init__(packed, dtype, error)
        self.num_embeddings, self.embedding_dim = packed.shape
        self.padding_idx = padding_idx
        set_factor(self, embed_scale)

    def forward(self, ids: Tensor) -> Tensor:
        return scaled(ops.embedding(ids, self.packed, self.dtype), self.embed_scale)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, format={self._packed.codes_format}"


class QuantEmbeddingBag(QuantModule):
    """Sums, means or maxima of rows of a quantized weight, as nn.EmbeddingBag.

    like   the module whose settings it takes
    """

    kind = "EmbeddingBag"
    packed: Packed
    mode: str
    padding_idx: int | None
    include_last_offset: bool
    halfbyte_remark = "the rows of all bags are dequantized before torch reduces them: smaller than in float32, and slower"

    def __init__(
        self, packed: Packed, like: nn.EmbeddingBag | QuantEmbeddingBag, *, dtype: torch.dtype = torch.float32, error: float | None = None
    ) -> None:
        super().__init__(packed, dtype, error)
        self.num_embeddings, self.embedding_dim = packed.shape
        self.mode, self.padding_idx, self.include_last_offset = like.mode, like.padding_idx, like.include_last_offset

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """ids [bags, ids of each], or [ids] and where each bag starts in them -> [bags, embedding_dim] of the module's dtype."""
        flat = ids.flatten()
        places = torch.arange(len(flat), device=ids.device)
        if self.padding_idx is not None:  # its row comes first
            places = torch.where(flat == self.padding_idx, 0, places + 1)
            flat = torch.cat([flat.new_full((1,), self.padding_idx), flat])
        return functional.embedding_bag(
            places.view(ids.shape),
            ops.embedding(flat, self.packed, self.dtype),
            None if offsets is None else offsets.long(),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=None if self.padding_idx is None else 0,
        )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode}, format={self._packed.codes_format}"
