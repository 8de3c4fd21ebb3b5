"""Float models on disk to checkpoints on disk, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.checkpoint.architecture import Step, known_architecture, rename, skeleton, steps_to
from halfbyte.checkpoint.folder import replacing
from halfbyte.checkpoint.manifest import CONFIG, SECTION, Weight, dtype_named, plain_name
from halfbyte.checkpoint.saving import INDEX, publish, stored_specs
from halfbyte.errors import CheckpointError
from halfbyte.formats.spec import Format
from halfbyte.io.safetensors import SHARD_BYTES, Reader, Writer, load_json, read_bytes
from halfbyte.io.tensors import Spec
from halfbyte.nn.convert import FLOATS, Candidate, Config, candidates, check_patterns, decide, own_tensors, relative_error
from halfbyte.nn.modules import kind_of
from halfbyte.nn.report import Report, Row

_COMPANION_BYTES = 64 << 20  # files larger than that are no tokenizers
_WEIGHT_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot", ".tflite", ".pkl"}


@dataclass
class _Plan:
    """What `convert` is going to do. Names are those in the checkpoint.

    steps    where the tensors come from
    renamed  a step's target -> its name in the checkpoint, which is another where it is tied
    weights  those that are quantized
    plain    the others
    about    of each: (what holds it, why it is not quantized)
    tied     as in the manifest
    unused   tensors of the files that the model has no place for, and why
    """

    steps: list[Step]
    renamed: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    plain: dict[str, Spec] = field(default_factory=dict)
    about: dict[str, tuple[str, str]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)

    def given(self) -> dict[str, Spec]:
        """What the files give, in their own dtypes."""
        return {self.renamed.get(target, target): spec for step in self.steps for target, spec in step.targets.items() if step.sources}

    def dtype(self, name: str) -> torch.dtype:
        return self.weights[name].dtype if name in self.weights else self.plain[name].dtype


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
    if known_architecture(described) is not None:
        plan = _plan_model(described, reader, config)
    else:
        plan = _plan_by_rule(reader, config)
        notes.append("no architecture of transformers is named: every 2-D float tensor called *.weight is taken for a Linear's")
    companions, left_out = _companions(source, target)
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
        for name in companions:
            (staging.path / name).parent.mkdir(parents=True, exist_ok=True)
            (staging.path / name).write_bytes(read_bytes(source / name, _COMPANION_BYTES))
        publish(staging, writer, described, plan.weights, plan.tied)
    return _report(plan, reader, notes)


def _run(step: Step, plan: _Plan, reader: Reader, writer: Writer, method: str) -> None:
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


def _plan_model(described: Mapping[str, Any], reader: Reader, config: Config) -> _Plan:
    """The plan for an architecture of transformers, made from its modules without their numbers."""
    files = {name: place.spec for name, place in reader.places.items()}
    floats = (spec.dtype for spec in files.values() if spec.dtype in FLOATS)
    dtype = dtype_named(described.get("dtype", described.get("torch_dtype"))) or next(floats, torch.float32)
    model = skeleton(described, dtype, [spec.shape for spec in files.values()])
    steps, unused = steps_to(model, files)
    plan = _Plan(steps, unused=dict.fromkeys(unused, f"{type(model).__name__} has no use for it"))
    _settle_ties(plan, model, reader)
    places = list(_places(model))
    first: dict[int, str] = {}  # tensor of the model -> its first name, by which the checkpoint calls it
    canonical = {name: first.setdefault(id(tensor), name) for name, _, tensor in places}
    plan.renamed = {target: canonical.get(target, target) for step in steps for target in step.targets}
    plan.tied = {name: owner for name, owner in canonical.items() if name != owner}
    given = plan.given()
    if strange := given.keys() - canonical.keys():
        raise CheckpointError(f"transformers makes {min(strange)} of the files' tensors, which {type(model).__name__} does not have")
    found = candidates(model, without_data=True)
    check_patterns(config, [candidate.name for candidate in found])
    decisions = decide(found, config)
    linears = {id(module.weight) for _, module, _ in places if isinstance(module, nn.Linear)}
    for name, module, tensor in places:
        prefix, _, own = name.rpartition(".")
        decision = decisions.get(prefix, "")
        plan.about[name] = kind_of(module), decision if isinstance(decision, str) else "the bias of a quantized weight"
        if name in plan.tied:
            continue
        spec = Spec(tensor.dtype, tuple(tensor.shape))
        if name not in given and not tensor.is_meta and not isinstance(tensor, nn.Parameter):
            plan.steps.append(Step((), {name: spec}, partial(_constant, {name: tensor})))  # a buffer that older files lack
        elif name not in given:
            raise CheckpointError(f"no file has {name}, which {type(model).__name__} needs: save the whole model with transformers first")
        elif (got := given[name]).shape != spec.shape or got.dtype.is_floating_point != spec.dtype.is_floating_point:
            raise CheckpointError(f"{name} is {got.dtype} {list(got.shape)} in the files, but config.json makes it {list(spec.shape)}")
        if isinstance(decision, Format) and own == "weight":
            settings = (config.compute, config.activation) if id(tensor) in linears else ()
            plan.weights[name] = Weight(kind_of(module), decision, spec.shape, spec.dtype, None, *settings)
        else:
            plan.plain[name] = spec
    return plan


def _constant(tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
    return tensors


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Every parameter and persistent buffer under each of its names, with the module that holds it."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in own_tensors(module):
            yield f"{prefix}.{name}" if prefix else name, module, tensor


def _settle_ties(plan: _Plan, model: nn.Module, reader: Reader) -> None:
    """Where the files hold a tied tensor under two names: one is left out if they are equal, the tie is cut if they are not."""
    steps = {target: step for step in plan.steps for target in step.targets}
    given: dict[int, str] = {}
    for name, module, tensor in list(_places(model)):
        if name not in steps or (other := given.setdefault(id(tensor), name)) == name:
            continue
        mine, theirs = steps[name].sources, steps[other].sources
        if len(mine) == len(theirs) == 1 and reader.same(mine[0], theirs[0]):
            plan.steps.remove(steps[name])
            plan.unused[mine[0]] = f"equal to {other}, to which it is tied"
        else:
            setattr(module, name.rpartition(".")[2], nn.Parameter(torch.empty_like(tensor)))


def _plan_by_rule(reader: Reader, config: Config) -> _Plan:
    """The plan for tensors of which nothing but the names is known."""
    specs = {name: place.spec for name, place in reader.places.items()}
    plan = _Plan([rename(name, name, spec) for name, spec in specs.items()])
    fits = [name for name, spec in specs.items() if len(spec.shape) == 2 and spec.dtype in FLOATS and spec.nbytes > 0]
    found = {name: Candidate(name.removesuffix(".weight"), "Linear", name) for name in fits if name.endswith(".weight")}
    check_patterns(config, [candidate.name for candidate in found.values()])
    decisions = decide(list(found.values()), config)
    for name, spec in specs.items():
        decision = decisions[found[name].name] if name in found else "not a 2-D float tensor called *.weight"
        if isinstance(decision, Format):
            plan.weights[name] = Weight("Linear", decision, spec.shape, spec.dtype, None, config.compute, config.activation)
        else:
            plan.plain[name] = spec
            plan.about[name] = "Linear" if name in found else "tensor", decision
    return plan


def _report(plan: _Plan, reader: Reader, notes: Sequence[str]) -> Report:
    given, rows = plan.given(), []
    for name, weight in plan.weights.items():
        before, module = given[name].nbytes, name.removesuffix(".weight")
        rows.append(Row(module, weight.kind, weight.shape, weight.format, None, before, weight.stored_bytes, weight.error))
    for name, spec in plan.plain.items():
        before = given[name].nbytes if name in given else 0
        rows.append(Row(name, plan.about[name][0], spec.shape, None, plan.about[name][1], before, spec.nbytes))
    for name, owner in plan.tied.items():
        kind, reason = plan.about[name]
        if owner in plan.weights:
            weight = plan.weights[owner]
            short, tied_to = name.removesuffix(".weight"), owner.removesuffix(".weight")
            rows.append(Row(short, kind, weight.shape, weight.format, None, 0, 0, weight.error, tied_to))
        else:
            rows.append(Row(name, kind, plan.plain[owner].shape, None, reason, 0, 0, tied_to=owner))
    for name, reason in plan.unused.items():
        rows.append(Row(name, "tensor", reader.spec(name).shape, None, f"left out: {reason}", reader.spec(name).nbytes, 0))
    return Report(tuple(rows), tuple(notes))


def weight_files(source: Path) -> list[Path]:
    """The safetensors files of a model: `source` itself, or those that transformers would take from the folder."""
    if isfile(source):
        return [source]
    if not isdir(source):
        raise CheckpointError(f"there is no {source}: name a folder with safetensors files, or one such file")
    if isfile(source / "model.safetensors"):
        return [source / "model.safetensors"]
    if isfile(source / INDEX):
        shards = load_json(source / INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{source / INDEX} has no weight_map: the file is damaged")
        try:
            return [source / name for name in sorted({plain_name(name) for name in shards.values()})]
        except (TypeError, ValueError) as e:
            raise CheckpointError(f"{source / INDEX} is damaged: {e}") from e
    if files := sorted(source.glob("*.safetensors")):
        return files
    if any(source.glob("*.bin")):
        raise CheckpointError(f"{source} has *.bin files only, which are pickles and never opened: save the model as safetensors first")
    raise CheckpointError(f"{source} has no *.safetensors files: name a folder that has some, or one such file")


def _described(source: Path) -> dict[str, Any]:
    """config.json of the model, nothing where there is none; raises CheckpointError for one that is quantized already."""
    path = source / CONFIG
    if not isfile(path):
        return {}
    config = load_json(path)
    if quantized := [key for key in (SECTION, "quantization_config") if config.get(key) is not None]:
        raise CheckpointError(f"{source} is quantized already (config.json has {quantized[0]!r}): convert the float model")
    return config


def _companions(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """The small files beside the weights, by their paths in the folder: those to copy, and those that are left out."""
    copied: list[str] = []
    left_out: list[str] = []
    try:
        for path in sorted(source.rglob("*")) if source.is_dir() else ():
            name = path.relative_to(source)
            hidden = any(part.startswith(".") for part in name.parts)
            if hidden or not path.is_file() or path.resolve().is_relative_to(target.resolve()) or name.as_posix() == CONFIG:
                continue
            model = len(name.parts) == 1 and (name.suffix == ".safetensors" or name.name.endswith(".index.json"))
            if not model:
                small = path.stat().st_size <= _COMPANION_BYTES and name.suffix not in _WEIGHT_SUFFIXES
                (copied if small else left_out).append(name.as_posix())
    except OSError as e:
        raise CheckpointError(f"cannot read {source}: {e.strerror}") from e
    return copied, left_out
