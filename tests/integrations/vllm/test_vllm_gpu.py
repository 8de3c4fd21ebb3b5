"""vLLM on a GPU with the plugin: the same logits as transformers, eagerly and in CUDA graphs, and which kernels serve which layers.

`python -m pytest tests/integrations/vllm/test_vllm_gpu.py` runs these where there are a GPU and vLLM for CUDA.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.integrations.vllm.foreign import half_scale, weight_only_codes, weight_only_format, why_not_on_gpu
from halfbyte.machine import GPUS

BFLOAT16 = torch.bfloat16
HOPPER = GPUS["sm_90"]
# As in test_vllm_models.py: bfloat16 rounds activations to 8 bits after each operation, which vLLM fuses otherwise than transformers.
BOUND = 5e-3
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize(("bits", "points"), [(4, False), (4, True), (8, False)])
def test_layers_of_models_are_taken_on_hopper(bits: int, points: bool, group: int) -> None:
    fmt = weight_only_format(bits, group, zero_points=points, scale=torch.float16)
    for shape in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        assert why_not_on_gpu(fmt, shape, BFLOAT16, HOPPER) is None
        assert why_not_on_gpu(fmt, shape, torch.float16, HOPPER) is None


def test_layers_that_were_not_measured_are_left_to_vllm() -> None:
    fmt = weight_only_format(4, 128, zero_points=False, scale=torch.float16)
    assert "on Hopper GPUs (sm_90), not on NVIDIA A100" in str(why_not_on_gpu(fmt, (4096, 4096), BFLOAT16, GPUS["sm_80"]))
    assert "not torch.float32" in str(why_not_on_gpu(fmt, (4096, 4096), torch.float32, HOPPER))
    odd = replace(fmt, block=24)
    assert "which was not measured" in str(why_not_on_gpu(odd, (4096, 4092), BFLOAT16, HOPPER))


def test_scales_of_gptq_files_stay_as_they_are() -> None:
    """vLLM has rounded them from float16 to bfloat16: to float16 they go back without a loss, the smallest of float16 too."""
    scale = torch.tensor([2.0**-24, 3 * 2.0**-24, 1e-5, 6.1e-5, 0.0043, 1.0, 6e4], dtype=torch.float16).bfloat16()
    assert torch.equal(half_scale(scale).float(), scale.float())


def test_scales_beyond_float16_are_refused() -> None:
    from halfbyte.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="above 65504"):
        half_scale(torch.tensor([1e5], dtype=BFLOAT16))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats of the layers that halfbyte has packed for vLLM, in the process of the test."""
    pytest.importorskip("vllm", reason="vLLM is not installed: `make compat-vllm` tests the plugin")
    from halfbyte.integrations.vllm import packed

    formats: list[str] = []
    original = packed.PackedRows.__init__

    def init(self: Any, parts: Any) -> None:
        original(self, parts)
        formats.append(str(self.packed.format) if hasattr(self, "packed") else "float")

    monkeypatch.setattr(packed.PackedRows, "__init__", init)
    return formats


def check(folder: Path, reference_folder: Path, settings: dict[str, Any]) -> None:
    import transformers
    from vllm_worker import ask, reference

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()
    for answer, other in zip(ask(folder, dtype="bfloat16", **MEMORY, **settings), reference(model), strict=True):
        p, q = answer.logprobs.double(), other.logprobs.double()
        assert float((q.exp() * (q - p)).sum(-1).mean()) < BOUND


MEMORY = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28}  # engines of earlier tests may keep some
EAGER: dict[str, Any] = {"enforce_eager": True}
GRAPHS: dict[str, Any] = {"enforce_eager": False, "cudagraph_capture_sizes": [1, 2, 4, 8, 64]}


@needs_gpu
@pytest.mark.parametrize("settings", [EAGER, GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["awq", "gptq", "compressed-tensors", "compressed-tensors, zero points"])
def test_checkpoints_of_others(name: str, settings: dict[str, Any], tmp_path: Path, served: list[str]) -> None:
    from vllm_models import make_foreign

    folder = make_foreign(name, tmp_path / "model")
    check(folder, tmp_path / "model-halfbyte", settings)
    assert bool(served) == (torch.cuda.get_device_capability() == (9, 0))


@needs_gpu
@pytest.mark.parametrize("settings", [EAGER, GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "name",
    ["llama, q4_0, tied", "llama, q8_0, a bias", "llama, mixed formats", "llama, a scale for each tensor", "qwen3", "qwen3 with experts"],
)
def test_halfbyte_checkpoints(name: str, settings: dict[str, Any], tmp_path: Path, served: list[str]) -> None:
    from vllm_models import make_served

    folder = make_served(name, tmp_path / "model")
    check(folder, folder, settings)
    assert served


@needs_gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_replays_in_a_graph(bits: int) -> None:
    """The weight's scales in float16 and the activations in bfloat16, as in vLLM; a graph gives the bits of the call before it."""
    from halfbyte.integrations.vllm.packed import PackedLayer, Part

    generator = torch.Generator().manual_seed(0)
    fmt = weight_only_format(bits, 128, zero_points=False, scale=torch.float16)
    stored = torch.randint(0, 1 << bits, (512, 256), dtype=torch.int32, generator=generator).cuda()
    scale = torch.rand(512, 2, generator=generator).half().cuda()
    layer, x = PackedLayer([Part(weight_only_codes(fmt, stored, scale, None))]), torch.randn(8, 256, generator=generator).bfloat16().cuda()
    weight = weight_only_codes(fmt, stored, scale, None).dequantize(torch.float64)
    with torch.inference_mode():
        expected = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        assert torch.equal(y, expected)
        exact = x.double() @ weight.T
    # Weights and results are rounded to 8 bits: 2^-9 of each product, and of the sum.
    bound = 2.0**-8 * (x.double().abs() @ weight.abs().T)
    assert bool(((expected.double() - exact).abs() <= bound).all())
