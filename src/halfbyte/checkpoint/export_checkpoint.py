"""`export`, the work of `hb.export` and `halfbyte convert`: writes a model on disk in another format.

Codes and scales are copied, not quantized anew. Each weight or tensor is an `ExportItem` (export_items.py), which is read, converted and
written before the next. `Target` (foreign/targets.py) says what a folder of AWQ, GPTQ or compressed-tensors holds, gguf/export.py what a
GGUF file holds.
"""

from __future__ import annotations

from functools import partial
from os import PathLike
from os.path import lexists
from pathlib import Path

from halfbyte.checkpoint.export_items import ExportItem, Progress, checkpoint_items, dequantized, kept, plain, write
from halfbyte.checkpoint.files import companions, has_adapter, journal
from halfbyte.checkpoint.foreign.targets import TARGETS, Target
from halfbyte.checkpoint.gguf import export as gguf_export
from halfbyte.checkpoint.gguf import tokenizer as gguf_tokenizer
from halfbyte.checkpoint.gguf import vocabulary as gguf_vocabulary
from halfbyte.checkpoint.loading import open_model
from halfbyte.checkpoint.native.folder import replacing, replacing_file, write_json
from halfbyte.checkpoint.native.manifest import CONFIG
from halfbyte.checkpoint.native.saving import publish, stored_specs, with_separate_head, write_index
from halfbyte.checkpoint.stored_model import StoredModel, order_name
from halfbyte.errors import ArgumentError, UnsupportedError, model_path
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

    Codes and scales are those of `src`. A weight whose format the kind cannot hold is dequantized, and the report says so. One weight is
    held in memory at a time.

    Args:
        src: Whatever `load` reads, or a float Hugging Face folder.
        dst: The new folder or file.
        to: "halfbyte", "gguf", "awq", "gptq" or "compressed-tensors"; may be left out where `dst` ends in .gguf, as every GGUF file does.
        progress: Called after each tensor with (bytes written, bytes in all, name).
        resume: Continue an export to the same place that was killed.
        shard_bytes: The most bytes of a file in a folder; a GGUF model is one file, of any size.

    Returns:
        The report of what was written.

    Raises:
        CheckpointError: The model cannot be read or written; `dst` is unchanged then.
        ArgumentError: `dst` exists, the kind is unknown, or it cannot hold this model, such as one of which no weight could stay quantized.
        UnsupportedError: The model has low-rank branches, and `to` is not "halfbyte".

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0")
        >>> hb.save(model, folder / "model")
        >>> report = hb.export(folder / "model", folder / "gptq", "halfbyte")
    """
    source, destination = model_path(src), model_path(dst)
    kind = kind_to_write(destination, to)
    model = open_model(source, floats=True)
    if kind != "halfbyte":
        _check_holds(kind, model, source)
    if lexists(destination):
        raise ArgumentError(f"{destination} exists: choose another place, or remove it")
    if kind != "gguf":
        return _to_folder(model, source, destination, kind, progress, resume, shard_bytes)
    return _to_gguf(model, destination, progress, resume)


def kind_to_write(destination: Path, to: str | None) -> str:
    """Return the kind of files to write, one of KINDS: `to`, or if that is None the one that the suffix of `destination` names.

    Raises:
        ArgumentError: There is no such kind, or a GGUF file would have another suffix than .gguf.
    """
    if to is None and destination.suffix not in (".gguf", ".onnx"):
        raise ArgumentError(
            f"the name {destination.name} does not tell what to write, as one that ends in .gguf does: say {', '.join(KINDS)} "
            "by to=, on the command line by --to"
        )
    kind = destination.suffix[1:] if to is None else to
    if kind not in KINDS:
        remedy = ": halfbyte.export_onnx writes such files" if kind == "onnx" else ""
        raise ArgumentError(f"models are converted to {', '.join(KINDS)}, got {kind!r}{remedy}")
    if kind == "gguf" and destination.suffix != ".gguf":
        raise ArgumentError(f"a GGUF file is known by its suffix, which {destination.name} lacks: write {destination.name}.gguf")
    return kind


def _check_holds(kind: str, model: StoredModel, source: Path) -> None:
    """Raise ArgumentError or UnsupportedError if files of another project's kind cannot hold the model at `source`."""
    if model.static is not None:
        raise ArgumentError(f"{source} holds a network on int8 codes, which {kind} cannot hold: export the model that it was made from")
    if branch := next((name for name in model.plain if name.endswith(f".{LOW_RANK}")), None):
        raise UnsupportedError(f"{source} has products of low rank, such as {branch}, which {kind} cannot hold: quantize without low_rank")
    if kind == "gguf" and has_adapter(source):
        raise ArgumentError(
            f"{source} holds a model and an adapter, which a GGUF file of the model cannot hold: move adapter_* to a folder of its own, "
            "merge it, peft.PeftModel.from_pretrained(model, folder).merge_and_unload(), and export what its save_pretrained writes"
        )


