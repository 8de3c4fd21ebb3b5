"""`fuse_`: quantized layers of a model computed together, in place.

    siblings       linear layers with one input (queries, keys and values; gate and up) in one product: their weights are concatenated along
                   the rows, and their outputs are slices of its result; no number changes
    activations    GELU and GEGLU within the product before them, applied before its result is rounded: no number changes by more than
                   2^-20 of the activation's argument
    blocks, convolutions   fused_blocks.py, fused_convolutions.py

A token then takes fewer and larger products, which matters where each is short: activations are quantized once, and threads or thread
blocks synchronize less often.

Modules stay where they were: each sibling becomes a `FusedLinear`, and all of them share a `_Group`, which has the concatenated weight and
keeps the outputs for an input until each sibling was called with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfbyte import ops
from halfbyte.bounded import count_write, version_of
from halfbyte.errors import ArgumentError, UnsupportedError, check_type
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.sparse import SPARSITY
from halfbyte.nn.data_flow import feeds_only
from halfbyte.nn.described import RESIDUAL
from halfbyte.nn.fused_blocks import fuse_blocks_
from halfbyte.nn.fused_convolutions import fuse_convolutions_
from halfbyte.nn.fusion_notes import WATCHED, note_alone, note_together
from halfbyte.nn.modules.low_rank import LowRankLinear
from halfbyte.nn.modules.packed_check import digest
from halfbyte.nn.modules.quantized import DerivedLinear, QuantLinear, QuantModule, why_not_hooks
from halfbyte.nn.modules.weight_view import AnyPacked, WeightView, traced
from halfbyte.ops.tensors import geglu

_Approximate = Literal["none", "tanh"]

# Names of children that their parent in transformers or diffusers calls in this order with the same tensor
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "k_proj"),  # where values are computed from the keys (Gemma 4)
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("to_q", "to_k", "to_v"),
    ("to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("add_k_proj", "add_v_proj"),
)

# Cross-attention in transformers, torch and diffusers, by its module's name: queries come from another tensor than keys and values.
_CROSS_ATTENTION = {"crossattention", "encoder_attn", "EncDecAttention", "cross_attn", "multihead_attn"}
_CROSS_ATTENTION_SIBLINGS = {("to_k", "to_v"), ("add_k_proj", "add_v_proj")}

# Names of a linear layer and of the activation to which its parent passes its output, which nothing else uses
ACTIVATED = (
    ("dense", "intermediate_act_fn"),
    ("dense", "transform_act_fn"),
    ("fc1", "activation_fn"),
    ("fc1", "act"),
    ("lin1", "activation"),
    ("proj_mlp", "act_mlp"),
)


def fuse_(model: nn.Module, siblings: Sequence[Sequence[str]] = SIBLINGS, activated: Sequence[tuple[str, str]] = ACTIVATED) -> nn.Module:
    """Fuse quantized siblings, and additions and ReLUs into the quantized convolutions before them, in place.

    Neighbours that differ in format, width, device, compute or dtype of their biases are not fused. Convolutions are in modules in
    evaluation that torch.fx can trace, and that take one tensor. A saved model is the same with and without. The notes of `report(model)`
    list what was fused, and what was not and why. Between siblings, nothing may write to their input on a GPU in inference mode.

    Args:
        model: A quantized model.
        siblings: Names of children that their parent calls in this order with the same tensor.
        activated: Names of a child and of the GELU to which its parent passes its output.

    Returns:
        `model`.

    Raises:
        ArgumentError: The model has no quantized layers.

    Example:
        >>> class Attention(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))
        >>> type(hb.fuse_(hb.quantize_(Attention(), "q8_0")).q_proj).__name__
        'FusedLinear'
    """
    check_type(model, nn.Module, "fuse_ takes a model, a torch.nn.Module", "pass the model that quantize_ or load returned")
    if not any(isinstance(module, QuantModule) for module in model.modules()):
        raise ArgumentError(f"fuse_ takes a quantized model, got a {type(model).__name__} without quantized layers: call quantize_ first")
    for module in model.modules():
        if type(module) is QuantLinear and module.compute == "int8" and module.packed_for is None:
            module._set_packed(ops.in_order(module.packed))
    for path, parent in list(model.named_modules()):
        for names in siblings:
            if tuple(names) in _CROSS_ATTENTION_SIBLINGS or not _is_cross_attention(path, parent):
                _fuse_siblings(parent, names)
        _fuse_diffusers_activation(model, path, parent)
        for name, function in activated:
            _fuse_gelu(parent, name, function)
    fuse_blocks_(model)
    fuse_convolutions_(model)
    return model


def _is_cross_attention(path: str, module: nn.Module) -> bool:
    """Return whether a module, or one that it is in, is cross-attention; in diffusers an attribute says so, or the name "attn2"."""
    names = path.split(".")
    return not _CROSS_ATTENTION.isdisjoint(names) or bool(vars(module).get("is_cross_attention", "attn2" in names))


def _fuse_siblings(parent: nn.Module, names: Sequence[str]) -> None:
    """Fuse the children `names` of a module, if all are quantized linear layers: neighbours that have the same `_fusion_key`."""
    places = [_place(parent, name) for name in names]
    layers = [layer for place in places if type(layer := place.layer) is QuantLinear and not _is_watched(layer)]
    if len(layers) < len(names):
        if layers and (reason := _why_no_siblings(names, places)) is not None:
            note_alone(parent, names, reason)
        return
    differ = False
    for _, neighbours in groupby(zip(names, places, layers, strict=True), lambda each: _fusion_key(each[2])):
        fused_names, fused_places, linears = zip(*neighbours, strict=True)
        if len(linears) < 2:
            differ = True
            continue
        if len({linear.bias.dtype for linear in linears if linear.bias is not None}) > 1:
            note_alone(parent, fused_names, "their biases have several dtypes")
            continue
        group = _Group.of(linears)
        branches = [place.home for place in fused_places if isinstance(place.home, LowRankLinear)]
        if len(branches) == len(linears) and len({branch.low_rank_out.shape for branch in branches}) == 1:
            group.branches = branches
        for i, (place, linear) in enumerate(zip(fused_places, linears, strict=True)):
            setattr(place.home, place.name, FusedLinear(group, i, linear))
        note_together(parent, fused_names)
    if differ:
        pairs = pairwise(zip(names, map(_fusion_key, layers), strict=True))
        differences = [f"{b} differs from {a} in {what}" for (a, old), (b, new) in pairs if (what := _difference(old, new))]
        note_alone(parent, names, ", ".join(differences))


def _why_no_siblings(names: Sequence[str], places: Sequence[_Place]) -> str | None:
    """Return which of these children cannot be fused and why; None where one does not exist, or is fused already."""
    layers = [(name, place.layer) for name, place in zip(names, places, strict=True)]
    if any(layer is None or isinstance(layer, FusedLinear) for _, layer in layers):
        return None
    unquantized = [f"{name} is a {type(layer).__name__}" for name, layer in layers if type(layer) is not QuantLinear]
    return [*unquantized, *(f"{name} has {WATCHED}" for name, layer in layers if layer and _is_watched(layer))][0]


def _fuse_diffusers_activation(model: nn.Module, path: str, module: nn.Module) -> None:
    """Fuse the product and the activation of one of diffusers' GEGLU or GELU modules, if it is one."""
    proj = module._modules.get("proj")
    if type(proj) is not QuantLinear or _is_watched(proj):
        return
    if path and _is_of_diffusers(module, "GEGLU") and not _is_watched(module):
        model.set_submodule(path, fused := Geglu(proj).train(module.training))
        note_together(fused, ("proj", "geglu"))
    if _is_of_diffusers(module, "GELU"):
        module.proj = GeluLinear(proj, cast("_Approximate", module.approximate))
        vars(module)["gelu"] = _identity  # comes before the method
        note_together(module, ("proj", "gelu"))


