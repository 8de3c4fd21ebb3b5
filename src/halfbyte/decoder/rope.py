"""Rotary position embeddings: the frequencies of a head and their scaling for long contexts.

    cos[p, i] = s * cos(p * f[i]),   sin[p, i] = s * sin(p * f[i]),   i in 0 … rotary_dim / 2 - 1

Su et al., RoFormer, 2021. The kinds of scaling, by `rope_type` of a config's `rope_parameters`: "default" (none), "linear" (Chen et al.,
2023), "llama3" (Llama 3.1), "yarn" (Peng et al., 2023), "longrope" (Ding et al., 2024; the first Phi-3 called it "su" and "yarn") and
"proportional" (Gemma 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from halfbyte.decoder.config import is_number
from halfbyte.errors import CheckpointError, UnsupportedError

_LEAST_POSITIONS = 2048  # of `RopeTables`
_LONG = 1 << 62  # a length beyond every `switch`
_NAMES = {"default", "linear", "llama3", "yarn", "longrope", "proportional"}


class Rope:
    """Cosines and sines of positions.

    Attributes:
        rotary_dim: Elements of a head that are rotated.
        switch: Sequence length from which on `long_frequencies` apply ("longrope"); None where they never do.
    """

    def __init__(
        self,
        frequencies: Tensor,
        scaling: float = 1.0,
        *,
        long_frequencies: Tensor | None = None,
        switch: int | None = None,
    ) -> None:
        """Make a rotary embedding of frequencies [rotary_dim / 2], float32, with the factor `scaling` of cosines and sines."""
        self.rotary_dim, self.switch = 2 * len(frequencies), switch
        self._frequencies = (frequencies, frequencies if long_frequencies is None else long_frequencies)
        self._scaling = scaling

    @property
    def is_finite(self) -> bool:
        """Whether all frequencies are finite, not all of them 0, and the factor of cosines is finite."""
        finite = all(bool(f.isfinite().all()) and bool(f.any()) for f in self._frequencies)
        return finite and self._scaling <= torch.finfo(torch.float32).max

    def tables(self, start: int, stop: int, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each [1, stop - start, rotary_dim / 2] float32, of the positions start … stop - 1 in a sequence of
        a length, which decides between short and long frequencies."""
        is_long = self.switch is not None and length > self.switch
        angles = torch.arange(start, stop, dtype=torch.float32, device="cpu")[None, :, None] * self._frequencies[is_long]
        return angles.cos() * self._scaling, angles.sin() * self._scaling


class RopeTables:
    """Cosines and sines of all ropes of a model on a device, computed for more positions when a sequence needs them.

    Attributes:
        tables: Of each rope, [2, rows, rotary_dim / 2] float32: cosines, then sines. Row p has position p. With "longrope" the rows
            `count` … 2 * count - 1 have the same positions with the frequencies of long sequences.
        count: Number of positions.
    """

    def __init__(self, ropes: Sequence[Rope], device: torch.device) -> None:
        """Make tables without positions."""
        self._ropes, self._device = ropes, device
        self._switch = min((rope.switch for rope in ropes if rope.switch is not None), default=None)
        self.tables: list[Tensor] = []
        self.count = 0

    def reserve(self, count: int) -> None:
        """Compute tables for at least so many positions, in other memory, where there are fewer."""
        if count <= self.count:
            return
        self.count = max(_LEAST_POSITIONS, 1 << (count - 1).bit_length())
        lengths = [1] if self._switch is None else [1, _LONG]
        self.tables = [
            torch.cat([torch.cat(rope.tables(0, self.count, length)) for length in lengths], 1).to(self._device) for rope in self._ropes
        ]

    def row(self, position: int, length: int) -> int:
        """Return the row of a position in a sequence of a length."""
        return position + (self.count if self._switch is not None and length > self._switch else 0)


@dataclass(frozen=True, slots=True)
class _Parameters:
    """`rope_parameters` of a config, checked where they are read."""

    values: Mapping[str, Any]

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if not is_number(value) or value <= 0:
            raise CheckpointError(f"rope_parameters of config.json say {name}: {short(value)}, a positive number: the file is damaged")
        return float(value)

    def factors(self, name: str, count: int) -> Tensor:
        values = self.values.get(name)
        numbers = isinstance(values, list) and all(is_number(v) and v > 0 for v in values)
        if not numbers or len(values or ()) != count:
            raise CheckpointError(f"rope_parameters of config.json have no {count} positive numbers as {name}: the file is damaged")
        return torch.tensor(values, dtype=torch.float32, device="cpu")


