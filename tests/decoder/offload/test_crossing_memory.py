"""Memory through which rows cross to the CPU, without a GPU: rows are copied, and the host computes between."""

from __future__ import annotations

import threading

import pytest
import torch

from halfbyte.decoder.offload import crossing
from halfbyte.decoder.offload.crossing import AT_ONCE, Crossing
from halfbyte.errors import KernelError
from halfbyte.ops.transformer.routing import Routed

CPU = torch.device("cpu")


def routed(rows: int, k: int = 5, top_k: int = 2) -> Routed:
    return Routed(
        torch.randn(rows, k, dtype=torch.float16), torch.randint(9, (rows, top_k), dtype=torch.int32), torch.rand(rows, top_k), None
    )


def test_rows_there_and_back() -> None:
    """What is sent arrives in the CPU's types; x, y and the shared expert's output are added in float32 and rounded once."""
    there = Crossing(CPU)
    for rows in (3, 1):
        given, x, shared = routed(rows), torch.randn(rows, 1, 5, dtype=torch.float16), torch.randn(rows, 5)
        memory = there.rows(given, is_captured=False)
        there.send(given, memory)
        there.wait()
        assert torch.equal(memory.z, given.z.float())
        assert torch.equal(memory.ids, given.ids.long())
        assert torch.equal(memory.weights, given.weights)
        y = torch.randn(rows, 5)
        memory.y.copy_(y)
        there.done()
        assert torch.equal(there.receive(x, memory, shared), (x + (y + shared)[:, None]).half())
    assert len(there._rows) == 1


def test_a_captured_step_has_memory_of_its_own() -> None:
    """Whose addresses stay, whatever crosses later."""
    there = Crossing(CPU)
    captured = there.rows(routed(2), is_captured=True)
    for rows in (1, 40):
        assert there.rows(routed(rows), is_captured=False).z.data_ptr() != captured.z.data_ptr()
    assert there.rows(routed(2), is_captured=True).z.data_ptr() == captured.z.data_ptr()
    assert all(one.data_ptr() % 64 == 0 for one in captured)


def test_rows_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends, one sentence says so, and after `settle` rows cross again."""
    monkeypatch.setattr(crossing, "_MOST_SECONDS", 0.01)
    there = Crossing(CPU)
    there.wait()
    with pytest.raises(KernelError, match=r"the GPU has not sent the next hidden states to the CPU in time: .*, so open the model again"):
        there.check()
    there.settle()
    there.check()
    given = routed(1)
    memory = there.rows(given, is_captured=False)
    waiting = threading.Thread(target=there.wait)
    monkeypatch.setattr(crossing, "_MOST_SECONDS", 10.0)
    waiting.start()
    there.send(given, memory)
    waiting.join(10)
    assert not waiting.is_alive()
    there.check()


def test_a_failure_settles() -> None:
    """Where nothing is captured, too, and the error is the function's."""
    settled: list[bool] = []

    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        AT_ONCE.meanwhile(fails, lambda: settled.append(True))
    assert settled == [True]
