"""The metadata of a model in a GGUF file: numbers under keys that begin with the architecture's name, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any, cast

from halfbyte.errors import CheckpointError
from halfbyte.io.gguf import Value


class Metadata:
    """Values by the end of their key.

    Args:
        values: All metadata of a file.
        prefix: What keys begin with; None: the architecture's name.
    """

    def __init__(self, values: Mapping[str, Value], prefix: str | None = None) -> None:
        self._values, self._prefix = values, prefix or values.get("general.architecture")

    def get(self, key: str) -> Value | None:
        """Return a value, None where the file has none."""
        return self._values.get(f"{self._prefix}.{key}")

    def replace(self, values: Mapping[str, Value]) -> Metadata:
        """Return the same metadata with other values."""
        return Metadata({**self._values, **{f"{self._prefix}.{key}": value for key, value in values.items()}})

    def number(self, key: str, kind: type = int, *, needed: bool = True) -> Any:
        """Return a number; None where the file has none and it is not `needed`. Raises CheckpointError for anything else."""
        value = self.get(key)
        if value is None and not needed:
            return None
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0:  # one for each layer
            if any(each != value[0] for each in value):
                what = f"the GGUF file says {short(list(value[:8]))} for {self._prefix}.{key}"
                raise CheckpointError(f"{what}, halfbyte reads one number for all layers there: use its safetensors")
            value = value[0]
        sound = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
        if not sound or not isinstance(value, int | float) or abs(value) > 1 << 40:
            what = "has no" if value is None else f"says {short(value)} for"
            raise CheckpointError(f"the GGUF file {what} {self._prefix}.{key}, a number: it is damaged or not a language model")
        return kind(value)

    def by_layer(self, key: str) -> Sequence[int]:
        """Return a list of integers or booleans that are not all 0. Raises CheckpointError for anything else."""
        found = self.get(key)
        if isinstance(found, Sequence) and not isinstance(found, str) and all(type(each) in (int, bool) for each in found) and any(found):
            return cast("Sequence[int]", found)
        raise CheckpointError(f"the GGUF file says {short(found)} for {self._prefix}.{key}, a number for each layer: it is damaged")

    @property
    def token_count(self) -> int:
        """The size of the vocabulary; 0 where the file has none."""
        tokens = self._values.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, Sequence) else 0
