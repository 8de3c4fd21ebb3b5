"""The `halfbyte` section of config.json, which describes the tensors of a checkpoint. docs/engineering/checkpoint.md specifies it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any, cast

import torch

from halfbyte import __version__
from halfbyte.checkpoint.native.quantization_config import BITS, DTYPE_NAMES, DTYPES, SETTINGS, check_bits
from halfbyte.errors import ArgumentError, CheckpointError, FormatError, not_there
from halfbyte.formats.dense import dense_tensors, stored_bytes
from halfbyte.formats.spec import Format, as_format
from halfbyte.io.files import is_file, is_folder, is_there
from halfbyte.io.safetensors import is_shape, load_json
from halfbyte.io.tensors import TensorSpec
from halfbyte.layouts.folding import Fold
from halfbyte.nn.described import CONVOLUTIONS, KINDS, Calibrated, Scale, check_compute

SECTION = "halfbyte"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
VERSION = 1
STAGING = re.compile(r"\.halfbyte-[0-9a-f]{8}")  # names of subfolders with files of a checkpoint that is being written


@dataclass(frozen=True, slots=True)
class Weight:
    """A quantized weight.

    Attributes:
        kind: The kind of its module, one of KINDS.
        format: The format of its codes.
        shape: The shape of its codes.
        dtype: The dtype of the float weight that it represents, in which the module computes.
        error: Relative error when it was quantized, if known.
        compute, activation: How it is multiplied, as in `halfbyte.Config`.
        crc32: CRC-32 of each of its stored tensors: data, scale and perhaps zero.
        fold: How the codes of a convolution are arranged; None for other kinds.
        transposed: Whether the float module keeps its weight inputs first, [K, N] or [E, K, N].
    """

    kind: str
    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
    error: float | None = None
    compute: str = "auto"
    activation: str = "block"
    crc32: Mapping[str, int] = field(default_factory=dict)
    fold: Fold | None = None
    transposed: bool = False

    def stored(self, name: str) -> dict[str, TensorSpec]:
        """The tensors of the weight called `name`, by their names in the files."""
        tensors = dense_tensors(self.format, self.shape)
        return {f"{name}.{part}": TensorSpec(dtype, shape) for part, (dtype, shape) in tensors.items()}

    @property
    def float_shape(self) -> tuple[int, ...]:
        """The shape of the float weight: [N, K], [K, N] if `transposed`, or that of a convolution."""
        if self.transposed:
            return (*self.shape[:-2], self.shape[-1], self.shape[-2])
        if self.fold is None:
            return self.shape
        channels = math.prod(self.shape[1:]) // math.prod(self.fold.image_kernel)
        return tuple(self.fold.unfold(torch.empty(self.shape[0], channels, *self.fold.image_kernel, device="meta")).shape)

    @property
    def float_bytes(self) -> int:
        """Bytes of the weight when it is not quantized."""
        return TensorSpec(self.dtype, self.shape).nbytes

    @property
    def stored_bytes(self) -> int:
        return stored_bytes(self.format, self.shape)

    def to_json(self) -> dict[str, object]:
        entry: dict[str, object] = {
            "kind": self.kind,
            "format": str(self.format),
            "shape": list(self.shape),
            "dtype": DTYPE_NAMES[self.dtype],
            "compute": self.compute,
            "activation": self.activation,
            "crc32": dict(self.crc32),
        }
        if self.format.packed_bits:
            entry[BITS] = self.format.packed_bits
        if self.fold is not None:
            entry["kernel"] = list(self.fold.kernel)
            if self.fold.folded:
                entry["folded"] = self.fold.folded
            if self.fold.phases:
                entry["phases"] = list(self.fold.phases)
            if self.fold.phases or self.fold.depthwise:
                entry |= {"groups": self.fold.groups, "depthwise": self.fold.depthwise}
        if self.transposed:
            entry["transposed"] = True
        return entry if self.error is None else entry | {"error": self.error}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The section, parsed.

    Attributes:
        files: Names of the safetensors files, which are in the folder itself.
        weights: Name of a module + ".weight" -> its quantized weight.
        plain: Name of another tensor in the files -> CRC-32.
        tied: Name of a parameter -> name of the weight or plain tensor that it shares.
        static: The scales of a network on int8 codes, from which and the float network it is built; None for any other model.
        staging: A subfolder that may still hold other files (tokenizer, …) to be moved to their places.
        obsolete: Weight files of the previous checkpoint, which may still exist.
    """

    files: tuple[str, ...]
    weights: Mapping[str, Weight]
    plain: Mapping[str, int]
    tied: Mapping[str, str] = field(default_factory=dict)
    static: Calibrated | None = None
    staging: str | None = None
    obsolete: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        section: dict[str, object] = {
            "version": VERSION,
            "producer": f"halfbyte {__version__}",
            "files": list(self.files),
            "weights": {name: weight.to_json() for name, weight in self.weights.items()},
            "tied": dict(self.tied),
            "plain": dict(self.plain),
            "staging": self.staging,
            "obsolete": list(self.obsolete),
        }
        if (static := self.static) is not None:
            scales = {name: [scale.step, scale.zero] for name, scale in static.scales.items()}
            section["static"] = {"scales": scales, "floats": list(static.floats), "notes": list(static.notes)}
        return section


