"""Kernels on a GPU: the best one that runs, and its launches made again where only addresses differ, without Python's share of the work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from halfbyte.bounded import Bounded
from halfbyte.dispatch.gpu import GpuOption, report_failure, triton_trouble
from halfbyte.errors import KernelError, UnsupportedError
from halfbyte.kernels.problem import Problem
from halfbyte.machine import Gpu

MOST_REPLAYS = 4096

Operands = Sequence[Tensor | None]
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
    if triton_trouble() is None:
        from halfbyte.kernels.gpu import launch

        if launch.is_compiling():
            return False
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in operands if t is not None)
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
        replay = self.get(key)
        if replay is not None:
            replay(*(0 if operand is None else operand.data_ptr() for operand in operands))
            return replay
        again = start()
        if key not in self and can_record(operands):
            self[key] = None if again is None else recorded(again, operands)
        return self.get(key)


_alike = Bounded[Hashable, Replay | None](MOST_REPLAYS)
_failed = Bounded[Hashable, bool](MOST_REPLAYS)


def run_alike(launch: Callable[[], object], operands: Operands, *settings: Hashable) -> None:
    """Makes launches that depend on nothing but the operands' shapes, types and addresses, and on the settings, the first of which names
    them; from the second time on without Triton's own launcher, which takes the host longer than most small kernels take the GPU. Each
    call makes them once, so that they may change what they read."""
    addresses = [0 if t is None else t.data_ptr() for t in operands]
    key = (*settings, *(None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in operands))
    replay = _alike.get(key)
    if any(address % 16 for address in addresses):  # kernels are compiled for what is aligned
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
        _failed[key] = True
