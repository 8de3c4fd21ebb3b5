"""Compiles a model's GPU kernels before its first prompt, side by side: one after the other, as the prompt and the first token come to
them, they take several times as long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.integrations.transformers.optimize.calls import KV_CACHE
from halfbyte.nn.modules.experts import MixtureOfExperts

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part


def compile_kernels(model: Part, batch: int, tokens: int, cache: Callable[[], object], **settings: object) -> None:
    """Compile the kernels of a prefill [batch, tokens] and of a decode step side by side, on an NVIDIA GPU; no-op on other devices.

    The model is called, and all of it runs but this package's kernels. As their results are undefined, a model must not find addresses in
    them: mixtures of experts are left out. settings: further arguments of the model.
    """
    device = model.device
    if device.type != "cuda" or why_no_triton() is not None or any(isinstance(part, MixtureOfExperts) for part in model.modules()):
        return
    from halfbyte.kernels.gpu.runtime import launch, tape

    ids = torch.zeros(batch, tokens, dtype=torch.int64, device=device)
    with torch.inference_mode(), torch.cuda.device(device):
        tape.why_not_replayed(device)
        kept = cache()
        with launch.compiling(device):
            for each in (ids, ids[:, :1]):
                model(input_ids=each, use_cache=True, **{KV_CACHE: kept}, **settings)
