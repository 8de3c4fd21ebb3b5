"""A decoder's program: the operations of a specification one after the other, by name, shape and format.

`program_of` makes it from a `DecoderSpec`; `lower_cpu.py` and `kernels_gpu.py` say which kernel computes each op, and `explain.py` prints
that. An op is equal to one of another layer that computes the same with other weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from halfbyte.decoder.offload.placement import ON_GPU, Placement
from halfbyte.decoder.rope import Rope
from halfbyte.decoder.spec import DecoderSpec, LayerSpec
from halfbyte.errors import unreachable
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.sparse import SPARSITY
from halfbyte.ops.transformer.experts import CLAMPED, Experts, SharedExpert
from halfbyte.ops.transformer.sublayers import MLP, Attention, Heads, Norm, PerLayerInput
from halfbyte.ops.transformer.weights import Weight

T = TypeVar("T", bound=Hashable)
TORCH = "torch"  # the kernel of what torch's operations compute
ALL_HEADS = "all heads"  # what norms of queries and keys are over, if not over each head
INPUT = "x"  # what a layer reads: the output of the embedding, or of the layer before
PER_LAYER_INPUT = "per_layer_input"  # the layer's part of the output of `per_layer_inputs`


@dataclass(frozen=True, slots=True)
class Op:
    """An operation.

    Attributes:
        kind: "embedding", "rms_norm", "layer_norm", "linear", "qk_norm", "rope", "attention", "residual", "gate" (act(gate) * up),
            "activation", "router", "experts" (a linear layer of stacked weights), "logit_scale" or "softcap".
        name: Unique within its layer.
        layer: Index of the layer; None: before or after the layers.
        reads: Names of the ops whose outputs it reads, in the same layer; "x": the layer's input; "per_layer_input": its per-layer input.
        shape: Of its weight: [N, K], [E, N, K] of experts, [K] of a norm; () where it has none.
        format: Of its weight: that of the codes, or a dtype; "" where it has none.
        settings: What else determines its result, by the field's terms.
        device: Where it is computed.
        part: What it is in the specification, with its tensors: the weight of a linear layer or an embedding, the norm, the heads of
            qk_norm and attention, the tables of rope, the experts of a router, the factor [1] of a residual connection's sum.
    """

    kind: str
    name: str
    layer: int | None = field(compare=False)
    reads: tuple[str, ...]
    shape: tuple[int, ...] = ()
    format: str = ""
    settings: tuple[tuple[str, object], ...] = ()
    device: str = "cpu"
    part: Packed | Tensor | Weight | Norm | Heads | Rope | Experts | None = field(default=None, compare=False, repr=False)

    def setting(self, name: str) -> Any:
        """Return the value of a setting; None where it has no such one."""
        return dict(self.settings).get(name)

    @property
    def described(self) -> str:
        """Its settings in words."""
        return ", ".join(_text(name, value) for name, value in self.settings)

    def to_json(self) -> dict[str, object]:
        """Return its fields but the layer and the part."""
        about = {"kind": self.kind, "name": self.name, "reads": [*self.reads], "shape": [*self.shape] or None}
        return {**about, "format": self.format or None, "settings": dict(self.settings), "device": self.device}


@dataclass(frozen=True, slots=True)
class Lowered:
    """How a device computes an op.

    Attributes:
        op: The op.
        kernel: The kernel, by its name in `kernels`; "torch" for torch's operations; "" where it is fused into another op's.
        fused_into: Name of the op, in the same layer, whose kernel computes this one, too.
        call: The native call that it is a step of, if any.
        reason: Why torch's operations compute it.
    """

    op: Op
    kernel: str
    fused_into: str | None = None
    call: str | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the op's fields and these."""
        about = {"kernel": self.kernel or None, "fused_into": self.fused_into, "call": self.call, "reason": self.reason}
        return {**self.op.to_json(), **about}


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of a decoder in the order in which they are computed, and the specification that they were made from."""

    spec: DecoderSpec = field(compare=False, repr=False)
    ops: tuple[Op, ...]

    def scopes(self) -> Iterator[tuple[int | None, tuple[Op, ...]]]:
        """Yield the ops before the layers, those of each layer with its index, and those after the layers."""
        for layer, ops in groupby(self.ops, lambda op: op.layer):
            yield layer, tuple(ops)

    def __str__(self) -> str:
        lines = (lines_of(layers, [*columns_of(ops)]) for layers, ops in grouped(self.scopes()))
        return "\n".join(chain.from_iterable(lines))


def program_of(spec: DecoderSpec, device: str = "cpu", placement: Placement = ON_GPU) -> Program:
    """Make the program of a specification on a device, but for what is placed on the CPU."""
    table = spec.embedding
    settings = _settings(multiplier=None if spec.embedding_multiplier == 1 else spec.embedding_multiplier)
    ops = [Op("embedding", "embed_tokens", None, ("ids",), *_form(table), settings, device, table)]
    ops += (replace(op, device=device) for op in _per_layer_inputs(spec))
    for index, layer in enumerate(spec.layers):
        for op in layer_ops(layer, spec.ropes):
            on_cpu = placement.on_cpu(index, experts=op.name.startswith("experts."))
            ops.append(replace(op, layer=index, device="cpu" if on_cpu else device))
    ops += (replace(op, device=device) for op in _end(spec))
    return Program(spec, tuple(ops))


def _per_layer_inputs(spec: DecoderSpec) -> Iterator[Op]:
    """The per-layer inputs of all layers side by side, from ids and the embedded tokens."""
    inputs = spec.per_layer_inputs
    if inputs is None:
        return
    names = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
    yield Op("embedding", names[0], None, ("ids",), *_form(inputs.table), _settings(multiplier=inputs.table_multiplier), part=inputs.table)
    yield linear_op(names[1], inputs.projection, "embed_tokens")
    # norm(c * y), c a constant, is that of y with eps / c².
    yield _norm(names[2], inputs.norm._replace(eps=inputs.norm.eps / inputs.projection_multiplier**2), names[1])
    yield Op("residual", "per_layer_inputs", None, (names[0], names[2]), settings=_settings(scale=inputs.scale))


def layer_ops(layer: LayerSpec, ropes: Sequence[Rope] = ()) -> Iterator[Op]:
    """Yield the ops of a layer of a model with these rotary embeddings; none: what they are is not said."""
    attention, mlp = layer.attention, layer.mlp
    yield from _attention(attention, layer, ropes)
    read = "attn_residual"
    if attention.residual_norm is not None:
        yield _norm("attn_residual_norm", attention.residual_norm, read)
        read = "attn_residual_norm"
    if isinstance(mlp, Experts):
        yield from _experts(mlp)
    elif mlp.parallel_residual:
        is_same = attention.pre_norm is not None and mlp.pre_norm is not None and _is_same(attention.pre_norm, mlp.pre_norm)
        yield from _mlp(mlp, INPUT, normed="attn_norm" if is_same else None)
    else:
        yield from _mlp(mlp, read)
    if layer.per_layer_input is not None:
        yield from _per_layer_input(layer.per_layer_input)


def _per_layer_input(last: PerLayerInput) -> Iterator[Op]:
    """What a layer does with its per-layer input."""
    yield linear_op("per_layer_input_gate", last.gate, "mlp_residual")
    settings = (("function", f"{last.activation}(gate) * input"),)
    yield Op("gate", "per_layer_gate", None, ("per_layer_input_gate", PER_LAYER_INPUT), settings=settings)
    yield linear_op("per_layer_projection", last.projection, "per_layer_gate")
    yield from _added(last, "per_layer_projection", "per_layer", "mlp_residual")


def _attention(attention: Attention, layer: LayerSpec, ropes: Sequence[Rope]) -> Iterator[Op]:
    heads, read = attention.heads, INPUT
    if attention.pre_norm is not None:
        yield _norm("attn_norm", attention.pre_norm, INPUT)
        read = "attn_norm"
    names = [f"{part}_proj" for part in heads.projections]
    if len(attention.qkv) == 1 and len(names) > 1:
        names = [heads.projections]
    for name, weight in zip(names, attention.qkv, strict=True):
        yield linear_op(name, weight, read)
    reads: tuple[str, ...] = tuple(names)
    for op in _positions(heads, layer, ropes, reads):
        yield op
        reads = (op.name,)
    settings = _settings(
        heads=heads.num_heads,
        kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        scale=heads.scale,
        bidirectional=layer.bidirectional,
        position_bias=layer.position_bias,
        sliding_window=layer.sliding_window,
        kv_source=layer.kv_source,
        softcap=heads.softcap,
        sinks=heads.sinks is not None,
    )
    yield Op("attention", "attention", None, reads, settings=settings, part=heads)
    yield linear_op("o_proj", attention.o_proj, "attention")
    yield from _added(attention, "o_proj", "attn", INPUT)


def _positions(heads: Heads, layer: LayerSpec, ropes: Sequence[Rope], reads: tuple[str, ...]) -> Iterator[Op]:
    """The norms of queries and keys, and rope, in their order."""
    ops = []
    if heads.qk_norm is not None:
        over = ALL_HEADS if heads.qk_norm_whole else "each head"
        norm = heads.qk_norm[0]
        settings = _settings(over=over, eps=norm.eps, unit_offset=norm.unit_offset, layer_norm=norm.layer_norm, values=heads.v_norm)
        ops.append(Op("qk_norm", "qk_norm", None, reads, tuple(norm.weight.shape), _name(norm.weight.dtype), settings, part=heads))
    if heads.rotary_width:
        rope = ropes[layer.rope] if ropes else None
        which = layer.rope if len(ropes) > 1 else None
        switch = None if rope is None else rope.switch
        settings = _settings(
            rotary_dim=heads.rotary_width, interleaved=bool(heads.rope_interleaved), rope_parameters=which, longrope_beyond=switch
        )
        ops.append(Op("rope", "rope", None, reads, settings=settings, part=rope))
    if heads.norm_after_rope:
        ops.reverse()
    for op in ops:
        yield replace(op, reads=reads)
        reads = (op.name,)


def _mlp(mlp: MLP, read: str, *, normed: str | None = None) -> Iterator[Op]:
    """The MLP. normed: the op that has computed the norm of what it reads."""
    residual = "attn_residual" if mlp.parallel_residual else read
    if normed is not None:
        read = normed
    elif mlp.pre_norm is not None:
        yield _norm("mlp_norm", mlp.pre_norm, read)
        read = "mlp_norm"
    name = "gate_up" if mlp.gated else "up_proj"
    yield linear_op(name, mlp.gate_up, read)
    yield _gate("gate" if mlp.gated else "activation", mlp.activation, name, gated=mlp.gated)
    yield linear_op("down_proj", mlp.down_proj, "gate" if mlp.gated else "activation")
    yield from _added(mlp, "down_proj", "mlp", residual)
    if mlp.residual_norm is not None:
        yield _norm("mlp_residual_norm", mlp.residual_norm, "mlp_residual")


def _experts(mlp: Experts) -> Iterator[Op]:
    yield _norm("mlp_norm", mlp.pre_norm, "attn_residual")
    weights = _settings(
        top_k=mlp.top_k,
        scores=mlp.scores or "softmax",
        normalized=mlp.norm_topk,
        bias=mlp.router_bias is not None,
        correction=mlp.correction_bias is not None,
        factor=None if mlp.scaling_factor == 1 else mlp.scaling_factor,
    )
    yield Op("router", "router", None, ("mlp_norm",), *_form(mlp.router), weights, part=mlp)
    yield linear_op("experts.gate_up", mlp.gate_up, "mlp_norm", "router", kind="experts")
    clamped = mlp.clamped
    if clamped is None:
        yield _gate("experts.gate", "silu", "experts.gate_up")
    else:
        settings = (("function", CLAMPED), ("alpha", clamped.alpha), ("limit", clamped.limit))
        yield Op("gate", "experts.gate", None, ("experts.gate_up",), settings=settings)
    yield linear_op("experts.down_proj", mlp.down_proj, "experts.gate", "router", kind="experts")
    added = ["experts.down_proj", "router"]
    if mlp.shared_expert is not None:
        yield from _shared_expert(mlp.shared_expert)
        added.append("shared_expert.down_proj" if mlp.shared_expert.gate is None else "shared_expert_gate")
    yield Op("residual", "mlp_residual", None, ("attn_residual", *added))


def _shared_expert(shared: SharedExpert) -> Iterator[Op]:
    yield linear_op("shared_expert.gate_up", shared.gate_up, "mlp_norm")
    yield _gate("shared_expert.gate", "silu", "shared_expert.gate_up")
    yield linear_op("shared_expert.down_proj", shared.down_proj, "shared_expert.gate")
    if shared.gate is not None:  # down_proj times sigmoid(gate · x)
        reads = "shared_expert.down_proj", "mlp_norm"
        settings = (("function", "sigmoid(gate) * down"),)
        yield Op("gate", "shared_expert_gate", None, reads, (1, *shared.gate.shape), _name(shared.gate.dtype), settings, part=shared.gate)


def _end(spec: DecoderSpec) -> Iterator[Op]:
    yield _norm("norm", spec.norm, INPUT)
    head = spec.lm_head
    if isinstance(head, Weight):
        yield linear_op("lm_head", head, "norm")
    else:
        settings = _settings(bias=spec.lm_head_bias is not None)
        yield Op("linear", "lm_head", None, ("norm",), *_form(head), settings, part=head)
    if spec.logits is not None:
        function, constant = spec.logits
        match function:
            case "cap":
                yield Op("softcap", "softcap", None, ("lm_head",), settings=(("softcap", constant),))
            case "times":
                yield Op("logit_scale", "logit_scale", None, ("lm_head",), settings=(("factor", constant),))
            case "over":
                yield Op("logit_scale", "logit_scale", None, ("lm_head",), settings=(("divisor", constant),))
            case _:
                raise unreachable(function, "the function of logits")


def _added(sublayer: Attention | MLP | PerLayerInput, read: str, name: str, residual: str) -> Iterator[Op]:
    """What follows a sublayer's last linear layer."""
    if sublayer.post_norm is not None:
        yield _norm(f"{name}_post_norm", sublayer.post_norm, read)
        read = f"{name}_post_norm"
    scale = None if isinstance(sublayer, Attention) else sublayer.layer_scale
    factor = 1.0 if isinstance(sublayer, PerLayerInput) else sublayer.residual_multiplier
    settings = _settings(multiplier=None if factor == 1 else factor, layer_scale=scale is not None)
    yield Op("residual", f"{name}_residual", None, (residual, read), settings=settings, part=scale)


