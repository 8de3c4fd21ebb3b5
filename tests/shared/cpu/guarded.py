"""Every kernel on memory that ends, or begins, at a page that may not be touched: a process of its own, which dies of a step too far.

python guarded.py PROGRESS    runs all; the file PROGRESS says what was running
python guarded.py PROGRESS 1  reads one byte too far, and should not come back
"""

import ctypes
import faulthandler
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention
import encoder_parts
import guarded_layers
import kernel_cache
import torch
from emulated.amx import EmulatedTiles
from guarded_memory import ENDS, guarded, guarded_allocations, placed, same, scratch, some
from samples import random_codes, sparse_codes
from torch import Tensor

from halfbyte import ops
from halfbyte.dispatch.choose import choose
from halfbyte.formats import as_format
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.conv import elementwise
from halfbyte.kernels.cpu.conv.amx import MatrixConvKernel
from halfbyte.kernels.cpu.conv.arranged import ArrangedConvKernel
from halfbyte.kernels.cpu.conv.depthwise import DepthwiseKernel
from halfbyte.kernels.cpu.conv.depthwise_dot import DepthwiseDotKernel
from halfbyte.kernels.cpu.conv.gathered import ConvKernel, ImageConvKernel
from halfbyte.kernels.cpu.conv.pool import pool
from halfbyte.kernels.cpu.conv.unsigned import UnsignedConvKernel
from halfbyte.kernels.cpu.conv.winograd import winograd_call
from halfbyte.kernels.cpu.conv.winograd.winograd_call import WinogradKernel
from halfbyte.kernels.cpu.linear import sparse
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.cpu.quantize import dequantize, quantize
from halfbyte.kernels.cpu.transformer import attend_whole
from halfbyte.kernels.cpu.transformer.attend import AttendSpec
from halfbyte.kernels.problem import Combination, Problem, Window
from halfbyte.layouts import convolution
from halfbyte.layouts.base import Packed
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import NAME, SPARSE, geometry, pack, unpack
from halfbyte.ops.conv import functions as conv_ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Tails of each size; the numbers of the lists have no common factor, so that in turn each meets each.
MS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13)
KS = (1, 7, 8, 9, 20, 31, 32, 33, 41, 64, 95, 130)
NS = (1, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 25, 31, 32, 33, 47, 63, 65)
LINEAR = [
    ("q4_0", "block"), ("q4_1", "row"), ("q8_0", "block_offset"), ("int8_channel", "row"), ("int4_g20_zp", "block"),
    ("int4_g64_zp_bf16", "row_offset"), ("int8_g33_offset_f32", "block_offset"), ("int4_tensor_offset", "block"), ("int8_g8_zp", "row"),
    ("q4_0", "float"), ("int8_g20_offset", "float"), ("int4_g40_zp_f32", "float"), ("int8_channel_zp", "float"),
    ("int6_g16", "block"), ("int5_g33_offset", "row_offset"), ("int5_g32", "float"),
]  # fmt: skip


def products(announce: Callable[[str], None]) -> None:
    some_n = itertools.cycle(NS)
    for (i, (name, way)), k in itertools.product(some(enumerate(LINEAR)), KS):
        some_m = itertools.cycle((1, *MS[1 + i % 5 :: 5]))  # a tile is compiled for each number of rows: few for each format
        fmt, dtype = as_format(name), DTYPES[i % 3]  # each with int8 and with float compute
        compute, activation = ("float", "block") if way == "float" else ("int8", way)
        if fmt.packed_bits and not current().reads_packed_bits:
            continue
        for n in itertools.islice(some_n, 2):
            problem = Problem("linear", 1, n, k, fmt, dtype, compute, activation)
            inner = choose(problem, current()).options[0].candidate.inner
            kernel, packed = LinearKernel(fmt, n, k, dtype, inner, activation), pack(random_codes(fmt, (n, k)))
            m = next(some_m)
            x, bias, more = torch.randn(m, k).to(dtype), torch.randn(n), torch.randn(m, n).to(dtype)
            wanted = [kernel(x, packed.data.data_ptr(), b, -9.0, 9.0, residual) for b, residual in ((bias, more), (None, None))]
            for flush in ENDS:
                announce(f"linear {name} {way} {dtype} m={m} n={n} k={k} flush with {flush}")
                scratch(flush)
                PLANS.linear.clear()  # they know where the zeros were that stand for a bias
                rows, data, biases = placed(x, flush, gap=n % 3), placed(packed.data, flush), placed(bias, flush)
                with guarded_allocations(flush):
                    same(kernel(rows, data.data_ptr(), biases, -9.0, 9.0, placed(more, flush)), wanted[0])
                    same(kernel(rows, data.data_ptr(), None, -9.0, 9.0), wanted[1])


