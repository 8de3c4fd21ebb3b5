"""The ends of a clamp as custom ops take them: None for an infinite one, since AOTInductor's packages cannot store infinite numbers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_INFINITE = float("inf")


def optional(low: float, high: float) -> tuple[float | None, float | None]:
    """The ends for an op."""
    return None if low == -_INFINITE else low, None if high == _INFINITE else high


def ends(low: float | None, high: float | None) -> tuple[float, float]:
    """The inverse of `optional`."""
    return -_INFINITE if low is None else low, _INFINITE if high is None else high


def bounded(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run`, whose last two arguments are the ends of a clamp, with those of an op."""

    def with_ends(*arguments: *tuple[*tuple[object, ...], float | None, float | None]) -> Tensor:
        *others, low, high = arguments
        return run(*others, *ends(low, high))

    return with_ends
