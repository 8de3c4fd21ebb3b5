"""Sums of blocks that become floats by what they begin at, `tile_spec.ROUND`, and points that are taken off so."""

from __future__ import annotations

import torch

from halfbyte.formats.spec import Format
from halfbyte.kernels.cpu.codegen.isa import ISA

HIGHEST_CODE = 15  # of 4 bits


def biasable(fmt: Format, block: int) -> bool:
    """Whether ROUND + a block's sum of products is a float exactly, and ROUND times a scale, too; and sums of activations are int16."""
    largest = 1 << (fmt.code_bits - 1) if fmt.signed else (1 << fmt.bits) - 1
    fits = block * largest * 127 <= 1 << 22 and (fmt.zero != "point" or block * 127 < 1 << 15)
    return fmt.scale == torch.float16 and fits


def highest_point(isa: ISA, bits: int, zero: str, biased: bool) -> int:
    """A point that is taken off by what sums begin at, so that codes from which points were taken instead may be unsigned; else 0."""
    return HIGHEST_CODE if biased and zero == "point" and bits == 4 and isa.tuning.expansion is not None else 0
