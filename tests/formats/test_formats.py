"""Formats and their names, and codes: what is refused, and what the stored bytes mean."""

import contextlib
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import random_codes

from halfbyte.errors import FormatError
from halfbyte.formats import PRESETS, Codes, Format, as_format
from halfbyte.formats.codes import pack_nibbles, unpack_nibbles

SCALES = (torch.float16, torch.bfloat16, torch.float32)
blocks = st.one_of(st.sampled_from(["channel", "tensor"]), st.integers(1, 10**9 - 1))
plain_formats = st.builds(Format, st.sampled_from([4, 8]), blocks, st.sampled_from(["none", "point", "offset"]), st.sampled_from(SCALES))
formats = st.one_of(plain_formats, st.sampled_from(list(PRESETS.values())))
small_formats = st.one_of(
    st.builds(
        Format,
        st.sampled_from([4, 8]),
        st.sampled_from([1, 3, 4, 32, "channel", "tensor"]),
        st.sampled_from(["none", "point", "offset"]),
        st.sampled_from(SCALES),
    ),
    st.sampled_from(list(PRESETS.values())),
)
shapes = st.lists(st.integers(0, 4), max_size=2).flatmap(lambda lead: st.integers(0, 70).map(lambda k: (*lead, k)))


@given(formats)
def test_every_format_has_a_name_that_gives_it_back(fmt: Format) -> None:
    assert as_format(str(fmt)) == fmt
    assert as_format(fmt) is fmt


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("int4_g128", Format(4, 128)),
        ("int4_g128_zp", Format(4, 128, "point")),
        ("int8_channel", Format(8, "channel", scale=torch.float32)),
        ("int8_tensor_zp_f16", Format(8, "tensor", "point", torch.float16)),
        ("int4_g7_offset_bf16", Format(4, 7, "offset", torch.bfloat16)),
        ("q4_0", Format(4, 32, family="ggml")),
        ("inferllm_q8_0", Format(8, 32, scale=torch.float32, family="inferllm")),
    ],
)
def test_names(name: str, fmt: Format) -> None:
    assert as_format(name) == fmt
    assert str(fmt) == name


def test_the_usual_scale_dtype_may_be_spelled_out_but_is_not_printed() -> None:
    assert str(as_format("int4_g128_f16")) == "int4_g128"
    assert str(as_format("int8_channel_f32")) == "int8_channel"


def test_ggml_and_plain_formats_of_the_same_bits_and_block_differ() -> None:
    assert as_format("q4_0") != as_format("int4_g32")
    assert len({*PRESETS.values()}) == len(PRESETS)


BAD_NAMES = ["", "int4", "int4_g", "int4_g0", "int4_g032", "int7_g32", "int4_g32_zp_offset", "Q4_0", "q4_0 ", "int4_g32_f64"]


@pytest.mark.parametrize("name", [*BAD_NAMES, "int4_g1000000000", "int4_g٣٢", "int4_g32\n", None, 4])
def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(name: object) -> None:
    with pytest.raises(FormatError) as error:
        as_format(name)  # type: ignore[arg-type]
    assert repr(name) in str(error.value)
    assert all(preset in str(error.value) for preset in PRESETS)
    assert "int4_g128_zp" in str(error.value)


@given(st.text())
def test_any_text_is_a_format_or_a_format_error(text: str) -> None:
    with contextlib.suppress(FormatError):
        assert as_format(str(as_format(text))) == as_format(text)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"bits": 3}, "4 or 8"),
        ({"bits": 4.0}, "4 or 8"),
        ({"block": 0}, "channel"),
        ({"block": -32}, "channel"),
        ({"block": "row"}, "channel"),
        ({"block": 32.0}, "channel"),
        ({"block": True}, "channel"),
        ({"zero": "both"}, '"point"'),
        ({"scale": torch.float64}, "float16, bfloat16 or float32"),
        ({"family": "ggml"}, "q4_0"),
        ({"family": "ggml", "block": 32, "scale": torch.float32}, "q4_0"),
        ({"family": "other"}, "q4_0"),
        ({"sums": True}, "q4_0"),
    ],
)
def test_a_wrong_field_is_refused_and_the_allowed_are_named(fields: dict[str, object], allowed: str) -> None:
    with pytest.raises(FormatError) as error:
        Format(**{"bits": 4, "block": 128, **fields})  # type: ignore[arg-type]
    assert allowed in str(error.value)


