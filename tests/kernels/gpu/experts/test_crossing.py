"""Rows that cross to the CPU's experts and back by kernels: what is stored, and both sides waiting for each other."""

from __future__ import annotations

import threading

import pytest
import torch
from aot import Job, compile_all
from torch import Tensor

from halfbyte import ops
from halfbyte.kernels.crossing import DONE, FAILED, READY, WORDS
from halfbyte.kernels.gpu.experts import crossing
from halfbyte.machine import GPUS, Gpu
from halfbyte.ops.transformer.experts import Mixture
from halfbyte.ops.transformer.weights import Weight

Rows = tuple[Tensor, Tensor, Tensor]


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


def buffers(rows: int, k: int, chosen: int, device: torch.device) -> tuple[Rows, Tensor, Tensor]:
    """For z, ids and weights; for y; flags."""
    z, weights, y = (torch.full((rows, n), torch.nan) for n in (k, chosen, k))
    ids, flags = torch.full((rows, chosen), -1), torch.zeros(WORDS, dtype=torch.int64)
    both = pinned(z, device), pinned(ids, device), pinned(weights, device)
    return both, pinned(y, device), pinned(flags, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "k", "chosen"), [(1, 2048, 8), (3, 100, 5), (crossing.MOST_ROWS + 1, 40, 2)])
def test_what_is_sent(rows: int, k: int, chosen: int, dtype: torch.dtype, gpu: Gpu, device: torch.device) -> None:
    """Exactly what was given, the word after it; more rows are left to copies, the word is not."""
    to, _, flags = buffers(rows, k, chosen, device)
    count = torch.full((1,), 6, dtype=torch.int64, device=device)
    z, ids = torch.randn(rows, k).to(dtype), torch.randint(9, (rows, chosen), dtype=torch.int32)
    weights = torch.rand(rows, chosen)
    given = z.to(device), ids.to(device), weights.to(device)
    crossing.launch_send(gpu, given, to, count, flags)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert count.tolist() == [7]
    assert (int(flags[READY]), int(flags[DONE])) == (7, 0)
    if rows > crossing.MOST_ROWS:
        assert all(bool(one.isnan().all() if one.is_floating_point() else (one == -1).all()) for one in to)
        return
    for found, expected in zip(to, (z.float(), ids.long(), weights), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_both_sides_wait(dtype: torch.dtype, shares: bool, gpu: Gpu, device: torch.device) -> None:
    """The CPU's experts wait in a thread before anything is sent, the sum is launched before they are done: exactly x + (y + shared)."""
    torch.manual_seed(3)
    rows, k, inner, experts, chosen = 2, 600, 32, 5, 2
    stacks = [
        Weight(ops.pack(ops.quantize(torch.randn(size), "q8_0")), None, "int8", "block")
        for size in ((experts, 2 * inner, k), (experts, k, inner))
    ]
    mixture = Mixture(*stacks)
    to, y, flags = buffers(rows, k, chosen, device)
    count = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(3):
        z, x = torch.randn(rows, k).to(dtype), torch.randn(rows, k).to(dtype)
        ids, weights = torch.randint(experts, (rows, chosen), dtype=torch.int32), torch.rand(rows, chosen)
        shared, out = torch.randn(rows, k), torch.full((rows, k), torch.nan, dtype=dtype, device=device)
        call = threading.Thread(target=mixture.serve, args=(*to, y, flags))
        call.start()
        crossing.launch_send(gpu, (z.to(device), ids.to(device), weights.to(device)), to, count, flags)
        crossing.launch_receive(gpu, x.to(device), y, shared.to(device) if shares else None, out, count, flags)
        call.join(10)
        assert not call.is_alive()
        total = mixture(z.float(), ids, weights)
        expected = x.float() + (total + shared if shares else total)
        assert torch.equal(out.cpu(), expected.to(dtype))
    assert (int(flags[READY]), int(flags[DONE]), int(flags[FAILED])) == (3, 3, 0)


def test_a_cpu_that_never_answers(gpu: Gpu, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU does not wait for ever, and nobody takes what it finds for a result."""
    monkeypatch.setattr(crossing, "_POLLS", 50)
    _, y, flags = buffers(1, 40, 2, device)
    count, out = torch.ones(1, dtype=torch.int64, device=device), torch.zeros(1, 40, device=device)
    crossing.launch_receive(gpu, torch.zeros(1, 40, device=device), y.fill_(1), None, out, count, flags)
    assert bool(out.isnan().all())


def launch_both(gpu: Gpu) -> None:
    """On the meta device, for `aot`."""
    z, x, out = (torch.empty(1, 2048, dtype=torch.float16, device="meta") for _ in range(3))
    to_z, y, shared = (torch.empty(1, 2048, dtype=torch.float32, device="meta") for _ in range(3))
    ids, to_ids = (torch.empty(1, 8, dtype=dtype, device="meta") for dtype in (torch.int32, torch.int64))
    weights, to_weights = (torch.empty(1, 8, device="meta") for _ in range(2))
    count, flags = (torch.empty(n, dtype=torch.int64, device="meta") for n in (1, WORDS))
    crossing.launch_send(gpu, (z, ids, weights), (to_z, to_ids, to_weights), count, flags)
    crossing.launch_receive(gpu, x, y, shared, out, count, flags)


def test_compiled() -> None:
    """The words are stored after, and loaded before, all else, for the whole system; the loop has no spills."""
    archs = ["sm_80", "sm_90"]
    jobs = [Job("tests/kernels/gpu/experts/test_crossing.py:launch_both", arch) for arch in archs]
    for arch, (send, receive) in zip(archs, compile_all(jobs), strict=True):
        assert all((binary.spills, binary.stack) == (0, 0) for binary in (send, receive))
        assert ("griddepcontrol.wait" in send.ptx) == ("griddepcontrol.wait" in receive.ptx) == (GPUS[arch].capability >= (9, 0))
        stores, word = send.ptx.rpartition("st.release.sys.global.b64")[0], send.ptx.count("st.release.sys.global.b64")
        assert word == 1
        assert stores.rindex("bar.sync") > stores.rindex("st.global.v"), "all rows are stored before the barrier before the word"
        assert receive.ptx.rindex("ld.acquire.sys.global.b64") < receive.ptx.index("ld.volatile.global")
