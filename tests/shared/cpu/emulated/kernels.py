"""halfbyte's own calls, planned as ever, with an `Emulator` in the place of the CPU."""

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated.program import IMAGE, Emulator
from torch import Tensor

from halfbyte.formats import Codes, Format
from halfbyte.kernels.cpu.codegen import jit, runtime
from halfbyte.kernels.cpu.codegen.arguments import DEQUANTIZE, LINEAR, QUANTIZE, Block
from halfbyte.kernels.cpu.codegen.kernel import compiled
from halfbyte.kernels.cpu.conv import depthwise, gathered
from halfbyte.kernels.cpu.conv.depthwise import DEPTHWISE, DepthwiseKernel
from halfbyte.kernels.cpu.conv.direct import DIRECT, Band
from halfbyte.kernels.cpu.conv.gathered import ConvKernel
from halfbyte.kernels.cpu.conv.patches import CONV
from halfbyte.kernels.cpu.linear import linear
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.linear.tile_spec import Inner
from halfbyte.kernels.cpu.quantize import dequantize, quantize
from halfbyte.kernels.cpu.step_sequence import NORM, Step
from halfbyte.kernels.cpu.step_sequence import build as build_step
from halfbyte.kernels.cpu.transformer import attend_whole as whole
from halfbyte.kernels.cpu.transformer.attend import ATTEND, AttendSpec
from halfbyte.kernels.cpu.transformer.attend import build as build_attend
from halfbyte.kernels.problem import Activation, Window
from halfbyte.layouts.cpu_tiles import PANEL, Geometry

_FUNCTIONS = ("first_phase", "second_phase", "row_function", "tile_function", "lesser_tile_function")
_TENSORS = ("outside", "patch_offsets", "read_offsets", "pixel_mask", "lane_offsets", "bands")  # of `direct_call.plan`
_MARGIN = b"\xff" * 64  # NaN in every dtype


