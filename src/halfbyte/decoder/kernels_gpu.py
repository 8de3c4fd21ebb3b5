"""Which kernel computes each op of a decoder's program on a GPU, for one new token of each sequence and a cache of fixed size.

Kernels are those that `dispatch.gpu` and `ops` choose, for a GPU that need not be present. Where an op has none, torch's operations compute
it, and the reason says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from halfbyte.decoder import lower_cpu
from halfbyte.decoder.program import TORCH, Lowered, Op, Program, readers_of
from halfbyte.decoder.spec import LayerSpec
from halfbyte.dispatch.candidate import Choice
from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.gpu import compute_of, packs_code_pairs, why_no_triton
from halfbyte.dispatch.layers import SOFTCAP, NormedCandidate, gated_experts, why_not_norm, why_not_router
from halfbyte.dispatch.packed import packed_format
from halfbyte.kernels.problem import AttentionProblem, NormedProblem, Problem
from halfbyte.layouts.base import Packed
from halfbyte.machine import Gpu
from halfbyte.ops.functions import sparse_on
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.prefill_ops import why_not_many
from halfbyte.ops.transformer.sublayers import Heads
from halfbyte.ops.transformer.weights import Weight

_GATES = "gate", "activation", "shared_expert.gate"  # which a linear layer may compute, too
_NORMS = "rms_norm", "layer_norm"


def decode_kernels(program: Program, here: Gpu, rows: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[Lowered]:
    """Say which kernel computes each op of a decode step on a GPU.

    Args:
        program: Its weights may be packed for any device.
        here: The GPU, present or not.
        rows: Number of sequences.
        dtype: Of activations.

    Raises:
        UnsupportedError: No kernel on this GPU multiplies the experts' weights, and torch's operations do not, either.
    """
    is_split = len({op.device for op in program.ops}) > 1
    return [lowered for _, ops in program.scopes() for lowered in _layer_kernels(ops, here, rows, dtype, is_split)]


def _layer_kernels(ops: Sequence[Op], here: Gpu, rows: int, dtype: torch.dtype, is_split: bool) -> Iterator[Lowered]:
    """The kernels of a layer of a model, some of whose ops may be on the CPU."""
    on_cpu = {op.name for op in ops if op.device == "cpu" and is_split}
    first = [*lower_cpu.layer_kernels(ops)] if on_cpu else []
    second = layer_kernels(ops, here, rows, dtype) if len(on_cpu) < len(ops) else first
    for one, other in zip(first or second, second, strict=True):
        yield replace(one, call=None) if one.op.name in on_cpu else other


def layer_kernels(ops: Iterable[Op], here: Gpu, rows: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[Lowered]:
    """Say which kernel computes each op of one layer, as `decode_kernels` does."""
    return [*_Scope(tuple(ops), here, rows, dtype).kernels()]


class _Scope:
    """The ops of one layer, or those before or after the layers."""

    def __init__(self, ops: Sequence[Op], here: Gpu, rows: int, dtype: torch.dtype) -> None:
        self._ops, self._here, self._rows, self._dtype = ops, here, rows, dtype
        self._by_name, self._readers = {op.name: op for op in ops}, readers_of(ops)

    def kernels(self) -> Iterator[Lowered]:
        """Yield the kernel of each op, in order."""
        for op in self._ops:
            if op.kind in ("linear", "experts"):
                yield Lowered(op, self._linear(op))
            elif op.kind in _NORMS:
                yield self._norm(op)
            elif op.kind in ("qk_norm", "rope", "attention"):
                yield self._attention(op)
            elif op.kind in ("gate", "activation"):
                yield self._gate(op)
            elif op.kind == "residual":
                yield self._residual(op)
            elif op.kind == "router":
                yield _lowered(op, "routing", self._why_not_routed())
            elif op.kind == "embedding" and isinstance(op.part, Packed):
                yield _lowered(op, "dequantize", why_no_triton())
            else:
                yield Lowered(op, TORCH)

    def _problem(self, op: Op) -> Problem:
        """The product of a linear layer, or of the experts of a layer."""
        assert isinstance(op.part, Weight)
        packed, here = op.part.packed, self._here
        *stack, n, k = packed.shape
        fmt = packed_format(packed.codes_format, on_cpu=False)
        how = compute_of(op.part.compute), op.part.activation
        if stack:
            rows = self._rows * self._by_name["router"].setting("top_k")
            return Problem("grouped_linear", rows, n, k, fmt, self._dtype, *how, experts=stack[0])
        sparse = sparse_on(packed, here)
        paired = not sparse and packs_code_pairs(fmt, (n, k), here)
        return Problem("linear", self._rows, n, k, fmt, self._dtype, *how, sparse=sparse, paired=paired)

    def _linear(self, op: Op) -> str:
        if not isinstance(op.part, Weight):
            return TORCH
        choice = self._choice(op)
        if choice is not None and choice.taken is not None and choice.taken.candidate.home:
            return choice.taken.candidate.name
        taken = choose(self._problem(op), self._here).taken
        return TORCH if taken is None else taken.candidate.name

    def _choice(self, op: Op) -> Choice[NormedProblem, NormedCandidate] | None:
        """How `normed_linear` computes a linear layer with its norm and its gate; None where there is neither, or in int8."""
        weight, norm, gate = op.part, self._norm_before(op), self._gate_after(op)
        if not isinstance(weight, Weight) or compute_of(weight.compute) != "float" or (norm is None and gate is None):
            return None
        gated = gate is not None and gate.kind == "gate"
        return choose(NormedProblem(self._problem(op), norm is not None, gated, weight.bias is not None), self._here)

    def _norm_before(self, op: Op) -> Op | None:
        """The RMS norm that a linear layer may compute: one that it alone reads, or with other projections of attention."""
        norm = self._by_name.get(op.reads[0])
        if norm is None or norm.kind != "rms_norm" or op.kind != "linear" or op.name == "lm_head" or self._computes_norm(norm) is not None:
            return None
        readers = self._readers[norm.name]
        return norm if len(readers) == 1 or not any(map(self._gate_after, readers)) else None

    def _gate_after(self, op: Op) -> Op | None:
        return next((reader for reader in self._readers[op.name] if op.kind == "linear" and reader.name in _GATES), None)

    def _computes_norm(self, norm: Op) -> Op | None:
        """The op whose kernel computes a norm that follows it (a norm of what is added), or precedes it (a router)."""
        router = next((reader for reader in self._readers[norm.name] if reader.kind == "router"), None)
        residual = self._by_name.get(norm.reads[0])
        if router is not None or norm.kind != "rms_norm" or residual is None or residual.kind != "residual":
            return router
        added = self._by_name[residual.reads[1]]
        return added if added.kind == "rms_norm" else None

    def _norm(self, op: Op) -> Lowered:
        computes = self._computes_norm(op)
        if computes is not None:
            return _fused(op, computes, self._why_not_routed() if computes.kind == "router" else why_not_norm(op.shape[-1], self._here))
        for reader in self._readers[op.name]:
            choice = self._choice(reader) if self._norm_before(reader) is op else None
            if choice is None:
                continue
            if choice.taken is None:
                return Lowered(op, TORCH, reason=_why_torch(choice))
            if choice.taken.candidate.takes_norm(choice.problem, choice.taken.config):
                return _fused(op, reader)
        return _lowered(op, "norm", why_not_norm(op.shape[-1], self._here))

    def _attention(self, op: Op) -> Lowered:
        attention = self._by_name["attention"]
        heads = attention.part
        assert isinstance(heads, Heads)
        over_all = heads.qk_norm is not None and heads.qk_norm_whole
        widest = heads.num_heads * heads.head_dim if over_all else None
        reason = why_not_attend(heads, self._dtype, self._here, widest)
        if heads.softcap is None and heads.qk_norm is not None and heads.qk_norm[0].layer_norm:
            reason = "the norms of its heads are layer norms"
        if op.kind == "attention" or (op.kind == "qk_norm" and over_all):
            return _lowered(op, "attend" if op is attention else "norm", reason)
        return _fused(op, attention, reason)

    def _gate(self, op: Op) -> Lowered:
        source = self._by_name[op.reads[0]]
        if op.name == "shared_expert_gate":
            return _fused(op, self._by_name["router"], self._why_not_routed())
        if "router" in self._by_name and (source.kind == "experts" or not self._is_float(source)):
            if (reason := self._why_not_routed()) is not None:
                return Lowered(op, TORCH, reason=reason)
            is_silu = op.setting("limit") is None
            assert isinstance(source.part, Weight)
            inside = is_silu and source.part.bias is None and gated_experts(choose(self._problem(source), self._here)) is not None
        else:
            choice = self._choice(source)
            if choice is not None and choice.taken is None:
                return Lowered(op, TORCH, reason=_why_torch(choice))
            inside = op.kind == "gate" and choice is not None and bool(choice.options[0].candidate.home)
        return _fused(op, source) if inside else _lowered(op, "gates", why_not_norm(1, self._here))

    def _residual(self, op: Op) -> Lowered:
        added = self._by_name[op.reads[1]]
        if added.kind == "experts":
            return _lowered(op, "routing", self._why_not_routed())
        if added.kind == "layer_norm":
            return Lowered(op, TORCH, reason="the norm of what it adds is a layer norm")
        if added.kind == "rms_norm":
            return _fused(op, added, why_not_norm(added.shape[-1], self._here))
        scaled = op.setting("multiplier") is not None and added.setting("bias") is not None
        return _fused(op, added, "what it adds has a multiplier and a bias" if scaled else None)

    def _why_not_routed(self) -> str | None:
        """Why torch's operations compute what lies around the products of experts."""
        if not all(self._is_float(op) for op in self._ops if op.kind == "experts"):
            return "its experts compute in int8"
        experts, k = self._by_name["router"].shape
        return why_not_router(experts, k, self._here)

    @staticmethod
    def _is_float(op: Op) -> bool:
        return isinstance(op.part, Weight) and compute_of(op.part.compute) == "float"


