"""The tensors of a model's files, plain and quantized in the formats of various projects, behind one interface.

Each reader of foreign files (foreign/, gguf/, language/checkpoint_tensors.py) returns `Entries`: what is known of each tensor before any
is read, and a function that reads it. mapping/plan.py maps them to a model's tensors, and planned_model.py reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.io.safetensors import Reader
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.described import NOT_A_KIND, Candidate

ReadColumnOrder = Callable[[], Tensor]
NOT_EXACT_AS_CODES = "integers do not hold it exactly"
_CHUNK = 1 << 20  # elements that are dequantized at a time


@dataclass(frozen=True)
class Quantized:
    """What is known of a quantized weight before it is read.

    Attributes:
        format: The format of its codes.
        stored_as: How the files store it, as its project calls it: "GGUF Q4_K".
        order: A function that reads the order of its columns, int32 [K], where it is not that of the inputs (activation order).
        compute: How it is multiplied, as in `halfbyte.Config`.
        activation: Which activations share a scale where they are quantized, as in `halfbyte.Config`.
        transposed: Whether the float tensor is [..., K, N], while the codes are [..., N, K].
        from_floats: Whether the files hold low-precision floats, which may also be quantized to another format.
    """

    format: Format
    stored_as: str
    order: ReadColumnOrder | None = None
    compute: str = "auto"
    activation: str = "block"
    transposed: bool = False
    from_floats: bool = False


@dataclass(frozen=True)
class Entry:
    """One tensor of a model, whatever the files store for it.

    Attributes:
        spec: Dtype and shape of the tensor in floating point, also of one that is stored as codes.
        nbytes: Bytes of all that the files store for it.
        read: A function that reads it: Codes if `quantized`, whatever its argument; else a tensor of the dtype given, None for its own.
        quantized: How it is quantized; None for a tensor that is read in floating point.
        stored_as: Where `quantized` is None, although the files store it in low precision, since no Codes hold it exactly: how its project
            calls that.
    """

    spec: TensorSpec
    nbytes: int
    read: Callable[[torch.dtype | None], Codes | Tensor]
    quantized: Quantized | None = None
    stored_as: str | None = None


@dataclass(frozen=True)
class Entries:
    """All tensors of a model, by their names in the files.

    Attributes:
        entries: Name in the files -> the tensor.
        notes: Remarks about them for the report.
        files: The reader of the files, by which equal tensors are found without converting them; None for other files than safetensors.
    """

    entries: Mapping[str, Entry]
    notes: Sequence[str] = ()
    files: Reader | None = None

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: entry.spec for name, entry in self.entries.items()}

    def spec(self, name: str) -> TensorSpec:
        return self.entries[name].spec

    def stored_as(self, names: Iterable[str]) -> str | None:
        """Return how the files store the first of these tensors that is low-precision; None where none is."""
        entries = (self.entries[name] for name in names)
        stored = (entry.stored_as if entry.quantized is None else entry.quantized.stored_as for entry in entries)
        return next((stored_as for stored_as in stored if stored_as is not None), None)

    def outputs_first(self, name: str) -> bool:
        """Whether `read` returns a matrix [N, K], outputs first.

        Codes are stored as Linears have them, even where the model's own module keeps its weight as [K, N] (GPT-2's Conv1D).
        """
        quantized = self.entries[name].quantized
        return quantized is not None and not quantized.transposed

    def codes(self, name: str) -> Codes:
        """Read a quantized weight. Raises CheckpointError where its codes are not what its format allows."""
        codes, quantized = self.entries[name].read(None), self.entries[name].quantized
        assert isinstance(codes, Codes)
        assert quantized is not None
        if codes.format != quantized.format:
            found = f"{codes.format} codes found where {quantized.format} was expected"
            raise CheckpointError(f"{name}: {found}: the checkpoint is damaged")
        try:
            codes.check_values()
        except FormatError as error:
            raise CheckpointError(f"{name}: {error}: the checkpoint is damaged") from error
        return codes

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor in floating point, dequantized if need be."""
        entry = self.entries[name]
        quantized = entry.quantized
        if quantized is None:
            plain = entry.read(dtype)
            assert isinstance(plain, Tensor)
            return plain
        order = None if quantized.order is None else quantized.order()
        weight = dequantize_weight(self.codes(name), dtype or entry.spec.dtype, order)
        return weight.mT if quantized.transposed else weight

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors have the same values; without low-precision ones, the same bytes."""
        first, second = self.entries[name], self.entries[other]
        if first is second:
            return True
        if self.files is not None and self.stored_as((name, other)) is None:
            return self.files.same(name, other)
        if first.spec != second.spec or (first.quantized is None) != (second.quantized is None):
            return False
        return torch.equal(self.read(name), self.read(other))

    def choose(self, found: Sequence[Candidate], sources: Mapping[str, Sequence[str]]) -> dict[str, Format | str]:
        """Decide for each module whether it keeps the codes of the files.

        Modules that share a weight share its decision: one of them that can't be quantized has it dequantized for all.

        Args:
            found: The modules of the model whose weights may be quantized.
            sources: The names of the entries that each module's weight is made of.

        Returns:
            The format of the weight in the files, or why the module has it in floating point.
        """
        quantizations = {candidate.name: self._quantization_of(sources.get(candidate.name, ())) for candidate in found}
        dequantized_because = {
            candidate.weight: candidate.reason
            for candidate in found
            if candidate.reason is not None and isinstance(quantizations[candidate.name], Quantized)
        }
        decisions: dict[str, Format | str] = {}
        for candidate in found:
            quantization, name = quantizations[candidate.name], candidate.name
            if isinstance(quantization, Quantized):
                reason = dequantized_because.get(candidate.weight)
                decisions[name] = quantization.format if reason is None else f"{quantization.stored_as}, dequantized: {reason}"
            elif stored_as := self.stored_as(sources.get(name, ())):
                decisions[name] = f"{stored_as}, dequantized: {candidate.reason or quantization}"
            else:
                decisions[name] = "as it is" if candidate.reason in (None, NOT_A_KIND) else str(candidate.reason)
        return decisions

    def _quantization_of(self, names: Sequence[str]) -> Quantized | str:
        """Return how the weight that is stacked of these entries is quantized, or why it can't stay so."""
        parts = [self.entries[name].quantized for name in names]
        first = parts[0] if parts else None
        if first is None or None in parts:
            return NOT_EXACT_AS_CODES
        if len(parts) == 1:
            return first
        if any(part is not None and part.order is not None for part in parts):
            return "its parts have their columns in orders of their own"
        if any(part != first for part in parts):
            return "its parts are quantized differently"
        return "its parts have one scale each" if first.format.block == "tensor" else first


