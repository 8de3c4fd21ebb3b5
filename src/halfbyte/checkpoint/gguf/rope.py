"""Rotary position embeddings in GGUF files: `rope_parameters` of config.json <-> metadata `rope.*` and the tensors with factors.

config.py calls `read_rope` for files that are read, and `write_rope` for those that are written. The tensors hold what rotary frequencies
are divided by: `rope_freqs.weight` (Llama 3, and Gemma 4's partial rope), `rope_factors_long.weight` and `rope_factors_short.weight`
(Phi 3).

Sources: llama.cpp, src/llama-model.cpp; transformers, modeling_rope_utils.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from reprlib import repr as short

import torch
from torch import Tensor

from halfbyte.checkpoint.gguf.names import Architecture
from halfbyte.decoder.family import GGUF, SLIDING, Config
from halfbyte.errors import CheckpointError
from halfbyte.io.gguf import Value
from halfbyte.io.gguf_metadata import Metadata

FULL = "full_attention"  # of a config's `layer_types`
_DEFAULT_BASE = 10_000.0  # llama.cpp's, where a file has no rope.freq_base
_NOT_ROTATED = 1e30  # a factor from here on stands for an angle of 0: the converter writes this one
_LENGTH = "rope.scaling.original_context_length"
# All models with this scaling have these two; a file has only the factors that follow. What differs is the original context length.
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTHS = (8192, 4096, 16384, 32768, 2048, 32)
# Further parameters of yarn: key of the metadata -> that of rope_parameters.
_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}


def read_rope(
    architecture: Architecture, metadata: Metadata, names: Sequence[str], read: Callable[[str], Tensor], head_dim: int
) -> dict[str, object]:
    """Return the rope_parameters of a config.json.

    Args:
        architecture: Of the model in the file.
        metadata: Of the file.
        names: The tensors of the file.
        read: Reads one of them, which is not quantized.
        head_dim: Elements of a head.

    Raises:
        CheckpointError: The file scales positions in a way that halfbyte does not read, or its numbers are damaged.
    """
    family, gguf = architecture.family, architecture.gguf
    base = _positive(metadata, "rope.freq_base") or _DEFAULT_BASE
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": base, **_read_scaling(gguf, metadata, names, read, base, head_dim)}
    if family.rope_per_type:  # the rope of layers with a sliding window is never scaled
        local_base = base if gguf.local_rope_base is None else _positive(metadata, "rope.freq_base_swa") or gguf.local_rope_base
        return {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": local_base}}
    rotary_dim = metadata.number("rope.dimension_count", needed=False)
    if family.partial_rotary and rotary_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    return rope


def _read_scaling(
    gguf: GGUF, metadata: Metadata, names: Sequence[str], read: Callable[[str], Tensor], base: float, head_dim: int
) -> dict[str, object]:
    """Return the entries of rope_parameters that say how frequencies are scaled; none where they are not."""
    if "rope_freqs.weight" in names:
        factors = read("rope_freqs.weight").double()
        is_one, is_not_rotated = factors == 1, factors >= _NOT_ROTATED
        if bool(is_not_rotated.any()) and bool((is_one | is_not_rotated).all()):
            return {"rope_type": "proportional", "partial_rotary_factor": float(is_one.double().mean())}
        if not bool(is_one.all()):
            return _llama3_settings(factors, base, head_dim)
    original_length = metadata.number(_LENGTH, needed=False) or metadata.number("context_length", needed=False)  # llama.cpp's default
    if "rope_factors_long.weight" in names and "rope_factors_short.weight" in names:
        factor_lists = {f"{which}_factor": _read_factors(read, f"rope_factors_{which}.weight") for which in ("long", "short")}
        return {"rope_type": "longrope", **factor_lists, "original_max_position_embeddings": original_length}
    kind, factor = metadata.get("rope.scaling.type"), _positive(metadata, "rope.scaling.factor")
    if kind in (None, "none") or not factor:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or not original_length:
        raise CheckpointError(f"the GGUF file scales positions in the way {short(kind)}, which halfbyte does not read: use its safetensors")
    in_file = {config_key: metadata.number(key, float, needed=False) for key, config_key in _YARN.items()}
    rope: dict[str, object] = {"rope_type": "yarn", **gguf.yarn, "factor": factor, "original_max_position_embeddings": original_length}
    return rope | {config_key: value for config_key, value in in_file.items() if value is not None}


def _positive(metadata: Metadata, key: str) -> float | None:
    """Return a number of the metadata above 0; None where the file has none, or 0, which llama.cpp reads as none."""
    value: float | None = metadata.number(key, float, needed=False)
    if value is not None and value < 0:
        raise CheckpointError(f"the GGUF file says {value:g} for {key}, which is positive: it is damaged")
    return value or None


def _read_factors(read: Callable[[str], Tensor], name: str) -> list[float]:
    """Read factors of frequencies; raise CheckpointError for one by which nothing can be divided."""
    factors = read(name)
    if not bool((factors.isfinite() & (factors > 0)).all()):
        raise CheckpointError(f"the GGUF file has a factor in {name} that is not a positive number: it is damaged")
    return [float(factor) for factor in factors.tolist()]


def _llama3_settings(factors: Tensor, base: float, head_dim: int) -> dict[str, object]:
    """Return the settings of rope_type llama3 that give these factors, float64 [head_dim / 2]: the original context length is tried."""
    for original_length in _LLAMA3_LENGTHS:
        rope = {**_LLAMA3, "factor": float(factors.max()), "original_max_position_embeddings": original_length}
        expected = llama3_factors(rope, base, head_dim)
        if expected.shape == factors.shape and torch.allclose(expected, factors, rtol=1e-5):
            return rope
    raise CheckpointError("the GGUF file divides rotary frequencies by factors that are not Llama 3's: use its safetensors")


def llama3_factors(rope: Config, base: float, head_dim: int) -> Tensor:
    """Return what rope_type llama3 divides rotary frequencies by.

    Frequency i, base^(-2i / head_dim), has the wavelength 2 pi / frequency. Wavelengths below original / high_freq_factor keep their
    frequency, those above original / low_freq_factor have it divided by `factor`, and between them the frequency is interpolated.

    Args:
        rope: The rope_parameters.
        base: rope_theta.
        head_dim: Elements of a head.

    Returns:
        float64 [head_dim / 2].
    """
    frequency = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    wavelength = 2 * math.pi / frequency
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    smooth = (original / wavelength - low) / (high - low)
    interpolated = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(wavelength < original / high, 1.0, torch.where(wavelength > original / low, factor, interpolated))


def write_rope(architecture: Architecture, config: Config, head_dim: int) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """Return the metadata, by keys without the architecture's name, and the tensors for the rope of a config.json.

    Raises:
        CheckpointError: GGUF has no such scaling of positions.
    """
    rope: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get(FULL, rope)
    base = float(rope.get("rope_theta") or config.get("rope_theta") or _DEFAULT_BASE)
    if architecture.gguf.rope_alpha and rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        # transformers' ntk_alpha: unlike the usual rope_type "dynamic", a constant factor of the base.
        base, rope = base * float(rope["alpha"]) ** (head_dim / (head_dim - 2)), {}
    partial = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    metadata: dict[str, Value] = {"rope.freq_base": base, "rope.dimension_count": int(head_dim * partial)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return metadata, {}
    if kind == "llama3":
        return metadata, {"rope_freqs.weight": llama3_factors(rope, base, head_dim).float()}
    if kind not in ("linear", "yarn", "longrope"):
        raise CheckpointError(f"GGUF has no scaling of positions like {short(kind)}")
    if original_length := rope.get("original_max_position_embeddings"):
        metadata[_LENGTH] = int(original_length)
    if kind == "longrope":
        return metadata, {
            f"rope_factors_{which}.weight": torch.tensor(rope[f"{which}_factor"], dtype=torch.float32, device="cpu")
            for which in ("long", "short")
        }
    metadata |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    return (metadata | _yarn_metadata(architecture.gguf, rope) if kind == "yarn" else metadata), {}


def _yarn_metadata(gguf: GGUF, rope: Config) -> dict[str, Value]:
    """Return the further metadata of yarn; raise CheckpointError where llama.cpp would scale attention by another factor."""
    set_factors = [key for key in ("mscale", "mscale_all_dim", "attention_factor") if rope.get(key)]
    implied = 0.1 * math.log(float(rope["factor"])) + 1
    if "attention_factor" in set_factors and math.isclose(float(rope["attention_factor"]), implied, rel_tol=1e-6):
        set_factors.remove("attention_factor")
    if set_factors and "mscale" not in gguf.yarn:
        raise CheckpointError(f"GGUF has no scaling of positions like yarn with {set_factors[0]}")
    return {key: float(rope[config_key]) for key, config_key in _YARN.items() if rope.get(config_key) is not None}
