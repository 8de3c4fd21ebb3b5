"""transformers' Trainer refuses a quantized model of which it would train nothing but norms. Imported with it (see on_import.py)."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import Trainer

from halfbyte.errors import UnsupportedError
from halfbyte.nn.modules.quantized import QuantModule


def check_trains(model: nn.Module) -> None:
    """Raises UnsupportedError for a quantized model without adapters: its weights are frozen, and only norms and biases would be trained.

    Another module that contains a quantized model may have weights of its own to train: it is refused only where it has none.
    """
    if not any(isinstance(module, QuantModule) for module in model.modules()):
        return
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        return
    has_weights = any(parameter.requires_grad and parameter.dim() > 1 for parameter in model.parameters())
    if isinstance(model, PreTrainedModel) or not has_weights:
        raise UnsupportedError(
            f"the weights of this {type(model).__name__} are quantized, and so frozen: attach adapters, peft.get_peft_model(model, "
            "peft.LoraConfig(...)), or train the float model and quantize it then"
        )


_train: Any = Trainer.train


@wraps(_train)
def _checked_train(self: Any, *args: object, **kwargs: object) -> Any:
    check_trains(self.model)
    return _train(self, *args, **kwargs)


Trainer.train = _checked_train  # type: ignore[method-assign]