def products_of_many_rows_or_outputs(announce: Callable[[str], None]) -> None:
    """From some rows on tiles expand codes, or multiply scale and offset at once. Of many outputs, they take several panels at once."""
    many = ("q4_0", 50, 47, 95), ("int4_g20_zp", 49, 33, 41), ("int4_g64_zp_bf16", 53, 17, 130), ("q4_1", 51, 47, 95)
    wide = ("q4_0", 1, 545, 95), ("int4_g64_zp_bf16", 2, 546, 130), ("int8_channel", 1, 547, 70)
    for name, m, n, k in some((*many, *wide)):
        fmt, x, bias = as_format(name), torch.randn(m, k), torch.randn(n)
        kernel, packed = LinearKernel(fmt, n, k, torch.float32, "int8", "block"), pack(ops.quantize(torch.randn(n, k), fmt))
        wanted = kernel(x, packed.data.data_ptr(), bias, -9.0, 9.0)
        for flush in ENDS:
            announce(f"linear {name} m={m} n={n} k={k} flush with {flush}")
            scratch(flush)
            PLANS.linear.clear()
            rows, data, biases = placed(x, flush, gap=n % 3), placed(packed.data, flush), placed(bias, flush)
            with guarded_allocations(flush):
                same(kernel(rows, data.data_ptr(), biases, -9.0, 9.0), wanted)


def sparse_products(announce: Callable[[str], None]) -> None:
    cases = ("q4_0", 50, 47, 95), ("int4_g64_zp_bf16", 2, 546, 130), ("int8_channel", 9, 33, 290), ("int8_g64_zp", 20, 31, 290)
    for name, m, n, k in cases if current().spreads else ():
        fmt, x, codes, ids = as_format(name), torch.randn(m, k), sparse_codes(as_format(name), (n, k)), torch.tensor([n - 1, 0])
        packed, geo = ops.pack(codes), geometry(fmt, (n, k), sparse=True)
        kernel = LinearKernel(fmt, n, k, torch.float32, "int8", "block", sparse=True)
        wanted = kernel(x, packed.data.data_ptr(), None, -9.0, 9.0)
        rows = dequantize.dequantize(packed.data, geo, torch.float32, ids)
        for flush in ENDS:
            announce(f"sparse {name} m={m} n={n} k={k} flush with {flush}")
            scratch(flush)
            PLANS.linear.clear()
            activations, data = placed(x, flush, gap=n % 3), placed(packed.data, flush)
            with guarded_allocations(flush):
                same(kernel(activations, data.data_ptr(), None, -9.0, 9.0), wanted)
                same(dequantize.dequantize(data, geo, torch.float32, placed(ids, flush)), rows)
                same(sparse.pack(Packed(fmt, (n, k), NAME, placed(pack(codes).data, flush))).data, packed.data)
                same(unpack(sparse.unpack(Packed(fmt, (n, k), SPARSE, data))).data, codes.data)


def integer_products(announce: Callable[[str], None]) -> None:
    scales = {"in_scale": 0.1, "in_zero": -3, "out_scale": 2.0, "out_zero": 5}
    some_m, some_n = itertools.cycle(MS), itertools.cycle(NS)
    for name, k, _ in itertools.product(("int8_channel", "int4_tensor"), KS, range(4)):
        fmt, m, n = as_format(name), next(some_m), next(some_n)
        packed = pack(random_codes(fmt, (n, k)))
        kernel, table = LinearKernel(fmt, n, k, torch.int8, "int8", "block"), ops.requantization_table(packed, None, **scales)
        x = torch.randint(-128, 128, (m, k), dtype=torch.int8)
        wanted = kernel(x, packed.data.data_ptr(), table, -128.0, 127.0)
        for flush in ENDS:
            announce(f"qlinear {name} m={m} n={n} k={k} flush with {flush}")
            scratch(flush)
            rows, data, columns = placed(x, flush), placed(packed.data, flush), placed(table, flush)
            with guarded_allocations(flush):
                same(kernel(rows, data.data_ptr(), columns, -128.0, 127.0), wanted)


