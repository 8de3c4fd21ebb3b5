"""The benchmark of whole language models, with a model so small that nothing but its code is tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_models import FAMILIES, make_config, make_file, make_model

from halfbyte.integrations.transformers.text import open_model
from halfbyte.io.gguf import kind_name, read_header
from halfbyte.nn.modules.quantized import QuantModule

LLM = Path(__file__).parents[2] / "benchmarks" / "llm.py"


def check_rates(found: dict[str, Any], contender: str, *, opened: bool) -> None:
    """What a sound contender says. `opened`: it opened a file and did not make a model."""
    assert found["facts"][contender]["weight_bytes"] > 0
    assert ("open_seconds" in found["facts"][contender]) == opened
    assert all(found["medians"][contender][rate] > 0 for rate in ("prompt tok/s", "decode tok/s"))


def run(*arguments: str) -> tuple[dict[str, Any], str]:
    """The answer of a small run, and its errors."""
    command = [sys.executable, str(LLM), "--size", "tiny", "--prompt", "9", "--new", "4", "--threads", "1", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_small_run() -> None:
    """On a GPU the model is made by the same code."""
    found, _ = run("--contenders", "torch", "--rounds", "1")
    check_rates(found, "torch", opened=False)


@pytest.mark.parametrize(("dies", "family", "file"), [("kill -9 $PPID", "llama", False), ("echo broken >&2; exit 3", "gemma3", True)])
def test_a_contender_that_fails_in_a_round_leaves_the_others(dies: str, family: str, file: bool, tmp_path: Path) -> None:
    """halfbyte runs a model that it makes, or one of another family out of a file."""
    program = tmp_path / "llama-bench"
    program.write_text(f'#!/bin/sh\n[ "$1" = --help ] && exit\n{dies}\n', encoding="utf-8")
    program.chmod(0o755)
    more = ["--gguf", str(tmp_path / "model.gguf")] if file else []
    found, told = run("--contenders", "llama-bench", "halfbyte", "--llama-bench", str(program), "--rounds", "2", "--family", family, *more)
    why = "llama-bench: the process ended with code -9" if "kill" in dies else f"llama-bench: Failed: {program} ended with code 3: broken"
    assert why in told
    assert list(found["medians"]) == ["halfbyte"]
    assert len(found["rounds"]["halfbyte"]) == 2
    assert why.endswith(found["facts"]["llama-bench"]["failed"])
    check_rates(found, "halfbyte", opened=file)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_each_family_a_model_and_its_file_are_made(family: str, tmp_path: Path) -> None:
    config = make_config(family, "tiny")
    model = make_model(config, format="q4_0")
    kept = sorted(name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding))
    assert kept == []
    assert isinstance(model.model.embed_tokens, QuantModule)
    ids = torch.tensor([[5, 300, 7, 399, 11, 12, 13, 14, 15]])  # more than a window
    with torch.inference_mode():
        expected = model(ids).logits
    assert expected.isfinite().all()
    assert expected.std() > 0

    if family == "gemma4":  # of which no GGUF is written
        return
    make_file(config, tmp_path / "model.gguf", tmp_path / "halfbyte")
    opened, tokenizer = open_model(tmp_path / "model.gguf")
    assert len(tokenizer) == config.vocab_size
    with torch.inference_mode():
        found = opened(ids).logits
    # The model is made the same way again: the same codes, and the same kernels in the same order.
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_each_family_there_is_a_config_of_each_size(family: str) -> None:
    for size, sizes in FAMILIES[family].sizes.items():
        config = make_config(family, size, longest=5000)
        assert config.max_position_embeddings == 5000
        assert {name: getattr(config, name) for name in sizes} == sizes
        assert config.hidden_size % 32 == config.intermediate_size % 32 == 0


@pytest.mark.parametrize(("family", "format"), [("gpt-oss", "mxfp4"), ("qwen3-moe", "q4_k_m")])
def test_a_file_of_mixed_formats(family: str, format: str, tmp_path: Path) -> None:
    """As llama.cpp's have them: experts in 4-bit floats and the rest in 8 bits; or K-quants, of which some have 6 bits, so that nothing
    overflows."""
    config = make_config(family, "tiny", layers=9 if format == "q4_k_m" else None)
    config.head_dim, config.hidden_size, config.moe_intermediate_size, config.intermediate_size = 64, 256, 256, 256
    make_file(config, file := tmp_path / "model.gguf", tmp_path / "halfbyte", format=format)
    kinds = {name: kind_name(entry.kind).lower() for name, entry in read_header(file).entries.items() if len(entry.shape) > 1}
    experts = {kind for name, kind in kinds.items() if "_exps.weight" in name}
    assert experts == ({"mxfp4"} if format == "mxfp4" else {"q4_k", "q6_k"})
    assert kinds["blk.1.attn_output.weight"] == ("q8_0" if format == "mxfp4" else "q4_k")
    opened, _ = open_model(file)
    with torch.inference_mode():
        assert bool(opened(torch.arange(2, 12)[None]).logits.isfinite().all())
