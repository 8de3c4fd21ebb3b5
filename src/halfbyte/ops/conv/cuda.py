"""The custom ops of convolutions on GPUs: no call synchronizes with the device, so all of them may be captured in a CUDA graph.

Which kernel computes one, `dispatch` says (`dispatch/gpu_conv.py`); here its operands are made ready, and its launches are replayed. A
kernel of one tap may be a linear layer of pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.gpu import compute_of
from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes
from halfbyte.kernels.gpu.runtime.launch import current_recording, output
from halfbyte.kernels.problem import Addition, AskedCompute, ConvActivation, ConvProblem, Epilogue, Window, check_one_scale
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter, PackedConv
from halfbyte.machine import gpu
from halfbyte.ops import cuda, long_sums
from halfbyte.ops.checks import TABLE_PANEL, check_activation, check_bytes, check_floats, check_table
from halfbyte.ops.conv import elementwise
from halfbyte.ops.conv.images import (
    ACTIVATIONS,
    Shape,
    canonical_nbytes,
    channels_last,
    check_codes,
    check_conv2d,
    empty_result,
    from_numbers,
    out_shape,
)
from halfbyte.ops.conv.weight_forms import derived, taps_of
from halfbyte.ops.replay import key_of, replayed, tapes
from halfbyte.ops.tensors import aligned

if TYPE_CHECKING:
    from halfbyte.dispatch.candidate import Choice
    from halfbyte.dispatch.gpu_conv import GpuConvCandidate

_FILL = 64  # rows of the table are padded to a multiple of it: at least 256 bytes


def pack(codes: Codes, sizes: Filter) -> PackedConv:
    """Codes on a GPU, arranged for its kernels."""
    if sizes.depthwise:
        return PackedConv(sizes, convolution.CANONICAL, convolution.canonical_bytes(codes))
    return convolution.pack_gpu(codes, sizes)


def table(rows: Tensor, sums: Tensor, sizes: Filter, in_zero: int) -> Tensor:
    """What requantization reads, float32 [groups, 4 + taps, Co/groups padded to 64], of `functions.requantization_rows` and the sums of
    each tap's codes, int32 [Co, taps]: offset, multiplier, start; a row whose bytes are `in_zero`, for kernels that read it outside of
    the image; and in_zero * sum (its bits) of each tap, for kernels that read 0 there."""
    shape = _table_shape(sizes)
    groups, n = shape[0], sizes.out // shape[0]
    padded_table = torch.zeros(shape, device=rows.device, dtype=torch.float32)
    padded_table[:, :3, :n] = rows.view(3, groups, n).transpose(0, 1)
    padded_table[:, 3].view(torch.int8).fill_(in_zero)
    padded_table[:, 4:, :n] = (sums * in_zero).view(torch.float32).view(groups, n, sizes.taps).transpose(1, 2)
    return padded_table


def _table_shape(sizes: Filter) -> tuple[int, int, int]:
    groups = 1 if sizes.depthwise else sizes.groups
    return groups, 4 + sizes.taps, round_up(sizes.out // groups, _FILL)


class _Plan(NamedTuple):
    """What calls on images of one shape share."""

    sizes: Filter
    window: Window
    shape: Shape
    weight_bytes: int
    key: tuple[Hashable, ...]  # equal for equal filters and windows


@lru_cache(maxsize=4096)
def _plan(shape: torch.Size, format: str, filter_numbers: tuple[int, ...], window_numbers: tuple[int, ...]) -> _Plan:
    sizes, window = from_numbers(format, filter_numbers, window_numbers)
    out, key = out_shape(torch.empty(shape, device="meta"), sizes, window), (format, *filter_numbers, *window_numbers)
    if sizes.depthwise:
        return _Plan(sizes, window, out, canonical_nbytes(sizes), key)
    return _Plan(sizes, window, out, sizes.groups * convolution.gpu_geometry(sizes).nbytes, key)


def _fitting(x: Tensor, weight: Tensor, format: str, filter_numbers: Sequence[int], window_numbers: Sequence[int]) -> _Plan:
    if x.dim() != 4:
        raise ArgumentError(f"a convolution takes images [B, C, H, W], got {list(x.shape)}")
    plan = _plan(x.shape, format, tuple(filter_numbers), tuple(window_numbers))
    check_bytes(weight, plan.weight_bytes, x.device, plan.sizes, "pack_conv")
    return plan


_Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # x, the weight, and two more
_Replay = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor | None]  # of a call; None where it refuses its operands
_Result = tuple[Tensor, _Replay | None]


def packed_conv2d(
    x: Tensor,
    packed: PackedConv,
    bias: Tensor | None,
    residual: Tensor | None,
    window_numbers: tuple[int, ...],
    *settings: *tuple[str, str, float, float],
) -> Tensor:
    """`conv2d` with a PackedConv. settings: compute, activation, low, high."""
    key = key_of((x, bias, residual), window_numbers, settings)
    replay = packed.calls.get(key)
    if replay is not None and current_recording() is None and (y := replay(x, packed.data, bias, residual)) is not None:
        return y  # type: ignore[no-any-return]
    y, replay = _conv2d(x, packed.data, bias, residual, packed.name, packed.numbers, window_numbers, *settings)
    _cache(packed, key, replay)
    return y


def _cache(packed: PackedConv, key: Hashable, replay: _Replay | None) -> None:
    if replay is not None and not torch.cuda.is_current_stream_capturing():  # a graph's memory is not for others
        packed.calls[key] = replay


# Format, numbers of the filter and the window, compute, activation, low, high.
_Settings = tuple[str, Sequence[int], Sequence[int], str, str, float, float]


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *settings: *_Settings) -> Tensor:
    """The op."""
    return _conv2d(x, weight, bias, residual, *settings)[0]


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    format: str,
    filter_numbers: Sequence[int],
    window_numbers: Sequence[int],
    compute: str,
    activation: str,
    low: float,
    high: float,
) -> _Result:
    check_floats(x, "conv2d takes images")
    check_activation(activation, ACTIVATIONS)
    plan = _fitting(x, weight, format, filter_numbers, window_numbers)
    compute_of(compute)  # refuses what is none, also where there is nothing to compute
    if activation == "image" and compute != "float" and not plan.sizes.depthwise:
        check_one_scale(plan.sizes)
    check_conv2d(x, bias, residual, plan.shape, low, high)
    if 0 in plan.shape or not x.numel():
        return empty_result(x, bias, residual, plan.shape, low, high), None
    choice = choose(_problem(x, plan, compute, activation), gpu(x.get_device()))
    given: _Operands = x, weight, bias, residual
    if bias is not None:
        bias = aligned(bias.float() if bias.dtype == torch.float64 else bias)
    residual = None if residual is None else _rows(residual)
    if choice.taken is None:
        return _plain(x, weight, bias, residual, plan, low, high), None
    if choice.taken.candidate.reads == "pixels":
        scaling = "row" if activation == "image" else activation
        settings = str(plan.sizes.matrix_format), plan.sizes.out, plan.sizes.k, choice.problem.compute, scaling, low, high
        y = _image(cuda.linear(_pixels(x, plan, 0), weight, bias, residual, *settings), plan)
        return y, _linear_replay(settings) if plan.window == Window() else None
    with cuda.on(x):
        return _multiply(given, plan, Epilogue(bias, residual, low, high), choice)


def _problem(x: Tensor, plan: _Plan, compute: str, activation: str) -> ConvProblem:
    how = cast("AskedCompute", compute), cast("ConvActivation", activation)
    return ConvProblem(plan.sizes, plan.window, x.shape[0], (x.shape[2], x.shape[3]), x.dtype, *how)


def _linear_replay(settings: cuda.LinearSettings) -> _Replay:
    """A linear layer of pixels."""

    def replay(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        added = None if residual is None else residual.permute(0, 2, 3, 1)
        return cuda.linear(x.permute(0, 2, 3, 1), weight, bias, added, *settings).permute(0, 3, 1, 2)

    return replay


def _multiply(given: _Operands, plan: _Plan, epilogue: Epilogue, choice: Choice[ConvProblem, GpuConvCandidate]) -> _Result:
    option, how = choice.options[0], choice.problem
    candidate, added = option.candidate, (epilogue.bias, epilogue.residual)
    settings = "conv2d", how.compute, how.activation, epilogue.low, epilogue.high
    read = _read(given[0], given[1], how, candidate, 0)
    run = partial(candidate.launch, read.problem, option.config)
    if not candidate.replayable:
        return _image(run(read.image(), read.weight, epilogue), plan), None

    def solve(rows: Tensor) -> None:
        run(read.image(), read.weight, rows, epilogue)

    return _launched(solve, plan, given, (read.x, read.weight, *added), *settings, derived=read.derived)


class _Read(NamedTuple):
    """A problem as kernels solve it.

    Attributes:
        problem: The convolution of the image that kernels read.
        x: What that image is written from, or itself.
        weight: The weight that they read.
        derived: Whether it is derived from the packed bytes.
        image: Returns the image, [B, H, W, C]; may write it.
    """

    problem: ConvProblem
    x: Tensor
    weight: Tensor
    derived: bool
    image: Callable[[], Tensor]


def _read(x: Tensor, weight: Tensor, problem: ConvProblem, candidate: GpuConvCandidate, outside: int) -> _Read:
    """What a kernel reads of an image and a packed weight."""
    from halfbyte.kernels.gpu.conv import stem as conv_stem

    solved, sizes = candidate.solved(problem), problem.sizes
    if candidate.reads == "taps":
        image = _memory(x)
        return _Read(solved, image, taps_of(weight, sizes, integer=x.dtype == torch.int8), True, lambda: image)
    if not isinstance(solved, conv_stem.Stem):
        image = with_channels(_memory(x), sizes, outside)
        image = image.view(solved.batch, *solved.image, -1)
        return _Read(solved, image, aligned(weight), False, lambda: image)

    def written() -> Tensor:
        image = output(conv_stem.memory_for(solved, x))
        conv_stem.write(solved, x, image, outside)
        return image

    stem = derived(weight, "stem", lambda: conv_stem.weight_of(weight, solved))
    assert stem is not None
    return _Read(solved, x, stem, True, written)


def _launched(
    run: Callable[[Tensor], None], plan: _Plan, given: _Operands, operands: _Operands, *settings: Hashable, derived: bool = False
) -> _Result:
    """The result, by `run`, which writes its pixels [M, Co], or by a replay of its launches; and that replay, where it takes `given`, too.

    operands: what kernels read for `given`; derived: the weight among them is derived from that of `given`, which is read no more.
    """
    b, co, ho, wo = plan.shape

    def steps() -> Tensor:
        strides = (ho * wo * co, 1, wo * co, co)
        out = output(torch.empty_strided(plan.shape, strides, dtype=given[0].dtype, device=given[0].device))
        run(out.permute(0, 2, 3, 1).view(b * ho * wo, co))
        return out

    settings = (*settings, given[0].shape, plan.key)
    y = replayed(steps, operands, *settings, weight=1)
    tape = tapes.get(key_of(operands, *settings))
    taken = operands[0], given[1] if derived else operands[1], *operands[2:]
    same = all(a is b or (a is not None and b is not None and a.data_ptr() == b.data_ptr()) for a, b in zip(given, taken, strict=True))
    if tape is None or tape.replay is None or not same:
        return y, None
    replay: _Replay = tape.replay
    return y, (lambda x, _, first, second: replay(x, operands[1], first, second)) if derived else replay


def packed_qconv2d(
    x: Tensor,
    packed: PackedConv,
    table: Tensor,
    window_numbers: tuple[int, ...],
    in_zero: int,
    clamp: tuple[int, int],
    addition: Addition | None = None,
) -> Tensor:
    """`qconv2d` with a PackedConv. `addition`: what happens to the codes then, with others [B, Co, Ho, Wo]."""
    other = None if addition is None else addition.other
    added = None if addition is None else (addition.numbers, addition.codes_first)
    key = key_of((x, table, other), window_numbers, in_zero, clamp, added)
    replay = packed.calls.get(key)
    if replay is not None and current_recording() is None and (y := replay(x, packed.data, table, other)) is not None:
        return y  # type: ignore[no-any-return]
    y, replay = _qconv2d(x, packed.data, table, packed.name, packed.numbers, window_numbers, in_zero, *clamp, addition)
    _cache(packed, key, replay)
    return y


def qconv2d(x: Tensor, weight: Tensor, table: Tensor, *settings: *tuple[str, Sequence[int], Sequence[int], int, int, int]) -> Tensor:
    """The op. settings: format, numbers of the filter and the window, in_zero, low, high."""
    return _qconv2d(x, weight, table, *settings)[0]


def _qconv2d(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    format: str,
    filter_numbers: Sequence[int],
    window_numbers: Sequence[int],
    in_zero: int,
    low: int,
    high: int,
    addition: Addition | None = None,
) -> _Result:
    check_codes(x)
    plan = _fitting(x, weight, format, filter_numbers, window_numbers)
    check_table(table, _table_shape(plan.sizes), x.device, low, high, "conv_requantization_table")
    if 0 in plan.shape:
        codes = _image(x.new_empty(0, plan.sizes.out), plan)
        return codes if addition is None else elementwise.combine(*addition.of(codes)), None
    choice = choose(_problem(x, plan, "int8", "block"), gpu(x.get_device()))
    adds = choice.taken is not None and choice.taken.candidate.adds
    if addition is not None and (not adds or addition.other.shape != plan.shape):
        codes = qconv2d(x, weight, table, format, filter_numbers, window_numbers, in_zero, low, high)
        return elementwise.combine(*addition.of(codes)), None
    if choice.taken is None:
        layout = convolution.CANONICAL if plan.sizes.depthwise else gpu_tiles.NAME
        unpacked = convolution.unpack(PackedConv(plan.sizes, layout, weight))
        return long_sums.qconv2d(x, unpacked, plan.sizes, plan.window, table, in_zero, low, high), None
    candidate, config = choice.taken.candidate, choice.taken.config
    if candidate.reads == "pixels":
        n, k = plan.sizes.out, plan.sizes.k
        rows = table[0, :3, : round_up(n, TABLE_PANEL)].contiguous()
        y = cuda.qlinear(_pixels(x, plan, in_zero), weight, rows, str(plan.sizes.matrix_format), n, k, low, high)
        return _image(y, plan), None
    settings = "qconv2d", in_zero, low, high, addition and addition.numbers, addition and addition.codes_first
    given: _Operands = (x, weight, table, None if addition is None else addition.other)
    if addition is not None:
        addition = replace(addition, other=_rows(addition.other))
    with cuda.on(x):
        table = aligned(table)
        read = _read(x, weight, choice.problem, candidate, in_zero)
        epilogue = Epilogue.of_codes(table, in_zero, (low, high), addition)

        def solve(rows: Tensor) -> None:
            candidate.launch(read.problem, config, read.image(), read.weight, rows, epilogue)

        operands = read.x, read.weight, table, None if addition is None else addition.other
        return _launched(solve, plan, given, operands, *settings, derived=read.derived)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, plan: _Plan, low: float, high: float) -> Tensor:
    """In torch's own operations, where Triton is missing: correct, but slow."""
    top, bottom, left, right = plan.window.padding
    layout = convolution.CANONICAL if plan.sizes.depthwise else gpu_tiles.NAME
    floats = convolution.dequantize(PackedConv(plan.sizes, layout, weight), torch.float32)
    padded = torch.nn.functional.pad(x.float(), (left, right, top, bottom))
    bias = None if bias is None else bias.float()
    y = torch.nn.functional.conv2d(padded, floats, bias, plan.window.stride, 0, plan.window.dilation, plan.sizes.groups)
    if residual is not None:
        y = y + _image(residual, plan)
    return channels_last(y.clamp(low, high).to(x.dtype))


