"""A kind that is added to one list alone, of zeros, scales, codebooks, gates, observers, instruction sets, meets errors, never numbers.

Each test adds a name where its kind is listed, as somebody would who does not know the other places, and calls all that computes by it.
GPU kernels: `tests/kernels/gpu/test_gpu_unknown_kinds.py`. mypy finds a name that is added to a Literal: `errors.unreachable` takes none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte import env, ops
from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.gpu import compute_of
from halfbyte.dispatch.packed import packed_format
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.formats import spec
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels import layer_kinds, problem, reference
from halfbyte.kernels.cpu import step_sequence
from halfbyte.kernels.cpu.codegen import elements, isas
from halfbyte.kernels.cpu.codegen.ir import Module
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.tuning import Tuning
from halfbyte.kernels.cpu.conv import direct
from halfbyte.kernels.cpu.linear import activations, linear, tile
from halfbyte.kernels.cpu.quantize import dequantize, quantize
from halfbyte.kernels.cpu.transformer import attend
from halfbyte.kernels.cpu.transformer.experts import steps as experts
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.nn import config as configs
from halfbyte.nn.parallel import parallelize as parallel
from halfbyte.nn.parallel.plan import Cut
from halfbyte.ops import checks, fake_quantize
from halfbyte.ops.transformer import attend as attend_op
from halfbyte.ops.transformer import normed_linear
from halfbyte.ops.transformer.sublayers import Heads
from halfbyte.quantizers import absmax
from halfbyte.quantizers.absmax import nearest
from halfbyte.quantizers.gptq import GPTQ, gptq
from halfbyte.quantizers.sparse import as_sparsity, prune

ISA_AT_HAND = isas.current()
NEW: Any = "new"


def weight(n: int = 40, k: int = 96) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0))


def unsupported(what: str, *calls: Callable[[], object]) -> None:
    """Each call raises UnsupportedError with the name of the new kind."""
    for call in calls:
        with pytest.raises(UnsupportedError, match=what):
            call()


def built(build: Callable[..., Any], one: Any, **changes: Any) -> Callable[[], object]:
    """Generates a kernel from a specification, with some of its fields changed."""
    return lambda: build(replace(one, **changes), ISA_AT_HAND).text()


def changed_tile(one: Any, record: str, **changes: Any) -> Callable[[], object]:
    """Generates a tile from a specification, with some fields of one of its records changed."""
    return built(tile.build, one, **{record: replace(getattr(one, record), **changes)})


def specifications(fmt: str = "int4_g32_zp", inner: Any = "int8") -> tuple[Any, Any]:
    """Those of a tile and of a row of a linear layer."""
    return linear.specs(ISA_AT_HAND, cpu_tiles.geometry(as_format(fmt), (64, 64)), "f32", "f32", inner, "block")


# Formats


@pytest.fixture
def new_zero(monkeypatch: pytest.MonkeyPatch) -> Format:
    """A format whose zero is in the grammar's list alone."""
    monkeypatch.setitem(spec._ZERO_SUFFIXES, NEW, "_new")
    monkeypatch.setitem(spec._ZEROS, "_new", NEW)
    monkeypatch.setattr(spec, "_GRAMMAR", spec._grammar())
    return Format(4, 32, NEW)


def test_a_zero_in_the_grammar_alone(new_zero: Format) -> None:
    w, fmt = weight(), new_zero
    unsupported(
        "zero of a format 'new'",
        *(lambda method=method: ops.quantize(w, fmt, method) for method in ("absmax", "mse", "hqq")),
        lambda: gptq(w, fmt, torch.eye(96)),
        lambda: fmt.bits_per_weight(96),
        lambda: Codes.zeros(fmt, (0, 96)),
        lambda: cpu_tiles.geometry(fmt, (40, 96)).nbytes,
        lambda: gpu_tiles.geometry(fmt, (40, 96)).nbytes,
        built(dequantize.build, dequantize.spec_of(cpu_tiles.geometry(as_format("int4_g32"), (64, 64)), "f32"), zero=NEW),
        built(quantize.build, quantize.QuantizeSpec("f32", 4, "offset", "f16", "int"), zero=NEW),
        *(changed_tile(specifications(inner=inner)[0], "weight", zero=NEW) for inner in ("int8", "float")),
    )