def test_bits_per_weight() -> None:
    assert as_format("q4_0").bits_per_weight(4096) == 4.5
    assert as_format("q4_1").bits_per_weight(4096) == 5
    assert as_format("q8_0").bits_per_weight(4096) == 8.5
    assert as_format("int4_g128_zp").bits_per_weight(4096) == 4 + 24 / 128
    assert as_format("int8_channel").bits_per_weight(1000) == 8 + 32 / 1000
    assert as_format("int8_tensor").bits_per_weight(1000) == 8
    assert as_format("int4_g128").bits_per_weight(64) == 4 + 16 / 64  # a block is never longer than the row


@given(small_formats, shapes)
def test_bits_per_weight_are_the_bytes_where_blocks_are_whole(fmt: Format, shape: tuple[int, ...]) -> None:
    k = shape[-1]
    if fmt.block == "tensor" or k == 0 or k % 2 or k % fmt.block_size(k):
        return
    codes = random_codes(fmt, shape)
    assert codes.nbytes * 8 == pytest.approx(fmt.bits_per_weight(k) * math.prod(shape))


@given(st.lists(st.integers(0, 15), max_size=33), st.integers(0, 3))
def test_nibbles(values: list[int], rows: int) -> None:
    nibbles = torch.tensor(values, dtype=torch.uint8).expand(rows, -1)
    packed = pack_nibbles(nibbles)
    assert packed.shape == (rows, (len(values) + 1) // 2)
    assert torch.equal(unpack_nibbles(packed, len(values)), nibbles)
    for row in packed:
        for i, byte in enumerate(row.tolist()):
            assert byte & 15 == values[2 * i]
            assert byte >> 4 == (values[2 * i + 1] if 2 * i + 1 < len(values) else 0)


@given(small_formats, shapes, st.integers(0, 99))
def test_from_values_and_values_are_inverse(fmt: Format, shape: tuple[int, ...], seed: int) -> None:
    codes = random_codes(fmt, shape, seed)
    again = Codes.from_values(fmt, codes.values(), codes.scale, codes.zero)
    assert codes.values().shape == shape
    assert torch.equal(again.data, codes.data)
    assert codes.rows == math.prod(shape[:-1])


@given(small_formats, shapes, st.integers(0, 99))
def test_tensors_and_from_tensors_are_inverse(fmt: Format, shape: tuple[int, ...], seed: int) -> None:
    codes = random_codes(fmt, shape, seed)
    again = Codes.from_tensors(fmt, shape, codes.tensors())
    assert again.format == fmt
    assert again.shape == shape
    assert all(again.tensors()[name] is tensor for name, tensor in codes.tensors().items())
    assert codes.nbytes == sum(t.numel() * t.element_size() for t in codes.tensors().values())


@given(small_formats, shapes, st.integers(0, 99))
def test_dequantize_is_its_definition(fmt: Format, shape: tuple[int, ...], seed: int) -> None:
    codes = random_codes(fmt, shape, seed)
    weight = codes.dequantize(torch.float64)
    assert weight.shape == shape
    values, data = codes.values(), codes.data
    for place in itertools.product(*map(range, shape)):
        *lead, i = place
        block = tuple(0 for _ in shape) if fmt.block == "tensor" else (*lead, i // fmt.block_size(shape[-1]))
        byte = int(data[(*lead, i // 2 if fmt.bits == 4 else i)])
        q = (byte >> 4 * (i % 2) & 15) + fmt.q_min if fmt.bits == 4 else byte
        assert q == int(values[place])
        scale = float(codes.scale[block])
        zero = 0.0 if codes.zero is None else float(codes.zero[block])
        expected = scale * (q - zero) if fmt.zero == "point" else scale * q + zero
        assert float(weight[place]) == expected
        assert float(codes.dequantize()[place]) == float(np.float32(expected))


def test_dequantize_rounds_once() -> None:
    codes = Codes.from_values(as_format("int8_tensor_f32"), torch.tensor([[127]]), torch.tensor([[1.2345678]]))
    for dtype in SCALES:
        exact = torch.tensor(127 * float(torch.tensor(1.2345678)), dtype=torch.float64)
        assert codes.dequantize(dtype).item() == exact.to(dtype).item()


WRONG = {
    "q4_0": {"data": (torch.int8, (2, 16)), "scale": (torch.float32, (2, 1))},
    "int4_g16": {"data": (torch.uint8, (2, 33)), "scale": (torch.float16, (2, 2))},
    "int8_channel": {"data": (torch.uint8, (2, 33)), "scale": (torch.float32, (2,))},
    "int8_tensor_zp": {"data": (torch.int8, (2, 33)), "scale": (torch.float32, (1,)), "zero": (torch.int8, (1, 1))},
    "int4_g16_offset": {"data": (torch.uint8, (33, 2)), "zero": (torch.float32, (2, 3))},
    "int8_g32": {"data": (torch.int16, (2, 33)), "zero": (torch.float16, (2, 2))},
}


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in WRONG.items() for part in parts])
def test_codes_of_a_wrong_shape_or_dtype_are_refused(name: str, part: str) -> None:
    fmt, shape = as_format(name), (2, 33)
    tensors = random_codes(fmt, shape).tensors()
    Codes.from_tensors(fmt, shape, tensors)
    dtype, size = WRONG[name][part]
    with pytest.raises(FormatError, match=f"{part}|zero") as error:
        Codes.from_tensors(fmt, shape, {**tensors, part: torch.zeros(size, dtype=dtype)})
    assert name in str(error.value)
    assert str(list(size)) in str(error.value)


@given(small_formats, shapes, st.sampled_from(["data", "scale", "zero"]), st.integers(0, 2), st.integers(0, 99))
def test_codes_of_any_wrong_size_are_refused(fmt: Format, shape: tuple[int, ...], part: str, axis: int, seed: int) -> None:
    tensors = random_codes(fmt, shape, seed).tensors()
    if part not in tensors:
        return
    size = list(tensors[part].shape)
    size[axis % len(size)] += 1
    with pytest.raises(FormatError):
        Codes.from_tensors(fmt, shape, {**tensors, part: torch.zeros(size, dtype=tensors[part].dtype)})


@pytest.mark.parametrize("missing", ["data", "scale", "zero"])
def test_a_missing_part_is_named(missing: str) -> None:
    codes = random_codes(as_format("int4_g16_zp"), (2, 33))
    tensors = {name: tensor for name, tensor in codes.tensors().items() if name != missing}
    with pytest.raises(FormatError, match=missing if missing != "zero" else "point"):
        Codes.from_tensors(codes.format, codes.shape, tensors)


@pytest.mark.parametrize("shape", [(), (-1, 4)])
def test_codes_need_a_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match="shape"):
        Codes(as_format("int8_tensor"), shape, torch.zeros(0, dtype=torch.int8), torch.ones(1))


@pytest.mark.parametrize(
    ("name", "value"), [("int4_g16", 8), ("int4_g16", -9), ("int4_g16_zp", 16), ("int8_g16_zp", -1), ("int8_g16", 128), ("mxfp4", 5)]
)
def test_values_out_of_range_are_refused(name: str, value: int) -> None:
    codes = random_codes(as_format(name), (2, 33))
    values = codes.values()
    values[1, 32] = value
    with pytest.raises(FormatError, match=str(value)):
        Codes.from_values(codes.format, values, codes.scale, codes.zero)


def test_values_that_are_no_integers_are_refused() -> None:
    codes = random_codes(as_format("int4_g16"), (2, 33))
    with pytest.raises(FormatError, match="float32"):
        Codes.from_values(codes.format, codes.values().float(), codes.scale)


@given(small_formats, st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40)), st.integers(0, 99))
def test_parts_put_together_are_the_whole(fmt: Format, shape: tuple[int, int, int], seed: int) -> None:
    codes = random_codes(fmt, shape, seed)
    stacked = Codes.joined([codes.select(e) for e in range(shape[0])], torch.stack)
    rows = codes.reshape((shape[0] * shape[1], shape[2]))
    joined = Codes.joined([rows.select(slice(0, 1)), rows.select(torch.arange(1, rows.shape[0]))], torch.cat).reshape(shape)
    for whole in (stacked, joined):
        assert whole.shape == shape
        assert all(torch.equal(tensor, codes.tensors()[name]) for name, tensor in whole.tensors().items())
    assert torch.equal(rows.select(0).dequantize(), codes.dequantize()[0, 0])


def test_codes_move_between_devices() -> None:
    codes = random_codes(as_format("int4_g16_zp"), (2, 33)).to("meta")
    assert {t.device.type for t in codes.tensors().values()} == {"meta"}


def test_formats_and_codes_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        as_format("q4_0").bits = 8  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        random_codes(as_format("q4_0"), (1, 32)).shape = (2, 16)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_of_floats_are_exact(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    extremes = [0.0, -0.0, limits.max, -limits.max, limits.smallest_normal, limits.smallest_normal * limits.eps]
    weight = torch.cat((torch.randn(2, 15), torch.tensor(extremes).repeat(2, 1)), dim=1).to(dtype)
    codes = Codes.of_floats(weight)
    assert codes.format.is_of_floats
    assert torch.equal(codes.dequantize(dtype), weight)
    assert not as_format("int4_g32").is_of_floats
