"""The custom ops of convolutions on GPUs: no call synchronizes with the device, so all of them may be captured in a CUDA graph.

A kernel of one tap is a linear layer of pixels, and goes to its kernels, but for 8-bit codes in and out, and for few pixels and 8-bit
weights with one scale per channel, where those of convolutions are faster. Depthwise convolutions have a kernel of their own, all others
are implicit matrix products (`kernels/gpu/conv.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from halfbyte.bounded import ByTensor
from halfbyte.dispatch.gpu import compute_of, triton_trouble
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.kernels.problem import Addition, Epilogue, Window
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.layouts.convolution import Filter, PackedConv
from halfbyte.machine import gpu
from halfbyte.ops import cuda, elementwise, long_sums
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
from halfbyte.ops.replay import Replay, Replays, empty
from halfbyte.ops.tensors import aligned

if TYPE_CHECKING:
    from halfbyte.kernels.gpu.conv_tile import Convolution

_FILL = 64  # rows of the table are padded to a multiple of it: at least 256 bytes

_replays = Replays()

# What depthwise kernels (whether they take integers) and those of stems ("stem") multiply by, by the packed bytes it comes from.
_made = ByTensor[dict[bool | str, Tensor]]()


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
    return groups, 4 + sizes.taps, round_up(sizes.out // groups, _FILL)


class _Plan(NamedTuple):
    """What calls on images of one shape share."""

    sizes: Filter
    window: Window
    shape: Shape
    weight_bytes: int
    way: Literal["depthwise", "linear", "patches"]
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


# A call like an earlier one, with x, the weight, and two more tensors or None. None: it is to be made the long way.
_Again = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor | None]
_Given = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
_Result = tuple[Tensor, _Again | None]  # of a call, and what makes it again


def conv2d_again(
    x: Tensor,
    packed: PackedConv,
    bias: Tensor | None,
    residual: Tensor | None,
    window_numbers: tuple[int, ...],
    *settings: Any,
) -> Tensor:
    """`conv2d` with a PackedConv. settings: compute, activation, low, high."""
    key = _kind(x), _kind(bias), _kind(residual), window_numbers, settings
    again = packed.calls.get(key)
    if again is not None and (y := again(x, packed.data, bias, residual)) is not None:
        return y  # type: ignore[no-any-return]
    y, found = _conv2d(x, packed.data, bias, residual, packed.name, packed.numbers, window_numbers, *settings)
    _keep(packed, key, found)
    return y


def _kind(x: Tensor | None) -> Hashable:
    """Equal for tensors that differ only in their addresses."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device())


def _keep(packed: PackedConv, key: Hashable, again: _Again | None) -> None:
    if again is not None and not torch.cuda.is_current_stream_capturing():  # a graph's memory is not for others
        packed.calls[key] = again


def _again(plan: _Plan, replay: Replay, x: Tensor, made: Tensor | None, scratch: Tensor | None) -> _Again:
    """`replay` for tensors laid out as those that it was recorded with. `made`: of the weight, which is read instead of it; `scratch`: in
    the shape of this."""
    _, co, ho, wo = plan.shape
    stride, device, dtype = (ho * wo * co, 1, wo * co, co), x.get_device(), x.dtype
    memory = None if scratch is None else (tuple(scratch.shape), scratch.stride())

    def again(x: Tensor, weight: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        px, pw = x.data_ptr(), (weight if made is None else made).data_ptr()
        p1, p2 = 0 if first is None else first.data_ptr(), 0 if second is None else second.data_ptr()
        if (px | pw | p1 | p2) & 15 or weight.get_device() != device or torch._C._cuda_getDevice() != device:
            return None
        out = empty(plan.shape, stride, dtype)
        if memory is None:
            replay(px, pw, out.data_ptr(), p1, p2)
        else:
            held = empty(*memory, dtype)
            replay(px, pw, out.data_ptr(), p1, p2, held.data_ptr())
        return out

    return again


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *settings: Any) -> Tensor:
    """The op. settings: format, numbers of the filter and the window, compute, activation, low, high."""
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
    # What asks for a scale of the image asks for integers; depthwise convolutions are always computed in floating point.
    wanted = compute_of("int8" if activation == "image" and compute == "auto" else compute)
    integers = wanted == "int8" and plan.way != "depthwise"
    by_image = integers and activation == "image"
    if by_image:
        check_one_scale(plan.sizes)
    check_conv2d(x, bias, residual, plan.shape, low, high)
    if 0 in plan.shape or not x.numel():
        return nothing(x, bias, residual, plan.shape, low, high), None
    given = x, weight, bias, residual
    if bias is not None:
        bias = aligned(bias.float() if bias.dtype == torch.float64 else bias)
    residual = None if residual is None else _rows(residual)
    by_patches = by_image or (wanted == "float" and plan.way == "linear" and _beats_linear(plan, x))
    if plan.way == "linear" and not by_patches:
        scaling = "row" if activation == "image" else activation
        settings = str(plan.sizes.matrix_format), plan.sizes.out, plan.sizes.k, wanted, scaling, low, high
        y = _image(cuda.linear(_pixels(x, plan, 0), weight, bias, residual, *settings), plan)
        return y, _linear_again(settings) if plan.window == Window() else None
    if (trouble := triton_trouble()) is not None:
        if integers:
            raise UnsupportedError(f"compute='int8' needs Triton: {trouble}, or use compute='float'")
        return _plain(x, weight, bias, residual, plan, low, high), None
    kinds = None if bias is None else bias.dtype, residual is None
    key = (x.shape, x.dtype, x.get_device(), format, plan.numbers, compute, activation, low, high, kinds)
    with cuda.on(x):
        return _multiply(key, given, plan, Epilogue(bias, residual, low, high), wanted, activation)