def _norm(name: str, norm: Norm, read: str) -> Op:
    settings = _settings(eps=norm.eps, unit_offset=norm.unit_offset, bias=norm.bias is not None)
    kind = "layer_norm" if norm.layer_norm else "rms_norm"
    return Op(kind, name, None, (read,), tuple(norm.weight.shape), _name(norm.weight.dtype), settings, part=norm)


def linear_op(name: str, weight: Weight, *reads: str, kind: str = "linear") -> Op:
    """Return the op of a linear layer, or of those of all experts."""
    sparsity = SPARSITY if weight.packed.layout in (cpu_tiles.SPARSE, gpu_tiles.SPARSE) else None
    settings = _settings(
        bias=weight.bias is not None,
        sparsity=sparsity,
        compute=None if weight.compute == "auto" else weight.compute,
        activation_scales=None if weight.activation == "block" else weight.activation,
    )
    return Op(kind, name, None, reads, *_form(weight.packed), settings, part=weight)


def _gate(name: str, function: str, read: str, *, gated: bool = True) -> Op:
    settings = (("function", f"{function}(gate) * up" if gated else function),)
    return Op("gate" if gated else "activation", name, None, (read,), settings=settings)


def _settings(**settings: object) -> tuple[tuple[str, object], ...]:
    """Those that say something."""
    return tuple((name, value) for name, value in settings.items() if value is not None and value is not False)


