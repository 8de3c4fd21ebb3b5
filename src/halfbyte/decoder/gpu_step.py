"""A decode step of a whole model on a GPU, as a CUDA graph from its second call on.

What differs from step to step lies in one int64 tensor, `state`, that the host writes and the step itself advances:

    for each group of layers with the same sliding window: tokens in their buffers, index in the sequence of the first of these
    for each sequence: row of its position in the tables of rope, token id, index of its first token

A step writes the token that it chooses for each sequence to its place in `state`, so the next one may be launched before the host has read
it.

A step is for up to B sequences. Rows without one compute, too, and write to slots that are free: they see what they have written alone.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from halfbyte.decoder.offload.crossing import AT_ONCE, Host
from halfbyte.layouts.base import round_up
from halfbyte.ops.graph_capture import CapturedGraph

_GROUP = 4  # numbers of a group in `state`: kernels read tensors that begin at multiples of 16 bytes
_LEAST_WIDTH = 16
_MOST_STEPS = 32  # whose graphs are kept
# Sequences of steps: few graphs, and few rows without a sequence, whose keys and values are read for nothing.
_BATCHES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))


def likeliest(scores: Tensor) -> Tensor:
    """The index of the largest of scores [..., v], the first of several: [...]. In two steps, as torch gives all of a long row to one block
    of a GPU."""
    width = math.gcd(scores.shape[-1], 256)
    if scores.is_cpu or width < _LEAST_WIDTH:
        return scores.argmax(-1)
    best, at = scores.unflatten(-1, (-1, width)).max(-1)
    first = best.argmax(-1, keepdim=True)
    found: Tensor = (first * width + at.gather(-1, first)).squeeze(-1)
    return found


def finite_likeliest(scores: Tensor) -> Tensor:
    """`likeliest`, or -1 where the largest of the scores [B, v] is not finite."""
    chosen = likeliest(scores)
    best = scores.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return chosen.where(best.isfinite(), -1)


class HostReader:
    """Reads tokens [B] of a device, one step's after the other's; the host waits for nothing that is launched after them."""

    def __init__(self) -> None:
        """Begin without tokens."""
        self._pinned: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def ask(self, tokens: Tensor) -> None:
        """Start to copy tokens, int64."""
        if not tokens.is_cuda:
            self._tokens = tokens.clone()
            return
        if self._pinned is None or self._event is None or len(self._pinned) < len(tokens):
            self._event = torch.cuda.Event()
            self._pinned = torch.empty(max(len(tokens), 16), dtype=torch.int64, device="cpu", pin_memory=True)
        self._tokens = self._pinned[: len(tokens)].copy_(tokens, non_blocking=True)
        self._event.record()

    def answer(self) -> Tensor:
        """Wait for the tokens that were asked for last."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.clone()


class Group(NamedTuple):
    """Layers with the same sliding window, whose buffers have the same tokens.

    Attributes:
        window: Tokens of the window; None: there is none.
        size: Tokens for which their buffers have room, T.
    """

    window: int | None
    size: int


class StepShape(NamedTuple):
    """The key of a captured step, in addition to the buffers of its cache.

    Attributes:
        groups: Of layers.
        tables: Cosines and sines of each rope, [2, rows, R / 2].
        batch: Sequences at most, B.
        padded: Whether sequences begin at different indices, or are fewer.
    """

    groups: Sequence[Group]
    tables: Sequence[Tensor]
    batch: int
    padded: bool


class Inputs(NamedTuple):
    """What the layers of a step read, on the device.

    Attributes:
        ids: int64 [B]
        rotary: Cosines and sines of each rope, [B, R / 2].
        lengths: int64 [1] of each group: tokens in the buffers.
        masks: bool [B or 1, T] of each group: which of these may be seen; None: all.
        host: Runs functions of the host between launches, or while these run.
    """

    ids: Tensor
    rotary: Sequence[tuple[Tensor, Tensor]]
    lengths: Sequence[Tensor]
    masks: Sequence[Tensor | None]
    host: Host = AT_ONCE


