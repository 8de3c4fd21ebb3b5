"""Decoders computed without transformers say what transformers' own code says, for every family, from a halfbyte folder."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_decoders import CASES, vary_
from transformers import PreTrainedTokenizerBase  # noqa: F401 - transformers is the oracle

import halfbyte as hb
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.families import FAMILIES
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.errors import UnsupportedError
from halfbyte.language.checkpoint_tensors import open_checkpoint

TOKENS = 24  # longer than windows of 5, 6, 7 and 9 tokens
# Relative to the norm of all logits. float: float32 sums in another order in two to four layers. int8: an activation that lies between
# two codes may get the other one, which moves an output by 1/127 of the largest activation of a block times a weight.
TOLERANCES = {"float": 1e-4, "int8": 0.03}
LAYERS = {family.layer_class: family for family in FAMILIES.values()}
WITHOUT = {"Gemma4TextDecoderLayer", "Gemma4TextDecoderLayer, shared keys"}  # not lowered yet


def opened(case: str, compute: str, folder: Path) -> tuple[Any, CpuModel]:
    torch.manual_seed(7)
    model = CASES[case]().eval()
    vary_(model)
    hb.quantize_(model, hb.Config("q8_0", compute=compute))
    hb.save(model, folder)
    config, tensors = open_checkpoint(folder)
    return model, CpuModel(build_spec(config, tensors))


@functools.cache
def causal_cases() -> list[str]:
    return [case for case in CASES if LAYERS[case.partition(",")[0]].model_class is not None]


@pytest.mark.parametrize("compute", ["float", "int8"])
@pytest.mark.parametrize("case", causal_cases())
def test_logits_are_those_of_transformers(case: str, compute: str, tmp_path: Path) -> None:
    if case in WITHOUT:
        with pytest.raises(UnsupportedError, match="keys and values"):
            opened(case, compute, tmp_path / "model")
        return
    model, mine = opened(case, compute, tmp_path / "model")
    ids = torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids).logits[0].float()
    whole = mine.prefill(ids[0].tolist(), Cache(mine.spec), every=True)
    cache, steps = Cache(mine.spec), []
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 15), *((i, i + 1) for i in range(15, TOKENS))):
        some = ids[0, start:stop].tolist()
        steps.append(mine.decode(some, cache) if stop == start + 1 else mine.prefill(some, cache, every=True))
    assert cache.length == TOKENS
    for found in (whole, torch.cat(steps)):
        assert torch.isfinite(found).all()
        assert float((found - expected).norm() / expected.norm()) < TOLERANCES[compute]
