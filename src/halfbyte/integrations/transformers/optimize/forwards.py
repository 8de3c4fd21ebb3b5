"""Which forwards of a model of transformers `optimize_` replaces: those of decoder stacks (`stack.py`), encoder stacks
(`encoder_stack.py`) and embeddings (`embedding.py`), and the loop of `generate` (`generating.py`); and why a layer is left.

The model's last norm remains an operation of torch: Inductor (2.11) prints the arguments of a custom op that it meets for the first time
and of the ops that produced them, recursively, which after a chain of custom ops alone doubles with each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from halfbyte.errors import check_type
from halfbyte.integrations.transformers.decoder import cpu_run, layer_gpu
from halfbyte.integrations.transformers.decoder.live_layer import family_of, layer_spec
from halfbyte.integrations.transformers.decoder.stack import compile_stack, is_stack
from halfbyte.integrations.transformers.encoder import embedding
from halfbyte.integrations.transformers.encoder.encoder_stack import compile_encoder, kind_of
from halfbyte.integrations.transformers.generate.generating import generate_fast
from halfbyte.nn.modules.experts import MixtureOfExperts
from halfbyte.nn.report import add_notes
from halfbyte.versions import why_untested

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

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
            module.fuses = True
    for module in model.modules():
        if is_stack(module):
            compile_stack(module)
    return model


def is_decoder_layer(module: nn.Module) -> bool:
    """Whether it has the structure of a decoder layer, supported or not."""
    family = family_of(module)
    return all(isinstance(getattr(module, part, None), nn.Module) for part in ("self_attn", "mlp" if family is None else family.mlp))


def why_not_native(layer: nn.Module, device: str = "cuda") -> str | None:
    """Why a decoder layer is left to transformers on a device of that type, or None."""
    spec = layer_spec(layer)
    if isinstance(spec, str):
        return spec
    part = cast("Part", layer)
    return cpu_run.why_not_lowered(part, spec) if device == "cpu" else layer_gpu.why_not_decoded(part, spec)
