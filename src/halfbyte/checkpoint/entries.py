"""The tensors of a model's files, plain and quantized in the formats of various projects, behind one interface."""

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

Order = Callable[[], Tensor]
NO_CODES = "integers do not hold it exactly"
_CHUNK = 1 << 20  # weights that are dequantized at a time


@dataclass(frozen=True)
class Quantized:
    """What is known of a quantized weight before it is read.

    form    how the files store it, in their project's terms
    order   returns the order of its columns, int32 [K], where it is not that of the inputs
    transposed   the float tensor is [..., K, N], the codes are [..., N, K]
    floats  the files hold low-precision floats, which may also be quantized to another format
    """

    format: Format
    form: str
    order: Order | None = None
    compute: str = "auto"
    activation: str = "block"
    transposed: bool = False
    floats: bool = False


@dataclass(frozen=True)
class Entry:
    """One tensor.

    spec    of the float tensor that it is or represents
    nbytes  of all that the files store for it
    read    returns it: plain ones in a given dtype, codes where `quantized`
    form    how the files store a low-precision tensor that is read as floats because Codes cannot hold it exactly
    """

    spec: TensorSpec
    nbytes: int
    read: Callable[[torch.dtype | None], Codes | Tensor]
    quantized: Quantized | None = None
    form: str | None = None


@dataclass(frozen=True)
class Entries:
    """All tensors, by their names in the files; a Source for a plan.

    notes  remarks about them for the report
    files  the reader of the plain ones
    """

    entries: Mapping[str, Entry]
    notes: Sequence[str] = ()
    files: Reader | None = None

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: entry.spec for name, entry in self.entries.items()}

    def spec(self, name: str) -> TensorSpec:
        return self.entries[name].spec

    def form(self, names: Iterable[str]) -> str | None:
        """How the files store the first of these tensors that is low-precision, or None."""
        for name in names:
            entry = self.entries[name]
            if (form := entry.form if entry.quantized is None else entry.quantized.form) is not None:
                return form
        return None

    def outputs_first(self, name: str) -> bool:
        """Whether `read` gives a matrix as [N, K] even if its module keeps it transposed: true of codes made for Linears."""
        quantized = self.entries[name].quantized
        return quantized is not None and not quantized.transposed

    def codes(self, name: str) -> Codes:
        """A quantized weight, checked."""
        try:
            codes = self.entries[name].read(None)
            assert isinstance(codes, Codes)
            planned = self.entries[name].quantized
            if planned is None or codes.format != planned.format:
                raise FormatError(f"{codes.format} codes found where {planned and planned.format} was expected")
            codes.check_values()
        except FormatError as e:
            raise CheckpointError(f"{name}: {e}: the checkpoint is damaged") from e
        return codes

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in floating point, dequantized if need be."""
        entry = self.entries[name]
        if entry.quantized is None:
            plain = entry.read(dtype)
            assert isinstance(plain, Tensor)
            return plain
        dequantized = floats(self.codes(name), dtype or entry.spec.dtype, entry.quantized.order and entry.quantized.order())
        return dequantized.mT if entry.quantized.transposed else dequantized

    def same(self, name: str, other: str) -> bool:
        first, second = self.entries[name], self.entries[other]
        if self.files is not None and self.form((name, other)) is None:
            return self.files.same(name, other)
        if first.spec != second.spec or (first.quantized is None) != (second.quantized is None):
            return False
        return torch.equal(self.read(name), self.read(other))

    def choose(self, found: Sequence[Candidate], sources: Mapping[str, Sequence[str]]) -> dict[str, Format | str]:
        """For each module the format of its weight in the files, or why it is plain; the same for modules that share a weight."""
        shared: dict[object, str] = {}
        decisions: dict[str, Format | str] = {}
        forms = {candidate.name: self._form(sources.get(candidate.name, ())) for candidate in found}
        for candidate in found:
            quantized, reason = forms[candidate.name], candidate.reason
            if quantized is not None and reason is not None:
                shared[candidate.weight] = f"{quantized.form}, dequantized: {reason}"
        for candidate in found:
            quantized = forms[candidate.name]
            if quantized is not None:
                decisions[candidate.name] = shared.get(candidate.weight, quantized.format)
            elif form := self.form(sources.get(candidate.name, ())):
                decisions[candidate.name] = f"{form}, dequantized: {candidate.reason or NO_CODES}"
            else:
                decisions[candidate.name] = "as it is" if candidate.reason in (None, NOT_A_KIND) else str(candidate.reason)
        return decisions

    def _form(self, names: Sequence[str]) -> Quantized | None:
        """How the weight made of these entries is quantized; None where some are not, or cannot be stacked as codes."""
        forms = [self.entries[name].quantized for name in names]
        first = forms[0] if forms else None
        if first is None or len(forms) == 1:
            return first
        same_form = all(form is not None and form.order is None and form == first for form in forms)
        return first if same_form and first.format.block != "tensor" else None


def plain_entries(reader: Reader, names: Iterable[str] | None = None) -> dict[str, Entry]:
    """The tensors that are not quantized: all, or those of these names."""
    return {n: Entry(reader.spec(n), reader.spec(n).nbytes, partial(reader.read, n)) for n in (reader.places if names is None else names)}


def joined(*parts: Mapping[str, Entry]) -> dict[str, Entry]:
    """All entries. Raises CheckpointError for a weight that the files hold twice, as with a plain one next to its codes."""
    entries: dict[str, Entry] = {}
    for part in parts:
        if twice := entries.keys() & part.keys():
            raise CheckpointError(f"the files hold {min(twice)} twice, plain and quantized: remove the tensors of one of them")
        entries |= part
    return entries


def floats(codes: Codes, dtype: torch.dtype, order: Tensor | None = None) -> Tensor:
    """The dequantized weight, computed a few rows at a time; with its columns in the order of the inputs, if they have another `order`."""
    back = None if order is None else order.long().argsort()
    rows, k = codes.rows, codes.shape[-1]
    out = torch.empty(rows, k, dtype=dtype, device="cpu")
    matrix, step = codes.reshape((rows, k)), max(1, _CHUNK // max(1, k))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        piece = matrix.select(part).dequantize(dtype)
        out[part] = piece if back is None else piece[:, back]
    return out.reshape(codes.shape)