Compute = Callable[[Inputs], Tensor]  # logits [B, N]; the new tokens enter the cache
Choose = Callable[[Tensor], Tensor]  # logits [B, N] -> the next tokens, int64 [B]


class State(NamedTuple):
    """The numbers of a step, on the host.

    Attributes:
        groups: (tokens in the buffers, index of the first) of each group.
        rows, ids, starts: Of each sequence.
    """

    groups: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    ids: tuple[int, ...]
    starts: tuple[int, ...]

    def after(self, ids: Sequence[int]) -> State:
        """Return the numbers of the next step."""
        groups = tuple((length + 1, first) for length, first in self.groups)
        return State(groups, tuple(row + 1 for row in self.rows), tuple(ids), self.starts)


class DecodeStep:
    """A decode step with given buffers and number of sequences.

    Attributes:
        refused: Why no CUDA graph is captured, where that has failed.
    """

    refused: str | None = None

    def __init__(self, shape: StepShape, device: torch.device, choose: Choose = finite_likeliest) -> None:
        """Make a step. choose: Finds the next tokens, as a part of the step."""
        self._shape, self._device, self._choose = shape, device, choose
        self._rows, width = _GROUP * len(shape.groups), round_up(shape.batch, 2)
        self._ids, self._starts = self._rows + width, self._rows + 2 * width
        self._state = torch.zeros(self._rows + 3 * width, dtype=torch.int64, device=device)
        advance = torch.zeros(len(self._state), dtype=torch.int64, device="cpu")
        advance[: self._rows : _GROUP] = advance[self._rows : self._rows + shape.batch] = 1
        self._advance = advance.to(device)
        self._columns = [torch.arange(group.size, device=device) for group in shape.groups]
        self._graph: CapturedGraph | None = None
        self._results: tuple[Tensor, Tensor] | None = None
        self._runs, self._host = 0, cast(Host, AT_ONCE)
        self._there: State | None = None  # what `_state` holds, where that is known

    @property
    def is_captured(self) -> bool:
        """Whether the step is a CUDA graph."""
        return self._graph is not None

    def __call__(self, state: State, compute: Compute) -> tuple[Tensor, Tensor]:
        """Run the step.

        Args:
            state: Its numbers, of b sequences; b <= B.
            compute: Runs the model: the same launches in each call.

        Returns:
            Logits [b, N], and the next tokens int64 [b]. The next call may overwrite both.
        """
        count = len(state.ids)
        if state != self._there:
            self._state.copy_(self._numbers(state), non_blocking=True)
        self._there = None
        if self._runs and self._graph is None and self.refused is None and can_capture(self._device):
            self._capture(compute)
        self._runs += 1
        if self._graph is None:
            logits, chosen = self._run(compute)
            return logits[:count], chosen[:count]
        return self.again(count)

    def again(self, count: int) -> tuple[Tensor, Tensor]:
        """Replay the graph at the next positions, for the tokens that the last call has found for `count` sequences."""
        assert self._graph is not None
        assert self._results is not None
        self._there = None
        self._graph.replay()
        logits, chosen = self._results
        return logits[:count], chosen[:count]

    def put_ids(self, ids: Tensor) -> None:
        """Replace the tokens that the last call has found by others [b] for the next one."""
        self._state[self._ids : self._ids + len(ids)].copy_(ids)

    def has_advanced(self, state: State) -> None:
        """Note the numbers that the last call has left."""
        self._there = state

    def close(self) -> None:
        """Free the graph."""
        if self._graph is not None:
            self._graph.close()
        self._graph = self._results = None

    def _places(self, first: int) -> Tensor:
        """A number of each sequence in `_state`, from `first` on."""
        return self._state[first : first + self._shape.batch]

    def _numbers(self, state: State) -> Tensor:
        numbers = [0] * len(self._state)
        if len(state.ids) < self._shape.batch:
            numbers[self._starts : self._starts + self._shape.batch] = [sum(state.groups[0])] * self._shape.batch
        for index, both in enumerate(state.groups):
            numbers[_GROUP * index : _GROUP * index + 2] = both
        for start, values in ((self._rows, state.rows), (self._ids, state.ids), (self._starts, state.starts)):
            numbers[start : start + len(values)] = values
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def _capture(self, compute: Compute) -> None:
        try:
            graph = CapturedGraph(self._device)
            self._host = graph
            self._results = graph.capture(lambda: self._run(compute))
        except RuntimeError as error:
            self.refused = f"torch cannot capture a decode step ({' '.join(str(error).split())[:200]})"
        else:
            self._graph = graph
        finally:
            self._host = AT_ONCE

    def _run(self, compute: Compute) -> tuple[Tensor, Tensor]:
        shape, state = self._shape, self._state
        ids, rows = self._places(self._ids), self._places(self._rows)
        # Tensors that recorded launches read must not overlap, so cosines lie apart from sines.
        rotary = [(both[0], both[1]) for both in (table.index_select(1, rows) for table in shape.tables)]
        groups = [(state[_GROUP * i : _GROUP * i + 1], state[_GROUP * i + 1 : _GROUP * i + 2]) for i in range(len(shape.groups))]
        seen = [self._seen(index, *both) for index, both in enumerate(groups)]
        logits = compute(Inputs(ids, rotary, [length for length, _ in groups], seen, self._host))
        chosen = self._choose(logits)
        state.add_(self._advance)
        ids.copy_(chosen)
        return logits, chosen

    def _seen(self, index: int, length: Tensor, first: Tensor) -> Tensor | None:
        """The mask of a group's layers."""
        group, columns, mask = self._shape.groups[index], self._columns[index], None
        if group.window is not None and group.size > group.window:
            mask = (columns > length - group.window)[None]
        if self._shape.padded:
            begun = columns >= (self._places(self._starts) - first)[:, None]
            mask = begun if mask is None else mask & begun
        return mask


