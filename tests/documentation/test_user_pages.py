"""The pages of docs/ for users: examples run, public names are in the reference, pages are on the site and short."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from language_model import make_tokenizer
from transformers import BertConfig, BertModel

import halfbyte
from halfbyte.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WITH_EXAMPLES = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]

# Commands that test_documentation.py parses and that do not run here: they need a GPU, a terminal, or seconds of measurements.
NOT_RUN = ("doctor", "bench", "tune", "eval", "chat", "serve", "explain --m", "--device cuda", "--calibration")


@pytest.mark.skipif(not (ROOT / "models").is_dir(), reason="models/ is in the repository, not in the source distribution")
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.stem)
def test_the_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All examples of a page run in their order, those in Python in one namespace, in a folder that has the repository's models."""
    monkeypatch.chdir(tmp_path)
    for folder in ("models", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    text = page.read_text(encoding="utf-8")
    if "from vllm import" in text:
        pytest.importorskip("vllm", reason="vLLM is not installed")
    if "from diffusers import" in text:
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    if "sentence_transformers" in text:
        pytest.importorskip("sentence_transformers")
        text = text.replace("path/to/encoder", str(_encoder(tmp_path)))
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "page"}
    for match in re.finditer(r"^```(python|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        if match[1] == "python":
            exec(compile("\n" * line + match[2], str(page), "exec"), names)
            continue
        for command in match[2].splitlines():
            if command.startswith("halfbyte ") and not any(f" {words}" in command for words in NOT_RUN):
                monkeypatch.setattr(sys, "stdin", io.StringIO())
                assert main(shlex.split(command, comments=True)[1:]) == 0, f"{page.name}: {command}: {capsys.readouterr().err}"


def _encoder(folder: Path) -> Path:
    """A sentence encoder with random weights, which sentence-transformers opens with mean pooling."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "initializer_range": 0.2}
    BertModel(BertConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=64)).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    return folder / "bert"


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^::: halfbyte\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(name for name in halfbyte.__all__ if name != "__version__")


def test_every_page_is_on_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"[\w/-]+\.md", str(yaml.safe_load(text)["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md"))


def test_users_have_little_to_read() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert sum(words.values()) <= 15_000, words
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_engineers_have_no_diaries_to_read() -> None:
    """What was tried is a sentence with the figure that decided it; measurements are tables that benchmarks/results has."""
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (DOCS / "engineering").glob("*.md")}
    assert sum(words.values()) <= 36_000, words
