"""The custom ops of convolutions on GPUs: no call synchronizes with the device, so all of them may be captured in a CUDA graph.

A kernel of one tap is a linear layer of pixels, and goes to its kernels, but for 8-bit codes in and out, and for few pixels and 8-bit
weights with one scale per channel, where those of convolutions are faster. Depthwise convolutions have a kernel of their own, all others
are implicit matrix products (`kernels/gpu/conv.py`).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfbyte.dispatch.gpu import compute_of, triton_trouble
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.kernels.problem import Addition, Epilogue, Window
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.layouts.convolution import Filter, PackedConv
from halfbyte.machine import gpu
from halfbyte.ops import cuda, elementwise
from halfbyte.ops.checks import TABLE_PANEL, check_activation, check_bytes, check_floats, check_table
from halfbyte.ops.images import (
    ACTIVATIONS,
    Shape,
    canonical_nbytes,
    channels_last,
    check_codes,
    check_conv2d,
    check_one_scale,
    from_numbers,
    nothing,
    out_shape,
)
from halfbyte.ops.replay import Replays
from halfbyte.ops.tensors import aligned

if TYPE_CHECKING:
    from halfbyte.kernels.gpu.conv_tile import Convolution

_FILL = 64  # rows of the table are padded to a multiple of it: at least 256 bytes

_replays = Replays()

# What depthwise kernels (whether they take integers) and those of stems ("stem") multiply by, by the packed bytes it comes from.
_made: MutableMapping[Tensor, dict[bool | str, Tensor]] = WeakTensorKeyDictionary()


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
    made = torch.zeros(shape, device=rows.device, dtype=torch.float32)
    made[:, :3, :n] = rows.view(3, groups, n).transpose(0, 1)
    made[:, 3].view(torch.int8).fill_(in_zero)
    made[:, 4:, :n] = (sums * in_zero).view(torch.float32).view(groups, n, sizes.taps).transpose(1, 2)
    return made


def _table_shape(sizes: Filter) -> tuple[int, int, int]:
    groups = 1 if sizes.depthwise else sizes.groups
    return groups, 4 + sizes.taps, -(-sizes.out // groups // _FILL) * _FILL


class _Plan(NamedTuple):
    """What calls on images of one shape share."""

    sizes: Filter
    window: Window
    shape: Shape
    weight_bytes: int
    way: str  # "depthwise", "linear" or "patches"
    numbers: tuple[int, ...]


@lru_cache(maxsize=4096)
def _plan(shape: torch.Size, format: str, filter_numbers: tuple[int, ...], window_numbers: tuple[int, ...]) -> _Plan:
    sizes, window = from_numbers(format, filter_numbers, window_numbers)
    out = out_shape(torch.empty(shape, device="meta"), sizes, window)
    if sizes.depthwise:
        return _Plan(sizes, window, out, canonical_nbytes(sizes), "depthwise", (*filter_numbers, *window_numbers))
    nbytes = sizes.groups * convolution.gpu_geometry(sizes).nbytes
    linear = sizes.taps == sizes.groups == 1 and sizes.k == sizes.channels  # no block is filled up with channels that x has not
    return _Plan(sizes, window, out, nbytes, "linear" if linear else "patches", (*filter_numbers, *window_numbers))


def _fitting(x: Tensor, weight: Tensor, format: str, filter_numbers: Sequence[int], window_numbers: Sequence[int]) -> _Plan:
    if x.dim() != 4:
        raise ArgumentError(f"a convolution takes images [B, C, H, W], got {list(x.shape)}")
    plan = _plan(x.shape, format, tuple(filter_numbers), tuple(window_numbers))
    check_bytes(weight, plan.weight_bytes, x.device, plan.sizes, "pack_conv")
    return plan


def conv2d(
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
) -> Tensor:
    check_floats(x, "conv2d takes images")
    check_activation(activation, ACTIVATIONS)
    plan = _fitting(x, weight, format, filter_numbers, window_numbers)
    # What asks for a scale of the image asks for integers; depthwise convolutions are always computed in floating point.
    wanted = compute_of("int8" if activation == "image" and compute == "auto" else compute)
    integers = wanted == "int8" and plan.way != "depthwise"
    by_image = integers and activation == "image"
    if by_image:
        check_one_scale(plan.sizes)
    check_conv2d(x, bias, residual, plan.shape, low, high)
    if 0 in plan.shape or not x.numel():
        return nothing(x, bias, residual, plan.shape, low, high)
    if bias is not None:
        bias = aligned(bias.float() if bias.dtype == torch.float64 else bias)
    residual = None if residual is None else _rows(residual)
    by_patches = by_image or (wanted == "float" and plan.way == "linear" and _beats_linear(plan, x))
    if plan.way == "linear" and not by_patches:
        rows, fmt = _pixels(x, plan, 0), str(plan.sizes.matrix_format)
        n, k, scaling = plan.sizes.out, plan.sizes.k, "row" if activation == "image" else activation
        return _image(cuda.linear(rows, weight, bias, residual, fmt, n, k, wanted, scaling, low, high), plan)
    if (trouble := triton_trouble()) is not None:
        if integers:
            raise UnsupportedError(f"compute='int8' needs Triton: {trouble}, or use compute='float'")
        return _plain(x, weight, bias, residual, plan, low, high)
    kinds = None if bias is None else bias.dtype, residual is None
    key = (x.shape, x.dtype, x.get_device(), format, plan.numbers, compute, activation, low, high, kinds)
    with cuda.on(x):
        return _image(_multiply(key, x, weight, plan, Epilogue(bias, residual, low, high), wanted, activation), plan)


def _beats_linear(plan: _Plan, x: Tensor) -> bool:
    if triton_trouble() is not None:
        return False
    from halfbyte.dispatch.gpu_conv import beats_linear
    from halfbyte.kernels.gpu.conv_tile import Convolution

    problem = Convolution(plan.sizes, plan.window, x.shape[0], (x.shape[2], x.shape[3]), x.dtype)
    return beats_linear(problem.flat, gpu(x.get_device()))


def _multiply(key: tuple[Any, ...], x: Tensor, weight: Tensor, plan: _Plan, epilogue: Epilogue, compute: str, activation: str) -> Tensor:
    """[M, Co]"""
    from halfbyte.dispatch.gpu_conv import choose_gpu_conv
    from halfbyte.kernels.gpu import conv_depthwise, conv_dynamic, conv_image, conv_library
    from halfbyte.kernels.gpu.conv_tile import Convolution

    here, added = gpu(x.get_device()), (epilogue.bias, epilogue.residual)
    problem = Convolution(plan.sizes, plan.window, x.shape[0], (x.shape[2], x.shape[3]), x.dtype)
    out = x.new_empty(problem.m, plan.sizes.out)
    if plan.way == "depthwise":
        image, taps = _memory(x), _taps_of(weight, plan.sizes, integer=False)
        config = conv_depthwise.configs(problem, here)[0]
        _launched(key, partial(conv_depthwise.launch, problem, config, image, taps, out, epilogue), (image, taps, out, *added))
        return out
    if compute == "int8":
        image, packed = with_channels(_memory(x), plan.sizes, 0), aligned(weight)
        kernel: Any = conv_image if activation == "image" else conv_dynamic
        if (reason := kernel.supports(problem, here)) is not None:
            raise UnsupportedError(f"there is no kernel for {problem} with compute='int8' on {here.name}: {reason}")
        how = () if kernel is conv_image else (activation,)
        run = partial(kernel.launch, problem, *how, kernel.configs(problem, here, *how)[0], image, packed, out, epilogue)
        _launched(key, run, (image, packed, out, *added))
        return out
    problem, operands, padded = _operands(x, weight, problem, 0)
    choice, (image, packed) = choose_gpu_conv(problem, here), operands[-2:]
    if choice.config is None:
        return conv_library.launch(problem, image, packed, epilogue)

    def solve() -> None:
        padded()
        choice.module.launch(problem, choice.config, image, packed, out, epilogue)

    _launched((*key, x.stride(), x.data_ptr() % 16 == 0), solve, (*operands, out, *added))
    return out


def _operands(
    x: Tensor, weight: Tensor, problem: Convolution, outside: int
) -> tuple[Convolution, tuple[Tensor, ...], Callable[[], None]]:
    """The problem as kernels solve it; tensors, the last two of which are image and weight as these read them; what writes that image."""
    from halfbyte.kernels.gpu import conv_stem

    stem = conv_stem.stem_of(problem)
    if stem is None:
        problem = problem.flat
        image = with_channels(_memory(x), problem.sizes, outside).view(problem.batch, *problem.image, -1)
        return problem, (image, aligned(weight)), lambda: None
    image = conv_stem.memory_for(stem, x)
    packed = _kept(weight, "stem", lambda: conv_stem.weight_of(weight, stem))
    return stem, (x, image, packed), lambda: conv_stem.write(stem, x, image, outside)


def _launched(key: tuple[Any, ...], run: Callable[[], None], operands: tuple[Tensor | None, ...]) -> None:
    """Runs; later calls that differ only in addresses replay the launches."""

    def start() -> Callable[[], None]:
        run()
        return run

    _replays.run(key, start, operands)


def qconv2d(
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
) -> Tensor:
    """`addition`: what happens to the codes then, with others [B, Co, Ho, Wo]."""
    check_codes(x)
    plan = _fitting(x, weight, format, filter_numbers, window_numbers)
    check_table(table, _table_shape(plan.sizes), x.device, low, high, "conv_requantization_table")
    if addition is not None and (0 in plan.shape or plan.way == "depthwise" or (plan.way == "linear" and plan.sizes.format.bits == 4)):
        codes = qconv2d(x, weight, table, format, filter_numbers, window_numbers, in_zero, low, high)
        return elementwise.combine(*addition.of(codes))
    if 0 in plan.shape:
        return _image(x.new_empty(0, plan.sizes.out), plan)
    if plan.way == "linear" and plan.sizes.format.bits == 4:
        n, k = plan.sizes.out, plan.sizes.k
        rows = table[0, :3, : -(-n // TABLE_PANEL) * TABLE_PANEL].contiguous()
        return _image(cuda.qlinear(_pixels(x, plan, in_zero), weight, rows, str(plan.sizes.matrix_format), n, k, low, high), plan)
    if (trouble := triton_trouble()) is not None:
        raise UnsupportedError(f"qconv2d needs Triton: {trouble}, or use the CPU")
    from halfbyte.dispatch.gpu_conv import choose_gpu_conv
    from halfbyte.kernels.gpu import conv_depthwise
    from halfbyte.kernels.gpu.conv_tile import Convolution

    problem = Convolution(plan.sizes, plan.window, x.shape[0], (x.shape[2], x.shape[3]), torch.int8)
    out, clamp = x.new_empty(problem.m, plan.sizes.out), (low, high)
    key: tuple[Any, ...] = (x.shape, x.dtype, x.get_device(), format, plan.numbers, in_zero, clamp)
    others: tuple[Tensor, ...] = ()
    if addition is not None:
        addition = replace(addition, other=_rows(addition.other))
        key, others = (*key, addition.numbers, addition.leads), (addition.other,)
    with cuda.on(x):
        table = aligned(table)
        if plan.way == "depthwise":
            image, taps = _memory(x), _taps_of(weight, plan.sizes, integer=True)
            config = conv_depthwise.configs(problem, gpu(x.get_device()))[0]
            run = partial(conv_depthwise.launch_integer, problem, config, image, taps, table, out, in_zero, clamp)
            _launched(key, run, (image, taps, out, table))
            return _image(out, plan)
        problem, operands, padded = _operands(x, weight, problem, in_zero)
        choice, (image, packed) = choose_gpu_conv(problem, gpu(x.get_device())), operands[-2:]

        def solve() -> None:
            padded()
            choice.module.launch_integer(problem, choice.config, image, packed, table, out, in_zero, clamp, addition)

        _launched((*key, x.stride(), x.data_ptr() % 16 == 0), solve, (*operands, out, table, *others))
    return _image(out, plan)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, plan: _Plan, low: float, high: float) -> Tensor:
    """In torch's own operations, where Triton is missing: correct, but slow."""
    top, bottom, left, right = plan.window.padding
    layout = convolution.CANONICAL if plan.way == "depthwise" else gpu_tiles.NAME
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
    """[B, H, W, C], with so many channels that several taps fit 16 bytes, where there are few and no groups."""
    channels = convolution.padded_for_gpu(sizes).channels
    if sizes.groups > 1 or sizes.channels == channels or channels > 16:
        return x
    padded = x.new_full((*x.shape[:3], channels), outside)
    padded[..., : sizes.channels] = x
    return padded


def _taps_of(weight: Tensor, sizes: Filter, *, integer: bool) -> Tensor:
    """[Kh * Kw, C]: float32 weights, or int32 codes."""

    def make() -> Tensor:
        codes = convolution.from_canonical_bytes(weight, sizes)
        numbers = codes.values().to(torch.int32) if integer else codes.dequantize(torch.float32)
        return numbers.reshape(sizes.out, sizes.taps).T.contiguous()

    return _kept(weight, integer, make)


def _kept(weight: Tensor, what: bool | str, make: Callable[[], Tensor]) -> Tensor:
    """What is made of a weight, once."""
    found = _made.get(weight)
    if found is not None and what in found:
        return found[what]
    made = make()
    if not torch.cuda.is_current_stream_capturing():  # else its memory belongs to the graph
        _made.setdefault(weight, {})[what] = made
    return made
