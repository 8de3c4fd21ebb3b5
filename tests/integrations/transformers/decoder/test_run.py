"""A call through the layers of a stack: masks, and the type of hidden states between native calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from language_model import make_decoder
from optimized_models import model_pair, native_calls

from halfbyte.integrations.transformers.decoder import cpu_run, gpu_run
from halfbyte.integrations.transformers.decoder.run import Run, visible
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_that_are_added_hide_or_not(dtype: torch.dtype) -> None:
    hidden = torch.rand(2, 1, 3, 5) < 0.5
    least = torch.finfo(dtype).min
    for number in (least, -torch.inf):
        assert torch.equal(visible(torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, number)), ~hidden)  # type: ignore[arg-type]
    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -1)
    assert visible(bias) is bias, "a bias that hides nothing"
    assert torch.equal(visible(bias, -1), ~hidden)  # type: ignore[arg-type]
    assert visible(None) is None
    assert visible(hidden) is hidden


def test_both_runs_leave_layers_to_transformers_in_one_way() -> None:
    assert cpu_run.CpuRun._by_transformers is gpu_run.GpuRun._by_transformers is Run._by_transformers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hidden_states_are_not_rounded_between_native_calls(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for each layer computes the same bits as one for all of them."""
    torch.manual_seed(0)
    model = quantize_(make_decoder("Llama", **SIZES).eval(), Config("q4_0", compute="float", skip=["lm_head"]))
    _, short = model_pair(model)
    short.to(dtype)
    calls, ids = native_calls(monkeypatch), torch.randint(99, (1, 12))

    def logits() -> Tensor:
        with torch.inference_mode():
            y: Tensor = short(input_ids=ids, use_cache=False).logits
            return y

    together, layers = logits(), len(short.model.layers)
    assert [count for *_, count in calls] == [layers]
    monkeypatch.setattr(cpu_run, "_FEW_ROWS", 0)
    assert torch.equal(logits(), together)
    assert [count for *_, count in calls] == [layers, *[1] * layers]
    assert together.dtype == dtype
