"""Instruction sets of other CPUs: their kernels run under qemu-user, and each is refused where it can't run.

What this CPU has is tested by the other files, which run all that they do on each instruction set that they can.
"""

import dataclasses
import functools
import itertools
from pathlib import Path

import attention
import decoder_parts
import encoder_parts
import pytest
import torch
from emulated import kernels, program, sequences
from emulated.program import Emulator
from samples import largest_sums, random_codes
from support import activations, covering, pairwise, run_linear, skip_what_crashes, tile_spec

from halfbyte import machine as machine_module
from halfbyte import ops
from halfbyte.formats import Codes, Format, as_format
from halfbyte.kernels import conv_reference, reference
from halfbyte.kernels.cpu import step_sequence
from halfbyte.kernels.cpu.codegen import isa as isa_module
from halfbyte.kernels.cpu.codegen import isa_arm, jit
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isa_arm import SVE
from halfbyte.kernels.cpu.codegen.isas import ISAS
from halfbyte.kernels.cpu.conv.depthwise import DepthwiseKernel
from halfbyte.kernels.cpu.conv.gathered import ConvKernel
from halfbyte.kernels.cpu.linear import activations as activations_module
from halfbyte.kernels.cpu.linear import driver, tile
from halfbyte.kernels.cpu.linear.activations import RowSpec
from halfbyte.kernels.cpu.linear.tile_spec import ActivationSpec
from halfbyte.kernels.cpu.quantize import dequantize, quantize
from halfbyte.kernels.cpu.quantize.dequantize import DequantizeSpec
from halfbyte.kernels.cpu.quantize.quantize import QuantizeSpec
from halfbyte.kernels.cpu.step_sequence import Step
from halfbyte.kernels.cpu.transformer import attend, attend_whole
from halfbyte.kernels.cpu.transformer.attend import AttendSpec
from halfbyte.kernels.cpu.transformer.attend_whole import WholeSpec
from halfbyte.kernels.problem import Window
from halfbyte.layouts import convolution
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import LONGEST_BLOCK, Geometry, geometry, pack
from halfbyte.machine import machine
from halfbyte.ops.conv import functions as conv_ops
from halfbyte.quantizers.absmax import absmax

BY_NAME = {isa.name: isa for isa in ISAS}


def generic(arch: str) -> ISA:
    isa = ISA()
    isa.arch = arch
    return isa


# CPUs that have what the instruction set needs and, as far as there are such, no more.
TARGETS = {
    "generic": (generic("aarch64"), "cortex-a53"),
    "neon": (BY_NAME["neon"], "cortex-a53"),
    "neon_dotprod": (BY_NAME["neon_dotprod"], "neoverse-n1"),
    "neon_i8mm": (BY_NAME["neon_i8mm"], "max,sve=off"),
    "sve256": (BY_NAME["sve256"], "max,sve-max-vq=2"),
    "sve512": (BY_NAME["sve512"], "max,sve-max-vq=4"),
    "rv64gc": (BY_NAME["rv64gc"], "rv64"),
    "rvv128": (BY_NAME["rvv"], "rv64,v=true,vlen=128"),
    "rvv256": (BY_NAME["rvv"], "rv64,v=true,vlen=256"),
}
FEWER = ("generic", "sve512", "rv64gc", "rvv256")


