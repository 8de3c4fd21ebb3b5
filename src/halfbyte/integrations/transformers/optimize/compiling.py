"""Compiles a model's GPU kernels before its first prompt, side by side: one after the other, as the prompt and the first token come to
them, they take several times as long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from halfbyte import env
from halfbyte.bounded import by_object
from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.integrations.transformers.decoder.live_layer import has_experts
from halfbyte.integrations.transformers.decoder.stack import is_compiled_stack
from halfbyte.integrations.transformers.optimize.calls import KV_CACHE
from halfbyte.integrations.transformers.optimize.forwards import why_not_native
from halfbyte.nn.modules.experts import MixtureOfExperts

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part


def compile_ahead(model: Part, batch: int, tokens: int, cache: Callable[[], object]) -> None:
    """Compiles what a language model on a GPU runs for prompts [batch, tokens] and for the token after them, the first time that it is
    called for a model; does nothing on other devices, and where kernels are tuned as they are met.

    cache  makes an empty one, of the kind and size that will be used
    """
    if not env.tune():
        _compile_once(model, batch, tokens, cache)


@by_object()
def _compile_once(model: Part, batch: int, tokens: int, cache: Callable[[], object]) -> None:
    """`compile_ahead` for the first arguments that it is called with for a model: kernels for others are compiled when they are needed."""
    stacks = [module for module in model.modules() if is_compiled_stack(module)]
    if stacks and all(
        why_not_native(layer) is None and not has_experts(layer) for stack in stacks for layer in stack.get_submodule("layers").children()
    ):
        compile_kernels(model, batch, tokens, cache, logits_to_keep=1)


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
