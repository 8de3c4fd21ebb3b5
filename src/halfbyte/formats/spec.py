"""How a quantized number is stored: `Format`, its names, and the grammar that parses and prints them.

Names:  int{4|8}_{g<block>|channel|tensor}[_zp|_offset][_f16|_bf16|_f32]
        {fp4|iq4}_{g<block>|channel|tensor}[_f16|_bf16|_f32]
        int{5|6}_g<block>[_offset][_f16|_bf16|_f32]
The scale's dtype is omitted where it is the default: float16 for blocks, float32 for a channel or a tensor.
Other projects' formats go by their own names: q4_0, q4_1, q8_0, q8_1, iq4_nl (ggml), inferllm_q4_0, inferllm_q8_0, mxfp4 (OCP),
nvfp4 (NVIDIA).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch

from halfbyte.errors import FormatError, lookup, unreachable

Zero = Literal["none", "point", "offset"]
Family = Literal["int", "ggml", "inferllm", "fp4", "iq4", "int5", "int6"]
Scope = int | Literal["channel", "tensor"]

# The one list of the dtypes of scales and offsets, by their names in the grammar.
SCALE_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_SCALE_NAMES = {dtype: name for name, dtype in SCALE_DTYPES.items()}
# The codes that 4-bit indices stand for, by family: twice the values of 4-bit floats (e2m1), and ggml's kvalues_iq4nl.
CODEBOOKS: dict[str, tuple[int, ...]] = {
    "fp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
PACKED_BITS = {"int5": 5, "int6": 6}  # bits of integers that take a byte in memory, by family
# The fields of a Format, in their order, for formats of other projects.
_FOREIGN: dict[str, tuple[int, Scope, Zero, torch.dtype, Family, bool]] = {
    "q4_0": (4, 32, "none", torch.float16, "ggml", False),
    "q4_1": (4, 32, "offset", torch.float16, "ggml", False),
    "q8_0": (8, 32, "none", torch.float16, "ggml", False),
    "q8_1": (8, 32, "none", torch.float16, "ggml", True),
    "inferllm_q4_0": (4, 32, "none", torch.float32, "inferllm", False),
    "inferllm_q8_0": (8, 32, "none", torch.float32, "inferllm", False),
}
_USUAL = ("int4_g128", "int4_g64", "int4_g32", "int4_g128_zp", "int4_channel", "int8_channel", "int8_tensor", "int8_g128")  # suggested
# The formats nearest to those that halfbyte lacks, by a pattern of their names: K-quants, nf4, fp8, w4a16.
_NEAREST = {
    r"i?q[1-4]_.*": "q4_0",
    r"q5_.*": "int5_g32",
    r"q6_.*": "int6_g16",
    r"q[78]_.*": "q8_0",
    r"nf4.*": "int4_g64",
    r"[a-z]*fp4.*": "mxfp4",
    r"w4.*|4_?bits?": "int4_g128",
    r"fp8.*|w8.*|8_?bits?": "int8_channel",
}
_ZERO_SUFFIXES: dict[Zero, str] = {"none": "", "point": "_zp", "offset": "_offset"}
_ZEROS: dict[str | None, Zero] = {suffix or None: zero for zero, suffix in _ZERO_SUFFIXES.items()}


def _grammar() -> re.Pattern[str]:
    """Return the pattern of the names that are spelled out."""
    family, zero, scale = ("|".join(filter(None, names)) for names in ((*CODEBOOKS, *PACKED_BITS), _ZERO_SUFFIXES.values(), SCALE_DTYPES))
    number = rf"(?:int(?P<bits>4|8)|(?P<family>{family}))"
    scope = r"(?:g(?P<block>[1-9]\d{0,8})|(?P<scope>channel|tensor))"
    return re.compile(rf"{number}_{scope}(?P<zero>{zero})?(?:_(?P<scale>{scale}))?", re.ASCII)


_GRAMMAR = _grammar()
_SCALE_SUFFIXES = f"[_{'|_'.join(SCALE_DTYPES)}]"


@dataclass(frozen=True, slots=True)
class Format:
    """How a number w is stored, as the code q.

        w = scale * q                 zero = "none"
        w = scale * (q - point)       zero = "point",  an integer zero point in the range of q
        w = scale * q + offset        zero = "offset", a float of the scale's dtype

    Codes without a zero are signed, [-2^(b-1), 2^(b-1) - 1]; with one they are unsigned, [0, 2^b - 1]; b is `stored_bits`.

    Attributes:
        bits: 4 or 8.
        block: Elements along K that share a scale, or "channel" (one scale per row), or "tensor" (one for all).
        scale: dtype of scales and offsets.
        family: Whose rounding rules quantizers follow: "int" (scale = amax / q_max, nearest even), "ggml" or "inferllm"; a key of
            `CODEBOOKS`: codes are indices in that codebook; "int5" or "int6": "int" with codes of so many bits, which take 8 in memory.
        sums: Whether each block also has scale * sum(q) in files (Q8_1).

    Example:
        >>> hb.Format(4, 32, scale=torch.bfloat16).bits
        4
    """

    bits: int
    block: Scope
    zero: Zero = "none"
    scale: torch.dtype = torch.float16
    family: Family = "int"
    sums: bool = False

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (4, 8):  # 4.0 == 4
            raise FormatError(f"a format has 4 or 8 bits, not {self.bits!r}")
        if self.block not in ("channel", "tensor") and not (type(self.block) is int and 0 < self.block < 10**9):
            raise FormatError(f'a format\'s block is a positive number of elements, "channel" or "tensor", not {self.block!r}')
        if self.zero not in _ZERO_SUFFIXES:
            allowed = _listed(f'"{zero}"' for zero in _ZERO_SUFFIXES)
            raise FormatError(f"a format's zero is {allowed}, not {self.zero!r}")
        if self.scale not in _SCALE_NAMES:
            allowed = _listed(str(dtype).removeprefix("torch.") for dtype in _SCALE_NAMES)
            raise FormatError(f"a format's scales are {allowed}, not {self.scale!r}")
        fields = (self.bits, self.block, self.zero, self.scale, self.family, self.sums)
        if self.codebook and (self.bits, self.zero, self.sums) != (4, "none", False):
            raise FormatError(f"a {self.family} format has 4 bits, no zero and no sums, got {self!r}")
        if self.packed_bits and (self.bits != 8 or not isinstance(self.block, int) or self.zero == "point" or self.sums):
            raise FormatError(
                f"a format of {self.packed_bits} bits has blocks, bytes, no zero points and no sums, got {self!r}: "
                f"write int{self.packed_bits}_g32"
            )
        if (self.family != "int" or self.sums) and not self.has_limited_codes and fields not in _FOREIGN.values():
            raise FormatError(f"{self!r} is none of the formats of other projects: use {', '.join(_FOREIGN)}, or family='int' without sums")

    @property
    def signed(self) -> bool:
        """Whether codes are signed integers: those without a zero are."""
        return self.zero == "none"

    @property
    def zero_dtype(self) -> torch.dtype | None:
        """The dtype of stored zero points or offsets; None where there are none."""
        match self.zero:
            case "none":
                return None
            case "point":
                return torch.uint8
            case "offset":
                return self.scale
            case _:
                raise unreachable(self.zero, "the zero of a format")

    @property
    def codebook(self) -> tuple[int, ...]:
        """The codes that stored numbers are indices of; empty where stored numbers are the codes, up to a constant."""
        return CODEBOOKS.get(self.family, ())

    @property
    def packed_bits(self) -> int:
        """Bits of a code in files and in the CPU's layout, where it takes 8 in memory; else 0."""
        return PACKED_BITS.get(self.family, 0)

    @property
    def stored_bits(self) -> int:
        """Bits of a code in files and in the CPU's layout."""
        return self.packed_bits or self.bits

    @property
    def has_limited_codes(self) -> bool:
        """Whether codes are only some of the integers of 8 bits: those of a codebook, or those of 5 or 6 bits."""
        return self.family in CODEBOOKS or self.family in PACKED_BITS

    @property
    def code_bits(self) -> int:
        """Bits of an integer that holds any code."""
        return 8 if self.codebook else self.bits

    @property
    def pad_index(self) -> int:
        """The stored number, unsigned, that pads a block: that of the code 0, or of 1 in iq4, which has no 0."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def q_min(self) -> int:
        """The least code."""
        return min(self.codebook) if self.codebook else -(1 << (self.stored_bits - 1)) if self.signed else 0

    @property
    def q_max(self) -> int:
        """The largest code."""
        return max(self.codebook) if self.codebook else (1 << (self.stored_bits - self.signed)) - 1

    def block_size(self, k: int) -> int:
        """Return how many elements of a row of K share a scale: from 1 to K, 1 for K = 0."""
        return max(1, min(self.block, k)) if isinstance(self.block, int) else max(1, k)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales, and of the zeros, of a weight [..., N, K]: [..., N, blocks], or ones for one of the tensor."""
        if self.block == "tensor":
            return (1,) * len(shape)
        k = shape[-1]
        return (*shape[:-1], -(-k // self.block_size(k)) if k else 0)

    def bits_per_weight(self, k: int) -> float:
        """Return the bits in files per weight in a row of K, with scales and zeros; without the one scale of a tensor."""
        if self.block == "tensor":
            return float(self.stored_bits)
        return self.stored_bits + 8 * (self.scale.itemsize + zero_size(self.zero, self.scale.itemsize)) / self.block_size(k)

    def with_scale(self, dtype: torch.dtype) -> Format:
        """Return the format of the same codes with scales of another dtype, and without another project's rules."""
        return replace(self, scale=dtype, family=self.family if self.has_limited_codes else "int", sums=False)

    @classmethod
    def of_floats(cls, dtype: torch.dtype) -> Format:
        """Return the format that holds any tensor of `dtype` without rounding: each element is a block, with scale = w and q = 1.

        Kernels for codes thus multiply by weights that were not quantized, which take 3 to 4 times their memory on a CPU.
        """
        return cls(4, 1, scale=dtype)

    @property
    def is_of_floats(self) -> bool:
        """Whether it is one of `of_floats`."""
        return self == Format.of_floats(self.scale)

    @property
    def integers(self) -> Format:
        """The format of plain integers of 4 or 8 bits that holds the same codes."""
        return replace(self, bits=8, family="int") if self.has_limited_codes else self

    def __str__(self) -> str:
        if self in _NAMES:
            return _NAMES[self]
        scope = f"g{self.block}" if isinstance(self.block, int) else self.block
        scale = "" if self.scale == usual_scale(self.block) else "_" + _SCALE_NAMES[self.scale]
        return f"{self.family if self.has_limited_codes else f'int{self.bits}'}_{scope}{_ZERO_SUFFIXES[self.zero]}{scale}"


def _listed(names: Iterable[str]) -> str:
    """Return the names as "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def zero_size(zero: Zero, number_bytes: int) -> int:
    """Return the bytes of a zero point or offset that is stored with a scale of `number_bytes`."""
    match zero:
        case "none":
            return 0
        case "point":
            return 1
        case "offset":
            return number_bytes
        case _:
            raise unreachable(zero, "the zero of a format")


def codebook(family: Family | Literal[""]) -> tuple[int, ...]:
    """Return the codes that indices of a family with a codebook stand for; none for ""."""
    return lookup(CODEBOOKS, family, "the codebook") if family else ()


def usual_scale(block: Scope) -> torch.dtype:
    """Return the dtype of scales that names omit."""
    return torch.float16 if isinstance(block, int) else torch.float32


PRESETS: dict[str, Format] = {name: Format(*fields) for name, fields in _FOREIGN.items()}
OF_CODEBOOKS = {
    "mxfp4": Format(4, 32, scale=torch.bfloat16, family="fp4"),
    "nvfp4": Format(4, 16, scale=torch.float32, family="fp4"),
    "iq4_nl": Format(4, 32, family="iq4"),
}
_NAMED = PRESETS | OF_CODEBOOKS
_NAMES = {preset: name for name, preset in _NAMED.items()}


def _suggestion(name: object) -> str:
    """Return " (did you mean …?)" for a misspelled format, " (the nearest is …)" for formats that halfbyte lacks; "" for anything else."""
    if not isinstance(name, str):
        return ""
    spelled = re.sub(r"[-\s]", "_", name.strip().lower())
    if spelled in _NAMED or _GRAMMAR.fullmatch(spelled):
        return f" (did you mean {spelled}?)"
    if nearest := next((ours for pattern, ours in _NEAREST.items() if re.fullmatch(pattern, spelled)), None):
        return f" (the nearest is {nearest})"
    usual = [*_USUAL, *_NAMED]
    prefixed = [format_name for format_name in usual if spelled and format_name.startswith(spelled)]
    near = prefixed or difflib.get_close_matches(spelled, usual, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def as_format(name: str | Format) -> Format:
    """Parse the name of a format.

    Args:
        name: A name such as "q4_0" or "int4_g128_zp"; a Format is returned as it is.

    Returns:
        The Format.

    Raises:
        FormatError: No format has this name.

    Example:
        >>> hb.as_format("int4_g128_zp").block
        128
        >>> str(hb.as_format("int8_channel"))
        'int8_channel'
    """
    if isinstance(name, Format):
        return name
    if isinstance(name, str) and name in _NAMED:
        return _NAMED[name]
    match = _GRAMMAR.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise FormatError(
            f"unknown format {name!r}{_suggestion(name)}: use one of {', '.join(_NAMED)} or spell it out as "
            f"int{{4|8}}_{{g<block>|channel|tensor}}[_zp|_offset]{_SCALE_SUFFIXES} or int{{5|6}}_g<block>[_offset]{_SCALE_SUFFIXES}, "
            "for example int4_g128_zp"
        )
    block: Scope = int(match["block"]) if match["block"] else "channel" if match["scope"] == "channel" else "tensor"
    family = cast("Family", match["family"] or "int")
    bits = 8 if family in PACKED_BITS else int(match["bits"] or 4)
    return Format(bits, block, _ZEROS[match["zero"]], SCALE_DTYPES[match["scale"]] if match["scale"] else usual_scale(block), family)
