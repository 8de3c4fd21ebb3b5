"""A model card from `save_pretrained` and `push_to_hub` of a quantized model. Imported by changed_models.py.

`push_to_hub` saves the model into a temporary folder, writes a card there that says nothing but that it was pushed, or the card that the
place on the Hub has, and uploads the folder. Only a card of the first kind is replaced.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from functools import wraps
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers.modeling_utils import PreTrainedModel

from halfbyte.checkpoint.native.model_card import CARD, CardWeight, model_card, write_card
from halfbyte.integrations.transformers.quantizer import HalfbyteQuantizer
from halfbyte.nn.report import report

_EMPTY_CARD = "This model card has been automatically generated."  # in transformers' own


def card_of(model: PreTrainedModel, title: str, tags: Iterable[str] = ()) -> str:
    """The card of a quantized model of transformers that is called `title`, with these and the model's own tags."""
    found = report(model)
    weights = [
        CardWeight(row.kind, row.format, math.prod(row.shape), row.bytes_after, row.error)
        for row in found.quantized
        if row.format is not None and row.tied_to is None
    ]
    config = {"architectures": [type(model).__name__]}
    tags = [*(model.model_tags or ()), *tags]
    return model_card(title, weights, total_bytes=found.bytes_after, config=config, base_model=model.config.name_or_path, tags=tags)


_model: Any = PreTrainedModel
_save: Any = _model.save_pretrained
_upload: Any = _model._upload_modified_files


@wraps(_save)
def _save_with_card(
    self: PreTrainedModel, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: object, **kwargs: object
) -> object:
    result = _save(self, save_directory, is_main_process, *args, **kwargs)
    if is_main_process and _is_quantized(self) and (folder := Path(save_directory)).is_dir():
        write_card(folder, card_of(self, folder.resolve().name))
    return result


@wraps(_upload)
def _upload_with_card(self: PreTrainedModel, working_dir: str | os.PathLike[str], repo_id: str, *args: object, **kwargs: object) -> object:
    path = Path(working_dir) / CARD
    if _is_quantized(self) and path.is_file() and _EMPTY_CARD in path.read_text(encoding="utf-8", errors="replace"):
        tags = ModelCard.load(path).data.tags or ()  # those that `push_to_hub` was given
        path.unlink()
        write_card(path.parent, card_of(self, repo_id, tags))
    return _upload(self, working_dir, repo_id, *args, **kwargs)


def _is_quantized(model: object) -> bool:
    return isinstance(getattr(model, "hf_quantizer", None), HalfbyteQuantizer)


_model.save_pretrained = _save_with_card
_model._upload_modified_files = _upload_with_card