def read_manifest(folder: Path) -> tuple[dict[str, object], Manifest]:
    """config.json without the section, and the section. Raises CheckpointError where anything in it is inconsistent."""
    path = folder / CONFIG
    if not is_file(path):
        if not is_there(folder):
            if folder.suffix in (".gguf", ".safetensors"):
                raise not_there(folder, "a GGUF file, or a folder that save() or convert() made")
            raise CheckpointError(
                f"there is no folder {folder}: name one that save() or convert() made, or, for a model of the Hugging Face Hub, use "
                'transformers, AutoModelForCausalLM.from_pretrained(name, quantization_config=halfbyte.HalfbyteConfig("q4_0"))'
            )
        if folder.suffix == ".safetensors":
            raise CheckpointError(f"{folder} is not quantized by halfbyte, {_calls(folder)}")
        what = f"{folder} has no {CONFIG}" if is_folder(folder) else f"{folder} is neither a folder nor a GGUF file"
        raise CheckpointError(
            f"{what}: name a folder that save() or convert() made or transformers reads, of AWQ, GPTQ or compressed-tensors for example, "
            "or a GGUF file"
        )
    config = load_json(path)
    section = config.pop(SECTION, None)
    if section is not None:
        config.pop(SETTINGS, None)  # the same information for transformers
    if section is None:
        raise CheckpointError(f"{path} has no {SECTION!r} section: this model is not quantized by halfbyte, {_calls(folder)}")
    if not isinstance(section, dict) or section.get("version") != VERSION:
        version = short(section.get("version") if isinstance(section, dict) else section)
        raise CheckpointError(f"{path} has a {SECTION!r} section of version {version}, this halfbyte reads {VERSION}: use a newer one")
    try:
        return config, _parse(section)
    except (ArgumentError, FormatError, ArithmeticError, TypeError, ValueError) as e:
        raise CheckpointError(f"the {SECTION!r} section of {path} is damaged: {e}") from e


def _calls(source: Path) -> str:
    name = repr(str(source))
    return f"convert({name}, 'new_folder', 'q4_0') does it once, load({name}, format='q4_0') as it loads"


def _parse(section: Mapping[str, Any]) -> Manifest:
    weights = {name: _parse_weight(name, entry) for name, entry in _get(section, "weights", dict).items()}
    plain = _checksums(section, "plain")
    tied = _get(section, "tied", dict)
    if twice := (weights.keys() & plain.keys()) | (tied.keys() & (weights.keys() | plain.keys())):
        raise ValueError(f"{short(min(twice))} is listed twice")
    for name, owner in tied.items():
        if not isinstance(owner, str) or (owner not in weights and owner not in plain):
            raise ValueError(f"{short(name)} is tied to {short(owner)}, which is not a tensor of the files")
    staging = section.get("staging")
    if staging is not None and not (isinstance(staging, str) and STAGING.fullmatch(staging)):
        raise ValueError(f"the staging folder is called {short(staging)}, not .halfbyte- and 8 hexadecimal digits")
    return Manifest(
        files=tuple(plain_name(name) for name in _get(section, "files", list)),
        weights=weights,
        plain=plain,
        tied=tied,
        static=None if section.get("static") is None else _parse_static(_get(section, "static", dict)),
        staging=staging,
        obsolete=tuple(plain_name(name) for name in _get(section, "obsolete", list)),
    )


