"""The description of an operation: a `Problem` holds everything that the choice of a kernel depends on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, UnsupportedError, lookup
from halfbyte.formats.spec import Format
from halfbyte.kernels.layer_kinds import GateFunction
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import LONGEST_BLOCK

Op = Literal["linear", "qlinear", "embedding", "dequantize", "grouped_linear"]
Compute = Literal["float", "int8"]
Activation = Literal["block", "row", "block_offset", "row_offset"]
LONGEST_INTEGER_SUM = (2**31 - 1) // (255 * 128)  # products (x - in_zero) * q whose sum is an int32, for all int8 x, in_zero and q
AskedCompute = Literal["auto", "int8", "float"]  # what operations are asked for
COMPUTES: tuple[AskedCompute, ...] = get_args(AskedCompute)


def check_compute(compute: str) -> AskedCompute:
    """`compute`. Raises ArgumentError where there is no such."""
    for known in COMPUTES:
        if compute == known:
            return known
    raise ArgumentError(f"unknown compute {compute!r}: use one of {', '.join(COMPUTES)}")


class ActivationScaling(NamedTuple):
    """How activations are quantized on the fly: a scale for each row, or each block of the weight; with an offset, or symmetric."""

    whole_row: bool
    with_offset: bool


ACTIVATION_SCALINGS: dict[ConvActivation, ActivationScaling] = {
    "block": ActivationScaling(whole_row=False, with_offset=False),
    "row": ActivationScaling(whole_row=True, with_offset=False),
    "block_offset": ActivationScaling(whole_row=False, with_offset=True),
    "row_offset": ActivationScaling(whole_row=True, with_offset=True),
}
Pair = tuple[int, int]


def scaling_of(activation: ConvActivation) -> ActivationScaling:
    """Raises UnsupportedError for a scaling of activations that no kernel computes."""
    return lookup(ACTIVATION_SCALINGS, activation, "the scaling of activations")


@dataclass(frozen=True, slots=True)
class Problem:
    """One operation on a weight [n, k] in `format`.

    op          "linear": x [m, k] -> [m, n];  "qlinear": int8 x -> int8, requantized;  "embedding": m rows of the weight;
                "dequantize": all of them;  "grouped_linear": m rows, each times one of `experts` weights [n, k]
    dtype       of the activations and of the result: float32, bfloat16 or float16; int8 for "qlinear"
    compute     "float": the weight is dequantized in registers;  "int8": activations are quantized on the fly;  "auto": what `dispatch`
                prefers on a machine
    sparse      the weight is 2:4 sparse and packed as such
    paired      the bytes of the weight are in pairs (`layouts/gpu_tiles.py`)
    activation  how, for "int8": a scale for each block of the weight along K or for the row; symmetric or with an offset
    """

    op: Op
    m: int
    n: int
    k: int
    format: Format
    dtype: torch.dtype
    compute: AskedCompute = "float"
    activation: Activation = "block"
    experts: int = 1
    sparse: bool = False
    paired: bool = False

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 0:
            got = f"m={self.m}, n={self.n}, k={self.k}"
            raise ArgumentError(f"m, n and k are sizes of at least 0, got {got}: pass the rows of x and the sides of the weight")


@dataclass(frozen=True, slots=True)
class Window:
    """The stride, padding and dilation of a convolution.

    stride, dilation   (vertical, horizontal)
    padding            (top, bottom, left, right), with zeros
    """

    stride: Pair = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: Pair = (1, 1)

    def __post_init__(self) -> None:
        if min(*self.stride, *self.dilation) < 1 or min(self.padding) < 0:
            got = f"stride {self.stride}, dilation {self.dilation}, padding {self.padding}"
            raise ArgumentError(f"stride and dilation are 1 or more and padding is 0 or more, got {got}: pass those of the layer")

    @property
    def numbers(self) -> tuple[int, ...]:
        """(stride, padding, dilation), flat"""
        return (*self.stride, *self.padding, *self.dilation)

    def sizes(self, image: Pair, out: Pair, kernel: Pair) -> dict[str, int]:
        """The sizes (H, W) of an image, of the result and of the kernel, and how this moves over the image, by name."""
        size_pairs = {"stride": self.stride, "dilation": self.dilation, "kernel": kernel}
        numbers = {f"{name}_{way}": n for name, pair in size_pairs.items() for way, n in zip("hw", pair, strict=True)}
        top, _, left, _ = self.padding
        return numbers | {"height": image[0], "width": image[1], "out_height": out[0], "out_width": out[1], "top": top, "left": left}

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Window:
        """The inverse of `numbers`."""
        sh, sw, top, bottom, left, right, dh, dw = numbers
        return cls((sh, sw), (top, bottom, left, right), (dh, dw))

    def out_size(self, size: Pair, kernel: Pair) -> Pair:
        """(Ho, Wo) of an image (H, W). Raises ArgumentError where the kernel is larger than the padded image."""
        top, bottom, left, right = self.padding
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, self.dilation, strict=True)]
        room = [size[0] + top + bottom - reach[0], size[1] + left + right - reach[1]]
        if min(room) < 0:
            raise ArgumentError(
                f"a kernel that reaches over {reach[0]} x {reach[1]} takes an image at least as large, got {size[0]} x {size[1]} "
                f"with padding {self.padding}"
            )
        return room[0] // self.stride[0] + 1, room[1] // self.stride[1] + 1


Sizes = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[Sequence[int]]


def window_of(kernel: Pair, stride: Sizes, padding: Padding, dilation: Sizes) -> Window:
    """The window of a caller's stride, padding and dilation. Raises ArgumentError where they are none."""
    strides, dilations = _pair(stride, "stride"), _pair(dilation, "dilation")
    if padding == "same":
        if strides != (1, 1):
            raise ArgumentError(f'padding "same" takes stride 1, got {stride}')
        reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
        sides = reach[0] // 2, reach[0] - reach[0] // 2, reach[1] // 2, reach[1] - reach[1] // 2
    elif padding == "valid":
        sides = 0, 0, 0, 0
    elif isinstance(padding, str):
        raise ArgumentError(f'padding is "same", "valid" or whole numbers, got {padding!r}: write padding=0')
    else:
        given = flat(padding) if isinstance(padding, Sequence) else [padding] * 2
        sizes = [n for n in map(_whole, given) if n is not None]
        if len(given) not in (2, 4) or len(sizes) != len(given):
            allowed = "one whole number, (height, width) or ((top, bottom), (left, right))"
            raise ArgumentError(f"padding is {allowed}, got {padding!r}: write padding=0")
        sides = (sizes[0], sizes[0], sizes[1], sizes[1]) if len(sizes) == 2 else (sizes[0], sizes[1], sizes[2], sizes[3])
    return Window(strides, sides, dilations)


