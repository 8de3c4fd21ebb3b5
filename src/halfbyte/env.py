"""The HALFBYTE_* environment variables: one accessor each, read when called, never at import."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from platformdirs import user_cache_path

from halfbyte.errors import ArgumentError

Isa = Literal[
    "amx_int8",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "avx512",
    "avx2",
    "sve512",
    "neon_i8mm",
    "sve256",
    "neon_dotprod",
    "neon",
    "rvv",
    "rv64gc",
    "generic",
]
ISAS: tuple[Isa, ...] = get_args(Isa)

_MAX_THREADS = 4096
_PACKED_GB, _MAX_PACKED_GB = 16, 1_000_000


class Variable(NamedTuple):
    """One environment variable. `default` describes what applies where it is not set."""

    name: str
    meaning: str
    default: str


VARIABLES = (
    Variable("HALFBYTE_API_KEY", "key that requests to `halfbyte serve` must have", "none is needed"),
    Variable("HALFBYTE_CACHE", "folder for compiled kernels and measured choices", "the user's cache folder"),
    Variable("HALFBYTE_CHECK", "0: `optimize_` does not compare a model with the plain one the first time", "it compares"),
    Variable("HALFBYTE_DUMP", "folder that receives the IR and assembly of every kernel compiled", "nothing is written"),
    Variable("HALFBYTE_ISA", f"instruction set of the CPU kernels: {', '.join(ISAS[:-1])} or {ISAS[-1]}", "the best that the CPU has"),
    Variable(
        "HALFBYTE_PACKED_GB",
        "gigabytes of packed weights of language models that are kept in the cache folder, from which they are opened again; 0: none",
        "16, less where the disk is nearly full",
    ),
    Variable("HALFBYTE_THREADS", "threads of the CPU kernels, 1 or more", "as many as torch uses"),
    Variable("HALFBYTE_TUNE", "1: measure GPU kernels for each new shape, and keep the times in the cache folder", "nothing is measured"),
    Variable(
        "HALFBYTE_VLLM_KERNELS",
        "0: vLLM runs AWQ, GPTQ and compressed-tensors checkpoints on its own kernels only",
        "they run on halfbyte's kernels",
    ),
)
SECRET = {"HALFBYTE_API_KEY"}  # variables whose values are not shown


NO_HOME = "this user has no home folder"  # why `cache` returns None


def api_key() -> str | None:
    """The API key of `halfbyte serve` (HALFBYTE_API_KEY), or None."""
    return _text("HALFBYTE_API_KEY")


def cache() -> Path | None:
    """The folder for compiled kernels and measured times (HALFBYTE_CACHE). It need not exist yet.

    None where it is not set and the user has no home folder, as in a container that runs under a user id without an entry. Raises
    ArgumentError if it is something other than a folder.
    """
    if (named := _folder("HALFBYTE_CACHE")) is not None:
        return named
    try:
        return user_cache_path("halfbyte", appauthor=False)
    except RuntimeError:  # platformdirs expands "~"
        return None


def dump() -> Path | None:
    """The folder that receives IR and assembly (HALFBYTE_DUMP), or None. It need not exist yet.

    Raises ArgumentError if it is something other than a folder.
    """
    return _folder("HALFBYTE_DUMP")


def isa() -> Isa | None:
    """The instruction set that the user demands (HALFBYTE_ISA), or None. Raises ArgumentError for an unknown name."""
    text = _text("HALFBYTE_ISA")
    if text is None:
        return None
    for name in ISAS:
        if name == text.lower():
            return name
    raise ArgumentError(f"HALFBYTE_ISA is {text!r}: use one of {', '.join(ISAS)}, or unset it")


def threads() -> int | None:
    """Threads for the CPU kernels (HALFBYTE_THREADS), or None. Raises ArgumentError for anything but a whole number from 1 to 4096."""
    text = _text("HALFBYTE_THREADS")
    if text is None:
        return None
    # The length is checked first: int() raises its own error for thousands of digits.
    if len(text) > 9 or not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= _MAX_THREADS:
        raise ArgumentError(f"HALFBYTE_THREADS is {text!r}: use a whole number from 1 to {_MAX_THREADS}, or unset it")
    return int(text)


def packed_bytes() -> int:
    """Bytes of packed weights that are kept in the cache folder, at most (HALFBYTE_PACKED_GB, in 10^9 bytes).

    Raises ArgumentError for anything but a number from 0 to 1000000.
    """
    text = _text("HALFBYTE_PACKED_GB")
    if text is None:
        return _PACKED_GB * 10**9
    if not re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,9})?", text) or (gigabytes := float(text)) > _MAX_PACKED_GB:
        raise ArgumentError(f"HALFBYTE_PACKED_GB is {text!r}: use a number from 0 to {_MAX_PACKED_GB}, or unset it")
    return int(gigabytes * 10**9)


def check() -> bool:
    """Whether `optimize_` compares a model with the plain one (HALFBYTE_CHECK). Raises ArgumentError for anything but 0 and 1."""
    return _switch("HALFBYTE_CHECK", default=True)


def tune() -> bool:
    """Whether GPU kernels are measured for each new shape (HALFBYTE_TUNE). Raises ArgumentError for anything but 0 and 1."""
    return _switch("HALFBYTE_TUNE", default=False)


def vllm_kernels() -> bool:
    """Whether vLLM may run other projects' checkpoints on halfbyte's kernels (HALFBYTE_VLLM_KERNELS).

    Raises ArgumentError for anything but 0 and 1.
    """
    return _switch("HALFBYTE_VLLM_KERNELS", default=True)


def _switch(name: str, *, default: bool) -> bool:
    text = _text(name)
    if text not in (None, "0", "1"):
        raise ArgumentError(f"{name} is {text!r}: use 1 or 0, or unset it")
    return default if text is None else text == "1"


def unknown() -> list[str]:
    """Names in the environment that begin with HALFBYTE_ and are not known, sorted: most likely misspelt."""
    known = {variable.name for variable in VARIABLES}
    return sorted(name for name in os.environ if name.startswith("HALFBYTE_") and name not in known)


def _text(name: str) -> str | None:
    """The value without surrounding blanks; empty counts as not set."""
    return os.environ.get(name, "").strip() or None


def _folder(name: str) -> Path | None:
    text = _text(name)
    if text is None:
        return None
    try:
        path = Path(text).expanduser().absolute()
        if not path.exists() or path.is_dir():  # in this order, or a folder that another process makes in between is none
            return path
    except (OSError, RuntimeError, ValueError) as error:  # an unknown ~user, a name that the file system refuses
        raise ArgumentError(f"{name} is {text!r}, which cannot be a folder ({error}): name another, or unset it") from error
    raise ArgumentError(f"{name} is {text!r}, which is not a folder: name another, or unset it")
