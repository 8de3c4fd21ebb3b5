"""The files of a model in a folder: those with the weights, and their companions."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from halfbyte import __version__
from halfbyte.checkpoint.native.manifest import CONFIG, INDEX, plain_name
from halfbyte.errors import CheckpointError, not_there, unreadable
from halfbyte.io.files import files_below, is_file, is_folder, paths_in
from halfbyte.io.safetensors import load_json, read_bytes

COMPANION_BYTES = 64 << 20  # files larger than that are not tokenizers
# Files besides config.json that describe the quantization: of AutoGPTQ, of AutoAWQ and llm-awq, of Model Optimizer.
GPTQ_SETTINGS, AWQ_SETTINGS, MODELOPT_SETTINGS = "quantize_config.json", "quant_config.json", "hf_quant_config.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_WEIGHT_SUFFIXES = _PICKLES | {".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot", ".tflite"}
_ADAPTER = "adapter_config.json"  # of peft
_MODULES = "modules.json"  # of sentence-transformers: the parts of a model, each with a folder
_ADAPTER_COPIED = f"the adapter in the model's folder ({_ADAPTER}) is copied, not merged: transformers applies it, halfbyte.load refuses it"
_REFERRING = (".index.json", ".xml", _ADAPTER)  # suffixes of files that name weights in the same folder: transformers', OpenVINO's, peft's


def weight_files(source: Path) -> list[Path]:
    """The safetensors files of a model: `source` itself, or those that transformers would read from the folder."""
    if source.suffix == ".onnx":
        raise CheckpointError(f"{source} is not a model that is read: halfbyte.io.onnx.import_linear reads one layer of an ONNX file")
    if is_file(source):
        if source.suffix in _PICKLES:
            raise CheckpointError(f"{source} is a pickle, which is never opened: save the model as safetensors first")
        return [source]
    if not is_folder(source):
        raise not_there(source, "a folder with safetensors files, or one such file, or a GGUF file")
    if is_file(source / _ADAPTER) and not is_file(source / CONFIG):
        raise CheckpointError(
            f"{source} holds an adapter, not a model: load the model that {_ADAPTER} names, and then peft.PeftModel.from_pretrained(model, "
            f"{str(source)!r})"
        )
    if is_file(source / "model.safetensors"):
        return [source / "model.safetensors"]
    if is_file(source / INDEX):
        shards = load_json(source / INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{source / INDEX} has no weight_map: the file is damaged")
        try:
            return [source / name for name in sorted({plain_name(name) for name in shards.values()})]
        except (TypeError, ValueError) as e:
            raise CheckpointError(f"{source / INDEX} is damaged: {e}") from e
    present = paths_in(source)
    if files := [path for path in present if path.suffix == ".safetensors"]:
        return files
    if pickles := [path.name for path in present if path.suffix in _PICKLES]:
        raise CheckpointError(f"{source} has {min(pickles)} only, a pickle, which is never opened: save the model as safetensors first")
    if files := [path for path in present if path.suffix == ".gguf"]:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise CheckpointError(f"{source} has no *.safetensors files, but {files[0].name}{more}: name a GGUF file itself, {files[0]}")
    raise CheckpointError(f"{source} has no *.safetensors files: name a folder that has some, or one such file, or a GGUF file")


def has_adapter(source: Path) -> bool:
    """Whether a folder holds a model and an adapter for it, which transformers' `from_pretrained` applies."""
    return is_file(source / _ADAPTER) and is_file(source / CONFIG)


def check_read_by_transformers(source: Path) -> None:
    """Raise CheckpointError where the weights in the folder are those of a part of sentence-transformers that reads them itself."""
    for path, cls in _parts(source):
        if path == "" and not cls.endswith(("Transformer", "CLIPModel")):
            raise CheckpointError(
                f"{source} holds the weights of {cls}, which sentence-transformers reads in floating point only: use the folder as it is, "
                "or quantize that module in Python and save it with halfbyte.save"
            )


def _parts(source: Path) -> list[tuple[str, str]]:
    """The parts of a model of sentence-transformers, (folder, class); none for any other."""
    if not is_file(source / _MODULES):
        return []
    try:
        parts = json.loads(read_bytes(source / _MODULES, COMPANION_BYTES))
        return [(str(part["path"]), str(part["type"]).rpartition(".")[2]) for part in parts]
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise CheckpointError(f"{source / _MODULES} is not a list of modules ({type(e).__name__}: {e}): the file is damaged") from e


@dataclass(frozen=True)
class Companions:
    """The files next to the weights of a model, by their paths in its folder.

    Attributes:
        source: The folder.
        copied: Those that belong to the new model, too.
        left_out: The others.
    """

    source: Path
    copied: list[str]
    left_out: list[str]

    def notes(self) -> list[str]:
        """Return what the report says of them."""
        adapter = [_ADAPTER_COPIED] if has_adapter(self.source) else []
        return adapter + ([f"not copied: {', '.join(self.left_out)}"] if self.left_out else [])

    def copy_to(self, target: Path) -> None:
        """Copy them. Raises CheckpointError for one that may not be read, OSError where they cannot be written."""
        for name in self.copied:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if not os.access(self.source / name, os.R_OK):
                raise unreadable(self.source / name, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
            shutil.copyfile(self.source / name, target / name)


def companions(source: Path, target: Path) -> Companions:
    """Find the small files next to the weights of a model; there are none where `source` is a file. Those in `target` are not considered.

    Weights that small files name are copied, too, of whatever size: adapters, and those in the folders of a model of sentence-transformers.
    A file that names other weights, which are left out, is left out with them.

    Raises:
        CheckpointError: The folder cannot be read, or what says what its weights are is damaged.
    """
    copied: list[str] = []
    left_out: list[str] = []
    parts = {path for path, _ in _parts(source)} - {""}
    try:
        weights = weight_files(source) if is_folder(source) else []
        for path in files_below(source) if is_folder(source) else ():
            name = path.relative_to(source)
            if path.resolve().is_relative_to(target.resolve()):
                continue
            if name.as_posix() in (CONFIG, GPTQ_SETTINGS, AWQ_SETTINGS, MODELOPT_SETTINGS):  # they say how the source is quantized
                continue
            if path in weights or (len(name.parts) == 1 and name.name.endswith(".index.json")):
                continue
            only = name.suffix not in _WEIGHT_SUFFIXES or (name.suffix == ".bin" and not [*path.parent.glob("*.safetensors")])
            adapter = name.stem == "adapter_model" and is_file(path.parent / _ADAPTER)
            needed = adapter or (only and any(name.is_relative_to(part) for part in parts))
            other_model = len(name.parts) == 1 and name.suffix == ".safetensors"
            small = path.stat().st_size <= COMPANION_BYTES and name.suffix not in _WEIGHT_SUFFIXES and not other_model
            (copied if needed or small else left_out).append(name.as_posix())
    except OSError as e:
        raise unreadable(source, e) from e
    without = {Path(name).parent for name in left_out}
    referring = [name for name in copied if name.endswith(_REFERRING) and Path(name).parent in without]
    return Companions(source, [name for name in copied if name not in referring], sorted([*left_out, *referring]))


def journal(path: Path, what: str) -> str:
    """The first line of a journal: what is being written from which source, its size and time of change included."""
    paths = paths_in(path) if is_folder(path) else [path]
    found = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in paths if is_file(file)]
    return json.dumps({"halfbyte": __version__, "what": what, "from": found})
