"""`halfbyte inspect`: shows the contents of a checkpoint, and the errors of its weights."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

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
    from halfbyte.memory import size_text

    model, notes = open_model(args.path, floats=True) if _is_described(args.path) else None, list[str]()
    if model is not None:
        rows = list(_model_rows(model))
        if args.against is not None:
            if not model.weights:
                raise CheckpointError(f"nothing in {args.path} is quantized, so there is nothing to compare: leave --against out")
            if _is_described(args.against):
                which = "is a GGUF file: name one in safetensors" if is_file(args.against) else "is quantized"
                raise CheckpointError(f"--against takes the model as it was before it was quantized, and {args.against} {which}")
            with progress(args, "comparing") as advance:
                notes = _compare(model, Reader(weight_files(args.against)), rows, advance)
    elif args.against is not None:
        raise CheckpointError(f"{args.path} is not a halfbyte checkpoint, so there is nothing quantized to compare: leave --against out")
    else:
        rows = list(_plain_rows(Reader(weight_files(args.path))))
    weights = sum(math.prod(row["shape"]) for row in rows if row["tied_to"] is None)
    nbytes, halfbyte_bytes = (sum(row[key] for row in rows) for key in ("bytes", "held_bytes"))
    if model is not None:
        notes = [*model.report().notes, *notes]
    bits = 8 * nbytes / weights if weights else 0.0
    if args.json:
        totals = {"tensors": len(rows), "elements": weights, "bytes": nbytes, "held_bytes": halfbyte_bytes, "bits_per_element": bits}
        print_json({"path": str(args.path), "rows": rows, "totals": totals, "notes": notes})
        return 0
    columns: tuple[str, ...] = ("name", "format", "shape", "bytes", "bits", "error")
    if otherwise := any(row["type"] != row["format"] for row in rows):
        columns = ("name", "in the files", "shape", "bytes", "bits", "in halfbyte", "bytes", "bits", "error")
    print_table(columns, (_cells(row, otherwise) for row in rows), left=2)
    more = f"; {size_text(halfbyte_bytes)} in halfbyte" if otherwise else ""
    print(f"{len(rows)} tensors, {weights:,} elements, {size_text(nbytes)}, {bits:.2f} bits per element{more}")
    for note in () if args.quiet else notes:
        print(note, file=sys.stderr)
    return 0


# What is shown of a tensor: see `_row`.
TensorRow = TypedDict(  # noqa: UP013  keys of the JSON document, which are not names of this code
    "TensorRow",
    {
        "name": str,
        "type": str,
        "format": str,
        "shape": list[int],
        "bytes": int,
        "held_bytes": int,
        "error": float | None,
        "tied_to": str | None,
    },
)


def _cells(row: TensorRow, otherwise: bool) -> tuple[str, ...]:
    """A row of the table; `otherwise`: with halfbyte's format and bytes next to those of the files."""
    shape = "×".join(map(str, row["shape"])) or "scalar"
    if row["tied_to"] is not None:
        return row["name"], row["type"], shape, "tied to", row["tied_to"], *("",) * (4 if otherwise else 1)
    halfbyte_cells: tuple[str, ...] = ("", "", "") if otherwise else ()
    if row["type"] != row["format"]:
        halfbyte_cells = row["format"], *_sizes(row, "held_bytes")
    error = "" if row["error"] is None else f"{row['error']:.5f}"
    return row["name"], row["type"], shape, *_sizes(row, "bytes"), *halfbyte_cells, error


def _sizes(row: TensorRow, key: Literal["bytes", "held_bytes"]) -> tuple[str, str]:
    """Bytes, and bits of an element."""
    from halfbyte.memory import size_text

    elements = math.prod(row["shape"])
    return size_text(row[key]), f"{8 * row[key] / elements:.2f}" if elements else ""


