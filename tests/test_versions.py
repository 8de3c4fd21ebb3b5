"""Private interfaces of other packages are used with tested versions alone."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import make_decoder
from packaging.version import Version

import halfbyte as hb
from halfbyte import versions
from halfbyte.integrations.transformers.optimize.replaced import ReplacedForward
from halfbyte.machine import GPUS
from halfbyte.versions import TESTED, why_untested

ROOT = Path(__file__).parents[1]
SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    why_untested.cache_clear()
    yield
    why_untested.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
    real = metadata.version
    monkeypatch.setattr(versions.metadata, "version", lambda name: version if name == package else real(name))


def test_the_installed_versions_are_tested() -> None:
    installed = [name for name, tested in TESTED.items() if find_spec(tested.package or name)]
    assert len(installed) >= len(TESTED) - 1, "all but vLLM are installed wherever the tests run"
    assert [why_untested(name) for name in installed] == [None] * len(installed)


@pytest.mark.parametrize("version", ["5.17", "5.17.0", "5.24.9", "5.23.0.dev0"])
def test_versions_in_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "transformers", version)
    assert why_untested("transformers") is None


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("5.99.1", "transformers 5.99.1 is newer than .*, the newest version tested"),
        ("6.0", "newer than"),
        ("5.16.2", "transformers 5.16.2 is older than 5.17, the oldest version tested"),
        ("unknown", "older than"),
    ],
)
def test_versions_outside_of_it_are_named_once(version: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "transformers", version)
    with pytest.warns(RuntimeWarning, match=f"{message}.*install transformers 5.17 to"):
        reason = why_untested("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert why_untested("transformers") == reason


def test_a_model_of_an_untested_version_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: Any = hb.quantize_(make_decoder("Llama", **SMALL, num_key_value_heads=1).eval(), "q4_0")
    pretend(monkeypatch, "transformers", "5.99.0")
    with pytest.warns(RuntimeWarning, match="without halfbyte's fused decoder and encoder layers"):
        hb.optimize_(model)
    assert not any(isinstance(module, ReplacedForward) for module in model.modules())
    assert any("transformers 5.99.0 is newer" in note for note in hb.report(model).notes)
    assert model.generate(torch.arange(3)[None], max_new_tokens=2).shape == (1, 5)


def test_launches_of_an_untested_triton_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.kernels.gpu.runtime import tape

    monkeypatch.setattr(tape, "_why_not_replayed", tape._why_not_replayed.__wrapped__)
    pretend(monkeypatch, "triton", "99.0.0")
    with pytest.warns(RuntimeWarning, match="GPU kernels are launched by"):
        reason = tape.why_not_replayed(torch.device("cuda", 0))
    assert reason is not None
    assert reason.startswith("triton 99.0.0 is newer")


UNTESTED_PEFT = """
import sys, warnings
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "0.99.0" if name == "peft" else real(name)
import torch
import halfbyte as hb
from halfbyte.errors import UnsupportedError
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import peft
    import peft.tuners.lora.model
assert [str(one.message) for one in told if "peft" in str(one.message)] == [
    "peft 0.99.0 is newer than 0.21, the newest version tested: it attaches no adapters to quantized models; install peft 0.21"
], told
assert "halfbyte.integrations.peft.adapters" not in sys.modules
config = peft.LoraConfig(target_modules=["0"], modules_to_save=["1"])
peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), config)
for attach in (peft.get_peft_model, lambda model, config: peft.inject_adapter_in_model(config, model)):
    try:
        attach(hb.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), "q4_0"), config)
    except UnsupportedError as error:
        assert "peft 0.99.0 is newer than 0.21" in str(error) and "install peft 0.21, or attach them to the float model" in str(error)
    else:
        raise AssertionError("accepted")
"""


def test_hopper_gpus_of_an_untested_gluon_run_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.kernels.gpu.hopper.ring import why_not_hopper

    assert why_not_hopper(GPUS["sm_90"]) is None
    why_untested.cache_clear()
    pretend(monkeypatch, "triton", "3.10.0")
    assert "made of Hopper's instructions" in (why_not_hopper(GPUS["sm_80"]) or ""), "without a warning"
    with pytest.warns(RuntimeWarning, match="triton 3.10.0 is newer than 3.9, .*: Hopper GPUs .* install triton 3.6 to 3.9"):
        reason = why_not_hopper(GPUS["sm_90"])
    assert reason == "triton 3.10.0 is newer than 3.9, the newest version tested"


def test_an_untested_peft_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", UNTESTED_PEFT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pyproject_caps_what_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    for package, tested in TESTED.items():
        if tested.package:
            assert Version(tested.newest) <= Version(TESTED[tested.package].newest)
            continue
        (wanted,) = {one.partition(";")[0].strip() for one in asked if one.startswith(f"{package}>=")}
        major, minor = map(int, tested.newest.split("."))
        assert wanted == f"{package}>={tested.oldest},<{major}.{minor + 1}", f"{package} is tested from {tested.oldest} to {tested.newest}"