def _fuse_gelu(parent: nn.Module, name: str, function: str) -> None:
    """Fuse the child `name` with the child `function` after it, if these are a quantized linear layer and a GELU that takes its output."""
    linear, approximate = parent._modules.get(name), _gelu(parent._modules.get(function))
    if type(linear) is not QuantLinear or approximate is None:
        return
    if _is_watched(linear):
        note_alone(parent, (name, function), f"{name} has {WATCHED}")
    elif "forward" in vars(parent) or not feeds_only(type(parent), name, function):
        reason = f"the source of {type(parent).__name__} does not show that only {function} reads the output of {name}"
        note_alone(parent, (name, function), reason)
    else:
        setattr(parent, name, GeluLinear(linear, approximate))
        setattr(parent, function, nn.Identity())
        note_together(parent, (name, function))


class _Place(NamedTuple):
    """Where a linear layer is: the child `name` of `home`."""

    home: nn.Module
    name: str

    @property
    def layer(self) -> nn.Module | None:
        return self.home._modules.get(self.name)


def _place(parent: nn.Module, name: str) -> _Place:
    """Return where the linear layer is that gets the input of the child `name`: that child, or the residual of a `LowRankLinear`."""
    child = parent._modules.get(name)
    return _Place(child, RESIDUAL) if isinstance(child, LowRankLinear) and child.input_scale is None else _Place(parent, name)