def _memory(x: Tensor) -> Tensor:
    """[B, C, H, W] as it lies in memory, [B, H, W, C], aligned."""
    return aligned(channels_last(x).permute(0, 2, 3, 1))


def _rows(x: Tensor) -> Tensor:
    """Its pixels [B * H * W, C]."""
    return _memory(x).view(-1, x.shape[1])


def _image(rows: Tensor, plan: _Plan) -> Tensor:
    """The inverse: [M, Co] -> [B, Co, Ho, Wo], channels_last."""
    b, co, ho, wo = plan.shape
    return rows.view(b, ho, wo, co).permute(0, 3, 1, 2)


def _pixels(x: Tensor, plan: _Plan, outside: int) -> Tensor:
    """What a kernel of one tap looks at, [M, C]."""
    (sh, sw), (top, bottom, left, right) = plan.window.stride, plan.window.padding
    if any(plan.window.padding):
        x = torch.nn.functional.pad(x, (left, right, top, bottom), value=outside)
    return _rows(x[:, :, ::sh, ::sw])


def with_channels(x: Tensor, sizes: Filter, outside: int) -> Tensor:
    """[B, H, W, C], with the channels that kernels read (`gpu_image_channels`)."""
    channels = convolution.gpu_image_channels(sizes)
    if x.shape[3] == channels:
        return x
    padded = x.new_full((*x.shape[:3], channels), outside)
    padded[..., : sizes.channels] = x
    return padded
