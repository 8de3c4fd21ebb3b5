"""Weights of 3-D and transposed convolutions as weights of convolutions of images."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import ArgumentError
from halfbyte.layouts.folding import Fold

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@given(sizes, st.data())
def test_unfolding_is_the_inverse(kernel: list[int], data: st.DataObject) -> None:
    transposed, groups = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    phases = tuple(data.draw(st.integers(1, taps)) for taps in kernel) if transposed or len(kernel) < 3 else ()
    folded = data.draw(st.sampled_from([1, 3])) if len(kernel) == 3 else 0
    depthwise = data.draw(st.booleans())
    shape = (groups, 1) if depthwise else (2 * groups, 3)
    fold = Fold(tuple(kernel), phases, folded, groups, depthwise)
    weight = torch.randn(*shape, *kernel)
    images = fold.fold(weight)
    assert torch.equal(fold.unfold(images), weight)
    height, width = fold.image_kernel
    assert torch.equal(fold.unfold(images.reshape(*images.shape[:2], height, width)), weight), "as codes keep it"
    assert images.numel() * (1 - fold.zeros) == pytest.approx(weight.numel())
    assert int((images != 0).sum()) == weight.numel(), "what phases lack is 0"


def test_taps_of_a_phase_lie_a_stride_apart_and_are_reversed() -> None:
    weight = torch.arange(1.0, 6).view(1, 1, 5)
    assert Fold((5,), (2,)).fold(weight).tolist() == [[[5.0, 3.0, 1.0]], [[0.0, 4.0, 2.0]]]


def test_taps_along_time_become_channels() -> None:
    weight = torch.randn(2, 3, 4, 5, 6)
    images = Fold((4, 5, 6), folded=1).fold(weight)
    assert images.shape == (2, 12, 5, 6)
    assert torch.equal(images[:, 3 * 2 + 1], weight[:, 1, 2])
    assert Fold((4, 5, 6), folded=3).fold(weight).shape == (2, 360, 1, 1)


@pytest.mark.parametrize("wrong", [((0,),), ((2,), (1, 1)), ((2, 2), (), 3), ((2, 2, 2), (), 2), ((2,), (1,), 0, 0), ((2.0,),)])
def test_what_no_kernel_has_is_refused(wrong: tuple[object, ...]) -> None:
    with pytest.raises(ArgumentError, match="pass those of the layer"):
        Fold(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="ends with these sizes"):
        Fold((2, 2)).fold(torch.randn(1, 1, 2, 3))
