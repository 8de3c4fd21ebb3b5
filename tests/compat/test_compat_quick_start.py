"""The README's quick start, as typed: the text that it writes is what the same quantized weights write in transformers' own code."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import Tensor
from transformers import AutoTokenizer

import halfbyte as hb

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models"
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK_START = README.partition("\n## Quick start\n")[2].partition("\n## ")[0]
COMMANDS = [words for line in re.findall(r"^ {4}(.*)$", QUICK_START, re.MULTILINE) if (words := shlex.split(line, comments=True))]
PROMPT = COMMANDS[-1][-1] if COMMANDS else ""
NEW_TOKENS = 128  # `halfbyte generate` without --max-new-tokens
pytestmark = pytest.mark.skipif(not MODELS.is_dir(), reason="models/ is in the repository, not in the source distribution")


def test_these_are_the_commands() -> None:
    said = [words[:2] for words in COMMANDS]
    assert said == [["pip", "install"], ["halfbyte", "doctor"], ["halfbyte", "quantize"], ["halfbyte", "generate"]]


def test_the_install_command_brings_all_that_is_needed() -> None:
    """Each requirement of the extra that the README names is installed here, in a version that it allows."""
    (extra,) = re.findall(r"^\.\[(\w+)\]$", COMMANDS[0][2])
    declared = distribution("halfbyte").requires if _is_installed() else None
    if declared is None:
        pytest.skip("halfbyte is on PYTHONPATH and not installed")
    for requirement in map(Requirement, declared):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            version = distribution(requirement.name).version
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement}, installed is {version}"


def test_as_typed(tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(MODELS)
    answers = {words[1]: _run(words, tmp_path) for words in COMMANDS if words[0] == "halfbyte"}
    assert re.search(r"^(\d+) of \1 passed$", answers["doctor"], re.MULTILINE), answers["doctor"]
    text = answers["generate"].removesuffix("\n")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "small")
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(tokens[0]) == text
    _check(tokens, tmp_path / "small")


def test_the_python_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, without_transformers = re.findall(r"^```python\n(.*?)^```", QUICK_START, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(code.replace("path/to/model", str(MODELS / "tiny-llama")), "README.md", "exec"), names)
    inputs = AutoTokenizer.from_pretrained("small")(PROMPT, return_tensors="pt")
    _check(names["model"].generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0), tmp_path / "small")
    capsys.readouterr()
    exec(compile(without_transformers.replace("path/to/model", str(MODELS / "tiny-llama")), "README.md", "exec"), names)
    text = PROMPT + capsys.readouterr().out.removesuffix("\n")
    _check(AutoTokenizer.from_pretrained("small")(text, return_tensors="pt")["input_ids"], tmp_path / "small")


def _is_installed() -> bool:
    try:
        return bool(distribution("halfbyte"))
    except PackageNotFoundError:
        return False


def _run(words: list[str], folder: Path) -> str:
    """What a command prints to stdout."""
    script = shutil.which(words[0], path=str(Path(sys.executable).parent))
    command = [script] if script else [sys.executable, "-m", words[0]]  # where halfbyte is on PYTHONPATH
    done = subprocess.run([*command, *words[1:]], cwd=folder, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _check(tokens: Tensor, folder: Path) -> None:
    """Each new token is the likeliest one after those before it, or as likely up to rounding, in transformers' own layers."""
    begin = len(AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"])
    assert tokens.shape[1] >= begin + NEW_TOKENS // 2  # words that are written token by token may be read in fewer
    with torch.no_grad():
        logits = hb.load(folder).float()(input_ids=tokens, use_cache=False).logits[0, begin - 1 : -1]
    margin = logits.amax(1) - logits.gather(1, tokens[0, begin:, None])[:, 0]
    # bfloat16 has logits up to 16 in steps of 1/16, from sums of numbers that are as coarse; a wrong text is behind by more than 1.
    assert float(margin.max()) <= 0.25