def test_a_zero_that_is_stored_and_nothing_else(new_zero: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has said its dtype, too."""
    monkeypatch.setattr(Format, "zero_dtype", property(lambda self: None if self.zero == "none" else torch.float16))
    ones = torch.ones(40, 3, dtype=torch.float16)
    codes = Codes.from_values(new_zero, torch.ones(40, 96, dtype=torch.int8), ones, ones)
    x = weight(2)
    unsupported(
        "zero of a format 'new'",
        codes.dequantize,
        lambda: reference.linear(x, codes),
        lambda: reference.linear(x, codes, compute="int8"),
        lambda: ops.linear(x, ops.pack(codes)),
        lambda: ops.quantize(weight(), new_zero),
        lambda: ops.unpack(ops.pack(codes)).dequantize(),
    )


def test_a_scale_dtype_in_the_grammar_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(spec.SCALE_DTYPES, "f64", torch.float64)
    monkeypatch.setitem(spec._SCALE_NAMES, torch.float64, "f64")
    monkeypatch.setattr(spec, "_GRAMMAR", spec._grammar())
    fmt = Format(4, 32, scale=torch.float64)
    assert str(fmt) == "int4_g32_f64"
    codes = absmax(weight(), fmt)  # torch's operations round to any dtype
    x, packed = weight(2), ops.pack(codes)
    unsupported(
        r"element type (torch\.float64|'f64')",
        lambda: ops.quantize(weight(), fmt),
        lambda: ops.linear(x, packed),
        lambda: ops.linear(x, packed, compute="float"),
        lambda: ops.embedding(torch.tensor([1]), packed),
        lambda: elements.element_of(cast(Any, "f64")),
    )
    # One that can be loaded, and is not converted.
    monkeypatch.setitem(elements.ELEMENTS, cast(Any, "f64"), elements.Element(torch.float64, "double", 8))
    monkeypatch.setitem(elements.KINDS, torch.float64, cast(Any, "f64"))
    unsupported("'f64'", lambda: ops.linear(x, packed), lambda: ops.embedding(torch.tensor([1]), packed))
    unsupported("'f64'", lambda: ops.quantize(weight(), fmt))


@pytest.mark.parametrize("isa", isas.ISAS, ids=lambda isa: isa.name)
def test_no_instruction_set_converts_an_element_that_it_does_not_know(isa: ISA) -> None:
    f, kind = Module("").function("f", ["ptr"]), cast(Any, "e4m3")
    unsupported("'e4m3'", lambda: isa.to_float(f.value("<4 x i16>", 0), kind), lambda: isa.from_float(f.value("<4 x float>", 0), kind))


def test_a_codebook_without_a_rule_is_quantized_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What multiplies knows codes, not families: it computes with them. A GPU, whose kernels decode 4-bit floats alone, takes integers."""
    book = tuple(range(-120, 121, 16))
    monkeypatch.setitem(spec.CODEBOOKS, "nf4", book)
    monkeypatch.setattr(spec, "_GRAMMAR", spec._grammar())
    fmt, w = Format(4, 32, family=cast(Any, "nf4")), weight()
    unsupported(
        "family 'nf4'|codebook 'nf4'",
        *(lambda method=method: ops.quantize(w, fmt, method) for method in ("absmax", "mse", "hqq")),
        lambda: gptq(w, fmt, torch.eye(96)),
        lambda: nearest(fmt, w),
    )
    assert packed_format(fmt, on_cpu=False) == as_format("int8_g32")
    numbers = torch.tensor(book, dtype=torch.int16)[torch.randint(16, (40, 96), generator=torch.Generator().manual_seed(1))]
    codes, x = Codes.from_values(fmt, numbers, torch.full((40, 3), 0.01, dtype=torch.float16)), weight(3)
    for how in ({"compute": "float"}, {"compute": "int8", "activation": "block_offset"}):
        settings: dict[str, Any] = how
        y = ops.linear(x, ops.pack(codes), **settings)
        assert bool(reference.agrees(y, reference.linear(x, codes, **settings), reference.error_bound(x, codes, **settings)).all())


def test_a_project_without_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(spec._FOREIGN, "new_q4", (4, 32, "none", torch.float16, NEW, False))
    fmt = Format(4, 32, family=NEW)
    methods = ("absmax", "mse", "hqq")
    unsupported("family 'new'", *(lambda method=method: ops.quantize(weight(), fmt, method) for method in methods))
    monkeypatch.setattr(quantize, "_FAMILIES", (*quantize._FAMILIES, NEW))  # the fast quantizer lists it, and has no rule
    unsupported("family 'new'", lambda: ops.quantize(weight(), fmt))


def test_integers_of_so_many_bits_that_no_layout_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(spec.PACKED_BITS, "int7", 7)
    fmt = Format(8, 32, family=cast(Any, "int7"))
    codes = Codes.from_values(fmt, torch.ones(40, 96, dtype=torch.int8), torch.ones(40, 3, dtype=torch.float16))
    unsupported("family 'int7'", lambda: absmax(weight(), fmt), lambda: ops.quantize(weight(), fmt))
    unsupported("so many bits, 7", lambda: cpu_tiles.pack(codes), lambda: cpu_tiles.geometry(fmt, (40, 96)).nbytes)


# Activations and compute


def test_a_scaling_of_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ACTIVATIONS", (*checks.ACTIVATIONS, NEW))
    monkeypatch.setattr(checks.check_activation, "__defaults__", (checks.ACTIVATIONS,))
    x, codes = weight(2), ops.quantize(weight(), "int4_g32")
    packed = ops.pack(codes)
    unsupported(
        "scaling of activations 'new'",
        lambda: ops.linear(x, packed, compute="int8", activation=NEW),
        lambda: reference.linear(x, codes, compute="int8", activation=NEW),
        lambda: fake_quantize._fake_quantize_activation._init_fn(x, 32, NEW),
    )


def test_a_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "COMPUTES", (*problem.COMPUTES, NEW))
    x, codes = weight(2), ops.quantize(weight(), "int4_g32")
    unsupported(
        "'new'",
        lambda: ops.linear(x, ops.pack(codes), compute=NEW),
        lambda: choose(Problem("linear", 1, 32, 32, as_format("int4_g32"), torch.float32, NEW), ISA_AT_HAND),
        lambda: compute_of(NEW),
        lambda: reference.linear(x, codes, compute=NEW),
    )


