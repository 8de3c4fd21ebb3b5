"""Hooks of modules that a fused forward would not call."""

from __future__ import annotations

from torch import nn
from transformers.utils import output_capturing

from halfbyte.nn.modules.quantized import has_hooks


def is_capturing() -> bool:
    """Whether transformers is collecting hidden states or attentions in this thread."""
    return bool(output_capturing._active_collector.get())  # type: ignore[no-untyped-call]


def watched(module: nn.Module) -> bool:
    """Whether calling a module runs a hook.

    The hooks that transformers leaves after a request for hidden states or attentions do not count: they are inactive until the next
    request.
    """
    if not has_hooks(module):
        return False
    if module._forward_pre_hooks or is_capturing():
        return True
    return any(getattr(hook, "__module__", None) != output_capturing.__name__ for hook in module._forward_hooks.values())


def why_hooked(module: nn.Module) -> str | None:
    """Which part of a module has a hook, or None."""
    return next((f"its {name} has a hook" for name, part in module.named_modules() if name and watched(part)), None)
