"""A model as a program of torch.export, compiled by AOTInductor, with the kernels of halfbyte that it calls.

    folder/model.pt2            the program; packed weights are its constants
    folder/kernels/             halfbyte's compiled kernels, as its cache has them
    folder/example.safetensors  inputs that the model was exported with
    folder/program.json         what it needs: versions and CPU; the names and sizes of its inputs
    folder/load.py              a loader

The program calls halfbyte's ops by name, so that its process imports halfbyte, but nothing of the model. A process of its own runs it once
when it is written, and compiles the kernels into the folder. (torch.export and AOTInductor: docs.pytorch.org.)
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from os.path import lexists
from pathlib import Path
from typing import TypedDict, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.export import ExportedProgram

from halfbyte import __version__
from halfbyte.checkpoint.native.folder import replacing, write_json
from halfbyte.deploy.example import Example, Inputs, Sizes, example_of, first_line
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError, check_counts, check_type, model_path
from halfbyte.io.files import is_file, is_folder
from halfbyte.io.safetensors import load_json

# The ops that programs call.
from halfbyte.ops import grouped as _grouped  # noqa: F401
from halfbyte.ops.conv import elementwise as _elementwise  # noqa: F401
from halfbyte.ops.conv import functions as _functions  # noqa: F401
from halfbyte.ops.transformer import attend as _attend  # noqa: F401
from halfbyte.ops.transformer import attention as _attention  # noqa: F401
from halfbyte.ops.transformer import normed_linear as _normed_linear  # noqa: F401
from halfbyte.ops.transformer import norms as _norms  # noqa: F401
from halfbyte.ops.transformer import routing as _routing  # noqa: F401

_PACKAGE, _KERNELS, _EXAMPLE, _MANIFEST, _LOADER = "model.pt2", "kernels", "example.safetensors", "program.json", "load.py"
_MANIFEST_BYTES = 1 << 20
_LONGER = 16  # the warm-up multiplies sizes other than the batch by it
_CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")  # torch's names, each including those before
_LOAD = '''"""`from load import program; y = program({arguments})`

