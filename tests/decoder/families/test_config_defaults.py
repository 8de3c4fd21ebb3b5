"""Keys that a config.json omits, or spells as earlier versions of transformers did, mean what transformers reads, or are refused."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_decoders import CASES

from halfbyte.decoder.build import _check_supported, _kv_sources, _logits, _ropes, _windows, per_layer_size, projections
from halfbyte.decoder.config import TextConfig
from halfbyte.decoder.families import FAMILIES
from halfbyte.decoder.family import ACTIVATIONS, PER_LAYER_SIZE, SLIDING, Family
from halfbyte.errors import CheckpointError, UnsupportedError

BY_LAYER = {family.layer_class: (name, family) for name, family in FAMILIES.items()}
PACKAGES = sorted({BY_LAYER[case.partition(",")[0]][0] for case in CASES})
CAUSAL = [name for name in PACKAGES if FAMILIES[name].model_class is not None]
# Keys that `build.py` reads, without those that the shapes of tensors contradict where they are wrong.
KEYS = {"rope_parameters", "head_dim", "tie_word_embeddings", "sliding_window", "layer_types", "no_rope_layers"}
KEYS |= {"per_layer_config", "attention_k_eq_v", "num_kv_shared_layers", "hidden_size_per_layer_input"}
KEYS |= {"max_position_embeddings", "query_pre_attn_scalar", "attention_multiplier", "use_sliding_window", "partial_rotary_factor"}


@cache
def modeling(package: str) -> Any:
    return importlib.import_module(f"transformers.models.{package}.modeling_{package}")


@cache
def config_class(package: str) -> Any:
    return getattr(modeling(package), str(FAMILIES[package].model_class)).config_class


@cache
def written(package: str) -> dict[str, Any]:
    """The config.json of a small model of a family."""
    model = next(make for case, make in CASES.items() if BY_LAYER[case.partition(",")[0]][0] == package)()
    values = json.loads(json.dumps(model.config.to_dict()))  # keys are strings in files
    return {**values, "architectures": [FAMILIES[package].model_class]}


def transformers_values(package: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers computes with a config.json."""
    family = FAMILIES[package]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_class(package).from_dict(dict(values))
        rotary_classes = {name: value for name, value in vars(modeling(package)).items() if name.endswith("RotaryEmbedding")}
        rope_class = family.layer_class.replace("DecoderLayer", "RotaryEmbedding")
        rotary_class = rotary_classes.get(rope_class, next(iter(rotary_classes.values())))
        rotary = rotary_class(config)
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    kinds = sorted(set(types)) if family.rope_per_type else [""]
    with torch.device("meta"):  # one layer of each kind is enough, but windows differ by layer
        attention = [layer.self_attn for layer in getattr(modeling(package), str(family.model_class))(config).model.layers]
    return {
        "frequencies": [getattr(rotary, f"{kind}_inv_freq" if kind else "inv_freq") for kind in kinds],
        "cosine factor": [getattr(rotary, f"{kind}_attention_scaling" if kind else "attention_scaling") for kind in kinds],
        "head_dims": [one.head_dim for one in attention],
        "groups": [one.num_key_value_groups for one in attention],
        "scales": [one.scaling for one in attention],
        "projections": None if family.v_norm is None else [projections_of(one) for one in attention],
        "per-layer inputs": getattr(config, PER_LAYER_SIZE) if family.per_layer_input else None,
        "activation": ACTIVATIONS[getattr(config, family.activation)],
        "tied": config.tie_word_embeddings,
        "eps": getattr(config, family.norm_eps),
        "windows": [window_of(family, config, kind) for kind in types],
        "types": types if family.rope_per_type else None,
        "positions": config.max_position_embeddings,
        "rotates": None if family.rope_layers is None else [decided(family, one) for one in attention],
        "softcap": None if family.softcap is None else getattr(config, family.softcap),
        "logits": next(
            (getattr(config, key) for key in (family.logits_divisor, family.logits_multiplier, family.logits_softcap) if key), None
        ),
        "multipliers": [getattr(config, key) for key in (family.residual_multiplier, family.embedding_multiplier) if key],
        "top_k": None if family.moe is None else getattr(config, family.moe.top_k),
        "experts": [getattr(config, key) for key in moe_keys(family)],
    }


def projections_of(attention: Any) -> str:
    return "q" if attention.is_kv_shared_layer else "qk" if attention.v_proj is None else "qkv"


