"""Models of transformers: built without data from a config.json, and how the tensors of files become theirs.

    skeleton(config, …)      the model on the meta device
    steps_to(model, files)   a `Step` for each tensor, or group of tensors, of the files: renamed, fused or split

`plan.py` plans from the steps what is read and quantized. No other file of `checkpoint` calls transformers' conversions.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as short
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfbyte.checkpoint.mapping.generation_settings import FILE, check_generation
from halfbyte.decoder.config import find_family
from halfbyte.errors import CheckpointError
from halfbyte.io.files import is_file
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.candidates import named_tensors

# A config.json from elsewhere must not make Python build huge lists: no model has as many layers, heads or labels.
_COUNT_LIMIT = 1 << 21
# Names of counts. How much a model was trained on, and how long its sequences may be, are not limited.
_COUNT_NAME = re.compile(r"(num|n)_(?!.*(param|token|step|sample|flop|ctx|position|embeddings$)).*")
# The most elements and tensors that a model may have in buffers that are in no file, such as masks and rope caches.
_BUFFER_ELEMENTS = 1 << 27
_BUFFERS = 1000


@dataclass(frozen=True, slots=True)
class Step:
    """How tensors of a model are computed from tensors of its files: renamed, fused or split.

    Attributes:
        sources: Names of the tensors in the files.
        targets: Name in the model -> dtype and shape of a tensor that is computed.
        run: Computes the targets with a function that reads a source by its name.
        converts: Whether anything but the name changes.
        stacks: Whether it converts only by stacking matrices and concatenating their rows.
    """

    sources: tuple[str, ...]
    targets: Mapping[str, TensorSpec]
    run: Callable[[Callable[[str], Tensor]], Mapping[str, Tensor]]
    converts: bool = False
    stacks: bool = False


def import_transformers(why: str) -> ModuleType:
    """Import transformers; raise CheckpointError, which says `why` it is needed, where it is not installed."""
    try:
        import transformers
    except ImportError as e:
        raise CheckpointError(f"{why} needs transformers: pip install 'halfbyte[transformers]'") from e
    return transformers


def known_architecture(config: Mapping[str, object]) -> str | None:
    """Return the name of the class of transformers that a config.json names, or None."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not name.isidentifier():
        return None
    transformers = import_transformers(f"{name}, the architecture in config.json,")
    try:
        cls = getattr(transformers, name, None)
    except Exception as e:  # a dependency of the architecture itself may be missing
        raise CheckpointError(f"transformers cannot import {name} ({_why(e)}): install what it needs") from e
    return name if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) else None


def is_transformers_model(config: Mapping[str, object]) -> bool:
    """Return whether a config.json names a class of transformers, which is not imported for a family that halfbyte knows itself."""
    return find_family(config) is not None or known_architecture(config) is not None


def skeleton(config: Mapping[str, object], dtype: torch.dtype, files: Iterable[Sequence[int]]) -> nn.Module:
    """Build the model that a config.json names, in evaluation mode: parameters on the meta device, buffers computed.

    Args:
        config: config.json.
        dtype: The dtype of its parameters.
        files: The shapes of the tensors in the files.

    Raises:
        CheckpointError: transformers does not know the architecture or cannot build it, or it is far larger than the tensors in the files.
    """
    name = known_architecture(config)
    if name is None:
        raise CheckpointError(
            f"config.json names no architecture that transformers knows (architectures: {short(config.get('architectures'))}): "
            "build the model yourself and pass it, load(dir, model=model)"
        )
    check_sizes(config)
    transformers = import_transformers(name)
    cls = getattr(transformers, name)
    try:
        budget = [math.prod(shape) for shape in files]
        with torch.random.fork_rng(devices=[]), _default_dtype(dtype), torch.device("cpu"), _Skeleton(budget):
            model: nn.Module = cls(cls.config_class.from_dict(_with_special_floats(dict(config))))
    except CheckpointError:
        raise
    except Exception as e:  # transformers raises errors of any type for an invalid config
        remedy = "install what it needs" if isinstance(e, ImportError) else "it is damaged, or of another release of transformers"
        raise CheckpointError(f"transformers cannot build {name} from config.json ({_why(e)}): {remedy}") from e
    keep_dtypes_(model, dtype)
    return model.eval()