def _form(weight: Packed | Tensor) -> tuple[tuple[int, ...], str]:
    if isinstance(weight, Tensor):
        return tuple(weight.shape), _name(weight.dtype)
    fmt = weight.codes_format
    return tuple(weight.shape), _name(fmt.scale) if fmt.is_of_floats else str(fmt)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_same(one: Norm, other: Norm) -> bool:
    """Whether two norms compute the same."""
    same_settings = one[1:4] == other[1:4] and (one.bias is None) == (other.bias is None)
    tensors = [(one.weight, other.weight), *([] if one.bias is None or other.bias is None else [(one.bias, other.bias)])]
    return same_settings and all(torch.equal(*pair) for pair in tensors)


def readers_of(ops: Sequence[Op]) -> dict[str, list[Op]]:
    """Return for each op of a layer those that read its output."""
    return {op.name: [other for other in ops if op.name in other.reads] for op in ops}


# Text


def grouped(items: Iterable[tuple[int | None, T]]) -> list[tuple[tuple[int, ...], T]]:
    """Group layers that are equal.

    Args:
        items: Layers by their index, hashable; or with None what comes before the first or after the last layer.

    Returns:
        The indices of equal layers, none of what is in no layer, and the first of them; in the order of the first ones.
    """
    groups: list[tuple[tuple[int, ...], T]] = []
    indices: dict[T, int] = {}
    for index, item in items:
        if index is None:
            groups.append(((), item))
        elif item in indices:
            layers, first = groups[indices[item]]
            groups[indices[item]] = (*layers, index), first
        else:
            indices[item] = len(groups)
            groups.append(((index,), item))
    return groups


