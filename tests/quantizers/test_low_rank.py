"""Products of low rank, against float64's singular value decomposition."""

import pytest
import torch

from halfbyte.quantizers.low_rank import balancing_scale, low_rank


@pytest.mark.parametrize("shape", [(96, 64), (33, 257), (300, 5)])
@pytest.mark.parametrize("rank", [1, 4])
def test_near_the_best_of_its_rank(shape: tuple[int, int], rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    weight[:, :3] *= 30
    state = torch.random.get_rng_state()
    out, into = low_rank(weight, rank)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (out.shape, into.shape) == ((shape[0], rank), (rank, shape[1]))
    # Eckart and Young: no product of this rank is nearer than by the singular values that it lacks.
    best = torch.linalg.svdvals(weight.double())[rank:].norm()
    distance = (weight.double() - out.double() @ into.double()).norm()
    # Halko, Martinsson and Tropp, theorem 10.6 with 8 more dimensions and 4 steps: 1 + (sqrt(r / 7) + ...)^(1 / 9) at the worst; where
    # singular values fall off, as after outliers, by far less.
    assert best * (1 - 1e-6) <= distance <= best * 1.02
    torch.testing.assert_close(out.norm(dim=0), into.norm(dim=1), rtol=1e-4, atol=1e-4)
    assert torch.equal(low_rank(weight, rank)[0], out)


def test_a_weight_of_that_rank_is_taken_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 3, generator=generator) @ torch.randn(3, 48, generator=generator)
    out, into = low_rank(weight, 3)
    torch.testing.assert_close(out @ into, weight, rtol=1e-4, atol=1e-4)
    zeros = low_rank(torch.zeros(8, 8), 2)
    assert not any(part.any() for part in zeros)


def test_balanced_channels() -> None:
    inputs, weight = torch.tensor([8.0, 0.5, 0.0, 2.0]), torch.tensor([[2.0, 2.0, 1.0, 0.0], [-1.0, 1.0, 1.0, 0.0]])
    scale = balancing_scale(inputs, weight, 0.5)
    torch.testing.assert_close(scale[0] / scale[1], torch.tensor(0.25))  # sqrt((2 / 8) / (2 / 0.5))
    torch.testing.assert_close(scale[2], scale[3])  # nothing is known of them
    torch.testing.assert_close(scale.log().mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    ranges = inputs[:2] * scale[:2], weight.abs().amax(0)[:2] / scale[:2]
    torch.testing.assert_close(ranges[0] / ranges[1], torch.full((2,), float(ranges[0][0] / ranges[1][0])))
