"""A model on disk, of any kind, whose names, shapes and dtypes are known before any tensor is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from halfbyte.checkpoint.native.manifest import Weight
from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes
from halfbyte.formats.sharding import Ranges, narrowed, take
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.described import ORDER, Calibrated
from halfbyte.quantizers.check import non_finite

if TYPE_CHECKING:
    from halfbyte.nn.report import Report


@dataclass
class StoredModel(ABC):
    """Names are those of the model's parameters and buffers, as in a halfbyte checkpoint.

    Attributes:
        path: The folder or file, for error messages.
        config: config.json without its settings of quantization.
        weights: Name -> a quantized weight, without its data.
        plain: Name -> dtype and shape of another tensor. One called `<module>.input_order`, int32 [K], is the order of the columns of that
            module's weight.
        tied: Name -> the name, in `weights` or `plain`, of the tensor that it shares.
        static: The scales of a network on int8 codes, from which and the float network it is built; None for any other model.
    """

    path: Path
    config: dict[str, object]
    weights: Mapping[str, Weight]
    plain: Mapping[str, TensorSpec]
    tied: Mapping[str, str]
    static: Calibrated | None = None

    @abstractmethod
    def codes(self, name: str) -> Codes:
        """Read a weight."""

    @abstractmethod
    def _plain_tensor(self, name: str) -> Tensor:
        """Read a plain tensor."""

    def is_parameter(self, name: str) -> bool:
        """Whether a plain tensor is known to be a parameter: not a buffer."""
        return False

    def tensor(self, name: str, *, parameter: bool = False) -> Tensor:
        """Read a plain tensor. Raises CheckpointError where it holds a NaN.

        Args:
            name: Its name in `plain`.
            parameter: Refuse infinities, too, which buffers such as masks may hold.
        """
        return checked_finite(self._plain_tensor(name), name, self.path, parameter=parameter or self.is_parameter(name))

    @abstractmethod
    def report(self) -> Report:
        """What became of each tensor of the files, and why."""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """Bytes of a weight or plain tensor in the files."""

    def left_out(self) -> Sequence[str]:
        """Notes about tensors of the files that are not part of the model."""
        return ()

    def stored_as(self, name: str) -> str | None:
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
        """Shapes of all weights and plain tensors."""
        yield from (weight.shape for weight in self.weights.values())
        yield from (spec.shape for spec in self.plain.values())


def checked_finite(tensor: Tensor, name: str, path: Path, *, parameter: bool) -> Tensor:
    """The tensor; raises CheckpointError where it holds a NaN or, if it is a `parameter`, an infinity."""
    if tensor.is_floating_point() and (what := non_finite(tensor, f"{path}: {name}", infinities=not parameter)) is not None:
        raise CheckpointError(f"{what}: the file is damaged, or the model's training or conversion failed: use another copy of the model")
    return tensor


def order_name(weight: str) -> str:
    """The name of the tensor with the order of a weight's columns."""
    return f"{weight.removesuffix('weight')}{ORDER}"
