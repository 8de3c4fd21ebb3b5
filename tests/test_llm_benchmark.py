"""The benchmark of whole language models, with a model so small that nothing but its code is tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LLM = Path(__file__).parent.parent / "benchmarks" / "llm.py"


@pytest.mark.parametrize(("contender", "file"), [("halfbyte", False), ("halfbyte", True), ("torch", False)])
def test_a_small_run(contender: str, file: bool, tmp_path: Path) -> None:
    """On a GPU the model is made by the same code."""
    command = [sys.executable, str(LLM), "--size", "tiny", "--prompt", "9", "--new", "4", "--rounds", "1", "--threads", "1", "--json"]
    command += ["--contenders", contender, *(["--gguf", str(tmp_path / "model.gguf")] if file else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["facts"][contender]["weight_bytes"] > 0
    assert ("open_seconds" in found["facts"][contender]) == file
    assert all(found["medians"][contender][rate] > 0 for rate in ("prompt tok/s", "decode tok/s"))
