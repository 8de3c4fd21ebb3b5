"""`explain` of convolutions, attention and mixtures of experts: which kernel runs, on which device, and why no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from halfbyte.dispatch.candidate import Choice
from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.explain_gpu import described_gpu
from halfbyte.dispatch.packed import packed_format
from halfbyte.errors import ArgumentError, check_whole
from halfbyte.formats.spec import Format
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.problem import (
    AttentionProblem,
    ConvProblem,
    ExpertsProblem,
    Padding,
    Problem,
    Sizes,
    check_compute,
    window_of,
)
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.folding import Fold
from halfbyte.machine import Gpu, machine, named_device

AnyChoice: TypeAlias = Choice[Any, Any]  # the choice for a problem of any kind


@dataclass(frozen=True)
class ConvShape:
    """A convolution, for `explain`.

    Args:
        image: Shape of x, [B, C, H, W], or of videos, [B, C, D, H, W].
        weight: Shape of the weight, [Co, C / groups, Kh, Kw] or [Co, C / groups, Kd, Kh, Kw].
        stride, padding, dilation: As for `conv2d`; in three dimensions a whole number or three.
        groups: Groups of the convolution.

    Example:
        >>> shape = hb.ConvShape((1, 64, 56, 56), (64, 64, 3, 3), padding=1)
        >>> print(hb.explain(shape, format="int8_channel", device="sm_90") is not None)
        True
    """

    image: Sequence[int]
    weight: Sequence[int]
    stride: Sizes = 1
    padding: Padding = 0
    dilation: Sizes = 1
    groups: int = 1


@dataclass(frozen=True)
class AttentionShape:
    """Attention, for `explain`.

    Args:
        batch: Sequences.
        heads, kv_heads: Heads of queries, and of keys and values.
        head_dim: Numbers of a head.
        tokens: New tokens of each sequence: 1 is decoding, more are a prompt.
        cache: "float", "int8", or None: all tokens see each other, as in an encoder.

    Example:
        >>> print(hb.explain(hb.AttentionShape(1, 32, 8, 128), dtype=torch.bfloat16, device="sm_90") is not None)
        True
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int = 1
    cache: Literal["float", "int8"] | None = "float"


@dataclass(frozen=True)
class ExpertsShape:
    """A mixture of experts with gated MLPs, for `explain`.

    Args:
        rows: Tokens.
        experts, top_k: Number of experts, and how many of them a token goes to.
        hidden, inner: Width of a token, and of an expert's MLP.

    Example:
        >>> print(hb.explain(hb.ExpertsShape(1, 8, 2, 4096, 14336), format="q4_0", device="sm_90") is not None)
        True
    """

    rows: int
    experts: int
    top_k: int
    hidden: int
    inner: int


Shape = ConvShape | AttentionShape | ExpertsShape


@dataclass(frozen=True)
class ShapeExplanation:
    """What `explain` found for a convolution, attention or a mixture of experts. Nothing is timed.

    Attributes:
        text: What was asked for, on one line.
        machine: The GPU, or the instruction set.
        choice: The kernel, and the reasons against others; nothing taken: torch's operations.
        fallback: Of a convolution on a CPU whose kernel rearranges weights, the name of the kernel for those that do not fit it.
        products: The linear layers that it consists of, by name, with the choice for each.
    """

    text: str
    machine: Gpu | ISA
    choice: AnyChoice
    fallback: str | None = None
    products: tuple[tuple[str, AnyChoice], ...] = ()

    @property
    def kernel(self) -> str:
        """Name of the kernel; "torch" where there is none."""
        return _name(self.choice)

    def to_json(self) -> dict[str, object]:
        """Return what is said as a document of JSON."""
        taken = self.choice.taken
        return {
            "op": self.text.split()[0],
            "problem": self.text,
            "machine": self.machine.name if isinstance(self.machine, Gpu) else machine().cpu,
            "arch" if isinstance(self.machine, Gpu) else "isa": self.machine.arch if isinstance(self.machine, Gpu) else self.machine.name,
            "kernel": self.kernel,
            "config": None if taken is None or taken.config is None else str(taken.config),
            "rejected": self.choice.reasons,
            "fallback": self.fallback,
            "products": {name: {"kernel": _name(choice), "rejected": choice.reasons} for name, choice in self.products},
        }

    def __str__(self) -> str:
        if isinstance(self.machine, Gpu):
            about = f"{self.machine.name}: {self.machine.arch}, {self.machine.sms} multiprocessors"
        else:
            about = f"{machine().cpu}: {self.machine.name}"
        lines = [self.text, f"machine  {about}", *_told("kernel", self.choice)]
        if self.fallback is not None:
            lines.append(f"otherwise  {self.fallback}: takes the weights that do not fit {self.kernel}")
        for name, choice in self.products:
            lines += _told(name, choice)
        return "\n".join(lines)


def _name(choice: AnyChoice) -> str:
    return "torch" if choice.taken is None else choice.taken.candidate.name


