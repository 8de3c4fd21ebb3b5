"""Forms of weights leave with the weight, and do not outlive its content."""

from __future__ import annotations

import gc

import torch

from halfbyte.ops.conv import weight_forms


def test_forms_are_of_one_content_of_one_tensor() -> None:
    weight, other = torch.zeros(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    weight_forms.forms_of(weight)["taps"] = other
    assert weight_forms.forms_of(weight) == {"taps": other}
    assert weight_forms.forms_of(other) == {}
    weight.add_(1)
    assert weight_forms.forms_of(weight) == {}
    weight_forms.forms_of(weight)["taps"] = None
    weight.data = other.clone()
    assert weight_forms.forms_of(weight) == {}


def test_forms_leave_with_their_weight() -> None:
    gc.collect()
    before = len(weight_forms._forms)
    weight = torch.zeros(9, dtype=torch.uint8)
    weight_forms.forms_of(weight)["taps"] = torch.zeros(1 << 10)
    assert len(weight_forms._forms) == before + 1
    del weight
    gc.collect()
    assert len(weight_forms._forms) == before
