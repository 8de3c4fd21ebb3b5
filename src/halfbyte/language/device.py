"""The device that a language model runs on."""

from __future__ import annotations

import torch

from halfbyte.errors import ArgumentError

_OLDEST = (8, 0)  # compute capability: Ampere


def best_device() -> tuple[str, str]:
    """Choose "cuda" where there is a GPU that the kernels are for, and else "cpu".

    Returns:
        The device, and, if there is a GPU that is not used, the reason.
    """
    if not torch.cuda.is_available():
        return "cpu", ""
    from halfbyte.dispatch.gpu import why_no_triton
    from halfbyte.machine import gpu

    found = gpu(0)
    if found.backend != "cuda" or found.capability < _OLDEST:
        return "cpu", f"the kernels are for NVIDIA GPUs from Ampere on; --device cuda takes {found.name} all the same"
    if (reason := why_no_triton()) is not None:
        return "cpu", f"{reason} to use {found.name}"
    return "cuda", ""


def find_device(name: torch.device | str) -> torch.device:
    """Find the device of a name: "cpu", "cuda", "cuda:1", …, or "auto" for `best_device`.

    Raises:
        ArgumentError: There is no such device.
    """
    try:
        device = torch.device(best_device()[0] if name == "auto" else name)
    except (RuntimeError, TypeError) as e:
        raise ArgumentError(f"a device is 'cpu', 'cuda', 'cuda:1', … or 'auto', got {name!r}") from e
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or (device.index or 0) >= count:
        there = "none" if not count else "cuda" if count == 1 else f"cuda:0 … cuda:{count - 1}"
        raise ArgumentError(f"a device is 'cpu' or a GPU that torch sees, {there}, got {str(name)!r}: use device='cpu'")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