def _is_described(path: Path) -> bool:
    """Whether the meaning of the tensors is described: a GGUF file, or a config.json with settings of quantization."""
    from halfbyte.checkpoint.native.manifest import CONFIG, SECTION
    from halfbyte.checkpoint.native.quantization_config import SETTINGS
    from halfbyte.io.gguf import is_gguf
    from halfbyte.io.safetensors import load_json

    if is_file(path):
        return is_gguf(path)
    return is_file(path / CONFIG) and not {SECTION, SETTINGS}.isdisjoint(load_json(path / CONFIG))


def _model_rows(model: StoredModel) -> Iterator[TensorRow]:
    for name, owner in model.names():
        tied_to, stored_as = None if owner == name else owner, model.stored_as(owner)
        gguf_type = None if stored_as is None else stored_as.removeprefix("GGUF ")
        if (weight := model.weights.get(owner)) is not None:
            stored_bytes, error = weight.stored_bytes, weight.error
            yield _row(name, str(weight.format), weight.shape, model.nbytes(owner), stored_bytes, gguf_type, error, tied_to)
        else:
            spec = model.plain[owner]
            yield _row(name, _dtype(spec), spec.shape, model.nbytes(owner), spec.nbytes, gguf_type, tied_to=tied_to)


def _plain_rows(reader: Reader) -> Iterator[TensorRow]:
    for name, place in sorted(reader.places.items()):
        yield _row(name, _dtype(place.spec), place.spec.shape, place.spec.nbytes, place.spec.nbytes)


def _dtype(spec: TensorSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")


def _row(
    name: str,
    format: str,
    shape: tuple[int, ...],
    nbytes: int,
    stored_bytes: int,
    gguf_type: str | None = None,
    error: float | None = None,
    tied_to: str | None = None,
) -> TensorRow:
    """What is shown of a tensor.

    format, stored_bytes  its format in halfbyte, and bytes of that
    nbytes         bytes in the files
    gguf_type      the name of its type in the files, if that is not a dtype or halfbyte's format
    """
    return {
        "name": name,
        "type": gguf_type or format,
        "format": format,
        "shape": list(shape),
        "bytes": 0 if tied_to else nbytes,
        "held_bytes": 0 if tied_to else stored_bytes,
        "error": error,
        "tied_to": tied_to,
    }


def _compare(model: StoredModel, source: Reader, rows: list[TensorRow], advance: Advance) -> list[str]:
    """Fill in the error of every quantized row, from the original's tensors; returns notes on those that have none."""
    from halfbyte.nn.kinds import relative_error

    notes = []
    quantized = [row for row in rows if row["name"] in model.weights]
    for i, row in enumerate(quantized):
        advance(i, len(quantized), row["name"])
        original = _name_in(source, row["name"])
        spec = source.spec(original)
        weight = model.weights[row["name"]]
        if spec.shape != weight.float_shape:
            shapes = f"{list(weight.float_shape)}, but {original} of the original is {list(spec.shape)}"
            raise CheckpointError(f"{row['name']} is {shapes}: is it the same model?")
        rows_first = source.read(original).mT if weight.transposed else source.read(original)
        codes = model.codes(row["name"])
        error = relative_error(_columns(rows_first, model, row["name"]), codes, weight.kind, weight.fold)
        row["error"] = error if math.isfinite(error) else None
        if not math.isfinite(error):
            notes.append(f"{row['name']}: the original has infinities or NaN, so that there is no error")
    return notes


def _name_in(source: Reader, name: str) -> str:
    """The name of a weight in the original, which may have an additional or a missing prefix such as `bert.`."""
    if name in source.places:
        return name
    matches = [other for other in source.places if other.endswith(f".{name}") or name.endswith(f".{other}")]
    if len(matches) != 1:
        raise CheckpointError(f"the original has {len(matches) or 'no'} tensors called {name}: is it the same model?")
    return matches[0]


def _columns(original: Tensor, model: StoredModel, name: str) -> Tensor:
    """The original with its columns in the order of the codes."""
    from halfbyte.checkpoint.stored_model import order_name

    order = order_name(name)
    return original[:, model.tensor(order).long()] if order in model.plain else original
