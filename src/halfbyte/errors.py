"""The exceptions of halfbyte. Every message is one sentence: what is wrong, the value received, what is allowed, what to do."""

import re
from os import PathLike, fspath
from pathlib import Path


class HalfbyteError(Exception):
    """The base class of all errors that halfbyte raises."""


class FormatError(HalfbyteError, ValueError):
    """A format that does not exist or cannot hold the tensor at hand."""


class ArgumentError(HalfbyteError, ValueError):
    """A tensor or setting of the wrong shape, dtype, device or value."""


class CheckpointError(HalfbyteError):
    """A model on disk that is missing, damaged, hostile or of another kind, or that could not be written."""


class UnsupportedError(HalfbyteError, NotImplementedError):
    """A valid request that this machine or this version has no kernel for."""


class KernelError(HalfbyteError, RuntimeError):
    """A kernel that could not be compiled, cached or linked."""


def not_there(path: Path, kinds: str) -> CheckpointError:
    """The error for a model path that does not exist; `kinds` names what is accepted."""
    hub = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and path.suffix not in (".gguf", ".safetensors") and not path.parent.exists():
        hub = f"; download a model of the Hugging Face Hub first: hf download {path} --local-dir {path.name}"
    return CheckpointError(f"there is no {path}: name {kinds}{hub}")


def check_type(value: object, allowed: type | tuple[type, ...], what: str, remedy: str) -> None:
    """Raises ArgumentError unless `value` is of an allowed type; `what` names the argument and these types."""
    if not isinstance(value, allowed):
        kind = type(value)
        home = "" if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}."
        raise ArgumentError(f"{what}, got {'None' if value is None else home + kind.__qualname__}: {remedy}")


def model_path(value: str | PathLike[str]) -> Path:
    """The path of a model, as a user names it; raises ArgumentError for what names none."""
    what = "a model is named by its folder or file, a str or a Path"
    check_type(value, (str, PathLike), what, "pass its path")
    name = fspath(value)
    if not isinstance(name, str) or not name or "\0" in name:
        raise ArgumentError(f"{what}, got {name!r}: " + ("write '.' for the current folder" if not name else "pass its path"))
    return Path(name)