def _pair(value: Sizes, what: str) -> tuple[int, int]:
    sizes = [_whole(n) for n in value] if isinstance(value, Sequence) else [_whole(value)] * 2
    if len(sizes) != 2 or sizes[0] is None or sizes[1] is None:
        raise ArgumentError(f"{what} is one whole number or (height, width), got {value!r}: write {what}=1 or {what}=(1, 1)")
    return sizes[0], sizes[1]


def _whole(value: Any) -> int | None:
    """None where it is no whole number. 1.0 is one, as a cache takes them for the same key."""
    try:
        return int(value) if not isinstance(value, str) and value == int(value) else None
    except (TypeError, ValueError, OverflowError):
        return None


def flat(value: object) -> list[Any]:
    """The numbers of nested sequences."""
    return [n for item in value for n in flat(item)] if isinstance(value, Sequence) and not isinstance(value, str) else [value]


ConvActivation = Literal[Activation, "image"]


@dataclass(frozen=True)
class ConvProblem:
    """The convolution of images [batch, channels, *image].

    dtype       of images and of the result; int8: codes, which are requantized
    compute     as of Problem; depthwise convolutions are computed in floating point, whatever it says
    activation  as of Problem, or "image": a scale for each image
    outside     the code of what lies outside of an image of codes, where a choice depends on it
    """

    sizes: Filter
    window: Window
    batch: int
    image: Pair
    dtype: torch.dtype
    compute: AskedCompute = "float"
    activation: ConvActivation = "block"
    outside: int = 0

    @property
    def out(self) -> Pair:
        """(Ho, Wo)"""
        return self.window.out_size(self.image, self.sizes.kernel)

    @property
    def m(self) -> int:
        """Patches: outputs of a channel."""
        return self.batch * self.out[0] * self.out[1]

    @property
    def overlap(self) -> int:
        """Elements from one pixel to the next, where pixels overlap (`gpu/conv/stem.py`); otherwise 0."""
        return 0

    @property
    def n(self) -> int:
        """Outputs of one group."""
        return self.sizes.out // self.sizes.groups

    def why_long(self) -> str | None:
        """Why no kernel has its sums, which are too long for int32; None if they are not."""
        if self.dtype != torch.int8 or self.sizes.k <= LONGEST_INTEGER_SUM:
            return None
        return f"sums of {self.sizes.k} products may overflow an int32: torch adds them up in float64"

    @property
    def flat(self) -> ConvProblem:
        """The same problem with each pixel as an image, if pixels are multiplied one by one: no pixel's position is computed then."""
        if self.sizes.taps > 1 or self.window != Window():
            return self
        return replace(self, batch=self.m, image=(1, 1))