def _told(label: str, choice: AnyChoice) -> list[str]:
    """A choice in words."""
    taken = choice.taken
    lines = [f"{label}  none: torch's operations"] if taken is None else [f"{label}  {taken.candidate.name}: {taken.candidate.summary}"]
    if taken is not None and taken.config is not None:
        lines.append(f"config  {taken.config}")
    return lines + [f"  not {name}: {reason}" for name, reason in choice.reasons.items()]


def explain_shape(
    shape: Shape, fmt: Format | None, dtype: torch.dtype, compute: str, activation: str, device: torch.device | str
) -> ShapeExplanation:
    """`explain` of a shape.

    Raises:
        ArgumentError: Sizes do not fit together, or there is no format where one is needed.
        UnsupportedError: No kernel solves it on that device, and torch's operations do not, either.
    """
    asked = named_device(device)
    on_cpu = asked is not None and asked.type == "cpu"
    here = current() if on_cpu else described_gpu(str(device))
    name = str(dtype).removeprefix("torch.")
    if isinstance(shape, AttentionShape):
        return _explain_attention(shape, dtype, here, name)
    if fmt is None:
        what = "convolution" if isinstance(shape, ConvShape) else "mixture of experts"
        raise ArgumentError(f'explain takes the format of the weights of a {what}, got none: pass format="int8_channel"')
    fmt = packed_format(fmt, on_cpu=on_cpu)
    if isinstance(shape, ConvShape):
        check_whole("a convolution", (*shape.image, *shape.weight, shape.groups))
        return _explain_conv(shape, fmt, dtype, (compute, activation), here)
    sizes = shape.rows, shape.experts, shape.top_k, shape.hidden, shape.inner
    check_whole("a mixture of experts", sizes)
    problem = ExpertsProblem(*sizes, fmt, fmt, dtype, check_compute(compute), activation)  # type: ignore[arg-type]
    choice = choose(problem, here)
    up, down = _product(choice.problem.first, here), _product(choice.problem.second, here)
    if isinstance(here, Gpu) and choice.taken is not None and choice.taken.config is not None:  # of gate_up, with gates
        up = replace(up, taken=replace(up.options[0], config=choice.taken.config))
        choice = replace(choice, taken=replace(choice.taken, config=None))
    experts = f"{shape.top_k} of {shape.experts} experts of [{2 * shape.inner}, {shape.hidden}] and [{shape.hidden}, {shape.inner}]"
    text = f"experts  [{shape.rows}, {shape.hidden}] x {experts} {fmt}, {name} activations"
    return ShapeExplanation(text, here, choice, products=(("gate_up", up), ("down", down)))


def _explain_attention(shape: AttentionShape, dtype: torch.dtype, here: Gpu | ISA, name: str) -> ShapeExplanation:
    if shape.cache not in ("float", "int8", None):
        raise ArgumentError(f'a cache is "float", "int8" or None, got {shape.cache!r}')
    kind: Literal["decode", "prefill", "encode"] = "encode" if shape.cache is None else "decode" if shape.tokens == 1 else "prefill"
    sizes = shape.batch, shape.tokens, shape.heads, shape.kv_heads, shape.head_dim
    check_whole("attention", sizes)
    problem = AttentionProblem(kind, *sizes, dtype, shape.cache or "float")
    if shape.heads % shape.kv_heads:
        raise ArgumentError(f"as many heads share each head of keys, got {shape.kv_heads} of keys for {shape.heads}: pass the model's")
    choice = choose(problem, here)
    cache = "no cache" if shape.cache is None else f"{shape.cache} cache"
    tokens = f"{shape.tokens} new token{'s' if shape.tokens > 1 else ''} of {shape.batch} sequence{'s' if shape.batch > 1 else ''}"
    heads = f"{shape.heads} heads of {shape.head_dim}, {shape.kv_heads} of keys and values"
    return ShapeExplanation(f"attention  {tokens}, {heads}, {cache}, {name} queries", here, choice)


