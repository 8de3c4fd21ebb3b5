"""A model on disk, of any kind, whose names, shapes and dtypes are known before any tensor is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from halfbyte.checkpoint.manifest import Weight
from halfbyte.formats.codes import Codes
from halfbyte.formats.sharding import Ranges, narrowed, take
from halfbyte.io.tensors import Spec
from halfbyte.nn.permuted import ORDER
from halfbyte.nn.report import Report
from halfbyte.nn.static import Calibrated


@dataclass
class StoredModel(ABC):
    """Names are those of the model's parameters and buffers, as in a halfbyte checkpoint.

    path     its name in error messages
    config   config.json without its settings of quantization
    weights  the quantized ones
    plain    all others. One called `<module>.input_order`, int32 [K], is the order of the columns of that module's weight
    tied     name -> the name, in `weights` or `plain`, of the tensor that it shares
    static   of a network on int8 codes: what it is made from, besides the float network
    """

    path: Path
    config: dict[str, Any]
    weights: Mapping[str, Weight]
    plain: Mapping[str, Spec]
    tied: Mapping[str, str]
    static: Calibrated | None = None

    @abstractmethod
    def codes(self, name: str) -> Codes:
        """Reads a weight."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Reads a plain tensor."""

    @abstractmethod
    def report(self) -> Report:
        """What became of each tensor of the files, and why."""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """Bytes of a weight or plain tensor in the files."""

    def form(self, name: str) -> str | None:
        """How the files store a quantized weight or plain tensor, in their project's terms; None where these are dtypes or halfbyte's."""
        return None

    def part_of_codes(self, name: str, dim: int, ranges: Ranges) -> Codes:
        """Some ranges of a weight along one of its dimensions, concatenated; only they are read, where the files allow it."""
        return take(self.codes(name), dim, ranges)

    def part_of_tensor(self, name: str, dim: int, ranges: Ranges) -> Tensor:
        """The same for a plain tensor."""
        return narrowed(self.tensor(name), dim, ranges)

    def names(self) -> Iterator[tuple[str, str]]:
        """(name, the name under which it is stored) of all tensors, tied ones included."""
        yield from ((name, name) for name in (*self.weights, *self.plain))
        yield from self.tied.items()

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """Of all weights and plain tensors."""
        yield from (weight.shape for weight in self.weights.values())
        yield from (spec.shape for spec in self.plain.values())


def order_name(weight: str) -> str:
    """The name of the tensor with the order of a weight's columns."""
    return f"{weight.removesuffix('weight')}{ORDER}"