def keep_dtypes_(model: Any, dtype: torch.dtype) -> None:
    """Cast the parameters and persistent buffers of a model without data to the dtypes that transformers keeps in a model of `dtype`.

    These are float32 for those that its classes name in `_keep_in_fp32_modules`, such as T5's `wo`, and `_keep_in_fp32_modules_strict`.
    """
    dtypes: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
    patterns = [(re.compile(pattern.replace("*", ".*")), to) for pattern, to in dtypes.items()]
    for name, module, tensor in list(named_tensors(model)):
        to = next((to for pattern, to in patterns if pattern.search(name)), None)
        if to is None or not tensor.is_floating_point():
            continue
        if isinstance(tensor, nn.Parameter):
            tensor.data = tensor.data.to(to)  # tied ones stay tied
        else:
            setattr(module, name.rpartition(".")[2], tensor.to(to))


def load_generation_config(model: nn.Module, folder: Path) -> None:
    """Give a model that generates text the settings in the folder's generation_config.json, if there are any."""
    if hasattr(model, "generation_config") and is_file(folder / FILE):
        transformers = import_transformers(FILE)
        try:
            config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as e:
            raise CheckpointError(f"transformers cannot read {folder / FILE} ({_why(e)}): repair or remove it") from e
        check_generation(config, folder)
        model.generation_config = config


def steps_to(model: Any, files: Mapping[str, TensorSpec]) -> tuple[list[Step], dict[str, str]]:
    """Map the tensors of a model's files to those of its `skeleton`.

    Names of earlier versions, missing and superfluous prefixes, and tensors that the model has fused or split are mapped as
    `from_pretrained` does, by transformers' own tables.

    Args:
        model: The skeleton.
        files: Name of a tensor in the files -> its dtype and shape.

    Returns:
        The steps, and name in the files -> name that it would have in the model, of tensors that the model does not use.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    state = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamed: dict[str, str] = {}
    converted: dict[str, list[tuple[str, str]]] = defaultdict(list)
    unused: dict[str, str] = {}
    for name in sorted(files, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        elif target not in state and (stack := name.removesuffix(".weight")) in state:  # experts are stored under module names
            target, pattern = stack, None
        if target not in state or target in renamed:  # of two that map to the same name the first is taken
            unused[name] = target
        elif pattern is None:
            renamed[target] = name
        else:
            converted[target].append((name, pattern))
    steps = [rename(source, target, files[source]) for target, source in renamed.items()]
    original = _OriginalParameters(model)
    for target, sources in converted.items():
        converter = next(c for c in converters if sources[0][1] in c.source_patterns)
        steps.append(_conversion(original, target, converter, sources, files))
    return steps, unused


def module_classes(config: Mapping[str, object], modules: Iterable[str], files: Iterable[Sequence[int]]) -> dict[str, set[str]]:
    """Return the names of the class and the base classes of modules that have a weight, by the modules' names in the files.

    Modules that the model lacks, or has fused with others, are left out. The arguments are those of `skeleton`.
    """
    if find_family(config) is not None:  # the quantized weights of a language model are its embedding's and its Linears'
        return {name: {"Embedding" if name.endswith("embed_tokens") else "Linear", "Module"} for name in modules}
    if known_architecture(config) is None:
        return {}
    model = skeleton(config, torch.float32, files)
    steps, _ = steps_to(model, {f"{name}.weight": TensorSpec(torch.float32, (1, 1)) for name in modules})
    places = {step.sources[0].removesuffix(".weight"): min(step.targets) for step in steps if not step.converts}
    return {name: {cls.__name__ for cls in type(model.get_submodule(at.rpartition(".")[0])).__mro__} for name, at in places.items()}


def rename(source: str, target: str, spec: TensorSpec) -> Step:
    """Return the step that gives a tensor another name."""
    return Step((source,), {target: spec}, lambda read: {target: read(source)})


class _OriginalParameters:
    """A model with the parameters that it has now: conversions run when modules of quantized weights may have replaced them."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._parameters = model, dict(model.named_parameters(remove_duplicate=False))

    def get_parameter(self, name: str) -> nn.Parameter:
        return self._parameters[name]

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def _conversion(
    model: _OriginalParameters, target: str, converter: Any, sources: Sequence[tuple[str, str]], files: Mapping[str, TensorSpec]
) -> Step:
    """Return the step of a WeightConverter of transformers; `sources` are names in the files with the patterns that they match."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    def run(read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        copied = deepcopy(converter)
        for name, pattern in sources:
            copied.add_tensor(target, name, pattern, partial(read, name))
        try:
            converted = copied.convert(target, model=model, config=model.config)
        except Exception as e:
            raise CheckpointError(f"transformers cannot compute {target} from {sources[0][0]} and others ({_why(e)})") from e
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    # Only the conversion itself knows its results: it is run on tensors without data.
    targets = run(lambda name: torch.empty(files[name].shape, dtype=files[name].dtype, device="meta"))
    first, *rest = converter.operations
    stacks = isinstance(first, MergeModulelist) and first.dim == 0 and all(isinstance(op, Concatenate) and op.dim == 1 for op in rest)
    specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in targets.items()}
    return Step(tuple(name for name, _ in sources), specs, run, True, stacks)


def initial(model: Any, name: str) -> Tensor | None:
    """Return the value that transformers computes for a parameter that files may lack, such as sinusoidal positions; None for others."""
    allowed = [p for m in model.modules() for p in getattr(m, "_keys_to_ignore_on_load_missing", None) or ()]
    if not any(re.search(pattern, name) for pattern in allowed):
        return None
    prefix, _, tensor_name = name.rpartition(".")
    module: nn.Module = deepcopy(model.get_submodule(prefix)).to_empty(device="cpu")
    model._init_weights(module)
    return module.get_parameter(tensor_name).detach()


def _with_special_floats(value: object) -> object:
    """Return a value of a config.json with {"__float__": "Infinity"}, transformers' notation, replaced by the float."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _with_special_floats(item) for key, item in value.items()}
    return [_with_special_floats(item) for item in value] if isinstance(value, list) else value


