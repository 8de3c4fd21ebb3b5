"""The demo of convolutions, made short."""

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "cnn" / "demo.py"


@pytest.mark.skipif(not DEMO.exists(), reason="the examples are not here")
def test_every_model_reads_digits() -> None:
    pytest.importorskip("sklearn")
    run = subprocess.run([sys.executable, str(DEMO), "--epochs", "2", "--rounds", "1"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    accuracies = [float(line.split("|")[2].strip(" %")) for line in run.stdout.splitlines() if "%" in line]
    assert len(accuracies) == 7
    assert min(accuracies) > 60  # guessing gives 10
