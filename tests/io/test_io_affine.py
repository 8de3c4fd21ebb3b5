"""Folders of HQQ and torchao, laid out by their definitions: w = (q - zero) scale, exactly. (hqq 0.2.8 and torchao 0.18 gave the same.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.checkpoint import convert, load, load_tensors
from halfbyte.errors import CheckpointError
from halfbyte.formats import Codes
from halfbyte.io.weights import torchao
from halfbyte.nn.config import Config
from halfbyte.nn.modules.quantized import QuantLinear

INTX = "IntxUnpackedToInt8Tensor"
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96, "vocab_size": 64}


def folder(path: Path, settings: dict[str, Any], change: Any, metadata: dict[str, str] | None = None) -> dict[str, Tensor]:
    """A Llama whose decoder's matrices are stored as `change(name, weight)` says: tensors and what they stand for. Gives the latter."""
    torch.manual_seed(0)
    config, stored, wanted = LlamaConfig(**SIZES), dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in LlamaForCausalLM(config).state_dict().items():
        if "_proj" not in name:
            stored[name] = tensor
            continue
        parts, wanted[name] = change(name.removesuffix(".weight"), tensor)
        stored |= {f"{name.removesuffix('.weight')}.{part}": value.clone() for part, value in parts.items()}
    path.mkdir()
    save_file(stored, path / "model.safetensors", {"format": "pt"} | (metadata or {}))
    described = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32", "quantization_config": settings}
    (path / "config.json").write_text(json.dumps(described))
    return wanted