@pytest.fixture(scope="module", params=TARGETS)
def emulator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    isa, cpu = TARGETS[request.param]
    if reason := program.missing(isa.arch):
        pytest.skip(reason)
    skip_what_crashes(isa)
    return Emulator(isa, cpu, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def step(request: pytest.FixtureRequest) -> int:
    """How far to go from one case to the next."""
    return 3 if request.node.callspec.params["emulator"] in FEWER else 1


KINDS = list(itertools.product((4, 8), ("none", "point", "offset")))
WAYS = ("float", "block", "row", "block_offset", "row_offset")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (torch.float16, torch.bfloat16, torch.float32)
# Bits, zero and way meet in all combinations in test_linear.py.
CASES = pairwise((4, 8), ("none", "point", "offset"), WAYS, (32, 20, 300, "channel"), DTYPES)
MS, NS, KS = (7, 1, 13, 2, 9, 3, 5, 4), (45, 33, 64, 1, 32), (333, 70, 32, 601, 1, 40, 97)


def test_products_are_those_of_the_reference(emulator: Emulator, step: int) -> None:
    for number, (bits, zero, way, block, dtype) in enumerate(CASES[:: min(step, 2)]):
        fmt, m, n, k = Format(bits, block, zero, SCALES[number % 3]), MS[number % len(MS)], NS[number % len(NS)], KS[number % len(KS)]
        compute, activation = ("float", "block") if way == "float" else ("int8", way)
        if (bits, zero) == (4, "none"):
            fmt = dataclasses.replace(fmt, family=("int", "fp4", "iq4")[0 if activation.endswith("offset") else number % 3])
        kernel = kernels.linear_kernel(emulator, fmt, n, k, dtype, compute, activation)
        codes, x, bias = random_codes(fmt, (n, k), number), activations(m, k, dtype, number, number % 3), torch.randn(n)
        x[-1, 0] = torch.nan if number % 4 == 0 else 1.0
        clamp = (-1.0, torch.inf) if number % 2 else (-torch.inf, torch.inf)
        y = run_linear(kernel, x, pack(codes), bias, clamp)
        wanted = reference.linear(x, codes, bias, compute, activation, clamp)
        error = reference.error_bound(x, codes, bias, compute, activation)
        assert bool(reference.agrees(y, wanted, error).all()), (fmt, way, dtype, m, n, k)


def test_codes_of_5_and_6_bits_give_the_products_of_8(emulator: Emulator) -> None:
    if not emulator.isa.reads_packed_bits:
        pytest.skip("they are packed as 8 bits there")
    for name, compute in (("int6_g16", "int8"), ("int5_g32_offset", "int8"), ("int6_g40", "float")):
        codes, x = random_codes(as_format(name), (45, 120)), activations(5, 120, torch.float32, 0)
        both = [
            run_linear(kernels.linear_kernel(emulator, c.format, 45, 120, torch.float32, compute, "block"), x, pack(c))
            for c in (codes, codes.integers())
        ]
        assert torch.equal(*both), name


FEW = (("int8_g20_zp", "int8", "row_offset"), ("int4_g32", "int8", "block"), ("int4_channel_offset", "float", "block"))


def test_a_row_does_not_depend_on_how_many_there_are(emulator: Emulator, step: int) -> None:
    for number, (name, compute, activation) in enumerate(FEW[::step]):
        n, k, fmt = 35, 70, as_format(name)
        kernel = kernels.linear_kernel(emulator, fmt, n, k, torch.float32, compute, activation)
        packed, x = pack(random_codes(fmt, (n, k))), activations(13, k, torch.float32, 0)
        whole = run_linear(kernel, x, packed)
        assert torch.equal(whole, torch.cat([run_linear(kernel, row, packed) for row in x.split(1)]))
        # Each number of rows is a tile of its own. Where there are three formats, each has a third of them.
        for m in sorted({emulator.isa.tuning.tile(m, compute, kernel.geometry).rows for m in range(1, 12)})[number :: len(FEW[::step])]:
            assert torch.equal(run_linear(kernel, x[:m], packed), whole[:m])


@pytest.mark.parametrize(("bits", "zero"), [(4, "none"), (8, "point"), (8, "none")])
def test_the_largest_sums_do_not_overflow(emulator: Emulator, bits: int, zero: str) -> None:
    codes, x = largest_sums(bits, zero)
    kernel = kernels.linear_kernel(emulator, codes.format, *codes.shape, torch.float32, "int8", "block")
    y, error = run_linear(kernel, x, pack(codes)), reference.error_bound(x, codes, None, "int8", "block")
    assert bool(reference.agrees(y, reference.linear(x, codes, None, "int8", "block"), error).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_in_integers_out(emulator: Emulator, bits: int) -> None:
    for scope, m, n, k in (("channel", 7, 45, 97), ("tensor", 1, 33, 200), ("channel", 5, 64, LONGEST_BLOCK + 40)):
        codes = random_codes(Format(bits, scope, "none", torch.float32), (n, k))
        x = torch.randint(-128, 128, (m, k), dtype=torch.int8)
        x[0] = -128
        scales = {"in_scale": 0.02, "in_zero": -3, "out_scale": 0.003 * k**0.5 * 2**bits, "out_zero": 5}
        bias, packed = torch.randn(n) * 10, pack(codes)
        kernel = kernels.linear_kernel(emulator, codes.format, n, k, torch.int8, "int8", "block")
        y = run_linear(kernel, x, packed, ops.requantization_table(packed, bias, **scales), (-100, 127))
        assert bool(reference.qlinear(x, codes, bias, **scales, clamp=(-100, 127)).agrees(y).all())


# Channels of a group, groups, outputs of a group, kernel, window.
FILTERS = [
    (32, 1, 33, (1, 1), Window()),
    (16, 1, 5, (3, 2), Window((1, 2), (1, 0, 1, 1))),
    (3, 1, 32, (5, 3), Window((2, 2), (2, 2, 1, 1))),
    (24, 2, 7, (2, 3), Window((1, 1), (0, 1, 2, 0), (1, 2))),
    (1, 19, 1, (3, 3), Window((1, 1), (1, 1, 1, 1))),
]


def test_convolutions_of_codes(emulator: Emulator, step: int) -> None:
    scales = {"in_scale": 0.02, "in_zero": -3, "out_zero": 5}
    for number, (channels, groups, out, kernel, window) in enumerate(FILTERS):
        for name in ("int8_channel", "int4_channel")[:: 1 if step == 1 else 2]:
            sizes = Filter(as_format(name), out * groups, channels, kernel, groups)
            codes = random_codes(sizes.format, sizes.codes_shape, number)
            x = torch.randint(-128, 128, (2, 6, 11, channels * groups), dtype=torch.int8).permute(0, 3, 1, 2)
            scales["out_scale"] = 0.003 * sizes.k**0.5 * 2**sizes.format.bits
            weight, bias = conv_ops.pack_conv(codes, kernel, groups), torch.randn(sizes.out)
            table = conv_ops.conv_requantization_table(weight, bias, **scales)
            if channels == out == 1:
                data, make = convolution.taps(codes, sizes, integer=True), functools.partial(DepthwiseKernel, sizes, torch.int8)
            else:
                data, make = weight.data, functools.partial(ConvKernel, sizes, torch.int8, "int8", "block")
            y = kernels.convolved(emulator, make, x, window, data, table, -100, 127, outside=-3)
            wanted = conv_reference.qconv2d(x, codes, kernel, window, bias, groups=groups, clamp=(-100, 127), **scales)
            assert bool(wanted.agrees(y).all()), (name, sizes, window)


@pytest.mark.parametrize("way", ["float", "int8", "image"])
def test_convolutions_of_floats(emulator: Emulator, way: str) -> None:
    taken = {"float": FILTERS[::2], "int8": FILTERS[1:4:2], "image": FILTERS[:4]}[way]  # depthwise is always in floating point
    for number, (channels, groups, out, kernel, window) in enumerate(taken):
        name, dtype = "q4_0" if way == "int8" and channels > 1 else "int8_channel", DTYPES[number % 3]
        sizes = Filter(as_format(name), out * groups, channels, kernel, groups)
        codes, bias = random_codes(sizes.format, sizes.codes_shape, number), torch.randn(sizes.out)
        x = torch.randn(1, 6, 11, channels * groups).to(dtype).permute(0, 3, 1, 2)
        image, data, more, arguments = x, conv_ops.pack_conv(codes, kernel, groups).data, {}, (x, codes, kernel, window, bias, groups)
        if channels == out == 1:
            data, make = convolution.taps(codes, sizes, integer=False), functools.partial(DepthwiseKernel, sizes, dtype)
        elif way == "image":
            image, scales = conv_reference.quantized_images(x)
            image, more = image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), {"scales": scales}
            make = functools.partial(ConvKernel, sizes, torch.int8, "int8", "block", out=dtype)
        else:
            make = functools.partial(ConvKernel, sizes, dtype, way, "block")
        y = kernels.convolved(emulator, make, image, window, data, bias, -5.0, 40.0, **more)
        if way == "image":
            wanted, error = conv_reference.conv2d_of_images(*arguments)
        else:
            wanted, error = conv_reference.conv2d(*arguments, way), conv_reference.error_bound(*arguments, way)
        assert bool(reference.agrees(y, wanted.clamp(-5, 40), error).all()), (way, name, sizes, window)


def test_dequantize(emulator: Emulator, step: int) -> None:
    for number, ((bits, zero), dtype) in enumerate(pairwise(KINDS, DTYPES)[:: 2 * step]):
        fmt, n, k = Format(bits, (32, 20, 33, "channel")[number % 4], zero, SCALES[number % 3]), 37, KS[number % len(KS)]
        codes = random_codes(fmt, (n, k), number)
        ids = torch.tensor([36, 0, 5, 5]) if number % 2 else None
        got = kernels.dequantized(emulator, pack(codes).data, geometry(fmt, (n, k)), dtype, ids)
        wanted = codes.dequantize(torch.float32).to(dtype)
        assert torch.equal(got, wanted if ids is None else wanted[ids])


def test_quantize_is_absmax(emulator: Emulator, step: int) -> None:
    names = ("q4_0", "q8_0", "int4_g32_zp", "int8_channel_offset_f32", "q4_1", "inferllm_q4_0", "int4_g20_bf16")
    for number, name in enumerate(names[::step]):
        fmt, k = as_format(name), (70, 333, 32, 64)[number % 4]
        weight = torch.randn(9, k + 3)[:, :k].to(DTYPES[number % 3])
        weight[3] = 0
        weight[4, ::2] = 1e-39
        got = kernels.quantized(emulator, weight, fmt)
        if not emulator.isa.half_conversions and fmt.scale == torch.float16:
            assert got == f"{emulator.isa.name} has no instruction that rounds to float16"
            continue
        assert isinstance(got, Codes)
        for part, wanted in absmax(weight, fmt).tensors().items():
            assert torch.equal(got.tensors()[part].view(torch.uint8), wanted.view(torch.uint8)), (name, part)
        weight[5, 20] = torch.inf
        assert kernels.quantized(emulator, weight, fmt) is None


def test_attention(emulator: Emulator, step: int) -> None:
    for number, case in list(enumerate(attention.CASES))[:: 4 * step]:
        if emulator.isa.half_conversions or "f16" not in case:
            attention.check(number, case, functools.partial(kernels.attend, emulator))


def test_encoders_parts(emulator: Emulator, step: int) -> None:
    encoder_parts.check_norm(77, 5, functools.partial(kernels.norm, emulator))
    for batch, tokens, dim in ((2, 5, 12), (1, 19, 16))[::step]:
        q, k_, v = encoder_parts.heads(batch, 2, tokens, dim)
        mask = torch.rand(batch, 1, 1, tokens) < 0.7 if batch == 2 else None
        wanted, error = encoder_parts.attention(q, k_, v, mask, 0.3)
        assert bool(((kernels.attend_whole(emulator, q, k_, v, mask, 0.3).double() - wanted).abs() <= error).all())


def test_whole_layers(emulator: Emulator, step: int) -> None:
    """Of decoders: one token, and a prompt, whose keys are laid out before they are multiplied; in some cases a few tokens."""
    running, few = functools.partial(sequences.emulated, emulator), step > 1
    if not few:
        encoder_parts.check_layer(running, before=False, masked=True)
    name, kind = ("q4_0", torch.bfloat16) if few else ("int8_channel", torch.float32)
    shapes = ((1, 1), (1, 11)) if few else ((1, 1), (1, 11), (3, 1))
    decoder_parts.check(name, decoder_parts.Sizes(4, 2, 16, 45, 32), shapes, running, kind)


def test_what_a_kernel_should_not_write_is_looked_at(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, n, k = as_format("int8_channel_f32"), 32, 32
    kernel, packed = kernels.linear_kernel(emulator, fmt, n, k, torch.float32, "float", "block"), pack(random_codes(fmt, (n, k)))
    run_linear(kernel, torch.randn(1, k), packed)
    run = emulator.run
    for place in (-1, -65, LINEAR.struct().size + 140):  # behind the last piece of memory, at its end, and in the activations

        def damaged(image: bytes, places: list[int], place: int = place) -> bytes:
            after = bytearray(run(image, places))
            after[place] ^= 1
            return bytes(after)

        monkeypatch.setattr(emulator, "run", damaged)
        with pytest.raises(AssertionError, match="memory was written that is not the kernel's"):
            run_linear(kernel, torch.randn(1, k), packed)


# Compiled, for any CPU

LAYER_NORMS = Step("rows", layer_norm=True), Step("norm", layer_norm=True)
WHOLE = WholeSpec(64, masked=True), WholeSpec(64, masked=True, group=2, kind="int8", causal=True, capped=True, sinks=True)
ADDED = Step("rows", unit_offset=True), Step("norm", unit_offset=True, added=True), Step("scale"), Step("over"), Step("cap")
OF_GEMMA4 = Step("norm", added=True, scaled=True), Step("panels", "gelu_tanh", ungated=True, external_up=True)
STEPS = (
    Step("sequence"),
    Step("rows"),
    Step("panels", "silu"),
    Step("panels", "gelu_tanh"),
    Step("panels", "relu2", ungated=True),
    Step("product"),
    *LAYER_NORMS,
    *ADDED,
    *OF_GEMMA4,
)


@pytest.mark.parametrize("arch", ["powerpc64le", "loongarch64", "wasm32", "riscv64", "aarch64"])
def test_the_generic_path_is_compiled_for_other_cpus(arch: str) -> None:
    isa = generic(arch)
    if arch == "riscv64":
        isa.features = BY_NAME["rv64gc"].features
    specs = [tile_spec(inner, 4, "point", (8, False), 2, 4) for inner in ("int8", "float")]
    modules = [driver.build(isa), *(tile.build(spec, isa) for spec in specs)]
    modules.append(activations_module.build(RowSpec("f32", ActivationSpec("int8", 8, one_unit=False), 8, False, False, -8, "codes"), isa))
    modules.append(dequantize.build(DequantizeSpec(4, "f16", "point", 8, "f32"), isa))
    modules.append(quantize.build(QuantizeSpec("f32", 4, "point", "f32", "int"), isa))
    modules.append(attend.build(AttendSpec(64, 2, "bf16", normed=True, masked=True), isa))
    modules.append(attend.build(AttendSpec(64, 2, "int8", normed=True, masked=False, enters=True), isa))
    modules.append(attend.build(AttendSpec(64, 2, "f32", normed=True, masked=True, rotary_dim=32, unit_offset=True, capped=True), isa))
    modules.append(attend.build(AttendSpec(64, 2, "f32", normed=False, masked=True, sinks=True, rope_interleaved="half"), isa))
    modules.append(attend.build(AttendSpec(64, 2, "f32", normed=True, masked=True, projections="qk", v_norm=True), isa))
    modules.append(attend.build(AttendSpec(64, 2, "f32", normed=True, masked=True, projections="q"), isa))
    modules += [*(attend_whole.build(spec, isa) for spec in WHOLE), *(step_sequence.build(step, isa) for step in STEPS)]
    for module in covering(modules):
        assert len(jit.compile_object(module, isa)) > 200


@pytest.mark.parametrize("name", ["avx512", "avx512_vnni", "avx512_bf16"])
def test_attention_and_steps_are_compiled_for_long_vectors(name: str) -> None:
    isa = BY_NAME[name]
    modules = [attend.build(AttendSpec(64, 2, kind, normed=True, masked=True), isa) for kind in attention.KINDS]
    modules.append(attend.build(AttendSpec(64, 2, "int8", normed=True, masked=False, enters=True), isa))
    modules.append(attend.build(AttendSpec(64, 2, "f32", normed=True, masked=True, rotary_dim=32, unit_offset=True, capped=True), isa))
    modules.append(attend.build(AttendSpec(64, 2, "f32", normed=False, masked=True, sinks=True, rope_interleaved="half"), isa))
    modules.append(attend.build(AttendSpec(64, 2, "f32", normed=True, masked=True, projections="qk", v_norm=True), isa))
    modules.append(attend.build(AttendSpec(64, 2, "f32", normed=True, masked=True, projections="q"), isa))
    modules += [*(attend_whole.build(spec, isa) for spec in WHOLE), *(step_sequence.build(step, isa) for step in STEPS)]
    modules.pop(-len(STEPS))  # a chain calls others, no more
    for module in modules:
        assert "%zmm" in jit.compile_assembly(module, isa)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["sve256", "sve512"])
def test_sve_tiles_are_dot_products_in_registers(name: str, bits: int) -> None:
    isa = BY_NAME[name]
    rows, vectors, *_ = isa.tuning.tile(100, "int8", Geometry(Format(bits, 32), 32, 32))
    spec = tile_spec("int8", bits, "none", (32, False), rows, vectors)
    lines = jit.compile_assembly(tile.build(spec, isa), isa).splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith("\tsdot\tz")]
    assert len(at) == rows * vectors * 8
    assert not any(line.startswith("\tstr\tz") for line in lines[at[0] : at[-1]])