def test_products_of_another_type() -> None:
    of_tile, of_row = specifications()
    row = built(activations.build, of_row, activation=replace(of_row.activation, inner=NEW))
    unsupported("products of 'new'", changed_tile(of_tile, "activation", inner=NEW), row)
    with pytest.raises(UnsupportedError, match="activations of bfloat16, got f16"):
        built(activations.build, specifications("int4_g32", "bf16")[1], source="f16")()


def test_the_conversion_of_a_blocks_sum() -> None:
    of_tile, of_row = specifications()
    row = built(activations.build, of_row, activation=replace(of_row.activation, block_sum=NEW))
    unsupported("conversion of a block's sum, 'new'", changed_tile(of_tile, "activation", block_sum=NEW), row)


def test_sums_of_activations_and_of_pixels() -> None:
    unsupported("sums of activations, 'new'", built(activations.build, specifications()[1], sums=NEW))
    lines = direct.StripSpec(8, 0, 0, 8, sums_codes=True, paired=False, code_bytes=1, unit=8, row_sums="single", masks_tail=True)
    unsupported("sums of pixels, 'new'", built(direct.build, lines, row_sums=NEW))


# Layers of language models


def test_a_gate_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normed_linear, "GATES", (*layer_kinds.GATES, NEW))
    x, packed = weight(2), ops.pack(ops.quantize(weight(64), "int4_g32"))
    unsupported(
        "gate function 'new'",
        lambda: normed_linear.normed_linear(x, None, packed, gates=NEW),
        lambda: normed_linear.normed_linear(x, None, packed, gates=NEW, gated=False),
        lambda: normed_linear.activated_in_torch(x, NEW, 1.0, gated=True),
        *(built(step_sequence.build, step_sequence.Step(kind, "silu"), gates=NEW) for kind in ("panels", "product")),
    )


@pytest.mark.parametrize("function", layer_kinds.GATES)
def test_gate_functions_are_what_their_definitions_say(function: layer_kinds.GateFunction) -> None:
    x = torch.linspace(-9, 9, 101, dtype=torch.float64)
    cubic = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    wanted = {"silu": x / (1 + (-x).exp()), "gelu_tanh": x / 2 * (1 + cubic.tanh()), "relu2": x.clamp(min=0) ** 2}[function]
    assert torch.allclose(layer_kinds.gate_in_torch(x, function), wanted, rtol=1e-12, atol=1e-15)


def test_a_function_of_logits() -> None:
    unsupported(
        "'new'", lambda: layer_kinds.logits_in_torch(weight(), (NEW, 2.0)), built(step_sequence.build, step_sequence.Step("cap"), kind=NEW)
    )


def test_scores_of_a_router() -> None:
    step = experts.ExpertsStep("choose", scores="sigmoid")
    unsupported("scores of a router, 'new'", lambda: layer_kinds.scores_in_torch(weight(), NEW), built(experts.build, step, scores=NEW))