def as_text(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def hqq(
    bits: int, group: int | None, axis: int = 1, dtype: torch.dtype = torch.float16, integral: bool = False, as_float: bool = False
) -> Any:
    def change(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        n, k = weight.shape
        size = group or k
        shape = (n * k // size, size) if axis == 1 else (size, n * k // size)
        q = torch.randint(0, 1 << bits, shape)
        scales = (shape[0], 1) if axis == 1 else (1, shape[1])
        scale, zero = (torch.rand(scales) / 100).to(dtype), (torch.rand(scales) * (1 << bits)).to(dtype)
        zero = zero.floor() if integral else zero
        if bits == 3:
            rows = torch.nn.functional.pad(q, (0, 0, 0, -shape[0] % 10)).chunk(10)
            packed = sum(part << 27 - 3 * i for i, part in enumerate(rows)).to(torch.int32)  # type: ignore[union-attr]
        else:
            packed = sum(part << 8 - bits * (i + 1) for i, part in enumerate(q.chunk(8 // bits))).to(torch.uint8)  # type: ignore[union-attr]
        meta = {"nbits": bits, "axis": axis, "channel_wise": 1, "quant_scale": 0, "quant_zero": 0, "encoded_state_dict": 1}
        parts = {key: torch.tensor(value, dtype=torch.int32) for key, value in meta.items()}
        parts |= {} if group is None else {"group_size": torch.tensor(group, dtype=torch.int32)}
        parts |= {"W_q": packed.view(dtype) if as_float else packed, "scale": scale, "zero": zero, "shape": torch.tensor([n, k])}
        parts |= {"packing": as_text(f"{bits}bit_u8"), "compute_dtype": as_text("torch.float16")}
        return parts, ((q - zero.double()) * scale.double()).reshape(n, k)

    return change


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ({"bits": 4, "group": 32}, "int4_g32_offset_f32"), ({"bits": 8, "group": 16}, "int8_g16_offset_f32"),
        ({"bits": 2, "group": 32, "dtype": torch.bfloat16}, "int4_g32_offset_f32"), ({"bits": 3, "group": 32}, "int4_g32_offset_f32"),
        ({"bits": 1, "group": 32}, "int4_g32_offset_f32"), ({"bits": 4, "group": None}, "int4_channel_offset"),
        ({"bits": 4, "group": 32, "integral": True}, "int4_g32_zp"), ({"bits": 4, "group": 32, "as_float": True}, "int4_g32_offset_f32"),
        ({"bits": 4, "group": 32, "axis": 0}, None), ({"bits": 8, "group": 16, "axis": 0}, None),
    ],
)  # fmt: skip
def test_hqq(how: dict[str, Any], form: str | None, tmp_path: Path) -> None:
    wanted = folder(tmp_path / "q", {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}, hqq(**how))
    tensors = load_tensors(tmp_path / "q")
    for name, weight in wanted.items():
        stored = tensors[name]
        if form is None:
            assert isinstance(stored, Tensor)
            # In floats: differences and products are rounded to float32.
            assert torch.allclose(stored.double(), weight, rtol=2.0**-22, atol=0)
        else:
            assert isinstance(stored, Codes)
            assert str(stored.format) == form
            assert torch.equal(stored.dequantize(torch.float64), weight)
    model = load(tmp_path / "q", format=None if form else "q8_0")
    assert sum(isinstance(module, QuantLinear) for module in model.modules()) == (7 if form else 8)
    if form is None:
        convert(tmp_path / "q", tmp_path / "c", Config("q8_0"))


@pytest.mark.parametrize(
    ("kind", "bits", "group", "points", "form", "compute"),
    [
        ("Int8Tensor", 8, None, False, "int8_channel", "auto"), ("Int8Tensor", 8, None, True, "int8_channel_zp", "int8"),
        (INTX, 4, 32, False, "int4_g32_f32", "auto"), (INTX, 4, 32, True, "int4_g32_zp_f32", "int8"),
        (INTX, 3, 16, True, "int4_g16_zp_f32", "auto"), (INTX, 6, 32, False, "int8_g32_f32", "auto"),
        ("Float8Tensor", 0, None, False, None, None),
    ],
)  # fmt: skip
def test_torchao(kind: str, bits: int, group: int | None, points: bool, form: str | None, compute: str | None, tmp_path: Path) -> None:
    inputs = {"_data": {"mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"}}} if compute == "int8" else None
    about: dict[str, Any] = {"act_quant_kwargs": inputs}
    if kind.startswith("Intx"):
        target = {"_type": "torch.dtype", "_data": f"int{bits}"}
        about = {"target_dtype": target, "activation_quantization": "int8_asym_per_token" if compute == "int8" else None}
    metadata: dict[str, str] = {}

    def change(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        n, k = weight.shape
        blocks, top = k // (group or k), 1 << max(bits - 1, 0)
        scale = torch.rand(n, blocks) / 100
        metadata[f"{name}.weight"] = json.dumps({"_type": kind, "_data": about, "_tensor_data_names": ["qdata", "scale", "zero_point"]})
        if form is None:
            q = torch.rand(n, k).to(torch.float8_e4m3fn)
            return {"_weight_qdata": q, "_weight_scale": scale}, (q.float() * scale).double()
        q, zero = (torch.randint(-top, top, (n, size), dtype=torch.int8) for size in (k, blocks))
        zero = zero if points else torch.zeros_like(zero)
        spread = [part.double().repeat_interleave(k // blocks, 1) for part in (zero, scale)]
        return {"_weight_qdata": q, "_weight_scale": scale, "_weight_zero_point": zero}, (q - spread[0]) * spread[1]

    wanted = folder(tmp_path / "q", {"quant_method": "torchao", "quant_type": {}}, change, metadata)
    tensors = load_tensors(tmp_path / "q")
    for name, weight in wanted.items():
        stored = tensors[name]
        assert form == (str(stored.format) if isinstance(stored, Codes) else None)
        assert torch.equal(stored.dequantize(torch.float64) if isinstance(stored, Codes) else stored.double(), weight)
    layer = load(tmp_path / "q").get_submodule("model.layers.0.mlp.down_proj")
    if isinstance(layer, QuantLinear):
        row = {"auto": "block", "int8": "row_offset" if kind.startswith("Intx") else "row"}
        assert (layer.compute, layer.activation) == (compute, row[str(compute)])


def test_what_is_refused(tmp_path: Path) -> None:
    def broken(part: str, value: Tensor) -> Any:
        built = hqq(4, 32)
        return lambda name, weight: ((found := built(name, weight))[0] | {part: value}, found[1])

    for i, (part, value, message) in enumerate([
        ("axis", torch.tensor(2), "halfbyte reads HQQ of"),
        ("nbits", torch.tensor(5), "halfbyte reads HQQ of"),
        ("quant_zero", torch.tensor(1), "quantized themselves"),
        ("group_size", torch.tensor(40), "do not divide its rows"),
        ("W_q", torch.zeros(3, 32, dtype=torch.uint8), "not .* weights of 4 bits"),
        ("zero", torch.zeros(3, 1), "fits the others"),
    ]):  # fmt: skip
        folder(tmp_path / str(i), {"quant_method": "hqq"}, broken(part, value))
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / str(i))
    parts = {"_weight_qdata": torch.zeros(4, 2, dtype=torch.int32), "_weight_scale": torch.ones(4, 1)}
    for i, (metadata, message) in enumerate(
        [(None, "no file describes"), ({"Int4Tensor": 1}, "'Int4Tensor' .* halfbyte reads matrices that are")]
    ):
        names = [name for name, _ in LlamaForCausalLM(LlamaConfig(**SIZES)).named_parameters()]
        said = {name: json.dumps({"_type": "Int4Tensor", "_data": {}}) for name in names} if metadata else None
        folder(
            tmp_path / f"ao{i}",
            {"quant_method": "torchao"},
            lambda name, weight: (parts, weight),
            said,
        )
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / f"ao{i}")


def test_zero_points_of_torchao_that_an_int16_would_make_0() -> None:
    parts = {"qdata": torch.zeros(4, 32, dtype=torch.int8), "scale": torch.ones(4, 1)}
    for dtype, point in ((torch.int32, 1 << 16), (torch.int64, 1 << 32), (torch.int16, 128)):
        with pytest.raises(CheckpointError, match=r"m\.zero_point is not a number of 8 bits: the checkpoint is damaged"):
            torchao.read({**parts, "zero_point": torch.full((4, 1), point, dtype=dtype)}, 8, (4, 32), 1, "m")
