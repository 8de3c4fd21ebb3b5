"""Versions of other packages: what is allowed, what is tested, and what the environments of `make compat` hold."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CAPPED = {"diffusers", "peft", "torch", "transformers", "triton", "uvicorn", "vllm"}  # undocumented parts of them are used


def requirements(extra: str | None = None) -> Iterator[Requirement]:
    """Those of an extra, and of the extras of this package that it names."""
    for line in PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            for other in requirement.extras:
                yield from requirements(other)
        else:
            yield requirement


def bounds(requirement: Requirement, operator: str) -> list[Version]:
    return [Version(specifier.version) for specifier in requirement.specifier if specifier.operator == operator]


def pins(file: str) -> dict[str, Version]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    of_this_machine = [r for r in (*requirements(), *requirements("compat")) if r.marker is None]
    oldest = {canonicalize_name(r.name): max(bounds(r, ">=")) for r in of_this_machine}
    assert pins("constraints-oldest.txt") == oldest


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_tested_versions_are_allowed(file: str) -> None:
    versions = pins(file)
    extras = ("compat", "dev", "docs") if file == "constraints.txt" else ("compat",)
    for requirement in (*requirements(), *(requirement for extra in extras for requirement in requirements(extra))):
        if requirement.marker is None or "riscv64" not in str(requirement.marker):
            version = versions.get(canonicalize_name(requirement.name))
            assert version is None or requirement.specifier.contains(version), f"{requirement} does not allow {version} of {file}"


def test_what_is_reached_into_has_an_upper_bound_and_nothing_else_has() -> None:
    for extra in (None, *PROJECT["optional-dependencies"]):
        for requirement in requirements(extra):
            others = {specifier.operator for specifier in requirement.specifier} - {">="}
            assert others == ({"<"} if requirement.name in CAPPED else set()), str(requirement)
            for upper in bounds(requirement, "<"):
                assert re.fullmatch(r"\d+\.\d+", str(upper)), f"{requirement}: a minor version is the bound"
