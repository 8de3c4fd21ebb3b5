"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

from halfbyte.machine import GPUS, Gpu
from halfbyte.machine import gpu as this_gpu

if not torch.cuda.is_available():  # tests/conftest.py has asked for the interpreter
    pytest.importorskip("triton", reason="Triton is not installed", exc_type=ImportError)
    from interpreter import mend

    mend()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU for the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def interpreted(device: torch.device) -> bool:
    """No GPU is here: bf16 dots are wrong, and there is no inline assembly."""
    return device.type == "cpu"


@pytest.fixture(scope="session")
def gpu(device: torch.device) -> Gpu:
    """The GPU that kernels run on, or for the interpreter the one that they are chosen for."""
    return this_gpu(0) if device.type == "cuda" else GPUS["sm_90"]
