"""Text of a live model on a GPU by `GpuModel`: its prefill, its decode steps as CUDA graphs, and its cache.

This is for one sequence without padding and with the cache of transformers' choice, which is not returned. Other calls, and models that
transformers computes a part of, take the steps of `steps.py` and `graphs.py`.
"""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.integrations.transformers.decoder.live_ends import Head
from halfbyte.integrations.transformers.decoder.stack import ChangedError, CompiledStack, check_layer, compiled_outside
from halfbyte.integrations.transformers.generate.steps import Choice, Text, compiled_decoder
from halfbyte.integrations.transformers.optimize.calls import Arguments, cache_name
from halfbyte.integrations.transformers.optimize.hooked import is_capturing, watched
from halfbyte.ops.library import plain

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

_UNUSED = "use_cache", "logits_to_keep", "cache_position"  # arguments of a prefill that change nothing here


class GpuText:
    """Tokens after a prompt, one after the other: the interface of `Step`."""

    def __init__(self, model: GpuModel, stack: Part, ids: Tensor, choice: Choice, most: int, lock: Lock) -> None:
        """Read the prompt ids [1, t] of a text of at most so many tokens. lock: It is released by `close`.

        Raises:
            ChangedError: A layer has changed since the stack was compiled.
        """
        self._model, self._choice, self._cache = model, choice, Cache(model.spec, most=most, where=model.where)
        self._lock, self._seen = lock, Text(ids)
        self._captured = partial(choice, ids) if choice.alone else None  # chooses by the logits alone
        logits = model.prefill(ids[0].tolist(), self._cache, before=partial(check_layer, stack))
        self._first: Tensor | None = self._choose(logits[None])
        self._tokens: list[int] = []  # the last ones

    def next(self, ids: Tensor, *, goes_on: bool) -> Tensor:
        """`Step.next`"""
        first, self._first = self._first, None
        if first is not None:
            self._tokens = first.tolist()
        else:
            choose, is_captured = self._captured or self._choose, self._captured is not None
            self._tokens = self._model.decode_tokens(self._tokens, self._cache, choose=choose, captured=is_captured, goes_on=goes_on)
        return torch.tensor(self._tokens, device="cpu")

    def _choose(self, logits: Tensor) -> Tensor:
        """The tokens after all that there are."""
        tokens = self._choice(self._seen.ids, logits)
        self._seen.append(tokens)
        return tokens

    def finish(self) -> None:
        """Do nothing: the cache is not returned."""

    def close(self) -> None:
        """Free what the steps hold."""
        self._model.close_steps_of(self._cache)
        self._lock.release()


def lowered(model: Part) -> tuple[GpuModel, CompiledStack] | None:
    """A model lowered for a GPU, with its stack; None if some of it is not computed by `GpuModel`."""
    decoder = compiled_decoder(model, compiled_outside)
    if decoder is None or watched(model) or (head := Head.of(model.lm_head)) is None:
        return None
    stack, logits = decoder
    found = stack.gpu_model(model.model, head, logits)
    return None if isinstance(found, str) else (found, stack)


def read_prompt(model: Part, ids: Tensor, arguments: Arguments, choice: Choice, most: int) -> GpuText | None:
    """Read the prompt of a call of `generate` by `GpuModel`; None if that does not do what is asked for, or another thread does so now."""
    if not _fits(ids, arguments):
        return None
    while (found := lowered(model)) is not None:
        gpu_model, stack = found
        if not stack.gpu_lock.acquire(blocking=False):
            return None
        try:
            return GpuText(gpu_model, model.model, ids, choice, most, stack.gpu_lock)
        except ChangedError:
            stack.gpu_lock.release()
        except BaseException:
            stack.gpu_lock.release()
            raise
    return None


def _fits(ids: Tensor, arguments: Arguments) -> bool:
    """Whether a call is for one sequence without padding, in a new cache of floats."""
    cache, mask, positions = arguments[cache_name(arguments)], arguments.get("attention_mask"), arguments.get("position_ids")
    known = {cache_name(arguments), "attention_mask", "position_ids", *_UNUSED}
    if len(ids) != 1 or any(value is not None and name not in known for name, value in arguments.items()):
        return False
    if type(cache) is not DynamicCache or cache.get_seq_length() or is_capturing() or not plain(ids) or torch.is_grad_enabled():
        return False
    if mask is not None and (mask.shape != ids.shape or not bool(mask.all())):
        return False
    return positions is None or (positions.shape == ids.shape and positions[0].tolist() == list(range(ids.shape[1])))
