"""An interpreter of programs in torch's operations, float32, by the ops' settings and parts: a whole sequence without a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.decoder.program import Op, Program
from halfbyte.layouts.base import Packed
from halfbyte.ops import unpack

FUNCTIONS: dict[str, Any] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.relu().square(),
}


def interpret(program: Program, ids: Tensor) -> Tensor:
    """The logits [t, N] after every token of ids [t]."""
    x: Any = None
    inputs: Any = None  # [t, layers * P]
    states: list[tuple[Tensor, Tensor]] = []  # keys and values of the layers
    for layer, ops in program.scopes():
        scope = _Scope({op.name: op for op in ops}, states, program.spec.lm_head_bias)
        values: dict[str, Any] = {"ids": ids, "x": x}
        if inputs is not None and layer is not None:
            values["per_layer_input"] = inputs.chunk(len(program.spec.layers), -1)[layer]
        for op in ops:
            values[op.name] = getattr(scope, op.kind)(op, *(values[name] for name in op.reads))
        x = values["embed_tokens" if x is None else ops[-1].name]
        inputs = values.get("per_layer_inputs", inputs)
    assert isinstance(x, Tensor)
    return x


def matrix(packed: Any) -> Tensor:
    return unpack(packed).dequantize(torch.float32) if isinstance(packed, Packed) else packed.float()


class _Scope:
    """A layer: a method for each kind of op."""

    def __init__(self, ops: Mapping[str, Op], states: list[tuple[Tensor, Tensor]], head_bias: Tensor | None) -> None:
        self.ops, self.states, self.head_bias = ops, states, head_bias

    def embedding(self, op: Op, ids: Tensor) -> Tensor:
        return matrix(op.part)[ids] * (op.setting("multiplier") or 1.0)

    def rms_norm(self, op: Op, x: Tensor) -> Tensor:
        part: Any = op.part
        weight = part.weight.float() + bool(op.setting("unit_offset"))
        return _rms(x.unflatten(-1, (-1, *op.shape)), weight, op.setting("eps")).flatten(-2)

    def layer_norm(self, op: Op, x: Tensor) -> Tensor:
        part: Any = op.part
        shift = part.bias.float() if op.setting("bias") else None
        return functional.layer_norm(x, op.shape, part.weight.float() + bool(op.setting("unit_offset")), shift, op.setting("eps"))

    def linear(self, op: Op, x: Tensor) -> Tensor:
        part: Any = op.part
        if isinstance(part, Tensor):
            return x @ part.float().T + (self.head_bias if op.setting("bias") else 0.0)  # type: ignore[no-any-return]
        y = x @ matrix(part.packed).T
        return y + part.bias.float() if op.setting("bias") else y

    # Attention

    def heads(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [t, heads, D]."""
        query, key, dim = (self.ops["attention"].setting(name) for name in ("heads", "kv_heads", "head_dim"))
        joined = torch.cat(inputs, -1)
        sizes = {"qkv": (query, key, key), "qk": (query, key), "q": (query,)}
        built = next(built for built, counts in sizes.items() if sum(counts) * dim == joined.shape[-1])
        q, *others = (x.unflatten(-1, (-1, dim)) for x in joined.split([count * dim for count in sizes[built]], -1))
        if built == "q":
            return q, *(x.new_empty(len(x), 0, dim) for x in (q, q))
        return (q, *others) if built == "qkv" else (q, *others, *others)

    def qk_norm(self, op: Op, *inputs: Tensor) -> Tensor:
        q, k, v = self.heads(*inputs)
        if op.setting("over") == "all heads":
            q, k = q.flatten(1), k.flatten(1)
        part: Any = op.part
        if op.setting("values"):
            v = _rms(v, torch.ones(v.shape[-1]), op.setting("eps"))
        weights = [norm.weight.float() + bool(op.setting("unit_offset")) for norm in part.qk_norm]
        q, k = (_rms(x, weight, op.setting("eps")) for x, weight in zip((q, k), weights, strict=True))
        return torch.cat([x.reshape(len(x), -1) for x in (q, k, v)], -1)

    def rope(self, op: Op, *inputs: Tensor) -> Tensor:
        q, k, v = self.heads(*inputs)
        part: Any = op.part
        cos, sin = (table[0][:, None] for table in part.tables(0, len(q), len(q)))
        width = op.setting("rotary_dim")
        rotated = []
        for x in (q, k):
            if op.setting("interleaved"):
                even, odd = x[..., :width:2], x[..., 1:width:2]
                pair = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
            else:
                low, high = x[..., : width // 2], x[..., width // 2 : width]
                pair = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
            rotated.append(torch.cat((pair, x[..., width:]), -1))
        return torch.cat([x.flatten(1) for x in (*rotated, v)], -1)

    def attention(self, op: Op, *inputs: Tensor) -> Tensor:
        q, k, v = self.heads(*inputs)
        if (source := op.setting("kv_source")) is not None:
            k, v = self.states[source]
        self.states.append((k, v))
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ k.mT * op.setting("scale")
        if (cap := op.setting("softcap")) is not None:
            scores = (scores / cap).tanh() * cap
        ages = torch.arange(len(q))[:, None] - torch.arange(len(q))
        window = op.setting("sliding_window") or len(q)
        scores = scores.masked_fill((ages < 0) | (ages >= window), -torch.inf)
        if op.setting("sinks"):
            part: Any = op.part
            scores = torch.cat((scores, part.sinks.float()[:, None, None].expand(-1, len(q), 1)), -1)
        return (scores.softmax(-1)[..., : len(q)] @ v).transpose(0, 1).flatten(1)

    def residual(self, op: Op, x: Tensor, added: Tensor, *more: Any) -> Tensor:
        if not more:
            y = (x + added * (op.setting("multiplier") or 1.0)) * (op.setting("scale") or 1.0)
            return y * (1.0 if op.part is None else op.part)  # type: ignore[operator]
        (_, weights), *shared = more
        return x + (added * weights[..., None]).sum(1) + sum(shared)

    # MLP and experts

    def gate(self, op: Op, x: Tensor, other: Tensor | None = None) -> Tensor:
        function = str(op.setting("function"))
        if other is not None and function.endswith("(gate) * input"):
            return FUNCTIONS[function.removesuffix("(gate) * input")](x) * other  # type: ignore[no-any-return]
        if other is not None:
            assert function == "sigmoid(gate) * down"
            return torch.sigmoid(other @ op.part.float())[:, None] * x  # type: ignore[union-attr]
        if (limit := op.setting("limit")) is not None:
            gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
            return (up + 1) * gate * torch.sigmoid(op.setting("alpha") * gate)
        gate, up = x.chunk(2, -1)
        return FUNCTIONS[function.removesuffix("(gate) * up")](gate) * up  # type: ignore[no-any-return]

    def activation(self, op: Op, x: Tensor) -> Tensor:
        return FUNCTIONS[str(op.setting("function"))](x)  # type: ignore[no-any-return]

    def router(self, op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
        """ids and weights [t, top_k]"""
        part: Any = op.part
        logits = x @ part.router.float().T + (part.router_bias.float() if op.setting("bias") else 0.0)
        scores = logits.sigmoid() if op.setting("scores") == "sigmoid" else logits.softmax(-1)
        ids = (scores + (part.correction_bias.float() if op.setting("correction") else 0.0)).topk(op.setting("top_k"), -1).indices
        weights = scores.gather(1, ids)
        if op.setting("normalized"):
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights * (op.setting("factor") or 1.0)

    def experts(self, op: Op, x: Tensor, routed: tuple[Tensor, Tensor]) -> Tensor:
        part: Any = op.part
        ids, stack = routed[0], matrix(part.packed)
        y = torch.einsum("mtk,mtnk->mtn", x if x.dim() == 3 else x[:, None].expand(-1, ids.shape[1], -1), stack[ids])
        return y + part.bias.float()[ids] if op.setting("bias") else y

    # Logits

    def softcap(self, op: Op, x: Tensor) -> Tensor:
        cap = op.setting("softcap")
        return (x / cap).tanh() * cap  # type: ignore[no-any-return]

    def logit_scale(self, op: Op, x: Tensor) -> Tensor:
        return x * (op.setting("factor") or 1.0) / (op.setting("divisor") or 1.0)  # type: ignore[no-any-return]


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