def window_of(family: Family, config: Any, kind: str) -> int | None:
    """The sliding window with which the model's `forward` makes the masks of a layer."""
    if family.sliding_window == "none" or (family.sliding_window == "layer_types" and kind != SLIDING):
        return None
    return config.sliding_window or None


def decided(family: Family, attention: Any) -> bool:
    assert family.rope_layers is not None
    return bool(family.rope_layers.rotates(*(getattr(attention, name) for name in family.rope_layers.attributes)))


def moe_keys(family: Family) -> list[str]:
    keys = [] if family.moe is None else [family.moe.norm_topk, family.moe.scaling_factor]
    return [key for key in keys if key is not None]


def ours(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same as `build.py` reads it."""
    config = TextConfig(values)
    family = config.family
    _check_supported(family, config)
    types, places = config.layer_types, range(config.num_hidden_layers)
    ropes, _ = _ropes(family, config)
    sources = _kv_sources(family, config)
    logits, moe = _logits(family, config), family.moe
    return {
        "frequencies": [rope._frequencies[0] for rope in ropes],
        "cosine factor": [rope._scaling for rope in ropes],
        "head_dims": [sizes.head_dim for sizes in config.layer_sizes],
        "groups": [config.num_attention_heads // sizes.num_key_value_heads for sizes in config.layer_sizes],
        "scales": [config.attention_scale(index) for index in places],
        "projections": None if family.v_norm is None else [projections(family, config, index, sources[index]) for index in places],
        "per-layer inputs": per_layer_size(family, config) if family.per_layer_input else None,
        "activation": config.activation,
        "tied": config.tied,
        "eps": config.number(family.norm_eps),
        "windows": _windows(family, config, types),
        "types": types if family.rope_per_type else None,
        "positions": config.max_positions,
        "rotates": None if family.rope_layers is None else [family.rope_layers.from_config(config, index) for index in range(len(types))],
        "softcap": None if family.softcap is None else config.get(family.softcap),
        "logits": None if logits is None else logits[1],
        "multipliers": [config.number(key) for key in (family.residual_multiplier, family.embedding_multiplier) if key],
        "top_k": None if moe is None else config.count(moe.top_k),
        "experts": [getattr(config, key) for key in moe_keys(family)],
    }


def assert_same(found: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    for name, value in wanted.items():
        if name == "frequencies":
            assert all(a.shape == b.shape for a, b in zip(found[name], value, strict=True)), (what, name)
            # powers of float32: half an ulp of an exponent of at most 1, times ln(rope_theta), which is at most 14.5 here
            assert all(torch.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(found[name], value, strict=True)), (what, name)
        elif name in ("scales", "cosine factor"):
            assert found[name] == pytest.approx(value, rel=1e-12), (what, name)
        elif name == "positions":
            assert found[name] in (None, value), (what, name)
        else:
            assert found[name] == value, (what, name)


@pytest.mark.parametrize("package", CAUSAL)
def test_a_config_says_what_it_says_to_transformers(package: str) -> None:
    assert_same(ours(written(package)), transformers_values(package, written(package)), "as written")


@pytest.mark.parametrize("package", CAUSAL)
def test_a_key_that_is_missing_is_the_default_or_refused(package: str) -> None:
    whole, family = written(package), FAMILIES[package]
    more = {family.activation, family.norm_eps, family.softcap, family.logits_softcap, family.logits_divisor, family.logits_multiplier}
    more |= {family.residual_multiplier, family.embedding_multiplier, *moe_keys(family)} | (
        set() if family.moe is None else {family.moe.top_k}
    )
    compared = 0
    for name in sorted((KEYS | (more - {None})) & set(whole)):
        values = {key: value for key, value in whole.items() if key != name}
        try:
            wanted = transformers_values(package, values)
        except Exception:  # transformers refuses it, too
            continue
        try:
            found = ours(values)
        except (UnsupportedError, CheckpointError):
            continue
        assert_same(found, wanted, f"without {name}")
        compared += 1
    assert compared, "every key was refused"


OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "linear, type": ("llama", {"rope_theta": 12345.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    "llama3, no original": (
        "llama",
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "yarn, type": ("qwen3", {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 77}}),
    "no scaling": ("llama", {"rope_theta": 700.0, "rope_scaling": None}),
    "nothing": ("olmo2", {}),
    "a part": ("stablelm", {"rope_theta": 700.0, "partial_rotary_factor": 0.5}),
    "the default part": ("glm", {"rope_theta": 700.0}),
    "original twice": (
        "phi3",
        {
            "original_max_position_embeddings": 50,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.5] * 8,
                "long_factor": [2.5] * 8,
                "original_max_position_embeddings": 60,
            },
        },
    ),
    "local and global": (
        "gemma3",
        {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "global alone": ("gemma3", {"rope_theta": 2e6}),
    "scaled but for windows": (
        "olmo3",
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 50}},
    ),
    "every second": ("gemma2", {"layer_types": None}),
    "every fourth": ("cohere2", {"layer_types": None, "sliding_window_pattern": 4}),
    "every third": ("cohere2", {"layer_types": None, "sliding_window_pattern": 3}),
    "by a pattern": ("gemma3", {"layer_types": None, "sliding_window_pattern": 2}),
}


@pytest.mark.parametrize("case", OLDER)
def test_spellings_of_earlier_versions(case: str) -> None:
    package, settings = OLDER[case]
    values = written(package) | settings
    if not case.startswith(("every", "by")):
        del values["rope_parameters"]
    values = {key: value for key, value in values.items() if key != "layer_types" or value is not None}
    assert_same(ours(values), transformers_values(package, values), case)


def test_a_rope_that_only_transformers_knows_is_refused() -> None:
    values = {key: value for key, value in written("gpt_oss").items() if key != "rope_parameters"}
    with pytest.raises(UnsupportedError, match="no rope_parameters"):
        ours({**values, "rope_theta": 150000.0})


GEMMA4: dict[str, dict[str, Any]] = {
    "keys reused": {"num_kv_shared_layers": 3},
    "no layer types": {"layer_types": None, "num_hidden_layers": 13},
    "a last layer with a window": {"layer_types": ["sliding_attention"] * 6},
    "values are keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "fewer heads, but values are not keys": {"attention_k_eq_v": False, "num_global_key_value_heads": 1},
    "heads of all layers alike": {"per_layer_config": None},
    "heads by layer": {"per_layer_config": {str(i): {"head_dim": 20, "num_key_value_heads": 3} for i in (2, 5)}},
    "rope of its own": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 7.0} for kind in (SLIDING, "full_attention")}},
}


@pytest.mark.parametrize("case", GEMMA4)
def test_gemma4_of_files_that_are_not_of_this_version(case: str) -> None:
    """As those of its authors, without `per_layer_config`."""
    left_out = {"per_layer_config", "rope_parameters"}
    types = {"layer_types": [*[SLIDING, SLIDING, "full_attention"] * 2], "num_hidden_layers": 6}
    values = {key: value for key, value in written("gemma4").items() if key not in left_out}
    values |= {"global_head_dim": 28, "attention_k_eq_v": False, **types} | GEMMA4[case]
    values = {key: value for key, value in values.items() if key != "layer_types" or value is not None}
    assert_same(ours(values), transformers_values("gemma4", values), case)


@pytest.mark.parametrize("count", [6, 5, -1, 7, 1.5, "2"])
def test_keys_that_no_layer_has_are_refused(count: Any) -> None:
    types = {"num_hidden_layers": 6, "layer_types": ["full_attention", *[SLIDING] * 4, "full_attention"], "per_layer_config": None}
    values = {**written("gemma4"), **types}
    assert _kv_sources(FAMILIES["gemma4"], TextConfig({**values, "num_kv_shared_layers": 3})) == [None, None, None, 2, 2, 0]
    with pytest.raises(CheckpointError, match=f"num_kv_shared_layers: {count!r}, of 6 layers"):
        ours({**values, "num_kv_shared_layers": count})


def test_layers_that_differ_in_what_is_not_known_are_refused() -> None:
    for package, values, said in (
        ("gemma4", {"0": {"sliding_window": 3}}, "its layers differ in sliding_window"),
        ("llama", {"1": {"num_key_value_heads": 1}}, "its layers differ in num_key_value_heads"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            ours({**written(package), "per_layer_config": values})
    for damaged in ([], {"9": {}}, {"0": 3}, {"x": {}}, "x"):
        with pytest.raises(CheckpointError, match="values by the index of a layer"):
            ours({**written("gemma4"), "per_layer_config": damaged})


def test_bidirectional_attention_is_refused() -> None:
    for value in ("all", True):
        with pytest.raises(UnsupportedError, match="use_bidirectional_attention"):
            ours({**written("gemma4"), "use_bidirectional_attention": value})