AttentionKind = Literal["decode", "prefill", "encode"]


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """The attention of `heads` queries to `kv_heads` keys and values, of `head_dim` numbers each.

    kind        "decode": one new token of each sequence and a cache of fixed size, to which it is added;  "prefill": tokens of prompts;
                "encode": all tokens see each other, without a cache
    batch, tokens   sequences, and new tokens of each
    dtype       of queries
    cache       "float": keys and values in the same type;  "int8": codes (`layouts/records.py`), which a prefill reads dequantized
    rotary_dim  numbers of a head that have positions; None: all
    norm_width  numbers that a norm of all heads together covers; None: there is none
    softcap     whether scores have a soft cap
    """

    kind: AttentionKind
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cache: Literal["float", "int8"] = "float"
    rotary_dim: int | None = None
    norm_width: int | None = None
    softcap: bool = False

    def __post_init__(self) -> None:
        if min(self.batch, self.tokens, self.heads, self.kv_heads, self.head_dim) < 1:
            got = f"{self.batch} x {self.tokens} tokens, {self.heads} and {self.kv_heads} heads of {self.head_dim}"
            raise ArgumentError(f"attention has sizes of at least 1, got {got}: pass those of the model")


@dataclass(frozen=True, slots=True)
class ExpertsProblem:
    """A mixture of experts: `rows` tokens of `hidden` numbers go to `top_k` of `experts`, each with `inner` gated numbers.

    gate_up, down  formats of the stacks [experts, 2 * inner, hidden] and [experts, hidden, inner]
    compute        as of Problem
    clamped        whether gates are those of gpt-oss
    biased         whether gate_up has a bias
    """

    rows: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    gate_up: Format
    down: Format
    dtype: torch.dtype
    compute: AskedCompute = "auto"
    activation: Activation = "block"
    clamped: bool = False
    biased: bool = False

    def __post_init__(self) -> None:
        if min(self.rows, self.experts, self.top_k, self.hidden, self.inner) < 1 or self.top_k > self.experts:
            got = f"{self.rows} rows, {self.top_k} of {self.experts} experts, {self.hidden} and {self.inner}"
            raise ArgumentError(f"a mixture has sizes of at least 1, and at least top_k experts, got {got}: pass those of the model")

    @property
    def first(self) -> Problem:
        """The product with gate_up."""
        rows, how = self.rows * self.top_k, (self.compute, self.activation)
        return Problem("grouped_linear", rows, 2 * self.inner, self.hidden, self.gate_up, self.dtype, *how, experts=self.experts)

    @property
    def second(self) -> Problem:
        """The product with down."""
        rows, how = self.rows * self.top_k, (self.compute, self.activation)
        return Problem("grouped_linear", rows, self.hidden, self.inner, self.down, self.dtype, *how, experts=self.experts)


@dataclass(frozen=True, slots=True)
class NormedProblem:
    """A linear layer with what is around it: an RMS norm of x before, gates among its outputs after.

    normed, gated, biased  whether there are such a norm, gates and a bias
    """

    product: Problem
    normed: bool = True
    gated: bool = False
    biased: bool = False