def why_not_attend(heads: Heads, dtype: torch.dtype, here: Gpu, norm_width: int | None) -> str | None:
    """Why torch computes the attention of one new token on a GPU; None if a kernel does. norm_width: as in AttentionProblem."""
    sizes = 1, 1, heads.num_heads, heads.num_kv_heads, heads.head_dim
    choice = choose(AttentionProblem("decode", *sizes, dtype, norm_width=norm_width, softcap=heads.softcap is not None), here)
    return None if choice.taken is not None else choice.reasons["attend"]


def _why_torch(choice: Choice[NormedProblem, NormedCandidate]) -> str:
    """Why torch's operations compute everything but the product: one reason for all candidates."""
    return choice.rejected[0][1]


def _lowered(op: Op, kernel: str, reason: str | None = None) -> Lowered:
    """An op with a kernel of its own, or why torch computes it."""
    return Lowered(op, kernel if reason is None else TORCH, reason=reason)


def _fused(op: Op, into: Op, reason: str | None = None) -> Lowered:
    """An op that the kernel of another one computes, or why torch does."""
    return Lowered(op, "", into.name) if reason is None else Lowered(op, TORCH, reason=reason)


def why_not_layer(layer: LayerSpec) -> str | None:
    """Why a layer is not computed on a GPU, neither by kernels nor in torch; None if it is."""
    attention, mlp, heads = layer.attention, layer.mlp, layer.attention.heads
    if layer.sliding_window is not None and layer.sliding_window < 2:
        return f"it has a sliding window of {layer.sliding_window} token: at least 2 are supported"
    if heads.qk_norm is not None and heads.qk_norm[0].layer_norm:
        return "the norms of its heads are layer norms"
    if heads.qk_norm_whole and heads.norm_after_rope:
        return "norms of all its heads together come after rope"
    if isinstance(mlp, Experts):
        if mlp.pre_norm.layer_norm:
            return "the norm before its experts is a layer norm"
    elif mlp.post_norm is not None and mlp.residual_multiplier != 1:
        return f"what its MLP adds has a norm and a factor of {mlp.residual_multiplier}"
    if layer.per_layer_input is not None and layer.per_layer_input.post_norm.layer_norm:
        return "the norm after its per-layer input is a layer norm"
    if attention.post_norm is not None and attention.residual_multiplier != 1:
        return f"what its attention adds has a norm and a factor of {attention.residual_multiplier}"
    return None


def torch_ops(layers: Iterable[LayerSpec], dtype: torch.dtype, here: Gpu) -> Iterator[str]:
    """Which ops of layers torch computes on a GPU, and why."""
    told = set()
    for layer in layers:
        heads, mlp = layer.attention.heads, layer.mlp
        widest = heads.num_heads * heads.head_dim if heads.qk_norm_whole else None
        reasons = {
            "attention of one token": why_not_attend(heads, dtype, here, widest),
            "attention of prompts": SOFTCAP if heads.softcap is not None else why_not_many(heads, dtype, here),
            "norms": why_not_norm(layer.attention.o_proj.packed.shape[0], here),
            "what is between products of experts": why_not_router(mlp.router.shape[0], mlp.router.shape[1], here)
            if isinstance(mlp, Experts)
            else None,
        }
        for name, reason in reasons.items():
            if reason is not None and (name, reason) not in told:
                told.add((name, reason))
                yield f"torch computes {name}: {reason}"
