"""No kernel reads or writes beyond what it is given: `guarded.py` runs them between pages that may not be touched."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import RUNNABLE

pytestmark = pytest.mark.skipif(os.name != "posix", reason="mprotect is POSIX")


def run(progress: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).parents[2] / "shared" / "cpu" / "guarded.py"), str(progress), *arguments]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_no_kernel_leaves_its_buffers(isa: object, tmp_path: Path) -> None:
    done = run(tmp_path / "progress", HALFBYTE_ISA=isa.name)
    assert done.returncode == 0, f"at {(tmp_path / 'progress').read_text().strip()}: {done.stderr[-2000:]}"


def test_a_step_too_far_is_seen(tmp_path: Path) -> None:
    assert run(tmp_path / "progress", "1").returncode == -signal.SIGSEGV