# Channels of a group, groups, outputs of a group, kernel, window.
FILTERS = [
    (64, 1, 33, (1, 1), Window()), (16, 1, 5, (1, 1), Window((2, 2))), (32, 1, 32, (3, 3), Window()), (48, 2, 8, (2, 3), Window()),
    (32, 1, 17, (3, 3), Window((1, 1), (1, 1, 1, 1))), (24, 1, 7, (1, 2), Window((1, 1), (0, 1, 2, 0), (1, 2))),
    (3, 1, 32, (7, 7), Window((2, 2), (3, 3, 3, 3))), (5, 3, 4, (2, 2), Window()), (8, 1, 3, (1, 1), Window()),
    (1, 40, 1, (3, 3), Window((1, 1), (1, 1, 1, 1))), (1, 7, 1, (2, 5), Window((2, 1), (0, 1, 1, 0), (1, 2))),
    (1, 16, 1, (3, 3), Window((2, 2))),
]  # fmt: skip


def convolutions(announce: Callable[[str], None]) -> None:
    scales = {"in_scale": 0.1, "in_zero": -3, "out_scale": 2.0, "out_zero": 5}
    for number, (channels, groups, out, kernel, window) in some(enumerate(FILTERS)):
        for dtype, name in (
            (torch.int8, "int8_channel"),
            (torch.int8, "int4_channel"),
            (DTYPES[number % 3], "int8_channel"),
            (torch.float32, "q4_0"),
        ):
            sizes = Filter(as_format(name), out * groups, channels, kernel, groups)
            weight = conv_ops.pack_conv(random_codes(sizes.format, sizes.codes_shape), kernel, groups)
            depthwise = channels == out == 1
            integer = dtype == torch.int8
            data = convolution.taps(convolution.unpack(weight), sizes, integer=integer) if depthwise else weight.data
            b, h, w = 1 + number % 2, 9, 7 + number
            x = (
                torch.randint(-128, 128, (b, h, w, channels * groups), dtype=torch.int8)
                if integer
                else torch.randn(b, h, w, channels * groups)
            )
            x = x.to(dtype)
            bias = conv_ops.conv_requantization_table(weight, None, **scales) if integer else torch.randn(sizes.out)
            run = DepthwiseKernel(sizes, dtype) if depthwise else ConvKernel(sizes, dtype, "int8", "block")
            how: dict[str, Any] = {"outside": -3 if integer else 0}
            wanted = run(x.permute(0, 3, 1, 2), window, data, bias, -9.0, 9.0, **how)
            added = None if integer else torch.randn(wanted.permute(0, 2, 3, 1).shape).to(dtype)
            if added is not None:
                wanted = run(x.permute(0, 3, 1, 2), window, data, bias, -9.0, 9.0, residual=added.permute(0, 3, 1, 2), **how)
            for flush in ENDS:
                announce(f"conv {name} {dtype} {sizes.numbers} {window.numbers} flush with {flush}")
                images = placed(x.flatten(), flush).view(x.shape).permute(0, 3, 1, 2)
                given = placed(data.flatten(), flush).view(data.shape), placed(bias.flatten(), flush).view(bias.shape)
                if added is not None:
                    how["residual"] = placed(added.flatten(), flush).view(added.shape).permute(0, 3, 1, 2)
                with guarded_allocations(flush):
                    same(run(images, window, *given, -9.0, 9.0, **how), wanted)


