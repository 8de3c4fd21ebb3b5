"""The text part of a config.json, checked: what `build.py` reads of it, with the names of earlier versions of transformers.

A value that decides what is computed is never guessed: where config.json lacks it, and neither a general rule nor the family's defaults
give it, reading it raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any, NamedTuple

from halfbyte.decoder.families import FAMILIES
from halfbyte.decoder.family import ACTIVATIONS, SLIDING, Family
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.kernels.layer_kinds import GateFunction

_MOST_LAYERS = 10_000
_MOST_DIM = 1 << 16  # of a head
_FULL = "full_attention"
_LARGEST = 3.4028234e38  # float32
_THETA = 10_000.0  # where neither config.json nor the family's defaults say
_BY_LAYER = "per_layer_config"
_ORIGINAL = "original_max_position_embeddings"  # of config.json itself it is stronger than of `rope_parameters`, as in transformers
_BY_MODEL = {family.model_class: family for family in FAMILIES.values() if family.model_class is not None}


def find_family(values: Mapping[str, object]) -> Family | None:
    """Find the family of a config.json; None where its architecture is in none."""
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return _BY_MODEL.get(name) if isinstance(name, str) else None


def family_of_config(values: Mapping[str, object]) -> Family:
    """Find the family of a config.json.

    Raises:
        UnsupportedError: Its architecture is in no family.
    """
    family = find_family(values)
    if family is None:
        name = values.get("architectures") or values.get("model_type")
        raise UnsupportedError(f"architecture {short(name)} is in no family of halfbyte's own decoder")
    return family


class LayerSizes(NamedTuple):
    """Sizes in which layers may differ."""

    head_dim: int
    num_key_value_heads: int


class TextConfig:
    """Values of a config.json by attribute.

    Raises:
        UnsupportedError: A value is missing, for which transformers may have a default.
        CheckpointError: A value is of a wrong type or size.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        """Check sizes and derive what follows from other values: head_dim, num_key_value_heads, rope_parameters, layer_types.

        Raises:
            UnsupportedError: The architecture is in no family.
        """
        self.family = family_of_config(values)
        stated = {name: value for name, value in values.items() if value is not None or name not in ("rope_parameters", "rope_scaling")}
        self._values = {**dict(self.family.defaults), **stated}
        self.num_hidden_layers = self.count("num_hidden_layers", _MOST_LAYERS)
        self.hidden_size, self.num_attention_heads = self.count("hidden_size"), self.count("num_attention_heads")
        if self._values.get("num_key_value_heads") is None:
            self._values["num_key_value_heads"] = self.num_attention_heads
        self.num_key_value_heads = self.count("num_key_value_heads")
        if self._values.get("head_dim") is None:
            self._values["head_dim"] = self.hidden_size // self.num_attention_heads
        self.head_dim = self.count("head_dim", _MOST_DIM)
        self.layer_types = self._layer_types()
        self.layer_sizes = [self._sizes(overrides) for overrides in self._overrides()]

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or name not in self._values:
            raise UnsupportedError(f"config.json has no {name}: let a current version of transformers write it again")
        return self._values[name]

    def get(self, name: str, default: object = None) -> Any:
        """Return a value, or `default` where there is none."""
        return self._values.get(name, default)

    def count(self, name: str, most: int = 1 << 32) -> int:
        """Return a positive integer. Raises CheckpointError for anything else."""
        return _count(name, getattr(self, name) if name not in vars(self) else vars(self)[name], most)

    def count_of(self, name: str, layer: int) -> int:
        """Return a positive integer that is the same for all layers, or that of one layer where there is one for each."""
        values = getattr(self, name)
        if not isinstance(values, list):
            return self.count(name)
        if len(values) != self.num_hidden_layers or type(values[layer]) is not int or values[layer] < 1:
            raise CheckpointError(f"config.json says {name}: {short(values)}, a positive integer for each layer: the file is damaged")
        return int(values[layer])

    def number(self, name: str) -> float:
        """Return a finite number. Raises CheckpointError for anything else."""
        value = getattr(self, name)
        if not is_number(value):
            raise CheckpointError(f"config.json says {name}: {short(value)}, a number: the file is damaged")
        return float(value)

    def positive(self, name: str) -> float:
        """Return a finite number above 0. Raises CheckpointError for anything else."""
        value = self.number(name)
        if value <= 0:
            raise CheckpointError(f"config.json says {name}: {short(value)}, a number above 0: the file is damaged")
        return value

    def truth(self, name: str) -> bool:
        """Return true or false. Raises CheckpointError for anything else."""
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json says {name}: {short(value)}, true or false: the file is damaged")
        return value

    @property
    def activation(self) -> GateFunction:
        """The activation function of its MLPs.

        Raises:
            UnsupportedError: There is no kernel for it.
        """
        name = self.get(self.family.activation) or self.family.default_activation
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise UnsupportedError(f"its activation is {short(name)}, not one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    @property
    def eps(self) -> float:
        """What norms add to the mean of squares."""
        value = self.number(self.family.norm_eps)
        if value < 0:
            raise CheckpointError(f"config.json says {self.family.norm_eps}: {short(value)}, 0 or more: the file is damaged")
        return value

    def attention_scale(self, index: int) -> float:
        """Return the factor of a layer's attention scores."""
        scale: object = None
        with contextlib.suppress(TypeError, ValueError, ArithmeticError):
            scale = self.family.attention_scale(self, self.layer_sizes[index].head_dim)
        if not is_number(scale) or not isinstance(scale, float):
            raise CheckpointError("config.json gives no finite factor of attention scores: the file is damaged")
        return scale

    def rotates(self, index: int) -> bool:
        """Whether a layer has rope."""
        try:
            return self.family.rope_layers is None or self.family.rope_layers.from_config(self, index)
        except (TypeError, LookupError) as e:
            raise CheckpointError("config.json does not say for each layer whether it has rope: the file is damaged") from e

    @property
    def tied(self) -> bool:
        """Whether input and output embeddings are tied."""
        return self.family.tie_word_embeddings if self.get("tie_word_embeddings") is None else self.truth("tie_word_embeddings")

    def _layer_types(self) -> list[str]:
        """Read the type of each layer, from `layer_types` or the `sliding_window_pattern` of earlier versions; full attention otherwise."""
        layers, found = self.num_hidden_layers, self.get("layer_types")
        pattern = self.get("sliding_window_pattern")
        if found is None and type(pattern) is int and pattern > 0:
            found = [_FULL if (index + 1) % pattern == 0 else SLIDING for index in range(layers)]
        if found is None:
            return [_FULL] * layers
        if not isinstance(found, list) or len(found) != layers or not all(isinstance(kind, str) for kind in found):
            raise CheckpointError(f"config.json says layer_types: {short(found)}, a name for each of {layers} layers: the file is damaged")
        return [*found[:-1], _FULL] if self.family.full_attention_last else found

    def _overrides(self) -> list[Mapping[str, object]]:
        """Values that each layer has in place of those of the whole config."""
        layers, stored, sizes = self.num_hidden_layers, self.get(_BY_LAYER), self.family.full_attention_sizes
        if _BY_LAYER not in self._values:
            holds = (size for size in sizes if size.condition is None or self.truth(size.condition))
            overrides = {size.name: self.get(size.key) for size in holds if self.get(size.key) is not None}
            return [overrides if kind == _FULL else {} for kind in self.layer_types]
        stored = {} if stored is None else stored
        numbers = {str(index) for index in range(layers)}
        if not isinstance(stored, Mapping) or not numbers.issuperset(stored) or not all(isinstance(v, Mapping) for v in stored.values()):
            raise CheckpointError(f"config.json says {_BY_LAYER}: {short(stored)}, values by the index of a layer: the file is damaged")
        differing = {name for values in stored.values() for name in values} - {size.name for size in sizes}
        if differing:
            raise UnsupportedError(f"its layers differ in {min(differing, key=str)}")
        return [stored.get(str(index), {}) for index in range(layers)]

    def _sizes(self, overrides: Mapping[str, object]) -> LayerSizes:
        head_dim = _count("head_dim", overrides.get("head_dim", self.head_dim), _MOST_DIM)
        kv_heads = _count("num_key_value_heads", overrides.get("num_key_value_heads", self.num_key_value_heads))
        if self.num_attention_heads % kv_heads:
            raise CheckpointError(f"config.json has {self.num_attention_heads} heads and {kv_heads} of keys and values: these divide those")
        return LayerSizes(head_dim, kv_heads)

    def rope_parameters(self) -> dict[str, object]:
        """Return `rope_parameters`, also from `rope_theta` and `rope_scaling` of earlier versions."""
        return self._whole_rope() | self._stored_rope()

    def rope_parameters_of(self, kind: str) -> dict[str, object]:
        """Return `rope_parameters` of layers of a type, where each type has its own."""
        stored, local = self._stored_rope(), self.get("rope_local_base_freq")
        by_type = isinstance(stored.get(kind), Mapping)
        if kind == SLIDING and local is not None:
            whole = {**self._whole_rope(), "rope_theta": local}
        else:
            whole = self._whole_rope()
        if not by_type and kind == SLIDING and self.get("rope_parameters") is None:
            return whole  # `rope_scaling` of earlier versions is of full attention
        return whole | (dict(stored[kind]) if by_type else stored)

    def _whole_rope(self) -> dict[str, object]:
        """Values of config.json itself, which `rope_parameters` may have, too."""
        theta = self.get("rope_theta", _THETA)
        whole = {"rope_theta": theta, **{name: self.get(name) for name in ("partial_rotary_factor", _ORIGINAL)}}
        return {name: value for name, value in whole.items() if value is not None}

    def _stored_rope(self) -> dict[str, Any]:
        """`rope_parameters`, or `rope_scaling` of earlier versions."""
        name = "rope_scaling" if self.get("rope_parameters") is None else "rope_parameters"
        if self.get(name) == "":
            raise UnsupportedError("config.json has no rope_parameters: let a current version of transformers write it again")
        stored = self.get(name) or {}
        if not isinstance(stored, Mapping):
            raise CheckpointError(f"config.json says {name}: {short(stored)}, an object: the file is damaged")
        stored = dict(stored) | ({} if self.get(_ORIGINAL) is None else {_ORIGINAL: self.get(_ORIGINAL)})
        return {"rope_type": stored["type"], **stored} if "type" in stored else stored

    @property
    def max_positions(self) -> int | None:
        """`max_position_embeddings`; None where config.json does not say."""
        return None if self.get("max_position_embeddings") is None else self.count("max_position_embeddings")


def _count(name: str, value: object, most: int = 1 << 32) -> int:
    if type(value) is not int or not 0 < value <= most:
        raise CheckpointError(f"config.json says {name}: {short(value)}, an integer in 1 … {most}: the file is damaged")
    return value


def is_number(value: object) -> bool:
    """Whether a value of a JSON file is a finite number that a float32 holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST  # not NaN
