"""What every test starts from: a cache folder of its own, a fixed seed, and hypothesis without a clock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

# Threads of OpenMP that wait for work don't spin: with a worker of pytest on each core that took half of all CPU time. OpenMP reads
# this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import kernel_cache
import pytest
import torch

# Triton reads this when it is imported, which modules of other folders may do before tests/kernels/gpu is collected.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Compiling a kernel takes longer than hypothesis allows one example by default.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session", autouse=True)
def _separate_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of the session, for all of its processes. In it, the CPU's compiled kernels are those of all sessions with the same
    sources, which are part of each kernel's key anyway; of other sources, those with the same IR. A session compiles the rest."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each has a folder of its own in the session's
        folder = folder.parent
    cache = folder / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    kernel_cache.by_ir()
    if (kernels := kernel_cache.by_sources()) is not None:
        with contextlib.suppress(FileExistsError):  # by another process of the session
            (cache / "cpu").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFBYTE_CACHE", str(cache))
        patch.setenv("HALFBYTE_CHECK", "0")  # tests compare models themselves; test_self_check.py tests this
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
