"""The exceptions of halfbyte. Every message is one sentence: what is wrong, the value received, what is allowed, what to do."""

import errno
import re
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Never, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_LONGEST_NAME = 400  # characters of a path in a message
_FAULT = "this is a fault in halfbyte, please report it"


class HalfbyteError(Exception):
    """The base class of all errors that halfbyte raises.

    Example:
        >>> try:
        ...     hb.as_format("q3")
        ... except hb.HalfbyteError as error:
        ...     print(type(error).__name__)
        FormatError
    """


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


def lookup(table: Mapping[Key, Value], key: Key, what: str) -> Value:
    """Return `table[key]`, where the table has one entry for each `what` that halfbyte implements.

    Raises:
        UnsupportedError: The table has no such key.
    """
    if key in table:
        return table[key]
    raise UnsupportedError(f"{what} {key!r} is not implemented here, only {', '.join(map(str, table))}: {_FAULT}")


def unreachable(value: Never, what: str) -> UnsupportedError:
    """The error to raise in the last case of a `match` over all values of a Literal: mypy reports a value that no case names."""
    return UnsupportedError(f"{what} {value!r} is not implemented here: {_FAULT}")


def not_there(path: Path, kinds: str) -> CheckpointError:
    """The error for a model path that does not exist; `kinds` names what is accepted."""
    hub = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and path.suffix not in (".gguf", ".safetensors") and not path.parent.exists():
        hub = f"; download a model of the Hugging Face Hub first: hf download {path} --local-dir {path.name}"
    return CheckpointError(f"there is no {shortened(path)}: name {kinds}{hub}")


def shortened(path: str | PathLike[str]) -> str:
    """A path for an error message: one that is very long without its middle."""
    name = fspath(path)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2]}…{name[-_LONGEST_NAME // 2 :]} ({len(name)} characters)"


def unreadable(path: str | PathLike[str], error: OSError) -> CheckpointError:
    """The error for a file or folder of a model that cannot be read."""
    if isinstance(error, FileNotFoundError):
        remedy = "a file of the model is missing, copy or download all of them"
    elif isinstance(error, PermissionError):
        remedy = "let this user read it"
    elif error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        remedy = "name another path"
    elif isinstance(error, IsADirectoryError | NotADirectoryError):
        remedy = "name another path, or put the model's files back in their places"
    else:
        remedy = "copy or download it again to a disk that can be read"
    return CheckpointError(f"cannot read {shortened(path)}: {error.strerror or error}: {remedy}")


def unwritable(path: str | PathLike[str], error: OSError) -> CheckpointError:
    """The error for a file or folder that cannot be written, and is as it was."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space or choose another place"
    elif error.errno == errno.ENAMETOOLONG:
        remedy = "choose a shorter name"
    else:
        remedy = "choose a place that can be written to"
    return CheckpointError(f"cannot write {shortened(path)}: {error.strerror or error}; what was there is unchanged: {remedy}")


def non_finite_logits(*, is_float16: bool = False) -> CheckpointError:
    """Return the error of a model that computes NaN or infinite logits.

    Args:
        is_float16: Whether its activations are float16, whose range some models leave.
    """
    remedy = ", or its activations leave the range of float16: open it with dtype=torch.bfloat16 (--dtype bfloat16)" if is_float16 else ""
    return CheckpointError(f"the model computes NaN or infinite logits: its files are damaged, or of another model{remedy}")


def check_type(value: object, allowed: type | tuple[type, ...], what: str, remedy: str) -> None:
    """Raise ArgumentError unless `value` is of an allowed type; `what` names the argument and these types."""
    if not isinstance(value, allowed):
        kind = type(value)
        home = "" if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}."
        raise ArgumentError(f"{what}, got {'None' if value is None else home + kind.__qualname__}: {remedy}")


def check_counts(what: str, **counts: Iterable[int]) -> None:
    """Raise ArgumentError unless all are whole numbers from 1 on; `what` has these counts."""
    for name, values in counts.items():
        for value in values:
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name} of {what} is a whole number from 1 on, got {value!r}: ask for 1 or more")


def check_whole(what: str, sizes: Iterable[object]) -> None:
    """Raise ArgumentError unless all sizes of `what` are ints: True and 64.0 are equal to one, and would pass for it in a cache."""
    for size in sizes:
        if type(size) is not int:
            raise ArgumentError(f"sizes of {what} are whole numbers, got {size!r}: pass an int")


def model_path(value: str | PathLike[str]) -> Path:
    """The path of a model, as a user names it; raises ArgumentError for what names none."""
    what = "a model is named by its folder or file, a str or a Path"
    check_type(value, (str, PathLike), what, "pass its path")
    name = fspath(value)
    if not isinstance(name, str) or not name or "\0" in name:
        raise ArgumentError(f"{what}, got {name!r}: " + ("write '.' for the current folder" if not name else "pass its path"))
    return Path(name)
