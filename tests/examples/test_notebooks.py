"""The notebooks of examples/ are kept without their outputs, and the docs name them. tests/release runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from halfbyte.cli.main import _parser

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert not [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None]
    assert notebook["cells"][0]["cell_type"] == "markdown"
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}  # nothing of the machine that wrote it
    assert str(Path.home()) not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_somewhere(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    text = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (FOLDER / target).exists(), target
    commands = {action.dest: action.choices for action in _parser()._actions if isinstance(action.choices, dict)}
    (choices,) = commands.values()
    assert {*re.findall(r"`halfbyte ([a-z]+)", text)} <= choices.keys()


def test_there_are_three_and_the_docs_name_them() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"language_model", "cnn_int8", "encoder"}
    docs = "".join(page.read_text(encoding="utf-8") for page in sorted((FOLDER.parents[1] / "docs").glob("*.md")))
    assert [path.name for path in NOTEBOOKS if f"examples/notebooks/{path.name}" not in docs] == []
