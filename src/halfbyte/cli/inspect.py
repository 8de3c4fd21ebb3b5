"""`halfbyte inspect`: shows the tensors of a checkpoint, and with --against the errors of its quantized weights.

A checkpoint or GGUF file whose tensors are described is opened as a model: a row shows how the files store a tensor and, where that
differs, how halfbyte does. Any other safetensors files are listed as they are.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from halfbyte.cli.shared.output import Advance, Commands, add_command, path_argument, print_json, print_table, progress
from halfbyte.errors import CheckpointError
from halfbyte.io.files import is_file

if TYPE_CHECKING:
    from torch import Tensor

    from halfbyte.checkpoint.stored_model import StoredModel
    from halfbyte.io.safetensors import Reader
    from halfbyte.io.tensors import TensorSpec


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "inspect",
        run,
        "show formats, shapes and bytes of a checkpoint",
        "Show types and bytes in the files, and where halfbyte holds the same numbers otherwise, its format and bytes. "
        "The error of a weight is ||original - quantized|| / ||original|| (Frobenius).",
    )
    parser.add_argument("path", metavar="PATH", type=path_argument, help="checkpoint, GGUF file, or any safetensors")
    parser.add_argument("--against", metavar="SRC", type=path_argument, help="the original model: compute the error of each weight from it")


def run(args: argparse.Namespace) -> int:
    from halfbyte.checkpoint.files import weight_files
    from halfbyte.checkpoint.loading import open_model
    from halfbyte.io.safetensors import Reader

    notes: list[str] = []
    if _describes_tensors(args.path):
        model = open_model(args.path, floats=True)
        rows, notes = list(_model_rows(model)), list(model.report().notes)
        if args.against is not None:
            notes += _add_errors(args, model, rows)
    elif args.against is not None:
        raise CheckpointError(f"{args.path} is not a halfbyte checkpoint, so there is nothing quantized to compare: leave --against out")
    else:
        rows = list(_file_rows(Reader(weight_files(args.path))))
    totals = _totals(rows)
    if args.json:
        print_json({"path": str(args.path), "rows": [row.to_json() for row in rows], "totals": totals, "notes": notes})
        return 0
    _print_rows(rows, totals)
    for note in () if args.quiet else notes:
        print(note, file=sys.stderr)
    return 0


def _describes_tensors(path: Path) -> bool:
    """Whether the files say how their tensors are quantized: a GGUF file, or a config.json with settings of quantization."""
    from halfbyte.checkpoint.native.manifest import CONFIG, SECTION
    from halfbyte.checkpoint.native.quantization_config import SETTINGS
    from halfbyte.io.gguf import is_gguf
    from halfbyte.io.safetensors import load_json

    if is_file(path):
        return is_gguf(path)
    return is_file(path / CONFIG) and not {SECTION, SETTINGS}.isdisjoint(load_json(path / CONFIG))


# Rows


@dataclass
class TensorRow:
    """One tensor.

    format          in halfbyte: a format, or a dtype
    file_type       in the files: a type of GGUF, or the same as `format`
    halfbyte_bytes  bytes in halfbyte's format; 0 for a tied tensor, as file_bytes
    error           relative error, if it is known
    tied_to         the tensor whose memory this one shares
    """

    name: str
    format: str
    file_type: str
    shape: tuple[int, ...]
    file_bytes: int
    halfbyte_bytes: int
    error: float | None = None
    tied_to: str | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "type": self.file_type,
            "format": self.format,
            "shape": list(self.shape),
            "bytes": self.file_bytes,
            "held_bytes": self.halfbyte_bytes,
            "error": self.error,
            "tied_to": self.tied_to,
        }


# Sums over all rows, in which tied tensors count once, by the names of the JSON document.
Totals = TypedDict(  # noqa: UP013
    "Totals", {"tensors": int, "elements": int, "bytes": int, "held_bytes": int, "bits_per_element": float}
)


def _totals(rows: Sequence[TensorRow]) -> Totals:
    elements = sum(row.elements for row in rows if row.tied_to is None)
    file_bytes, halfbyte_bytes = sum(row.file_bytes for row in rows), sum(row.halfbyte_bytes for row in rows)
    bits = 8 * file_bytes / elements if elements else 0.0
    return {"tensors": len(rows), "elements": elements, "bytes": file_bytes, "held_bytes": halfbyte_bytes, "bits_per_element": bits}


def _model_rows(model: StoredModel) -> Iterator[TensorRow]:
    for name, stored_name in model.names():
        error = None
        if (weight := model.weights.get(stored_name)) is not None:
            format, shape, halfbyte_bytes, error = str(weight.format), weight.shape, weight.stored_bytes, weight.error
        else:
            spec = model.plain[stored_name]
            format, shape, halfbyte_bytes = _dtype(spec), spec.shape, spec.nbytes
        file_type = (model.stored_as(stored_name) or format).removeprefix("GGUF ")
        if name == stored_name:
            yield TensorRow(name, format, file_type, shape, model.nbytes(stored_name), halfbyte_bytes, error)
        else:
            yield TensorRow(name, format, file_type, shape, 0, 0, error, tied_to=stored_name)


def _file_rows(reader: Reader) -> Iterator[TensorRow]:
    for name in sorted(reader.places):
        spec = reader.spec(name)
        yield TensorRow(name, _dtype(spec), _dtype(spec), spec.shape, spec.nbytes, spec.nbytes)


def _dtype(spec: TensorSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")


# The table


def _print_rows(rows: Sequence[TensorRow], totals: Totals) -> None:
    """Print the table; where the files store a tensor in another type than halfbyte, with columns for both."""
    from halfbyte.memory import size_text

    two_formats = any(row.file_type != row.format for row in rows)
    columns: tuple[str, ...] = ("name", "format", "shape", "bytes", "bits", "error")
    if two_formats:
        columns = ("name", "in the files", "shape", "bytes", "bits", "in halfbyte", "bytes", "bits", "error")
    print_table(columns, (_cells(row, two_formats) for row in rows), left=2)
    in_halfbyte = f"; {size_text(totals['held_bytes'])} in halfbyte" if two_formats else ""
    sizes = f"{size_text(totals['bytes'])}, {totals['bits_per_element']:.2f} bits per element{in_halfbyte}"
    print(f"{totals['tensors']} tensors, {totals['elements']:,} elements, {sizes}")


def _cells(row: TensorRow, two_formats: bool) -> tuple[str, ...]:
    shape = "×".join(map(str, row.shape)) or "scalar"
    if row.tied_to is not None:
        return row.name, row.file_type, shape, "tied to", row.tied_to, *("",) * (4 if two_formats else 1)
    in_halfbyte: tuple[str, ...] = ("", "", "") if two_formats else ()
    if row.file_type != row.format:
        in_halfbyte = row.format, *_size_cells(row.halfbyte_bytes, row.elements)
    error = "" if row.error is None else f"{row.error:.5f}"
    return row.name, row.file_type, shape, *_size_cells(row.file_bytes, row.elements), *in_halfbyte, error


def _size_cells(nbytes: int, elements: int) -> tuple[str, str]:
    from halfbyte.memory import size_text

    return size_text(nbytes), f"{8 * nbytes / elements:.2f}" if elements else ""


# Errors


def _add_errors(args: argparse.Namespace, model: StoredModel, rows: Sequence[TensorRow]) -> list[str]:
    """Set the error of each quantized row from the tensors of the original model, --against.

    Returns:
        Notes on weights that have no error.

    Raises:
        CheckpointError: Nothing is quantized here, the original is quantized, or it is another model.
    """
    from halfbyte.checkpoint.files import weight_files
    from halfbyte.io.safetensors import Reader

    if not model.weights:
        raise CheckpointError(f"nothing in {args.path} is quantized, so there is nothing to compare: leave --against out")
    if _describes_tensors(args.against):
        got = "is a GGUF file: name one in safetensors" if is_file(args.against) else "is quantized"
        raise CheckpointError(f"--against takes the model as it was before it was quantized, and {args.against} {got}")
    quantized = [row for row in rows if row.name in model.weights]
    with progress(args, "comparing") as advance:
        return list(_set_errors(model, Reader(weight_files(args.against)), quantized, advance))


def _set_errors(model: StoredModel, originals: Reader, quantized: Sequence[TensorRow], advance: Advance) -> Iterator[str]:
    from halfbyte.nn.kinds import relative_error

    for i, row in enumerate(quantized):
        advance(i, len(quantized), row.name)
        weight = model.weights[row.name]
        original = _read_original(model, originals, row.name)
        error = relative_error(original, model.codes(row.name), weight.kind, weight.fold)
        if math.isfinite(error):
            row.error = error
        else:
            row.error = None
            yield f"{row.name}: the original has infinities or NaN, so that there is no error"


def _read_original(model: StoredModel, originals: Reader, name: str) -> Tensor:
    """Read the float weight from which `name` was quantized, with rows and columns in the order of its codes."""
    from halfbyte.checkpoint.stored_model import order_name

    weight = model.weights[name]
    original_name = _original_name(originals, name)
    shape = originals.spec(original_name).shape
    if shape != weight.float_shape:
        raise CheckpointError(
            f"{name} is {list(weight.float_shape)}, but {original_name} of the original is {list(shape)}: is it the same model?"
        )
    original = originals.read(original_name)
    if weight.transposed:
        original = original.mT
    if (order := order_name(name)) in model.plain:
        original = original[..., model.tensor(order).long()]
    return original


def _original_name(originals: Reader, name: str) -> str:
    """Return the name of a weight in the original, which may have an additional or a missing prefix such as `bert.`."""
    if name in originals.places:
        return name
    matches = [other for other in originals.places if other.endswith(f".{name}") or name.endswith(f".{other}")]
    if len(matches) != 1:
        raise CheckpointError(f"the original has {len(matches) or 'no'} tensors called {name}: is it the same model?")
    return matches[0]
