"""`convert`: quantizes a float model on disk to a checkpoint, one tensor at a time.

The model is an `PlannedModel` whose weights are quantized as they are read; `write` (export_items.py) writes one after the other. With a
calibration, decoder layers run one after the other (nn/calibration), and their weights are written first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path

from torch import Tensor

from halfbyte.checkpoint.export_items import Progress, checkpoint_items, write
from halfbyte.checkpoint.files import check_read_by_transformers, companions, journal
from halfbyte.checkpoint.gguf import tokenizer as gguf_tokenizer
from halfbyte.checkpoint.mapping.architecture import known_architecture
from halfbyte.checkpoint.mapping.plan import NOT_A_WEIGHT, Misfits
from halfbyte.checkpoint.materialize import Materializer
from halfbyte.checkpoint.native.folder import replacing
from halfbyte.checkpoint.native.saving import codes_in_files, publish, stored_specs
from halfbyte.checkpoint.planned_model import PlannedModel
from halfbyte.checkpoint.sources import open_floats
from halfbyte.errors import ArgumentError, FormatError, model_path
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.io.safetensors import SHARD_BYTES, Writer
from halfbyte.nn.calibration.calibrate import Calibration, as_calibration, calibrate, unreached
from halfbyte.nn.config import Config, as_config, take_calibration
from halfbyte.nn.described import NOT_A_KIND
from halfbyte.nn.report import Report


def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    config: Config | Format | str,
    calibration: Calibration | Tensor | None = None,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Quantize the float model in `src` and write it to the folder `dst`, holding no more than one tensor in memory.

    Where config.json names an architecture of transformers, the result is what `save(quantize_(from_pretrained(src)))` would write.
    Otherwise every 2-D floating-point tensor called *.weight is taken as the weight of a Linear. Small other files (tokenizer, …) are
    copied.

    Args:
        src: a Hugging Face folder, another folder with safetensors files, one such file, or a GGUF file. Its weights may be 8- or 4-bit
            floats, but not integer codes: `export` converts those.
        dst: The new folder.
        config: As for `quantize_`.
        calibration: As for `quantize_`. Memory then also holds one decoder layer in float32, the hidden states of all tokens and the
            modules outside the decoder layers.
        progress: Called after each tensor with (bytes written, bytes in all, name); with a calibration as `quantize_` does.
        resume: Continue a conversion to the same place that was killed; not with a calibration.
        shard_bytes: The most bytes of a file.

    Returns:
        The report of the new model.

    Raises:
        HalfbyteError: As for `quantize_` and `save`; `dst` is unchanged then.

    Example:
        >>> save_file({"up.weight": torch.randn(64, 64)}, folder / "float.safetensors")
        >>> print(hb.convert(folder / "float.safetensors", folder / "q8", "q8_0").rows[0].format)
        q8_0
    """
    config, calibration = take_calibration(as_config(config), calibration, in_memory=False)
    if resume and calibration is not None:
        raise ArgumentError(f"{config.method} processes all layers one after the other and cannot be resumed: start again")
    source, target = model_path(src), model_path(dst)
    kept: dict[str, str] = {}
    while True:
        model = _open(source, config, kept)
        companion_files = companions(source, target)
        notes = companion_files.notes()
        try:
            with replacing(target, resume=resume) as staging:
                title = journal(source, repr(config)) if staging.fresh and calibration is None else None
                writer = Writer(staging.path, staging.stem, stored_specs(model.weights, model.plain), shard_bytes, journal=title)
                if calibration is not None:
                    notes += _write_calibrated(model, config, writer, as_calibration(calibration), progress)
                notes += write(checkpoint_items(model), writer, progress if calibration is None else None)
                companion_files.copy_to(staging.path)
                notes += gguf_tokenizer.save(source, staging.path)
                publish(staging, writer, model.config, model.weights, model.tied)
        except Misfits as e:
            kept |= e.kept
        else:
            found = model.report()
            return replace(found, notes=(*found.notes, *notes))


def _open(source: Path, config: Config, kept: Mapping[str, str]) -> PlannedModel:
    """Open a float model whose weights are quantized as they are read, but for the modules `kept`, with the reasons."""
    described, entries = open_floats(source)
    if known_architecture(described) is None:
        check_read_by_transformers(source)
    model = PlannedModel(source, described, entries, config, kept)
    if not model.weights:
        in_floats = sorted(model.plan.about.items(), key=lambda item: item[1].reason in (NOT_A_KIND, NOT_A_WEIGHT))
        why = ", which has no tensors"
        if in_floats:  # first those that a user would expect to be quantized
            name, about = in_floats[0]
            why = f": {name} stays as it is ({about.reason})"
        raise ArgumentError(f"there is nothing to quantize in {source}{why}")
    return model


def _write_calibrated(
    model: PlannedModel, config: Config, writer: Writer, calibration: Calibration, progress: Progress | None
) -> list[str]:
    """Quantize and write what calibration reaches, and the parameters that change with it; return notes for the report."""
    plan = model.plan
    if plan.model is None:
        raise ArgumentError(
            f"{config.method} runs the model, whose architecture config.json does not name: quantize it in Python, or with mse or hqq"
        )
    tied = set(plan.tied.values())
    formats = {
        name.removesuffix(".weight"): weight.format
        for name, weight in plan.weights.items()
        if (weight.kind == "Experts" or (name in plan.linears and weight.kind == "Linear")) and name not in tied
    }
    notes: list[str] = []
    misfits: dict[str, str] = {}
    layers = Materializer(plan, model.entries, model.path)
    for result in calibrate(layers.model, formats, config.method, calibration, materialize=layers.materialize, progress=progress):
        if isinstance(result.value, Codes):
            writer.write_all(codes_in_files(result.name, result.value))
            plan.weights[result.name] = replace(plan.weights[result.name], error=result.error)
        elif result.reason is not None:
            misfits[result.name.removesuffix(".weight")] = result.reason
        else:
            writer.write(result.name, result.value)
        notes += result.notes
    if misfits and config.strict:
        raise FormatError(next(iter(misfits.values())))
    if misfits:
        raise Misfits(misfits)
    stored = ((name, plan.weights[f"{name}.weight"].stored(f"{name}.weight")) for name in formats)
    return notes + [unreached(name) for name, specs in stored if not specs.keys() <= writer.checksums.keys()]
