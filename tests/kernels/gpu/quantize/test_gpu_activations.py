"""Activations quantized on the GPU: codes, scales, offsets and sums are the reference's, bit for bit."""

import numpy as np
import pytest
import torch
from torch import Tensor

from halfbyte.errors import KernelError
from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu.quantize import activations
from halfbyte.kernels.problem import Activation, Problem

WAYS = ("block", "row", "block_offset", "row_offset")
# Granules of 32, 64 and 128; blocks of several; padded in the middle; one for the row; nibbles and bytes.
FORMATS = (
    "q4_0",
    "q8_0",
    "int4_g20",
    "int4_g64_zp",
    "int8_g33_offset",
    "int4_g128",
    "int8_g200",
    "int4_g384_zp",
    "int4_channel_zp",
    "int8_tensor",
)


@pytest.fixture(autouse=True)
def _quiet() -> object:
    """The interpreter computes with NumPy, which warns of what is meant here: infinities and NaN."""
    with np.errstate(all="ignore"):
        yield


def natural(q: Tensor, plan: activations.Plan) -> Tensor:
    """Codes in the order of K: the inverse of what the text of `activations.py` says."""
    if plan.order == "plain":
        return q
    if plan.order == "planes":
        parts = q.unflatten(1, (-1, 2, 2, 2, 4, 2, 2)).permute(0, 1, 7, 2, 3, 4, 5, 6)
    else:
        parts = q.unflatten(1, (-1, 2, 4, 2, 2)).permute(0, 1, 2, 4, 3, 5)
    return parts.reshape(q.shape)