def _to_folder(
    model: StoredModel, source: Path, destination: Path, kind: str, progress: Progress | None, resume: bool, shard_bytes: int
) -> Report:
    """Write a halfbyte checkpoint or a folder of another project."""
    companion_files = companions(source, destination)
    target = None if kind == "halfbyte" else TARGETS[kind](model)
    items = checkpoint_items(model) if target is None else _target_items(model, target)
    notes = companion_files.notes()
    with replacing(destination, resume=resume) as staging:
        if not staging.fresh:  # another process has created it since `export` has looked
            raise ArgumentError(f"{destination} exists: choose another place, or remove it")
        if target is None:
            specs = stored_specs(model.weights, model.plain)  # with guards, which `publish` writes
        else:
            specs = {name: spec for item in items for name, spec in item.specs.items()}
        writer = Writer(staging.path, staging.stem, specs, shard_bytes, journal=journal(model.path, kind))
        notes += write(items, writer, progress)
        companion_files.copy_to(staging.path)
        notes += gguf_tokenizer.save(source, staging.path)
        if target is None:
            publish(staging, writer, model.config, model.weights, model.tied, model.static)
        else:
            writer.finish()
            if len(writer.files) > 1:
                write_index(staging.path, writer)
            config = with_separate_head(model.config, {*model.weights, *model.plain})
            write_json(staging.path / CONFIG, {**config, "quantization_config": target.settings()})
            staging.commit_folder()
    return Report(tuple(item.row for item in items if item.row), (*model.report().notes, *notes))


def _target_items(model: StoredModel, target: Target) -> list[ExportItem]:
    """Return the items of another project's folder. `Target.write` takes the order of a weight's columns, so that is no item itself."""
    weights = [
        kept(model, name, target.specs(name), partial(target.write, name))
        if name in target.kept
        else dequantized(model, name, target.reasons[name])
        for name in model.weights
    ]
    orders = {order_name(name) for name in model.weights}
    return weights + [plain(model, name, as_float=True) for name in model.plain if name not in orders]


def _to_gguf(model: StoredModel, destination: Path, progress: Progress | None, resume: bool) -> Report:
    """Write a GGUF file."""
    if is_file(model.path):
        raise ArgumentError(f"{model.path} is not a folder: only models in folders are written as GGUF")
    plan, plan_notes = gguf_export.plan(model)
    metadata, vocabulary_notes = gguf_vocabulary.to_metadata(model.path, model.config, plan.vocabulary)
    with replacing_file(destination, resume=resume) as path:
        writer = gguf.Writer(path, plan.metadata | metadata, plan.types, journal=journal(model.path, "gguf"))
        resume_notes = write(plan.items, writer, progress)
        writer.finish()
    notes = (*model.report().notes, *plan_notes, *vocabulary_notes, *resume_notes)
    return Report(tuple(item.row for item in plan.items if item.row), notes)