def _parse_weight(name: str, entry: object) -> Weight:
    if not isinstance(entry, dict) or not name.endswith(".weight"):
        raise ValueError(f"{short(name)} is not a weight: an object called <module>.weight")
    kind, dtype, shape, error = entry.get("kind"), entry.get("dtype"), entry.get("shape"), entry.get("error")
    compute, activation = entry.get("compute", "auto"), entry.get("activation", "block")
    if kind not in KINDS:
        raise ValueError(f"the kind of {short(name)} is one of {', '.join(KINDS)}, got {short(kind)}")
    if dtype not in DTYPES:
        raise ValueError(f"the dtype of {short(name)} is one of {', '.join(DTYPES)}, got {short(dtype)}")
    fmt = as_format(entry.get("format", ""))
    check_bits(fmt, entry)
    sizes = 3 if kind == "Experts" or (kind in CONVOLUTIONS and isinstance(fmt.block, int)) else 2
    if not (isinstance(shape, list) and len(shape) == sizes and is_shape(shape)):
        raise ValueError(f"the shape of {short(name)} is {sizes} sizes, got {short(shape)}")
    if error is not None and not (isinstance(error, int | float) and math.isfinite(error)):
        raise ValueError(f"the error of {short(name)} is a number, got {short(error)}")
    fold = _parse_fold(name, kind, entry, shape, fmt)
    check_compute(compute, activation)
    transposed = entry.get("transposed", False)
    if not isinstance(transposed, bool) or (transposed and kind not in ("Linear", "Experts")):
        raise ValueError(f"a Linear or experts may be transposed, true or false, got {short(transposed)} for {short(name)}")
    weight = Weight(kind, fmt, tuple(shape), DTYPES[dtype], error, compute, activation, _checksums(entry, "crc32"), fold, transposed)
    if weight.crc32.keys() != dense_tensors(fmt, weight.shape).keys():
        raise ValueError(f"{fmt} is not stored as {', '.join(weight.crc32)}, as {short(name)} is")
    return weight


def _parse_fold(name: str, kind: str, entry: Mapping[str, object], shape: Sequence[int], fmt: Format) -> Fold | None:
    """How the codes of a convolution are arranged. Raises ValueError where codes of `shape` cannot be."""
    kernel, phases = (cast("list[int]", entry.get(key, [])) for key in ("kernel", "phases"))
    if kind not in CONVOLUTIONS and kernel == []:
        return None
    given = is_shape(kernel) and len(kernel) == CONVOLUTIONS.get(kind) and is_shape(phases) and bool(phases) == ("Transpose" in kind)
    try:
        folded, groups = (cast("int", entry.get(key, default)) for key, default in (("folded", 0), ("groups", 1)))
        fold = Fold(tuple(kernel), tuple(phases), folded, groups, entry.get("depthwise") is True) if given else None
    except (ArgumentError, TypeError):
        fold = None
    if fold is None or bool(fold.folded) != (len(kernel) == 3) or not _fits(fold, shape, fmt):
        got = {key: entry[key] for key in ("kernel", "folded", "phases", "groups", "depthwise") if key in entry}
        raise ValueError(f"the kernel of {short(name)} is the sizes of a {kind}'s, got {short(got)}")
    return fold


def _fits(fold: Fold, shape: Sequence[int], fmt: Format) -> bool:
    """Whether codes of `shape` can be arranged so."""
    taps, channels = math.prod(fold.image_kernel), 1 if fold.depthwise else fold.channels
    divides = shape[1] == taps and shape[2] % channels == 0 if isinstance(fmt.block, int) else shape[1] % (taps * channels) == 0
    return divides and shape[0] % (fold.outputs * fold.groups) == 0


def _parse_static(entry: Mapping[str, object]) -> Calibrated:
    scales = {}
    for name, pair in _get(entry, "scales", dict).items():
        step, zero = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if not (isinstance(step, float | int) and 0 < step < math.inf and type(zero) is int and -128 <= zero <= 127):
            raise ValueError(f"the scale of {short(name)} is a positive step and a zero point in -128 … 127, got {short(pair)}")
        scales[name] = Scale(float(step), zero)
    floats, notes = _get(entry, "floats", list), _get(entry, "notes", list)
    if not all(isinstance(text, str) for text in (*floats, *notes)):
        raise ValueError("names of layers and notes are strings")
    return Calibrated(scales, tuple(floats), tuple(notes))


def _checksums(section: Mapping[str, object], key: str) -> dict[str, int]:
    checksums: dict[str, int] = _get(section, key, dict)
    for name, value in checksums.items():
        if type(value) is not int or not 0 <= value < 1 << 32:
            raise ValueError(f"the CRC-32 of {short(name)} is {short(value)}")
    return checksums


def _get(section: Mapping[str, object], key: str, kind: type) -> Any:
    value = section.get(key)
    if not isinstance(value, kind):
        raise ValueError(f"{key!r} is of type {kind.__name__}, got {short(value)}")
    return value


def plain_name(name: object) -> str:
    """`name`, if it names a safetensors file in the folder itself; raises ValueError otherwise."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or any(c in name for c in "/\\:\0"):
        raise ValueError(f"{short(name)} is not the plain name of a safetensors file")
    return name
