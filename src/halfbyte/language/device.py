"""The choice of the torch device that a language model runs on.

`best_device` is the default of the command line (`cli/shared/device.py`); `LanguageModel.open` passes its argument to `find_device`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from halfbyte.errors import ArgumentError, HalfbyteError
from halfbyte.memory import size_text

T = TypeVar("T")

_OLDEST = (8, 0)  # the oldest compute capability that the kernels are for: Ampere


def best_device() -> tuple[str, str]:
    """Choose "cuda" if GPU 0 is an NVIDIA GPU from Ampere on and Triton is installed, else "cpu".

    Returns:
        The device, "cuda" or "cpu", and the reason why a GPU that torch sees is not used: "" if it is used, or if there is none.
    """
    if not torch.cuda.is_available():
        return "cpu", ""
    from halfbyte.dispatch.gpu import why_no_triton
    from halfbyte.machine import gpu

    candidate = gpu(0)
    if candidate.backend != "cuda" or candidate.capability < _OLDEST:  # ROCm has another backend
        return "cpu", f"the kernels are for NVIDIA GPUs from Ampere on; --device cuda takes {candidate.name} all the same"
    if (reason := why_no_triton()) is not None:  # it ends with what to install: "…: install triton>=3.6 to use NVIDIA L4"
        return "cpu", f"{reason} to use {candidate.name}"
    return "cuda", ""


def find_gpu(name: torch.device | str) -> torch.device:
    """Resolve a name to a GPU, as `find_device` does.

    Raises:
        ArgumentError: It is a CPU, or there is no such GPU.
    """
    device = find_device(name)
    if device.type != "cuda":
        raise ArgumentError(
            f"memory and a part of the model on the CPU are for a GPU, got device={str(name)!r}: leave them out, or pass device='cuda'"
        )
    return device


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU's memory that tensors can take now; None for a CPU."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def fitting(build: Callable[[], T], device: torch.device, refusal: Callable[[str], HalfbyteError]) -> T:
    """Return what a function builds on a device.

    Args:
        build: The function.
        device: The device.
        refusal: Makes the error where memory is not enough, from a text that says how much is free. It is raised when all that was built
            is free again: no traceback holds it.
    """
    try:
        return build()
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
    raise refusal(returned_memory(device))


def no_memory_to_run(device: torch.device, what: str, free: str) -> ArgumentError:
    """Return the error of a computation for which there is no memory; nothing of it is left."""
    return ArgumentError(
        f"{device} has no memory for {what}, {free} is free: use fewer tokens or sequences at a time, end other programs that use it, "
        "or open the model with less memory"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a GPU's memory, or main memory that a GPU reads, is full."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "out of memory" in str(error))


def returned_memory(device: torch.device) -> str:
    """Return memory that torch holds and no tensor uses to a GPU, and say how much is free there then."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    free = free_memory(device)
    return "memory" if free is None else size_text(free)


def find_device(name: torch.device | str) -> torch.device:
    """Resolve a name to a device that exists.

    Args:
        name: "cpu", "cuda" for torch's current GPU, "cuda:1", …, a torch.device, or "auto" for `best_device`, whose reason is dropped.

    Returns:
        The device. A GPU has its index, so that devices of tensors compare equal to it; a CPU has none.

    Raises:
        ArgumentError: The name is not a device's, its type is neither "cpu" nor "cuda", or torch sees no such GPU.
    """
    try:
        device = torch.device(best_device()[0] if name == "auto" else name)
    except (RuntimeError, TypeError) as e:
        raise ArgumentError(f"a device is 'cpu', 'cuda', 'cuda:1', … or 'auto', got {name!r}") from e
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or (device.index or 0) >= count:
        gpus = "none" if not count else "cuda" if count == 1 else f"cuda:0 … cuda:{count - 1}"
        raise ArgumentError(f"a device is 'cpu' or a GPU that torch sees, {gpus}, got {str(name)!r}: use device='cpu'")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
