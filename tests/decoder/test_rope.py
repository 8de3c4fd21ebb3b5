"""Frequencies of rotary embeddings against transformers', and cosines and sines against their definition."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from halfbyte.decoder.rope import Rope, make_rope
from halfbyte.errors import CheckpointError, UnsupportedError

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 100}
YARN = {"rope_type": "yarn", "factor": 6.5, "original_max_position_embeddings": 61}
LONG: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0 + i / 7 for i in range(10)]}
LONG |= {"long_factor": [3.0 + i * i for i in range(10)], "original_max_position_embeddings": 50}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.7},
    "linear, a part": {"rope_type": "linear", "factor": 2.7, "partial_rotary_factor": 0.5},
    "llama3": LLAMA3,
    "llama3, narrow": LLAMA3 | {"low_freq_factor": 3.0, "high_freq_factor": 3.5, "factor": 1.3},
    "llama3, a part": LLAMA3 | {"partial_rotary_factor": 0.3},
    "yarn": YARN,
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn, mscale alone": YARN | {"mscale": 0.707},
    "yarn, mscale of 0": YARN | {"mscale": 0, "mscale_all_dim": 1.0},
    "yarn, attention_factor": YARN | {"attention_factor": 1.7, "mscale": 2.0, "mscale_all_dim": 1.0},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, betas": YARN | {"beta_fast": 7.5, "beta_slow": 0.25},
    "yarn, betas that are equal": YARN | {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
    "yarn, no betas": YARN | {"beta_fast": None, "beta_slow": None},
    "yarn, a small factor": YARN | {"factor": 1.0},
    "yarn, a part": YARN | {"partial_rotary_factor": 0.5},
    "longrope": LONG,
    "longrope, factor": LONG | {"factor": 9.0},
    "longrope, a factor below 1": LONG | {"factor": 0.5},
    "longrope, attention_factor": LONG | {"attention_factor": 1.1},
    "longrope, a part": LONG | {"partial_rotary_factor": 0.3, "short_factor": [1.5] * 3, "long_factor": [2.5] * 3},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.33},
    "proportional, factor": {"rope_type": "proportional", "factor": 8.0},
}
HEAD, POSITIONS = 20, 777


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("theta", [10_000.0, 123.4, 5e6])
def test_frequencies_are_those_of_transformers(case: str, theta: float) -> None:
    parameters = {"rope_theta": theta, **CASES[case]}
    config = SimpleNamespace(head_dim=HEAD, max_position_embeddings=POSITIONS, rope_parameters=parameters)
    config.hidden_size, config.num_attention_heads = 4 * HEAD, 4
    config.standardize_rope_params = lambda: None
    make: Any = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    expected, scaling = make(config, "cpu")
    partial = parameters["rope_type"] != "proportional" and "partial_rotary_factor" in parameters
    rope = make_rope(parameters, HEAD, POSITIONS, partial=partial)
    assert rope.rotary_dim == 2 * len(expected)
    # float32 powers, quotients and ramps in another order
    torch.testing.assert_close(rope._frequencies[0], expected, rtol=2e-6, atol=0)
    assert rope._scaling == pytest.approx(scaling, rel=1e-12)
    if parameters["rope_type"] == "longrope":
        long, _ = make(config, "cpu", seq_len=51)
        torch.testing.assert_close(rope._frequencies[1], long, rtol=2e-6, atol=0)
        assert rope.switch == 50
    else:
        assert rope.switch is None


@pytest.mark.parametrize("length", [50, 51])
def test_longrope_switches_after_the_original_length(length: int) -> None:
    parameters = {"rope_theta": 1e4, **LONG}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.Phi3Config(
            hidden_size=2 * HEAD,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            original_max_position_embeddings=50,
            rope_parameters=parameters,
            pad_token_id=0,
        )
    rotary = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    cosines, sines = rotary(torch.zeros(1), torch.arange(length)[None])
    found = make_rope(parameters, HEAD, POSITIONS).tables(0, length, length)
    # angles of up to 50 are rounded in float32: 50 * 2^-24
    for actual, expected in zip(found, (cosines, sines), strict=True):
        torch.testing.assert_close(actual, expected[:, :, : HEAD // 2], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 256), (255, 257), (300, 301), (100, 800), (512, 512 + 256)])
def test_tables_are_cosines_and_sines_of_positions(start: int, stop: int) -> None:
    frequencies = torch.tensor([1.0, 0.3, 0.007])
    rope = Rope(frequencies, 1.5)
    cosines, sines = rope.tables(start, stop, stop)
    angles = torch.arange(start, stop)[:, None].double() * frequencies.double()
    # positions times frequencies are rounded to 24 bits: 800 * 2^-24
    torch.testing.assert_close(cosines[0].double(), 1.5 * angles.cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(sines[0].double(), 1.5 * angles.sin(), rtol=0, atol=1e-4)
    first = stop - 1 - (stop - 1) % 256  # a decode step has the bits of a prompt, whatever positions are computed together
    for one, several in zip(rope.tables(first, first + 256, stop), (cosines, sines), strict=True):
        assert torch.equal(one[0, stop - 1 - first], several[0, -1])


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, UnsupportedError),
        ({"rope_type": ["yarn"]}, UnsupportedError),
        ({"rope_type": "linear"}, CheckpointError),
        ({"rope_type": "linear", "factor": 0}, CheckpointError),
        ({"rope_type": "linear", "factor": "2"}, CheckpointError),
        ({"rope_type": "linear", "factor": math.nan}, CheckpointError),
        ({"rope_type": "linear", "factor": 10**400}, CheckpointError),
        ({"rope_type": "linear", "factor": 1e-45}, CheckpointError),
        ({"rope_theta": -1.0}, CheckpointError),
        ({"rope_theta": True}, CheckpointError),
        ({"rope_theta": 1e300}, CheckpointError),
        (YARN | {"rope_theta": 1.0}, CheckpointError),
        (YARN | {"factor": None}, None),
        (YARN | {"original_max_position_embeddings": 1e-300}, None),
        (YARN | {"attention_factor": "much"}, CheckpointError),
        (YARN | {"mscale": "much", "mscale_all_dim": 1.0}, CheckpointError),
        (YARN | {"mscale": 1e300, "mscale_all_dim": 1.0}, CheckpointError),
        (LLAMA3 | {"high_freq_factor": 1e30}, None),
        (LLAMA3 | {"low_freq_factor": None}, CheckpointError),
        (LONG | {"long_factor": [1.0]}, CheckpointError),
        (LONG | {"short_factor": [True] * 10}, CheckpointError),
        (LONG | {"short_factor": "ten"}, CheckpointError),
        (LONG | {"original_max_position_embeddings": 1, "factor": 2.0}, CheckpointError),
        (LONG | {"original_max_position_embeddings": 0.5, "factor": 2.0}, CheckpointError),
        ({"rope_type": "proportional", "partial_rotary_factor": 7.0}, CheckpointError),
    ],
)
def test_what_makes_no_frequencies_is_refused(settings: dict[str, Any], error: type[Exception] | None) -> None:
    if error is None:
        rope = make_rope({"rope_theta": 1e4, **settings}, HEAD, POSITIONS)
        assert all(torch.isfinite(table).all() for table in rope.tables(0, 9, 9))
        return
    with pytest.raises(error) as e:
        make_rope({"rope_theta": 1e4, **settings}, HEAD, POSITIONS)
    assert len(str(e.value)) < 300


@pytest.mark.parametrize("factor", [0.0, 0.04, 0.27, 1.5])
def test_a_part_of_a_head_is_an_even_number(factor: float) -> None:
    with pytest.raises(CheckpointError):
        make_rope({"partial_rotary_factor": factor}, HEAD, POSITIONS, partial=True)
