"""What torch is doing around a call: derivatives, tracing, autocast, transforms of torch.func.

Public functions (functions.py, conv/functions.py, grouped.py, …) ask here whether they may call a kernel at once, or have to pass through
torch's dispatcher, for which registration.py has the rules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_PLAIN_TYPES = Tensor, nn.Parameter  # a DTensor, for example, has no memory of its own


def differentiated(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Whether the result has a derivative, in reverse or in forward mode."""
    return (
        torch.is_grad_enabled()
        and (x.requires_grad or (bias is not None and bias.requires_grad) or (residual is not None and residual.requires_grad))
    ) or has_tangent(x, bias, residual)


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether one is a dual tensor of `torch.autograd.forward_ad`."""
    if forward_ad._current_level < 0:
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def in_mode() -> bool:
    """Whether a mode of torch is on that acts in the dispatcher: autocast, or forward-mode differentiation."""
    return torch._C._is_any_autocast_enabled() or forward_ad._current_level >= 0


def plain(x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> bool:
    """Whether a call may bypass torch's dispatcher, which takes longer than a small kernel.

    It may not while tracing or within a mode, autocast, forward-mode differentiation or torch.func, nor with tensors of subclasses or
    negative views (`z.conj().imag`), whose memory holds other numbers. Reverse-mode derivatives are not asked about: see `differentiated`.
    """
    return (
        type(x) is Tensor
        and (x.is_cpu or x.is_cuda)
        and (bias is None or type(bias) in _PLAIN_TYPES)
        and (residual is None or type(residual) in _PLAIN_TYPES)
        and not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and torch._C._get_tracing_state() is None  # of torch.jit.trace
        and torch._C._functorch.peek_interpreter_stack() is None
        and not in_mode()
        and not (x.is_neg() or (bias is not None and bias.is_neg()) or (residual is not None and residual.is_neg()))
    )


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, …) is active, which needs the autograd.Function itself, not an op that wraps it."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
