"""Modules whose weight is packed: QuantLinear in place of nn.Linear, QuantEmbedding and QuantEmbeddingBag in place of torch's.

The weight is frozen. Gradients flow to the activations. In a state_dict it appears in canonical order, as `weight.data`,
`weight.scale` and, where the format has one, `weight.zero` (see `Codes`), so that it means the same on every machine. `weight` itself is a
guard there, on which loading into a float module fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as module_file

from halfbyte import ops
from halfbyte.bounded import version_of
from halfbyte.errors import ArgumentError, FormatError, UnsupportedError
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.layouts.base import Packed
from halfbyte.nn.described import check_compute
from halfbyte.nn.modules.packed_check import check_bytes, check_of
from halfbyte.nn.modules.scaled import Factor, scaled, set_factor
from halfbyte.nn.modules.weight_view import NOT_SET, AnyPacked, TracedWeight, WeightView, pack_like, repacked, traced, with_codes

# The attribute that describes a module's part of a weight that is distributed over processes (see parallel/parallelize.py).
PART = "_halfbyte_part"


# Where torch keeps the hooks of a module, by what runs them.
_HOOKS = {
    "forward": ("_forward_hooks", "_forward_pre_hooks"),
    "backward": ("_backward_hooks", "_backward_pre_hooks"),
    "state_dict": ("_state_dict_hooks", "_state_dict_pre_hooks"),
    "load_state_dict": ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
}
CALL_HOOKS = (*_HOOKS["forward"], *_HOOKS["backward"])  # those that a call of the module runs, or its gradient
# Whose hooks of load_state_dict torch leaves behind where it makes such a weight plain again: they load weights of before.
_LEAVES_HOOKS = ("torch.nn.utils.parametrizations", "torch.nn.utils.spectral_norm")
_HOOK_SETTINGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_is_full_backward_hook")


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that run before or after its forward or its gradient."""
    return any(getattr(module, name) for name in CALL_HOOKS)


def has_global_hooks() -> bool:
    """Whether hooks of all modules are registered, as by torch.nn.modules.module.register_module_forward_hook."""
    found = module_file._global_forward_pre_hooks, module_file._global_forward_hooks
    return any((*found, module_file._global_backward_pre_hooks, module_file._global_backward_hooks))


def why_not_hooks(module: nn.Module) -> str | None:
    """The reason why a module with hooks, of whatever kind, cannot be replaced by another one; None where it has no hooks."""
    kinds = [
        kind
        for kind, names in _HOOKS.items()
        if any(
            kind != "load_state_dict" or hook.__module__ not in _LEAVES_HOOKS for name in names for hook in getattr(module, name).values()
        )
    ]
    return f"it has {' and '.join(kinds)} hooks, which would be lost" if kinds else None


def share_hooks(module: nn.Module, other: nn.Module) -> None:
    """Give another module the hooks of a module, in the same dictionaries, so that handles that torch returned remove them there too."""
    for name in (*(name for names in _HOOKS.values() for name in names), *_HOOK_SETTINGS):
        setattr(other, name, getattr(module, name))


def keep_hooks(module: nn.Module, replacement: nn.Module) -> None:
    """Give the replacement of a module its hooks."""
    if why_not_hooks(module) is None:
        return
    share_hooks(module, replacement)
    hook: Any
    for hook in replacement._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):  # which torch calls with the module that it was registered for
            hook.module = weakref.ref(replacement)


def guard(device: torch.device | str = "cpu") -> Tensor:
    """The tensor stored under the name of a quantized weight itself: a reader that takes it for the weight fails because of its shape.

    Without it a reader that does not know halfbyte finds no weight, and leaves one that was initialized randomly, with a warning at most.
    """
    return torch.zeros(1, dtype=torch.uint8, device=device)


