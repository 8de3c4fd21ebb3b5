"""Parts of live decoder layers of transformers, found by the table of model families, `decoder/families.py`."""

from __future__ import annotations

from typing import Any

from halfbyte.decoder.families import FAMILIES, family_of_layer
from halfbyte.decoder.family import Family
from halfbyte.integrations.replaced import name_in_transformers
from halfbyte.kernels.layer_kinds import Projections, projections_of

NAMES = sorted(family.layer_class for family in FAMILIES.values())


def family_of(layer: Any) -> Family | None:
    """Return the family of a decoder layer; None where it is in none."""
    return family_of_layer(name_in_transformers(layer))


def known(layer: Any) -> Family:
    """That of a layer which is one of FAMILIES."""
    family = family_of(layer)
    assert family is not None
    return family


def other(layer: Any) -> str | None:
    """The attribute of the config with which a layer of a known family computes something else, and its value; or None."""
    config, family = layer.self_attn.config, known(layer)
    wrong = [name for name in family.unsupported if not _is_nothing(getattr(config, name))]
    wrong += [name for name, value in family.required if getattr(config, name) != value]
    return f"{wrong[0]} = {getattr(config, wrong[0])!r}" if wrong else None


def _is_nothing(value: object) -> bool:
    return value is None or value is False or (type(value) is int and value == 0)


def mlp_of(layer: Any) -> Any:
    """What comes after its attention."""
    return getattr(layer, known(layer).mlp)


def added_by(layer: Any) -> float:
    """The factor of what its halves add."""
    name = known(layer).residual_multiplier
    return 1.0 if name is None else float(getattr(layer, name))


def made_of(layer: Any) -> Projections:
    """What it makes of its input, as `ops.decoder.Heads` has it: some configs of a family leave out values, or keys and values."""
    names = known(layer).qkv
    return "qkv" if len(names) == 1 else projections_of(sum(getattr(layer.self_attn, name, None) is not None for name in names))


def per_layer_of(layer: Any) -> tuple[Any, Any, Any] | None:
    """The gate, the projection and the norm of its own input, if it has one."""
    names = known(layer).per_layer_input
    if names is None or not hasattr(layer, names[0]):
        return None
    gate, projection, norm = (getattr(layer, name) for name in names)
    return gate, projection, norm


def borrows(layer: Any) -> bool:
    """Whether it reads keys and values of an earlier layer."""
    sharing = known(layer).kv_sharing
    return sharing is not None and bool(getattr(layer.self_attn, sharing.reuses))


def lends(layer: Any) -> bool:
    """Whether others may read its keys and values."""
    sharing = known(layer).kv_sharing
    return sharing is not None and bool(getattr(layer.self_attn, sharing.provides))


def shared_as(layer: Any) -> str | None:
    """The key in `shared_kv_states` of what it reads, or of what others read."""
    sharing = known(layer).kv_sharing
    return None if sharing is None else getattr(layer.self_attn, sharing.kind)


def lender(layer: Any) -> int | None:
    """The index of the layer whose keys and values it reads; None where it is none."""
    sharing, attention = known(layer).kv_sharing, layer.self_attn
    if sharing is None:
        return None
    kinds, modes, own = attention.config.layer_types, getattr(attention.config, sharing.modes, None), shared_as(layer)
    if modes is None:
        others = len(kinds) - getattr(attention.config, sharing.layers)
        return next((i for i in reversed(range(others)) if kinds[i] == own), None)
    found = (i for i, (kind, mode) in enumerate(zip(kinds, modes, strict=True)) if kind == own and mode == "store")
    return next(found, None)


def nearest(layer: Any) -> int | None:
    """The position from which on queries have a factor; None where they have none."""
    near = known(layer).query_scale_from
    return None if near is None else int(layer.self_attn.config.rope_parameters[near])


def turned(layer: Any) -> int:
    """Elements of a head that have positions."""
    family, attention = known(layer), layer.self_attn
    where = family.rope_layers
    if where is not None and not where.rotates(*(getattr(attention, name) for name in where.attributes)):
        return 0
    dim: int = attention.head_dim
    rope = getattr(attention.config, "rope_parameters", None) or {}
    return int(dim * rope.get("partial_rotary_factor", 1.0)) if family.partial_rotary else dim