@contextmanager
def _in_place_of_the_cpu(emulator: Emulator, run: Callable[[bytes, int], bytes] | None = None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (linear, dequantize, quantize, gathered, depthwise):
            patch.setattr(module, "current", lambda: emulator.isa)
        patch.setattr(jit, "load", emulator.load)
        patch.setattr(runtime, "threads", lambda: 1)
        patch.setattr(runtime, "runner", lambda: None)
        patch.setattr(runtime, "run", run)
        yield


def _call(emulator: Emulator, table: Block, block: bytes, sizes: dict[str, int], written: set[str]) -> bytes:
    """Run the kernel of `block`: `sizes` are those of the memory that its pointers mean, and what is `written` comes back.

    All else, and what lies around each piece of memory, must be as it was.
    """
    image, places = bytearray(block), {}
    for field, size in sizes.items():
        address = int.from_bytes(block[table.offset(field) :][:8], "little")
        if address:
            image += _MARGIN + bytes(-len(image) % 64)
            places[field] = at = len(image) + address % 64
            image += _MARGIN[: address % 64] + ctypes.string_at(address, size)
            image[table.offset(field) : table.offset(field) + 8] = (IMAGE + at).to_bytes(8, "little")
    image += _MARGIN
    functions = [table.offset(field) for field in _FUNCTIONS if field in table.fields]
    if "bands" in places:
        first = places["bands"] + 8 * Band._fields.index("function")
        functions += range(first, first + sizes["bands"], 8 * len(Band._fields))
    after = bytearray(emulator.run(bytes(image), functions))
    for at in functions:  # addresses instead of numbers
        after[at : at + 8] = image[at : at + 8]
    for field in written & places.keys():
        at, size = places[field], sizes[field]
        address = int.from_bytes(block[table.offset(field) :][:8], "little")
        ctypes.memmove(address, bytes(after[at : at + size]), size)
        after[at : at + size] = image[at : at + size]
    assert after[len(block) :] == image[len(block) :], "memory was written that is not the kernel's"
    return bytes(after[: len(block)])


def _fields(table: Block, block: bytes) -> dict[str, int]:
    return {field: int.from_bytes(block[table.offset(field) :][:8], "little") for field in table.fields}


def linear_kernel(
    emulator: Emulator, fmt: Format, n: int, k: int, dtype: torch.dtype, inner: Inner, activation: Activation
) -> LinearKernel:
    """A LinearKernel whose calls are emulated."""
    with _in_place_of_the_cpu(emulator):
        kernel = LinearKernel(fmt, n, k, dtype, inner, activation)

    def run(address: int, threads: int) -> None:
        assert threads == 1
        block = ctypes.string_at(address, LINEAR.struct().size)
        call = _fields(LINEAR, block)
        m, width = call["m"], call["n"]
        table = 3 * call["table_stride"] if kernel.out_dtype == torch.int8 else 4 * width
        sizes = {
            "x": (m - 1) * call["x_stride"] + k * kernel.element_bytes,
            "scratch": m * call["row_bytes"],
            "weights": kernel.nbytes,
            "bias": table,
            "out": (m - 1) * call["out_stride"] + width * call["out_bytes"],
            "zeros": 4 * PANEL,
        }
        _call(emulator, LINEAR, block, sizes, {"scratch", "out"})

    prepare = kernel._prepare

    def prepare_emulated(m: int, available: int) -> linear._Call:
        with _in_place_of_the_cpu(emulator):
            return prepare(m, 1)

    kernel.run, kernel._prepare = run, prepare_emulated
    return kernel


def convolved(
    emulator: Emulator, make: Callable[[], ConvKernel | DepthwiseKernel], x: Tensor, window: Window, *rest: Any, **more: Any
) -> Tensor:
    """What the kernel that `make` makes gives for x, a window, weights, a bias, and so on."""
    weights, bias, scales = rest[0], rest[1], more.get("scales")
    with _in_place_of_the_cpu(emulator), pytest.MonkeyPatch.context() as patch:
        kernel = make()
        calls, prepare = [], kernel.prepare
        kernel.prepare = lambda *arguments: calls.append(prepare(*arguments)) or calls[-1]

        def run(address: int, threads: int) -> None:
            assert threads == 1
            call = calls[-1]
            size = ctypes.sizeof(call.buffer)
            table = next(table for table in (DIRECT, CONV, DEPTHWISE) if table.struct().size == size)
            block = ctypes.string_at(address, size)
            depthwise = isinstance(kernel, DepthwiseKernel)
            sizes = {
                "x": x.numel() * kernel.dtype.itemsize,
                "scratch": 0 if depthwise else call.scratch_bytes,
                "weights": weights.nbytes,
                "bias": 4 * call.out_shape[1] if bias is None else bias.nbytes,
                "out": math.prod(call.out_shape) * kernel.out_dtype.itemsize,
                "zeros": 4 * PANEL,
                "scales": 0 if scales is None else scales.nbytes,
                **{name: t.nbytes for name, t in zip(_TENSORS, call.tensors, strict=False)},
            }
            _call(emulator, table, block, {name: n for name, n in sizes.items() if name in table.fields}, {"scratch", "out"})

        patch.setattr(runtime, "runner", lambda: run)
        return kernel(x, window, *rest, **more)


def dequantized(emulator: Emulator, weights: Tensor, geo: Geometry, dtype: torch.dtype, ids: Tensor | None) -> Tensor:
    def run(block: bytes, _: int) -> bytes:
        call = _fields(DEQUANTIZE, block)
        sizes = {"weights": weights.numel(), "ids": 8 * call["rows"], "out": call["rows"] * call["out_stride"]}
        return _call(emulator, DEQUANTIZE, block, sizes, {"out"})

    with _in_place_of_the_cpu(emulator, run):
        return dequantize.dequantize(weights, geo, dtype, ids)


def attend(emulator: Emulator, spec: AttendSpec, fields: dict[str, int | tuple[float, float]], sizes: dict[str, int]) -> None:
    """Attention of new tokens to a cache; `sizes` of the memory that arguments mean."""
    with _in_place_of_the_cpu(emulator):
        phase = compiled(build_attend, spec, emulator.isa)
    _call(emulator, ATTEND, bytes(ATTEND.buffer(fields | {"first_phase": phase})), sizes, {"keys", "values", "out"})


def norm(emulator: Emulator, fields: dict[str, int | tuple[float, float]], sizes: dict[str, int]) -> None:
    """Layer norms of rows; `sizes` of the memory that arguments mean."""
    with _in_place_of_the_cpu(emulator):
        phase = compiled(build_step, Step("norm", layer_norm=True), emulator.isa)
    _call(emulator, NORM, bytes(NORM.buffer(fields | {"first_phase": phase})), sizes, {"out"})


def attend_whole(emulator: Emulator, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    def run(address: int, threads: int) -> None:
        assert threads == 1
        block = ctypes.string_at(address, whole.WHOLE.struct().size)
        call = _fields(whole.WHOLE, block)
        batch, heads, tokens, dim = q.shape
        sizes = {
            name: (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * 4
            for name, x in zip("qkv", (q, k, v), strict=True)
        }
        sizes |= {"mask": -(-tokens // 16) * 16 * batch, "out": 4 * batch * heads * tokens * dim, "scratch": call["thread_bytes"]}
        _call(emulator, whole.WHOLE, block, sizes, {"out", "scratch"})

    with _in_place_of_the_cpu(emulator), pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "current", lambda: emulator.isa)
        patch.setattr(runtime, "runner", lambda: run)
        return whole.attend(q, k, v, mask, scale)


def quantized(emulator: Emulator, weight: Tensor, fmt: Format) -> Codes | str | None:
    """As `quantize.quantize`, or why it does not take this weight."""

    def run(block: bytes, _: int) -> bytes:
        call = _fields(QUANTIZE, block)
        scales = call["rows"] * call["blocks"]
        sizes = {
            "weight": (call["rows"] - 1) * call["stride"] + call["k"] * weight.element_size(),
            "data": call["rows"] * call["data_stride"],
            "scale": scales * fmt.scale.itemsize,
            "zero": scales * (1 if fmt.zero == "point" else fmt.scale.itemsize),
            "scratch": (call["k"] + 127) // 64 * 64,
        }
        return _call(emulator, QUANTIZE, block, sizes, {"data", "scale", "zero", "scratch"})

    with _in_place_of_the_cpu(emulator, run):
        return quantize.supports(weight, fmt) or quantize.quantize(weight, fmt)
