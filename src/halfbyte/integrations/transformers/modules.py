"""Types of what halfbyte reads of transformers' modules, configurations and caches.

torch says that any attribute of a module is a Tensor or a Module. Which attributes a module or configuration of transformers has, and of
what types, depends on the model's family, and halfbyte reads many by names that are data (`decoder/families`). They are untyped, therefore,
and this is the one place that says so: a `Part` is a module, and a `Config` a configuration, whose attributes its family decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn


class Config(Protocol):
    """A configuration, or a part of one."""

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object) -> None: ...


if TYPE_CHECKING:

    class Part(nn.Module):
        """A module of a model: a decoder, a layer, its attention, a norm."""

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...
