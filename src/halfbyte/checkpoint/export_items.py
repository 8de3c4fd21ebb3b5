"""Writing a model as another kind, item by item: each item is a weight or tensor that is read, converted and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from halfbyte.checkpoint.entries import dequantize_weight
from halfbyte.checkpoint.mapping.plan import Misfits
from halfbyte.checkpoint.native.saving import codes_in_files
from halfbyte.checkpoint.stored_model import StoredModel, order_name
from halfbyte.formats.codes import Codes
from halfbyte.io.tensors import TensorSpec, TensorWriter
from halfbyte.layouts.convolution import channels_first
from halfbyte.nn.report import Row

Progress = Callable[[int, int, str], object]


@dataclass(frozen=True)
class ExportItem:
    """The tensors that are written, and the function that makes them. `row`: its row in the report, if any."""

    specs: Mapping[str, TensorSpec]
    make: Callable[[], Mapping[str, Tensor]]
    row: Row | None = None

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def kept(
    model: StoredModel, name: str, specs: Mapping[str, TensorSpec], write: Callable[[Codes, Tensor | None], Mapping[str, Tensor]]
) -> ExportItem:
    """A weight that stays quantized; `write` makes its tensors from its codes and the order of its columns, if any."""
    weight, after = model.weights[name], sum(spec.nbytes for spec in specs.values())
    row = Row(name.removesuffix(".weight"), weight.kind, weight.shape, weight.format, None, model.nbytes(name), after, weight.error)
    return ExportItem(specs, lambda: write(model.codes(name), order_of(model, name)), row)


def dequantized(
    model: StoredModel,
    name: str,
    reason: str,
    specs: Mapping[str, TensorSpec] | None = None,
    cut: Callable[[Tensor], Mapping[str, Tensor]] | None = None,
) -> ExportItem:
    """A weight that is written in floating point: as in the float model, or split by `cut` (outputs first) into tensors of one dtype."""
    weight = model.weights[name]
    # In floating point, experts are parameters, not modules.
    specs = specs or {name.removesuffix(".weight") if weight.kind == "Experts" else name: TensorSpec(weight.dtype, weight.float_shape)}
    dtype = next(iter(specs.values())).dtype

    def make() -> Mapping[str, Tensor]:
        tensor = dequantize_weight(model.codes(name), dtype, order_of(model, name))
        if weight.fold is not None:
            tensor = weight.fold.unfold(channels_first(tensor, weight.fold.image_kernel))
        elif weight.transposed and cut is None:
            tensor = tensor.mT.contiguous()
        return cut(tensor) if cut else dict.fromkeys(specs, tensor)

    why, after = f"{weight.format}, dequantized: {reason}", sum(spec.nbytes for spec in specs.values())
    return ExportItem(specs, make, Row(name, weight.kind, weight.float_shape, None, why, model.nbytes(name), after))


def plain(model: StoredModel, name: str, *, as_float: bool) -> ExportItem:
    """A tensor that is not quantized, unchanged; with `as_float`, a stack of experts in the float model's layout."""
    spec = model.plain[name]
    row = Row(name, "tensor", spec.shape, None, "as it is", model.nbytes(name), spec.nbytes)
    if not as_float or not _stands_in(model, name):
        return ExportItem({name: spec}, lambda: {name: model.tensor(name)}, row)
    float_name = name.removesuffix(".weight")
    transposed = TensorSpec(spec.dtype, (*spec.shape[:-2], spec.shape[-1], spec.shape[-2]))
    return ExportItem({float_name: transposed}, lambda: {float_name: model.tensor(name).mT.contiguous()}, row)


def _stands_in(model: StoredModel, name: str) -> bool:
    """Whether this is a stack of experts stored outputs first that the float model has inputs first, as next to a quantized one."""
    mixture, _, last_part = name.removesuffix(".weight").rpartition(".")
    others = (weight for other, weight in model.weights.items() if other.startswith(f"{mixture}.") and weight.kind == "Experts")
    return name.endswith(f"{last_part}.weight") and len(model.plain[name].shape) == 3 and any(weight.transposed for weight in others)


def checkpoint_items(model: StoredModel) -> list[ExportItem]:
    """Return the items of a halfbyte checkpoint: codes, scales and other tensors as they are. The order of a weight's columns is one of the
    plain tensors."""
    weights = [
        kept(model, name, weight.stored(name), lambda codes, order, name=name: codes_in_files(name, codes))  # type: ignore[misc]
        for name, weight in model.weights.items()
    ]
    return weights + [plain(model, name, as_float=False) for name in model.plain]


def order_of(model: StoredModel, name: str) -> Tensor | None:
    """The order of a weight's columns, if it is not that of its inputs."""
    return model.tensor(order_name(name)) if order_name(name) in model.plain else None


def write(items: Sequence[ExportItem], writer: TensorWriter, progress: Progress | None) -> list[str]:
    """Write the items that have not been written yet.

    Args:
        items: All tensors that the writer expects, but for those that it has written.
        writer: Of the new files.
        progress: Called after each item with (bytes written, bytes in all, names of its tensors).

    Returns:
        Notes for the report.

    Raises:
        Misfits: Weights, all that there are, cannot be quantized to their formats.
    """
    resumed, done, total = writer.resumed, 0, sum(item.nbytes for item in items)
    misfits: dict[str, str] = {}
    for item in items:
        if not item.specs.keys() <= writer.checksums.keys():
            try:
                writer.write_all(item.make())
            except Misfits as e:
                misfits |= e.kept
        done += item.nbytes
        if progress is not None:
            progress(done, total, ", ".join(item.specs))
    if misfits:
        raise Misfits(misfits)
    return [f"resumed: {resumed} tensors were written before"] if resumed else []
