"""Which forwards of a model of transformers `optimize_` replaces: those of decoder stacks (`stack.py`), encoder stacks
(`encoder_stack.py`) and embeddings (`embedding.py`), and the loop of `generate` (`generating.py`); and why a layer is left.

The model's last norm remains an operation of torch: Inductor (2.11) prints the arguments of a custom op that it meets for the first time
and of the ops that produced them, recursively, which after a chain of custom ops alone doubles with each layer.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from halfbyte.errors import check_type
from halfbyte.integrations import embedding, families, layer_gpu
from halfbyte.integrations.decoding_gpu import Step
from halfbyte.integrations.encoder_stack import compile_encoder, kind_of
from halfbyte.integrations.generating import generate_fast
from halfbyte.integrations.live_layers import groups_of, halves_of, third_of, why_not_compiled, why_not_known
from halfbyte.integrations.replaced import products_of
from halfbyte.integrations.stack import compile_stack, is_stack
from halfbyte.nn.experts import MixtureOfExperts
from halfbyte.nn.report import add_notes
from halfbyte.ops.decoder import Attention, Dense
from halfbyte.ops.experts import CLAMPED, Experts
from halfbyte.versions import why_untested

PLAIN = "its forwards are those of transformers"


def replace_forwards_(model: nn.Module) -> nn.Module:
    """Replace forwards of a model of transformers by native calls, in place; return the model.

    Less is rounded than before: the roots of the norms, silu(gate) * up, and rotated queries and keys and attention weights keep float32
    precision, or nearly that, until they are multiplied. Layers with other parts, or with hooks, are computed by transformers;
    `report(model)` tells which, and why. With versions of transformers that were not tested nothing is changed, with a warning.

    Args:
        model: What `fuse_` returned.
    """
    check_type(model, nn.Module, "a model is a torch.nn.Module", "pass the model that fuse_ returned")
    if (reason := why_untested("transformers")) is not None:
        add_notes(model, [f"{PLAIN}: {reason}"])
        return model
    generate_fast(model)
    for module in model.modules():
        if embedding.tables_of(module) is not None:
            embedding.compile_embeddings(module)
        elif kind_of(module) is not None:
            compile_encoder(module)
        elif isinstance(module, MixtureOfExperts):
            module.few_in_one_call = True
    for module in model.modules():
        if is_stack(module):
            compile_stack(module)
    return model


def is_decoder_layer(module: nn.Module) -> bool:
    """Whether it has the structure of a decoder layer, supported or not."""
    family = families.family_of(module)
    return all(isinstance(getattr(module, part, None), nn.Module) for part in ("self_attn", "mlp" if family is None else family.mlp))


def why_not_native(layer: Any, device: str = "cuda") -> str | None:
    """Why a decoder layer is left to transformers on a device of that type, or None."""
    if device == "cpu":
        return why_not_compiled(layer)
    return why_not_known(layer) or layer_gpu.why_not_few_kernels(layer)


def one_call(layer: Any) -> tuple[Step, ...]:
    """The steps of a compiled layer on a CPU."""
    attention, second = halves_of(layer)
    heads = attention.heads
    entry = "the new entry of a float or 8-bit cache" if heads.made != "q" else "keys and values of another layer"
    seen = f"attend, with {'positions and ' if heads.turned else ''}{entry}"
    qkv, (gates, _) = groups_of(layer)
    normed = "with the norm" if attention.before else "alone"
    first = [Step(name, normed) for name in products_of(*qkv) or {}]
    if heads.rows and heads.norms:
        first.append(Step("q_norm, k_norm", "norm, of whole rows"))
    first += [Step("attention", seen), Step(families.known(layer).o_proj, _added(attention))]
    if isinstance(second, Dense):
        function = second.gates.removesuffix("_tanh")
        gated = f"with {'the norm and ' if second.before else ''}{f'{function}(gate) * up' if second.gated else function}"
        return *first, Step(gates, gated), Step(families.known(layer).down_proj, _added(second)), *_of_own_input(layer)
    routed = families.known(layer).moe
    assert routed is not None
    shared = [] if routed.shared is None else [Step(routed.shared[0], "with the norm and silu(gate) * up, then down_proj")]
    gates = "silu(gate) * up" if isinstance(second, Experts) and second.clamped is None else CLAMPED
    experts = Step("experts", f"{gates}, then down_proj, both of the chosen ones, by their weights, with the residual added")
    return *first, Step(routed.router, "with the norm"), *shared, experts


def _of_own_input(layer: Any) -> tuple[Step, ...]:
    """The steps of an input of the layer's own, if it has one."""
    third, names = third_of(layer), families.known(layer).per_layer_input
    if third is None or names is None:
        return ()
    gate = f"with {third.function.removesuffix('_tanh')}, times the layer's own input"
    return Step(names[0], gate), Step(names[1], "and then the norm, with the residual added")


def _added(half: Attention | Dense) -> str:
    """How what a half gives is added."""
    factor = "" if half.factor == 1 else f", times {half.factor:g}"
    return f"{'and then the norm, ' if half.after else ''}with the residual added{factor}"