def check_one_scale(sizes: Filter) -> None:
    """Raises UnsupportedError for a weight that `activation="image"` does not support."""
    fmt = sizes.format
    if fmt.zero != "none" or isinstance(fmt.block, int):
        raise UnsupportedError(
            f"activation='image' takes weights with a scale per channel or tensor and no zero, got {fmt}: use int8_channel, or 'row'"
        )
    if sizes.k > LONGEST_BLOCK:
        raise UnsupportedError(f"activation='image' takes patches of at most {LONGEST_BLOCK} numbers, got {sizes.k}: use 'row'")


class Combination(NamedTuple):
    """y = clamp(b * scale_b + (a * scale_a + offset)) of one or two tensors, element by element.

    Each product is added and rounded at once, in float32. `dtype` is the result's: float32, bfloat16, float16, or int8, which is the
    nearest integer, ties to even. A NaN becomes `low` in int8, and stays elsewhere.
    """

    dtype: torch.dtype
    scale_a: float
    offset: float = 0.0
    scale_b: float = 0.0
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True, eq=False, slots=True)
class Addition:
    """What happens to int8 codes before they are written: `how` of them and of others.

    other   int8 [m, n]; what broadcasts with the codes where they are added afterwards (`of`)
    codes_first   the codes are the Combination's first tensor, `other` is its second; or the other way around
    """

    other: Tensor
    how: Combination
    codes_first: bool

    @property
    def numbers(self) -> tuple[float, ...]:
        """The scale of the first and of the second, the offset, and the clamp."""
        return self.how.scale_a, self.how.scale_b, self.how.offset, self.how.low, self.how.high

    def of(self, codes: Tensor) -> tuple[Tensor, Combination, Tensor]:
        """What `combine` takes to do it to codes."""
        other = self.other
        if other.shape != codes.shape:
            codes, other = torch.broadcast_tensors(codes, other)
        return (codes, self.how, other) if self.codes_first else (other, self.how, codes)


LOW_RANK = 32  # of branches that `gemm_int8_hopper` adds


@dataclass(frozen=True, eq=False, slots=True)
class Epilogue:
    """What happens to sums before they are written: y = clamp(sum + bias + residual, low, high), rounded once to y's type.

    bias      floating point [n], or None
    residual  [m, n] in the activations' type, or None
    low_rank  what is added to the sums of `gemm_int8_hopper`: inner [m, branches * 32], contiguous, times outer [n, 32]^T, both in the
              activations' type; the i-th of as many equal parts of n takes the i-th 32 columns of `inner`
    gates     the sum is that of two: factor * f(sum[i]) * sum[i + n / 2], so that y, bias and residual have n / 2 columns; f, as in
              `layer_kinds.py`. `skinny` and `skinny_hopper` have it
    table     of a convolution of codes, whose sums are requantized to codes: as `ops.conv.cuda.table` has it; None: of any other product
    outside   the code of what lies outside of an image of codes
    addition  what happens to codes then, with the `residual` as others
    """

    bias: Tensor | None = None
    residual: Tensor | None = None
    low: float = -math.inf
    high: float = math.inf
    gates: GateFunction | Literal[""] = ""
    factor: float = 1.0
    low_rank: tuple[Tensor, Tensor] | None = None
    table: Tensor | None = None
    outside: int = 0
    addition: Addition | None = None

    @classmethod
    def of_codes(cls, table: Tensor, outside: int, clamp: tuple[int, int], addition: Addition | None = None) -> Epilogue:
        """Requantization, and what happens to the codes then."""
        other = None if addition is None else addition.other
        return cls(None, other, float(clamp[0]), float(clamp[1]), table=table, outside=outside, addition=addition)

    @property
    def clamps(self) -> bool:
        return self.low != -math.inf or self.high != math.inf

    @property
    def numbers(self) -> tuple[float, ...]:
        """The clamp, and those of the addition."""
        return self.low, self.high, *(() if self.addition is None else self.addition.numbers)

    @property
    def codes_first(self) -> bool:
        """Whether codes are the first tensor of the addition."""
        return self.addition is not None and self.addition.codes_first
