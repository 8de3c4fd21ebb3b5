"""Codes that become blocks of ggml's types: those that were read give the same weights, and all others are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import random_codes
from test_gguf import make, random_blocks, write_k_quants

import halfbyte as hb
from halfbyte.checkpoint import export, load_tensors
from halfbyte.cli import main
from halfbyte.errors import FormatError
from halfbyte.formats import Codes, as_format, ggml, ggml_encoding
from halfbyte.io import gguf

package = pytest.importorskip("gguf")

WRITTEN = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "tq2_0", "mxfp4", "nvfp4")
# Small integers by which a float16 is multiplied, of types whose scales are products.
PRODUCTS = {"q2_K": (0, 15), "q3_K": (-32, 31), "q4_K": (0, 63), "q5_K": (0, 63), "q6_K": (-128, 127), "iq4_xs": (-32, 31)}


def of(name: str) -> ggml.BlockType:
    return ggml.TYPES[ggml.NUMBERS[name]]


def gguf_dequantized(name: str, blocks: torch.Tensor) -> Any:
    return package.dequantize(blocks.numpy(), package.GGMLQuantizationType(ggml.NUMBERS[name]))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_read_is_written(name: str) -> None:
    """As the package dequantizes it. Several d and s may have the same products, so that bytes may differ."""
    kind = of(name)
    raw = torch.from_numpy(random_blocks(kind, 5, 3))
    codes = ggml.decode(kind, (5, 3 * kind.weights), raw)
    assert ggml_encoding.candidates(codes.format, codes.shape[-1])[0] is kind
    assert ggml_encoding.holds(kind, codes)
    blocks = ggml_encoding.encode(kind, codes)
    assert np.array_equal(gguf_dequantized(name, blocks), gguf_dequantized(name, raw))
    again = ggml.decode(kind, codes.shape, blocks)
    assert all(torch.equal(tensor, codes.tensors()[part]) for part, tensor in again.tensors().items())
    if name not in PRODUCTS:
        assert torch.equal(blocks, raw)
    stacked = codes.select(slice(0, 4)).reshape((2, 2, codes.shape[-1]))
    assert torch.equal(ggml_encoding.encode(kind, stacked).flatten(0, 1), blocks[:4])


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64)])
def test_one_scale_of_a_tensor_is_that_of_each_block(shape: tuple[int, ...]) -> None:
    codes = hb.quantize(torch.randn(shape), "int8_tensor_f16")
    blocks = ggml_encoding.encode(of("q8_0"), codes)
    assert torch.equal(ggml.decode(of("q8_0"), shape, blocks).dequantize(), codes.dequantize())


@pytest.mark.parametrize("name", PRODUCTS)
@given(st.data())
def test_products_are_found(name: str, data: st.DataObject) -> None:
    """Whatever d and s are, the largest, the least, negative ones and none at all included."""
    kind, (low, high) = of(name), PRODUCTS[name]
    assert isinstance(kind.format.block, int)
    n = kind.weights // kind.format.block

    def products() -> torch.Tensor:
        d = data.draw(st.floats(-65504, 65504, width=16) | st.sampled_from([0.0, 2.0**-24, -(2.0**-24), 65504.0]))
        s = data.draw(st.lists(st.integers(low, high) | st.sampled_from([low, 0, high]), min_size=n, max_size=n))
        return torch.tensor([[d * each for each in s]], dtype=torch.float32)

    scale = products()
    zero = products() if kind.format.zero == "offset" else None
    random = random_codes(kind.format, (1, kind.weights))
    values = random.values().clamp(-4 if kind.format.signed else 0, 3) if name in ("q2_K", "q3_K") else random.values()
    codes = Codes.from_values(kind.format, values, scale, zero)
    assert ggml_encoding.holds(kind, codes)
    back = ggml.decode(kind, codes.shape, ggml_encoding.encode(kind, codes))
    assert torch.equal(back.dequantize(torch.float64), codes.dequantize(torch.float64))


@pytest.mark.parametrize("name", PRODUCTS)
def test_other_scales_are_not(name: str) -> None:
    """In the first row, or in a later one alone: no products, an integer that is too large, a prime with more bits than float16 has."""
    kind, prime = of(name), 2053 / 2048
    high = PRODUCTS[name][1]
    codes = ggml.decode(kind, (5, kind.weights), torch.from_numpy(random_blocks(kind, 5, 1)))
    for row, numbers in ((0, (1 / 3, 1.0)), (4, (1 / 3, 1.0)), (4, (high + 2.0, 1.0)), (4, (prime, prime))):
        scale = codes.scale.clone()
        scale[row] = torch.tensor([*numbers, *[0.0] * (scale.shape[1] - 2)])
        worse = Codes(codes.format, codes.shape, codes.data, scale, codes.zero)
        assert not ggml_encoding.holds(kind, worse)
        with pytest.raises(FormatError, match=f"{name} does not hold these"):
            ggml_encoding.encode(kind, worse)


def test_codes_that_a_type_does_not_have() -> None:
    for name, most in (("q2_K", 3), ("q3_K", 3), ("tq2_0", 2)):
        kind = of(name)
        ones = torch.ones(kind.format.scale_shape((1, 256)), dtype=kind.format.scale)
        for value, stored in ((most, True), (most + 1, False)):
            values = torch.zeros(1, 256, dtype=torch.int16)
            values[0, 77] = value
            codes = Codes.from_values(kind.format, values, ones, ones if kind.format.zero == "offset" else None)
            assert ggml_encoding.holds(kind, codes) == stored


def test_scales_of_floats_of_4_bits() -> None:
    values = torch.zeros(1, 64, dtype=torch.int16)
    for scale, stored in ((2.0**-128, True), (2.0**127, True), (0.75, False), (0.0, False), (-0.5, False)):
        codes = Codes.from_values(as_format("mxfp4"), values, torch.full((1, 2), scale, dtype=torch.bfloat16))
        assert ggml_encoding.holds(of("mxfp4"), codes) == stored
    for scale, stored in ((224.0, True), (2.0**-10, True), (0.0, True), (1 + 2.0**-5, False), (-1.0, False), (256.0, False)):
        codes = Codes.from_values(as_format("fp4_g16"), values, torch.full((1, 4), scale, dtype=torch.float16))
        assert ggml_encoding.holds(of("nvfp4"), codes) == stored


@pytest.mark.parametrize(
    ("fmt", "k", "kinds"),
    [
        ("q4_0", 256, ["q4_0", "q5_0", "q8_0", "q6_K"]),
        ("int4_g64", 96, ["q4_0", "q5_0", "q8_0"]),
        ("int4_g32_zp", 64, ["q5_0", "q8_0"]),
        ("int5_g32_offset", 256, ["q5_1", "q5_K"]),
        ("int5_g64_offset", 96, ["q5_1"]),
        ("int6_g16", 256, ["q6_K"]),
        ("int6_g32", 256, ["q8_0", "q6_K"]),
        ("int8_g32_offset", 256, []),
        ("int8_g32_zp", 256, []),
        ("int4_g16", 128, []),
        ("mxfp4", 64, ["mxfp4", "nvfp4", "q5_0", "q8_0"]),
        ("iq4_nl", 64, ["iq4_nl", "q8_0"]),
    ],
)
def test_types_of_a_format(fmt: str, k: int, kinds: list[str]) -> None:
    found = ggml_encoding.candidates(as_format(fmt), k)
    assert [kind.name for kind in found] == kinds
    certain = [kind for kind in found if ggml_encoding.is_certain(kind, as_format(fmt))]
    codes = random_codes(as_format(fmt), (3, k))
    for kind in certain:  # whatever the scales are
        back = ggml.decode(kind, codes.shape, ggml_encoding.encode(kind, codes))
        assert torch.equal(back.dequantize(torch.float64), codes.dequantize(torch.float64))


def test_a_file_of_k_quants_becomes_a_folder_and_a_file_again(tmp_path: Path) -> None:
    write_k_quants(tmp_path)
    export(tmp_path / "k.gguf", tmp_path / "folder", "halfbyte")
    report = export(tmp_path / "folder", tmp_path / "again.gguf", "gguf")
    first, second = (gguf.read_header(tmp_path / name).entries for name in ("k.gguf", "again.gguf"))
    kinds = {name: gguf.kind_name(entry.kind) for name, entry in first.items()}
    assert kinds == {name: gguf.kind_name(entry.kind) for name, entry in second.items()}
    assert {"q2_K", "q4_K", "q6_K"} <= set(kinds.values())
    for name, entry in first.items():
        a, b = gguf.read(entry), gguf.read(second[name])
        actual, other = (value.dequantize() if isinstance(value, Codes) else value for value in (a, b))
        assert torch.equal(actual, other), name
    count = list(kinds.values()).count("q4_K")
    assert f"{count} of q4_K" in next(note for note in report.notes if note.startswith("tensors in the file:"))


def test_inspect_shows_what_is_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_k_quants(tmp_path)
    header = gguf.read_header(tmp_path / "k.gguf")
    assert main(["inspect", str(tmp_path / "k.gguf"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"]}
    for name, (kind, format, bits, stored) in {
        "model.layers.0.self_attn.q_proj.weight": ("q4_K", "int4_g32_offset_f32", 4.5, 6),
        "model.layers.0.self_attn.v_proj.weight": ("q6_K", "int6_g16_f32", 6.5625, 8),
        "model.norm.weight": ("float32", "float32", 32, 32),
    }.items():
        row = rows[name]
        weights = math.prod(row["shape"])
        assert (row["type"], row["format"]) == (kind, format), name
        assert (8 * row["bytes"], 8 * row["held_bytes"]) == (bits * weights, stored * weights), name
    assert found["totals"]["bytes"] == sum(entry.place.spec.nbytes for entry in header.entries.values())
    assert main(["inspect", str(tmp_path / "k.gguf")]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "in the files" in lines["name"]
    assert "in halfbyte" in lines["name"]
    assert lines["model.norm.weight"].split()[1:] == ["float32", "256", "1.0", "kB", "32.00"], "nothing is held otherwise"


@pytest.mark.parametrize(("fmt", "kind"), [("mxfp4", "mxfp4"), ("iq4_nl", "iq4_nl"), ("int5_g32_offset", "q5_1"), ("int5_g32", "q5_0")])
def test_a_quantized_model_in_types_of_their_own(fmt: str, kind: str, tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "float")
    hb.convert(tmp_path / "float", tmp_path / "q", hb.Config(fmt, embedding=None))
    export(tmp_path / "q", tmp_path / "m.gguf", "gguf")
    entries = gguf.read_header(tmp_path / "m.gguf").entries
    assert gguf.kind_name(entries["blk.0.ffn_up.weight"].kind) == kind
    actual, other = load_tensors(tmp_path / "q"), load_tensors(tmp_path / "m.gguf")
    for name, codes in actual.items():
        if isinstance(codes, Codes):
            found = other[name]
            assert isinstance(found, Codes)
            assert found.format == codes.format
            assert torch.equal(found.dequantize(torch.float64), codes.dequantize(torch.float64))


def test_scales_that_no_type_has_are_said(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "float")
    hb.convert(tmp_path / "float", tmp_path / "q", hb.Config("int4_g32_f32", embedding=None))
    report = export(tmp_path / "q", tmp_path / "m.gguf", "gguf")
    assert not report.quantized
    assert {row.reason for row in report.kept if "dequantized" in (row.reason or "")} == {
        "int4_g32_f32, dequantized: its float32 scales are not such as q4_0, q5_0, q8_0 would have"
    }
