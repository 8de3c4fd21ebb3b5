"""Refuses quantized models in versions of peft that were not tested. Imported with peft's models (see on_import.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType

from torch import nn

from halfbyte.errors import UnsupportedError
from halfbyte.nn.modules.quantized import QuantModule
from halfbyte.versions import TESTED

_CLASSES = ("BaseTuner", "PeftModel")  # peft instantiates one of them for every adapter


def refuse(module: ModuleType, reason: str) -> None:
    """Let the classes of peft that `module` has refuse quantized models; `reason` names the version."""
    for name in _CLASSES:
        if (found := getattr(module, name, None)) is not None:
            found.__init__ = _checking(found.__init__, reason)


def _checking(init: Callable[..., None], reason: str) -> Callable[..., None]:
    @wraps(init)
    def checked(self: object, model: nn.Module, *args: object, **kwargs: object) -> None:
        if any(isinstance(part, QuantModule) for part in model.modules()):
            raise UnsupportedError(
                f"adapters on a quantized model need private parts of peft, and {reason}: install peft {TESTED['peft']}, or attach them to "
                "the float model"
            )
        init(self, model, *args, **kwargs)

    return checked
