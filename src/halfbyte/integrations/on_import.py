"""Tells transformers about halfbyte once both are imported, in whichever order, so that `import halfbyte` imports neither it nor torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_REGISTRY = "transformers.quantizers.auto"  # the module that holds transformers' table of quantization methods


def register() -> bool:
    """Registers the quantizer with transformers: now (True) if transformers' table is loaded, otherwise as soon as it is."""
    if loaded := _REGISTRY in sys.modules:
        _integrate()
    else:
        sys.meta_path.insert(0, _Watcher())
    return loaded


def _integrate() -> None:
    try:
        import_module("halfbyte.integrations.transformers")
    except ImportError as error:
        if not (error.name or "").startswith("transformers"):
            raise
        warnings.warn(f"halfbyte is not registered with transformers, which has to be version 5.4 or newer: {error}", stacklevel=2)


class _Watcher(MetaPathFinder):
    """Finds nothing itself: it waits for one module, lets the other finders find it, and acts once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What asks the module for its loader later (inspect, pkgutil) finds the real one.
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _integrate()
