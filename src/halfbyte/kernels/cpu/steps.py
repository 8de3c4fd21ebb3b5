"""Chains of kernel calls for tensors of fixed sizes, prepared once and then run as one native call (`step_sequence.py`).

Results that stay inside of a chain share one block of memory: each takes the first gap that is large enough, and its place is free after
the last step that reads it. So a small network stays in the caches, from which fresh memory for each result would evict it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer
from halfbyte.kernels.cpu.conv.planned import ConvCall
from halfbyte.kernels.cpu.linear.linear import CALL, LinearKernel, pack_call
from halfbyte.kernels.cpu.step_sequence import StepSequence
from halfbyte.layouts.base import round_up

_ALIGNED = 64
_FIRST, _SECOND = LINEAR.offset("first_phase"), LINEAR.offset("second_phase")
_X, _OUT, _SCRATCH = (LINEAR.offset(name) for name in ("x", "out", "scratch"))
_pack, _unpack = struct.Struct("<q").pack_into, struct.Struct("<q").unpack_from


class Step(NamedTuple):
    """A call of a kernel that is prepared but for the addresses of its tensors.

    block    its arguments, which programs copy
    threads  that are worth waking for it
    nbytes   of what it makes
    inputs   offsets in the block of the addresses of the tensors that it reads; `out`, `scratch`: of its result's, of scratch memory's
    shared   bytes of scratch memory that threads share; `each`: bytes more per thread
    kept     what the block points to
    """

    block: Buffer
    threads: int
    nbytes: int
    inputs: tuple[int, ...] = (_X,)
    out: int = _OUT
    scratch: int = _SCRATCH
    shared: int = 0
    each: int = 0
    kept: tuple[object, ...] = ()


def conv_step(call: ConvCall, weights: Tensor, table: Tensor, low: float, high: float) -> Step:
    """The step of a convolution of codes."""
    pack_call(call.buffer, CALL, 0, 0, 0, 0, weights.data_ptr(), table.data_ptr(), 0, 0, low, high)
    batch, channels, height, width = call.out_shape
    size, each = batch * channels * height * width, call.memory // call.threads
    return Step(call.buffer, call.threads, size, each=each, kept=(call, weights, table))


def linear_step(kernel: LinearKernel, m: int, weights: Tensor, table: Tensor, low: float, high: float) -> Step:
    """The step of a linear layer of codes."""
    threads, geo = kernel.threads(m, runtime.threads()), kernel.geometry
    buffer, scratch = kernel.arguments(m, threads)
    pack_call(buffer, CALL, 0, 0, geo.k, 0, weights.data_ptr(), table.data_ptr(), 0, 0, low, high)
    return Step(buffer, threads, m * geo.n, shared=scratch, kept=(weights, table))


class Wired(NamedTuple):
    """A step of a program. Values have numbers: those that a call brings come first, then the result of each step, in order.

    sources  numbers of the values that it reads
    given    whether its result is the caller's, who brings memory for it
    """

    step: Step
    sources: tuple[int, ...]
    given: bool


class Program:
    """A chain of steps, for calls that bring `brought` tensors. Calls share its memory: it is not thread-safe."""

    def __init__(self, wired: Sequence[Wired], brought: int) -> None:
        threads = max(one.step.threads for one in wired)
        places, size = _places(wired, brought)
        scratch = max(one.step.shared + threads * one.step.each for one in wired)
        self._memory = torch.empty(size + scratch + _ALIGNED, dtype=torch.uint8, device="cpu")
        base = round_up(self._memory.data_ptr(), _ALIGNED)
        # Offsets in the blocks at which the addresses of inputs and outputs are written.
        self._open: dict[int, list[tuple[Buffer, int]]] = {i: [] for i in range(brought)}
        self._open |= {brought + i: [] for i, one in enumerate(wired) if one.given}
        blocks = []
        for i, (step, sources, _) in enumerate(wired):
            both = [type(step.block).from_buffer_copy(step.block)]
            if second := _unpack(step.block, _SECOND)[0]:  # a sequence runs one phase of each block: two phases are two blocks
                both.append(type(step.block).from_buffer_copy(step.block))
                _pack(both[1], _FIRST, second)
            for block in both:
                _pack(block, _SECOND, 0)
                if step.shared + step.each:
                    _pack(block, step.scratch, base + size)
                for offset, value in zip((*step.inputs, step.out), (*sources, brought + i), strict=True):
                    if value in self._open:
                        self._open[value].append((block, offset))
                    else:
                        _pack(block, offset, base + places[value])
            blocks += both
        self._kept = [one.step.kept for one in wired]
        self._sequence = StepSequence(blocks, threads)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: those that the call brings, then those that are given, in order of their steps, to be filled."""
        for tensor, places in zip(tensors, self._open.values(), strict=True):
            address = tensor.data_ptr()
            for block, offset in places:
                _pack(block, offset, address)
        self._sequence.run()


def _places(wired: Sequence[Wired], brought: int) -> tuple[dict[int, int], int]:
    """Where in one block of memory the values lie that stay inside of a program, and its size."""
    last = {source: i for i, one in enumerate(wired) for source in one.sources}
    places: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []  # start, stop, value; in order
    size = 0
    for i, one in enumerate(wired):
        value = brought + i
        if not one.given:
            start, stops = 0, 0
            for start_of_next, stop, _ in taken:
                if start_of_next - stops >= one.step.nbytes:
                    break
                stops = stop
            start = stops
            places[value] = start
            taken.append((start, start + round_up(one.step.nbytes, _ALIGNED), value))
            taken.sort()
            size = max(size, taken[-1][1])
        taken = [entry for entry in taken if last.get(entry[2], -1) > i]
    return places, size
