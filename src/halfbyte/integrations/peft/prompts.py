"""peft's prompt learning on models with quantized embeddings. Imported with peft's models (see on_import.py).

peft looks for the word embeddings among the parameters, by their number of rows; a quantized weight is none.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from peft.peft_model import PeftModel

from halfbyte.nn.modules.quantized import QuantEmbedding

_NAME = "embeddings.word_embeddings"  # under which peft looks first
_setup: Any = PeftModel._setup_prompt_encoder


@wraps(_setup)
def _setup_prompt_encoder(self: Any, adapter_name: str) -> None:
    base = self.base_model
    embeddings = base.get_input_embeddings() if hasattr(base, "get_input_embeddings") else None
    if not isinstance(embeddings, QuantEmbedding):
        _setup(self, adapter_name)
        return
    get_submodule = base.get_submodule
    base.get_submodule = lambda name: embeddings if name == _NAME else get_submodule(name)
    try:
        _setup(self, adapter_name)
    finally:
        del base.get_submodule


PeftModel._setup_prompt_encoder = _setup_prompt_encoder  # type: ignore[method-assign]
