"""vLLM serves halfbyte's checkpoints, and those of others on halfbyte's kernels, with the same logits as transformers.

`make compat-vllm` runs these: vLLM wants other versions than constraints.txt has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm_models import FOREIGN, MODELS, make_float, make_foreign, make_served, make_w8a8
from vllm_worker import Answer, ask, reference

import halfbyte as hb

pytest.importorskip("vllm", reason="vLLM is not installed: `make compat-vllm` tests the plugin")

# Both compute in float32 with the same weights, in sums of other orders: some 100 roundings of 2^-24 of logits up to 16.
ROUNDING = 1e-4
# Activations are quantized to int8, with an error of up to 1/254 of the largest of a block: of that, squared, the Kullback-Leibler
# divergence of random models of two layers was .001 to .002. A wrong scale, zero point or order of inputs gives more than .1.
INT8 = 5e-3


def opened(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def check_rounding(answers: list[Answer], expected: list[Answer]) -> None:
    for answer, other in zip(answers, expected, strict=True):
        assert float((answer.logprobs - other.logprobs).abs().max()) < ROUNDING
        assert answer.tokens == other.tokens


def divergence(answers: list[Answer], expected: list[Answer]) -> float:
    """The largest mean Kullback-Leibler divergence of a prompt."""
    pairs = [(one.logprobs.double(), other.logprobs.double()) for one, other in zip(answers, expected, strict=True)]
    return max(float((q.exp() * (q - p)).sum(-1).mean()) for p, q in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_halfbyte_checkpoints(name: str, tmp_path: Path) -> None:
    folder = make_served(name, tmp_path / "model")
    check_rounding(ask(folder), reference(opened(folder)))


@pytest.mark.parametrize("name", ["llama, mixed formats", "qwen3 with experts"])
def test_compiled(name: str, tmp_path: Path) -> None:
    folder = make_served(name, tmp_path / "model")
    check_rounding(ask(folder, enforce_eager=False), reference(opened(folder)))


def test_half_precision_is_bounded(tmp_path: Path) -> None:
    """In bfloat16 texts part sooner or later: activations are rounded to 8 bits after each operation, which vLLM fuses otherwise."""
    folder = make_served("llama, q4_0, tied", tmp_path / "model")
    assert divergence(ask(folder, dtype="bfloat16"), reference(opened(folder))) < INT8


def test_reordered_inputs(tmp_path: Path) -> None:
    """As from GPTQ checkpoints with activation order."""
    from halfbyte.nn.modules.permuted import PermutedLinear

    model = hb.quantize_(make_float(MODELS["llama, zero points, the head in floating point"]), hb.Config("int4_g32", compute="float"))
    for name in ("q_proj", "k_proj", "o_proj"):
        attention = model.get_submodule("model.layers.0.self_attn")
        generator = torch.Generator().manual_seed(int(name == "o_proj"))
        linear: Any = getattr(attention, name)
        setattr(attention, name, PermutedLinear(linear, torch.randperm(linear.in_features, generator=generator)))
    hb.save(model, tmp_path / "model")
    check_rounding(ask(tmp_path / "model"), reference(opened(tmp_path / "model")))


def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = make_served("llama, q4_0, tied", tmp_path / "model")
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    peft.get_peft_model(opened(folder), config).save_pretrained(tmp_path / "adapter")
    expected = reference(peft.PeftModel.from_pretrained(opened(folder), tmp_path / "adapter").eval())
    answers = ask(folder, tmp_path / "adapter", enable_lora=True, max_lora_rank=8)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert [answer.tokens for answer in expected] != [answer.tokens for answer in reference(opened(folder))]


TENSOR = {"tensor_parallel_size": 2}
# vLLM 0.32 without torch.compile: its last stage asserts that it is given the tensors of the stage before, and is not.
PIPELINE = {"pipeline_parallel_size": 2, "enforce_eager": False}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama, q4_0, tied", TENSOR),
        ("llama, mixed formats", TENSOR),
        ("qwen3 with experts", TENSOR),
        ("llama, q4_0, tied", PIPELINE),
        ("qwen3 with experts", PIPELINE),
    ],
)
def test_two_processes_answer_like_one(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("vLLM binds each of two processes to a core of its own, and there is one")
    folder = make_served(name, tmp_path / "model")
    given = json.dumps({"distributed_executor_backend": "mp", **settings})
    program = [sys.executable, str(Path(__file__).with_name("vllm_worker.py")), str(folder), str(tmp_path / "out.pt"), given]
    bound = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"}
    done = subprocess.run(program, env=os.environ | bound, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [Answer(*answer) for answer in torch.load(tmp_path / "out.pt")]
    check_rounding(answers, reference(opened(folder)))


@pytest.mark.parametrize("name", FOREIGN)
def test_checkpoints_of_others(name: str, tmp_path: Path) -> None:
    """vLLM runs AWQ and GPTQ in bfloat16 and float16 alone."""
    folder = make_foreign(name, tmp_path / "model")
    dtype = "float32" if name.startswith("compressed") else "bfloat16"
    assert divergence(ask(folder, dtype=dtype), reference(opened(tmp_path / "model-halfbyte"))) < INT8


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_checkpoints_of_others(symmetric: bool, tmp_path: Path) -> None:
    model = make_float(MODELS["llama, zero points, the head in floating point"])
    config = hb.Config("int8_channel", compute="float", skip=("lm_head", "*embed_tokens"))
    folder = make_w8a8(tmp_path / "model", symmetric=symmetric)
    assert divergence(ask(folder), reference(hb.quantize_(model, config))) < INT8
