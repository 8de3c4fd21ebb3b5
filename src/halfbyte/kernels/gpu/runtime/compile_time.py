"""What is common to the constants that kernels are compiled for, the classes `Static`."""

from __future__ import annotations

import sys
from functools import cache
from hashlib import sha256
from inspect import getsource


class CompileTime:
    """A dataclass's fields and properties, as a kernel's constant."""

    @property
    def cache_key(self) -> str:
        """Triton's name for it on disk (`ASTSource.hash`). Its own, the fields, would find a kernel again that was compiled when a property
        made something else of them."""
        kinds = tuple(kind.__module__ for kind in type(self).__mro__ if kind.__module__.startswith("halfbyte."))
        return f"{self} {_digest(kinds)}"


@cache
def _digest(modules: tuple[str, ...]) -> str:
    return sha256("".join(getsource(sys.modules[name]) for name in modules).encode()).hexdigest()
