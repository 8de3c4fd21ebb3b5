"""Causal models that `shorten_` has changed, on a CPU: one new token of each sequence takes one call of `ops.decoding_step`.

This is for growing caches. What Python does between two tokens counts: it runs with caches that are full of weights. So everything that
stays from token to token is kept, and compared before each (`Unchanged`). Hooks, inner results that are asked for, gradients, training,
torch.compile and everything else go the way of transformers' model, whose layers may take calls of their own (`decoding_cpu.py`).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from halfbyte.bounded import Bounded
from halfbyte.decoder.families import family_of_model
from halfbyte.decoder.family import SLIDING, Family
from halfbyte.integrations import growing
from halfbyte.integrations.calls import CACHE, KV_CACHE, Understood, any_value, bind, is_true, unset, why_unknown
from halfbyte.integrations.decoding_cpu import computed, eps_of, is_eager, norm_of, parts_of, settings_of
from halfbyte.integrations.families import borrows, known, lender, nearest, per_layer_of
from halfbyte.integrations.shortened import Shortened, name_in_transformers, original, shorten, why_hooked
from halfbyte.integrations.unchanged import Unchanged
from halfbyte.layouts.base import Packed
from halfbyte.nn.modules import QuantEmbedding, QuantLinear, has_global_hooks, version
from halfbyte.nn.parallel import part_of
from halfbyte.nn.scaled import ATTRIBUTE, Factor, factor_of
from halfbyte.ops.decoder import MOST_SEQUENCES, DecoderLayer
from halfbyte.ops.decoding_step import DecodingStep, Inputs
from halfbyte.ops.layers import Weight, why_not_packed
from halfbyte.ops.library import plain

# Of a causal model's call.
ARGUMENTS: Understood = {
    **dict.fromkeys(("input_ids", "attention_mask", "position_ids", CACHE, "use_cache"), any_value),
    **dict.fromkeys(("inputs_embeds", "labels", "per_layer_inputs"), unset),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_router_logits"), unset),
    "logits_to_keep": lambda value: type(value) is int,
    "return_dict": is_true,
}
_ATTENTION = ("sdpa", "halfbyte", "eager")  # others have masks of other kinds
_SCALES = "per_layer_model_projection_scale", "per_layer_input_scale"  # of what is projected to layers' own inputs, and of these
_AT_ONCE, _MOST_BLOCKS = 64, 256  # positions whose cosines and sines are computed at once, and how many times so many are kept


def shorten_model(model: nn.Module) -> None:
    """Lets a causal model, all of whose layers are shortened, take a token in one call, in place. Others are left."""
    layers = getattr(getattr(model, "model", None), "layers", ())
    known = family_of_model(name_in_transformers(model)) is not None
    if known and not isinstance(model, _OneCall) and all(isinstance(layer, Shortened) for layer in layers):
        shorten(model, _OneCall, "a token takes a call for each layer", why_unknown(original(model), ARGUMENTS))


class _OneCall(Shortened):
    """Comes before the class of the model, and has its name: checkpoints tell it."""

    keeps_name = True

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and (call := bind(self.argument_names, args, kwargs, ARGUMENTS)) is not None:
            ids, past = call.get("input_ids"), call.get(CACHE)
            if ids is not None and past is not None and call.get("use_cache", self.config.use_cache):
                logits = one_token(self, ids, call.get("attention_mask"), call.get("position_ids"), past)
                if logits is not None:
                    return _output(_output_of(_family(self), type(self).__module__), logits, past)
        # super() in a class that is made at run time: torch.compile follows the plain call.
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def _family(model: Any) -> Family:
    family = family_of_model(name_in_transformers(model))
    assert family is not None
    return family


@functools.cache
def _output_of(family: Family, module: str) -> Any:
    """Return the class of a model's output."""
    if family.output_class is not None:
        return getattr(sys.modules[module], family.output_class)
    return MoeCausalLMOutputWithPast if family.router_output else CausalLMOutputWithPast


