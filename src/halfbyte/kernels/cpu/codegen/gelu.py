"""GELU(x) = x * Phi(x), Phi the normal distribution (D. Hendrycks, K. Gimpel, arXiv:1606.08415), not its tanh approximation.

    Phi(x) = 1/2 + x * P(x^2) / Q(x^2)   for |x| <= 5.6;   beyond, Phi(-5.6) = 1.1e-8 counts as 0

P and Q have degree 5, fitted to the least maximum of the error, 1e-8. All coefficients are positive, so that in float32 each sum is
exact to a few units of its last place: |GELU(x) as computed - GELU(x)| <= 2^-20 * |x| follows (`BOUND`), and 2^-22 * |x| was seen.
That of -infinity is 0, NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.kernels.cpu.codegen.ir import Function, Value

BOUND = 2.0**-20
_FAR = 5.6
_P = (0.398942232131958, 0.0343761146068573, 0.0047072600573301315, 0.0001738508726703003, 6.356537141982699e-06, 2.2145332678746854e-08)
_Q = (1.0, 0.25283384323120117, 0.028940092772245407, 0.0019129789434373379, 7.510199793614447e-05, 1.1802129620264168e-06)


def gelu(f: Function, x: Value) -> Value:
    """GELU of each lane of x, float."""
    near = x.max_or(-_FAR).min_or(_FAR)
    square = near * near
    phi = near * _polynomial(f, _P, square) / _polynomial(f, _Q, square) + 0.5
    return (x < -_FAR).select(f.value(x.type, 0.0), x * phi)


def _polynomial(f: Function, coefficients: Sequence[float], x: Value) -> Value:
    total = f.value(x.type, coefficients[-1])
    for c in coefficients[-2::-1]:
        total = f.fma(total, x, f.value(x.type, c))
    return total
