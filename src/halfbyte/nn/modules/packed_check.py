"""`packed_check`, the buffer stored with a packed weight by which bytes are recognized that other code has computed with, such as
averages."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.bounded import by_tensor
from halfbyte.errors import ArgumentError

_SAMPLES = 4096  # bytes of a packed weight that `digest` reads


def digest(data: Tensor) -> Tensor:
    """Sum of squares of evenly spaced bytes, int64 [1]: not that of bytes that were averaged or scaled, as it is not linear."""
    bytes_ = data.reshape(-1).view(torch.uint8)
    sample = bytes_[:: max(1, len(bytes_) // _SAMPLES) | 1].long()
    return (sample * sample).sum().view(1)


check_of = by_tensor(digest)  # of a packed weight, one tensor for all modules that share it


def check_bytes(module: str, data: Tensor, check: Tensor | None) -> None:
    """Raise ArgumentError for packed bytes of a module of class `module` that were computed with; `check` is its `packed_check`."""
    if check is not None and not torch.equal(digest(data), check):
        raise ArgumentError(
            f"packed_data of a {module} does not match packed_check: packed codes cannot be averaged or computed with, and both are copied "
            "together: average parameters alone (use_buffers=False), or float models, and quantize the result"
        )