def _is_watched(module: nn.Module) -> bool:
    """Return whether other code relies on calls of this module: it has hooks, a forward of its own or a bias to train."""
    trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return trained or why_not_hooks(module) is not None or "forward" in vars(module)


def _gelu(module: object) -> _Approximate | None:
    """Return how a module computes GELU, in torch's words; None for any other module."""
    if not isinstance(module, nn.Module) or _is_watched(module):
        return None
    # transformers has its own class, which calls torch's function.
    if type(module).__name__ == "GELUActivation" and getattr(module, "act", None) is functional.gelu:
        return "none"
    return cast("_Approximate", module.approximate) if type(module) is nn.GELU else None


def _is_of_diffusers(module: nn.Module, name: str) -> bool:
    """Return whether it is one of diffusers' activations, which compute proj(x) and have a method `gelu`."""
    is_class = type(module).__name__ == name and type(module).__module__ == "diffusers.models.activations"
    return is_class and "gelu" not in vars(module) and "forward" not in vars(module)


def _identity(x: Tensor) -> Tensor:
    return x


class _FusionKey(NamedTuple):
    """The properties that fused siblings have in common. Layers with one scale per tensor cannot share it: each has a number of its own."""

    format: Format
    width: int
    device: torch.device
    scale: int
    dtype: torch.dtype
    compute: str
    activation: object


def _fusion_key(linear: QuantLinear) -> _FusionKey:
    fmt, k, device = linear.packed.codes_format, linear.packed.shape[1], linear.packed.device
    return _FusionKey(fmt, k, device, id(linear) if fmt.block == "tensor" else 0, linear.dtype, linear.compute, linear.activation)


def _difference(a: _FusionKey, b: _FusionKey) -> str:
    """Return the names of the properties in which two layers differ."""
    return " and ".join(name for name, x, y in zip(_FusionKey._fields, a, b, strict=True) if x != y)


class _Outputs(NamedTuple):
    """The outputs of fused layers for one input.

    Attributes:
        x: The input.
        state: What they depend on besides the input's identity: `_state_of` it, and whether low-rank branches were added.
        by_layer: Those that no layer has returned, by the index of their layer: each is returned once, as its reader may write to it.
        copy: Of an input on a CPU whose writes torch does not count. On GPUs, a comparison with it would wait for them.
    """

    x: Tensor
    state: tuple[object, ...]
    by_layer: dict[int, Tensor]
    copy: Tensor | None

    def are_of(self, x: Tensor, state: tuple[object, ...]) -> bool:
        """Return whether these are the outputs for x as it is now."""
        return self.x is x and self.state == state and (self.copy is None or torch.equal(self.copy, x))


def _state_of(x: Tensor, others: Iterable[Tensor]) -> tuple[object, ...]:
    """Return the versions of x and of other tensors, and torch's modes; torch.compile traces writes to x."""
    if torch.compiler.is_dynamo_compiling():
        return (torch.is_grad_enabled(),)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return *map(version_of, (x, *others)), torch.is_grad_enabled(), dtype


