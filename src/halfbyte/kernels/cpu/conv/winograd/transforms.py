"""The transforms of minimal filtering, in integers, along one axis of a tile.

    F(4, 3)    transformed pixels    B^T d    d: 6 pixels    ->  6 positions          `input_transform`
               outputs               A^T m    m: 6 products  ->  4 outputs            `output_transform`
    F(2, 3)    the same of 4 pixels, 4 positions and 2 outputs, with the same weights: it is F(4, 3) without the positions of the points
               +2 and -2 (`SHORT_POSITIONS`), for tiles of which two outputs along an axis exist     `short_…`
    weights    G g      g: 3 weights   ->  6 positions                                `WEIGHT_TRANSFORM`

The interpolation points are 0, 1, -1, 2, -2 and infinity. B^T and A^T are those of Lavin and Gray, up to factors of a row; G is multiplied
by what makes it one of integers. In all A^T [(G g) * (B^T d)] is 24 times the convolution along an axis, and 576 = 24^2 times that of both.

Arithmetic. |d| <= 128 and |g| <= 128, so |B^T d B| <= 12800 and |G g G^T| <= 6272 fit int16; sums of their products are exact modulo 2^32.
With y < 2^25 in magnitude, which `transformed_weights` makes sure of, 576 y = 2^6 * 9 y modulo 2^32 gives y: multiplied by the inverse of 9
modulo 2^32 it is 2^6 y, which fits an int32, and a shift does the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen.ir import Value
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.layouts.convolution import Filter
from halfbyte.layouts.cpu_tiles import allocate

T = TypeVar("T", int, Value)  # integers in tests, values of generated code

OUTPUTS, PIXELS = 4, 6  # of a full tile along an axis: outputs, and pixels under them, which have as many positions
SHORT_OUTPUTS = 2  # of a short tile
SHORT_POSITIONS = 0, 1, 2, 5  # those of 0, 1, -1 and infinity
POSITIONS = PIXELS**2  # of a tile
WEIGHT_TRANSFORM = ((6, 0, 0), (-1, -1, -1), (-1, 1, -1), (1, 2, 4), (1, -2, 4), (0, 0, 3))  # G
SHIFT, INVERSE_OF_9 = 6, pow(9, -1, 1 << 32)  # divide 576 y = 2^6 * 9 y

# Positions (row, column) of a tile, by the tiles that have them: all of them, and those which tiles lack that are short horizontally,
# vertically, or either way. Positions of one class are multiplied with the same tiles.
CLASSES = [
    [(i, j) for i in range(PIXELS) for j in range(PIXELS) if (i not in SHORT_POSITIONS, j not in SHORT_POSITIONS) == lacking]
    for lacking in itertools.product((False, True), repeat=2)  # lacking in tiles that are short (vertically, horizontally)
]
ORDER = {position: n for n, position in enumerate(itertools.chain(*CLASSES))}  # of weights, transformed images and products in memory


def input_transform(d: Sequence[T]) -> list[T]:
    """Return B^T d of six pixels: six numbers."""
    a, b, c, e = d[4] - (d[2] << 2), d[3] - (d[1] << 2), d[4] - d[2], (d[3] - d[1]) << 1
    return [((d[0] - d[2]) << 2) + c, a + b, a - b, c + e, c - e, ((d[1] - d[3]) << 2) + (d[5] - d[3])]


def output_transform(m: Sequence[T]) -> list[T]:
    """Return A^T m of six products: four outputs."""
    sum_1, sum_2, difference_1, difference_2 = (m[1] + m[2]) << 2, m[3] + m[4], (m[1] - m[2]) << 2, m[3] - m[4]
    return [
        m[0] + sum_1 + sum_2,
        difference_1 + (difference_2 << 1),
        sum_1 + (sum_2 << 2),
        difference_1 + ((difference_2 + m[5]) << 3),
    ]


def short_input_transform(d: Sequence[T]) -> list[T]:
    """Return B^T d of the four pixels under a short tile: four numbers."""
    a, b = d[1] + d[2], d[1] - d[2]
    return [d[0] - d[2], a - (a << 2), (b << 2) - b, (d[3] - d[1]) << 1]


def short_output_transform(m: Sequence[T]) -> list[T]:
    """Return A^T m of four products: two outputs."""
    return [(m[0] + m[1] + m[2]) << 2, (m[1] - m[2] + m[3]) << 2]


class Axis(NamedTuple):
    """One axis of a tile: its outputs, the pixels under it, its positions among all six, and the transforms of these."""

    outputs: int
    pixels: int
    positions: tuple[int, ...]
    input_transform: Callable[[Sequence[Value]], list[Value]]
    output_transform: Callable[[Sequence[Value]], list[Value]]


FULL_AXIS = Axis(OUTPUTS, PIXELS, tuple(range(PIXELS)), input_transform, output_transform)
SHORT_AXIS = Axis(SHORT_OUTPUTS, SHORT_OUTPUTS + 2, SHORT_POSITIONS, short_input_transform, short_output_transform)


def transformed_weights(codes: Codes, sizes: Filter) -> Tensor | None:
    """Return G g G^T of all weights as the kernel reads them.

    Args:
        codes: Signed codes of 8 bits, [Co, 9 Ci].
        sizes: Of the filter; Ci is a multiple of 2 lanes.

    Returns:
        int16 [output blocks, 36, Ci / 2, 2 lanes, 2], aligned: positions in the ORDER, pairs of input channels of 2 lanes output channels,
        which are padded with zeros. None: an output may have a magnitude of 2^25 or more.
    """
    w = codes.values().reshape(sizes.out, 3, 3, sizes.channels).to(torch.int32)
    if 128 * int(w.abs().sum((1, 2, 3), dtype=torch.int64).max()) >= 1 << 31 - SHIFT:
        return None
    g = torch.tensor(WEIGHT_TRANSFORM, dtype=torch.float32, device="cpu")
    transformed = torch.einsum("ai,bj,oijc->aboc", g, g, w.float()).to(torch.int16)  # small integers: exact
    transformed = torch.stack([transformed[position] for position in ORDER])
    block = 2 * current().lanes
    blocks = -(-sizes.out // block)
    transformed = torch.nn.functional.pad(transformed, (0, 0, 0, blocks * block - sizes.out))
    transformed = transformed.view(-1, blocks, block, sizes.channels // 2, 2).permute(1, 0, 3, 2, 4)
    return allocate(2 * transformed.numel()).view(torch.int16).view(transformed.shape).copy_(transformed)
