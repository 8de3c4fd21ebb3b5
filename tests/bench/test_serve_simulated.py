"""The model of `benchmarks/serve.py --step-ms`, which sleeps in place of a GPU."""

from __future__ import annotations

import time
from pathlib import Path

from language_model import make_language_model
from serve_simulated import simulated

from halfbyte.language.model import LanguageModel
from halfbyte.language.sampling.sampler import Sampling


def test_a_batch_runs_on_a_simulated_gpu(tmp_path: Path) -> None:
    """It is called as a `GpuModel` is; steps take the time that was asked for."""
    model = simulated(LanguageModel.open(make_language_model(tmp_path / "float"), format="q8_0"), 0.01)
    batch, counts = model.batch(slots=2), (5, 9, 7)
    start = time.perf_counter()
    generations = [batch.submit([3, 4, 5], Sampling(max_new_tokens=count, ignore_eos=True)) for count in counts]
    while batch.running:
        batch.step()
    assert [len(generation.ids) for generation in generations] == [*counts]
    assert time.perf_counter() - start > 0.01 * (4 + 6)  # in one of the two slots 5 tokens and then 7, of each the first by the prefill
