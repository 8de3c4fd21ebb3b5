"""One layer as MatMulNBits: what is exported is what comes back, and what ONNX Runtime multiplies with."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
from samples import random_codes

from halfbyte.errors import ArgumentError, CheckpointError, HalfbyteError
from halfbyte.formats import Codes, as_format
from halfbyte.io.onnx import export_linear, import_linear

onnx = pytest.importorskip("onnx")

FORMATS = ("q4_0", "int4_g32_zp", "int4_g16_f32", "int4_g128_zp_f32", "q8_0", "int8_g64_zp", "int8_g32_f32")


def same(a: Codes, b: Codes) -> bool:
    return a.shape == b.shape and torch.equal(a.values().double(), b.values().double()) and torch.equal(a.dequantize(), b.dequantize())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(5, 128), (3, 77), (8, 256)])
def test_a_layer_comes_back(fmt: str, shape: tuple[int, int], tmp_path: Path) -> None:
    codes, bias = random_codes(as_format(fmt), shape), torch.randn(shape[0]).to(as_format(fmt).scale)
    export_linear(tmp_path / "a.onnx", codes, bias)
    onnx.checker.check_model(str(tmp_path / "a.onnx"))
    found, its_bias = import_linear(tmp_path / "a.onnx")
    assert same(found, codes)
    assert its_bias is not None
    assert torch.equal(its_bias, bias)
    export_linear(tmp_path / "b.onnx", found)
    again, unused = import_linear(tmp_path / "b.onnx")
    assert same(again, codes)
    assert unused is None


@pytest.mark.parametrize("fmt", ["int4_g32_f32", "int4_g64_zp_f32", "int8_g32_f32"])
def test_onnx_runtime_multiplies_with_the_same_weight(fmt: str, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    codes = random_codes(as_format(fmt), (24, 96))
    export_linear(tmp_path / "a.onnx", codes)
    session = ort.InferenceSession(str(tmp_path / "a.onnx"), providers=["CPUExecutionProvider"])
    weight = codes.dequantize(torch.float64)
    one_hot = torch.eye(96)
    got = torch.from_numpy(session.run(None, {"x": one_hot.numpy()})[0]).T
    # One product and exact zeros; ONNX Runtime rounds scale * (q - point) to float32 once, in one step or two.
    assert torch.allclose(got.double(), weight, rtol=2**-22, atol=0)


def test_what_the_operator_does_not_have(tmp_path: Path) -> None:
    for fmt, why in {
        "q4_1": "offsets",
        "int4_g24": "power of two",
        "int4_g32_bf16": "bfloat16",
    }.items():
        with pytest.raises(ArgumentError, match=why):
            export_linear(tmp_path / "a.onnx", random_codes(as_format(fmt), (4, 48)))
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (random_codes(as_format("q4_0"), shape) for shape in ((4, 64), (3, 32)))
    replace = os.replace

    def after_another_writer(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        export_linear(tmp_path / "a.onnx", other)
        assert same(import_linear(tmp_path / "a.onnx")[0], other)
        replace(source, target)

    monkeypatch.setattr(os, "replace", after_another_writer)
    export_linear(tmp_path / "a.onnx", one)
    assert same(import_linear(tmp_path / "a.onnx")[0], one)
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    with pytest.raises(CheckpointError, match="cannot read"):
        import_linear(path)
    for content in (b"", b"\xff" * 100, b"GGUF"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            import_linear(path)
    codes = random_codes(as_format("q4_0"), (4, 64))
    export_linear(path, codes)
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at])
        with contextlib.suppress(CheckpointError):
            assert same(import_linear(path)[0], codes)  # only what follows the weight is missing


def test_any_byte_may_be_another(tmp_path: Path) -> None:
    """A file is read or refused with one line."""
    path = tmp_path / "a.onnx"
    export_linear(path, random_codes(as_format("int4_g32_zp"), (4, 64)), torch.ones(4))
    whole = path.read_bytes()
    refused = list[str]()
    for at in range(len(whole)):
        for change in (1, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
            try:
                import_linear(path)
            except HalfbyteError as error:
                refused.append(str(error))
    assert len(refused) > 100
    assert not any("\n" in message for message in refused)
