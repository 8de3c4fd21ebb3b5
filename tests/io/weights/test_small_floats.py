"""Weights in 8- and 4-bit floats and those of bitsandbytes, against transformers' and other libraries' own dequantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from halfbyte.checkpoint import convert, describe, export, load, load_tensors, save
from halfbyte.errors import ArgumentError, CheckpointError
from halfbyte.formats import Codes, as_format
from halfbyte.io.weights import bitsandbytes, float4, float8
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.modules.experts import QuantExperts
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.quantizers import absmax

E4M3 = torch.float8_e4m3fn
SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


# The definitions


def eights(*shape: int, seed: int = 0) -> Tensor:
    """Every finite 8-bit float may occur."""
    raw = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return torch.where(raw & 127 == 127, 0, raw).to(torch.uint8).view(E4M3)


@pytest.mark.parametrize(
    ("shape", "scale", "block"),
    [
        ((8, 12), (), None), ((8, 12), (1,), None), ((8, 12), (8, 1), None), ((8, 12), (8,), None), ((8, 12), (2, 3), (4, 4)),
        ((7, 10), (2, 3), (4, 4)), ((8, 12), (8, 3), None), ((3, 8, 12), (3, 2, 3), None), ((3, 8, 12), (3, 1, 12), None),
        ((3, 8, 12), (3,), None), ((3, 8, 12), (3, 1, 1), None), ((0, 12), (1,), None),
    ],
)  # fmt: skip
def test_8_bit_floats(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> None:
    weight, scales = eights(*shape), torch.rand(scale) + 0.5
    n, k = shape[-2:]
    spread = scales.reshape(*(scale if len(scale) > 1 else (-1, *(1 for _ in shape[1:])))).double()
    if len(scale) == len(shape) and scale[-2]:
        rows, columns = block or (n // scale[-2], k // scale[-1])
        spread = scales.double().repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :n, :k]
    for dtype in (torch.float32, torch.bfloat16):
        got = float8.read(weight, scales, block, dtype, "w")
        # Each product is rounded to float32, and then once more.
        assert torch.equal(got, (weight.double() * spread).float().expand(shape).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
def test_8_bit_floats_as_transformers_dequantizes_them(dtype: torch.dtype) -> None:
    weight = eights(256, 384)
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = torch.randint(100, 140, (2, 3), dtype=torch.uint8).view(dtype)
    else:
        scale = torch.rand(2, 3).to(dtype)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    assert torch.equal(float8.read(weight, scale, (128, 128), torch.bfloat16, "w"), expected)


@pytest.mark.parametrize(
    ("shape", "scale"),
    [((8, 12), (3, 3)), ((8, 12), (16, 1)), ((8, 12), (12,)), ((12,), (12,)), ((3, 8, 12), (2, 1, 1)), ((8, 12), (2, 0))],
)
def test_scales_that_do_not_fit(shape: tuple[int, ...], scale: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match="do not fit it"):
        float8.read(eights(*shape), torch.ones(scale), None, torch.float32, "w")
    with pytest.raises(CheckpointError, match="do not fit it"):
        float8.read(eights(8, 12), torch.ones(8, 1, dtype=torch.int32), None, torch.float32, "w")
    with pytest.raises(CheckpointError, match="not finite"):
        float8.read(eights(8, 12), torch.full((1,), torch.nan), None, torch.float32, "w")


def test_mxfp4_as_transformers_dequantizes_it() -> None:
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    exponents = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    actual = float4.read_mx(blocks.flatten(2), exponents, "w")
    assert str(actual.format) == "mxfp4"
    assert torch.equal(actual.dequantize(), expected.transpose(1, 2))


def test_every_exponent_of_mxfp4_is_exact() -> None:
    data = torch.arange(16, dtype=torch.uint8).repeat(16)[:16].expand(255, 16).contiguous()
    codes = float4.read_mx(data, torch.arange(255, dtype=torch.uint8)[:, None], "w")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    wanted = torch.stack((values[:16], torch.zeros(16, dtype=torch.float64)), 1).flatten() * 2.0 ** (
        torch.arange(255.0).double()[:, None] - 127
    )
    assert torch.equal(codes.dequantize(torch.float64), wanted)
    with pytest.raises(CheckpointError, match="not finite"):
        float4.read_mx(data[:1], torch.tensor([[255]], dtype=torch.uint8), "w")


def test_nvfp4_as_compressed_tensors_dequantizes_it() -> None:
    compressor = pytest.importorskip("compressed_tensors.compressors.nvfp4.base").NVFP4PackedCompressor
    quantization = pytest.importorskip("compressed_tensors.quantization")
    arguments = quantization.QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    data, scale = torch.randint(0, 256, (5, 32), dtype=torch.uint8), eights(5, 4).float().abs().to(E4M3)
    parts = {"weight_packed": data, "weight_scale": scale, "weight_global_scale": torch.tensor([37.5])}
    expected = compressor.decompress(dict(parts), scheme)["weight"].float()
    actual = float4.read_nv(data, scale, parts["weight_global_scale"], "w", divide=True)
    # It computes in bfloat16 where it is not told otherwise.
    assert torch.allclose(actual.dequantize(), expected, rtol=2**-7, atol=0)


def four_bit(weight: Tensor, kind: str, nested: bool, block: int = 64) -> dict[str, Tensor]:
    """A weight as bitsandbytes stores it, written out."""
    table = torch.tensor(NF4) if kind == "nf4" else torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]).div(12).repeat(2)
    if kind == "fp4":
        table[8:] *= -1
    flat = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % block)).reshape(-1, block)
    absmax = flat.abs().amax(1)
    codes = ((flat / absmax.clamp(min=1e-9)[:, None]).unsqueeze(-1) - table).abs().argmin(-1).flatten()[: weight.numel()].to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, len(codes) % 2)).reshape(-1, 2)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    parts = {"": codes[:, :1] << 4 | codes[:, 1:], "absmax": absmax, "quant_map": table}
    if nested:
        offset, inner = float(absmax.mean()), torch.linspace(-1, 1, 256)
        rest = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
        outer = rest.abs().amax(1)
        parts["absmax"] = ((rest / outer[:, None]).unsqueeze(-1) - inner).abs().argmin(-1).flatten()[: len(absmax)].to(torch.uint8)
        parts |= {"nested_absmax": outer, "nested_quant_map": inner}
        state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
    parts[f"quant_state.bitsandbytes__{kind}"] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return parts


def read_four(parts: dict[str, Tensor], kind: str) -> Tensor:
    state = bitsandbytes.State.of(parts[f"quant_state.bitsandbytes__{kind}"], "w")
    return bitsandbytes.read_four({**parts, "weight": parts[""]}, state, torch.float32, "w")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(64, 96), (5, 13), (1, 1)])
def test_4_bits_of_bitsandbytes(kind: str, nested: bool, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    parts = four_bit(weight, kind, nested)
    got = read_four(parts, kind)
    table, absmax = parts["quant_map"], parts["absmax"]
    if nested:
        outer = parts["nested_absmax"].repeat_interleave(256)[: len(absmax)]
        state = bitsandbytes.State.of(parts[f"quant_state.bitsandbytes__{kind}"], "w")
        absmax = parts["nested_quant_map"][absmax.int()] * outer + state.nested_offset
    for i, value in enumerate(got.flatten().tolist()):
        byte = int(parts[""][i // 2])
        assert value == float(table[byte & 15 if i % 2 else byte >> 4] * absmax[i // 64])
    widest = float(absmax.max())
    assert float((got - weight).abs().max()) <= widest * (0.17 if kind == "fp4" else 0.16) + widest * nested * 0.05
    library = pytest.importorskip("bitsandbytes.functional")
    full = {f"quant_state.{name}" if "bitsandbytes" in name else name: tensor.clone() for name, tensor in parts.items() if name}
    full = {name.replace("quant_state.quant_state", "quant_state"): tensor for name, tensor in full.items()}
    state = library.QuantState.from_dict(full, torch.device("cpu"))
    assert torch.equal(library.dequantize_4bit(parts[""], state), got)


def test_8_bits_of_bitsandbytes() -> None:
    weight, largest = torch.randint(-127, 128, (6, 10), dtype=torch.int8), torch.rand(6) + 0.1
    codes = bitsandbytes.read_eight({"weight": weight, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, "w")
    assert str(codes.format) == "int8_channel"
    assert torch.equal(codes.data, weight)
    assert torch.allclose(codes.dequantize(torch.float64), weight * largest[:, None].double() / 127, rtol=2**-23, atol=0)
    for order in (torch.tensor(1, dtype=torch.uint8), torch.tensor(torch.nan), torch.zeros(2, dtype=torch.uint8)):
        with pytest.raises(CheckpointError, match="order for old GPUs"):
            bitsandbytes.read_eight({"weight": weight, "SCB": largest, "weight_format": order}, "w")
    for damaged in ({"SCB": largest[:5]}, {"weight": weight.float()}, {"SCB": largest.half()}):
        with pytest.raises(CheckpointError, match="damaged"):
            bitsandbytes.read_eight({"weight": weight, "SCB": largest, **damaged}, "w")


@pytest.mark.parametrize("part", ["", "absmax", "quant_map", "nested_absmax", "nested_quant_map"])
def test_damaged_parts_of_bitsandbytes(part: str) -> None:
    parts = four_bit(torch.randn(8, 80), "nf4", nested=True)
    for value in (parts[part].flatten()[:-1], parts[part].double() + 0.5):
        with pytest.raises(CheckpointError, match="damaged"):
            read_four(parts | {part: value}, "nf4")


# Folders


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(20)[None]).logits.float()
    return found


def linears(state: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in state.items() if "_proj.weight" in name and tensor.dim() == 2]


def make_fp8(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    for name in linears(state):
        n, k = state[name].shape
        scale = torch.rand(-(-n // 32), -(-k // 32)) * 1e-3
        weight = eights(n, k, seed=len(name))
        yield_ = weight.float() * scale.repeat_interleave(32, 0)[:n].repeat_interleave(32, 1)[:, :k]
        state |= {name: weight, f"{name}_scale_inv": scale, f"wanted.{name}": yield_.to(torch.bfloat16)}
    return split(state, {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32]})


def split(state: dict[str, Tensor], settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """What is stored, what it stands for, and the quantization_config."""
    wanted = {name.removeprefix("wanted."): tensor for name, tensor in state.items() if name.startswith("wanted.")}
    return {name: tensor for name, tensor in state.items() if not name.startswith("wanted.")}, wanted, settings


def make_float_quantized(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    for name in linears(state):
        weight, scale = eights(*state[name].shape, seed=len(name)), (torch.rand(state[name].shape[0], 1) * 1e-3).to(torch.bfloat16)
        state |= {name: weight, f"{name}_scale": scale, f"wanted.{name}": (weight.float() * scale.float()).to(torch.bfloat16)}
        state[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1)
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "input_activations": None}
    return split(state, {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}})


def make_four(kind: str) -> Any:
    def make(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        for name in linears(state):
            parts = four_bit(state[name], kind, nested=True)
            state |= {f"{name}.{part}" if part else name: tensor for part, tensor in parts.items()}
            state[f"wanted.{name}"] = read_four(parts, kind).to(torch.bfloat16)
        return split(state, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind})

    return make


def make_eight(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    for name in linears(state):
        largest = state[name].float().abs().amax(1)
        weight = (state[name].float() / largest[:, None] * 127).round().to(torch.int8)
        parts = {"SCB": largest, "weight": weight, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        state |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
        state[f"wanted.{name}"] = (weight * (largest / 127)[:, None]).to(torch.bfloat16)
    return split(state, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def make_4_bit_floats(form: str) -> Any:
    def make(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        for name in linears(state):
            n, k = state[name].shape
            data = torch.randint(0, 256, (n, k // 2), generator=torch.Generator().manual_seed(len(name)), dtype=torch.uint8)
            module = name.removesuffix(".weight")
            if form == "mxfp4":
                scale = torch.randint(110, 122, (n, k // 32), dtype=torch.uint8)
                parts = {"weight_packed": data, "weight_scale": scale}
                codes = float4.read_mx(data, scale, name)
            else:
                scale, factor = (torch.rand(n, k // 16) * 8).to(E4M3), torch.tensor(400.0)
                parts = {"weight_packed": data, "weight_scale": scale, "weight_global_scale": factor.reshape(1)}
                if form == "modelopt":
                    parts = {"weight": data, "weight_scale": scale, "weight_scale_2": 1 / factor, "input_scale": factor}
                codes = float4.read_nv(data, scale, 1 / factor if form == "modelopt" else factor, name, divide=form != "modelopt")
            del state[name]
            state |= {f"{module}.{part}": tensor for part, tensor in parts.items()} | {f"wanted.{name}": codes.dequantize(torch.bfloat16)}
        if form == "modelopt":
            return split(state, {})
        weights = {"num_bits": 4, "type": "float", "group_size": 32 if form == "mxfp4" else 16}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        return split(state, {"quant_method": "compressed-tensors", "format": f"{form}-pack-quantized", "config_groups": groups})

    return make


KINDS = {
    "fp8": make_fp8,
    "float-quantized": make_float_quantized,
    "nf4": make_four("nf4"),
    "fp4": make_four("fp4"),
    "int8": make_eight,
    "mxfp4": make_4_bit_floats("mxfp4"),
    "nvfp4": make_4_bit_floats("nvfp4"),
    "modelopt": make_4_bit_floats("modelopt"),
}
CODES = {"int8": "int8_channel", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "modelopt": "nvfp4"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind, and beside it, as <kind>-float, the model that it stands for."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    config = LlamaConfig(**SMALL, vocab_size=64, max_position_embeddings=32, dtype="bfloat16")
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for kind, make in KINDS.items():
        model.save_pretrained(root / kind)
        model.save_pretrained(root / f"{kind}-float")
        plain = load_file(root / kind / "model.safetensors")
        stored, wanted, settings = make(dict(plain))
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, root / kind / "model.safetensors", {"format": "pt"})
        save_file({**plain, **wanted}, root / f"{kind}-float" / "model.safetensors", {"format": "pt"})
        if settings:
            path = root / kind / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
        else:
            (root / kind / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_loads_with_its_numbers(kind: str, folders: Path) -> None:
    expected = load_file(folders / f"{kind}-float" / "model.safetensors")
    got = load_tensors(folders / kind)
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        value = got[name]
        assert isinstance(value, Codes) == (kind in CODES and name in linears(expected))
        if isinstance(value, Codes):
            assert str(value.format) == CODES[kind]
            value = value.dequantize(torch.bfloat16)
        assert torch.equal(value, wanted), name
    model = load(folders / kind)
    proj = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(proj, QuantLinear) == (kind in CODES)
    report = describe(folders / kind)
    if kind not in CODES:
        reasons = [row.reason for row in report.rows if row.name.endswith("up_proj.weight")]
        assert "dequantized" in str(reasons[0])
        assert any("keep the model small" in note for note in report.notes)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CODES])
def test_small_floats_are_quantized_as_floats_are(kind: str, folders: Path, tmp_path: Path) -> None:
    convert(folders / kind, tmp_path / "q", "q4_0")
    convert(folders / f"{kind}-float", tmp_path / "wanted", "q4_0")
    actual, wanted = load_file(tmp_path / "q" / "model.safetensors"), load_file(tmp_path / "wanted" / "model.safetensors")
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in wanted.items())
    loaded = load(folders / kind, format="q4_0")
    assert torch.equal(logits(loaded), logits(load(tmp_path / "q")))


@pytest.mark.parametrize("kind", CODES)
def test_codes_stay_what_they_are(kind: str, folders: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="quantized already"):
        convert(folders / kind, tmp_path / "q", "q4_0")
    export(folders / kind, tmp_path / "h", "halfbyte")
    actual, wanted = load_tensors(tmp_path / "h"), load_tensors(folders / kind)
    for name, value in wanted.items():
        other = actual[name]
        if isinstance(value, Codes):
            assert isinstance(other, Codes)
            assert all(torch.equal(other.tensors()[part], tensor) for part, tensor in value.tensors().items())
        else:
            assert torch.equal(value, other)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="quantized already"):
        load(folders / kind, format="q4_0")


def test_a_format_for_what_is_quantized_already(folders: Path, tmp_path: Path) -> None:
    convert(folders / "fp8-float", tmp_path / "q", "q8_0")
    with pytest.raises(CheckpointError, match="quantized already"):
        load(tmp_path / "q", format="q4_0")
    assert torch.equal(logits(load(folders / "fp8-float", format="q8_0")), logits(load(tmp_path / "q")))
    with pytest.raises(ArgumentError, match="needs calibration"):
        load(folders / "fp8", format=Config("q4_0", method="gptq"))


def test_8_bit_floats_without_a_config_are_not_taken_at_face_value(folders: Path, tmp_path: Path) -> None:
    """Without their scales the numbers would be garbage."""
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((folders / "fp8" / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    convert(tmp_path, tmp_path / "q", "q8_0")
    convert(folders / "fp8-float", tmp_path / "wanted", "q8_0")
    assert torch.equal(logits(load(tmp_path / "q")), logits(load(tmp_path / "wanted")))
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(5, 2)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not fit it"):
        convert(tmp_path, tmp_path / "again", "q8_0")


def test_experts_in_8_bit_floats(tmp_path: Path) -> None:
    """As Qwen3 and DeepSeek store them, each expert by itself; transformers stacks them."""
    torch.manual_seed(0)
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 64, "head_dim": 32}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **experts, dtype="bfloat16")).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    stored, wanted, settings = make_fp8(load_file(tmp_path / "model.safetensors"))
    assert sum(".experts." in name for name in wanted) == 9
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    state = load_tensors(tmp_path)
    up = torch.stack([torch.cat([wanted[f"model.layers.0.mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(3)])
    assert torch.equal(state["model.layers.0.mlp.experts.gate_up_proj"], up)  # type: ignore[arg-type]
    loaded = load(tmp_path, format="q8_0")
    wanted_codes = absmax(up.float(), as_format("q8_0"))
    stored_value = loaded.get_submodule("model.layers.0.mlp.experts.gate_up_proj")
    assert torch.equal(stored_value.weight + 0, wanted_codes.dequantize(torch.bfloat16))  # type: ignore[operator]


def test_gpt_oss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {**SMALL, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "vocab_size": 64}
    model = GptOssForCausalLM(GptOssConfig(**sizes, dtype="bfloat16")).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        e, k, n = state.pop(name).shape
        blocks = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8)
        scales = torch.randint(112, 122, (e, n, k // 32), dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    path.write_text(json.dumps(config))
    model.save_pretrained(tmp_path / "float")
    expected = GptOssForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.bfloat16).eval()
    loaded = load(tmp_path)
    experts = {name: module for name, module in loaded.named_modules() if isinstance(module, QuantExperts)}
    assert len(experts) == 2
    for name, module in experts.items():  # codes of 8.5 bits that stand for the very numbers
        assert module.packed.format == float4.MX
        assert torch.equal(module.codes().dequantize(torch.bfloat16), expected.get_parameter(name).mT)
        module.compute = "float"
    # The kernel sums in float32 and rounds to bfloat16 once; transformers rounds sums, biases and products on the way.
    assert (logits(loaded) - logits(expected)).abs().max() < 2.0**-6 * logits(expected).abs().max()
    assert {row.name: str(row.format) for row in describe(tmp_path).quantized} == dict.fromkeys(experts, "mxfp4")
    # They may be quantized to something else as they are read, as the floats would be.
    requantized, state = load(tmp_path, format=Config("q4_0", skip=["lm_head"])), expected.state_dict()
    convert(tmp_path, tmp_path / "q4_0", Config("q4_0", skip=["lm_head"]))
    for one in (requantized, load(tmp_path / "q4_0")):
        for name in experts:
            codes = one.get_submodule(name).codes()  # type: ignore[operator]
            assert torch.equal(codes.data, absmax(state[name].mT.float(), as_format("q4_0")).data)
    # What it becomes elsewhere: the same codes, or floats as transformers has them.
    export(tmp_path, tmp_path / "own", "halfbyte")
    assert torch.equal(logits(load(tmp_path / "own")), logits(load(tmp_path)))
    export(tmp_path / "q4_0", tmp_path / "gptq", "gptq")
    floats = load_file(tmp_path / "gptq" / "model.safetensors")
    for name in experts:
        assert torch.equal(floats[name], requantized.get_submodule(name).codes().dequantize(torch.bfloat16).mT)  # type: ignore[operator]


def test_one_stack_of_gpt_oss_stays(tmp_path: Path) -> None:
    """Whichever way round it is in memory and in a halfbyte checkpoint: as square as these are, no shape would tell."""
    sizes = {**SMALL, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "vocab_size": 64}
    model = GptOssForCausalLM(GptOssConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "float")
    down = model.model.layers[0].mlp.experts.down_proj.detach().clone()
    assert down.shape[1] == down.shape[2]
    config = Config("q8_0", skip=["*down_proj"], compute="float")
    expected = logits(quantize_(model, config))
    save(model, tmp_path / "saved")
    model.save_pretrained(tmp_path / "pretrained")
    convert(tmp_path / "float", tmp_path / "converted", config)
    for folder in ("saved", "pretrained", "converted"):
        for loaded in (load(tmp_path / folder), GptOssForCausalLM.from_pretrained(tmp_path / folder)):
            # torch's products of floats may sum in another order where memory lies otherwise
            assert torch.allclose(logits(loaded), expected, atol=1e-5)
            assert torch.equal(loaded.dequantize().model.layers[0].mlp.experts.down_proj, down)
    export(tmp_path / "saved", tmp_path / "gptq", "gptq")
    assert torch.equal(load_file(tmp_path / "gptq" / "model.safetensors")["model.layers.0.mlp.experts.down_proj"], down)
    floats = model.dequantize()
    assert torch.equal(floats.model.layers[0].mlp.experts.down_proj, down)
    # transformers multiplies by weights the other way round, in another order of sums.
    assert torch.allclose(logits(floats), expected, atol=1e-5)
