"""Tapes: launches that are recorded once, and replayed with other operands at a few microseconds of host time each.

`kernel[grid](...)` looks at every argument to find the compiled kernel, 17 to 25 us. A call with the same shapes, dtypes and alignment
launches the same kernel with the same numbers: only addresses differ. A tape keeps the compiled kernels and their arguments in a function
that fills in addresses and calls Triton's launcher in C. `ops/replay.py` caches tapes and says when launches are recorded.

The launcher and parts of torch that this file uses are private. `why_not_replayed` tries them on a small kernel once for each device; where
they have changed, kernels are launched by `kernel[grid]`, and `halfbyte doctor` and `explain` say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.runtime import launch, scratch
from halfbyte.kernels.gpu.runtime.launch import Launch, Recording
from halfbyte.versions import why_untested

Results = Tensor | Sequence[Tensor]
R = TypeVar("R", bound=Results)
# Takes the operands and returns the results: new tensors, which the launches write. Returns None, without a launch, where an operand is not
# aligned to 16 bytes or, where that is checked, on another device.
Replay = Callable[..., Any]


class NotReplayableError(Exception):
    """These launches cannot be replayed, and why."""


class Tape:
    """Launches for operands of one kind: recorded, bound, replayed.

    The first time they are only launched: kernels may be compiled, and scratch buffers become larger. The second time they are bound, or,
    as a scratch buffer may still have become larger, the third time.

    Attributes:
        replay: Replays the launches; None until they are bound.
        why_not_replayed: The reason why they are not replayed and not recorded again; None where there is none.
        length: The number of launches in `replay`.
    """

    __slots__ = ("_device", "_recorded", "length", "replay", "why_not_replayed")

    def __init__(self, device: torch.device) -> None:
        self._device, self._recorded = device, 0
        self.replay: Replay | None = None
        self.why_not_replayed = why_not_replayed(device)
        self.length = 0

    def record(
        self,
        steps: Callable[[], R],
        operands: Sequence[Tensor | None],
        *,
        undo: Callable[[], object] | None = None,
        verify: bool = False,
        weight: int | None = None,
    ) -> R:
        """Run `steps` and return their results; bind their launches.

        Args:
            steps: Launch kernels by `launch.run`. Kernels write to operands, scratch buffers and tensors that `steps` give to
                `launch.output`, as they do with the results.
            operands: All tensors that kernels read and `steps` have not allocated. They must not overlap.
            undo: Takes back what `steps` write to operands, where they would compute something else if they ran again.
            verify: Whether the replay is compared with `steps`, because these might do something else than launch kernels.
            weight: The place of an operand that caches the replay, whose key says nothing about it: the replay checks that it is on this
                device, and that this is the current one.
        """
        with launch.recording() as recording:
            results = steps()
        self._recorded += 1
        self.why_not_replayed = recording.why_not_replayed
        if self.why_not_replayed is not None or self._recorded == 1:
            return results
        try:
            replay = bind(recording, operands, results, self._device, weight=weight)
        except NotReplayableError as reason:
            if self._recorded > 2:
                self.why_not_replayed = str(reason)
            return results
        if verify and not _same(replay, operands, results, undo):
            self.why_not_replayed = "its results are not written by these launches alone"
            return results
        self.replay, self.length = replay, len(recording.launches)
        return results


def _same(replay: Replay, operands: Sequence[Tensor | None], results: Results, undo: Callable[[], object] | None) -> bool:
    """Whether a replay into memory full of NaN gives the same bits: what its launches do not write stays as it was."""
    if undo is not None:
        undo()
    names = replay.__globals__
    names["empty"] = _poisoned
    try:
        again = replay(*operands)
    finally:
        names["empty"] = empty
    pairs = zip(_listed(again), _listed(results), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _listed(results: Results) -> Sequence[Tensor]:
    return [results] if isinstance(results, Tensor) else results


def _poisoned(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = empty(shape, stride, dtype)
    tensor.view(torch.uint8).fill_(255)
    return tensor


def _public_empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


# On the current device. The private function takes 1.2 us, the public one 3.4.
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _public_empty
)


def reach(tensor: Tensor) -> tuple[int, int]:
    """The addresses from its first byte to behind its last. (Of a tensor that repeats rows, `nbytes` tells more.)"""
    first = tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize if tensor.numel() else first


# Binding


class _Address(NamedTuple):
    """Stands where Triton asks a tensor for its address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class _Descriptor(NamedTuple):
    """Has what Triton reads of a tensor descriptor."""

    base: object
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str
    round_f32_to_tf32: bool