def test_projections_and_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    spec_ = attend.AttendSpec(16, 2, "f32", normed=False, masked=False)
    heads = Heads(2, 1, 16, 1.0)
    monkeypatch.setattr(attend_op, "PROJECTIONS", (*layer_kinds.PROJECTIONS, "kv"))
    monkeypatch.setattr(attend_op, "ROPE_INTERLEAVED", (*layer_kinds.ROPE_INTERLEAVED, NEW))
    qkv, cache, length = torch.ones(1, 64), torch.zeros(1, 1, 8, 16), torch.zeros(1, dtype=torch.int64)
    rotary = torch.ones(1, 16), torch.ones(1, 16)
    unsupported(
        "projections of attention, 'kv'",
        lambda: heads._replace(projections=cast(Any, "kv")).outputs,
        lambda: attend_op.attend(qkv, None, cache, cache, length, None, heads._replace(projections=cast(Any, "kv"))),
        built(attend.build, spec_, projections="kv"),
    )
    unsupported(
        "interleaving of rope, 'new'",
        lambda: attend_op.attend(qkv, rotary, cache, cache, length, None, heads._replace(rope_interleaved=NEW)),
        built(attend.build, spec_, rope_interleaved=NEW),
    )


# Calibration and training


def test_an_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "OBSERVERS", (*configs.OBSERVERS, NEW))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    config = hb.Config("int8_channel", activations="static", observer=NEW)
    unsupported("observer of a static network, 'new'", lambda: hb.quantize_(copy.deepcopy(model), config, [torch.randn(1, 3, 8, 8)]))


def test_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.quantizers.gptq.GRIDS", ("mse", "absmax", NEW))
    unsupported("grid of GPTQ, 'new'", lambda: gptq(weight(), as_format("int4_g32"), torch.eye(96), GPTQ(grid=NEW)))
    unsupported("method of pruning, 'new'", lambda: prune(weight(), as_sparsity("2:4"), NEW, torch.eye(96)))
    with pytest.raises(ArgumentError, match="unknown quantization method 'new'"):
        ops.quantize(weight(), "int4_g32", NEW)


def test_the_communication_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = hb.quantize_(nn.Sequential(nn.Linear(96, 64)), hb.Config("int4_g32"))[0]
    for before, after in ((NEW, ""), ("", NEW)):
        part = parallel.Part(Cut("outputs", (), before, after), *[None] * (len(fields(parallel.Part)) - 1))  # type: ignore[arg-type]
        monkeypatch.setattr(parallel, "part_of", lambda module, part=part: part)
        unsupported("communication (before|after) a product, 'new'", lambda: parallel._forward(layer, weight(2)))


# Instruction sets


class Promising(ISA):
    """Says that it can do all, and does nothing more than the generic one."""

    name = "promising"
    needs: ClassVar[frozenset[str]] = frozenset()
    narrows = sums_shorts = bf16_dot = multiplies_sums = spreads = True
    tuning = Tuning(biased=True)


def test_an_instruction_set_that_lacks_what_it_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = Promising()
    formats = {"biased": ("int4_g32_zp", "int8"), "pairs": ("int8_channel", "int8"), "bf16": ("int4_g32", "bf16")}
    for fmt, inner in formats.values():
        geo = cpu_tiles.geometry(as_format(fmt), (64, 64))
        source: Any = "bf16" if inner == "bf16" else "f32"
        of_tile, of_row = linear.specs(isa, geo, source, "f32", cast(Any, inner), "block")
        with pytest.raises(UnsupportedError, match="instruction set promising has no"):
            (activations.build(of_row, isa).text(), tile.build(of_tile, isa).text())


def test_an_instruction_set_in_one_list_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isas, "ISAS", (*isas.ISAS, Promising()))
    monkeypatch.setenv("HALFBYTE_ISA", "promising")
    with pytest.raises(ArgumentError, match="HALFBYTE_ISA is 'promising'"):
        isas.current()
    monkeypatch.setattr(isas, "ISAS", isas.ISAS[:-1])
    monkeypatch.setattr(env, "ISAS", (*env.ISAS, "promising"))
    unsupported("instruction set 'promising'", isas.current)


# Tables


def test_each_table_has_all_kinds() -> None:
    assert {*step_sequence.GATES} == {*layer_kinds.GATES}
    assert {isa.name for isa in isas.ISAS} == {*env.ISAS}
    assert {element.dtype for element in elements.ELEMENTS.values()} >= {*spec.SCALE_DTYPES.values(), *checks.FLOATS}
    assert {*elements.ELEMENTS} >= {*spec.SCALE_DTYPES}
    assert {*problem.ACTIVATION_SCALINGS} == {*checks.ACTIVATIONS}
