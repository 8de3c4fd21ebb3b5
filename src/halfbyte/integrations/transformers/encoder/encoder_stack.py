"""Encoder stacks of transformers on a CPU: `optimize_` compiles all layers of one, and replaces the stack's forward.

    y = layers(x)                          BERT, DistilBERT, MPNet (whose layers have a bias in common)
    y = norm(layers(embeddings(pixels)))   ViT, DeiT
    y = norm(layers(convolutions(mel)))    Whisper's encoder

As in `stack.py`, the replaced forward accepts the arguments in `Kind.arguments`, and every other call, gradients, training, torch.compile
and requests for hidden states or attentions take transformers' forward; a layer that is not compiled is called as transformers calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from halfbyte.decoder.families.encoders import ENCODER_STACKS, Stack
from halfbyte.integrations.transformers.decoder.run import visible
from halfbyte.integrations.transformers.encoder.encoding import lowered_layer
from halfbyte.integrations.transformers.optimize.calls import CACHE, Arguments, Understood, any_value, bind, is_true, unset, why_unknown
from halfbyte.integrations.transformers.optimize.frozen import Frozen
from halfbyte.integrations.transformers.optimize.hooked import is_capturing
from halfbyte.integrations.transformers.optimize.replaced import (
    LAYER_BY_LAYER,
    ReplacedForward,
    name_in_transformers,
    original,
    output_class,
    replace_class,
    why_left,
    why_unknown_output,
)
from halfbyte.nn.frozen import while_unchanged
from halfbyte.nn.modules.quantized import has_global_hooks
from halfbyte.ops.modes import plain
from halfbyte.ops.transformer.encoder import EncoderLayer, run_layers

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

_HIDDEN = -1e4  # added to a score, it leaves a weight of 0: exp(-1e4) is below the least float32
_MOST_BYTES = 1 << 28  # of results that lie between layers of one native call


class Input(NamedTuple):
    """What goes into the first layer.

    Attributes:
        x: [B, t, K]
        mask: As layers take it, or None.
        bias: Added to scores of all layers, or None.
    """

    x: Tensor
    mask: Tensor | None
    bias: Tensor | None = None


class Kind(NamedTuple):
    """How the stacks of a kind compute what is around their layers.

    Attributes:
        layers: Attribute with the layers.
        arguments: Of the stack's call.
        begin: What goes into the first layer, by the stack and the call; None where transformers is to compute the call.
        end: The output, by the stack, the hidden states after the last layer and the call.
    """

    layers: str
    arguments: Understood
    begin: Callable[[Part, Arguments], Input | None]
    end: Callable[[Part, Tensor, Arguments], object]


_ASKED = ("output_attentions", "output_hidden_states")


def _given(stack: nn.Module, call: Arguments) -> Input | None:
    return Input(call["hidden_states"], call.get("attention_mask")) if "hidden_states" in call else None


def _states(stack: nn.Module, x: Tensor, call: Arguments) -> object:
    return output_class(original(stack))(last_hidden_state=x)


_LAYERS_ALONE = Kind(
    "layer",
    {
        **dict.fromkeys(("hidden_states", "attention_mask", "use_cache", "position_ids", "return_dict"), any_value),
        **dict.fromkeys(("encoder_hidden_states", "encoder_attention_mask", CACHE, *_ASKED), unset),
    },
    _given,
    _states,
)


def _with_position_bias(stack: Part, call: Arguments) -> Input | None:
    given = _given(stack, call)
    return None if given is None else given._replace(bias=stack.compute_position_bias(given.x))


def _states_or_tuple(stack: nn.Module, x: Tensor, call: Arguments) -> object:
    return _states(stack, x, call) if call.get("return_dict") else (x,)


_MPNET = Kind(
    "layer",
    {**dict.fromkeys(("hidden_states", "attention_mask", "return_dict"), any_value), **dict.fromkeys(_ASKED, unset)},
    _with_position_bias,
    _states_or_tuple,
)


def _patches(stack: Part, call: Arguments) -> Input | None:
    pixels = call.get("pixel_values")
    if pixels is None:
        return None
    dtype = stack.embeddings.patch_embeddings.projection.weight.dtype
    how = {name: call.get(name) for name in ("bool_masked_pos", "interpolate_pos_encoding")}
    x = stack.embeddings(pixels.to(dtype), **how)
    return Input(x, create_bidirectional_mask(config=stack.config, inputs_embeds=x, attention_mask=call.get("attention_mask")))


def _pooled(stack: Part, x: Tensor, call: Arguments) -> object:
    y = stack.layernorm(x)
    pooled = None if stack.pooler is None else stack.pooler(y)
    return output_class(original(stack))(last_hidden_state=y, pooler_output=pooled)


_VIT = Kind(
    "layers",
    {
        **dict.fromkeys(("pixel_values", "bool_masked_pos", "interpolate_pos_encoding", "attention_mask"), any_value),
        **dict.fromkeys(_ASKED, unset),
        "return_dict": is_true,
    },
    _patches,
    _pooled,
)


def _frames(stack: Part, call: Arguments) -> Input | None:
    mel = call.get("input_features")
    if mel is None or mel.shape[-1] != stack.config.max_source_positions * stack.conv1.stride[0] * stack.conv2.stride[0]:
        return None  # transformers' error says what is wrong
    x = nn.functional.gelu(stack.conv2(nn.functional.gelu(stack.conv1(mel)))).permute(0, 2, 1)
    return Input(x + stack.embed_positions(torch.arange(stack.embed_positions.num_embeddings, device=x.device)), None)


def _normed(stack: Part, x: Tensor, call: Arguments) -> object:
    return output_class(original(stack))(last_hidden_state=stack.layer_norm(x))


_WHISPER = Kind(
    "layers",
    {
        **dict.fromkeys(("input_features", "attention_mask"), any_value),  # it has no effect on Whisper's layers
        **dict.fromkeys(_ASKED, unset),
        "return_dict": is_true,
    },
    _frames,
    _normed,
)
KINDS: dict[Stack, Kind] = {
    "layers": _LAYERS_ALONE,
    "layers_with_position_bias": _MPNET,
    "image": _VIT,
    "spectrogram": _WHISPER,
}


def kind_of(module: nn.Module) -> Kind | None:
    """How a stack computes what is around its layers; None for any other module."""
    family = ENCODER_STACKS.get(name_in_transformers(module))
    return None if family is None else KINDS[family.stack]


def compile_encoder(stack: nn.Module) -> None:
    """Replace the forward of a stack that has a `kind_of`, in place, or note for the report why it is not replaced."""
    kind, cls = _kind(stack), original(stack)
    if not isinstance(stack, EncoderStack):
        replace_class(stack, EncoderStack, LAYER_BY_LAYER, why_unknown(cls, kind.arguments) or why_unknown_output(cls))


def _kind(stack: nn.Module) -> Kind:
    kind = kind_of(stack)
    assert kind is not None
    return kind


class EncoderStack(ReplacedForward):
    """Precedes the class of a stack."""

    keeps_name = True

    @property
    def halfbyte_remark(self: Any) -> str:
        """What `halfbyte.report` says of the stack."""
        layers = _compiled(self)
        reasons = [layer if isinstance(layer, str) else None for layer in layers]
        return "; ".join([f"{reasons.count(None)} of {len(layers)} layers take native calls", *why_left(reasons)])

    def forward(self: Any, *args: object, **kwargs: object) -> object:
        if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or self.training or is_capturing() or has_global_hooks()):
            kind = _kind(self)
            call = bind(self.argument_names, args, kwargs, kind.arguments)
            given = None if call is None else kind.begin(self, call)
            if call is not None and given is not None and all(t is None or (plain(t) and t.is_cpu) for t in given):
                return kind.end(self, _through(_compiled(self), _layers(self), given), call)
        # super() in a class that is made at run time: torch.compile follows the plain call.
        return super().forward(*args, **kwargs)  # type: ignore[misc]


@while_unchanged(lambda stack: Frozen(_layers(stack)))
def _compiled(stack: nn.Module) -> list[EncoderLayer | str]:
    """The layers as they are now: compiled, or why transformers computes them."""
    return [lowered_layer(layer) for layer in _layers(stack)]


def _layers(stack: nn.Module) -> nn.ModuleList:
    layers: nn.ModuleList = getattr(stack, _kind(stack).layers)
    return layers


def _through(compiled: Sequence[EncoderLayer | str], modules: nn.ModuleList, given: Input) -> Tensor:
    """The hidden states after the last layer. Between native calls they are float32, whatever the model's dtype."""
    x, mask, bias = given
    dtype, seen = x.dtype, visible(mask, _HIDDEN)
    most, index = max(1, _MOST_BYTES // max(1, x.nbytes)), 0
    while index < len(compiled):
        layers = list[EncoderLayer]()
        for layer in compiled[index : index + most]:
            if isinstance(layer, str) or not layer.fits(x, seen, bias) or layer.kind != (layers or [layer])[0].kind:
                break
            layers.append(layer)
        if layers:
            x = run_layers(layers, x, seen, bias)
        else:
            found = modules[index](_rounded(x, dtype), mask, *(() if bias is None else (bias,)))
            x = found[0] if isinstance(found, tuple) else found
        index += max(1, len(layers))
    return _rounded(x, dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Hidden states in the model's dtype. Those that are too large for it saturate, as in Whisper's layers, and do not overflow."""
    if x.dtype == dtype:
        return x
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)
