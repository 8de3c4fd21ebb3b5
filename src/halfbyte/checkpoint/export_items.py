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
    """Tensors that are written together.

    Attributes:
        specs: Their names, types and shapes.
        make: Reads and converts them.
        row: The row of the report about them, if any.
    """

    specs: Mapping[str, TensorSpec]
    make: Callable[[], Mapping[str, Tensor]]
    row: Row | None = None

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def kept(
    model: StoredModel, name: str, specs: Mapping[str, TensorSpec], write: Callable[[Codes, Tensor | None], Mapping[str, Tensor]]
) -> ExportItem:
    """Return the item of a weight that stays quantized.

    Args:
        model: The model.
        name: Of the weight.
        specs: Its tensors in the new files.
        write: Makes them from its codes and from the order of its columns, None where that is the order of its inputs.
    """
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
    """Return the item of a weight that is written in floating point.

    Args:
        model: The model.
        name: Of the weight.
        reason: Why it does not stay quantized, for the report.
        specs: Its tensors in the new files, all of one dtype; None: the tensor of the float model.
        cut: Makes them from the weight, outputs first; None: the weight as the float model has it is each of them.
    """
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
    """Return the item of a tensor that is not quantized.

    Args:
        model: The model.
        name: Of the tensor.
        as_float: Write a stack of experts inputs first where the float model has it so; else all tensors stay as they are.
    """
    spec = model.plain[name]
    row = Row(name, "tensor", spec.shape, None, "as it is", model.nbytes(name), spec.nbytes)
    if not as_float or not _stands_in(model, name):
        return ExportItem({name: spec}, lambda: {name: model.tensor(name)}, row)
    float_name = name.removesuffix(".weight")
    transposed = TensorSpec(spec.dtype, (*spec.shape[:-2], spec.shape[-1], spec.shape[-2]))
    return ExportItem({float_name: transposed}, lambda: {float_name: model.tensor(name).mT.contiguous()}, row)


def _stands_in(model: StoredModel, name: str) -> bool:
    """Return whether this is a stack of experts, stored outputs first, that the float model has inputs first, as all of its mixture."""
    if len(model.plain[name].shape) != 3 or not name.endswith(".weight"):
        return False
    mixture = name.removesuffix(".weight").rpartition(".")[0]
    others = (weight for other, weight in model.weights.items() if other.startswith(f"{mixture}.") and weight.kind == "Experts")
    return any(weight.transposed for weight in others)


def checkpoint_items(model: StoredModel) -> list[ExportItem]:
    """Return the items of a halfbyte checkpoint: codes and scales, and other tensors, orders of columns among them, as they are."""
    weights = [
        kept(model, name, weight.stored(name), lambda codes, order, name=name: codes_in_files(name, codes))  # type: ignore[misc]
        for name, weight in model.weights.items()
    ]
    return weights + [plain(model, name, as_float=False) for name in model.plain]


def order_of(model: StoredModel, name: str) -> Tensor | None:
    """Return the order of a weight's columns; None where it is that of its inputs."""
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