@pytest.mark.parametrize("name", ["neon_dotprod", "neon_i8mm"])
def test_neon_tiles_keep_operands_off_the_stack(name: str) -> None:
    isa = BY_NAME[name]
    rows, vectors, *_ = isa.tuning.tile(8, "int8", Geometry(Format(4, 32), 32, 32))
    spec = tile_spec("int8", 4, "none", (32, True), rows, vectors)
    lines = jit.compile_assembly(tile.build(spec, isa), isa).splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith(("\tsdot", "\tsmmla"))]
    assert len(at) == rows * vectors * (8 if name == "neon_dotprod" else 4)
    assert not any(line.startswith(("\tstr\tq", "\tstp\tq")) and "[sp" in line for line in lines[at[0] : at[-1]])


@pytest.mark.parametrize("bits", [4, 8])
def test_rvv_tiles_multiply_vectors(bits: int) -> None:
    isa = BY_NAME["rvv"]
    skip_what_crashes(isa)
    rows, vectors, *_ = isa.tuning.tile(100, "int8", Geometry(Format(bits, 32), 32, 32))
    spec = tile_spec("int8", bits, "none", (32, False), rows, vectors)
    lines = jit.compile_assembly(tile.build(spec, isa), isa).splitlines()
    wanted = ("\tvmul.vv", "\tvmacc.vv", "\tvmadd.vv") if bits == 4 else ("\tvwmul.vv", "\tvwmacc.vv", "\tvwmaccsu.vv", "\tvwmulsu.vv")
    at = [i for i, line in enumerate(lines) if line.startswith(wanted)]
    assert len(at) == rows * vectors * 8 * 2  # two int16 products of each four k
    assert not any(line.startswith(("\tvs1r", "\tvs2r", "\tvs4r")) for line in lines[at[0] : at[-1]])


