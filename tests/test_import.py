"""`import halfbyte` is light, and every public name says what it is."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from language_model import make_language_model

import halfbyte
from halfbyte.checkpoint import convert, export
from halfbyte.nn.config import Config

OPTIONAL = ("llvmlite", "triton", "transformers", "rich", "gguf", "sentence_transformers")


PUBLIC = [name for name in halfbyte.__all__ if name != "__version__"]


def _new_modules(statements: str) -> set[str]:
    """Which of OPTIONAL a fresh process has after `statements` and did not have after `import torch`."""
    code = f"""
import json, sys
import torch
before = set(sys.modules)
{statements}
print(json.dumps([name for name in {OPTIONAL} if name in sys.modules and name not in before]))
"""
    return set(json.loads(_run(code)))


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout


def test_import_needs_no_optional_package() -> None:
    assert _new_modules("import halfbyte") == set()


def test_the_whole_face_needs_llvmlite_at_most() -> None:
    """The CPU's kernels are the one part of the face that may import something big, but for what changes models of transformers."""
    names = "".join(f"halfbyte.{name}\n" for name in PUBLIC if name not in ("HalfbyteConfig", "Int8Cache"))
    assert _new_modules(f"import halfbyte\n{names}") <= {"llvmlite"}


NOT_OF_LANGUAGE_MODELS = (
    *("transformers", "triton", "sympy", "jinja2", "rich", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"),
    *("halfbyte.nn.modules.quantized", "halfbyte.ops.cuda", "halfbyte.ops.conv.functions", "halfbyte.dispatch.gpu"),
    *("halfbyte.checkpoint.mapping.architecture", "halfbyte.checkpoint.loading", "halfbyte.integrations.transformers.text"),
    *("halfbyte.nn.config", "halfbyte.nn.report", "halfbyte.quantizers.gptq", "halfbyte.ops.fake_quantize"),
)


@pytest.mark.parametrize("suffix", ["", ".gguf"])
def test_a_language_model_imports_little(suffix: str, tmp_path: Path) -> None:
    """`halfbyte generate` from a halfbyte folder or a GGUF file; what quantizes is for those who ask for a format."""
    path, folder = tmp_path / f"model{suffix}", make_language_model(tmp_path / "float")
    convert(folder, tmp_path / "model", Config("q4_0"))
    if suffix:
        export(tmp_path / "model", path)
    code = f"""
import json, sys
import torch
before = set(sys.modules)
from halfbyte.cli.main import main
assert main(["generate", {str(path)!r}, "--prompt=the", "--max-new-tokens=2", "--device=cpu"]) == 0
assert "halfbyte.language.model" in sys.modules
print()
print(json.dumps([name for name in {NOT_OF_LANGUAGE_MODELS} if name in sys.modules and name not in before]))
"""
    assert json.loads(_run(code).splitlines()[-1]) == []


def test_import_is_fast() -> None:
    code = "import torch, time; start = time.process_time(); import halfbyte; print(time.process_time() - start)"
    assert any(float(_run(code)) < 0.3 for _ in range(3))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_docstrings(name: str) -> None:
    doc = inspect.getdoc(getattr(halfbyte, name))
    assert doc
    assert not doc.startswith(f"{name}("), "a dataclass's generated docstring says nothing"


def test_a_config_shows_its_settings() -> None:
    assert {"format", "skip", "overrides"} <= set(inspect.signature(halfbyte.Config).parameters)


def test_names_are_listed_and_no_others_are_found() -> None:
    assert set(halfbyte.__all__) == set(dir(halfbyte))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = halfbyte.nonsense