class QuantModule(nn.Module):
    """Base of the quantized modules: the packed weight, its representation in buffers and state_dict, and `.to`.

    Args:
        packed: The weight: [N, K], that of a convolution, or those of experts.
        dtype: Of the float weight that it replaces; follows `.to(dtype)`, which does not change the packed bytes.
        error: ||float weight - packed weight|| / ||float weight|| (Frobenius) when it was quantized, if known.

    Attributes:
        kind: The kind of the float module, such as "Linear".
        dimensions: How many the weight has, unless it is a convolution's.
        transposed: Whether the float module keeps its weight inputs first; see transposed.py.
        packed_for: The device whose byte order the weight keeps wherever its bytes are moved; see `keep_layout_of`.

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0")
        >>> isinstance(model[0], hb.QuantModule)
        True
    """

    kind: ClassVar[str]
    dimensions: ClassVar[int] = 2
    transposed: bool = False
    packed_for: torch.device | None = None
    packed_data: Tensor
    packed_check: Tensor
    dtype_mark: Tensor
    _checked: int | None = -1  # of packed_data when it was last checked: None where it has none, -1 where it was not checked

    def __init__(self, packed: AnyPacked, dtype: torch.dtype, error: float | None) -> None:
        nn.Module.__init__(self)  # not a convolution's of torch, which may follow (see subclassed.py)
        if isinstance(packed, Packed) and len(packed.shape) != self.dimensions:
            wanted = "[N, K]" if self.dimensions == 2 else "[E, N, K]"
            raise ArgumentError(f"the weight of {type(self).__name__} is {wanted}, got shape {list(packed.shape)}")
        self.error = error
        # A buffer, so that torch counts and compiles it as part of the module; not persistent, as a layout is never stored.
        self.register_buffer("packed_data", packed.data, persistent=False)
        self.register_buffer("packed_check", check_of(packed.data), persistent=False)
        self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype, device=packed.device), persistent=False)
        self._packed = packed
        self._checked = version_of(packed.data)

    @property
    def packed(self) -> AnyPacked:
        """The weight: the bytes in `packed_data`, also where other code has put them there. Raises ArgumentError if they were computed."""
        data: Any = self._buffers["packed_data"]
        packed, checked = self._packed, self._checked
        if torch.compiler.is_compiling():
            if torch.compiler.is_dynamo_compiling():
                from halfbyte.nn.modules.under_compile import check_when_traced

                check_when_traced(type(self).__name__, data, self._buffers.get("packed_check"))
            return packed if data is packed.data else replace(packed, data=data)
        if data is packed.data and (checked is None or (checked >= 0 and data._version == checked)):
            return packed
        return self._follow(data)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._checked = -1  # a copy's tensors count from the beginning

    def _follow(self, data: Any) -> AnyPacked:
        """Take over `packed_data` after it was replaced or written to."""
        if (home := self.packed_for) is not None:
            if data.device.type != home.type:
                what = f"a {type(self).__name__} is packed for {home}, as group offloading asked, and its weight is on {data.device}"
                raise ArgumentError(f"{what}: call the model whose hooks move it, or load it again without group offloading")
            return replace(self._packed, data=data)  # its address may have changed
        if type(data) is not Tensor or data.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(data):
            return replace(self._packed, data=data)  # for this call only
        was = self._packed.data
        if (data.dtype, data.shape, data.device) != (was.dtype, was.shape, was.device):
            got, wanted = (f"{t.dtype} {list(t.shape)} on {t.device}" for t in (data, was))
            raise ArgumentError(f"packed_data of a {type(self).__name__} is {wanted}, got {got}: move and load the module, not its bytes")
        check_bytes(type(self).__name__, data, self._buffers.get("packed_check"))
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
        if torch.compiler.is_dynamo_compiling():
            return traced(ops.dequantize(self.packed, self.dtype).view(self.weight_shape), self)
        return WeightView(self.packed, self.dtype, self.weight_shape, check=self._buffers.get("packed_check"))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # torch's own errors do not say why
            if isinstance(value, WeightView) and value.packed.data is self._packed.data:  # as after `module.weight *= 2`
                return
            if isinstance(value, TracedWeight) and value.owner is self:
                return
            raise UnsupportedError(NOT_SET)
        super().__setattr__(name, value)

    def codes(self) -> Codes:
        """The weight in canonical order."""
        return ops.unpack(self.packed_anywhere)

    @property
    def packed_anywhere(self) -> AnyPacked:
        """The weight also where its bytes are not on the device that they are packed for: to describe it, not to compute with it."""
        return self.packed if self.packed_for is None else replace(self._packed, data=self.packed_data)

    def keep_layout_of(self, device: torch.device) -> None:
        """Pack the weight for `device` and leave it where it is, for code that moves `packed_data` by assigning to its `data`."""
        if (before := self.packed_for) is not None and before.type == device.type:
            return
        if before is not None:
            self.packed_for = None
            self._set_packed(pack_like(self._packed, ops.unpack(replace(self._packed, data=self.packed_data)), self.packed_data.device))
        home = self.packed.device
        self.to(device)
        self.packed_for, self._checked = device, -1
        self.to(home)

    def _set_packed(self, packed: AnyPacked) -> None:
        self.packed_data = packed.data
        self.packed_check = check_of(packed.data)
        self._packed = packed
        self._checked = version_of(packed.data) if self.packed_for is None else -1

    def _set_codes(self, codes: Codes) -> None:
        """Replace the weight by codes of the same format and shape."""
        self._set_packed(with_codes(self._packed, codes))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantModule:
        if self.packed_for is not None:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self._packed = replace(self._packed, data=self.packed_data)
            return self
        packed = self.packed  # checked, as its digest is computed anew
        device = fn(torch.empty(0, dtype=torch.uint8, device=packed.device)).device
        if device != packed.device:
            packed = repacked(packed, device)
            self._set_packed(packed)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        data = self.packed_data
        if data is not packed.data and not torch.equal(data, packed.data):  # as after to_empty
            data = packed.data
        self._set_packed(replace(packed, data=data))
        self.refresh()
        return self

    def refresh(self) -> None:
        """Recomputes what depends on the weight and the bias, after either has changed."""

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = guard(self._packed.device)
        for name, tensor in self.codes().tensors().items():
            destination[f"{prefix}weight.{name}"] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: object,
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
        expected = {*names.values(), *([whole] if guarded else ())}
        unexpected_keys[:] = [key for key in unexpected_keys if key not in expected]
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

    Args:
        packed: W, [out_features, in_features].
        bias: [out_features] or None; kept in floating point, frozen.
        compute: "float": W is dequantized in registers. "int8": x is quantized on the fly. "auto": the faster for the format.
        activation: How "int8" quantizes x: per "block" or "row" of it, with an offset or without.
        dtype: Of the float weight that it replaces.
        error: As in QuantModule.

    Example:
        >>> packed = hb.pack(hb.quantize(torch.randn(8, 32), "q8_0"))
        >>> hb.QuantLinear(packed)(torch.randn(2, 32)).shape
        torch.Size([2, 8])
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

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """x [..., in_features], float32, bfloat16 or float16 -> [..., out_features] of the same dtype; with `added`, of that shape."""
        return ops.linear(x, self.packed, self.bias, residual=added, compute=self.compute, activation=self.activation)

    def with_low_rank(self, x: Tensor, into: Tensor, out: Tensor) -> Tensor:
        """forward(x) + x intoᵀ outᵀ in one product, where `row_codes.adds_low_rank`."""
        return ops.linear_low_rank(x, functional.linear(x, into), out, self.packed, self.bias, self.compute, self.activation)

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

    def with_low_rank(self, x: Tensor, into: Tensor, out: Tensor) -> Tensor:
        """forward(x) + x intoᵀ outᵀ, by forward itself: it may be another function of the weight than that of QuantLinear."""
        return self(x) + functional.linear(functional.linear(x, into), out)  # type: ignore[no-any-return]


class QuantEmbedding(QuantModule):
    """Rows of a quantized weight, as nn.Embedding: ids [...] -> [..., embedding_dim] of the module's dtype.

    Args:
        packed: The weight [N, K].
        padding_idx: As in nn.Embedding.
        embed_scale: a factor of the rows, if any (see scaled.py).
        dtype: Of the rows.
        error: As in QuantModule.

    Example:
        >>> packed = hb.pack(hb.quantize(torch.randn(8, 32), "q8_0"))
        >>> hb.QuantEmbedding(packed)(torch.tensor([1])).shape
        torch.Size([1, 32])
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

    Args:
        packed: The weight [N, K].
        like: The module whose settings it takes.
        dtype: Of the results.
        error: As in QuantModule.

    Example:
        >>> packed = hb.pack(hb.quantize(torch.randn(8, 32), "q8_0"))
        >>> hb.QuantEmbeddingBag(packed, nn.EmbeddingBag(8, 32))(torch.tensor([[0, 1]])).shape
        torch.Size([1, 32])
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
