"""The report of a quantized model: what was quantized, what was not and why, and the bytes saved."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from halfbyte.errors import check_type
from halfbyte.formats.dense import stored_bytes
from halfbyte.formats.spec import Format
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.layouts.sparse import SPARSITY
from halfbyte.memory import size_text
from halfbyte.nn.candidates import candidates, direct_tensors
from halfbyte.nn.config import Config, decide
from halfbyte.nn.modules.expanded import expanded
from halfbyte.nn.modules.quantized import QuantModule
from halfbyte.nn.modules.weight_view import AnyPacked

CONFIG_ATTRIBUTE = "_halfbyte_config"  # the attribute of a model with the Config that it was quantized by
NOTES = "_halfbyte_notes"  # and the attribute with further notes for the report
KEPT = "_halfbyte_kept"  # and that with its modules whose weights their formats cannot hold -> the reason
REMARK = "halfbyte_remark"  # the attribute of a module with a remark for the report, such as what computes it


@dataclass(frozen=True, slots=True)
class Row:
    """One module that holds parameters, or one tensor of a file.

    kind      the module's class ("Linear"), or "tensor"
    shape     of its weight
    format    None if it is not quantized; `reason` then says why
    tied_to   the name of an earlier row that holds the same weight; its bytes are counted there
    bytes_*   of all its parameters and persistent buffers, quantized weights as they are in files
    error     ||float weight - quantized weight|| / ||float weight|| (Frobenius), if known
    k         elements of a row of the codes, where that is not the last size of the shape
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    format: Format | None
    reason: str | None
    bytes_before: int
    bytes_after: int
    error: float | None = None
    tied_to: str | None = None
    k: int | None = None

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per weight, scales and zeros included."""
        return None if self.format is None or not self.shape else self.format.bits_per_weight(self.k or self.shape[-1])


@dataclass(frozen=True, slots=True)
class Report:
    """Rows in the model's order, and notes. `str()` is a table, `to_json()` everything in plain types."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.format is not None)

    @property
    def kept(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.format is None)

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """Mean over all quantized weights; 0 where there are none."""
        rows = [(math.prod(row.shape), row.bits_per_weight or 0.0) for row in self.quantized if row.tied_to is None]
        weights = sum(count for count, _ in rows)
        return sum(count * bits for count, bits in rows) / weights if weights else 0.0

    def to_json(self) -> dict[str, object]:
        rows = [
            {
                "name": row.name,
                "kind": row.kind,
                "shape": list(row.shape),
                "format": None if row.format is None else str(row.format),
                "reason": row.reason,
                "tied_to": row.tied_to,
                "bits_per_weight": row.bits_per_weight,
                "error": row.error,
                "bytes_before": row.bytes_before,
                "bytes_after": row.bytes_after,
            }
            for row in self.rows
        ]
        totals = {
            "quantized": len(self.quantized),
            "kept": len(self.kept),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bits_per_weight": self.bits_per_weight,
        }
        return {"rows": rows, "totals": totals, "notes": list(self.notes)}

    def __str__(self) -> str:
        lines = []
        if self.quantized:
            lines += table([("name", "kind", "shape", "format", "bits", "error", "before", "after"), *map(_cells, self.quantized)], left=4)
        if self.kept:
            lines += ["", "kept as they are", *table(list(self._kept_cells()), left=5)]
        before, after = self.bytes_before, self.bytes_after
        ratio = ""
        if before and after and f"{max(before, after) / min(before, after):.2f}" != "1.00":
            ratio = f", {before / after:.2f} times smaller" if before >= after else f", {after / before:.2f} times larger"
        bits = f" at {self.bits_per_weight:.2f} bits per weight" if self.quantized else ""
        lines += ["", f"{len(self.quantized)} quantized{bits}, {len(self.kept)} kept; "]
        lines[-1] += f"{size_text(before)} before, {size_text(after)} after{ratio}"
        return "\n".join([*lines, *self.notes]).lstrip("\n")

    def _kept_cells(self) -> Iterator[tuple[str, ...]]:
        """One line for all rows of a kind that are not quantized for the same reason, those that are tied apart."""
        groups: dict[tuple[str, str, str | None], list[Row]] = defaultdict(list)
        for row in self.kept:
            groups[row.kind, row.reason or "", row.tied_to].append(row)
        for (kind, reason, tied_to), rows in groups.items():
            more = f"and {len(rows) - 1} more" if len(rows) > 1 else ""
            size = size_text(sum(row.bytes_after for row in rows)) if tied_to is None else f"tied to {tied_to}"
            yield rows[0].name, more, kind, reason, size


def report(model: nn.Module) -> Report:
    """List which modules of a model are quantized and which are not, with reasons and bytes.

    Args:
        model: A model, quantized or not.

    Returns:
        The report, with one row per module that has parameters; `str()` is a table.

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0")
        >>> hb.report(model).rows[1].name
        '1'
    """
    check_type(model, nn.Module, "report takes a model, a torch.nn.Module", "pass the model that holds it")
    with expanded(model, attention=True):
        return _report(model, getattr(model, CONFIG_ATTRIBUTE, None))


