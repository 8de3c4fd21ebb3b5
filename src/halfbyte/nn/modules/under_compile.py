"""Functions that torch.compile calls instead of tracing them. Their decorators import torch._dynamo, so they are imported when something
is compiled; called by `quantized.py` and `weight_view.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import UnsupportedError
from halfbyte.nn.modules.packed_check import check_bytes


@torch.compiler.disable  # type: ignore[untyped-decorator]
def write_outside(func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], refusal: str) -> Tensor:
    """Write to a `TracedWeight`, the first of `args`, after torch.compile has broken its graph.

    Raises:
        UnsupportedError: It is a part of a weight; with the text `refusal`.
    """
    weight: Any = args[0]
    if weight.owner is None:
        raise UnsupportedError(refusal)
    func(weight.owner.weight, *args[1:], **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        func(*args, **kwargs)
    result: Tensor = weight
    return result


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_when_traced(kind: str, data: Tensor, check: Tensor | None) -> None:
    """Check the bytes of a module as torch.compile traces it, also within torch.func.functional_call.

    torch 2.8 takes tensors and constants here, but no module.
    """
    if type(data) is Tensor and not data.is_meta:
        check_bytes(kind, data, check)
