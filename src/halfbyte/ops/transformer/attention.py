"""halfbyte::attend_whole: full (bidirectional) attention without a KV cache on a CPU, as encoders compute it.

`integrations/transformers/attention.py` asks `supports`, then calls `attend`; where `supports` is False it falls back to torch's
`scaled_dot_product_attention`. The kernel is in `kernels/cpu/transformer/attend_whole.py`, which functions import here, so that
`import halfbyte` does not import llvmlite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.ops.modes import in_mode, plain, transformed
from halfbyte.ops.registration import loops, refuses_derivatives

_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define("attend_whole(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor")


def supports(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` may replace torch's attention for these tensors.

    It may not where a result needs a derivative (reverse or forward mode), under autocast, whose dtype torch's attention would cast to, and
    under torch.func's transforms (grad, vmap, …).

    Args:
        query, key, value, mask: As for `attend`; other devices, dtypes, shapes and strides are answered with False.
    """
    from halfbyte.kernels.cpu.transformer import attend_whole

    if (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))) or in_mode() or transformed():
        return False
    return attend_whole.supports(query, key, value, mask)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute softmax(scale * query · keyᵀ) · value over all S keys that the mask lets each query see.

    The caller has checked `supports`.

    Args:
        query: float32 [B, H, T, D]; the last dimension is contiguous.
        key, value: float32 [B, H, S, D], likewise: no grouped-query attention.
        mask: bool [B or 1, 1, T or 1, S], True where a query may see a key; None: every query sees every key.
        scale: Factor of the scores.

    Returns:
        float32 [B, T, H, D], contiguous: heads and tokens are transposed, as `o_proj` reads them. 0 for a query that sees no key.
    """
    if all(map(plain, (query, key, value))):  # eager tensors: bypass the dispatcher, whose overhead is that of a small kernel
        return _attend(query, key, value, mask, scale)
    out: Tensor = torch.ops.halfbyte.attend_whole(query, key, value, mask, scale)
    return out


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Run the kernel: the op on a CPU."""
    from halfbyte.kernels.cpu.transformer import attend_whole

    return attend_whole.attend(query, key, value, mask, scale)


def _fake(query: Tensor, *_: object) -> Tensor:
    """Return an empty output [B, T, H, D], from which torch.compile and torch.export infer shapes."""
    batch, heads, tokens, dim = query.shape
    return query.new_empty(batch, tokens, heads, dim)


_library.impl("attend_whole", _attend, "CPU")
refuses_derivatives(_library, "attend_whole")
loops(_library, "attend_whole")
torch.library.register_fake("halfbyte::attend_whole", _fake, lib=_library)
