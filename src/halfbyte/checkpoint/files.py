"""The files of a model in a folder: those with the weights, and those beside them."""

from __future__ import annotations

import json
from pathlib import Path

from halfbyte import __version__
from halfbyte.checkpoint.manifest import CONFIG, plain_name
from halfbyte.checkpoint.saving import INDEX
from halfbyte.errors import CheckpointError, not_there, unreadable
from halfbyte.io.files import files_below, is_file, is_folder, paths_in
from halfbyte.io.safetensors import load_json, read_bytes

COMPANION_BYTES = 64 << 20  # files larger than that are not tokenizers
# Files besides config.json that describe the quantization: of AutoGPTQ, of AutoAWQ and llm-awq, of Model Optimizer.
GPTQ_SETTINGS, AWQ_SETTINGS, MODELOPT_SETTINGS = "quantize_config.json", "quant_config.json", "hf_quant_config.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_WEIGHT_SUFFIXES = _PICKLES | {".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot", ".tflite"}
_ADAPTER = "adapter_config.json"  # of peft


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


def companions(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """The small files beside the weights, by their paths in the folder: those to copy, and those that are left out."""
    copied: list[str] = []
    left_out: list[str] = []
    try:
        for path in files_below(source) if is_folder(source) else ():
            name = path.relative_to(source)
            if path.resolve().is_relative_to(target.resolve()):
                continue
            if name.as_posix() in (CONFIG, GPTQ_SETTINGS, AWQ_SETTINGS, MODELOPT_SETTINGS):  # they say how the source is quantized
                continue
            model = len(name.parts) == 1 and (name.suffix == ".safetensors" or name.name.endswith(".index.json"))
            if not model:
                small = path.stat().st_size <= COMPANION_BYTES and name.suffix not in _WEIGHT_SUFFIXES
                (copied if small else left_out).append(name.as_posix())
    except OSError as e:
        raise unreadable(source, e) from e
    return copied, left_out


def journal(path: Path, what: str) -> str:
    """The first line of a journal: what is being written from which source, its size and time of change included."""
    paths = paths_in(path) if is_folder(path) else [path]
    found = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in paths if is_file(file)]
    return json.dumps({"halfbyte": __version__, "what": what, "from": found})


def copy_companions(source: Path, target: Path, names: list[str]) -> None:
    """Copies files that `companions` found."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(read_bytes(source / name, COMPANION_BYTES))
