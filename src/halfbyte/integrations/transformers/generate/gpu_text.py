"""Text of a live model on a GPU by `GpuModel`: its decode steps as CUDA graphs, and its cache.

The prompt of one sequence is read by `GpuModel`, too. Others (batches, left padding, images, caches that have tokens) are read by the
model's own forward, and the keys and values are copied (`cache/transfer.py`). What the cache of a call lacks in the end is copied back if
somebody sees that cache. Models that transformers computes a part of take the steps of `steps.py` and `graphs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache
from halfbyte.integrations.transformers.cache.transfer import give_back, taken, why_not_transferred
from halfbyte.integrations.transformers.decoder.stack import CompiledStack
from halfbyte.integrations.transformers.generate.request import Request, TokenIds
from halfbyte.integrations.transformers.generate.steps import ARGUMENTS, LiveModel, Step
from halfbyte.integrations.transformers.optimize.calls import Arguments, bind, cache_name
from halfbyte.integrations.transformers.optimize.hooked import is_capturing, watched
from halfbyte.ops.modes import plain

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

_NO_EFFECT = "use_cache", "logits_to_keep", "cache_position"  # arguments of a prefill that change nothing here
# Arguments that change nothing for tokens after the prompt.
_OF_PROMPTS = "token_type_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "cache_position"


class GpuText:
    """Tokens after prompts, one after the other: the interface of `Step`."""

    def __init__(
        self, model: GpuModel, stack: CompiledStack, cache: Cache, request: Request, first: Tensor, positions: Sequence[int]
    ) -> None:
        """Begin a text.

        Args:
            model: It computes the text.
            stack: Of which `model` is made. Its lock is held by this thread, and released by `close`.
            cache: Of the prompts.
            request: The call of `generate`.
            first: The first tokens after the prompts, [B].
            positions: Of the first tokens.
        """
        self._model, self._stack, self._cache, self._choose_by = model, stack, cache, request.choose
        self._call_cache = request.cache if request.keeps_cache else None
        self._captured = partial(request.choose, request.ids) if request.choose.alone else None  # chooses by the logits alone
        self._text, self._first = TokenIds(request.ids), first
        self._text.append(first)
        self._offsets = [position - cache.length for position in positions]  # from indices in the cache
        self._tokens: list[int] = []  # the last ones

    def next(self, ids: Tensor, *, launch_ahead: bool) -> Tensor:
        """`Step.next`"""
        if not self._tokens:
            self._tokens = self._first.tolist()
        else:
            positions = [self._cache.length + offset for offset in self._offsets]
            choose, is_captured = self._captured or self._choose, self._captured is not None
            self._tokens = self._model.decode_tokens(
                self._tokens, self._cache, positions, choose=choose, captured=is_captured, launch_ahead=launch_ahead
            )
        return torch.tensor(self._tokens, device="cpu")

    def _choose(self, logits: Tensor) -> Tensor:
        """The tokens after all that there are."""
        tokens = self._choose_by(self._text.ids, logits)
        self._text.append(tokens)
        return tokens

    def close(self) -> None:
        """Free what the steps hold, and leave the cache of the call with all tokens but the last one, if somebody sees it."""
        try:
            if self._call_cache is not None:
                give_back(self._cache, self._call_cache, self._model.spec)
            self._model.close_steps_of(self._cache)
        finally:
            self._stack.gpu_lock.release()


def lowered(model: Part) -> tuple[GpuModel, CompiledStack] | str:
    """A model lowered for a GPU, and its compiled stack; or why `GpuModel` does not compute it."""
    live = LiveModel.of(model)
    if live is None or watched(model):
        return "it has more parts than compiled layers and a head, a hook, or is in training"
    if live.head is None:
        return "its head is no linear layer by itself"
    found = live.stack.lowered(live.head, live.logits, on_cpu=False)
    return (found, live.stack) if isinstance(found, GpuModel) else str(found)


def read_prompts(request: Request) -> GpuText | Step | None:
    """Read the prompts of a call of `generate` for `GpuModel`.

    Returns:
        The text after the prompts; steps of transformers, if it turns out that `GpuModel` cannot go on from here; None if nothing was
        read, as `GpuModel` does not do what is asked for, or another thread uses it now.
    """
    past, ids, most, starts = request.cache, request.ids, request.most, _starts(request)
    if starts is None or is_capturing() or not plain(ids) or torch.is_grad_enabled():
        return None
    length = ids.shape[1] + request.cached
    if isinstance(found := lowered(request.model), str):
        return None
    gpu_model, stack = found
    if len(ids) > gpu_model.most_decode or why_not_transferred(past, gpu_model.spec, most) is not None:
        return None
    if stack.why_not_text([length], most) is not None or stack.gpu_lock.locked():
        return None
    if past.get_seq_length() or not _is_alone(request, starts):
        step = Step(request, request.prefill())
        return _after_forward(request, step, starts) or step
    with _locked(stack):
        cache = Cache(gpu_model.spec, int8=type(past) is Int8Cache, most=most, where=gpu_model.where)
        first = request.choose(ids, gpu_model.prefill(ids[0].tolist(), cache)[None])
        return GpuText(gpu_model, stack, cache, request, first, [length])


def _after_forward(request: Request, step: Step, starts: Sequence[int]) -> GpuText | None:
    """The text after prompts that the model's forward has read; None if `GpuModel` does not compute it, or has other work now."""
    past, found, ids = request.cache, lowered(request.model), request.ids  # the forward may have begun another cache
    length = int(past.get_seq_length())
    if isinstance(found, str) or length != ids.shape[1] + request.cached:
        return None
    gpu_model, stack = found
    positions = _positions(step.prepared(ids), len(ids), length, mrope=stack.kinds.family.mrope)
    if not positions or stack.why_not_text(positions, request.most) is not None or stack.gpu_lock.locked():
        return None
    if why_not_transferred(past, gpu_model.spec, request.most) is not None:
        return None
    with _locked(stack):
        cache = taken(past, gpu_model.spec, gpu_model.where, starts, keep=request.keeps_cache)
        return GpuText(gpu_model, stack, cache, request, step.first, positions)


