"""`PackedTensors`: weights that are joined along N are packed as their joined codes are."""

from __future__ import annotations

import pytest
import torch
from samples import random_codes, sparse_codes
from torch import Tensor

from halfbyte import ops
from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import as_format
from halfbyte.language.checkpoint_tensors import Form, PackedTensors


class Given:
    """A Source of codes in memory, with a bias of three elements."""

    def __init__(self, weights: dict[str, Codes]) -> None:
        self.weights = weights

    def names(self) -> set[str]:
        return {*self.weights, "bias"}

    def form(self, name: str) -> Form:
        return Form(self.weights[name].format, "auto", "block")

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights[name].shape

    def codes(self, name: str) -> Codes:
        return self.weights[name]

    def floats(self, name: str) -> Tensor:
        return torch.ones(3)


def weights(format: str, rows: tuple[int, ...], *, sparse: int = 0) -> dict[str, Codes]:
    """Weights of so many rows; the first `sparse` of them are 2:4 sparse."""
    fmt = as_format(format)
    return {f"w{i}": (sparse_codes if i < sparse else random_codes)(fmt, (n, 96), seed=i) for i, n in enumerate(rows)}


# Whole panels of 32 rows are packed one weight after the other; rows that end within a panel are joined first.
@pytest.mark.parametrize("rows", [(64, 32, 32), (32, 16, 16), (33, 64)])
@pytest.mark.parametrize(
    ("format", "sparse"), [("q4_0", 0), ("q4_0", 1), ("q4_0", 3), ("q8_0", 2), ("q4_1", 0), ("iq4_nl", 0), ("int8_channel", 0)]
)
def test_joined_weights(format: str, sparse: int, rows: tuple[int, ...]) -> None:
    given = weights(format, rows, sparse=sparse)
    found = PackedTensors(Given(given)).weight(list(given))
    assert found is not None
    expected = ops.pack(Codes.joined(list(given.values()), lambda parts: torch.cat(parts, dim=-2)))
    packed = found.packed
    assert (packed.format, packed.shape, packed.layout) == (expected.format, expected.shape, expected.layout)
    assert (packed.source_format, packed.sparse) == (expected.source_format, expected.sparse)
    assert torch.equal(packed.data, expected.data)


def test_whole_panels_are_not_joined_as_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Codes, "joined", lambda *_: pytest.fail("the codes were copied"))
    assert PackedTensors(Given(weights("q4_0", (64, 32)))).weight(["w0", "w1"]) is not None


def test_a_bias_of_another_layer() -> None:
    with pytest.raises(CheckpointError, match="bias has 3 elements, its weight 96 rows"):
        PackedTensors(Given(weights("q4_0", (64, 32)))).weight(["w0", "w1"], ["bias"])