def image_convolutions(announce: Callable[[str], None]) -> None:
    """Of floats whose codes are made first."""
    for number, (channels, groups, out, kernel, window) in some(enumerate(FILTERS[:8:3])):
        dtype, sizes = DTYPES[number % 3], Filter(as_format("int8_channel"), out * groups, channels, kernel, groups)
        weight = conv_ops.pack_conv(random_codes(sizes.format, sizes.codes_shape), kernel, groups)
        x, bias = torch.randn(1 + number % 2, 9, 7, channels * groups).to(dtype), torch.randn(sizes.out)
        run = ImageConvKernel(ConvKernel(sizes, torch.int8, "int8", "block", out=dtype))
        wanted = run(x.permute(0, 3, 1, 2), window, weight.data, bias, -9.0, 9.0)
        for flush in ENDS:
            announce(f"conv of images {dtype} {sizes.numbers} {window.numbers} flush with {flush}")
            images = placed(x.flatten(), flush).view(x.shape).permute(0, 3, 1, 2)
            data, biases = placed(weight.data.flatten(), flush).view(weight.data.shape), placed(bias, flush)
            with guarded_allocations(flush):
                same(run(images, window, data, biases, -9.0, 9.0), wanted)


# For kernels with weights of a form of their own: channels of a group, groups, outputs of a group, kernel, window.
AROUND = Window((1, 1), (1, 1, 2, 0))
ARRANGED = [(40, 1, 33, (1, 1), Window()), (16, 2, 5, (3, 3), AROUND), (3, 1, 32, (7, 7), Window((2, 2), (3, 3, 3, 3)))]


QUADS = [(1, 70, 1, (3, 3), Window((1, 1), (1, 1, 1, 1))), (1, 33, 1, (3, 2), Window((2, 2))), (1, 16, 1, (1, 3), Window())]


def rearranged_weights(announce: Callable[[str], None]) -> None:
    isa = current()
    filtered = [(2 * isa.lanes, 1, out, (3, 3), Window((1, 1), (number, 1, 2, number))) for number, out in enumerate((5, 33))]
    others = ARRANGED if isa.tuning.arranged_conv else [*ARRANGED[-1:], *QUADS] if isa.mixed_dot else []
    for number, (channels, groups, out, kernel, window) in enumerate(filtered * (isa.tuning.winograd is not None) + others):
        sizes = Filter(as_format("int8_channel"), out * groups, channels, kernel, groups)
        codes = conv_ops.quantize_conv(torch.randn(out * groups, channels, *kernel), sizes.format)
        x = torch.randint(-128, 128, (2, 9, 7 + number, channels * groups), dtype=torch.int8)
        scales = {"in_scale": 0.1, "in_zero": -3, "out_scale": 200.0, "out_zero": 5}
        packed = conv_ops.pack_conv(codes, kernel, groups)
        table = conv_ops.conv_requantization_table(packed, None, **scales)
        form: Any = ArrangedConvKernel if isa.tuning.arranged_conv else UnsignedConvKernel
        if channels == out == 1:
            run: Any = DepthwiseDotKernel(sizes, window, window.out_size((9, 7 + number), kernel)[0])
        elif winograd_call.supports(sizes, window, isa):
            run = WinogradKernel(sizes)
        else:
            run = form(sizes, window, ConvKernel(sizes, torch.int8, "int8", "block").linear)
        data = run.weights_of(codes)
        assert data is not None
        wanted = run(x.permute(0, 3, 1, 2), window, data, table, -99.0, 99.0, outside=-3)
        for flush in ENDS:
            announce(f"{run.form} {sizes.numbers} {window.numbers} flush with {flush}")
            images = placed(x.flatten(), flush).view(x.shape).permute(0, 3, 1, 2)
            given = placed(data.flatten(), flush).view(data.shape), placed(table.flatten(), flush).view(table.shape)
            scratch(flush)
            with guarded_allocations(flush):
                same(run(images, window, *given, -99.0, 99.0, outside=-3), wanted)