def make_rope(parameters: Mapping[str, object], head_dim: int, max_positions: int | None, *, partial: bool = False) -> Rope:
    """Compute the frequencies of a rotary embedding.

    Args:
        parameters: `rope_parameters` of a config: rope_type, rope_theta and what the type needs.
        head_dim: Elements of a head.
        max_positions: `max_position_embeddings` of the config.
        partial: Whether the family rotates only `partial_rotary_factor` of each head.

    Raises:
        UnsupportedError: The rope_type is not known.
        CheckpointError: A parameter is missing or no positive number.
    """
    kind = parameters.get("rope_type", "default")
    if kind == "su" or (kind == "yarn" and parameters.get("long_factor") is not None):
        kind = "longrope"
    if not isinstance(kind, str) or kind not in _NAMES:
        raise UnsupportedError(f"rope_type is one of {', '.join(sorted(_NAMES))}, got {short(kind)}: use transformers, load(dir)")
    try:
        rope = _rope_of(kind, parameters, head_dim, max_positions, partial)
    except ArithmeticError as e:  # of values that are allowed one by one
        raise _no_frequencies(kind) from e
    if not rope.is_finite:
        raise _no_frequencies(kind)
    return rope


def _no_frequencies(kind: str) -> CheckpointError:
    return CheckpointError(f"rope_parameters of config.json give no finite frequencies of rope_type {kind}: the file is damaged")


def _rope_of(kind: str, parameters: Mapping[str, object], head_dim: int, max_positions: int | None, partial: bool) -> Rope:
    p = _Parameters({name: value for name, value in parameters.items() if value is not None or name == "truncate"})
    factor = p.number("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * factor) if partial else head_dim
    if factor > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(f"config.json has {rotary_dim} of {head_dim} elements of a head rotated, an even number is: it is damaged")
    theta = p.number("rope_theta", 10_000.0)
    powers = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").float() / rotary_dim)
    plain = 1.0 / powers
    if kind == "linear":
        return Rope(plain / p.number("factor"))
    if kind == "llama3":
        return Rope(_llama3(p, plain, max_positions))
    if kind == "yarn":
        return _yarn(p, plain, theta, rotary_dim, max_positions)
    if kind == "longrope":
        return _longrope(p, powers, max_positions)
    if kind == "proportional":
        return Rope(_proportional(p, theta, head_dim, factor))
    return Rope(plain)


def _llama3(p: _Parameters, plain: Tensor, max_positions: int | None) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, and interpolate in between."""
    factor, low, high = (p.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = p.number("original_max_position_embeddings", max_positions)
    wavelengths = 2 * math.pi / plain
    scaled = torch.where(wavelengths > original / low, plain / factor, plain)
    smooth = (original / wavelengths - low) / (high - low) if high != low else torch.ones_like(plain)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn(p: _Parameters, plain: Tensor, theta: float, dim: int, max_positions: int | None) -> Rope:
    """Interpolate by a ramp between the dimensions of `beta_fast` and `beta_slow` rotations, and scale scores by temperature."""
    original = p.number("original_max_position_embeddings", max_positions)
    factor = p.number("factor", None if max_positions is None else max_positions / original)
    scaling = p.values.get("attention_factor")
    if scaling is None:
        mscale, mscale_all = p.values.get("mscale"), p.values.get("mscale_all_dim")
        if mscale and mscale_all:
            scaling = _mscale(factor, p.number("mscale")) / _mscale(factor, p.number("mscale_all_dim"))
        else:
            scaling = _mscale(factor, 1.0)
    else:
        scaling = p.number("attention_factor")
    fast, slow = (
        dim * math.log(original / (p.number(name, default) * 2 * math.pi)) / (2 * math.log(theta))
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    truncate = p.values.get("truncate", True)
    if truncate not in (True, False, None):
        raise CheckpointError(f"rope_parameters of config.json say truncate: {short(truncate)}, true or false: the file is damaged")
    if truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    low, high = max(fast, 0), min(slow, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return Rope(plain / factor * ramp + plain * (1 - ramp), scaling)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(p: _Parameters, powers: Tensor, max_positions: int | None) -> Rope:
    """Divide each frequency by a factor of its own, another one for sequences beyond the original length."""
    original = int(p.number("original_max_position_embeddings", max_positions))
    if original < 2:
        raise CheckpointError(f"config.json says original_max_position_embeddings: {original}, at least 2: the file is damaged")
    short, long = (1.0 / (p.factors(name, len(powers)) * powers) for name in ("short_factor", "long_factor"))
    scaling = p.values.get("attention_factor")
    if scaling is None:
        factor = p.number("factor", None if max_positions is None else max_positions / original)
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    else:
        scaling = p.number("attention_factor")
    return Rope(short, scaling, long_frequencies=long, switch=original)


def _proportional(p: _Parameters, theta: float, head_dim: int, factor: float) -> Tensor:
    """Give the first `partial_rotary_factor` of the frequencies their values over the whole head, and the others 0."""
    angles = int(factor * head_dim // 2)
    frequencies = 1.0 / theta ** (torch.arange(0, 2 * angles, 2, dtype=torch.int64, device="cpu").float() / head_dim)
    return torch.cat((frequencies, frequencies.new_zeros(head_dim // 2 - angles))) / p.number("factor", 1.0)