def plain_entries(reader: Reader, names: Iterable[str] | None = None) -> dict[str, Entry]:
    """Return entries for the tensors of a reader that are not quantized: all, or those called `names`."""
    specs = {name: reader.spec(name) for name in (reader.places if names is None else names)}
    return {name: Entry(spec, spec.nbytes, partial(reader.read, name)) for name, spec in specs.items()}


def joined(*parts: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries of all parts. Raise CheckpointError for a name in two of them, as of a plain weight next to its codes."""
    entries: dict[str, Entry] = {}
    for part in parts:
        if twice := entries.keys() & part.keys():
            raise CheckpointError(f"the files hold {min(twice)} twice, in two ways: remove the tensors of one of them")
        entries |= part
    return entries


def dequantize_weight(codes: Codes, dtype: torch.dtype, order: Tensor | None = None) -> Tensor:
    """Dequantize a weight, a few rows at a time.

    Args:
        codes: [..., N, K].
        dtype: Of the result.
        order: int32 [K]: the input that each of the codes' columns belongs to. None: the columns are in the order of the inputs.

    Returns:
        The weight [..., N, K] on the CPU, with its columns in the order of the inputs.
    """
    columns = None if order is None else order.long().argsort()
    rows, k = codes.rows, codes.shape[-1]
    out = torch.empty(rows, k, dtype=dtype, device="cpu")
    matrix, step = codes.reshape((rows, k)), max(1, _CHUNK // max(1, k))
    for first in range(0, rows, step):
        chunk = slice(first, first + step)
        weight = matrix.select(chunk).dequantize(dtype)
        out[chunk] = weight if columns is None else weight[:, columns]
    return out.reshape(codes.shape)
