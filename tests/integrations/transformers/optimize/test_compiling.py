"""Which models have their kernels compiled ahead."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from language_model import make_language_model
from torch import nn

pytest.importorskip("triton")

from halfbyte.integrations.transformers.optimize import self_check
from halfbyte.integrations.transformers.text import open_model
from halfbyte.kernels.gpu.runtime import launch, tape
from halfbyte.nn.config import Config

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part


class Elsewhere(nn.Module):
    """A model that says that it is on a GPU, and counts its calls."""

    device = torch.device("cuda", 0)

    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.stack, self.config, self.seen = stack, stack.config, list[tuple[int, ...]]()

    def forward(self, input_ids: torch.Tensor, **settings: Any) -> None:
        assert launch.is_compiling()
        self.seen.append(tuple(input_ids.shape))


def test_a_model_is_called_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a prompt and for a token, in which nothing is launched."""
    monkeypatch.setattr(self_check, "why_no_triton", lambda: None)
    monkeypatch.setattr(tape, "why_not_replayed", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *shape, zeros=torch.zeros, device=None, **how: zeros(*shape, **how))
    stack = open_model(make_language_model(tmp_path), config=Config("q4_0"))[0].model
    short = Elsewhere(stack)
    self_check.compile_kernels(cast("Part", short), 7)
    assert short.seen == [(1, 7), (1, 1)]
    assert not launch.is_compiling()
