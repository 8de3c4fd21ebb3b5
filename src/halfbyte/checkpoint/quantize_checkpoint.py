"""`convert`: quantizes a float model on disk to a checkpoint, one tensor at a time.

A plan (mapping/plan.py) lists steps from the tensors of the files to those of the checkpoint. Each step reads its tensors; they are
quantized and written at once. With a calibration, decoder layers run one after the other (nn/calibration) and are written first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from os import PathLike
from pathlib import Path

from torch import Tensor

from halfbyte.checkpoint.files import check_read_by_transformers, companions, journal
from halfbyte.checkpoint.gguf import tokenizer as gguf_tokenizer
from halfbyte.checkpoint.mapping.architecture import Step, known_architecture
from halfbyte.checkpoint.mapping.plan import NOT_A_WEIGHT, Misfits, plan_by_rule, plan_model, report
from halfbyte.checkpoint.materialize import Materializer
from halfbyte.checkpoint.native.folder import replacing
from halfbyte.checkpoint.native.saving import codes_in_files, publish, stored_specs
from halfbyte.checkpoint.sources import open_floats
from halfbyte.checkpoint.stored_model import checked_finite
from halfbyte.errors import ArgumentError, FormatError, model_path
from halfbyte.formats.codes import Codes
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
            conversion = _Conversion(source, config, kept, calibration, progress)
            return conversion.write(target, resume=resume, shard_bytes=shard_bytes)
        except Misfits as e:
            kept |= e.kept


class _Conversion:
    """`convert` with the modules `kept` in floating point."""

    def __init__(
        self,
        source: Path,
        config: Config,
        kept: Mapping[str, str],
        calibration: Calibration | Tensor | None,
        progress: Callable[[int, int, str], object] | None,
    ) -> None:
        self._source, self._config, self._calibration, self._progress = source, config, calibration, progress
        self._described, self._files = open_floats(source)
        self._notes = list(self._files.notes)
        if known_architecture(self._described) is not None:
            plan = plan_model(self._described, self._files, lambda found, _: choose(found, config, kept))
        else:
            check_read_by_transformers(source)
            plan = plan_by_rule(self._files, lambda found, _: choose(found, config, kept))
            self._notes.append("no architecture of transformers is named: every 2-D float tensor called *.weight is taken as a Linear's")
        if not plan.weights:
            in_floats = sorted(plan.about.items(), key=lambda item: item[1].reason in (NOT_A_KIND, NOT_A_WEIGHT))
            why = ", which has no tensors"
            if in_floats:  # first those that a user would expect to be quantized
                name, about = in_floats[0]
                why = f": {name} stays as it is ({about.reason})"
            raise ArgumentError(f"there is nothing to quantize in {source}{why}")
        for name, weight in plan.weights.items():
            if name in plan.linears or weight.kind != "Embedding":
                plan.weights[name] = replace(weight, compute=config.compute, activation=config.activation)
        self._plan = plan

    def write(self, target: Path, *, resume: bool, shard_bytes: int) -> Report:
        """Write the checkpoint. Raise Misfits, and write nothing, where more modules have to stay in floating point."""
        plan, notes = self._plan, self._notes
        companion_files = companions(self._source, target)
        notes += companion_files.notes()
        with replacing(target, resume=resume) as staging:
            title = journal(self._source, repr(self._config)) if staging.fresh and self._calibration is None else None
            writer = Writer(staging.path, staging.stem, stored_specs(plan.weights, plan.plain), shard_bytes, journal=title)
            if self._calibration is None:
                written = self._written_before(writer)
            else:
                written = self._write_calibrated(writer, as_calibration(self._calibration))
            self._write_others(writer, written)
            companion_files.copy_to(staging.path)
            notes += gguf_tokenizer.save(self._source, staging.path)
            publish(staging, writer, self._described, plan.weights, plan.tied)
        return report(plan, self._files, notes)

    def _written_before(self, writer: Writer) -> set[str]:
        """Return the names of the tensors that a conversion which is resumed has written."""
        plan = self._plan
        if writer.resumed:
            self._notes.append(f"resumed: {writer.resumed} tensors were written before, their errors are not known")
        weights = {name for name, weight in plan.weights.items() if weight.stored(name).keys() <= writer.checksums.keys()}
        return weights | (plan.plain.keys() & writer.checksums.keys())

    def _write_calibrated(self, writer: Writer, calibration: Calibration) -> set[str]:
        """Quantize and write what calibration reaches, and the parameters that change with it; return their names."""
        plan, method = self._plan, self._config.method
        if plan.model is None:
            raise ArgumentError(
                f"{method} runs the model, whose architecture config.json does not name: quantize it in Python, or with mse or hqq"
            )
        tied = set(plan.tied.values())
        formats = {
            name.removesuffix(".weight"): weight.format
            for name, weight in plan.weights.items()
            if (weight.kind == "Experts" or (name in plan.linears and weight.kind == "Linear")) and name not in tied
        }
        written, misfits = set(), dict[str, str]()
        layers = Materializer(plan, self._files, self._source)
        for result in calibrate(layers.model, formats, method, calibration, materialize=layers.materialize, progress=self._progress):
            if isinstance(result.value, Codes):
                writer.write_all(codes_in_files(result.name, result.value))
                plan.weights[result.name] = replace(plan.weights[result.name], error=result.error)
            elif result.reason is not None:
                misfits[result.name.removesuffix(".weight")] = result.reason
            else:
                writer.write(result.name, result.value)
            written.add(result.name)
            self._notes += result.notes
        if misfits and self._config.strict:
            raise FormatError(next(iter(misfits.values())))
        if misfits:
            raise Misfits(misfits)
        self._notes += [unreached(name) for name in formats if f"{name}.weight" not in written]
        return written

    def _write_others(self, writer: Writer, written: Set[str]) -> None:
        """Write all tensors that are not `written`, quantized where the plan says so."""
        plan, misfits = self._plan, dict[str, str]()
        done, total = 0, sum(spec.nbytes for spec in self._files.specs().values())
        for step in plan.steps:
            if not {plan.stored_name(target) for target in step.targets} <= written:
                misfits |= self._write_step(step, writer, written)
            done += sum(self._files.spec(name).nbytes for name in step.sources)
            if self._progress is not None and self._calibration is None:
                self._progress(done, total, ", ".join(step.targets))
        if misfits:
            raise Misfits(misfits)

    def _write_step(self, step: Step, writer: Writer, written: Set[str]) -> dict[str, str]:
        """Read, quantize and write the tensors of one step.

        Returns:
            The modules whose formats cannot hold their weights, with the reasons; FormatError where the config is strict.
        """
        plan, misfits = self._plan, dict[str, str]()
        names = {target: plan.stored_name(target) for target in step.targets}
        dtype = plan.dtype(next(iter(names.values())))
        method = UNCALIBRATED.get(self._config.method, self._config.method)
        for target, tensor in step.run(lambda name: self._files.read(name, dtype)).items():
            name = names[target]
            if name in written:
                continue
            if (weight := plan.weights.get(name)) is None:
                writer.write(name, checked_finite(tensor, name, self._source, parameter=plan.is_parameter(name)))
                continue
            try:
                codes = quantize_weight(weight.kind, tensor, weight.format, method, name, weight.fold)
            except FormatError as e:
                if self._config.strict:
                    raise
                misfits[name.removesuffix(".weight")] = str(e)
                continue
            writer.write_all(codes_in_files(name, codes))
            plan.weights[name] = replace(weight, error=relative_error(tensor, codes, weight.kind, weight.fold))
        return misfits
