"""Embeddings of encoders (BERT and others) in optimized models: on a CPU `ops.transformer.embed` computes a batch in one native call.

    y = norm(words(ids) + types(type ids) + positions(position ids))        DistilBERT and MPNet have no types

Gradients, embeddings that are given, hooks, torch.compile, and all other calls fall through to transformers' module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfbyte.decoder.families.encoders import EMBEDDING_LAYERS, TOKEN_TYPES
from halfbyte.integrations.transformers.optimize.calls import Arguments, Understood, any_value, bind, unset, why_unknown
from halfbyte.integrations.transformers.optimize.frozen import Frozen
from halfbyte.integrations.transformers.optimize.hooked import is_capturing, why_hooked
from halfbyte.integrations.transformers.optimize.replaced import ReplacedForward, name_in_transformers, original, replace_class
from halfbyte.nn.frozen import while_unchanged
from halfbyte.nn.modules.quantized import QuantEmbedding
from halfbyte.ops.modes import plain
from halfbyte.ops.transformer.embed import NormedEmbeddings, ids_fit
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import why_not_packed

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

UNFUSED = "embeddings are added and normed by torch"
ONE_CALL = "embeddings and their norm are one native call, without gradients and torch.compile"

_COUNTS = "create_position_ids_from_input_ids"

ARGUMENTS: Understood = {
    **dict.fromkeys(("input_ids", "token_type_ids", "position_ids"), any_value),
    "inputs_embeds": unset,
    **dict.fromkeys(("cache_length", "past_key_values_length"), lambda value: type(value) is int and value == 0),
}


def tables_of(module: nn.Module) -> tuple[str, ...] | None:
    """The tables of a module whose forward may be replaced; None for any other module."""
    return EMBEDDING_LAYERS.get(name_in_transformers(module))


def compile_embeddings(module: nn.Module) -> None:
    """Replace the forward of a module that has `tables_of` by one native call, in place, or note why not."""
    if not isinstance(module, _OneCall):
        replace_class(module, _OneCall, UNFUSED, why_not(module))


def why_not(module: nn.Module) -> str | None:
    """Why a module that has `tables_of` cannot be computed in one native call, or None."""
    tables: dict[str, Any] = {name: getattr(module, name, None) for name in tables_of(module) or ()}
    norm = getattr(module, "LayerNorm", None)
    for name, table in tables.items():
        if type(table) is not QuantEmbedding:
            return f"its {name} is a {type(table).__name__}, which is not quantized"
        if table.dtype != torch.float32 or table.embed_scale is not None:
            return f"its {name} gives {table.dtype}" if table.embed_scale is None else f"its {name} multiplies what it gives"
    if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1 or norm.bias is None or norm.weight.dtype != torch.float32:
        return "its LayerNorm is none with weight and bias in float32"
    if (reason := why_unknown(original(module), ARGUMENTS)) is not None:
        return reason
    return why_hooked(module) or why_not_packed([table.packed for table in tables.values()])


class _OneCall(ReplacedForward):
    """Comes before the class of the module."""

    @property
    def halfbyte_remark(self: Any) -> str:
        """What `halfbyte.report` says of it."""
        reason = why_not(self)
        return ONE_CALL if reason is None else f"{UNFUSED}: {reason}"

    def forward(self: Any, *args: object, **kwargs: object) -> object:
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled() and not self.training and not is_capturing():
            call = bind(self.argument_names, args, kwargs, ARGUMENTS)
            ids = None if call is None else _ids(self, call)
            if ids is not None and ids_fit(ids, len(ids)) and (computed := _fused(self)) is not None:
                return computed(ids)
        # super() in a class that is made at run time: torch.compile follows the plain call.
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def _ids(module: Part, call: Arguments) -> tuple[Tensor, ...] | None:
    """The ids for each table, in the order of `tables_of`; None for other inputs. call: arguments by name, as `bind` returns them."""
    words, positions, token_type_ids = (call.get(name) for name in ("input_ids", "position_ids", "token_type_ids"))
    if words is None or not plain(words) or words.dim() != 2:
        return None
    if positions is None:
        counted = _counted(module)  # RoBERTa's and MPNet's begin behind the padding
        positions = module.position_ids[:, : words.shape[1]] if counted is None else counted(words, module.padding_idx)
    if TOKEN_TYPES not in (tables_of(module) or ()):
        return words, positions
    if token_type_ids is None and (types := getattr(module, "token_type_ids", None)) is not None:
        token_type_ids = types[:, :1].expand(1, words.shape[1])
    return None if token_type_ids is None else (words, token_type_ids, positions)


def _counted(module: Part) -> Callable[[Tensor, int], Tensor] | None:
    """The function that computes position ids: a method, or a function of the class's module."""
    if hasattr(type(module), _COUNTS):
        return getattr(module, _COUNTS)  # type: ignore[no-any-return]
    return _module_function(original(module))


@functools.cache
def _module_function(cls: type) -> Callable[[Tensor, int], Tensor] | None:
    return getattr(sys.modules[cls.__module__], _COUNTS, None)


@while_unchanged(Frozen)
def _fused(module: Part) -> NormedEmbeddings | None:
    """The module's tables and norm in one, as they are now; None where a part was replaced, or is watched."""
    if why_not(module) is not None:
        return None
    tables = [getattr(module, name) for name in tables_of(module) or ()]
    norm = Norm(module.LayerNorm.weight, module.LayerNorm.eps, layer_norm=True, bias=module.LayerNorm.bias)
    return NormedEmbeddings([table.packed for table in tables], norm)
