"""Random codes for tests that need some and do not care how a quantizer makes them."""

import torch

from halfbyte.formats import Codes, Format


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
    return Codes.from_values(fmt, values, scale, zero)
