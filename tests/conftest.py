"""What every test starts from: a cache folder of its own, a fixed seed, and hypothesis without a clock."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# Threads of OpenMP that wait for work don't spin: with a worker of pytest on each core that took half of all CPU time. OpenMP reads
# this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch

# Triton reads this when it is imported, which modules of other folders may do before tests/kernels/gpu is collected.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

KEPT = 4  # folders of compiled kernels

# Compiling a kernel takes longer than hypothesis allows one example by default.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """A cache folder of the session, for all of its processes: the user's stays as it is.

    In it, the CPU's compiled kernels are those of all sessions with the same sources, which are part of each kernel's key anyway: a
    session compiles what none has compiled before.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each has a folder of its own in the session's
        folder = folder.parent
    cache = folder / "cache"
    with contextlib.suppress(FileExistsError):  # by another process
        _link_kernels(cache, pytestconfig)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFBYTE_CACHE", str(cache))
        patch.setenv("HALFBYTE_CHECK", "0")  # tests compare models themselves; test_self_check.py tests this
        yield


def _link_kernels(cache: Path, config: pytest.Config) -> None:
    """`cpu` of the session's cache becomes a link to a folder in pytest's own cache, named by the sources; of such, the last few stay."""
    from halfbyte.kernels.cpu.codegen import jit

    digest = jit.source_digest()
    if digest is None or not hasattr(config, "cache"):  # -p no:cacheprovider
        return
    kernels = config.cache.mkdir("kernels")
    mine = kernels / digest
    mine.mkdir(mode=0o700, exist_ok=True)
    os.utime(mine)
    for old in sorted(kernels.iterdir(), key=lambda folder: folder.stat().st_mtime)[:-KEPT]:  # what other sessions use is new
        shutil.rmtree(old, ignore_errors=True)
    cache.mkdir(mode=0o700, exist_ok=True)
    (cache / "cpu").symlink_to(mine)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
