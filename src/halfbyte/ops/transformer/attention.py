"""halfbyte::attend_whole: attention of whole sequences on a CPU (`kernels/cpu/transformer/attend_whole.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfbyte.ops.library import in_mode, loops, plain, refuses_derivatives, transformed

_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define("attend_whole(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor")


def supports(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` takes these tensors, no derivatives are needed, and torch's own would not cast them."""
    from halfbyte.kernels.cpu.transformer import attend_whole

    if (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))) or in_mode() or transformed():
        return False
    return attend_whole.supports(query, key, value, mask)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * query · keyᵀ) · value for [B, H, T, D] each -> [B, T, H, D]; mask bool [B or 1, 1, T or 1, T], True where a token is
    seen. The caller has checked `supports`."""
    if all(map(plain, (query, key, value))):
        return _attend(query, key, value, mask, scale)
    out: Tensor = torch.ops.halfbyte.attend_whole(query, key, value, mask, scale)
    return out


def _attend(*args: Any) -> Tensor:
    from halfbyte.kernels.cpu.transformer import attend_whole

    return attend_whole.attend(*args)


def _fake(query: Tensor, *_: Any) -> Tensor:
    batch, heads, tokens, dim = query.shape
    return query.new_empty(batch, tokens, heads, dim)


_library.impl("attend_whole", _attend, "CPU")
refuses_derivatives(_library, "attend_whole")
loops(_library, "attend_whole")
torch.library.register_fake("halfbyte::attend_whole", _fake, lib=_library)
