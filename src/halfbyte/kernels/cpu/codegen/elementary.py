"""Emits elementary functions of each lane of a float vector x: exp, SiLU, tanh, GELU and its tanh approximation; rounding to int8.

    exp(x) = 2^n * exp(r),  n = round(x / ln 2),  |r| <= ln(2) / 2,  exp(r) by a polynomial of degree 7 (Cephes' expf)

ln 2 is subtracted in two parts, of which the product of the first with n is exact. |exp(x) as computed - exp(x)| <= 2^-22 exp(x)
(`EXP_BOUND`). Below -87 it is 0, above 88 it is exp(88); NaN stays NaN. |tanh(x) as computed - tanh(x)| <= 2^-22.

    GELU(x) = x * Phi(x), Phi the normal distribution (D. Hendrycks, K. Gimpel, arXiv:1606.08415)
    Phi(x) = 1/2 + x * P(x^2) / Q(x^2)   for |x| <= 5.6;   beyond, Phi(-5.6) = 1.1e-8 counts as 0

P and Q have degree 5, fitted to the least maximum of the error, 1e-8. All coefficients are positive, so that in float32 each sum is
exact to a few units of its last place: |GELU(x) as computed - GELU(x)| <= 2^-20 * |x| follows (`GELU_BOUND`), and 2^-22 * |x| was seen.
That of -infinity is 0, NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfbyte.kernels.cpu.codegen.ir import Function, Value, lanes_of, vector
from halfbyte.kernels.cpu.linear.tile_spec import ROUND, ROUND_BITS

EXP_BOUND, GELU_BOUND = 2.0**-22, 2.0**-20
_LEAST, _MOST = -87.0, 88.0  # exp of less is 0, of more is exp(88)
_LOG2_E = 1.4426950408889634
_LN2 = 0.693359375, -2.12194440e-4  # the two parts of ln 2
_ROOT = math.sqrt(2 / math.pi)
_EXP_P = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_FAR = 5.6  # beyond, Phi is 0 or 1
_GELU_P = (
    0.398942232131958,
    0.0343761146068573,
    0.0047072600573301315,
    0.0001738508726703003,
    6.356537141982699e-06,
    2.2145332678746854e-08,
)
_GELU_Q = (1.0, 0.25283384323120117, 0.028940092772245407, 0.0019129789434373379, 7.510199793614447e-05, 1.1802129620264168e-06)


def rounded_codes(x: Value) -> Value:
    """Return floats within [-128, 127] as int8, rounded to nearest, ties to even. The low bits of ROUND + x are the nearest integer."""
    return (x + ROUND).bits(vector("i32", lanes_of(x.type))).to("i8")


def exp(f: Function, x: Value) -> Value:
    """exp of each lane of x, float"""
    ints = vector("i32", lanes_of(x.type))
    inside = x.max_keeping_nan(_LEAST).min_keeping_nan(_MOST)
    shifted = f.fma(inside, f.value(x.type, _LOG2_E), f.value(x.type, ROUND))
    n = shifted - ROUND
    r = inside
    for part in _LN2:
        r = f.fma(n, f.value(x.type, -part), r)
    total = f.value(x.type, _EXP_P[0])
    for c in _EXP_P[1:]:
        total = f.fma(total, r, f.value(x.type, c))
    total = f.fma(total, r * r, r) + 1.0
    power = ((shifted.bits(ints) - (ROUND_BITS - 127)) << 23).bits(x.type)
    return (x < _LEAST).select(f.value(x.type, 0.0), total * power)


def silu(f: Function, x: Value) -> Value:
    """x / (1 + exp(-x))"""
    return x / (exp(f, f.value(x.type, -0.0) - x) + 1.0)


def tanh(f: Function, x: Value) -> Value:
    """1 - 2 / (1 + exp(2 x))"""
    return f.value(x.type, 1.0) - f.value(x.type, 2.0) / (exp(f, x + x) + 1.0)


def relu_squared(f: Function, x: Value) -> Value:
    """max(x, 0)²  (So and others, arXiv:2109.08668)"""
    positive = x.max_keeping_nan(0.0)
    return positive * positive


def gelu_tanh(f: Function, x: Value) -> Value:
    """x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)),  u = sqrt(2 / pi) * (x + 0.044715 * x³)  (Hendrycks and Gimpel, arXiv:1606.08415)"""
    twice = x * f.fma(x * x, f.value(x.type, -2 * _ROOT * 0.044715), f.value(x.type, -2 * _ROOT))  # -2 u
    return x / (exp(f, twice) + 1.0)


def gelu(f: Function, x: Value) -> Value:
    """x * Phi(x)"""
    near = x.max_keeping_nan(-_FAR).min_keeping_nan(_FAR)
    square = near * near
    phi = near * _polynomial(f, _GELU_P, square) / _polynomial(f, _GELU_Q, square) + 0.5
    return (x < -_FAR).select(f.value(x.type, 0.0), x * phi)


def _polynomial(f: Function, coefficients: Sequence[float], x: Value) -> Value:
    """Return the sum of coefficients[i] * x^i."""
    total = f.value(x.type, coefficients[-1])
    for c in coefficients[-2::-1]:
        total = f.fma(total, x, f.value(x.type, c))
    return total
