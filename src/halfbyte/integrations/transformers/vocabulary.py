"""`resize_token_embeddings` of transformers on quantized models. Imported by changed_models.py.

New tokens have to be trained, so an embedding that gets another size becomes a float layer, with the head that shares its weight; the
same holds for a head of its own. All other layers keep their codes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from halfbyte.integrations.transformers.quantizer import tie_again
from halfbyte.nn.dequantized import dequantize_
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear, QuantModule
from halfbyte.nn.report import add_notes

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part


def _with_float_rows(resize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Decorates a method of transformers that returns an embedding or a head with another number of rows."""

    @wraps(resize)
    def resized(self: Part, old: nn.Module, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Module:
        if not isinstance(old, QuantEmbedding | QuantLinear):
            return resize(self, old, new_num_tokens, *args, **kwargs)
        rows = old.weight.shape[0]
        if _rounded_up(new_num_tokens or rows, *args, **kwargs) == rows:
            return old
        return resize(self, _in_float(self, old), new_num_tokens, *args, **kwargs)

    return resized


def _rounded_up(rows: int, pad_to_multiple_of: int | bool | None = None, *_: object, **__: object) -> int:
    """The number of rows that transformers makes; a head is not padded, and has `transposed` in the place of the multiple."""
    multiple = pad_to_multiple_of if type(pad_to_multiple_of) is int and pad_to_multiple_of > 0 else 1
    return -(-rows // multiple) * multiple


def _in_float(model: Part, old: QuantModule) -> nn.Module:
    """Replaces `old`, and every module that shares its weight, by float layers in `model`, and returns the one in the place of `old`."""
    weight = old.packed.data.data_ptr()
    place = next(name for name, module in model.named_modules(remove_duplicate=False) if module is old)
    names = dequantize_(model, lambda module: module.packed.data.data_ptr() == weight)
    tie_again(model)
    add_notes(model, [f"{' and '.join(names)} became float: {'their' if len(names) > 1 else 'its'} vocabulary was resized"])
    float_module: nn.Module = model.get_submodule(place)
    return float_module


_model: Any = PreTrainedModel
_model._get_resized_embeddings = _with_float_rows(_model._get_resized_embeddings)
_model._get_resized_lm_head = _with_float_rows(_model._get_resized_lm_head)
