"""Modules of torch that wrap a model, and the parts that they add to the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

_ANYWHERE = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")  # torch.compile, FSDP
_FIRST = "module."  # DataParallel, DistributedDataParallel and, around both, deepspeed and accelerate


def without_parts(name: str) -> str:
    """A name without the parts that wrappers of a model or of its modules add, such as "_orig_mod"."""
    return _ANYWHERE.sub("", name)


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name -> the one without what wrappers add: all of them begin with "module.", or some have a part such as "_orig_mod"."""
    found = {name: without_parts(name) for name in names}
    while found and all(name.startswith(_FIRST) for name in found.values()):
        found = {name: without_parts(plain.removeprefix(_FIRST)) for name, plain in found.items()}
    return found if len(set(found.values())) == len(found) else {name: name for name in found}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that torch.compile, DataParallel or DistributedDataParallel wraps; any other as it is."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