def samples(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows with large and small values, zeros, ties, one row all zero; unit stride along k only."""
    rng = torch.Generator().manual_seed(m * 1000 + k)
    x = torch.randn(m, k, generator=rng) * 30 ** torch.randn(m, k, generator=rng).clamp(-3, 1.2)
    x[torch.rand(m, k, generator=rng) < 0.1] = 0
    x[m // 2] = 0
    x[0] = torch.arange(k) % 255 / 2 - 63.5  # codes halfway between integers
    whole = torch.full((m, k + 3), torch.nan, dtype=dtype)
    whole[:, :k] = x
    return whole.to(device)[:, :k]


def test_granules_whose_offsets_exceed_int32_are_refused() -> None:
    def reason(m: int, n: int) -> str | None:
        return activations.supports(Problem("linear", m, n, 1 << 14, as_format("int8_g16"), torch.float16, "int8"))

    assert reason((1 << 21) - 256, 64) is None
    assert "1024 granules of 2097152 rows" in str(reason((1 << 21) - 255, 64))
    assert "1024 granules of 2097152 rows" in str(reason(1, 1 << 21))


def check(x: Tensor, name: str, activation: Activation, paired: bool = False) -> None:
    problem = Problem("linear", len(x), 5, x.shape[1], as_format(name), x.dtype, "int8", activation, paired=paired)
    plan = activations.plan(problem)
    assert (plan.order == "plain") == (problem.format.bits == 8 and not paired)
    memory = torch.full((plan.nbytes,), 0x55, dtype=torch.uint8, device=x.device)
    got = activations.quantize_activation(x, plan, memory)
    m, k = x.shape
    wanted = reference.quantize_activation(x.cpu(), problem.format.block_size(k), activation)
    q = natural(got.q[:m].cpu(), plan)
    q = torch.nn.functional.pad(q, (0, -plan.k_padded % plan.padded)).unflatten(1, (-1, plan.padded))
    real = q[:, :, : plan.block].flatten(1)[:, :k]
    assert torch.equal(real, wanted.q)
    assert not q[:, :, plan.block :].any()
    assert not q[:, :, : plan.block].flatten(1)[:, k:].any()
    groups = wanted.scale.shape[1]
    assert torch.equal(got.scale.cpu()[:groups, :m].T.nan_to_num(-1), wanted.scale.nan_to_num(-1))
    assert (got.sums is None) == (problem.format.zero == "none")
    if got.sums is not None:
        sums = got.sums.cpu()[:, :m].T
        per_block = sums if plan.whole else torch.stack([part.sum(1) for part in sums.split(plan.padded // plan.granule, 1)], 1)
        wanted_sums = wanted.sums.sum(1, keepdim=True) if plan.whole else wanted.sums
        assert torch.equal(per_block[:, : wanted_sums.shape[1]], wanted_sums.float())
    if plan.with_offset:
        assert got.offset is not None
        assert torch.equal(got.offset.cpu()[:groups, :m].T, wanted.offset)


@pytest.mark.parametrize("activation", WAYS)
@pytest.mark.parametrize("name", FORMATS)
def test_bits(name: str, activation: Activation, device: torch.device) -> None:
    for m, k, dtype in ((3, 417, torch.float16), (2, 31, torch.float32), (1, 1280, torch.bfloat16)):
        check(samples(m, k, dtype, device), name, activation)


@pytest.mark.parametrize("activation", WAYS)
@pytest.mark.parametrize("name", ["q8_0", "int8_g33_offset", "int8_channel_zp"])
def test_bits_for_paired_bytes(name: str, activation: Activation, device: torch.device) -> None:
    for m, k, dtype in ((3, 417, torch.float16), (1, 1280, torch.bfloat16)):
        check(samples(m, k, dtype, device), name, activation, paired=True)


@pytest.mark.parametrize("activation", ["block", "row"])
@pytest.mark.parametrize("name", ["q8_0", "int4_g32", "int4_g64", "int4_g128", "int8_channel"])
def test_rows_that_are_aligned(name: str, activation: Activation, device: torch.device) -> None:
    """Contiguous rows of multiples of 16, as models have them: kernels with vector loads, a few or many elements per warp."""
    for m, k, dtype in ((24, 64, torch.float32), (70, 384, torch.float32), (3, 384, torch.bfloat16), (2, 2048, torch.float32)):
        for paired in {False, name in ("q8_0", "int8_channel")}:
            check(samples(m, k, dtype, device).contiguous(), name, activation, paired)


@pytest.mark.parametrize("activation", WAYS)
def test_long_rows(activation: Activation, device: torch.device) -> None:
    for name in ("int8_channel_zp", "int4_g128_zp"):
        check(samples(2, 40001, torch.float16, device), name, activation)


@pytest.mark.parametrize("activation", WAYS)
@pytest.mark.parametrize("name", ["q4_0", "int4_g128", "int8_channel"])
def test_what_is_no_number(name: str, activation: Activation, device: torch.device) -> None:
    x = torch.randn(6, 300)
    x[0, 70], x[1, 299], x[2, 0], x[3, 150], x[3, 151] = torch.nan, torch.inf, -torch.inf, 3e38, -3e38
    x[4] = 1e-41
    check(x.to(device), name, activation)


def test_a_piece_that_is_no_whole_record_is_refused() -> None:
    problem = Problem("linear", 1, 1, 200000, as_format("int8_g40000"), torch.float16, "int8")
    assert "20000" in str(activations.supports(problem))
    assert activations.supports(Problem("linear", 1, 1, 200000, as_format("int8_g65536"), torch.float16, "int8")) is None


@pytest.mark.parametrize(("name", "activation"), [("q8_0", "block"), ("int8_channel", "row_offset"), ("q8_0", "block_offset")])
def test_codes_have_no_offsets_and_one_scale(name: str, activation: Activation, device: torch.device) -> None:
    plan = activations.plan(Problem("linear", 2, 5, 256, as_format(name), torch.float32, "int8", activation))
    memory = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
    with pytest.raises(KernelError, match="codes that are arranged have one scale per row and no offset, got Plan"):
        activations.arrange(torch.zeros(2, 256, dtype=torch.int8, device=device), plan, memory)
