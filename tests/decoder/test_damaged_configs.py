"""A config.json with values that no model has, or that contradict the tensors, is refused in one sentence."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")

from tiny_decoders import CASES

import halfbyte as hb
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError
from halfbyte.language.checkpoint_tensors import open_checkpoint

KINDS = [
    "LlamaDecoderLayer",
    "Gemma2DecoderLayer",
    "SmolLM3DecoderLayer",
    "Qwen3MoeDecoderLayer",
    "GraniteDecoderLayer",
    "Phi3DecoderLayer, longrope",
    "Gemma4TextDecoderLayer, shared keys",
]
NONSENSE = [
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    1 << 40,
    10**400,
    0.5,
    -2.5,
    math.nan,
    math.inf,
    1e300,
    "",
    "x",
    "128",
    [],
    {},
    [None],
    {"a": []},
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Any]]:
    found = {}
    for kind in KINDS:
        torch.manual_seed(7)
        model = CASES[kind]().eval()
        hb.quantize_(model, hb.Config("q8_0", compute="float"))
        folder = tmp_path_factory.mktemp("model") / "model"
        hb.save(model, folder)
        found[kind] = open_checkpoint(folder)
    return found


def outcome(config: dict[str, Any], tensors: Any) -> None:
    """A model that computes finite logits, or one sentence."""
    try:
        model = CpuModel(build_spec(config, tensors))
    except (CheckpointError, UnsupportedError, ArgumentError) as e:  # `LanguageModel.open` makes a CheckpointError of the last
        said = str(e)
    else:
        logits = model.prefill([3, 4, 5], Cache(model.spec))
        assert torch.isfinite(logits).all()
        return
    assert len(said) < 600
    assert "\n" not in said


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    here = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return here + [place for key, each in inner for place in places(each, (*path, key))]


def replaced(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    where: Any = config
    for key in path[:-1]:
        where = where[key]
    where[path[-1]] = value
    return config


class Remembered:
    """Tensors that are read once."""

    def __init__(self, tensors: Any) -> None:
        self._tensors, self._found = tensors, dict[Any, Any]()
        self.has, self.same = tensors.has, tensors.same

    def _once(self, method: str, *arguments: Any, **keywords: bool) -> Any:
        key = method, *arguments, *keywords.values()
        if key not in self._found:
            self._found[key] = getattr(self._tensors, method)(*arguments, **keywords)
        return self._found[key]

    def weight(self, names: Any, bias: Any = (), *, floats: bool = False) -> Any:
        return self._once("weight", tuple(names), tuple(bias), floats=floats)

    def tensor(self, name: str) -> Any:
        return self._once("tensor", name)

    def table(self, name: str) -> Any:
        return self._once("table", name)

    def each(self, reads: Any) -> list[Any]:
        return [read() for read in reads]


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_is_read_or_refused(kind: str, opened: dict[str, tuple[dict[str, Any], Any]]) -> None:
    config, tensors = opened[kind][0], Remembered(opened[kind][1])
    ignored = (
        "bos",
        "eos",
        "pad",
        "id2label",
        "label2id",
        "dtype",
        "transformers",
        "initializer",
        "attention_dropout",
        "use_cache",
        "return",
    )
    interesting = [path for path in places(config) if not str(path[0]).startswith(ignored)]

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(interesting), st.sampled_from(NONSENSE))
    def check(path: tuple[Any, ...], value: Any) -> None:
        outcome(replaced(config, path, value), tensors)

    check()


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_attention_heads", [3, 12, 5]),
        ("num_key_value_heads", [1, 3, 6]),
        ("head_dim", [8, 32, 15, 1 << 16]),
        ("hidden_size", [32, 96, 1 << 31]),
        ("vocab_size", [98, 100, 1 << 31]),
        ("num_hidden_layers", [1, 4, 10_000, 1 << 31]),
        ("intermediate_size", [95, 48]),
    ],
)
def test_sizes_that_the_tensors_contradict(kind: str, name: str, values: list[int], opened: dict[str, tuple[dict[str, Any], Any]]) -> None:
    config, tensors = opened[kind]
    for value in values:
        changed = {**config, name: value}
        if name not in config or config[name] == value or (name == "intermediate_size" and "moe_intermediate_size" in config):
            continue
        if name == "num_hidden_layers" and isinstance(config.get("layer_types"), list):
            changed["layer_types"] = (config["layer_types"] * 4)[:value]
        with pytest.raises((CheckpointError, UnsupportedError)) as e:
            CpuModel(build_spec(changed, tensors))
        assert "\n" not in str(e.value)


TENSORS: dict[str, Any] = {
    "a matrix for a norm": ("model.norm.weight", lambda t: torch.ones(2, len(t))),
    "a short norm": ("model.layers.0.input_layernorm.weight", lambda t: t[:-1]),
    "an empty norm": ("model.layers.0.input_layernorm.weight", lambda t: t[:0]),
    "a norm that is missing": ("model.layers.1.input_layernorm.weight", lambda t: None),
    "a vector for a matrix": ("model.layers.0.mlp.up_proj.weight", lambda t: t[0]),
    "three axes": ("model.layers.0.self_attn.q_proj.weight", lambda t: t[None]),
    "no rows": ("model.layers.0.self_attn.q_proj.weight", lambda t: t[:0]),
    "no columns": ("model.layers.0.self_attn.o_proj.weight", lambda t: t[:, :0]),
    "fewer rows": ("model.layers.0.mlp.gate_proj.weight", lambda t: t[:-32]),
    "fewer columns": ("model.layers.0.mlp.down_proj.weight", lambda t: t[:, :-32]),
    "a wide embedding": ("model.embed_tokens.weight", lambda t: torch.cat((t, t), 1)),
    "an empty embedding": ("model.embed_tokens.weight", lambda t: t[:0]),
    "a short head": ("lm_head.weight", lambda t: t[:-1]),
    "a norm of NaN": ("model.norm.weight", lambda t: t * math.nan),
    "a norm of integers": ("model.norm.weight", lambda t: t.int()),
    "a weight of NaN": ("model.layers.0.mlp.up_proj.weight", lambda t: t * math.nan),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(case: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    CASES["LlamaDecoderLayer"]().eval().save_pretrained(tmp_path)
    name, change = TENSORS[case]
    state: dict[str, Tensor] = load_file(tmp_path / "model.safetensors")
    changed = change(state.get(name))
    state = {**state, name: changed} if changed is not None else {key: value for key, value in state.items() if key != name}
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises((CheckpointError, UnsupportedError, ArgumentError)) as e:
        CpuModel(build_spec(*open_checkpoint(tmp_path, hb.Config("q8_0"))))
    assert "\n" not in str(e.value)
