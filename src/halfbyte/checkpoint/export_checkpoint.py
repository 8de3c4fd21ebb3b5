"""Converts a model on disk from any kind of files to another, with the same codes and scales, one tensor at a time."""

from __future__ import annotations

from functools import partial
from os import PathLike
from os.path import lexists
from pathlib import Path

from torch import Tensor

from halfbyte.checkpoint.export_items import ExportItem, Progress, dequantized, kept, plain, write
from halfbyte.checkpoint.files import companions, has_adapter, journal
from halfbyte.checkpoint.foreign.targets import TARGETS, Target
from halfbyte.checkpoint.gguf import export as gguf_export
from halfbyte.checkpoint.gguf import tokenizer as gguf_tokenizer
from halfbyte.checkpoint.gguf import vocabulary as gguf_vocabulary
from halfbyte.checkpoint.loading import open_model
from halfbyte.checkpoint.native.folder import replacing, replacing_file, write_json
from halfbyte.checkpoint.native.manifest import CONFIG
from halfbyte.checkpoint.native.saving import codes_in_files, publish, stored_specs, with_separate_head, write_index
from halfbyte.checkpoint.stored_model import StoredModel, order_name
from halfbyte.errors import ArgumentError, UnsupportedError, model_path
from halfbyte.formats.codes import Codes
from halfbyte.io import gguf
from halfbyte.io.files import is_file
from halfbyte.io.safetensors import SHARD_BYTES, Writer
from halfbyte.nn.described import LOW_RANK
from halfbyte.nn.report import Report

KINDS = ("halfbyte", "gguf", *TARGETS)


def export(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    to: str | None = None,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Write a model to a new folder or a GGUF file, in the format of another project.

    Codes and scales are those of `src`. Where the target kind cannot hold a format the weight is dequantized, and the report says so. No
    more than one weight is held in memory.

    Args:
        src: Whatever `load` reads, or a float Hugging Face folder.
        dst: The new folder or file.
        to: "halfbyte", "gguf", "awq", "gptq" or "compressed-tensors"; may be left out where `dst` ends in .gguf, as every GGUF file does.
        progress: is called after each tensor with (bytes written, bytes in all, name).
        resume: Continue an export to the same place that was killed.
        shard_bytes: The most bytes of a file.

    Returns:
        The report of what was written.

    Raises:
        CheckpointError: The model cannot be read or written; `dst` is unchanged then.
        ArgumentError: No weight at all could stay quantized.

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0")
        >>> hb.save(model, folder / "model")
        >>> report = hb.export(folder / "model", folder / "gptq", "halfbyte")
    """
    source, target = model_path(src), model_path(dst)
    to = kind_to_write(target, to)
    model = open_model(source, floats=True)
    if model.static is not None and to != "halfbyte":
        raise ArgumentError(f"{source} holds a network on int8 codes, which {to} cannot hold: export the model that it was made from")
    if to != "halfbyte" and (branch := next((name for name in model.plain if name.endswith(f".{LOW_RANK}")), None)):
        raise UnsupportedError(f"{source} has products of low rank, such as {branch}, which {to} cannot hold: quantize without low_rank")
    if lexists(target):
        raise ArgumentError(f"{target} exists: choose another place, or remove it")
    if to == "gguf" and has_adapter(source):
        raise ArgumentError(
            f"{source} holds a model and an adapter, which a GGUF file of the model cannot hold: move adapter_* to a folder of its own, "
            "merge it, peft.PeftModel.from_pretrained(model, folder).merge_and_unload(), and export what its save_pretrained writes"
        )
    if to == "gguf":
        return _to_gguf(model, target, progress, resume)
    companion_files = companions(source, target)
    notes = companion_files.notes()
    kind = None if to == "halfbyte" else TARGETS[to](model)
    items = _items(model, kind)
    with replacing(target, resume=resume) as staging:
        specs = {name: spec for item in items for name, spec in item.specs.items()}
        if kind is None:
            specs = stored_specs(model.weights, model.plain)
        writer = Writer(staging.path, staging.stem, specs, shard_bytes, journal=journal(model.path, to) if staging.fresh else None)
        notes += write(items, writer, progress)
        companion_files.copy_to(staging.path)
        notes += gguf_tokenizer.save(source, staging.path)
        if kind is None:
            publish(staging, writer, model.config, model.weights, model.tied, model.static)
        else:
            writer.finish()
            if len(writer.files) > 1:
                write_index(staging.path, writer)
            config = with_separate_head(model.config, {*model.weights, *model.plain})
            write_json(staging.path / CONFIG, {**config, "quantization_config": kind.settings()})
            staging.commit_folder()
    return Report(tuple(item.row for item in items if item.row), (*model.report().notes, *notes))


def kind_to_write(target: Path, to: str | None) -> str:
    """One of KINDS: `to`, or if that is None the one that the target's suffix names. Raises ArgumentError where the suffix is not the
    kind's."""
    if to is None and target.suffix not in (".gguf", ".onnx"):
        raise ArgumentError(
            f"the name {target.name} does not tell what to write, as one that ends in .gguf does: say {', '.join(KINDS)} "
            "by to=, on the command line by --to"
        )
    to = target.suffix[1:] if to is None else to
    if to not in KINDS:
        remedy = ": halfbyte.export_onnx writes such files" if to == "onnx" else ""
        raise ArgumentError(f"models are converted to {', '.join(KINDS)}, got {to!r}{remedy}")
    if to == "gguf" and target.suffix != ".gguf":
        raise ArgumentError(f"a GGUF file is known by its suffix, which {target.name} lacks: write {target.name}.gguf")
    return to


def _items(model: StoredModel, kind: Target | None) -> list[ExportItem]:
    """What is written to a folder; without a `kind`, a halfbyte checkpoint."""
    items = []
    for name, weight in model.weights.items():
        if kind is None:
            items.append(kept(model, name, weight.stored(name), partial(_as_stored, name)))
        elif name in kind.kept:
            items.append(kept(model, name, kind.specs(name), partial(kind.write, name)))
        else:
            items.append(dequantized(model, name, kind.reasons[name]))
    orders = set() if kind is None else {order_name(name) for name in model.weights}
    return items + [plain(model, name, as_float=kind is not None) for name in model.plain if name not in orders]


def _as_stored(name: str, codes: Codes, order: Tensor | None) -> dict[str, Tensor]:
    return codes_in_files(name, codes)  # a halfbyte checkpoint has the order in a tensor of its own


def _to_gguf(model: StoredModel, target: Path, progress: Progress | None, resume: bool) -> Report:
    if is_file(model.path):
        raise ArgumentError(f"{model.path} is not a folder: only models in folders are written as GGUF")
    export, notes = gguf_export.plan(model)
    metadata, more = gguf_vocabulary.to_metadata(model.path, model.config, export.vocabulary)
    with replacing_file(target, resume=resume) as path:
        writer = gguf.Writer(path, export.metadata | metadata, export.types, journal=journal(model.path, "gguf"))
        resumed = write(export.items, writer, progress)
        writer.finish()
    return Report(tuple(item.row for item in export.items if item.row), (*model.report().notes, *notes, *more, *resumed))