class DecodeSteps:
    """The decode steps of a model by their keys. A key has all that a captured graph depends on, so that a step found by it is right."""

    def __init__(self) -> None:
        """Begin without steps."""
        self._steps: dict[Hashable, DecodeStep] = {}  # the most recently used one last
        self._caches: dict[DecodeStep, weakref.ref[object]] = {}  # whose buffers a step reads and writes

    def __len__(self) -> int:
        """Number of steps."""
        return len(self._steps)

    def values(self) -> list[DecodeStep]:
        """Return all steps, the most recently used one last."""
        return [*self._steps.values()]

    def find(self, key: Hashable, cache: object, make: Callable[[], DecodeStep]) -> DecodeStep:
        """Return the step of a key; made, and kept for `cache`, where there is none.

        Steps of caches that are gone are closed then, and the least recently used ones where there are too many: a graph keeps memory.
        """
        step = self._steps.pop(key, None)
        if step is None:
            self.close_of(None)
            for oldest in [*self._steps][: max(0, len(self._steps) - _MOST_STEPS + 1)]:
                self._close(oldest)
            step = make()
            self._caches[step] = weakref.ref(cache)
        self._steps[key] = step
        return step

    def close_of(self, cache: object) -> None:
        """Free the memory of the steps of a cache; None: of all caches that are gone."""
        for key in [key for key, step in self._steps.items() if self._caches[step]() is cache]:
            self._close(key)

    def forget(self) -> None:
        """Forget all steps, none of which has a graph."""
        self._steps.clear()
        self._caches.clear()

    def _close(self, key: Hashable) -> None:
        step = self._steps.pop(key)
        del self._caches[step]
        step.close()


def batch_of_step(count: int) -> int:
    """The number of sequences of the step that decodes `count` of them."""
    return next((batch for batch in _BATCHES if batch >= count), count)


def can_capture(device: torch.device) -> bool:
    """Whether steps on this device become CUDA graphs."""
    return device.type == "cuda"