@dataclass(eq=False)
class _Group:
    """The concatenated weight of several linear layers, and its outputs for the last input until all of them have been called.

    Attributes:
        packed: The concatenated weight.
        sizes: Rows of each layer.
        biases: The biases of the layers, views of `_bias` if all have one dtype and device.
        integers: Whether compute is "int8", for which bytes are in the order that `ops.in_order` gives.
        cached_outputs: The outputs for the last input that no layer has returned yet.
        branches: The low-rank branches of all layers, if each has one of the same shape.
        check: The `packed_check` of all layers, each of which has a view of it.
    """

    packed: Packed
    sizes: list[int]
    biases: list[Tensor | None]
    integers: bool = False
    cached_outputs: _Outputs | None = None
    branches: Sequence[LowRankLinear] = ()
    _bias: Tensor | None = None
    check: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.packed = self._as_packed(self.packed)
        self.check = digest(self.packed.data)

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"cached_outputs": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.join()  # a copy's biases are no views yet

    @classmethod
    def of(cls, linears: Sequence[QuantLinear]) -> _Group:
        """Concatenate the weights and biases of layers."""
        weights = [linear.packed for linear in linears]
        sizes = [weight.shape[0] for weight in weights]
        biases: list[Tensor | None] = [linear.bias for linear in linears]
        group = cls(ops.join(weights), sizes, biases, linears[0].compute == "int8")
        group.join()
        return group

    def join(self) -> None:
        """Concatenate the biases, each of which is a view of the result from then on, so that no write to one is missed, not even by way
        of `.data`, which torch does not count. There is no result while layers move from device to device, one by one."""
        self.cached_outputs = None
        device, given = self.packed.device, [bias for bias in self.biases if bias is not None]
        if not given or any(bias.device != device for bias in given):
            self._bias = None
            return
        with torch.inference_mode(False), torch.no_grad():
            self._bias = self._joined(device)
            for bias, part in zip(self.biases, self._bias.split(self.sizes), strict=True):
                if bias is not None and bias.dtype == part.dtype:
                    bias.data = part

    def _joined(self, device: torch.device) -> Tensor:
        """Return the biases of all layers, 0 for those without one; in float32 where dtypes differ."""
        dtypes = {bias.dtype for bias in self.biases if bias is not None}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        none = (torch.zeros(size, dtype=dtype, device=device) for size in self.sizes)
        biases_and_zeros = zip(self.biases, none, strict=True)
        return torch.cat([zeros if bias is None else bias.detach().to(dtype) for bias, zeros in biases_and_zeros])

    def _are_views(self, joined: Tensor) -> bool:
        """Return whether the biases are views of `joined`: not after `bias.data` was assigned, or where dtypes differ."""
        address, size = joined.data_ptr(), joined.element_size()
        for bias, rows in zip(self.biases, self.sizes, strict=True):
            if bias is not None and bias.data_ptr() != address:
                return False
            address += rows * size
        return True

    @property
    def bias(self) -> Tensor | None:
        """The concatenated biases, as they are now. In torch.compile, where tensors have no addresses, each call concatenates."""
        if self._bias is not None and torch.compiler.is_compiling():
            return self._joined(self._bias.device)
        if self._bias is not None and not self._are_views(self._bias):
            self.join()
        return self._bias

    def _parameters(self, low_rank: bool) -> Iterator[Tensor]:
        """Yield the tensors besides the weight that outputs depend on."""
        yield from (bias for bias in self.biases if bias is not None)
        for branch in self.branches if low_rank else ():
            yield from (branch.low_rank_in, branch.low_rank_out)

    def rows(self, index: int) -> slice:
        """Return the rows of one of the layers."""
        start = sum(self.sizes[:index])
        return slice(start, start + self.sizes[index])

    def part(self, x: Tensor, of: FusedLinear, whole: Packed, *, low_rank: bool = False) -> Tensor:
        """Return the outputs for x of one of the layers. The first one that is called computes those of all, with the weight `whole`."""
        cached, state = self.cached_outputs, (*_state_of(x, self._parameters(low_rank)), low_rank)
        output = cached.by_layer.pop(of.index, None) if cached is not None and cached.are_of(x, state) else None
        if output is None:
            if low_rank:
                inner = functional.linear(x, torch.cat([branch.low_rank_in.to(x.dtype) for branch in self.branches]))
                outer = torch.cat([branch.low_rank_out.to(x.dtype) for branch in self.branches])
                y = ops.linear_low_rank(x, inner, outer, whole, self.bias, of.compute, of.activation)
            else:
                y = ops.linear(x, whole, self.bias, compute=of.compute, activation=of.activation)
            starts = accumulate(self.sizes, initial=0)  # slices, as outputs of split() must not be written to where gradients are wanted
            outputs = (y.narrow(-1, start, size) for start, size in zip(starts, self.sizes, strict=False))
            uncounted = not torch.compiler.is_compiling() and x.is_cpu and version_of(x) is None
            cached = _Outputs(x, state, dict(enumerate(outputs)), x.clone() if uncounted else None)
            output = cached.by_layer.pop(of.index)
        # The last one frees the outputs.
        self.cached_outputs = cached if of.index < len(self.sizes) - 1 else None
        return output

    def move(self, device: torch.device) -> None:
        """Pack the weight for another device."""
        if self.packed.device != device:
            self.packed = self._as_packed(ops.pack(ops.unpack(self.packed), device, sparse=self.packed.sparse))
            self.check = digest(self.packed.data)

    def _as_packed(self, packed: Packed) -> Packed:
        return ops.in_order(packed) if self.integers else packed

    def put(self, index: int, codes: Codes) -> None:
        """Overwrite the codes of one of the layers, of which all have a view, by others of the same format and shape.

        Raises:
            UnsupportedError: The layers are sparse, and these codes are not.
        """
        self.cached_outputs = None
        joined = ops.unpack(self.packed)
        parts = [joined.select(self.rows(i)) for i in range(len(self.sizes))]
        old, parts[index] = parts[index].tensors(), codes.to(self.packed.device)
        if all(torch.equal(tensor, old[name]) for name, tensor in parts[index].tensors().items()):
            return
        sparse = self.packed.layout in (cpu_tiles.SPARSE, gpu_tiles.SPARSE)
        packed = self._as_packed(ops.pack(Codes.joined(parts, torch.cat), self.packed.device, sparse=sparse))
        if (packed.layout, packed.data.shape) != (self.packed.layout, self.packed.data.shape):
            raise UnsupportedError(
                f"the fused layers are {SPARSITY} sparse, and the weight to be loaded is not: load the model first, then fuse_ it"
            )
        with torch.inference_mode():  # where weights packed in this mode may be written to, too
            self.packed.data.copy_(packed.data)
            self.check.copy_(digest(packed.data))
        count_write(self.packed.data)