def bind(
    recording: Recording, operands: Sequence[Tensor | None], results: Results, device: torch.device, *, weight: int | None = None
) -> Replay:
    """Return a function that replays recorded launches with other operands, of the same shapes, strides and dtypes.

    The results are tensors of `recording.buffers`, or views of them that begin where they do. Each replay allocates the buffers anew. The
    current device must be `device` at every replay, which it checks if there is a `weight`, as in `Tape.record`.

    The function is written as Python source: to walk over the arguments would cost as much as the launch.

    Raises:
        NotReplayableError: A kernel takes a tensor that is no operand, buffer or scratch buffer, or is not launched by Triton.
    """
    buffers, end = recording.buffers, len(operands) + len(recording.buffers)
    getters = scratch.workspace, scratch.codes_workspace, scratch.locks, scratch.double_buffer
    scratch_buffers = [get(device, 0) for get in getters]
    places = [*operands, *buffers, *scratch_buffers]
    source = _Source([(0, 0) if place is None else reach(place) for place in places])
    launches = [source.launch(each) for each in recording.launches]
    returned = [source.result(result, buffers, len(operands)) for result in _listed(results)]
    lines = [f"p{i} = t{i}.data_ptr()" for i in range(len(operands)) if i in source.used]
    refused = [f"({' | '.join(f'p{i}' for i in range(len(operands)) if i in source.used)}) & 15"] if lines else []
    if weight is not None and (operand := operands[weight]) is not None:
        current = f"{source.name(torch._C._cuda_getDevice)}()"
        refused += [f"{index} != {operand.get_device()}" for index in (f"t{weight}.get_device()", current)]
    if refused:
        lines.append(f"if {' or '.join(refused)}: return None")
    for i, buffer in enumerate(buffers, len(operands)):
        if i in source.used:
            kind = ", ".join(map(source.name, (tuple(buffer.shape), buffer.stride(), buffer.dtype)))
            lines += [f"t{i} = empty({kind})", f"p{i} = t{i}.data_ptr()"]
    for i, (get, buffer) in enumerate(zip(getters, scratch_buffers, strict=True), end):
        if i in source.used:  # the tensor lives as long as the function runs
            lines += [f"t{i} = {source.name(get)}({source.name(device)}, {buffer.numel()})", f"p{i} = t{i}.data_ptr()"]
    lines += [f"stream = {source.name(scratch.current_stream)}({device.index or 0})", *launches]
    lines.append(f"return {returned[0] if isinstance(results, Tensor) else '[' + ', '.join(returned) + ']'}")
    parameters = ", ".join(f"t{i}" for i in range(len(operands)))
    exec("\n    ".join([f"def replay({parameters}):", *lines]), source.names)
    return cast(Replay, source.names["replay"])


class _Source:
    """Launches as Python expressions. `names` are the objects that stand in them, `used` the places whose tensors do."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self.ranges = ranges
        self.names: dict[str, object] = {"Address": _Address, "Descriptor": _Descriptor, "empty": empty}
        self.used: set[int] = set()

    def name(self, value: object) -> str:
        name = f"v{len(self.names)}"
        self.names[name] = value
        return name

    def result(self, result: Tensor, buffers: Sequence[Tensor], first: int) -> str:
        for i, buffer in enumerate(buffers, first):
            if buffer.data_ptr() == result.data_ptr() and buffer.dtype == result.dtype and buffer.numel():
                self.used.add(i)
                same = buffer.shape == result.shape and buffer.stride() == result.stride()
                return f"t{i}" if same else f"t{i}.as_strided({self.name(tuple(result.shape))}, {self.name(result.stride())})"
        raise NotReplayableError("a result is no tensor that was allocated for kernels to write")

    def launch(self, each: Launch) -> str:
        if each.compiled is None:
            raise NotReplayableError("a kernel of torch's is among them")
        compiled, signature = each.compiled, each.kernel.signature
        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            raise NotReplayableError(f"{compiled.name} needs memory that Triton allocates at each launch")
        bound = signature.bind(*each.args, **{name: value for name, value in each.options.items() if name in signature.parameters})
        bound.apply_defaults()
        # Without metadata for hooks, hooks before and after, and scratch memory of two kinds.
        metadata, arguments = compiled.packed_metadata, tuple(bound.arguments.values())
        if hasattr(run, "kernel_signature"):  # one launcher for all kernels, which newer versions of Triton have
            rest = (metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature, arguments)
        else:
            rest = (None, None, metadata, None, None, None, *arguments)
        before = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        for name, value in bound.arguments.items():
            try:
                self._value(value)
            except NotReplayableError as reason:
                raise NotReplayableError(f"{reason}: {name} of {compiled.name}") from None
        values = [*map(self._value, (*each.grid, 1, 1)[:3]), "stream", *map(self._value, (*before, *rest))]
        return f"{self.name(run.launch)}({', '.join(values)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._address(value.data_ptr())
        if value is None or type(value) in (int, bool):
            return repr(value)
        if isinstance(value, tuple):  # also a NamedTuple, which Triton flattens like any other
            return f"({''.join(self._value(member) + ', ' for member in value)})"
        if hasattr(value, "base") and hasattr(value, "block_shape"):
            rounds = getattr(value, "round_f32_to_tf32", False)  # which newer versions of Triton read
            rest = ", ".join(self.name(part) for part in (tuple(value.shape), tuple(value.strides), value.padding, rounds))
            return f"Descriptor(Address({self._value(value.base)}), {rest})"
        return self.name(value)

    def _address(self, address: int) -> str:
        for place, (start, end) in enumerate(self.ranges):
            if start <= address < end:
                self.used.add(place)
                return f"p{place} + {address - start}" if address > start else f"p{place}"
        raise NotReplayableError("a kernel takes a tensor that is no operand, no buffer and no scratch buffer")


# The private interface


@triton.jit
def _add(pair, y, n, addend, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(pair[0] + i, mask=i < n) + addend, mask=i < n)


def why_not_replayed(device: torch.device) -> str | None:
    """The reason why launches can't be replayed on `device`; None if they can. Waits for the device the first time."""
    return _why_not_replayed(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _why_not_replayed(index: int) -> str | None:
    return why_untested("triton") or _try(torch.device("cuda", index))


def _try(device: torch.device) -> str | None:
    try:
        x, y = torch.arange(100, device=device), torch.zeros(100, dtype=torch.int64, device=device)
        with launch.recording() as recording:
            launch.run(_add, (2,), (x, None), y, 100, 5, BLOCK=64)
        replay = bind(recording, (x, y), [], device)
        other, out = x.flip(0), torch.zeros_like(y)
        replay(other, out)
        if not torch.equal(out, other + 5) or not torch.equal(y, x + 5):
            return f"Triton {triton.__version__} launched a kernel on wrong arguments"
    except Exception as error:  # whatever a private interface that has changed may raise
        return f"Triton {triton.__version__} is not used as halfbyte expects ({type(error).__name__}: {error})"
    return None
