"""Refuses to quantize, and to open quantized models, in versions of diffusers that were not tested. Imported with its quantizers (see
on_import.py)."""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

from halfbyte.checkpoint.native.quantization_config import METHOD
from halfbyte.errors import UnsupportedError
from halfbyte.versions import TESTED


def refuse(module: ModuleType, reason: str) -> None:
    """Register a class that raises UnsupportedError in the tables of `module`, where it has them; `reason` names the version."""

    class Refused:
        """In place of the configuration and of the quantizer."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            self.from_dict()

        @classmethod
        def from_dict(cls, *args: object, **kwargs: object) -> NoReturn:
            raise UnsupportedError(
                f"quantization while diffusers loads a model needs private parts of it, and {reason}: install diffusers "
                f"{TESTED['diffusers']}, or load the float model and call halfbyte.quantize_"
            )

    tables: list[dict[str, type]] = [getattr(module, name, {}) for name in ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING")]
    for table in tables:
        table[METHOD] = Refused
