"""Models whose weights differ between training and inference: RWKV halves them every few layers when it first runs in evaluation mode.

A model that is built again from its files halves them again, so that files hold the weights of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def as_trained(model: nn.Module) -> Iterator[bool]:
    """The model with the weights of training within the block; yields whether it had others."""
    changed = [m for m in model.modules() if getattr(m, "layers_are_rescaled", False) is True and hasattr(m, "_rescale_layers")]
    _rescale(changed, training=True)
    try:
        yield bool(changed)
    finally:
        _rescale(changed, training=False)


def _rescale(modules: list[Any], *, training: bool) -> None:
    for module in modules:
        mode, module.training = module.training, training  # its own alone: what it is for the call
        try:
            module._rescale_layers()
        finally:
            module.training = mode
