"""All-reduce: sums over processes, y = x_0 + … + x_(n - 1), with the same bits in each.

Torch's functional all-reduce (NCCL, gloo) takes any size. A decoding step adds a few kilobytes many times, where latency dominates: up to
LARGEST bytes GPUs of one host use torch's one-shot all-reduce on symmetric memory. Each GPU writes its part where the others can read it,
and adds the parts in the order of ranks: one kernel, no copy engine, one round trip. Multicast in the network (NVLink SHARP) is not used.

The buffer for it is allocated once per group, by all processes together (`prepare`), before any CUDA graph is captured.
"""

from __future__ import annotations

import socket
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LARGEST = 1 << 19  # bytes; with more, bandwidth counts
_ALIGNED = 16  # bytes


@dataclass(frozen=True, slots=True)
class _Shared:
    """The shared buffer of a group, uint8 [LARGEST], or the reason why there is none.

    group  a weak reference to the process group (a later one may have its name)
    """

    group: weakref.ref[ProcessGroup]
    buffer: Tensor | None
    failure: str | None


# Buffers by the name of a process group, of which a program has a few; `prepare` replaces one whose group is gone and whose name was given
# again. All processes call `prepare` together, and a thread that sums only reads.
_group_buffers: dict[str, _Shared] = {}
_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define("sum_over_processes(Tensor x, str group) -> Tensor")


def prepare(group: str, device: str) -> str:
    """Allocates the shared buffer of a group; each process calls it. Returns a description of the sums for the report.

    group   torch's name of it
    device  "cuda", "cpu", …
    """
    if device != "cuda":
        return "torch.distributed"
    c10d: Any = torch.distributed.distributed_c10d
    there = c10d._resolve_process_group(group)
    known = _group_buffers.get(group)
    if known is None or known.group() is not there:
        known = _group_buffers[group] = _Shared(weakref.ref(there), *_share(there))
    return f"NCCL: {known.failure}" if known.failure else f"one-shot all-reduce up to {LARGEST >> 10} KB, NCCL above"


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of all processes' x, in x's dtype, on the current stream."""
    if group in _group_buffers:
        return torch.ops.halfbyte.sum_over_processes.default(x, group)  # type: ignore[no-any-return]
    return _large(x, group)


def _large(x: Tensor, group: str) -> Tensor:
    total: Tensor = torch.ops._c10d_functional.all_reduce.default(x.contiguous(), "sum", group)
    return torch.ops._c10d_functional.wait_tensor.default(total)  # type: ignore[no-any-return]


def _sum(x: Tensor, group: str) -> Tensor:
    buffer = _group_buffers[group].buffer
    wide = x.float() if x.dtype == torch.float16 else x  # the kernel supports float32 and bfloat16
    if buffer is None or not 0 < wide.nbytes <= LARGEST or wide.nbytes % 4 or wide.dtype not in (torch.float32, torch.bfloat16):
        return _large(x, group)
    summands = wide.contiguous()
    if summands.data_ptr() % _ALIGNED:
        summands = summands.clone()
    there = buffer[: summands.nbytes].view(summands.dtype).view(summands.shape)
    total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy.default(there, summands, "sum", group)
    return total.to(x.dtype)


_library.impl("sum_over_processes", _sum, "CUDA")
_library.impl("sum_over_processes", _sum, "CPU")
torch.library.register_fake("halfbyte::sum_over_processes", lambda x, group: torch.empty_like(x).contiguous(), lib=_library)


# The buffer


def _share(group: ProcessGroup) -> tuple[Tensor | None, str | None]:
    """(buffer, None), or (None, why not): the same in all processes, so that none waits for another."""
    here = torch.cuda.current_device()
    places: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(places, (socket.gethostname(), here, _lacking()), group=group)
    hosts, devices, lacking = ({place[i] for place in places} for i in range(3))
    if failure := next(filter(None, lacking), None):
        return None, failure
    if len(hosts) > 1:
        return None, "the processes are on several hosts"
    # Where each process sees only its own GPU, torch fails below.
    if len(devices) == len(places) and not all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b):
        return None, "the GPUs cannot access each other's memory"
    buffer, failure = None, None
    try:
        from torch.distributed import _symmetric_memory as symmetric

        with torch.inference_mode(False):
            buffer = symmetric.empty(LARGEST, dtype=torch.uint8, device=torch.device("cuda", here))
        symmetric.rendezvous(buffer, group.group_name)
    except (RuntimeError, ImportError, AttributeError) as error:
        failure = f"torch cannot share memory between these GPUs ({' '.join(str(error).split())[:200]})"
    torch.distributed.all_gather_object(places, failure, group=group)
    first = next(filter(None, places), None)
    return (buffer, None) if first is None else (None, first)


def _lacking() -> str | None:
    """The requirement that this process's torch does not meet, or None."""
    if torch.version.hip is not None:
        return "one-shot sums are tried on NVIDIA GPUs alone"
    ops = torch.ops.symm_mem
    return None if hasattr(ops, "one_shot_all_reduce_copy") else "this torch has no one-shot all-reduce"