def codes_alone(announce: Callable[[str], None]) -> None:
    """What goes on between products of codes."""
    for channels in (3, 17, 70):
        a, b = (torch.randint(-128, 128, (2, 5, 7, channels), dtype=torch.int8) for _ in range(2))
        how = Combination(torch.int8, 0.7, 3.0, 0.4, -100, 90)
        move, size = Window((2, 2), (1, 1, 1, 1)), (3, 4)
        still, ends = Window((1, 1), (0, 0, 0, 0)), ((5, 7), (1, 1))
        wanted = elementwise.combine(a, how, b), pool(a.permute(0, 3, 1, 2), (3, 3), move, size)
        mean = pool(a.permute(0, 3, 1, 2), ends[0], still, ends[1], 3)
        for flush in ENDS:
            announce(f"sums and pools of {channels} channels flush with {flush}")
            here, there = (placed(codes.flatten(), flush).view(codes.shape) for codes in (a, b))
            with guarded_allocations(flush):
                same(elementwise.combine(here, how, there), wanted[0])
                same(pool(here.permute(0, 3, 1, 2), (3, 3), move, size), wanted[1])
                same(pool(here.permute(0, 3, 1, 2), ends[0], still, ends[1], 3), mean)


def matrix_convolutions(announce: Callable[[str], None]) -> None:
    unit = current().matrix or EmulatedTiles()
    for (channels, kernel, stride, padding), out in itertools.product(((64, 1, 1, 0), (64, 2, 1, 1), (20, 3, 2, 1), (3, 7, 2, 3)), (5, 32)):
        if unit.missing() is not None:
            continue
        sizes, window = Filter(as_format("int8_channel"), out, channels, (kernel,) * 2), Window((stride,) * 2, (padding,) * 4)
        codes, x = random_codes(sizes.format, sizes.codes_shape), torch.randint(-128, 128, (1, 7, 9, channels), dtype=torch.int8)
        scales = {"in_scale": 0.1, "in_zero": -3, "out_scale": 200.0, "out_zero": 5}
        table = conv_ops.conv_requantization_table(conv_ops.pack_conv(codes, kernel), None, **scales)
        run = MatrixConvKernel(sizes, window, unit)
        data = run.weights_of(codes)
        wanted = run(x.permute(0, 3, 1, 2), window, data, table, -99.0, 99.0, outside=-3)
        for flush in ENDS:
            announce(f"matrix units {sizes.numbers} {window.numbers} flush with {flush}")
            images = placed(x.flatten(), flush).view(x.shape).permute(0, 3, 1, 2)
            given = placed(data.flatten(), flush).view(data.shape), placed(table.flatten(), flush).view(table.shape)
            scratch(flush)
            with guarded_allocations(flush):
                same(run(images, window, *given, -99.0, 99.0, outside=-3), wanted)


def attentions(announce: Callable[[str], None]) -> None:
    launch, half = attention.native(current(), 1), "f16" if current().half_conversions else "bf16"
    for dim, kind, masked, length, t in ((24, half, True, 5, 3), (8, "f32", False, 33, 1), (40, "int8", False, 33, 1)):
        rope_interleaved = {24: "half", 8: "", 40: "repeated"}[dim]
        spec, b, kv_heads, size = (
            AttendSpec(dim, 2, kind, normed=masked, masked=masked, sinks=dim != 24, rope_interleaved=rope_interleaved),
            2,
            2,
            length + t,
        )
        width = dim if rope_interleaved == "repeated" else dim // 2
        qkv, rope, norms, sinks = torch.randn(b, t, 4 * kv_heads * dim), torch.randn(b, t, width), torch.rand(2, dim), torch.randn(4)
        cache, mask = attention.entered(torch.randn(2, b, kv_heads, size, dim), attention.KINDS[kind]), torch.rand(b, t, size) < 0.6

        def run(
            place: Callable[[Tensor], Tensor],
            kept: Tensor,
            spec: AttendSpec = spec,
            rest: tuple[Any, ...] = (qkv, rope, mask, norms, sinks, length),
        ) -> Tensor:
            qkv, rope, mask, norms, sinks, length = rest
            cos = place(rope.flatten()).view(rope.shape)
            seen = place(mask.flatten()).view(mask.shape) if spec.masked else None
            of_heads = (place(norms[0]), place(norms[1])) if spec.normed else None
            x, of_scores = place(qkv.flatten()).view(qkv.shape), place(sinks) if spec.sinks else None
            return attention.attended(launch, spec, x, (cos, cos), (kept[0], kept[1]), length, seen, of_heads, of_scores)

        wanted = run(lambda t: t, cache.clone())
        for flush in ENDS:
            announce(f"attention to a cache {spec} length={length} t={t} flush with {flush}")
            kept = guarded(cache.shape, cache.dtype, flush).copy_(cache)
            with guarded_allocations(flush):
                same(run(functools.partial(placed, flush=flush), kept), wanted)


