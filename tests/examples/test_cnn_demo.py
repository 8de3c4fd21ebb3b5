"""The examples of convolutions, made short."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "cnn"


@pytest.mark.skipif(not FOLDER.exists(), reason="the examples are not here")
@pytest.mark.parametrize(
    ("script", "column", "rows"),
    [
        (["demo.py", "--epochs", "2", "--rounds", "1"], 2, 7),
        (["qat.py", "--seeds", "1", "--epochs", "1", "--formats", "int4_channel"], 3, 6),
    ],
)
def test_every_model_reads_digits(script: list[str], column: int, rows: int) -> None:
    pytest.importorskip("sklearn")
    run = subprocess.run([sys.executable, str(FOLDER / script[0]), *script[1:]], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    accuracies = [float(line.split("|")[column].strip(" %")) for line in run.stdout.splitlines() if "%" in line]
    assert len(accuracies) == rows
    assert min(accuracies) > 60  # guessing gives 10
