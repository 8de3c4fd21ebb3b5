"""The tiny Llama that ships under models/: it loads, it has learnt, and it says the same thing twice."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_server import LlamaCpp, needs_llama_cpp
from torch.nn import functional

from halfbyte.checkpoint import convert, export, load
from halfbyte.cli import main
from halfbyte.evaluate import evaluate_language
from halfbyte.nn.config import Config

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny-llama"
HELD_OUT = ROOT / "examples" / "tiny-llama" / "heldout.txt"

transformers = pytest.importorskip("transformers")
open_model = pytest.importorskip("halfbyte.integrations.transformers.text").open_model
pytestmark = pytest.mark.skipif(not MODEL.is_dir(), reason="models/ is in the repository, not in the source distribution")


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with torch.inference_mode():
        yield loaded


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def test_its_files() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 60_000_000
    config = json.loads((MODEL / "config.json").read_text())
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    sizes = config["hidden_size"], config["intermediate_size"], *(count * config["head_dim"] for count in heads)
    assert not [size for size in sizes if size % 128], "blocks of 128 divide every dimension"


def test_the_tokenizer_gives_any_text_back(tokenizer: Any) -> None:
    for text in (HELD_OUT.read_text(encoding="utf-8")[:20_000], "tabs\tand  spaces\n\n    naïve 世界 🙂\r\n", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_it_predicts_text_that_it_has_not_seen(model: Any, tokenizer: Any) -> None:
    ids = torch.tensor(tokenizer(HELD_OUT.read_text(encoding="utf-8")[:20_000])["input_ids"])[: 4 * 512].view(4, 512)
    logits = model(ids).logits[:, :-1]
    perplexity = math.exp(functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
    assert perplexity < 7.6


def test_eval_finds_the_perplexity_of_transformers(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sums of float32 in other orders: 2^-24 of a loss for each of some hundred roundings."""
    convert(MODEL, tmp_path / "q", Config("q8_0", compute="float"))
    (tmp_path / "text").write_text(HELD_OUT.read_text(encoding="utf-8")[:1000], encoding="utf-8")
    assert main(["eval", str(tmp_path / "q"), "--text", str(tmp_path / "text"), "--context", "128", "--json", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "transformers" not in err
    (found,) = json.loads(out)["models"]
    ids = torch.tensor(tokenizer((tmp_path / "text").read_text(encoding="utf-8"))["input_ids"])
    expected, _ = evaluate_language(open_model(tmp_path / "q")[0], {}, ids, context=128)
    assert found["tokens"] == expected.tokens
    assert found["perplexity"] == pytest.approx(expected.perplexity, rel=1e-4)


def test_greedy_text_is_reproducible(model: Any, tokenizer: Any) -> None:
    inputs = tokenizer("import os\nimport sys\n\n", return_tensors="pt")
    first, second = (model.generate(**inputs, max_new_tokens=32, do_sample=False, pad_token_id=0) for _ in range(2))
    assert first.tolist() == second.tolist()
    assert tokenizer.decode(first[0]).startswith("import os\nimport sys\n\n")


@needs_llama_cpp
def test_llama_cpp_finds_the_same_perplexity(tokenizer: Any, tmp_path: Path) -> None:
    """What halfbyte writes, llama.cpp reads; both round activations to 8 bits, in their own ways."""
    convert(MODEL, tmp_path / "q", "q4_0")
    export(tmp_path / "q", tmp_path / "m.gguf", "gguf")
    ids = tokenizer(HELD_OUT.read_text(encoding="utf-8")[:2000])["input_ids"][:40]
    with torch.inference_mode():
        actual = torch.log_softmax(load(tmp_path / "m.gguf")(torch.tensor([ids])).logits[0].double(), -1)
    found = [
        (likely[ids[count]], float(actual[count - 1, ids[count]]))
        for count, likely in LlamaCpp(tmp_path / "m.gguf").next_tokens(ids, 8, len(tokenizer))
    ]
    errors = torch.tensor([expected - ours for expected, ours in found], dtype=torch.float64)
    assert len(errors) >= 25
    assert float(errors.abs().max()) < 0.5
    # The errors of both are as often up as down: their mean, the logarithm of the ratio of perplexities, is noise.
    assert abs(float(errors.mean())) < 4 * float(errors.std()) / len(errors) ** 0.5


def test_training_for_the_format_brings_it_nearer() -> None:
    """examples/tiny-llama/qat.py, made short: learned scales start where `mse` puts them, and do not leave that for worse."""
    options = "--steps 2 --batch 1 --length 32 --bytes 3000 --methods absmax --scales learned"
    run = subprocess.run(
        [sys.executable, str(HELD_OUT.parent / "qat.py"), *options.split()], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    divergence = [float(line.split("|")[4]) for line in run.stdout.splitlines() if line.startswith("| int4")]
    assert len(divergence) == 2
    assert divergence[1] < divergence[0]


def test_the_documentation_shows_what_explain_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    asked = "explain --model models/tiny-llama --format q4_0 --device sm_90"
    shown = (ROOT / "docs" / "language-models.md").read_text().partition(f"    $ halfbyte {asked}\n")[2].partition("\n\n")[0]
    assert main([word.replace("models/tiny-llama", str(MODEL)) for word in asked.split()]) == 0
    assert capsys.readouterr().out.splitlines() == [line.removeprefix("    ") for line in shown.splitlines()]