@contextmanager
def _locked(stack: CompiledStack) -> Iterator[None]:
    """Lock a stack, for a text that unlocks it, unless an exception is raised within."""
    stack.gpu_lock.acquire()
    try:
        yield
    except BaseException:
        stack.gpu_lock.release()
        raise


def _positions(prepared: Arguments, batch: int, length: int, *, mrope: bool) -> list[int]:
    """The positions of the next tokens in a call of the model as transformers has prepared it; none if they are not known, or if more is
    asked for. length: of the text with its padding."""
    call = bind((), (), {name: value for name, value in prepared.items() if name not in _OF_PROMPTS}, ARGUMENTS)
    if call is None or call["input_ids"].shape[1] != 1:
        return []
    if (given := call.get("position_ids")) is None:
        return [] if mrope else [length] * batch
    axes = given.reshape(-1, *given.shape[-2:])[-3:, :, 0]  # of four, the first one is that of masks
    return [] if bool((axes != axes[0]).any()) else axes[0].expand(batch).tolist()


def _starts(request: Request) -> list[int] | None:
    """Index of the first token of each sequence, behind padding; None if there is padding anywhere else, or a mask of another kind."""
    ids, mask = request.ids, request.arguments.get("attention_mask")
    if mask is None:
        return [0] * len(ids)
    if mask.dim() != 2 or len(mask) != len(ids):
        return None
    seen = mask.bool().cpu()
    starts = seen.int().argmax(1)
    is_left = torch.arange(seen.shape[1], device="cpu") >= starts[:, None]
    return starts.tolist() if torch.equal(seen, is_left) else None


def _is_alone(request: Request, starts: Sequence[int]) -> bool:
    """Whether a call is for one sequence without padding, and nothing else is asked for."""
    ids, arguments = request.ids, request.arguments
    positions = arguments.get("position_ids")
    known = {cache_name(arguments), "attention_mask", "position_ids", *_NO_EFFECT}
    if len(ids) != 1 or any(starts) or any(value is not None and name not in known for name, value in arguments.items()):
        return False
    return positions is None or bool((positions == torch.arange(ids.shape[1], device=ids.device)).all())