def encoders_parts(announce: Callable[[str], None]) -> None:
    for tokens, dim, masked in ((7, 20, True), (16, 8, False), (33, 8, True)):
        qkv, mask = torch.randn(2, tokens, 3, 2, dim), torch.rand(2, 1, tokens, tokens) < 0.7

        def run(qkv: Tensor, mask: Tensor | None) -> Tensor:
            return attend_whole.attend(*qkv.permute(2, 0, 3, 1, 4), mask, 0.3)

        wanted = run(qkv, mask if masked else None)
        for flush in ENDS:
            announce(f"attention of {tokens} tokens, {dim} elements flush with {flush}")
            scratch(flush)
            given = placed(qkv.flatten(), flush).view(qkv.shape), placed(mask.flatten(), flush).view(mask.shape) if masked else None
            with guarded_allocations(flush):
                same(run(*given), wanted)
    for k, flush in itertools.product(KS, ENDS):
        announce(f"norm of {k} elements flush with {flush}")
        x, weight, shift = torch.randn(3, k + 1), torch.randn(k), torch.randn(k)
        launch, out, wanted = encoder_parts.native(current(), 1), guarded((3, k), torch.float32, flush), torch.empty(3, k)
        encoder_parts.normed(launch, x, wanted, weight, shift, 1e-5)
        encoder_parts.normed(launch, placed(x[:, :k], flush, gap=2), out, placed(weight, flush), placed(shift, flush), 1e-5)
        same(out, wanted)


def weights(announce: Callable[[str], None]) -> None:
    dtypes = itertools.cycle(DTYPES)
    names = ("q4_0", "q4_1", "int8_g20_zp_bf16", "int8_channel_f32", "int4_g33_offset_f32", "int6_g16", "int5_g33_offset")
    for name, k, n in itertools.product(some(names), KS, (1, 31, 32, 33)):
        fmt, dtype = as_format(name), next(dtypes)
        packed, geo, ids = pack(random_codes(fmt, (n, k))), geometry(fmt, (n, k)), torch.tensor([n - 1, 0, n // 2])
        wanted, rows = dequantize.dequantize(packed.data, geo, dtype), dequantize.dequantize(packed.data, geo, dtype, ids)
        weight = torch.randn(n, k).to(dtype)
        codes = quantize.quantize(weight, fmt) if quantize.supports(weight, fmt) is None else None
        for flush in ENDS:
            announce(f"dequantize and quantize {name} {dtype} n={n} k={k} flush with {flush}")
            data = placed(packed.data, flush)
            with guarded_allocations(flush):
                same(dequantize.dequantize(data, geo, dtype), wanted)
                same(dequantize.dequantize(data, geo, dtype, placed(ids, flush)), rows)
                if codes is not None:
                    again = quantize.quantize(placed(weight, flush, gap=k % 2), fmt)
                    for part, tensor in codes.tensors().items():
                        same(again.tensors()[part], tensor)


def main(progress: str, one_too_far: bool) -> None:
    faulthandler.enable()
    kernel_cache.by_ir()
    torch.manual_seed(0)
    runtime.threads = lambda: 1  # thousands of small calls
    with Path(progress).open("w") as file:

        def announce(text: str) -> None:
            file.seek(0)
            file.write(text.ljust(120))
            file.flush()

        announce("one too far")
        if one_too_far:
            for flush in ENDS:
                t = placed(torch.zeros(5), flush)
                ctypes.string_at(t.data_ptr(), t.nbytes)
            ctypes.string_at(t.data_ptr() - 1, 1)
        scratch("end")
        products(announce)
        products_of_many_rows_or_outputs(announce)
        sparse_products(announce)
        integer_products(announce)
        convolutions(announce)
        image_convolutions(announce)
        rearranged_weights(announce)
        codes_alone(announce)
        matrix_convolutions(announce)
        attentions(announce)
        encoders_parts(announce)
        weights(announce)
        for part in guarded_layers.ALL:
            part(announce)


if __name__ == "__main__":
    main(sys.argv[1], len(sys.argv) > 2)
