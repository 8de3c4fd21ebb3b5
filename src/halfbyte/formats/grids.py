"""The types of ggml whose codes are indices of vectors in a table, the grid: iq1, iq2 and iq3.

    w = d m q    d a float16 for all 256 weights of a block, m a small multiplier for 16 or 32 of them, q -62 … 62 from the grid

The grids, a few thousand vectors, come from the gguf package. It dequantizes blocks whose d is set to 1, which gives m q without
rounding; m is read here, and dividing by it gives q. All products are exact in float32: d has 11 bits, m at most 5, q at most 6.

    type     bytes                                                                      m
    iq2_xxs  66: d f16 | 8 x (4 indices | 28 bits of signs, 4-bit s)                    (s + 1/2) / 4
    iq2_xs   74: d f16 | 32 x (9-bit index, 7 of signs) | 16 4-bit s                    (s + 1/2) / 4
    iq3_xxs  98: d f16 | 64 indices | 8 x (28 bits of signs, 4-bit s)                   (s + 1/2) / 2
    iq1_s    50: d f16 | 32 indices | 8 x (12 bits of indices, 3-bit s, a sign)         (s + 1/2) / 4
    iq3_s   110: d f16 | 64 indices | 8 bytes of them | 32 of signs | 8 4-bit s         (s + 1/2) * 2
    iq2_s    82: d f16 | 32 indices | 32 bytes of signs | 8 of indices | 16 4-bit s     (s + 1/2) / 4
    iq1_m    56: 32 indices | 16 bytes of them and of signs | 4 x (4 3-bit s, 4 bits of d)   (s + 1/2) / 4

q of iq1 is eight times the table's -1, 0, 1, plus or minus 1, because weights there are shifted by an eighth.

Source: ggml-quants.c of https://github.com/ggml-org/ggml, dequantize_row_iq…
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import UnsupportedError

# ggml's number, name, bytes of a block, multipliers in a block.
TYPES = (
    (16, "iq2_xxs", 66, 8),
    (17, "iq2_xs", 74, 16),
    (18, "iq3_xxs", 98, 8),
    (19, "iq1_s", 50, 8),
    (21, "iq3_s", 110, 8),
    (22, "iq2_s", 82, 16),
    (29, "iq1_m", 56, 16),
)
_ONE = 0x3C00  # in float16


def decode(name: str, blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    """uint8 [B, bytes] -> codes int8 [B, 256], scales float32 [B, 8 or 16] and no zeros. Raises UnsupportedError without gguf."""
    try:
        import gguf
    except ImportError as e:
        raise UnsupportedError(f"the tables of {name} are in the package gguf: pip install 'halfbyte[gguf]'") from e
    unit = blocks.clone()
    if name == "iq1_m":
        words = _words(unit[:, 48:])  # the lowest four bits of d are the highest of the first
        digits = [words[:, i] >> 12 << 4 * i for i in range(4)]
        d = digits[0] | digits[1] | digits[2] | digits[3]
        d = torch.where(d > 0x7FFF, d - 0x10000, d).to(torch.int16).view(torch.float16).float()[:, None]
        for i in range(4):
            unit[:, 49 + 2 * i] = unit[:, 49 + 2 * i] & 15 | (_ONE >> 4 * i & 15) << 4
    else:
        d = blocks[:, :2].contiguous().view(torch.float16).float()
        unit[:, 0], unit[:, 1] = _ONE & 255, _ONE >> 8
    m = _multipliers(name, blocks)
    kind = gguf.GGMLQuantizationType[name.upper()]
    # In one row: the package takes rows sixteen at a time.
    products = torch.from_numpy(gguf.dequantize(unit.reshape(1, -1).numpy(), kind)).reshape(len(blocks), m.shape[1], -1)
    return (products / m.unsqueeze(-1)).to(torch.int8).flatten(1), d * m, None


def _multipliers(name: str, b: Tensor) -> Tensor:
    """The multiplier m of each 16 or 32 weights, float32 [B, 8 or 16]."""
    if name in ("iq2_xxs", "iq3_xxs"):
        first = {"iq2_xxs": 9, "iq3_xxs": 69}[name]
        step = {"iq2_xxs": 8, "iq3_xxs": 4}[name]
        s = b[:, first::step] >> 4
    elif name == "iq1_s":
        s = b[:, 35::2] >> 4 & 7
    elif name == "iq1_m":
        s = (_words(b[:, 48:]).unsqueeze(-1) >> torch.tensor((0, 3, 6, 9), device="cpu") & 7).flatten(1)
    else:
        nibbles = b[:, {"iq2_xs": 66, "iq2_s": 74, "iq3_s": 106}[name] :]
        s = torch.stack((nibbles & 15, nibbles >> 4), dim=-1).flatten(1)
    m: Tensor = (s.float() + 0.5) * {"iq3_s": 2.0, "iq3_xxs": 0.5}.get(name, 0.25)
    return m


def _words(bytes: Tensor) -> Tensor:
    """uint8 [B, 2 n] -> int32 [B, n]: unsigned little-endian 16-bit words."""
    byte_pairs: Tensor = bytes.to(torch.int32).unflatten(1, (-1, 2))
    return byte_pairs[..., 0] | byte_pairs[..., 1] << 8
