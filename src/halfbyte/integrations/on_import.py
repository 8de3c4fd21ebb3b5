"""Registers halfbyte with transformers, diffusers and peft once they are imported, in any order, so that `import halfbyte` imports none of
them, nor torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# The module whose import is awaited -> (the module that registers halfbyte with it, the supported versions for the warning).
_INTEGRATIONS = {
    "transformers.quantizers.auto": ("halfbyte.integrations.transformers.quantizer", "transformers, which has to be version 5.17 or newer"),
    "transformers.modeling_utils": (
        "halfbyte.integrations.transformers.changed_models",
        "transformers, whose models are resized and saved in another way",
    ),
    "transformers.trainer": ("halfbyte.integrations.transformers.training", "transformers, whose Trainer works in another way"),
    "diffusers.quantizers.auto": ("halfbyte.integrations.diffusers.quantizer", "diffusers, which needs transformers and accelerate for it"),
    "diffusers.hooks.group_offloading": ("halfbyte.integrations.diffusers.offloading", "diffusers, whose group offloading has changed"),
    "diffusers.loaders.single_file_model": ("halfbyte.integrations.diffusers.single_file", "diffusers, whose loaders have changed"),
    "peft.tuners.lora.model": ("halfbyte.integrations.peft.adapters", "peft, whose classes have changed"),
    "peft.peft_model": ("halfbyte.integrations.peft.prompts", "peft, whose classes have changed"),
}
_REGISTRY = "transformers.quantizers.auto"


def register() -> bool:
    """Register with each package now if it is imported, otherwise as soon as it is. Returns whether transformers is imported."""
    loaded = _REGISTRY in sys.modules
    for name in _INTEGRATIONS:
        if name in sys.modules:
            _integrate(name)
        else:
            sys.meta_path.insert(0, _ImportHook(name))
    return loaded


def _integrate(name: str) -> None:
    home, wanted = _INTEGRATIONS[name]
    package = name.partition(".")[0]
    if package in ("peft", "diffusers"):
        from halfbyte.versions import why_untested

        if (reason := why_untested(package)) is not None:
            import_module(f"halfbyte.integrations.{package}.untested").refuse(sys.modules[name], reason)
            return
    try:
        import_module(home)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in {package, "transformers"}:
            raise
        warnings.warn(f"halfbyte is not registered with {wanted}: {error}", stacklevel=2)


class _ImportHook(MetaPathFinder):
    """A finder that waits for one module, lets the other finders find it, and registers halfbyte once it has been executed."""

    def __init__(self, awaited: str) -> None:
        self._awaited = awaited

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._awaited:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, name)
        return spec


class _Then(Loader):
    def __init__(self, loader: Loader, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Later users of the module's loader (inspect, pkgutil) get the real one.
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _integrate(self._name)
