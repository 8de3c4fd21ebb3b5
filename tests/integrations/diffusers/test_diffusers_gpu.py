"""Diffusion models on a GPU: fused, with low-rank branches, with causal convolutions, adapted, offloaded, compiled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

import tiny_diffusers
from peft import LoraConfig
from test_diffusers_gguf import MODELS
from test_video_vaes import floats_of, wan

import halfbyte as hb
from halfbyte.kernels import reference
from halfbyte.nn.modules.low_rank import LowRankLinear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@torch.no_grad()
def output(model: Any, call: dict[str, Any], dtype: torch.dtype) -> Tensor:
    inputs = {name: x.cuda().to(dtype if x.is_floating_point() else x.dtype) if isinstance(x, Tensor) else x for name, x in call.items()}
    found: Tensor = model(**inputs)[0]
    return found.float()


def distance(found: Tensor, want: Tensor) -> float:
    return float((found.float() - want.float()).norm() / want.float().norm())


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")  # rotary embeddings of Qwen-Image
@DTYPES
@pytest.mark.parametrize("config", [{"format": "q8_0"}, {"format": "int4_g32", "low_rank": 8}], ids=["plain", "low_rank"])
@pytest.mark.parametrize("how", ["float", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers(name: str, how: str, config: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, _, call = MODELS[name]()
    small: Any = hb.quantize_(model.eval().to(dtype), hb.Config(**config, compute=how)).cuda()
    plain = output(small, call, dtype)
    fused: Any = hb.optimize_(copy.deepcopy(small))
    # Each product is rounded once to 16 bits in both; int8 codes of the next activations may become their neighbours.
    close = 0.02 if how == "int8" else 2**-6 if dtype == torch.bfloat16 else 2**-9
    assert distance(output(fused, call, dtype), plain) < close
    assert distance(output(floats_of(small), call, dtype), plain) < (0.08 if how == "int8" else 4 * close)
    torch.compiler.reset()  # torch keeps eight graphs of a forward
    if fused._repeated_blocks:
        fused.compile_repeated_blocks(fullgraph=True)
    else:
        fused.compile()
    assert distance(output(fused, call, dtype), plain) < 2 * close


@DTYPES
@pytest.mark.parametrize(("format", "rank"), [("int4_channel", 32), ("int4_channel", 16), ("int4_g128", 32)])
@pytest.mark.parametrize("m", [1, 33, 1200])
@torch.no_grad()
def test_compiled_low_rank_layers(m: int, format: str, rank: int, dtype: torch.dtype) -> None:
    """Within the product's kernel and as its residual: the same sums, rounded once, but that the branch is rounded to 16 bits there."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(1024, 384) for name in ("to_q", "to_k", "to_v")}).to("cuda", dtype)
    hb.optimize_(hb.quantize_(model, hb.Config(format, compute="int8", activation="row", low_rank=rank)))

    def run(x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in model.values()], -1)

    x = torch.randn(m, 1024, dtype=dtype, device="cuda")
    torch.compiler.reset()
    assert distance(torch.compile(run, fullgraph=True)(x), run(x)) < 2 * torch.finfo(dtype).eps


@DTYPES
@pytest.mark.parametrize("how", ["float", "int8"])
@pytest.mark.parametrize("shape", [(1, 256, 96), (33, 320, 200), (300, 1024, 512)])
@torch.no_grad()
def test_a_low_rank_layer(shape: tuple[int, int, int], how: Literal["float", "int8"], dtype: torch.dtype) -> None:
    m, k, n = shape
    torch.manual_seed(0)
    linear, x = nn.Linear(k, n).to(dtype), torch.randn(m, k, dtype=dtype)
    linear.weight[:, ::64] *= 30
    x[:, 5::64] *= 100  # which scales of inputs move to the weight
    small: Any = hb.quantize_(nn.Sequential(linear), hb.Config("int4_g64", low_rank=16, compute=how), [x])
    layer, on_gpu = small[0], copy.deepcopy(small).cuda()
    assert isinstance(layer, LowRankLinear)
    assert layer.input_scale is not None
    parts = layer.low_rank_in, layer.low_rank_out
    want = reference.low_rank_linear(x, layer.residual.codes(), *parts, layer.bias, how, layer.input_scale)
    z = x * layer.input_scale
    branch = z.double() @ parts[0].double().mT @ parts[1].double().mT
    inner = (z.double() @ parts[0].double().mT).abs() @ parts[1].double().abs().mT
    bound = reference.error_bound(z, layer.residual.codes(), layer.bias, how, residual=branch) + 3 * torch.finfo(dtype).eps * inner
    assert reference.agrees(on_gpu(x.cuda()).cpu(), want, bound).all()


@torch.no_grad()
@DTYPES
@pytest.mark.parametrize("how", ["float", "int8"])
def test_a_video_vae(how: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    small: Any = hb.quantize_(wan().eval().to(dtype), hb.Config("int8_channel", compute=how)).cuda()
    floats, x = floats_of(small), torch.randn(1, 3, 5, 16, 16, dtype=dtype, device="cuda")
    found, want = (vae.decode(vae.encode(x).latent_dist.mode()).sample for vae in (small, floats))
    assert distance(found, want) < 0.1  # some forty layers, each rounded to 16 bits, or activations to 8


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.parametrize("config", [{"format": "q8_0"}, {"format": "int4_g32", "low_rank": 8}], ids=["plain", "low_rank"])
def test_group_offloading(kind: str, config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, _, call = MODELS["flux"]()
    small: Any = hb.optimize_(hb.quantize_(model.eval().bfloat16(), hb.Config(**config)))
    want = output(copy.deepcopy(small).cuda(), call, torch.bfloat16)
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    small.enable_group_offload(onload_device=torch.device("cuda"), offload_device=torch.device("cpu"), offload_type=kind, **blocks)
    assert distance(output(small, call, torch.bfloat16), want) < 2**-6


@pytest.mark.filterwarnings("ignore:merging rounds the sums:UserWarning")
def test_an_adapter_of_convolutions(tmp_path: Path) -> None:
    small: Any = hb.quantize_(tiny_diffusers.unet(), hb.Config("q8_0", compute="float")).cuda()
    call = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(3), "encoder_hidden_states": torch.randn(2, 5, 32)}
    want = output(small, call, torch.float32)
    small.add_adapter(LoraConfig(r=2, target_modules=["conv1", "to_q"], init_lora_weights=False))
    adapted = output(small, call, torch.float32)
    assert distance(adapted, want) > 0.01
    small.fuse_lora()
    assert distance(output(small, call, torch.float32), adapted) < 0.05  # rounded to 8 bits again
    small.unfuse_lora()
    small.unload_lora()
    assert torch.equal(output(small, call, torch.float32), want)