Needs halfbyte and torch of the versions in program.json."""

from pathlib import Path

import halfbyte

program = halfbyte.load_program(Path(__file__).parent)

if __name__ == "__main__":
    print(program.run_example())
'''


class _Manifest(TypedDict):
    halfbyte: str
    torch: str
    device: str
    cpu: str
    inputs: list[str]
    sizes: dict[str, dict[str, str]]
    max_sizes: dict[str, int]


class Program:
    """A model that `export_program` has written: called with its inputs, by position or by name.

    Example:
        >>> program = hb.load_program(folder / "program")  # doctest: +SKIP
        >>> y = program(torch.randn(2, 32))  # doctest: +SKIP
    """

    def __init__(self, run: Callable[..., object], manifest: _Manifest, folder: Path) -> None:
        self._run, self._manifest, self._folder = run, manifest, folder

    def __call__(self, *inputs: Tensor, **named: Tensor) -> object:
        names = self._manifest["inputs"]
        given = dict(zip(names, inputs, strict=False)) | named
        if len(inputs) + len(named) != len(names) or set(given) != set(names):
            got = f"{len(inputs)} by position and {', '.join(named) or 'none'} by name"
            raise ArgumentError(f"this program takes {', '.join(names)}, got {got}: pass each of them once")
        for name, tensor in given.items():
            check_type(tensor, Tensor, f"the input {name} of a program is a tensor", "pass torch.as_tensor(x)")
        self._check(given)
        return self._run(*(given[name].contiguous() for name in names))

    @cached_property
    def _example(self) -> Mapping[str, Tensor]:
        return load_file(self._folder / _EXAMPLE, device=self._manifest["device"])

    def _check(self, given: Mapping[str, Tensor]) -> None:
        """Raise ArgumentError for inputs that the program was not compiled for, which native code would read as if it had been."""
        lengths = dict[str, int]()
        for name, tensor in given.items():
            example, varying = self._example[name], {int(at): size for at, size in self._manifest["sizes"].get(name, {}).items()}
            wanted = [varying.get(at, length) for at, length in enumerate(example.shape)]
            fits = tensor.dim() == len(wanted) and all(
                n == w if isinstance(w, int) else n == lengths.setdefault(w, n) <= self._manifest["max_sizes"][w]
                for n, w in zip(tensor.shape, wanted, strict=True)
            )
            if not fits or (tensor.dtype, tensor.device.type) != (example.dtype, example.device.type):
                limits = "".join(f", {size} up to {self._manifest['max_sizes'][size]}" for size in varying.values())
                takes = f"{name} [{', '.join(map(str, wanted))}] {example.dtype} on {example.device.type}{limits}"
                raise ArgumentError(
                    f"this program was compiled for {takes}, got "
                    f"{list(tensor.shape)} {tensor.dtype} on {tensor.device.type}: convert it, or export the model with such an input"
                )

    def run_example(self) -> object:
        """The result for the inputs that the model was exported with."""
        return self(**self._example)

    def warm_up(self) -> None:
        """Compute the example with all sizes up to its own, and a longer one, since there are other kernels for few rows."""
        example, choices = self._example, dict[str, set[int]]()
        for name, places in self._manifest["sizes"].items():
            for at, size in places.items():
                here = example[name].shape[int(at)]
                choices[size] = {*range(1, here + 1), min(_LONGER * here, self._manifest["max_sizes"][size]) if int(at) else here}
        for sizes in itertools.product(*choices.values()):
            chosen = dict(zip(choices, sizes, strict=True))
            self(**{name: self._resized(name, tensor, chosen) for name, tensor in example.items()})

    def _resized(self, name: str, tensor: Tensor, chosen: Mapping[str, int]) -> Tensor:
        for at, size in self._manifest["sizes"].get(name, {}).items():
            index = torch.arange(chosen[size], device=tensor.device) % tensor.shape[int(at)]
            tensor = tensor.index_select(int(at), index)
        return tensor


def export_program(
    model: nn.Module,
    folder: str | os.PathLike[str],
    inputs: Inputs | None = None,
    sizes: Mapping[str, Sizes] | None = None,
    *,
    context: int = 2048,
) -> Program:
    """Write a quantized model as a compiled program that runs without its Python source.

    Weights are constants of the program, on the device that the model is on. It needs the halfbyte and torch that wrote it, and a CPU with
    the same vector instructions. A decoder becomes a step: program(input_ids, position) -> logits, its KV cache inside.

    Args:
        model: In evaluation mode.
        folder: The new folder.
        inputs: Tensors by name, or in the order of the arguments of its forward; may be left out for models of transformers and for UNets.
        sizes: Names of the sizes that may vary, by input and dimension: {"x": {0: "batch"}}; all others are fixed.
        context: For a decoder: how many positions its cache has.

    Returns:
        The program, loaded.

    Raises:
        ArgumentError: The inputs are not known, or the folder exists.
        UnsupportedError: torch.export or AOTInductor cannot take the model, or there is no C++ compiler.
        CheckpointError: The folder cannot be written; nothing is left of it.

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0").eval()
        >>> hb.export_program(model, folder / "program", [torch.randn(2, 32)])  # doctest: +SKIP
        >>> program = hb.load_program(folder / "program")  # doctest: +SKIP
    """
    target = model_path(folder)
    if lexists(target):
        raise ArgumentError(f"{target} exists: choose another place, or remove it")
    check_counts("the KV cache of an exported program", context=[context])
    example = example_of(model, inputs, sizes, context)
    example = replace(example, inputs={name: tensor.contiguous() for name, tensor in example.inputs.items()})
    traced, example = example.trace()
    devices = {tensor.device.type for tensor in (*example.inputs.values(), *model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise ArgumentError(f"a program runs on one device, got a model and inputs on {', '.join(sorted(devices))}: move all to one")
    manifest = _Manifest(
        halfbyte=__version__,
        torch=torch.__version__.partition("+")[0],
        device=devices.pop(),
        cpu=torch.backends.cpu.get_cpu_capability(),
        inputs=list(example.inputs),
        sizes={name: {str(at): size for at, size in varying.items()} for name, varying in example.sizes.items()},
        max_sizes=dict(example.max_sizes),
    )
    with replacing(target) as staging:
        _compile(traced, example, staging.path / _PACKAGE)
        save_file({name: tensor.clone() for name, tensor in example.inputs.items()}, staging.path / _EXAMPLE)
        write_json(staging.path / _MANIFEST, manifest)
        (staging.path / _LOADER).write_text(_LOAD.format(arguments=", ".join(example.inputs)), encoding="utf-8")
        _compile_kernels(staging.path)
        staging.commit_folder()
    return load_program(target)


def _compile(traced: ExportedProgram, example: Example, package: Path) -> None:
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch calls what it has deprecated
            aoti_compile_and_package(traced, package_path=str(package))
    except OSError:
        raise
    except Exception as error:  # torch raises many classes
        causes = [error, *_causes(error)]
        if any(isinstance(cause, InvalidCxxCompiler) for cause in causes):
            raise UnsupportedError("AOTInductor needs a C++ compiler, and there is none: install g++, or name one in CXX") from error
        if found := next((cause for cause in causes if isinstance(cause, OSError)), None):
            raise found from error
        raise UnsupportedError(
            f"AOTInductor cannot compile {example.model} ({first_line(error)}): export a part of it, or as ONNX"
        ) from error


def _causes(error: BaseException) -> Sequence[BaseException]:
    cause = error.__cause__ or error.__context__
    return () if cause is None else (cause, *_causes(cause))


def _compile_kernels(folder: Path) -> None:
    """Run the program in a process whose caches of kernels are in the folder."""
    kernels = folder / _KERNELS
    source = str(Path(__file__).parents[2])
    paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "HALFBYTE_CACHE": str(kernels), "TRITON_CACHE_DIR": str(kernels / "triton"), "PYTHONPATH": paths}
    program = "import sys, halfbyte; halfbyte.load_program(sys.argv[1]).warm_up()"
    done = subprocess.run([sys.executable, "-c", program, str(folder)], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnsupportedError(f"the exported program does not run in a process of its own ({said[:300]}): export a part of the model")
    for path in kernels.rglob("*"):  # for other users, as the other files; a cache is its owner's alone
        path.chmod(0o755 if path.is_dir() else 0o644)


def load_program(folder: str | os.PathLike[str]) -> Program:
    """Load a program that `export_program` has written; nothing is compiled, and the model's source is not needed.

    A program is native code: load only those that you would run.

    Args:
        folder: The folder.

    Returns:
        The program; call it like the model.

    Raises:
        CheckpointError: The folder is none of a program, or damaged.
        UnsupportedError: It was exported for another release of halfbyte or torch, or another CPU.

    Example:
        >>> hb.load_program("missing")
        Traceback (most recent call last):
        halfbyte.errors.CheckpointError: missing is not a folder that export_program has written: name such a folder
    """
    source = model_path(folder)
    manifest = _read_manifest(source)
    here = {"halfbyte": __version__, "torch": torch.__version__.partition("+")[0]}
    for package, version in here.items():
        if manifest[package] != version:  # type: ignore[literal-required]
            wanted = f"{package} {manifest[package]}"  # type: ignore[literal-required]
            raise UnsupportedError(f"{source} was exported with {wanted}, this is {version}: install {wanted}, or export it again")
    cpu, needed = torch.backends.cpu.get_cpu_capability(), manifest["cpu"]
    if needed != cpu and not (needed in _CAPABILITIES and cpu in _CAPABILITIES[_CAPABILITIES.index(needed) :]):
        raise UnsupportedError(f"{source} was compiled for CPUs with {needed}, and this one has {cpu}: export it again on such a machine")
    kernels = source / _KERNELS
    if manifest["device"] == "cpu":
        from halfbyte.kernels.cpu.codegen import jit

        jit.read_from(kernels / "cpu")
    elif is_folder(kernels / "triton"):
        from triton import knobs

        shutil.copytree(kernels / "triton", knobs.cache.dir, dirs_exist_ok=True)
    try:
        run = torch._inductor.aoti_load_package(str(source / _PACKAGE))
    except Exception as error:  # RuntimeError and others
        raise CheckpointError(f"{source / _PACKAGE} cannot be loaded ({first_line(error)}), it is damaged: export it again") from error
    return Program(run, manifest, source)


def _read_manifest(source: Path) -> _Manifest:
    if not is_file(source / _MANIFEST):
        raise CheckpointError(f"{source} is not a folder that export_program has written: name such a folder")
    manifest = load_json(source / _MANIFEST, _MANIFEST_BYTES)
    kinds = dict.fromkeys(_Manifest.__annotations__, str) | {"inputs": list, "sizes": dict, "max_sizes": dict}
    if {name: type(value) for name, value in manifest.items()} != kinds:
        raise CheckpointError(f"{source / _MANIFEST} is not that of a program: copy or export the program again")
    return cast(_Manifest, manifest)
