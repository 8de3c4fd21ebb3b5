"""Embeddings of BERT and its like that `shorten_` has changed: on a CPU a batch takes one call of `ops.embed`.

    y = norm(words(ids) + types(type ids) + positions(position ids))        DistilBERT and MPNet have no types

Gradients, embeddings that are given, hooks, torch.compile, and everything else go the way of transformers' own module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from halfbyte.integrations.shortened import Shortened, name_in_transformers, original, shorten, why_hooked
from halfbyte.integrations.unchanged import Unchanged
from halfbyte.nn.modules import QuantEmbedding
from halfbyte.ops.embed import NormedEmbeddings, ids_fit
from halfbyte.ops.layers import LayerNorm, why_not_packed
from halfbyte.ops.library import plain

APART = "embeddings are added and normed by torch"
ONE_CALL = "embeddings and their norm take one call, without gradients and torch.compile"

_TABLES = ("word_embeddings", "token_type_embeddings", "position_embeddings")
_COUNTS = "create_position_ids_from_input_ids"
_WITHOUT_TYPES = ("word_embeddings", "position_embeddings")
# Modules of transformers whose forward is this file's formula, by their names: nothing is imported for them.
TABLES = {
    "bert.modeling_bert.BertEmbeddings": _TABLES,
    "camembert.modeling_camembert.CamembertEmbeddings": _TABLES,
    "electra.modeling_electra.ElectraEmbeddings": _TABLES,
    "roberta.modeling_roberta.RobertaEmbeddings": _TABLES,
    "xlm_roberta.modeling_xlm_roberta.XLMRobertaEmbeddings": _TABLES,
    "distilbert.modeling_distilbert.Embeddings": _WITHOUT_TYPES,
    "mpnet.modeling_mpnet.MPNetEmbeddings": _WITHOUT_TYPES,
}


def tables_of(module: nn.Module) -> tuple[str, ...] | None:
    """The tables of a module that `shorten` may change; None for any other module."""
    return TABLES.get(name_in_transformers(module))


def shorten_embeddings(module: nn.Module) -> None:
    """Lets a module that has `tables_of` take a batch in one call, in place, or says why it does not."""
    if not isinstance(module, _OneCall):
        shorten(module, _OneCall, APART, why_not(module))


def why_not(module: Any) -> str | None:
    """Why a module that has `tables_of` does not take a batch in one call; None where it does."""
    tables: dict[str, Any] = {name: getattr(module, name, None) for name in tables_of(module) or ()}
    norm = getattr(module, "LayerNorm", None)
    for name, table in tables.items():
        if type(table) is not QuantEmbedding:
            return f"its {name} is a {type(table).__name__}, which is not quantized"
        if table.dtype != torch.float32 or table.embed_scale is not None:
            return f"its {name} gives {table.dtype}" if table.embed_scale is None else f"its {name} multiplies what it gives"
    if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1 or norm.bias is None or norm.weight.dtype != torch.float32:
        return "its LayerNorm is none with weight and bias in float32"
    return why_hooked(module) or why_not_packed([table.packed for table in tables.values()])


class _OneCall(Shortened):
    """Comes before the class of the module."""

    @property
    def halfbyte_remark(self: Any) -> str:
        """What `halfbyte.report` says of it."""
        reason = why_not(self)
        return ONE_CALL if reason is None else f"{APART}: {reason}"

    def forward(self: Any, input_ids: Tensor | None = None, *args: Any, **settings: Any) -> Any:
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled() and not self.training and input_ids is not None:
            ids = _ids(self, input_ids, *args, **settings)
            if ids is not None and ids_fit(ids, len(ids)) and (computed := _computed(self)) is not None:
                return computed(ids)
        # super() in a class that is made at run time: torch.compile follows the plain call.
        return super().forward(input_ids, *args, **settings)  # type: ignore[misc]


def _ids(
    module: Any,
    words: Tensor,
    *args: Any,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, ...] | None:
    """Of each table, in the order of `tables_of`; None where more is asked for than these."""
    if any(value is not None for value in args) or any(value is not None and value != 0 for value in map(_number, others.values())):
        return None
    if not plain(words) or words.dim() != 2:
        return None
    if position_ids is not None:
        positions = position_ids
    elif (counted := _counted(module)) is not None:  # RoBERTa's and MPNet's begin behind the padding
        positions = counted(words, module.padding_idx)
    else:
        positions = module.position_ids[:, : words.shape[1]]
    if tables_of(module) == _WITHOUT_TYPES:
        return words, positions
    if token_type_ids is None and (types := getattr(module, "token_type_ids", None)) is not None:
        token_type_ids = types[:, :1].expand(1, words.shape[1])
    return None if token_type_ids is None else (words, token_type_ids, positions)


def _counted(module: Any) -> Callable[[Tensor, int], Tensor] | None:
    """What makes positions of ids: a method, or a function beside the class."""
    if hasattr(type(module), _COUNTS):
        return getattr(module, _COUNTS)  # type: ignore[no-any-return]
    return _beside(original(module))


@functools.cache
def _beside(cls: type) -> Callable[[Tensor, int], Tensor] | None:
    return getattr(sys.modules[cls.__module__], _COUNTS, None)


def _number(value: Any) -> Any:
    """A tensor counts as something that is asked for."""
    return True if isinstance(value, Tensor) else value


_made: WeakKeyDictionary[nn.Module, tuple[NormedEmbeddings, Unchanged]] = WeakKeyDictionary()


def _computed(module: Any) -> NormedEmbeddings | None:
    """The module's tables and norm in one, as they are now; None where a part was replaced, or is watched."""
    made = _made.get(module)
    if made is None or not made[1].is_still():
        if why_not(module) is not None:
            return None
        tables = [getattr(module, name) for name in tables_of(module) or ()]
        norm = module.LayerNorm
        computed = NormedEmbeddings([table.packed for table in tables], LayerNorm(norm.weight, norm.bias, norm.eps))
        made = _made[module] = computed, Unchanged(module, (*tables, norm))
    return made[0]
