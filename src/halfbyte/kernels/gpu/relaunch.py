"""Recorded launches made again with other operands, at a few microseconds of host time each.

`kernel[grid](...)` looks at every argument to find the compiled kernel, 17 to 25 us. A call with the same shapes, dtypes and
alignment runs the same kernel with the same numbers: only addresses differ. So `bind` keeps the compiled kernel and its
arguments, and a call fills in addresses and goes to Triton's launcher in C.

What it uses of Triton and torch is private to them. `broken` tries it on a small kernel once for each device; where it does
not do what it should, everything goes through `kernel[grid]`, and `halfbyte doctor` and `explain` say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu import launch
from halfbyte.kernels.gpu.launch import Call
from halfbyte.versions import why_untested

Replay = Callable[..., None]


class _Address(NamedTuple):
    """Stands where Triton asks a tensor for its address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class _Descriptor(NamedTuple):
    """Has what Triton reads of a tensor descriptor."""

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str
    round_f32_to_tf32: bool


def reach(tensor: Tensor) -> tuple[int, int]:
    """The addresses from its first byte to behind its last. (Of a tensor that repeats rows, `nbytes` tells more.)"""
    first = tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize if tensor.numel() else first


def bind(calls: Sequence[Call], operands: Sequence[Tensor | None], device: torch.device) -> Replay | str:
    """A function that makes `calls` again for the addresses of other operands, one argument each (0 for None); or why there is none.

    Operands must not overlap. Other tensors than they and the scratch memory of `launch` are not for kernels that are made again;
    numbers are frozen. The current device must be `device` at every call.

    The function is written out as Python source: to walk over the arguments would cost as much as the launch.
    """
    scratch = (launch.workspace, launch.spread_codes, launch.locks, launch.turns)
    places = [*operands, *(memory(device, 0) for memory in scratch)]
    source = _Source([(0, 0) if place is None else reach(place) for place in places])
    try:
        launches = [source.launch(call) for call in calls]
    except _Unbindable as reason:
        return str(reason)
    first = len(operands)
    for i, (place, memory) in enumerate(zip(places[first:], scratch, strict=True), first):
        if i in source.used and place is not None:  # the tensor lives as long as the function runs
            make = f"t{i} = {source.name(memory)}({source.name(device)}, {place.numel()})"
            launches[:0] = [make, f"p{i} = t{i}.data_ptr()"]
    parameters = ", ".join(f"p{i}" for i in range(first))
    stream = f"stream = {source.name(launch.current_stream)}({device.index or 0})"
    exec("\n    ".join([f"def replay({parameters}):", stream, *launches]), source.names)
    return source.names["replay"]  # type: ignore[no-any-return]


class _Unbindable(Exception):
    pass


class _Source:
    """Launches as Python expressions. `names` are the objects that stand in them, `used` the places whose addresses do."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self.ranges = ranges
        self.names: dict[str, Any] = {"Address": _Address, "Descriptor": _Descriptor}
        self.used: set[int] = set()

    def name(self, value: Any) -> str:
        name = f"v{len(self.names)}"
        self.names[name] = value
        return name

    def launch(self, call: Call) -> str:
        if call.compiled is None:
            raise _Unbindable("not all of it are Triton's launches")
        compiled, signature = call.compiled, call.kernel.signature
        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            raise _Unbindable(f"{compiled.name} needs memory that Triton allocates at each launch")
        bound = signature.bind(*call.args, **{name: value for name, value in call.options.items() if name in signature.parameters})
        bound.apply_defaults()
        # Without metadata for hooks, hooks before and after, and scratch memory of two kinds.
        metadata, arguments = compiled.packed_metadata, tuple(bound.arguments.values())
        if hasattr(run, "kernel_signature"):  # one launcher for all kernels, which newer versions of Triton have
            rest = (metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature, arguments)
        else:
            rest = (None, None, metadata, None, None, None, *arguments)
        before = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        values = [*map(self._value, (*call.grid, 1, 1)[:3]), "stream", *map(self._value, (*before, *rest))]
        return f"{self.name(run.launch)}({', '.join(values)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._address(value.data_ptr())
        if value is None or type(value) in (int, bool):
            return repr(value)
        if type(value) is tuple:
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
        raise _Unbindable("a kernel was given a tensor of its own")


# Does it work?


@triton.jit
def _add(pair, y, n, addend, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(pair[0] + i, mask=i < n) + addend, mask=i < n)


_found: dict[int, str | None] = {}


def broken(device: torch.device) -> str | None:
    """Why launches can't be made again on `device`; None if they can. Waits for the device the first time."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _found:
        _found[index] = why_untested("triton") or _try(device)
    return _found[index]


def _try(device: torch.device) -> str | None:
    try:
        x, y = torch.arange(100, device=device), torch.zeros(100, dtype=torch.int64, device=device)
        with launch.recording() as calls:
            launch.run(_add, (2,), (x, None), y, 100, 5, BLOCK=64)
        replay = bind(calls, (x, y), device)
        if isinstance(replay, str):
            return replay
        other, out = x.flip(0), torch.zeros_like(y)
        replay(other.data_ptr(), out.data_ptr())
        if not torch.equal(out, other + 5) or not torch.equal(y, x + 5):
            return f"Triton {triton.__version__} launched a kernel on wrong arguments"
    except Exception as error:  # whatever a private interface that has changed may raise
        return f"Triton {triton.__version__} is not used as halfbyte expects ({type(error).__name__}: {error})"
    return None
