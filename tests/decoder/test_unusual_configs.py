"""What a config.json leaves out, or says otherwise than usual, is computed as transformers computes it, or refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from tiny_decoders import CASES, vary_

import halfbyte as hb
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.errors import CheckpointError
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.nn.dequantized import dequantize_

IDS = [3, 4, 5, 9, 20, 33, 7, 8, 61, 2, 5, 6]
LONGROPE, ROPE = "Phi3DecoderLayer, longrope", "rope_parameters"
MISSING = object()


def changed(config: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    config = copy.deepcopy(config)
    section = config
    for key in path[:-1]:
        section = section[key]
    section.pop(path[-1], None)
    if value is not MISSING:
        section[path[-1]] = value
    return config


def quantized(kind: str, folder: Path) -> Any:
    """A model whose checkpoint in `folder` computes in floating point; returns the model with the dequantized weights."""
    torch.manual_seed(7)
    model = CASES[kind]().eval().float()
    vary_(model)
    hb.quantize_(model, hb.Config("q8_0", compute="float"))
    hb.save(model, folder)
    dequantize_(model)
    return model


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("GptOssDecoderLayer", ("swiglu_alpha",), 0.851),
        ("GptOssDecoderLayer", ("swiglu_limit",), 0.35),
        ("GptOssDecoderLayer", (ROPE, "rope_theta"), MISSING),
        ("GptOssDecoderLayer", (ROPE, "truncate"), None),
        ("CwmDecoderLayer", (ROPE, "rope_theta"), MISSING),
        ("Ministral3DecoderLayer", (ROPE, "factor"), None),
        ("Ministral3DecoderLayer", (ROPE, "long_factor"), None),
        ("Gemma4TextDecoderLayer", (ROPE,), None),
        (LONGROPE, (ROPE, "rope_type"), "su"),
        (LONGROPE, (ROPE, "rope_type"), "yarn"),
    ],
)
def test_a_value_is_that_of_transformers(kind: str, path: tuple[str, ...], value: object, tmp_path: Path) -> None:
    model = quantized(kind, tmp_path)
    if path[0].startswith("swiglu") and not hasattr(model.config, path[0]):
        pytest.skip(f"{path[0]} is not read by transformers {transformers.__version__}")
    config, tensors = open_checkpoint(tmp_path)
    raw = {key: each for key, each in json.loads((tmp_path / "config.json").read_text()).items() if key != "quantization_config"}
    reference = type(model)(type(model.config).from_dict(changed(raw, path, value))).eval()
    reference.load_state_dict(model.state_dict())
    native = CpuModel(build_spec(changed(config, path, value), tensors))
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([IDS])).logits[0, -1]
    # float32 sums in another order: 3e-6 of the largest logit at most; with the usual value the logits differ by 3e-4 and more
    difference = native.prefill(IDS, Cache(native.spec)).flatten() - expected
    assert difference.abs().max() <= 3e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("Dots1DecoderLayer", ("topk_group",), 0, "topk_group: 0"),
        ("GptOssDecoderLayer", ("swiglu_limit",), -7.0, "swiglu_limit: -7.0"),
        ("GptOssDecoderLayer", (ROPE, "truncate"), "false", "truncate: 'false'"),
        (LONGROPE, ("max_position_embeddings",), MISSING, "factor: None"),
    ],
)
def test_a_value_without_meaning_is_refused(kind: str, path: tuple[str, ...], value: object, message: str, tmp_path: Path) -> None:
    quantized(kind, tmp_path)
    config, tensors = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        build_spec(changed(config, path, value), tensors)


@pytest.mark.parametrize("converted", [False, True])
def test_a_head_that_differs_from_the_embedding_is_not_tied_to_it(converted: bool, tmp_path: Path) -> None:
    """transformers 5 does not tie them either."""
    torch.manual_seed(7)
    source, path = tmp_path / "float", tmp_path / "float"
    model = CASES["LlamaDecoderLayer"]().eval()
    model.config.tie_word_embeddings = True  # as config.json then says
    model.save_pretrained(source, state_dict=model.state_dict())
    config = hb.Config("int8_channel", compute="float", embedding="int8_channel")
    if converted:
        hb.convert(source, path := tmp_path / "codes", config)
    values, tensors = open_checkpoint(path, None if converted else config)
    assert values["tie_word_embeddings"] is not converted
    native = CpuModel(build_spec(values, tensors))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([IDS])).logits[0, -1]
    # Codes of 8 bits move these logits by 2 % of the largest; the embedding in place of the head moves them by more than all of it.
    difference = native.prefill(IDS, Cache(native.spec)).flatten() - expected
    assert difference.abs().max() <= 0.1 * expected.abs().max()


@pytest.mark.parametrize("positions", [4096, None])
def test_a_window_that_no_sequence_is_longer_than_reserves_nothing(positions: int | None, tmp_path: Path) -> None:
    """Phi-4-mini has a window of 262144 and 131072 positions; its cache had memory for a window from the first token on."""
    model = quantized("MistralDecoderLayer", tmp_path)
    config, tensors = open_checkpoint(tmp_path)
    model.config.sliding_window = 1 << 32
    native = CpuModel(build_spec({**config, "sliding_window": 1 << 32, "max_position_embeddings": positions}, tensors))
    cache = Cache(native.spec, most=native.spec.max_positions)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([IDS])).logits[0, -2:]
    found = [native.prefill(IDS[:-1], cache).flatten(), native.decode(IDS[-1:], cache).flatten()]
    assert (torch.stack(found) - expected).abs().max() <= 3e-5 * expected.abs().max()
    assert all(layer.size <= 2 * len(IDS) + 192 for layer in cache.layers)  # as many again, in steps of 64
