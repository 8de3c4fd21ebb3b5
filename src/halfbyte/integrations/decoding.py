"""Decoder layers: one call per layer on a CPU (`decoding_cpu.py`; `families.py` says whose), and of Llama-like models for one new token of
each sequence six kernels on an NVIDIA GPU:

    qkv = normed_linear(x, input norm, q | k | v)             queries, keys and values
    a   = attend(qkv, …)                                      norms of heads, positions, the cache's new entry, attention; two kernels
    x   = linear(a, o, residual=x)
    h   = normed_linear(x, norm, gate | up, gated)            silu(gate) * up
    x   = linear(h, down, residual=x)

With several sequences the norms have separate kernels before the products, and gates may have one after theirs; on Hopper the norm before
the gates has one, too, where the product with gates is `skinny_hopper`'s.
Training, on a GPU prompts and caches that are not static, and everything else goes the way of transformers' own layer. `halfbyte.report`
says which layers were left and why, and where one of these steps is computed in torch's operations; `steps` says it for any GPU.
The model's last norm remains an operation of torch: Inductor (2.11) prints the arguments of a custom op that it meets for the first time
and of the ops that produced them, recursively, which after a chain of custom ops alone doubles with each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from halfbyte.errors import check_type
from halfbyte.integrations import decoding_cpu, decoding_step, embedding, encoding, families
from halfbyte.integrations.ahead import expect
from halfbyte.integrations.generating import generate_fast
from halfbyte.integrations.mixtures import routed_of, why_not_routed
from halfbyte.integrations.shortened import Shortened, original, products_of, shorten, why_hooked, why_not_fused
from halfbyte.kernels.problem import Problem
from halfbyte.machine import Gpu, gpu
from halfbyte.nn.experts import MixtureOfExperts
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import linear_added
from halfbyte.ops.decoder import Attention, Dense
from halfbyte.ops.decoding import NormedPlan, attend, normed_linear, normed_plan, why_not_attend
from halfbyte.ops.experts import Experts
from halfbyte.ops.functions import sparse_on

# On a GPU: their forward is this file's formula; others differ in norms, activations or residuals. On a CPU: `families.py`.
LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
DEVICES = ("cuda",)
LONG = "one token takes the steps of transformers"
ONE_CALL, FEW_ONE_CALL = "tokens take one call", "few tokens take one call"
QKV, GATE_UP = "q_proj+k_proj+v_proj", "gate_proj+up_proj"


def shorten_(model: nn.Module) -> nn.Module:
    """Lets layers of a model on which `fuse_` was called compute in few calls, in place; returns `model`.

    Decoder layers like Llama's take tokens in one call on a CPU, one in six kernels or so on a GPU; encoder layers like BERT's take whole
    sequences in one call, on a CPU, and so do their embeddings. `generate` of any language model writes tokens by a lean loop, on a GPU
    with a CUDA graph (`generating.py`).
    Less is rounded than before: the roots of the norms, silu(gate) * up, and rotated queries and keys and attention weights keep float32
    precision, or nearly that, until they are multiplied. Layers with other parts, or with hooks, are not changed; `report(model)` tells
    which, and why.
    """
    check_type(model, nn.Module, "shorten_ takes a model, a torch.nn.Module", "pass the model that fuse_ returned")
    generate_fast(model)
    for module in model.modules():
        if embedding.tables_of(module) is not None:
            embedding.shorten_embeddings(module)
        elif encoding.parts_of(module) is not None:
            encoding.shorten_encoder_layer(module)
        elif isinstance(module, MixtureOfExperts):
            module.few_in_one_call = True
        elif is_decoder_layer(module) and not is_short(module):
            tensor = next(chain(module.parameters(), module.buffers()), None)
            reason = why_not_short(module, "cpu" if tensor is None else tensor.device.type)
            if why_not_short(module, DEVICES[-1]) is None:  # it may be moved to another device later
                reason = None
            shorten(module, _OneToken, LONG, reason)
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for _, alike in groupby(module, type):
                expect(layer for layer in alike if isinstance(layer, Shortened))
    for module in model.modules():
        decoding_step.shorten_model(module)
    return model


def is_decoder_layer(module: nn.Module) -> bool:
    """Whether it has the structure of a decoder layer, supported by `shorten_` or not."""
    return all(isinstance(getattr(module, part, None), nn.Module) for part in ("self_attn", "mlp"))


def is_short(module: nn.Module) -> bool:
    """Whether `shorten_` has changed this layer."""
    return isinstance(module, _OneToken)


def why_not_short(layer: Any, device: str = "cuda") -> str | None:
    """Why `shorten_` does not change a decoder layer on a device of that type, or None."""
    kind, on_cpu = original(layer), device == "cpu"
    family, names = families.family_of(layer), families.NAMES if on_cpu else [cls.__name__ for cls in LAYERS]
    if family is None or not (on_cpu or kind in LAYERS):
        return f"a {kind.__name__} is none of {', '.join(names)}"
    attention, mlp, routed = layer.self_attn, layer.mlp, routed_of(layer)
    if (name := families.other(layer)) is not None:
        return f"its config has {name}"
    groups = {name: parts for name, parts in decoding_cpu.groups_of(layer) if parts}
    linears = {family.o: getattr(attention, family.o)} | ({family.down: getattr(mlp, family.down)} if routed is None else {})
    alone = [*linears]
    linears |= {name: linear for group, parts in groups.items() for name, linear in zip(group.split("+"), parts, strict=True)}
    for name, linear in linears.items():
        if not isinstance(linear, QuantLinear):
            return f"its {name} is a {type(linear).__name__}, which is not quantized"
        if not on_cpu and linear.compute not in ("auto", "float"):
            return f"its {name} is to compute in {linear.compute}"
    for name, parts in groups.items():
        products = products_of(name, parts) if on_cpu else None
        if products is not None and (len(products) == 1 or name != GATE_UP):
            continue  # one step each
        if (reason := why_not_fused(name, parts)) is not None:
            return reason
    for name in alone:
        if type(linears[name]) is not QuantLinear:
            return f"its {name} is a {type(linears[name]).__name__}"
    activation = getattr(attention.config, family.activation)
    taken = [*families.ACTIVATIONS] if on_cpu and routed is None else ["silu", "swish"]
    if activation not in taken:
        return f"its activation is {activation}, not {' or '.join(taken) if len(taken) > 2 else 'silu'}"
    if routed is not None and (reason := why_not_routed(layer, routed)) is not None:
        return reason
    if not on_cpu and mlp.gate_proj.bias is not None:
        return "its gate_proj has a bias"
    return why_hooked(layer) or (decoding_cpu.why_not_one_call(layer) if on_cpu else None)


@dataclass(frozen=True, slots=True)
class Step:
    """A product or the attention of a layer that `shorten_` has changed. `kernel` computes it; a `reason` tells why torch's operations do
    (partly)."""

    name: str
    kernel: str
    reason: str | None = None


def steps(layer: Any, here: Gpu, rows: int = 1) -> tuple[Step, ...]:
    """How a shortened layer computes one new token of each of `rows` sequences with a static cache on a GPU, which need not be present."""
    attention, mlp = layer.self_attn, layer.mlp
    dtype = layer.input_layernorm.weight.dtype
    found = []
    for name, linear, gated in ((QKV, attention.q_proj, False), (GATE_UP, mlp.gate_proj, True)):
        packed, bias = linear.together
        n, k = packed.shape
        problem = Problem("linear", rows, n, k, packed.format, dtype, sparse=sparse_on(packed, here))
        plan = normed_plan(problem, here, gated=gated, biased=bias is not None)
        if isinstance(plan, str):
            found.append(Step(name, "the product alone", f"norm{' and gates' if gated else ''} in torch's operations: {plan}"))
        else:
            found.append(Step(name, _described(plan, gated)))
    heads, kv_heads = (linear.packed.shape[0] // attention.head_dim for linear in (attention.q_proj, attention.k_proj))
    reason = why_not_attend(heads, kv_heads, attention.head_dim, dtype, here)
    seen = Step("attention", "attend" if reason is None else "torch's operations", reason)
    return found[0], seen, Step("o_proj", "with the residual added"), found[1], Step("down_proj", "with the residual added")


def one_call(layer: Any) -> tuple[Step, ...]:
    """The steps of a shortened layer within its one call on a CPU."""
    attention, second = decoding_cpu.halves_of(layer)
    heads = attention.heads
    seen = f"attend, with {'positions and ' if heads.turned else ''}the new entry of a float or 8-bit cache"
    qkv, (gates, _) = decoding_cpu.groups_of(layer)
    normed = "with the norm" if attention.before else "alone"
    first = [Step(name, normed) for name in products_of(*qkv) or {}]
    if heads.rows and heads.norms:
        first.append(Step("q_norm, k_norm", "norm, of whole rows"))
    first += [Step("attention", seen), Step(families.known(layer).o, _added(attention))]
    if isinstance(second, Dense):
        function = second.gates.removesuffix("_tanh")
        gated = f"with {'the norm and ' if second.before else ''}{f'{function}(gate) * up' if second.gated else function}"
        return *first, Step(gates, gated), Step(families.known(layer).down, _added(second))
    routed = families.known(layer).routed
    assert routed is not None
    shared = [] if routed.shared is None else [Step(routed.shared[0], "with the norm and silu(gate) * up, then down_proj")]
    gates = "silu(gate) * up" if isinstance(second, Experts) and second.clamped is None else "(up + 1) * gate * sigmoid(alpha * gate)"
    experts = Step("experts", f"{gates}, then down_proj, both of the chosen ones, by their weights, with the residual added")
    return *first, Step(routed.gate, "with the norm"), *shared, experts


def _added(half: Attention | Dense) -> str:
    """How what a half gives is added."""
    factor = "" if half.factor == 1 else f", times {half.factor:g}"
    return f"{'and then the norm, ' if half.after else ''}with the residual added{factor}"


def _described(plan: NormedPlan, gated: bool) -> str:
    """Describes the computation of a product after a norm. The kernel of a plain linear layer is not named here, but before."""
    if plan.norm_inside:
        return f"{plan.kernel} with the norm{' and silu(gate) * up' if gated else ''}"
    if plan.config is None:
        return f"after a kernel of the norm{', before one of silu(gate) * up' if gated else ''}"
    return f"{plan.kernel}{' with silu(gate) * up' if gated else ''}, after a kernel of the norm"


class _OneToken(Shortened):
    """Mixin that precedes a decoder layer's class."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    @property
    def halfbyte_remark(self) -> str:
        """The remark of `halfbyte.report` about the layer."""
        layer: Any = self
        device = next(layer.parameters()).device
        if (reason := why_not_short(self, device.type)) is not None:
            return f"{LONG}: {reason}"
        if device.type == "cpu":
            return ONE_CALL if routed_of(self) is None else FEW_ONE_CALL
        if device.type not in DEVICES:
            return f"{LONG}: few kernels are for {' and '.join(DEVICES)}, not for {device.type}"
        lost = [f"{step.name}: {step.reason}" for step in steps(self, gpu(device.index or 0)) if step.reason]
        return "; ".join(["one token with a static cache takes few kernels", *lost])

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **settings: Any,
    ) -> Any:
        attention = self.self_attn
        layers = [] if past_key_values is None else past_key_values.layers
        if hidden_states.is_cpu and "cpu" not in DEVICES and position_embeddings is not None:
            found = decoding_cpu.tokens(self, hidden_states, attention_mask, past_key_values, position_embeddings, settings)
            if found is not None:
                return found
        fits = position_embeddings is not None and _fits(hidden_states, attention_mask, layers, attention.layer_idx, settings)
        if original(self) not in LAYERS or not fits or not _in_floats(self):
            # super() in a class that is made at run time: torch.compile follows the plain call.
            return super().forward(  # type: ignore[misc]
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **settings,
            )
        assert position_embeddings is not None
        weight, bias = attention.q_proj.together
        norm = self.input_layernorm
        qkv = normed_linear(hidden_states, norm.weight, norm.variance_epsilon, weight, bias)
        rotary = position_embeddings[0][:, 0], position_embeddings[1][:, 0]
        mask = None if attention_mask is None else attention_mask[:, 0, 0]
        kept, first = layers[attention.layer_idx], attention.layer_idx == 0
        # The first layer's length makes masks and positions. torch.compile reads it for these when it likes, unless it knows of a change.
        length, advance = kept.cumulative_length, 0 if first else 1
        qkv = qkv.view(len(qkv), -1)
        seen = attend(qkv, rotary, kept.keys, kept.values, length, mask, attention.scaling, norms=_norms(attention), advance=advance)
        if first:
            length.add_(1)
        hidden_states = linear_added(attention.o_proj, seen.unsqueeze(1), hidden_states)
        norm = self.post_attention_layernorm
        inner = normed_linear(hidden_states, norm.weight, norm.variance_epsilon, self.mlp.gate_proj.together[0], gated=True)
        return linear_added(self.mlp.down_proj, inner, hidden_states)


def _norms(attention: Any) -> tuple[Tensor, Tensor, float] | None:
    """The norms of a head's queries and keys, if any."""
    if not hasattr(attention, "q_norm"):
        return None
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon


def _in_floats(layer: Any) -> bool:
    """Whether these kernels also support a layer that was shortened, possibly for a CPU, and of which parts may have been replaced."""
    if original(layer) not in LAYERS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    together = attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj
    alone = attention.o_proj, mlp.down_proj
    if any(type(linear) is not FusedLinear for linear in together) or any(type(linear) is not QuantLinear for linear in alone):
        return False
    return attention.v_proj.index == 2 and all(linear.compute != "int8" for linear in (*together, *alone))


def _fits(x: Tensor, mask: Tensor | None, layers: list[Any], index: int, settings: dict[str, Any]) -> bool:
    """Whether the call is for one token of each sequence, with a cache that `attend` supports."""
    return (
        x.device.type in DEVICES
        and x.shape[1] == 1
        and index < len(layers)
        and type(layers[0]) is StaticLayer
        and type(layers[index]) is StaticLayer
        and layers[index].is_initialized
        and layers[index].keys.dtype == x.dtype
        and (mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1)))
        and not settings.get("output_attentions")
        and not torch.is_grad_enabled()
    )