def _why(e: Exception) -> str:
    """Return transformers' error message on one line."""
    return f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"


class _Skeleton(TorchFunctionMode):
    """A context in which torch.empty, by which layers allocate parameters, creates tensors on the meta device.

    Other factories (ones, arange, …) compute buffers as ever. The tensors of all count against a budget, which is generous for a model of
    the given sizes and refuses a far larger one before it takes memory.

    Args:
        sizes: The number of elements of each tensor in the files.
    """

    FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.linspace, torch.eye)

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.elements_left = 4 * sum(sizes) + _BUFFER_ELEMENTS
        self.tensors_left = 16 * len(sizes) + _BUFFERS

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func in self.FACTORIES and kwargs.get("device") is None:
            on_meta = func(*args, **{**kwargs, "device": "meta"})
            self.elements_left -= on_meta.numel()
            self.tensors_left -= 1
            if min(self.elements_left, self.tensors_left) < 0:
                what = "config.json describes a model far larger than the tensors in the files"
                raise CheckpointError(f"{what}: name the folder of the whole model, or restore what is damaged of it")
            if func is torch.empty:
                return on_meta
        return func(*args, **kwargs)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_sizes(config: object) -> None:
    """Raise CheckpointError where a count in a config.json is implausibly large."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if isinstance(value, int) and abs(value) > _COUNT_LIMIT and _COUNT_NAME.fullmatch(name):
                raise CheckpointError(f"config.json says {name}: {short(value)}, over {_COUNT_LIMIT}: the file is damaged")
            check_sizes(value)
    elif isinstance(config, list):
        for value in config:
            check_sizes(value)
