"""What surrounds the kernels: busy processes, workers that load data, other operating systems."""

import os
import random
import subprocess
import sys
import threading

import pytest
import torch
from samples import random_codes
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from halfbyte import ops
from halfbyte.formats import as_format

N, K = 260, 256


def test_thousands_of_calls_from_many_threads_while_the_number_of_threads_changes() -> None:
    """Each M and format is compiled by whoever comes first, others wait for it or run what is there."""
    weights = [ops.pack(random_codes(as_format(name), (N, K))) for name in ("q4_0", "int8_channel", "int4_g128_zp")]
    inputs = [torch.randn(m, K) for m in (1, 2, 3, 5, 8, 13, 16, 33)]
    results: dict[tuple[int, int, str], Tensor] = {}
    callers, calls = 12, 200
    start, lock, wrong, done = threading.Barrier(callers + 1), threading.Lock(), list[object](), list[int]()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        start.wait()
        for _ in range(calls):
            w, i, compute = rng.randrange(len(weights)), rng.randrange(len(inputs)), rng.choice(("int8", "float"))
            y = ops.linear(inputs[i], weights[w], compute=compute)
            with lock:
                wanted = results.setdefault((w, i, compute), y)
            if not torch.equal(y, wanted):
                wrong.append((w, i, compute))
        done.append(seed)

    before = torch.get_num_threads()
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(callers)]
    for worker in workers:
        worker.start()
    start.wait()
    try:
        count = 0
        while any(worker.is_alive() for worker in workers) and count < 10_000:
            count += 1
            torch.set_num_threads(1 + count % 4)
            workers[count % callers].join(0.02)
    finally:
        torch.set_num_threads(before)
    assert sorted(done) == list(range(callers))
    assert wrong == []
    for (w, i, compute), y in results.items():
        assert torch.equal(ops.linear(inputs[i], weights[w], compute=compute), y)


class Projected(Dataset[Tensor]):
    """Rows that a kernel computes when they are asked for."""

    def __init__(self) -> None:
        self.codes = random_codes(as_format("q4_0"), (64, K))
        self.weight = ops.pack(self.codes)
        self.rows = torch.randn(12, 3, K)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return ops.linear(self.rows[index], self.weight)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_of_a_data_loader() -> None:
    data = Projected()
    wanted = torch.stack([data[i] for i in range(len(data))])  # this process's threads are up before the workers are forked
    for _ in range(2):
        got = torch.cat(list(DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=600)))
        assert torch.equal(got, wanted)
    assert torch.equal(data[3], wanted[3])


_ELSEWHERE = """
import os, sys
import torch, platformdirs, llvmlite.binding  # these know the system that they are on
sys.platform = {system!r}
for name in ("fork", "register_at_fork", "getuid", "sched_getaffinity", "sysconf"):
    if hasattr(os, name):
        delattr(os, name)
import warnings
warnings.simplefilter("error")
import halfbyte as hb
from halfbyte.kernels.cpu.codegen import runtime
torch.set_num_threads(3)
weight, x = torch.randn(300, 512), torch.randn(64, 512)
packed = hb.pack(hb.quantize(weight, "q8_0"))
y = hb.linear(x, packed, compute="float")
assert torch.allclose(y, x @ hb.dequantize(packed).T, atol=1e-3), "wrong"
assert hb.embedding(torch.tensor([3, 1]), packed).shape == (2, 512)
print(runtime.name())
"""


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_other_systems_are_imported_and_computed_on(system: str) -> None:
    """As far as that can be seen from here: what only this system has is taken away, and torch's OpenMP is not found."""
    if sys.platform == system:
        pytest.skip("this is that system")
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE.format(system=system)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "a thread pool of halfbyte's own"
