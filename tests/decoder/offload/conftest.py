"""Specifications of tiny decoders in q8_0, for tests that compute a part of them elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_decoders import CASES, vary_

import halfbyte as hb
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.spec import DecoderSpec
from halfbyte.language.checkpoint_tensors import open_checkpoint


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DecoderSpec]:
    """By the kind of their layers, a key of CASES; each is made once."""
    instances: dict[str, DecoderSpec] = {}

    def find(kind: str) -> DecoderSpec:
        if kind not in instances:
            torch.manual_seed(7)
            model = CASES[kind]().eval()
            vary_(model)
            folder = tmp_path_factory.mktemp("model") / "model"
            hb.save(hb.quantize_(model, hb.Config("q8_0", compute="float")), folder)
            instances[kind] = build_spec(*open_checkpoint(folder))
        return instances[kind]

    return find
