"""Tied tensors that files hold under both names: one is dropped, they are untied, or the files are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from halfbyte.checkpoint.entries import Entries
from halfbyte.checkpoint.mapping.architecture import Step, rename
from halfbyte.checkpoint.mapping.ties import Settled, settle_ties
from halfbyte.errors import CheckpointError
from halfbyte.io.tensors import TensorSpec

SPEC = TensorSpec(torch.float32, (4, 4))


class Files(Entries):
    """Files whose tensors are all equal, or all different."""

    equal = False

    def same(self, name: str, other: str) -> bool:
        return self.equal


class EqualFiles(Files):
    equal = True


def model_of(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def linear() -> nn.Linear:
    return nn.Linear(4, 4, bias=False, device="meta")


def tied() -> nn.Module:
    a, b = linear(), linear()
    b.weight = a.weight
    return model_of(a=a, b=b, c=linear())


def settled(model: nn.Module, *steps: Step, equal: bool) -> Settled:
    return settle_ties(model, steps, (EqualFiles if equal else Files)({}))


def renamed(*names: str) -> list[Step]:
    return [rename(name, name, SPEC) for name in names]


def no_run(read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
    raise NotImplementedError


def test_of_equal_tensors_the_second_is_dropped() -> None:
    model = tied()
    found = settled(model, *renamed("a.weight", "b.weight"), equal=True)
    assert [list(step.targets) for step in found.steps] == [["a.weight"]]
    assert found.dropped == {"b.weight": "equal to a.weight, to which it is tied"}
    assert model.get_parameter("a.weight") is model.get_parameter("b.weight")


def test_different_parameters_are_untied() -> None:
    model = tied()
    found = settled(model, *renamed("a.weight", "b.weight"), equal=False)
    assert len(found.steps) == 2
    assert model.get_parameter("a.weight") is not model.get_parameter("b.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_different_buffers_are_untied_and_stay_buffers(dtype: torch.dtype) -> None:
    model = model_of(a=nn.Module(), b=nn.Module())
    values = torch.zeros(4, 4, dtype=dtype, device="meta")
    for name in "ab":
        model.get_submodule(name).register_buffer("values", values)
    settled(model, *renamed("a.values", "b.values"), equal=False)
    assert model.get_buffer("a.values") is not model.get_buffer("b.values")
    assert not list(model.parameters())


def test_a_module_under_two_names_cannot_have_two_values() -> None:
    shared = linear()
    with pytest.raises(CheckpointError, match=r"different values of a\.weight and b\.weight, which are one tensor"):
        settled(model_of(a=shared, b=shared), *renamed("a.weight", "b.weight"), equal=False)
    assert len(settled(model_of(a=shared, b=shared), *renamed("a.weight", "b.weight"), equal=True).steps) == 1


def test_a_step_that_gives_other_tensors_too_is_not_dropped() -> None:
    split = Step(("fused",), {"b.weight": SPEC, "c.weight": SPEC}, no_run, converts=True)
    found = settled(tied(), *renamed("a.weight"), split, equal=True)
    assert split in found.steps
    assert found.dropped == {}


def test_equal_sources_of_which_one_is_converted_are_not_equal_tensors() -> None:
    transposed = Step(("b",), {"b.weight": SPEC}, no_run, converts=True)
    assert transposed in settled(tied(), *renamed("a.weight"), transposed, equal=True).steps
