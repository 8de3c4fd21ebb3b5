"""exp(x), SiLU(x) = x / (1 + exp(-x)), tanh(x) = 1 - 2 / (1 + exp(2 x)) and the tanh approximation of GELU of each lane, float.

    exp(x) = 2^n * exp(r),  n = round(x / ln 2),  |r| <= ln(2) / 2,  exp(r) by a polynomial of degree 7 (Cephes' expf)

ln 2 is taken off in two parts, of which the product of the first with n is exact. |exp(x) as computed - exp(x)| <= 2^-22 exp(x)
(`BOUND`). Below -87 it is 0, above 88 it is exp(88); NaN stays NaN. |tanh(x) as computed - tanh(x)| <= 2^-22.
"""

from __future__ import annotations

import math

from halfbyte.kernels.cpu.codegen.ir import Function, Value, lanes_of, vector
from halfbyte.kernels.cpu.linear.tile_spec import ROUND, ROUND_BITS

BOUND = 2.0**-22
_LEAST, _MOST = -87.0, 88.0
_LN2 = 0.693359375, -2.12194440e-4
_ROOT = math.sqrt(2 / math.pi)
_P = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(f: Function, x: Value) -> Value:
    ints = vector("i32", lanes_of(x.type))
    inside = x.max_or(_LEAST).min_or(_MOST)
    shifted = f.fma(inside, f.value(x.type, 1.4426950408889634), f.value(x.type, ROUND))
    n = shifted - ROUND
    r = inside
    for part in _LN2:
        r = f.fma(n, f.value(x.type, -part), r)
    total = f.value(x.type, _P[0])
    for c in _P[1:]:
        total = f.fma(total, r, f.value(x.type, c))
    total = f.fma(total, r * r, r) + 1.0
    power = ((shifted.bits(ints) - (ROUND_BITS - 127)) << 23).bits(x.type)
    return (x < _LEAST).select(f.value(x.type, 0.0), total * power)


def silu(f: Function, x: Value) -> Value:
    return x / (exp(f, f.value(x.type, -0.0) - x) + 1.0)


def tanh(f: Function, x: Value) -> Value:
    return f.value(x.type, 1.0) - f.value(x.type, 2.0) / (exp(f, x + x) + 1.0)


def relu_squared(f: Function, x: Value) -> Value:
    """max(x, 0)²  (So and others, arXiv:2109.08668)"""
    positive = x.max_or(0.0)
    return positive * positive


def gelu_tanh(f: Function, x: Value) -> Value:
    """x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)),  u = sqrt(2 / pi) * (x + 0.044715 * x³)  (Hendrycks and Gimpel, arXiv:1606.08415)"""
    twice = x * f.fma(x * x, f.value(x.type, -2 * _ROOT * 0.044715), f.value(x.type, -2 * _ROOT))  # -2 u
    return x / (exp(f, twice) + 1.0)
