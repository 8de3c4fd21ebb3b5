"""Replay of recorded launches on GPUs: the cache of tapes (`kernels/gpu/runtime/tape.py`), for single ops and for decoder layers.

Triton's own launcher takes the host longer than most small kernels take the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.kernels.gpu.runtime.launch import current_recording, is_compiling

if TYPE_CHECKING:
    from halfbyte.kernels.gpu.runtime.tape import Tape

MOST_LAUNCHES = 32768

Operands = Sequence[Tensor | None]
R = TypeVar("R", bound=Tensor | Sequence[Tensor])


class Tapes(dict[Hashable, "Tape"]):
    """Tapes by key: of at most MOST_LAUNCHES launches, beyond which all but the last are dropped. A tape without a replay counts as one."""

    launches = 0

    def grow(self, key: Hashable, tape: Tape, launches: int) -> None:
        """Add a tape, or so many launches of it."""
        self.launches += launches
        if self.launches > MOST_LAUNCHES:
            self.clear()
            self.launches = max(1, tape.length)
        self[key] = tape

    def clear(self) -> None:
        super().clear()
        self.launches = 0


# Recorded launches of all GPUs, until the process ends or there are too many. Keys hold all that launches depend on but addresses, which a
# replay is given: nothing invalidates a tape. Threads may record one key twice; the later tape stays.
tapes = Tapes()


def key_of(operands: Operands, *settings: Hashable) -> Hashable:
    """The key of launches that differ in the addresses of their operands alone. The first of `settings` names what is launched."""
    return (*settings, *[None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in operands])


def replayed(
    steps: Callable[[], R],
    operands: Operands,
    *settings: Hashable,
    constants: Operands = (),
    undo: Callable[[], object] | None = None,
    verify: bool = False,
    weight: int | None = None,
) -> R:
    """Return the results of `steps`; from the third call of a kind on by a replay of their launches.

    Args:
        steps, undo, verify, weight: As `Tape.record` takes them. Their device is the current one.
        operands: The tensors that kernels read and `steps` have not allocated. The first is not None.
        settings: All that launches depend on but operands. The first names the launches.
        constants: More operands, whose shapes, strides, dtypes and devices follow from `settings`.
    """
    key = (*settings, *[None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in operands])  # `key_of`
    tape = tapes.get(key)
    if tape is not None and tape.replay is not None and current_recording() is None:
        results: R | None = tape.replay(*operands, *constants)
        if results is not None:
            return results
    everything = (*operands, *constants)
    if (tape is not None and (tape.replay is not None or tape.why_not_replayed is not None)) or why_not_recorded(everything) is not None:
        return steps()
    if tape is None:
        from halfbyte.kernels.gpu.runtime.tape import Tape

        assert operands[0] is not None
        tape = Tape(operands[0].device)
        tapes.grow(key, tape, 1)
        if tape.why_not_replayed is not None:
            return steps()
    launched = tape.record(steps, everything, undo=undo, verify=verify, weight=weight)
    if tape.replay is not None:
        tapes.grow(key, tape, tape.length - 1)
    return launched


def why_not_recorded(operands: Operands) -> str | None:
    """The reason why launches on these operands cannot be recorded now; None if they can."""
    if current_recording() is not None:
        return "they are part of another recording"
    if (reason := why_no_triton()) is not None:
        return reason
    if is_compiling():
        return "kernels are compiled, not launched"
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is captured"
    present = [t for t in operands if t is not None]
    if any(t.data_ptr() % 16 for t in present):
        return "an operand is not aligned to 16 bytes, for which kernels are compiled"
    from halfbyte.kernels.gpu.runtime.tape import reach

    ranges = sorted(map(reach, present))
    if any(start < end for (_, end), (start, _) in pairwise(ranges)):
        return "operands overlap, so that an address does not tell them apart"
    return None
