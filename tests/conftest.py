"""What every test starts from: a cache folder of its own, a fixed seed, and hypothesis without a clock."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

# Threads of OpenMP that wait for work don't spin: with a worker of pytest on each core that took half of all CPU time. OpenMP reads
# this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import platformdirs
import pytest
import torch

from halfbyte.kernels.cpu.codegen import jit

# Triton reads this when it is imported, which modules of other folders may do before tests/kernels/gpu is collected.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

KEPT_DAYS = 3

# Compiling a kernel takes longer than hypothesis allows one example by default.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session", autouse=True)
def _separate_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of the session, for all of its processes. In it, the CPU's compiled kernels are those of all sessions with the same
    sources, which are part of each kernel's key anyway: a session compiles what none has compiled before."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each has a folder of its own in the session's
        folder = folder.parent
    cache = folder / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    if (kernels := _compiled_kernels()) is not None:
        with contextlib.suppress(FileExistsError):  # by another process of the session
            (cache / "cpu").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFBYTE_CACHE", str(cache))
        patch.setenv("HALFBYTE_CHECK", "0")  # tests compare models themselves; test_self_check.py tests this
        yield


def _compiled_kernels() -> Path | None:
    """The folder of kernels compiled from the sources as they are, in a cache of the tests alone; those of sources that no session had
    for some days are removed. None where it can't be written."""
    digest = jit.source_digest()
    try:
        kernels = platformdirs.user_cache_path("halfbyte-tests", appauthor=False) / "kernels"
        digest_folder = kernels / str(digest)
        digest_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(digest_folder)
        for folder in kernels.iterdir():
            if folder.stat().st_mtime < time.time() - KEPT_DAYS * 24 * 3600:
                shutil.rmtree(folder, ignore_errors=True)
    except (OSError, RuntimeError):  # another process was faster; a user without a home
        return None
    return None if digest is None else digest_folder


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