def _linear_again(settings: tuple[Any, ...]) -> _Again:
    """A linear layer of pixels."""

    def again(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        added = None if residual is None else residual.permute(0, 2, 3, 1)
        return cuda.linear(x.permute(0, 2, 3, 1), weight, bias, added, *settings).permute(0, 3, 1, 2)

    return again


def _beats_linear(plan: _Plan, x: Tensor) -> bool:
    if triton_trouble() is not None:
        return False
    from halfbyte.dispatch.gpu_conv import beats_linear
    from halfbyte.kernels.gpu.conv_tile import Convolution

    problem = Convolution(plan.sizes, plan.window, x.shape[0], (x.shape[2], x.shape[3]), x.dtype)
    return beats_linear(problem.flat, gpu(x.get_device()))


def _multiply(key: tuple[Any, ...], given: _Given, plan: _Plan, epilogue: Epilogue, compute: str, activation: str) -> _Result:
    from halfbyte.dispatch.gpu_conv import choose_gpu_conv
    from halfbyte.kernels.gpu import conv_depthwise, conv_dynamic, conv_image, conv_library
    from halfbyte.kernels.gpu.conv_tile import Convolution

    x, weight = given[:2]
    here, added = gpu(x.get_device()), (epilogue.bias, epilogue.residual)
    problem = Convolution(plan.sizes, plan.window, x.shape[0], (x.shape[2], x.shape[3]), x.dtype)
    out = x.new_empty(problem.m, plan.sizes.out)
    if plan.way == "depthwise":
        image, taps = _memory(x), _taps_of(weight, plan.sizes, integer=False)
        config = conv_depthwise.configs(problem, here)[0]
        run = partial(conv_depthwise.launch, problem, config, image, taps, out, epilogue)
        return _image(out, plan), _launched(key, run, plan, given, (image, taps, out, *added), made=taps)
    if compute == "int8":
        image, packed = with_channels(_memory(x), plan.sizes, 0), aligned(weight)
        kernel: Any = conv_image if activation == "image" else conv_dynamic
        if (reason := kernel.supports(problem, here)) is not None:
            raise UnsupportedError(f"there is no kernel for {problem} with compute='int8' on {here.name}: {reason}")
        how = () if kernel is conv_image else (activation,)
        run = partial(kernel.launch, problem, *how, kernel.configs(problem, here, *how)[0], image, packed, out, epilogue)
        return _image(out, plan), _launched(key, run, plan, given, (image, packed, out, *added))
    read = _read(x, weight, problem, 0)
    choice = choose_gpu_conv(read.problem, here)
    if choice.config is None:
        return _image(conv_library.launch(read.problem, read.image, read.weight, epilogue), plan), None

    def solve() -> None:
        read.write()
        choice.module.launch(read.problem, choice.config, read.image, read.weight, out, epilogue)

    return _image(out, plan), read.launched(key, solve, plan, given, out, *added)


class _Read(NamedTuple):
    """A problem as kernels solve it, image and weight as they read them, and what writes that image, if it isn't x."""

    problem: Convolution
    image: Tensor
    weight: Tensor
    stem: Callable[[], None] | None

    def write(self) -> None:
        if self.stem is not None:
            self.stem()

    def launched(self, key: tuple[Any, ...], run: Callable[[], None], plan: _Plan, given: _Given, *rest: Tensor | None) -> _Again | None:
        key = *key, given[0].stride(), given[0].data_ptr() % 16 == 0
        if self.stem is None:
            return _launched(key, run, plan, given, (self.image, self.weight, *rest))
        return _launched(key, run, plan, given, (given[0], self.weight, *rest), made=self.weight, scratch=self.image)


def _read(x: Tensor, weight: Tensor, problem: Convolution, outside: int) -> _Read:
    from halfbyte.kernels.gpu import conv_stem

    stem = conv_stem.stem_of(problem)
    if stem is None:
        problem = problem.flat
        image = with_channels(_memory(x), problem.sizes, outside).view(problem.batch, *problem.image, -1)
        return _Read(problem, image, aligned(weight), None)
    image = conv_stem.memory_for(stem, x)
    packed = _kept(weight, "stem", lambda: conv_stem.weight_of(weight, stem))
    return _Read(stem, image, packed, lambda: conv_stem.write(stem, x, image, outside))


def _launched(
    key: tuple[Any, ...],
    run: Callable[[], None],
    plan: _Plan,
    given: _Given,
    operands: tuple[Tensor | None, ...],
    made: Tensor | None = None,
    scratch: Tensor | None = None,
) -> _Again | None:
    """Runs; later calls that differ only in addresses replay the launches. `operands`: what kernels read for `given`, with the result in
    third place. What makes the call again, where these are the same tensors."""

    def start() -> Callable[[], None]:
        run()
        return run

    replay = _replays.run(key, start, operands if scratch is None else (*operands, scratch))
    taken = operands[0], given[1] if made is not None else operands[1], *operands[3:]
    same = all(a is b or (a is not None and b is not None and a.data_ptr() == b.data_ptr()) for a, b in zip(given, taken, strict=True))
    return None if replay is None or not same else _again(plan, replay, given[0], made, scratch)


def qconv2d_again(
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
    added = None if addition is None else (addition.numbers, addition.leads)
    key = _kind(x), _kind(table), _kind(other), window_numbers, in_zero, clamp, added
    again = packed.calls.get(key)
    if again is not None and (y := again(x, packed.data, table, other)) is not None:
        return y  # type: ignore[no-any-return]
    y, found = _qconv2d(x, packed.data, table, packed.name, packed.numbers, window_numbers, in_zero, *clamp, addition)
    _keep(packed, key, found)
    return y


def qconv2d(x: Tensor, weight: Tensor, table: Tensor, *settings: Any) -> Tensor:
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
    apart = 0 in plan.shape or plan.way == "depthwise" or (plan.way == "linear" and plan.sizes.format.bits == 4)
    if addition is not None and (apart or long_sums.overflows(plan.sizes.k) or addition.other.shape != plan.shape):
        codes = qconv2d(x, weight, table, format, filter_numbers, window_numbers, in_zero, low, high)
        return elementwise.combine(*addition.of(codes)), None
    if 0 in plan.shape:
        return _image(x.new_empty(0, plan.sizes.out), plan), None
    if plan.way == "linear" and plan.sizes.format.bits == 4:
        n, k = plan.sizes.out, plan.sizes.k
        rows = table[0, :3, : round_up(n, TABLE_PANEL)].contiguous()
        y = cuda.qlinear(_pixels(x, plan, in_zero), weight, rows, str(plan.sizes.matrix_format), n, k, low, high)
        return _image(y, plan), None
    if long_sums.overflows(plan.sizes.k):
        layout = convolution.CANONICAL if plan.way == "depthwise" else gpu_tiles.NAME
        unpacked = convolution.unpack(PackedConv(plan.sizes, layout, weight))
        return long_sums.qconv2d(x, unpacked, plan.sizes, plan.window, table, in_zero, low, high), None
    if (trouble := triton_trouble()) is not None:
        raise UnsupportedError(f"qconv2d needs Triton: {trouble}, or use the CPU")
    from halfbyte.dispatch.gpu_conv import choose_gpu_conv
    from halfbyte.kernels.gpu import conv_depthwise
    from halfbyte.kernels.gpu.conv_tile import Convolution

    problem = Convolution(plan.sizes, plan.window, x.shape[0], (x.shape[2], x.shape[3]), torch.int8)
    out, clamp = x.new_empty(problem.m, plan.sizes.out), (low, high)
    key: tuple[Any, ...] = (x.shape, x.dtype, x.get_device(), format, plan.numbers, in_zero, clamp)
    given: _Given = (x, weight, table, None if addition is None else addition.other)
    if addition is not None:
        addition = replace(addition, other=_rows(addition.other))
        key = (*key, addition.numbers, addition.leads)
    with cuda.on(x):
        table = aligned(table)
        if plan.way == "depthwise":
            image, taps = _memory(x), _taps_of(weight, plan.sizes, integer=True)
            config = conv_depthwise.configs(problem, gpu(x.get_device()))[0]
            run = partial(conv_depthwise.launch_integer, problem, config, image, taps, table, out, in_zero, clamp)
            return _image(out, plan), _launched(key, run, plan, given, (image, taps, out, table, None), made=taps)
        read = _read(x, weight, problem, in_zero)
        choice = choose_gpu_conv(read.problem, gpu(x.get_device()))

        def solve() -> None:
            read.write()
            choice.module.launch_integer(read.problem, choice.config, read.image, read.weight, table, out, in_zero, clamp, addition)

        return _image(out, plan), read.launched(key, solve, plan, given, out, table, None if addition is None else addition.other)


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
        _made.put(weight, {**(found or {}), what: made})
    return made