def _report(model: nn.Module, config: Config | None) -> Report:
    found = candidates(model)
    reasons: dict[str, str] = {}
    kept: dict[str, str] = getattr(model, KEPT, {})
    for name, decision in (decide(found, config) if config else {c.name: c.reason for c in found}).items():
        static = config is not None and config.activations == "static"
        other = kept.get(name, "there is no such layer on codes" if static else "not quantized yet")
        reasons[name] = decision if isinstance(decision, str) else other
    seen: dict[int, str] = {}
    modules = model.named_modules(remove_duplicate=False)
    rows = tuple(_row(name, m, reasons.get(name), seen) for name, m in modules if name in reasons or isinstance(m, QuantModule))
    return Report(rows, (*getattr(model, NOTES, ()), *remarks(model), *_stored_differently(model), *_zeros_left_out(model)))


def add_kept(model: nn.Module, kept: Mapping[str, str]) -> None:
    """Add the reasons why modules stay in floating point, which `report` prints."""
    setattr(model, KEPT, {**getattr(model, KEPT, {}), **kept})


def add_notes(model: nn.Module, notes: Sequence[str]) -> None:
    """Add notes that `report` prints below its table."""
    setattr(model, NOTES, (*getattr(model, NOTES, ()), *notes))


def _row(name: str, module: nn.Module, reason: str | None, seen: dict[int, str]) -> Row:
    """`seen`: tensor id -> the first name, where its bytes are counted."""
    others = [t for _, t in direct_tensors(module)]
    extra = sum(t.nbytes for t in others if seen.setdefault(id(t), name) == name and not is_lazy(t))
    if not isinstance(module, QuantModule):
        weight = next((t for n, t in direct_tensors(module) if n == "weight"), others[0])
        tied_to = owner if (owner := seen[id(weight)]) != name else None
        shape = () if is_lazy(weight) else tuple(weight.shape)
        return Row(name, type(module).__name__, shape, None, reason, extra, extra, tied_to=tied_to)
    fmt, shape = module.packed_anywhere.codes_format, module.weight_shape
    owner = seen.setdefault(id(module.packed_data), name)
    before = after = 0
    if owner == name:
        before = math.prod(module.weight_shape) * module.dtype.itemsize
        after = stored_bytes(fmt, module.codes_shape)
    tied_to = None if owner == name else owner
    return Row(name, module.kind, shape, fmt, None, before + extra, after + extra, module.error, tied_to, module.codes_shape[-1])


def add_remark(module: nn.Module, text: str) -> None:
    """Add to a module's REMARK, once."""
    before = getattr(module, REMARK, None)
    if before is None or text not in before.split("; "):
        setattr(module, REMARK, text if before is None else f"{before}; {text}")


def drop_remarks(module: nn.Module, pattern: str) -> None:
    """Drop those of a module's remarks that contain a match of a regular expression."""
    if (before := vars(module).get(REMARK)) is not None:
        kept = [text for text in before.split("; ") if not re.search(pattern, text)]
        if kept:
            setattr(module, REMARK, "; ".join(kept))
        else:
            delattr(module, REMARK)


def remarks(model: nn.Module) -> tuple[str, ...]:
    """The modules' REMARKs, equal ones merged: "model.layers.0 and 31 more: …"."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if (text := getattr(module, REMARK, None)) is not None:
            names[text].append(name)
    found = ((text, f"{first}{f' and {len(more)} more' if more else ''}") for text, (first, *more) in names.items())
    return tuple(f"{where}: {text}" if where else text for text, where in found)


def _weights(model: nn.Module) -> list[AnyPacked]:
    """The quantized weights of a model, each once."""
    return list({id(m.packed_data): m.packed_anywhere for m in model.modules() if isinstance(m, QuantModule)}.values())


def _stored_differently(model: nn.Module) -> Iterator[str]:
    weights = _weights(model)
    counts = Counter((w.codes_format, w.format) for w in weights if w.codes_format != w.format)
    for (fmt, here), count in counts.items():
        memory = f"codes of {count} of {len(weights)} weights take {here.stored_bits} bits there"
        yield f"{fmt} is {here} in memory, which this device reads instead: {memory}"


def _zeros_left_out(model: nn.Module) -> Iterator[str]:
    weights = _weights(model)
    if sparse := [packed for packed in weights if packed.layout in (cpu_tiles.SPARSE, gpu_tiles.SPARSE)]:
        yield f"{SPARSITY}: half of the codes, zeros, are left out of {len(sparse)} of {len(weights)} weights in memory"


def _cells(row: Row) -> tuple[str, ...]:
    if row.tied_to is not None:
        return row.name, row.kind, _shape_text(row), str(row.format), "", "", "tied to", row.tied_to
    error = "" if row.error is None else f"{row.error:.4f}"
    bits = f"{row.bits_per_weight:.2f}"
    return row.name, row.kind, _shape_text(row), str(row.format), bits, error, size_text(row.bytes_before), size_text(row.bytes_after)


def _shape_text(row: Row) -> str:
    return "×".join(map(str, row.shape))


def table(lines: Sequence[tuple[str, ...]], left: int) -> list[str]:
    """Lines with aligned columns, of which the first `left` are flush left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return [line.rstrip() for line in aligned]
