"""Float models on disk to checkpoints on disk, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from os.path import isfile
from pathlib import Path
from typing import Any

from halfbyte import ops
from halfbyte.checkpoint.architecture import Step, known_architecture
from halfbyte.checkpoint.files import companions, copy_companions, weight_files
from halfbyte.checkpoint.folder import replacing
from halfbyte.checkpoint.manifest import CONFIG, SECTION
from halfbyte.checkpoint.plan import Plan, plan_by_rule, plan_model, report
from halfbyte.checkpoint.saving import publish, stored_specs
from halfbyte.errors import CheckpointError
from halfbyte.formats.spec import Format
from halfbyte.io.safetensors import SHARD_BYTES, Reader, Writer, load_json
from halfbyte.nn.convert import Candidate, Config, check_patterns, decide, relative_error
from halfbyte.nn.report import Report


def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    config: Config | Format | str,
    progress: Callable[[int, int, str], object] | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Quantizes the float model in `src` and writes it to the folder `dst`, without ever holding more than one of its tensors.

    src       a Hugging Face folder, another folder with safetensors files, or one such file
    progress  is called after each tensor with (bytes read, bytes in all, name)

    Where config.json names an architecture of transformers, the result is what `save(quantize_(from_pretrained(src)))` would
    write. Otherwise every 2-D floating tensor called *.weight is taken for the weight of a Linear. Small other files (tokenizer,
    …) are copied. Raises as `quantize_` and `save` do; `dst` is then as it was.
    """
    config = config if isinstance(config, Config) else Config(config)
    source, target = Path(src), Path(dst)
    reader = Reader(weight_files(source))
    described = _described(source)
    notes = []
    choose = partial(_choose, config)
    if known_architecture(described) is not None:
        plan = plan_model(described, reader, choose)
    else:
        plan = plan_by_rule(reader, choose)
        notes.append("no architecture of transformers is named: every 2-D float tensor called *.weight is taken for a Linear's")
    for name in plan.linears:
        plan.weights[name] = replace(plan.weights[name], compute=config.compute, activation=config.activation)
    copied, left_out = companions(source, target)
    if left_out:
        notes.append(f"not copied: {', '.join(left_out)}")
    with replacing(target) as staging:
        writer = Writer(staging.path, staging.stem, stored_specs(plan.weights, plan.plain), shard_bytes)
        done, total = 0, sum(place.spec.nbytes for place in reader.places.values())
        for step in plan.steps:
            _run(step, plan, reader, writer, config.method)
            done += sum(reader.spec(name).nbytes for name in step.sources)
            if progress is not None:
                progress(done, total, ", ".join(step.targets))
        copy_companions(source, staging.path, copied)
        publish(staging, writer, described, plan.weights, plan.tied)
    return report(plan, reader, notes)


def _choose(config: Config, found: Sequence[Candidate], sources: Mapping[str, str]) -> Mapping[str, Format | str]:
    check_patterns(config, [candidate.name for candidate in found])
    return decide(found, config)


def _run(step: Step, plan: Plan, reader: Reader, writer: Writer, method: str) -> None:
    """Reads, quantizes and writes the tensors of one step."""
    names = {target: plan.renamed.get(target, target) for target in step.targets}
    dtype = plan.dtype(next(iter(names.values())))
    for target, tensor in step.run(lambda name: reader.read(name, dtype)).items():
        name = names[target]
        if (weight := plan.weights.get(name)) is None:
            writer.write(name, tensor)
            continue
        codes = ops.quantize(tensor, weight.format, method, name=name)
        for part, values in codes.tensors().items():
            writer.write(f"{name}.{part}", values)
        plan.weights[name] = replace(weight, error=relative_error(tensor, codes))


def _described(source: Path) -> dict[str, Any]:
    """config.json of the model, nothing where there is none; raises CheckpointError for one that is quantized already."""
    path = source / CONFIG
    if not isfile(path):
        return {}
    config = load_json(path)
    if quantized := [key for key in (SECTION, "quantization_config") if config.get(key) is not None]:
        raise CheckpointError(f"{source} is quantized already (config.json has {quantized[0]!r}): convert the float model")
    return config
