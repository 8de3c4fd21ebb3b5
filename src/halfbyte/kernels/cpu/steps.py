"""Programs of int8 networks: kernel calls on tensors of fixed sizes, prepared once and then run as one native call (`step_sequence.py`).

    ProgramStep   a call of one kernel, without addresses       `conv_step`, `linear_step`; `conv/elementwise.py`, `conv/pool.py`
    ProgramNode   the step, and which values it reads           values: the inputs of the program, then the result of each node
    Program       all of them, with memory for the results      `nn/static/network.py` makes them

Results that stay inside of a program share one block of memory: each takes the first gap that is large enough, and its place is free after
the last step that reads it. So a small network stays in the caches, from which fresh memory for each result would evict it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer, pack_integer
from halfbyte.kernels.cpu.conv.planned import ConvCall
from halfbyte.kernels.cpu.linear.linear import CALL, LinearKernel, pack_call
from halfbyte.kernels.cpu.step_sequence import StepSequence
from halfbyte.layouts.base import round_up

_ALIGNED = 64  # bytes
_FIRST, _SECOND = LINEAR.offset("first_phase"), LINEAR.offset("second_phase")
_X, _OUT, _SCRATCH = (LINEAR.offset(name) for name in ("x", "out", "scratch"))
_unpack = struct.Struct("<q").unpack_from


class ProgramStep(NamedTuple):
    """A call of a kernel that is prepared but for the addresses of its tensors.

    Attributes:
        block: Its arguments, which programs copy.
        threads: How many are worth waking for it.
        out_bytes: Bytes of its result.
        inputs: Offsets in the block of the addresses of the tensors that it reads.
        out: Offset of the address of its result.
        scratch_bytes: Scratch memory that threads share, of a block that extends LINEAR.
        thread_scratch_bytes: Scratch memory of each thread in addition.
        alive: What the block points to.
    """

    block: Buffer
    threads: int
    out_bytes: int
    inputs: tuple[int, ...] = (_X,)
    out: int = _OUT
    scratch_bytes: int = 0
    thread_scratch_bytes: int = 0
    alive: tuple[object, ...] = ()


def conv_step(call: ConvCall, weights: Tensor, table: Tensor, low: float, high: float) -> ProgramStep:
    """Return the step of a convolution of codes; `weights` and the requantization `table` are as its kernel reads them."""
    pack_call(call.buffer, CALL, 0, 0, 0, 0, weights.data_ptr(), table.data_ptr(), 0, 0, low, high)
    batch, channels, height, width = call.out_shape
    thread_scratch_bytes, alive = call.scratch_bytes // call.threads, (call, weights, table)
    return ProgramStep(call.buffer, call.threads, batch * channels * height * width, thread_scratch_bytes=thread_scratch_bytes, alive=alive)


def linear_step(kernel: LinearKernel, m: int, weights: Tensor, table: Tensor, low: float, high: float) -> ProgramStep:
    """Return the step of a linear layer of codes with m contiguous rows; `table` is its requantization table."""
    threads, geo = kernel.threads(m, runtime.threads()), kernel.geometry
    buffer, scratch_bytes = kernel.arguments(m, threads)
    pack_call(buffer, CALL, 0, 0, geo.k, 0, weights.data_ptr(), table.data_ptr(), 0, 0, low, high)
    return ProgramStep(buffer, threads, m * geo.n, scratch_bytes=scratch_bytes, alive=(weights, table))


class ProgramNode(NamedTuple):
    """A step of a program.

    Attributes:
        step: The call.
        sources: Numbers of the values that it reads: the program's inputs come first, then the result of each node, in order.
        is_output: Whether its result is one of the program's.
    """

    step: ProgramStep
    sources: tuple[int, ...]
    is_output: bool


class Program:
    """Steps that run in order, in one native call. Its calls share memory: it is not thread-safe."""

    def __init__(self, nodes: Sequence[ProgramNode], num_inputs: int) -> None:
        """Allocate memory and fill in all addresses but those of inputs and outputs."""
        threads = max(node.step.threads for node in nodes)
        places, size = _places(nodes, num_inputs)
        scratch_bytes = max(node.step.scratch_bytes + threads * node.step.thread_scratch_bytes for node in nodes)
        self._memory = torch.empty(size + scratch_bytes + _ALIGNED, dtype=torch.uint8, device="cpu")
        base = round_up(self._memory.data_ptr(), _ALIGNED)
        # The blocks and offsets at which the address of each input, and then of each output, is written.
        self._unbound: dict[int, list[tuple[Buffer, int]]] = {i: [] for i in range(num_inputs)}
        self._unbound |= {num_inputs + i: [] for i, node in enumerate(nodes) if node.is_output}
        blocks = []
        for i, (step, sources, _) in enumerate(nodes):
            phases = phases_of(step.block)
            for block in phases:
                if step.scratch_bytes + step.thread_scratch_bytes:
                    pack_integer(block, _SCRATCH, base + size)
                for offset, value in zip((*step.inputs, step.out), (*sources, num_inputs + i), strict=True):
                    if value in self._unbound:
                        self._unbound[value].append((block, offset))
                    else:
                        pack_integer(block, offset, base + places[value])
            blocks += phases
        self._alive = [node.step.alive for node in nodes]
        self._sequence = StepSequence(blocks, threads)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Run the steps.

        Args:
            tensors: The inputs, then the outputs in the order of their nodes, which are filled. Their sizes and strides are those that
                the steps were prepared for: the caller checks that.
        """
        for tensor, places in zip(tensors, self._unbound.values(), strict=True):
            address = tensor.data_ptr()
            for block, offset in places:
                pack_integer(block, offset, address)
        self._sequence.run()


def phases_of(block: Buffer) -> list[Buffer]:
    """Return copies of a block of arguments for each of its kernel's one or two phases, as a sequence runs one phase of each block."""
    phases = [type(block).from_buffer_copy(block)]
    if second := _unpack(block, _SECOND)[0]:
        phases.append(type(block).from_buffer_copy(block))
        pack_integer(phases[1], _FIRST, second)
    for copy in phases:
        pack_integer(copy, _SECOND, 0)
    return phases


def _places(nodes: Sequence[ProgramNode], num_inputs: int) -> tuple[dict[int, int], int]:
    """Return the offsets in one block of memory of the values that stay inside of a program, and its size in bytes."""
    last_reader = {source: i for i, node in enumerate(nodes) for source in node.sources}
    places: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []  # start, stop, value; in order
    size = 0
    for i, node in enumerate(nodes):
        value = num_inputs + i
        if not node.is_output:
            start = 0
            for next_start, next_stop, _ in taken:
                if next_start - start >= node.step.out_bytes:
                    break
                start = next_stop
            places[value] = start
            taken.append((start, start + round_up(node.step.out_bytes, _ALIGNED), value))
            taken.sort()
            size = max(size, taken[-1][1])
        taken = [entry for entry in taken if last_reader.get(entry[2], -1) > i]
    return places, size
