"""Kernels on a GPU: the best one that runs, and its launches made again where only addresses differ, without Python's share of the work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.bounded import Bounded
from halfbyte.dispatch.gpu import GpuOption, report_failure, triton_trouble
from halfbyte.errors import KernelError, UnsupportedError
from halfbyte.kernels.made import is_noted, noted
from halfbyte.kernels.problem import Problem
from halfbyte.machine import Gpu

MOST_REPLAYS = 4096

Operands = Sequence[Tensor | None]


def _public_empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


# On the current device. The private function takes 1.2 us, the public one 3.4.
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _public_empty
)
Replay = Callable[..., None]  # of the operands' addresses, 0 for None


def run_first(problem: Problem, gpu: Gpu, options: Sequence[GpuOption], arguments: Sequence[Any]) -> Callable[[], None] | None:
    """Runs the first of `options` that runs on this GPU; those before it are not chosen again. Gives a function that runs it again, or None
    where its launches cannot be replayed."""
    for option in options:
        run = partial(option.candidate.launch, problem, option.config, *arguments)
        try:
            run()
        except KernelError as error:
            report_failure(problem, gpu, option, str(error))
            warnings.warn(f"{option.candidate.name} {option.config} is skipped: {error}", stacklevel=2)
        else:
            return run if option.candidate.replayable else None
    raise UnsupportedError(f"no kernel on {gpu.name} runs {problem}: halfbyte explain says why; use the CPU")


def can_record(operands: Operands) -> bool:
    """Whether launches on these operands can be recorded: not while a graph is captured or kernels are only compiled, nor where two share
    memory, so that an address does not tell them apart."""
    if triton_trouble() is not None:
        return False
    from halfbyte.kernels.gpu import launch
    from halfbyte.kernels.gpu.relaunch import reach

    if launch.is_compiling():
        return False
    ranges = sorted(reach(t) for t in operands if t is not None)
    overlap = any(start < end for (_, end), (start, _) in pairwise(ranges))
    return not overlap and not torch.cuda.is_current_stream_capturing()


def recorded(run: Callable[[], None], operands: Operands) -> Replay | None:
    """A function that makes the launches of `run` again for the addresses of other operands; None where that is impossible. `run` has run
    before: everything is compiled, and all memory is there. It runs once more."""
    from halfbyte.kernels.gpu import launch, relaunch

    device = next(operand.device for operand in operands if operand is not None)
    if relaunch.broken(device) is not None:
        return None
    with launch.recording() as calls:
        run()
    replay = relaunch.bind(calls, operands, device)
    return None if isinstance(replay, str) else replay


class Replays(Bounded[Hashable, Replay | None]):
    """Replays, by all that launches differ in but addresses; None: these cannot be replayed."""

    def __init__(self) -> None:
        super().__init__(MOST_REPLAYS)

    def run(self, key: Hashable, start: Callable[[], Callable[[], None] | None], operands: Operands) -> Replay | None:
        """Replays what is known as `key`; otherwise `start`s it, which gives a function that does the same again, or None. The replay, if
        there is one."""
        if is_noted():  # these launches will be replayed with others
            start()
            return None
        replay = self.get(key)
        if replay is not None:
            replay(*(0 if operand is None else operand.data_ptr() for operand in operands))
            return replay
        again = start()
        if key not in self and can_record(operands):
            self[key] = None if again is None else recorded(again, operands)
        return self.get(key)


_alike = Bounded[Hashable, Replay | None](MOST_REPLAYS)
_failed = Bounded[Hashable, int](MOST_REPLAYS)  # how often


def run_alike(launch: Callable[[], object], operands: Operands, *settings: Hashable) -> None:
    """Makes launches that depend on nothing but the operands' shapes, types and addresses, and on the settings, the first of which names
    them; from the second time on without Triton's own launcher, which takes the host longer than most small kernels take the GPU. Each
    call makes them once, so that they may change what they read."""
    addresses = [0 if t is None else t.data_ptr() for t in operands]
    key = (*settings, *(None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in operands))
    replay = _alike.get(key)
    if is_noted() or any(address % 16 for address in addresses):  # kernels are compiled for what is aligned
        launch()
    elif replay is not None:
        replay(*addresses)
    elif key in _alike or not can_record(operands):
        launch()
    else:
        _alike_first(key, launch, operands)


def _alike_first(key: Hashable, launch: Callable[[], object], operands: Operands) -> None:
    from halfbyte.kernels.gpu import launch as launcher
    from halfbyte.kernels.gpu import relaunch

    device = next(operand.device for operand in operands if operand is not None)
    if relaunch.broken(device) is not None:
        _alike[key] = None
        launch()
        return
    with launcher.recording() as calls:
        launch()
    replay = relaunch.bind(calls, operands, device)
    if not isinstance(replay, str):
        _alike[key] = replay
    elif key in _failed:
        _alike[key] = None
    else:  # scratch memory may just have become larger
        _failed[key] = 1


class _Kind(NamedTuple):
    """Of a tensor that is made anew."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Whole(NamedTuple):
    """The launches of a chain of steps, what they make, and where in it the results are, with their shapes and strides."""

    replay: Replay
    made: list[_Kind]
    results: list[tuple[int, _Kind]]

    def run(self, operands: Operands, *, poisoned: bool = False) -> list[Tensor]:
        made = [empty(*kind) for kind in self.made]
        if poisoned:
            for tensor in made:
                tensor.view(torch.uint8).fill_(255)
        self.replay(*(0 if t is None else t.data_ptr() for t in operands), *(t.data_ptr() for t in made))
        return [made[i] if kind is self.made[i] else made[i].as_strided(*kind[:2]) for i, kind in self.results]