# Refused


def pretend(monkeypatch: pytest.MonkeyPatch, **fields: object) -> None:
    other = dataclasses.replace(machine(), **fields)
    monkeypatch.setattr(isa_module, "machine", lambda: other)
    monkeypatch.setattr(isa_arm, "machine", lambda: other)


@pytest.mark.parametrize(
    ("arch", "features", "usable"),
    [
        ("x86_64", BY_NAME["avx2"].needs, ["avx2", "generic"]),
        ("x86_64", BY_NAME["avx_vnni"].needs, ["avx_vnni", "avx2", "generic"]),
        ("x86_64", BY_NAME["avx512"].needs, ["avx512", "avx2", "generic"]),
        ("x86_64", BY_NAME["avx512_vnni"].needs, ["avx512_vnni", "avx512", "avx2", "generic"]),
        ("aarch64", {"neon"}, ["neon", "generic"]),
        ("aarch64", {"neon", "dotprod", "i8mm"}, ["neon_i8mm", "neon_dotprod", "neon", "generic"]),
        ("aarch64", {"neon", "dotprod", "sve", "sve512"}, ["sve512", "neon_dotprod", "neon", "generic"]),
        ("aarch64", {"neon", "dotprod", "i8mm", "sve", "sve128"}, ["neon_i8mm", "neon_dotprod", "neon", "generic"]),
        ("riscv64", {"m", "a", "f", "d", "c", "v"}, ["rvv", "rv64gc", "generic"]),
        ("riscv64", {"m", "a", "f", "d", "c"}, ["rv64gc", "generic"]),
        ("s390x", set(), ["generic"]),
    ],
)
def test_what_a_machine_can_run(arch: str, features: set[str], usable: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, arch=arch, features=frozenset(features))
    assert [isa.name for isa in ISAS if isa.missing() is None] == usable


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, arch="x86_64", features=frozenset({"neon"}))
    assert BY_NAME["neon"].missing() == "it is for aarch64, and this machine is x86_64"
    pretend(monkeypatch, arch="aarch64", features=frozenset({"neon", "dotprod", "sve", "sve128"}))
    assert BY_NAME["neon_i8mm"].missing() == "the CPU lacks i8mm"
    assert SVE(256).missing() == "its vectors are not 256 bits long"


@pytest.mark.parametrize(
    ("system", "found"),
    [
        ("linux", {"dotprod", "i8mm", "bf16", "sve", "sve256"}),
        ("darwin", {"dotprod", "fullfp16"}),
        ("win32", {"dotprod", "bf16"}),
        ("plan9", set()),
    ],
)
def test_features_of_arm_that_llvm_does_not_tell(system: str, found: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd asimddp sve i8mm bf16 svei8mm\nCPU part\t: 0xd40\n"
    apple = {"hw.optional.arm.FEAT_DotProd": b"\1\0\0\0", "hw.optional.arm.FEAT_FP16": b"\1\0\0\0", "hw.optional.arm.FEAT_I8MM": bytes(4)}
    monkeypatch.setattr(machine_module.sys, "platform", system)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    monkeypatch.setattr(machine_module, "_sve_bytes", lambda: 32)
    monkeypatch.setattr(machine_module, "_sysctl", lambda name: apple.get(name, b""))
    monkeypatch.setattr(machine_module, "_windows_has", {43, 68}.__contains__)
    assert machine_module._arm_features() == found | {"neon"}