def _explain_conv3d(shape: ConvShape, fmt: Format, dtype: torch.dtype, how: tuple[str, str], here: Gpu | ISA) -> ShapeExplanation:
    """A 3-D convolution is one of images, as `layouts/folding.py` says."""
    sizes = (*shape.image, *shape.weight, shape.groups)
    stride, padding, dilation = (
        _three(value, name) for name, value in (("stride", shape.stride), ("padding", shape.padding), ("dilation", shape.dilation))
    )
    (batch, channels, *size), (out, group_channels, *kernel) = shape.image, shape.weight
    if min(*sizes, *stride, *dilation) < 1 or min(padding) < 0 or channels != group_channels * shape.groups or dtype == torch.int8:
        got = f"{list(shape.image)}, {list(shape.weight)}, {shape.groups} groups, stride {stride}, padding {padding} and {dtype}"
        raise ArgumentError(
            f"a 3-D convolution has floating-point videos [B, C, D, H, W] and a weight [Co, C / groups, Kd, Kh, Kw], got {got}"
        )
    fold = Fold.of(tuple(kernel), stride, dilation, channels=(channels, out), groups=shape.groups, padded=any(padding))
    rest = [total + 2 * pad - gap * (taps - 1) - 1 for total, pad, gap, taps in zip(size, padding, dilation, kernel, strict=True)]
    if min(rest) < 0:
        raise ArgumentError(
            f"a kernel {kernel} with dilation {dilation} takes a video at least as large, got {size} with padding {padding}"
        )
    frames = [room // step + 1 for room, step in zip(rest, stride, strict=True)]
    weight = fold.fold(torch.empty(tuple(shape.weight), device="meta", dtype=torch.float32)).shape
    groups = shape.groups * fold.channels if fold.depthwise else shape.groups
    plane = frames[1:] if fold.folded == 3 else size[1:]
    moves = ((1, 1), (0, 0), (1, 1)) if fold.folded == 3 else (stride[1:], padding[1:], dilation[1:])
    images = ConvShape((batch * frames[0], weight[1] * groups, *plane), tuple(weight), *moves, groups)
    found = _explain_conv(images, fmt, dtype, how, here)
    return replace(found, text=f"conv3d  {list(shape.image)} * {list(shape.weight)}, stride {stride}, padding {padding}, as {found.text}")


def _three(value: Sizes | Padding, name: str) -> tuple[int, ...]:
    given = (value,) * 3 if isinstance(value, int) else tuple(value)
    if len(given) != 3 or not all(type(number) is int for number in given):
        raise ArgumentError(f"the {name} of a 3-D convolution is a whole number or three, got {value!r}")
    return given  # type: ignore[return-value]


def _explain_conv(shape: ConvShape, fmt: Format, dtype: torch.dtype, how: tuple[str, str], here: Gpu | ISA) -> ShapeExplanation:
    if len(shape.image) == len(shape.weight) == 5:
        return _explain_conv3d(shape, fmt, dtype, how, here)
    if len(shape.image) != 4 or len(shape.weight) != 4 or min(*shape.image, *shape.weight, shape.groups) < 1:
        got = f"{list(shape.image)}, {list(shape.weight)} and {shape.groups} groups"
        raise ArgumentError(f"a convolution has an image [B, C, H, W] and a weight [Co, C / groups, Kh, Kw] of sizes from 1 on, got {got}")
    (batch, channels, height, width), (out, group_channels, kh, kw) = shape.image, shape.weight
    if channels != group_channels * shape.groups:
        what = f"a weight {list(shape.weight)} in {shape.groups} groups takes {group_channels * shape.groups} channels"
        raise ArgumentError(f"{what}, got an image with {channels}: the weight is [Co, C / groups, Kh, Kw]")
    sizes = Filter(fmt, out, group_channels, (kh, kw), shape.groups)
    window = window_of((kh, kw), shape.stride, shape.padding, shape.dilation)
    window.out_size((height, width), (kh, kw))  # refuses a kernel that is larger than the image
    problem = ConvProblem(sizes, window, batch, (height, width), dtype, check_compute(how[0]), how[1])  # type: ignore[arg-type]
    op, name = ("qconv2d", "codes of int8") if dtype == torch.int8 else ("conv2d", f"{str(dtype).removeprefix('torch.')} activations")
    moves = f"stride {window.stride}, padding {window.padding}, dilation {window.dilation}"
    moves = moves if shape.groups == 1 else f"{moves}, {shape.groups} groups"
    text = f"{op}  {list(shape.image)} * {list(shape.weight)} {fmt}, {moves}, {name}"
    if isinstance(here, Gpu):
        on_gpu = choose(problem, here)
        linear = on_gpu.taken is not None and on_gpu.taken.candidate.reads == "pixels"
        return ShapeExplanation(text, here, on_gpu, products=(("product", choose(_pixels(on_gpu.problem), here)),) if linear else ())
    choice = choose(problem, here)
    rearranges = choice.taken is not None and choice.taken.candidate.rearranges
    fallback = next((one.candidate.name for one in choice.others if not one.candidate.rearranges), None) if rearranges else None
    return ShapeExplanation(text, here, choice, fallback)


def _pixels(problem: ConvProblem) -> Problem:
    """The linear layer of a convolution with a kernel of one tap, whose pixels are rows."""
    sizes, fmt = problem.sizes, problem.sizes.matrix_format
    if problem.dtype == torch.int8:
        return Problem("qlinear", problem.m, sizes.out, sizes.k, fmt, torch.int8, "int8", "row")
    activation = "row" if problem.activation == "image" else problem.activation
    return Problem("linear", problem.m, sizes.out, sizes.k, fmt, problem.dtype, problem.compute, activation)


def _product(problem: Problem, here: Gpu | ISA) -> AnyChoice:
    return choose(problem, here)