class FusedLinear(DerivedLinear):
    """One of several fused linear layers. It is read, saved and reported as if it had its own weight.

    torch.export with strict=False, which replaces parameters while it traces, exports one product for siblings without biases. For those
    with biases it exports the product of the whole group once for each: export such a model without `fuse_`.
    """

    _has_part = True  # of the group's weight, when the weight was last set

    def __init__(self, group: _Group, index: int, linear: QuantLinear) -> None:
        super().__init__(linear, _part(group, index))
        self._group, self._index = group, index
        self.packed_check = group.check.view(1)

    @property
    def index(self) -> int:
        """Its index among the layers that it is fused with."""
        return self._index

    @property
    def count(self) -> int:
        """How many layers are fused."""
        return len(self._group.sizes)

    @property
    def biases(self) -> list[Tensor | None]:
        """The parameters of all layers that it is fused with; always the same list object."""
        return self._group.biases

    @property
    def together(self) -> tuple[Packed, Tensor | None]:
        """The concatenated weight and bias of all layers that it is fused with, in one object for all as long as none has other tensors."""
        whole = self._whole
        if self._parameters["bias"] is not self._group.biases[self._index]:
            whole = replace(whole)
        return whole, self._group.bias

    def codes(self) -> Codes:
        return ops.unpack(self._whole).select(self._group.rows(self._index))

    @property
    def _whole(self) -> Packed:
        """The weight of the group, or one that other code has put in its place for this layer."""
        whole, part = self._group.packed, self.packed
        if torch.compiler.is_compiling():  # which knows no addresses
            is_part = part.data is self._packed.data and self._has_part
        else:
            is_part = part.data.data_ptr() == whole.data.data_ptr()
        return whole if is_part else replace(whole, data=part.data.view(whole.data.shape))

    @property
    def weight(self) -> Tensor:
        """The dequantized weight [N, K]; computed when it is used."""
        rows = self._group.rows(self._index)
        if torch.compiler.is_dynamo_compiling():
            return traced(ops.dequantize(self._whole, self.dtype)[rows], self)
        return WeightView(self._whole, self.dtype, self.weight_shape, rows)

    def keep_layout_of(self, device: torch.device) -> None:
        """Pack the weight for `device`, as QuantModule does, and leave the group: the bytes of each layer are moved by themselves."""
        if self.count > 1:
            packed = ops.pack(self.codes(), self.packed.device, sparse=self._group.packed.sparse)
            self._group, self._index = _Group(packed, [packed.shape[0]], [self.bias]), 0
            self._group.join()
            self._set_packed(_part(self._group, 0))
        super().keep_layout_of(device)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.packed_for is not None:
            return super().forward(x)
        whole, bias = self._whole, self._parameters["bias"]
        if whole is self._group.packed and bias is self._group.biases[self._index]:
            return self._group.part(x, self, whole)
        # torch.export with strict=False traces the Python code itself, and replaces parameters and buffers meanwhile.
        exports = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        if self._has_part and exports and not any(bias is not None for bias in self.biases):
            return self._group.part(x, self, whole)
        # Other code has put tensors in the places of this layer's, for this call perhaps. So does torch.export, and the biases of the other
        # layers are then unknown.
        rows, biases = self._group.rows(self._index), None
        if bias is not None:
            biases = functional.pad(bias.float(), (rows.start, whole.shape[0] - rows.stop))
        return ops.linear(x, whole, biases, compute=self.compute, activation=self.activation)[..., rows]

    def with_low_rank(self, x: Tensor, into: Tensor, out: Tensor) -> Tensor:
        """Return forward(x) + x intoᵀ outᵀ, for all siblings together if each has a branch."""
        group = self._group
        whole = self.packed_for is None and self._whole is group.packed and self._parameters["bias"] is group.biases[self._index]
        if whole and group.branches:
            return group.part(x, self, group.packed, low_rank=True)
        return super().with_low_rank(x, into, out)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        view_data, whole = self.packed_data, self._group.packed.data
        if view_data.data_ptr() != whole.data_ptr() and torch.equal(
            view_data, whole.view(-1)
        ):  # a pickle has the bytes once for each layer
            self._set_packed(_part(self._group, self._index))

    def _set_packed(self, packed: AnyPacked) -> None:
        super()._set_packed(packed)
        self._has_part = packed.data.data_ptr() == self._group.packed.data.data_ptr()
        if self._has_part:
            self.packed_check = self._group.check.view(1)  # listed for each layer

    def _set_codes(self, codes: Codes) -> None:
        self._group.put(self._index, codes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantModule:
        if self.packed_for is not None:
            super()._apply(fn, recurse)
            whole = self._group.packed
            self._group.packed = replace(whole, data=self.packed_data.view(whole.data.shape))
            return self
        device = fn(torch.empty(0, dtype=torch.uint8, device=self.packed.device)).device
        self._group.move(device)
        self._set_packed(_part(self._group, self._index))
        super()._apply(fn, recurse)
        self.register_parameter("bias", self.bias)
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if name == "bias" and "_group" in vars(self):
            self._group.biases[self._index] = param
            self._group.join()


class GeluLinear(DerivedLinear):
    """y = gelu(x Wᵀ + bias): x [..., K] -> y [..., N]; `approximate` as of torch's gelu."""

    def __init__(self, linear: QuantLinear, approximate: _Approximate = "none") -> None:
        super().__init__(linear)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        settings = {"compute": self.compute, "activation": self.activation}
        return ops.linear_gelu(x, self.packed, self.bias, approximate=self.approximate, **settings)


class Geglu(nn.Module):
    """y = (x W₁ᵀ + b₁) * gelu(x W₂ᵀ + b₂) with [W₁; W₂] the weight of `proj`: x [..., K] -> y [..., N / 2].

    It replaces diffusers' GEGLU, and is saved as that. A `proj` with hooks, or one that has been replaced, for example by one with an
    adapter, is called, and torch computes the gate.
    """

    def __init__(self, proj: QuantLinear) -> None:
        super().__init__()
        self.proj: nn.Module = proj

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        proj = self.proj
        if type(proj) is not QuantLinear or why_not_hooks(proj) is not None:
            return geglu(proj(hidden_states))
        return ops.linear_geglu(hidden_states, proj.packed, proj.bias, compute=proj.compute, activation=proj.activation)


def _part(group: _Group, index: int) -> Packed:
    """Return the weight of one layer as its module holds it: its own shape, but the bytes of the whole group, as no layout has those of one
    layer together."""
    return replace(group.packed, shape=(group.sizes[index], group.packed.shape[1]), data=group.packed.data.view(-1))
