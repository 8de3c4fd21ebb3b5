"""Docstrings of public names: Google style with Args, Returns and an example, which runs."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import halfbyte as hb

NAMES = [name for name in hb.__all__ if name != "__version__"]
# Examples that open a language model: those of docs/ run them with a real one.
LANGUAGE_MODELS = ("LanguageModel",)
DISTRIBUTED = ("parallelize_", "parallel_report")


def problems(name: str, public: Any) -> list[str]:
    """What a docstring lacks."""
    doc = inspect.getdoc(public) or ""
    found = [] if re.match(r"\S.*\.($|\n| )", doc) else ["does not begin with a sentence"]
    if re.search(r"^\w+(, \w+)*  +\S", doc, re.MULTILINE):
        found.append("has two columns, which Markdown joins: write Args")
    if inspect.isfunction(public):
        listed = re.findall(r"^    \*{0,2}(\w+): ", _section(doc, "Args"), re.MULTILINE)
        lacking = [p for p in inspect.signature(public).parameters if p not in listed]
        found += [f"Args lacks {', '.join(lacking)}"] if lacking else []
        found += [] if _section(doc, "Returns") else ["has no Returns"]
    if ">>> " not in _section(doc, "Example") and name not in LANGUAGE_MODELS:
        found.append("has no example")
    return found


def _section(doc: str, head: str) -> str:
    match = re.search(rf"^{head}:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    return "" if match is None else match[1]


@pytest.mark.parametrize("name", NAMES)
def test_public_docstrings(name: str) -> None:
    assert problems(name, getattr(hb, name)) == []


def test_what_a_docstring_lacks_is_found() -> None:
    def columns(x: int) -> int:
        """Count.

        x  a number
        """
        return x

    assert problems("columns", columns) == [
        "has two columns, which Markdown joins: write Args",
        "Args lacks x",
        "has no Returns",
        "has no example",
    ]


@pytest.fixture
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    if request.getfixturevalue("name") not in DISTRIBUTED:
        yield
        return
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in LANGUAGE_MODELS])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = getattr(hb, name)
    monkeypatch.setattr(hb, "keep_freed_memory", lambda: True)  # which would change all tests that follow
    names = {"hb": hb, "torch": torch, "nn": nn, "folder": tmp_path, "save_file": save_file, "init_device_mesh": init_device_mesh}
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(public) or "", names, name, None, 0)
    assert examples.examples
    output: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=output.append)
    assert not output, "".join(output)
