"""Random codes for tests that need some and do not care how a quantizer makes them, and formats of all kinds."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.formats import PRESETS, Codes, Format
from halfbyte.formats.spec import OF_CODEBOOKS, Zero
from halfbyte.layouts.cpu_tiles import LONGEST_BLOCK

formats = st.one_of(
    st.builds(
        Format,
        st.sampled_from([4, 8]),
        st.sampled_from([1, 3, 8, 20, 32, 33, 64, 65, 100, 128, 288, 300, 10**8, "channel", "tensor"]),
        st.sampled_from(["none", "point", "offset"]),
        st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    ),
    st.sampled_from([*PRESETS.values(), *OF_CODEBOOKS.values()]),
)


def same_codes(a: Codes, b: Codes) -> bool:
    """The same format, shape and bits, which dequantize() and a checkpoint are made of."""
    actual, other = a.tensors(), b.tensors()
    same = (a.format, a.shape, actual.keys()) == (b.format, b.shape, other.keys())
    return same and all(torch.equal(actual[name], other[name]) for name in actual)


def random_codes(fmt: Format, shape: tuple[int, ...], seed: int = 0) -> Codes:
    """Every code, point and sign of an offset occurs; scales are as large as those of ordinary weights, and differ by a factor of 16."""
    rng = torch.Generator().manual_seed(seed)
    sizes = fmt.scale_shape(shape)
    scale = (torch.rand(sizes, generator=rng) * 0.15 + 0.01).to(fmt.scale)
    zero = None
    if fmt.zero == "point":
        zero = torch.randint(0, fmt.q_max + 1, sizes, generator=rng, dtype=torch.uint8)
    elif fmt.zero == "offset":
        zero = torch.randn(sizes, generator=rng).to(fmt.scale)
    values = torch.randint(fmt.q_min, fmt.q_max + 1, shape, generator=rng, dtype=torch.int16)
    if fmt.codebook:
        values = torch.tensor(fmt.codebook, dtype=torch.int16)[(values & 15).int()]
    return Codes.from_values(fmt, values, scale, zero)


def sparse_codes(fmt: Format, shape: tuple[int, ...], seed: int = 0) -> Codes:
    """As `random_codes`, but 2:4 sparse: of 4 neighbours along K two at most are not 0, at any two places."""
    codes = random_codes(fmt, shape, seed)
    groups = (*shape[:-1], -(-shape[-1] // 4), 4)
    places = torch.rand(groups, generator=torch.Generator().manual_seed(seed)).argsort(-1).flatten(-2)[..., : shape[-1]]
    zeros: Tensor | int = 0
    if codes.zero is not None:
        block = fmt.block_size(shape[-1])
        zeros = codes.zero.expand(*shape[:-1], codes.zero.shape[-1]).repeat_interleave(block, dim=-1)[..., : shape[-1]].to(torch.int16)
    return Codes.from_values(fmt, torch.where(places < 2, codes.values().to(torch.int16), zeros), codes.scale, codes.zero)


def largest_sums(bits: int, zero: Zero) -> tuple[Codes, Tensor]:
    """Codes [3, K] of a K longer than LONGEST_BLOCK and activations [4, K] whose int8 products have the largest sums of either sign."""
    n, k = 3, LONGEST_BLOCK + 40
    fmt = Format(bits, "channel", zero, torch.float32)
    values = torch.full((n, k), fmt.q_max)
    values[1] = fmt.q_min
    values[2, ::2] = fmt.q_min
    point = torch.tensor([[0], [fmt.q_max], [7]], dtype=torch.uint8) if zero == "point" else None
    x = torch.ones(4, k)
    x[1] = -1
    x[2, ::2] = -1
    x[3, 1::2] = -1
    return Codes.from_values(fmt, values, torch.full((n, 1), 0.01), point), x