def heading(layers: Sequence[int]) -> list[str]:
    """The line above the ops of these layers; none where they are in no layer."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1][1:] = [layer]
        else:
            ranges.append([layer])
    return [f"layer{'s' if len(layers) > 1 else ''} {', '.join('-'.join(map(str, part)) for part in ranges)}"] if layers else []


def kernel_columns(kernels: Sequence[Lowered], *, shows_device: bool = False) -> list[tuple[str, ...]]:
    """Ops in a table, with their kernels, and why a kernel is torch's, if it is; `shows_device`: and which are computed on the CPU."""
    rows = []
    for (*first, settings), lowered in zip(columns_of([lowered.op for lowered in kernels]), kernels, strict=True):
        kernel = lowered.kernel if lowered.fused_into is None else f"in {lowered.fused_into}"
        kernel += " on the CPU" if shows_device and lowered.op.device == "cpu" else ""
        reason = "" if lowered.reason is None else f"({lowered.reason})"
        rows.append((*first, kernel, " ".join(filter(None, (settings, reason)))))
    return rows


def lines_of(layers: Sequence[int], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A heading and a table of ops, in columns that are flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip() for row in rows]
    return [*heading(layers), *(f"  {line}" if layers else line for line in lines)]


def columns_of(ops: Sequence[Op]) -> Iterator[tuple[str, ...]]:
    """Ops in a table. What an op reads is in it where that is not the op above, or goes without saying."""
    above = INPUT
    for op in ops:
        reads = f"reads {op.reads[0]}" if op.kind in ("linear", "rms_norm", "layer_norm") and op.layer is not None else ""
        kind, shape = op.kind if op.kind != op.name else "", str([*op.shape]) if op.shape else ""
        yield op.name, kind, shape, op.format, ", ".join(filter(None, (reads if op.reads[0] != above else "", op.described)))
        above = op.name


def _text(name: str, value: object) -> str:
    if value is True:
        return name
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if name == "function" else f"{name} {text}"
