"""Converts float models on disk to checkpoints, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from os import PathLike
from pathlib import Path

from torch import Tensor

from halfbyte.checkpoint.files import ADAPTER_COPIED, check_read_by_transformers, companions, copy_companions, has_adapter, journal
from halfbyte.checkpoint.gguf import tokenizer as gguf_tokenizer
from halfbyte.checkpoint.mapping.architecture import Step, known_architecture
from halfbyte.checkpoint.mapping.plan import NOT_A_WEIGHT, Misfits, Plan, Source, plan_by_rule, plan_model, report
from halfbyte.checkpoint.materialize import Materializer
from halfbyte.checkpoint.native.folder import replacing
from halfbyte.checkpoint.native.saving import publish, stored_specs
from halfbyte.checkpoint.sources import open_floats
from halfbyte.checkpoint.stored_model import checked_finite
from halfbyte.errors import ArgumentError, FormatError, model_path
from halfbyte.formats.codes import Codes
from halfbyte.formats.dense import to_dense
from halfbyte.formats.spec import Format
from halfbyte.io.safetensors import SHARD_BYTES, Writer
from halfbyte.nn.calibration.calibrate import Calibration, as_calibration, calibrate, unreached
from halfbyte.nn.config import Config, as_config, choose, take_calibration
from halfbyte.nn.convert import UNCALIBRATED
from halfbyte.nn.described import NOT_A_KIND
from halfbyte.nn.kinds import quantize_weight, relative_error
from halfbyte.nn.report import Report


def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    config: Config | Format | str,
    calibration: Calibration | Tensor | None = None,
    progress: Callable[[int, int, str], object] | None = None,
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
        progress: Called after each tensor with (bytes read, bytes in all, name); with a calibration as `quantize_` does.
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
        try:
            return _convert(source, target, config, kept, calibration, progress, resume=resume, shard_bytes=shard_bytes)
        except Misfits as e:
            kept |= e.kept


def _convert(
    source: Path,
    target: Path,
    config: Config,
    kept: Mapping[str, str],
    calibration: Calibration | Tensor | None,
    progress: Callable[[int, int, str], object] | None,
    *,
    resume: bool,
    shard_bytes: int,
) -> Report:
    """`convert` with the modules `kept` in floating point. Raises Misfits, and writes nothing, where there are more to keep."""
    described, reader = open_floats(source)
    notes = list(reader.notes)
    if known_architecture(described) is not None:
        plan = plan_model(described, reader, lambda found, _: choose(found, config, kept))
    else:
        check_read_by_transformers(source)
        plan = plan_by_rule(reader, lambda found, _: choose(found, config, kept))
        notes.append("no architecture of transformers is named: every 2-D float tensor called *.weight is taken as a Linear's")
    if not plan.weights:
        left = sorted(plan.about.items(), key=lambda item: item[1][1] in (NOT_A_KIND, NOT_A_WEIGHT))
        why = f": {left[0][0]} stays as it is ({left[0][1][1]})" if left else ", which has no tensors"
        raise ArgumentError(f"there is nothing to quantize in {source}{why}")
    for name, weight in plan.weights.items():
        if name in plan.linears or weight.kind != "Embedding":
            plan.weights[name] = replace(weight, compute=config.compute, activation=config.activation)
    copied, left_out = companions(source, target)
    if has_adapter(source):
        notes.append(ADAPTER_COPIED)
    if left_out:
        notes.append(f"not copied: {', '.join(left_out)}")
    with replacing(target, resume=resume) as staging:
        title = journal(source, repr(config)) if staging.fresh and calibration is None else None
        writer = Writer(staging.path, staging.stem, stored_specs(plan.weights, plan.plain), shard_bytes, journal=title)
        done, total = 0, sum(spec.nbytes for spec in reader.specs().values())
        if calibration is None:
            written = _resumed(plan, writer, notes)
        else:
            written = _calibrated(plan, reader, source, writer, config, as_calibration(calibration), progress, notes)
        method = UNCALIBRATED.get(config.method, config.method)
        misfits: dict[str, str] | None = None if config.strict else {}
        for step in plan.steps:
            if not written.issuperset(plan.renamed.get(target, target) for target in step.targets):
                _run(step, plan, reader, writer, method, source, misfits, written)
            done += sum(reader.spec(name).nbytes for name in step.sources)
            if progress is not None and calibration is None:
                progress(done, total, ", ".join(step.targets))
        if misfits:
            raise Misfits(misfits)
        copy_companions(source, staging.path, copied)
        notes += gguf_tokenizer.save(source, staging.path)
        publish(staging, writer, described, plan.weights, plan.tied)
    return report(plan, reader, notes)


def _resumed(plan: Plan, writer: Writer, notes: list[str]) -> set[str]:
    """The names of the tensors that an earlier writer has written."""
    if writer.resumed:
        notes.append(f"resumed: {writer.resumed} tensors were written before, their errors are not known")
    weights = {name for name, weight in plan.weights.items() if weight.stored(name).keys() <= writer.checksums.keys()}
    return weights | (plan.plain.keys() & writer.checksums.keys())


def _calibrated(
    plan: Plan,
    reader: Source,
    source: Path,
    writer: Writer,
    config: Config,
    calibration: Calibration,
    progress: Callable[[int, int, str], object] | None,
    notes: list[str],
) -> set[str]:
    """Quantizes and writes what calibration reaches, and the parameters that change with it; returns the names written."""
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
    written, misfits = set(), dict[str, str]()
    layers = Materializer(plan, reader, source)
    for result in calibrate(layers.model, formats, config.method, calibration, materialize=layers.materialize, progress=progress):
        if isinstance(result.value, Codes):
            _write_codes(writer, result.name, result.value)
            plan.weights[result.name] = replace(plan.weights[result.name], error=result.error)
        elif result.reason is not None:
            misfits[result.name.removesuffix(".weight")] = result.reason
        else:
            writer.write(result.name, result.value)
        written.add(result.name)
        notes += result.notes
    if misfits and config.strict:
        raise FormatError(next(iter(misfits.values())))
    if misfits:
        raise Misfits(misfits)
    notes += [unreached(name) for name in formats if f"{name}.weight" not in written]
    return written


def _run(
    step: Step, plan: Plan, reader: Source, writer: Writer, method: str, path: Path, misfits: dict[str, str] | None, written: Set[str]
) -> None:
    """Reads, quantizes and writes the tensors of one step, except those that are `written`. Modules whose format cannot hold their weight
    are added to `misfits`; None: they are a FormatError."""
    names = {target: plan.renamed.get(target, target) for target in step.targets}
    dtype = plan.dtype(next(iter(names.values())))
    for target, tensor in step.run(lambda name: reader.read(name, dtype)).items():
        name = names[target]
        if name in written:
            continue
        if (weight := plan.weights.get(name)) is None:
            writer.write(name, checked_finite(tensor, name, path, parameter=plan.is_parameter(name)))
            continue
        try:
            codes = quantize_weight(weight.kind, tensor, weight.format, method, name, weight.fold)
        except FormatError as e:
            if misfits is None:
                raise
            misfits[name.removesuffix(".weight")] = str(e)
            continue
        _write_codes(writer, name, codes)
        plan.weights[name] = replace(weight, error=relative_error(tensor, codes, weight.kind, weight.fold))


def _write_codes(writer: Writer, name: str, codes: Codes) -> None:
    for part, values in to_dense(codes).items():
        writer.write(f"{name}.{part}", values)