_wholes = Bounded[Hashable, _Whole | None](MOST_REPLAYS // 8)  # each has the text of a function


def whole(
    key: Hashable, steps: Callable[[], Sequence[Tensor]], operands: Operands, *, undo: Callable[[], object] | None = None
) -> Sequence[Tensor]:
    """The results of a chain of steps that launch kernels of this package and nothing else; from the third time on all by one call.

    key       equal for chains that differ in addresses alone, those of `operands`, which are all that the steps read
    steps     whatever kernels write is an operand, or given to `keep`, as results are, too
    undo      takes back what the steps change in operands, where they would do something else if they ran again

    The current device is that of the operands, whose addresses are multiples of 16.
    """
    known = _wholes.get(key)
    if known is not None:
        return known.run(operands)
    if key in _wholes or not can_record(operands):
        return steps()
    if (tried := _failed.get(key, 0)) == 0:  # kernels may be compiled, and scratch memory become larger
        with noted():
            results = steps()
        _failed[key] = 1
        return results
    from halfbyte.kernels.gpu import launch, relaunch

    with noted() as made, launch.recording() as calls:
        results = steps()
    places = {tensor.data_ptr(): i for i, tensor in enumerate(made)}
    device = results[-1].device
    replay = relaunch.broken(device) or relaunch.bind(calls, (*operands, *made), device)
    if not isinstance(replay, str) and all(result.data_ptr() in places for result in results):
        kinds = [_kind(tensor) for tensor in made]
        of_results = [(places[result.data_ptr()], _kind(result)) for result in results]
        found = _Whole(replay, kinds, [(i, kinds[i] if kinds[i] == kind else kind) for i, kind in of_results])
        # Whether there was more than launches: what has no part in them stays as it was.
        if undo is not None:
            undo()
        again = found.run(operands, poisoned=True)
        same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(again, results, strict=True))
        _wholes[key] = found if same else None
    elif tried > 1:
        _wholes[key] = None
    _failed[key] = tried + 1
    return results


def _kind(tensor: Tensor) -> _Kind:
    return _Kind(tuple(tensor.shape), tensor.stride(), tensor.dtype)