@functools.cache
def _empty(cls: Any) -> dict[str, Any]:
    return {**vars(cls())}


def _output(cls: Any, logits: Tensor, past: Any) -> Any:
    """cls(logits=logits, cache=past), which looks through its fields several times, in a tenth of the time."""
    made: Any = cls.__new__(cls)
    vars(made).update(_empty(cls), logits=logits, **{KV_CACHE: past})
    OrderedDict.__setitem__(made, "logits", logits)
    OrderedDict.__setitem__(made, KV_CACHE, past)
    return made


def one_token(model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor | None, past: Any) -> Tensor | None:
    """The logits [B, 1, N] for ids [B, 1], which enter the cache; None where this is not for it."""
    if ids.dim() != 2 or ids.shape[1] != 1 or not ids.is_cpu or torch.is_grad_enabled() or model.training:
        return None
    if not plain(ids) or has_global_hooks() or not 0 < (batch := ids.shape[0]) <= MOST_SEQUENCES:
        return None
    layers = getattr(past, "layers", None)
    if not layers or type(layers[0]) not in growing.LAYERS or (held := _held(model)) is None:
        return None
    if len(layers) not in (held.count, held.kept):
        return None
    layers = layers[: held.kept]  # layers behind these have nothing, if there are any
    if batch > held.most_rows:
        return None
    cache = held.here
    if not cache.is_of(layers, batch) and not cache.take(held, layers, batch):
        return None
    length: int = layers[0].length
    seen, where = None, [length] * batch
    if mask is not None:
        if type(mask) is not Tensor or mask.shape != (batch, length + 1):
            return None
        seen = None if mask.all() else mask.to(torch.bool).contiguous()
    if positions is not None:
        if type(positions) is not Tensor or positions.is_floating_point() or positions.shape not in ((batch, 1), (1, 1)):
            return None
        where = positions.flatten().tolist() * (batch // len(positions))
        if min(where) < 0:
            return None
    furthest = max(where)
    if held.nearest is not None and furthest >= held.nearest:
        return None
    turns = [held.turn(position, furthest) for position in where]  # with their tables: others may put new ones in their place
    y = held.step(ids.flatten().tolist(), [at for _, at in turns], cache.stamps, partial(_entries, layers, held.sources), length, seen)
    for layer in layers:
        layer.length = length + 1
    if y.dtype != held.dtype:
        y = y.to(held.dtype)
    return y if held.headed else _through(model.lm_head(y), held.logits)


def _through(y: Tensor, logits: tuple[str, float] | None) -> Tensor:
    """As `DecodingStep` has it of a head of its own."""
    if logits is None:
        return y
    function, constant = logits
    if function == "times":
        return y * constant
    y = y / constant
    return y if function == "over" else torch.tanh(y) * constant


def _entries(layers: Sequence[growing.Growing], sources: Sequence[int]) -> list[tuple[Tensor, Tensor, int]]:
    """Of all layers, by the numbers of those whose keys and values they read."""
    own = [(*layer.buffers, layer.length - layer.first) for layer in layers]
    return [own[source] for source in sources]


class _Here(threading.local):
    """The cache that a thread wrote to last: the stamps of its layers, and for how many sequences and tokens they have space."""

    stamps: tuple[int, ...] = ()
    batch = space = 0

    def is_of(self, layers: list[Any], batch: int) -> bool:
        """Whether it is of these layers, equally long, with space for a token."""
        try:
            lengths = [layer.length for layer in layers]
            same = self.stamps == tuple([layer.stamp for layer in layers])
        except AttributeError:  # not growing, or not yet
            return False
        return same and self.batch == batch and lengths[0] < self.space and lengths.count(lengths[0]) == len(lengths)

    def take(self, held: _Held, layers: list[Any], batch: int) -> bool:
        """Makes space for a token in these layers; False where they are none for this."""
        if any(type(layer) not in growing.LAYERS or not layer.is_initialized for layer in layers):
            return False
        views = [layer.buffers if isinstance(layer, growing.Growing) else (layer.keys, layer.values) for layer in layers]
        dtypes = {held.dtype if type(layer) not in growing.IN_8_BITS else torch.int8 for layer in layers}
        if len(dtypes) > 1 or len({layer.get_seq_length() for layer in layers}) > 1:
            return False
        if not all(keys.shape == values.shape and len(keys) == batch and keys.dtype in dtypes and keys.is_cpu for keys, values in views):
            return False
        windows = zip(layers, held.windows[: held.kept], strict=True)
        if not all(growing.window_of(layer) in (None, window) and growing.is_whole(layer) for layer, window in windows):
            return False
        grown = [growing.grow(layer, 1) for layer in layers]
        self.stamps, self.batch = tuple(layer.stamp for layer in grown), batch
        self.space = min(layer.first + layer.buffers[0].shape[2] for layer in grown)
        return True


class _Held:
    """A model's parts in one, as they were when this was made, of the `layers` and what was `computed` of them."""

    def __init__(self, model: Any, layers: list[Any], computed: Sequence[DecoderLayer]) -> None:
        inner, head = model.model, model.lm_head
        embedding, norm, self._rotary = inner.embed_tokens, inner.norm, inner.rotary_emb
        family, last_norm = _family(model), norm_of(norm, known(layers[0]))
        self.most_rows = min((layer.most_rows for layer in computed if layer.most_rows is not None), default=MOST_SEQUENCES)
        self.nearest = nearest(layers[0])
        self.count, self.headed, self.here = len(layers), type(head) is QuantLinear, _Here()
        self.dtype: torch.dtype = embedding.dtype if isinstance(embedding, QuantEmbedding) else embedding.weight.dtype
        # Those that read keys and values of others come last.
        self.sources = [_source(layer, index) for index, layer in enumerate(layers)]
        self.kept = sum(not borrows(layer) for layer in layers)
        last = Weight(head.packed, head.bias, head.compute, head.activation) if self.headed else None
        self.windows, self.logits = _windows(model), _logits(model)
        self._kinds = _kinds(model)
        turns = [self._kinds.index(kind if family.rope_per_type else "") for kind in _types(model)]
        settings = [setting for layer in layers for setting in settings_of(layer)]
        settings += [(norm, eps_of(norm)), *((self._rotary, _of(kind, "attention_scaling")) for kind in self._kinds)]
        # longrope writes to `inv_freq` at each call, one of two, by how far the text reaches
        self._switch: int | None = None
        if self._rotary.rope_type == "longrope":
            self._switch = inner.config.rope_parameters["original_max_position_embeddings"]
        frequencies = "inv_freq" if self._switch is None else "original_inv_freq"
        self._tensors = [(self._rotary, _of(kind, frequencies)) for kind in self._kinds]
        table, factor = self._looked_up(embedding, settings)
        if family.embedding_multiplier is not None:
            factor *= getattr(inner, family.embedding_multiplier)
            settings.append((inner, family.embedding_multiplier))
        logits = self.logits if self.headed else None
        inputs = self._inputs(inner, layers, settings) if computed[0].beside is not None else None
        self.step = DecodingStep(computed, table, last_norm, last, self.windows, turns, factor=factor, logits=logits, inputs=inputs)
        parts = [part for layer in layers for part in parts_of(layer)]
        of_inputs = () if inputs is None else _inputs_of(inner)
        read = (*parts, norm, embedding, self._rotary, *([head] if self.headed else []), *of_inputs)
        self._unchanged = Unchanged(model, read, settings, [(layer, "training") for layer in layers])
        self._config, self._values = inner.config, tuple(vars(inner.config).values())
        self._versions = [version(getattr(owner, name)) for owner, name in self._tensors]
        self._turned = max(layer.rotary for layer in computed)
        self._turns: Bounded[tuple[int, bool], tuple[Tensor, int]] = Bounded(_MOST_BLOCKS)

    def _looked_up(self, embedding: Any, settings: list[tuple[Any, str]]) -> tuple[Packed | Tensor, float]:
        """Its table and the factor of rows, whose attribute goes to what is compared."""
        factor, scale = 1.0, _scale(embedding)
        if isinstance(scale, Tensor):
            factor = float(scale.to(self.dtype))
            self._tensors.append((embedding, ATTRIBUTE))
        elif scale is not None:
            factor = scale
            settings.append((embedding, ATTRIBUTE))
        return embedding.packed if isinstance(embedding, QuantEmbedding) else embedding.weight.detach(), factor

    def _inputs(self, inner: Any, layers: list[Any], settings: list[tuple[Any, str]]) -> Inputs:
        """What layers' own inputs are made of; attributes that they depend on go to `settings`."""
        embedding, projection, norm = _inputs_of(inner)
        weight = Weight(projection.packed, projection.bias, projection.compute, projection.activation)
        settings += [*((inner, name) for name in _SCALES), (norm, eps_of(norm))]
        projected, scale = (getattr(inner, name) for name in _SCALES)
        return Inputs(*self._looked_up(embedding, settings), weight, projected, norm_of(norm, known(layers[0])), scale)

    def is_still(self) -> bool:
        values = vars(self._config).values()
        same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return same and [version(getattr(*place)) for place in self._tensors] == self._versions and self._unchanged.is_still()

    def turn(self, position: int, furthest: int) -> tuple[Tensor, int]:
        """A table, and the address in it of the cosines and sines [kinds, 2, R] of a position, float32, where all sequences reach to
        `furthest`."""
        block, at = divmod(position, _AT_ONCE)
        far = self._switch is not None and furthest >= self._switch
        found = self._turns.get((block, far))
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                positions = torch.arange(block * _AT_ONCE, (block + 1) * _AT_ONCE, device="cpu").unsqueeze(0)
                if far:  # the furthest decides for all
                    positions = torch.cat((positions, torch.tensor([[self._switch]], device="cpu")), 1)
                elif self._switch is not None:
                    positions = positions.clamp(max=self._switch - 1)
                x = torch.empty(0, dtype=self.dtype, device="cpu")
                parts = [part for kind in self._kinds for part in self._rotary(x, positions, *([kind] if kind else []))]
                # Cosines of half of what is turned stand for both halves; those of heads that are smaller are followed by anything.
                size = self._turned
                wide = [torch.cat([part] * max(1, -(-size // part.shape[-1])), -1)[..., :size] for part in parts]
                table = torch.cat(wide, -1)[0].float().contiguous()
            found = self._turns[block, far] = table, table.data_ptr()
        return found[0], found[1] + at * found[0].stride(0) * 4


_models: WeakKeyDictionary[nn.Module, _Held] = WeakKeyDictionary()


def _held(model: Any) -> _Held | None:
    """The model's parts in one, as they are now; None where it takes other steps."""
    held = _models.get(model)
    if held is None or not held.is_still():
        _models.pop(model, None)
        layers = [*model.model.layers]
        made = [] if _is_other(model, layers) else [one for layer in layers if (one := computed(layer)) is not None]
        if not layers or len(made) != len(layers):
            return None
        held = _models[model] = _Held(model, layers, made)
    return held


def _source(layer: Any, index: int) -> int:
    """The number of the layer whose keys and values a layer reads, itself or an earlier one."""
    found = lender(layer) if borrows(layer) else index
    assert found is not None
    return found


def _windows(model: Any) -> tuple[int | None, ...]:
    """The window of each layer's attention, None where it sees all tokens."""
    config, which = model.config, _family(model).sliding_window
    if which == "layer_types":
        return tuple(config.sliding_window if kind == SLIDING else None for kind in config.layer_types)
    window: int | None = config.sliding_window if which == "all" else None
    return (window,) * len(model.model.layers)


def _types(model: Any) -> list[str]:
    """Of each layer."""
    return list(getattr(model.config, "layer_types", None) or [""] * len(model.model.layers))


def _kinds(model: Any) -> list[str]:
    """The types of layers that have rotary positions of their own; "" where all have the same."""
    return sorted({*_types(model)}) if _family(model).rope_per_type else [""]


def _of(kind: str, name: str) -> str:
    """The name of an attribute of rotary positions."""
    return f"{kind}_{name}" if kind else name


def _logits(model: Any) -> tuple[str, float] | None:
    """What logits go through, as `DecodingStep` has it."""
    family, config = _family(model), model.config
    if family.logits_divisor is not None:
        return "over", getattr(config, family.logits_divisor)
    if family.logits_multiplier is not None:
        return "times", getattr(config, family.logits_multiplier)
    cap = None if family.logits_softcap is None else getattr(config, family.logits_softcap)
    return None if cap is None else ("cap", cap)


def _scale(embedding: Any) -> Factor | None:
    """The factor of an embedding's rows, if it has one."""
    return embedding.embed_scale if type(embedding) is QuantEmbedding else factor_of(embedding)


def _inputs_of(inner: Any) -> tuple[Any, Any, Any]:
    """The table, the projection and the norm that layers' own inputs are made by."""
    return inner.embed_tokens_per_layer, inner.per_layer_model_projection, inner.per_layer_projection_norm


def _is_table(embedding: Any, dtype: torch.dtype) -> bool:
    """Whether nothing but rows of a table in that type, times a factor, come out of an embedding."""
    if type(embedding) is nn.Embedding or (isinstance(embedding, nn.Embedding) and factor_of(embedding) is not None):
        return embedding.max_norm is None and embedding.weight.dtype == dtype and embedding.weight.is_cpu
    return type(embedding) is QuantEmbedding and embedding.dtype == dtype


def _is_other(model: Any, layers: list[Any]) -> bool:
    """Whether a step of the model is anything else but this file's formula, or is watched, or its inner results are asked for."""
    inner, head, config = model.model, model.lm_head, model.config
    embedding, norm, rotary = inner.embed_tokens, inner.norm, inner.rotary_emb
    if config is not inner.config or config._attn_implementation not in _ATTENTION or config.num_hidden_layers != len(layers):
        return True
    if not config.return_dict or config.output_attentions or config.output_hidden_states or why_hooked(model) is not None:
        return True
    if any("forward" in vars(part) for part in model.modules() if part is not model):
        return True
    if any(map(is_eager, layers)) and config._attn_implementation != "eager":
        return True
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention", SLIDING}:
        return True
    if any(window is not None and window < 2 for window in _windows(model)):
        return True
    if getattr(config, "output_router_logits", False):
        return True
    if not all(isinstance(layer, Shortened) for layer in layers) or any(
        layer.training or not layer.self_attn.is_causal for layer in layers
    ):
        return True
    if [layer.self_attn.layer_idx for layer in layers] != [*range(len(layers))]:
        return True
    ropes = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    # Positions turn by what the length of the text makes of them
    if any("dynamic" in rope for rope in ropes) or (isinstance(rotary.rope_type, dict) and "longrope" in ropes):
        return True
    if not all(hasattr(rotary, _of(kind, "inv_freq")) for kind in _kinds(model)):
        return True
    if [borrows(layer) for layer in layers] != sorted(borrows(layer) for layer in layers):
        return True
    tables, around = [embedding, head], [embedding]
    if any(per_layer_of(layer) is not None for layer in layers):
        own, projection, own_norm = _inputs_of(inner)
        if type(projection) is not QuantLinear or not type(own_norm).__module__.startswith("transformers."):
            return True
        tables += own, projection
        around.append(own)
    if not all(_is_table(one, norm.weight.dtype) for one in around):
        return True
    packed = [part.packed for part in tables if type(part) in (QuantEmbedding, QuantLinear)]
    return why_not_packed(packed) is not None or any(part_of(part) is not None for part in tables)
