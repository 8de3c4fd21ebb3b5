"""Decoder layers that take one token in few kernels say what transformers' own say; here in torch's operations, on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from language_model import make_decoder
from transformers import StaticCache

from halfbyte import ops
from halfbyte.decoder import gpu_layer
from halfbyte.decoder.family import ACTIVATIONS
from halfbyte.dispatch.choose import forget
from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes
from halfbyte.integrations.transformers.decoder import gpu_run
from halfbyte.integrations.transformers.decoder.stack import is_compiled_stack
from halfbyte.integrations.transformers.optimize import forwards
from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.fused import fuse_
from halfbyte.ops.transformer.attend import attend
from halfbyte.ops.transformer.normed_linear import normed_linear
from halfbyte.ops.transformer.norms import add_normed, normed
from halfbyte.ops.transformer.sublayers import Heads, Norm

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
KINDS: dict[str, Callable[..., Any]] = {
    "llama": partial(make_decoder, "Llama", **SIZES),
    "mistral": partial(make_decoder, "Mistral", **SIZES, sliding_window=None),
    "qwen2": partial(make_decoder, "Qwen2", **SIZES),
    "qwen3": partial(make_decoder, "Qwen3", **SIZES, head_dim=32),
}


def is_native(model: Any) -> bool:
    """Whether the stack's forward is replaced after `replace_forwards_`."""
    assert replace_forwards_(model) is model
    return is_compiled_stack(model.model)


def pair(kind: str) -> tuple[Any, Any]:
    """(plain, with native calls)"""
    torch.manual_seed(5)
    model = KINDS[kind]().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    model.set_attn_implementation("sdpa")
    quantize_(model, Config("q4_0", compute="float", skip=["lm_head"]))
    fuse_(model)
    short = copy.deepcopy(model)
    assert is_native(short)
    assert is_native(short), "it is already"
    return model, short


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "DEVICES", ("cpu", "cuda"))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a layer went the short way."""
    calls: list[int] = []

    def counting(*args: Any, **how: Any) -> Tensor:
        calls.append(1)
        return attend(*args, **how)

    monkeypatch.setattr(gpu_layer, "attend", counting)
    return calls


def steps(model: Any, ids: Tensor, mask: Tensor | None = None, count: int = 3) -> Tensor:
    """Logits after a prompt and `count` single tokens, with a static cache."""
    kept = StaticCache(config=model.config, max_cache_len=24)
    found = []
    with torch.no_grad():
        for _ in range(count + 1):
            logits = model(input_ids=ids, attention_mask=mask, past_key_values=kept, logits_to_keep=1).logits[:, -1]
            found.append(logits)
            ids = logits.argmax(-1, keepdim=True)
            mask = None if mask is None else torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_logits(kind: str, everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the order of sums in float32."""
    plain, short = pair(kind)
    calls = counted(monkeypatch)
    ids = torch.randint(99, (2, 7))
    expected, found = steps(plain, ids), steps(short, ids)
    assert len(calls) == 3 * 2, "tokens after the prompt, in each layer"
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_padding_on_the_left(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, short = pair("llama")
    calls = counted(monkeypatch)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    ids = torch.randint(99, (2, 7))
    expected, found = steps(plain, ids, mask), steps(short, ids, mask)
    assert calls
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_what_goes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, short = pair("llama")
    calls = counted(monkeypatch)
    ids = torch.randint(99, (1, 4))
    monkeypatch.setattr(gpu_run, "DEVICES", ("cpu",))
    with torch.no_grad():
        long = [m.generate(ids, max_new_tokens=3, do_sample=False) for m in (short, plain)]
    assert torch.equal(*long), "a cache that grows"
    assert not calls


def test_other_layers_stay() -> None:
    model = KINDS["llama"]()
    assert not is_native(model), "not quantized"
    quantize_(model, Config("q4_0", skip=["lm_head", "model.layers.1.mlp.down_proj"]))
    fuse_(model)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not is_native(model), "a hook, and a layer that is not quantized"
    other = KINDS["llama"]()
    quantize_(other, Config("int8_channel", compute="int8"))
    fuse_(other)
    assert forwards.why_not_native(other.model.layers[0]) is None, "products of integers are no reason, on a GPU"
    assert is_native(other), "nor on a CPU"


def test_under_torch_compile(everywhere: None) -> None:
    _, short = pair("llama")
    ids = torch.randint(99, (1, 5))
    expected = steps(short, ids)
    compiled: Any = torch.compile(short.forward, fullgraph=True, dynamic=False, backend="aot_eager")
    kept: Any = StaticCache(config=short.config, max_cache_len=24)
    with torch.no_grad():
        logits = short(input_ids=ids, past_key_values=kept, logits_to_keep=1).logits[:, -1]
        for step in range(3):
            assert torch.allclose(logits, expected[step], rtol=1e-4, atol=1e-4)
            logits = compiled(input_ids=logits.argmax(-1, keepdim=True), past_key_values=kept).logits[:, -1]
    assert kept.layers[0].cumulative_length.item() == 5 + 3


def test_hooks_are_called_under_torch_compile(everywhere: None) -> None:
    _, short = pair("llama")
    plain, ids = steps(short, torch.tensor([[5, 6, 7]]), count=1), torch.tensor([[5, 6, 7]])
    short.model.layers[1].register_forward_hook(lambda *args: args[2] + 1)
    expected, kept = steps(short, ids, count=1), StaticCache(config=short.config, max_cache_len=24)
    compiled: Any = torch.compile(short.forward, dynamic=False, backend="eager")
    with torch.no_grad():
        logits = short(input_ids=ids, past_key_values=kept, logits_to_keep=1).logits[:, -1]
        found = compiled(input_ids=logits.argmax(-1, keepdim=True), past_key_values=kept).logits[:, -1]
    assert torch.allclose(found, expected[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected[1], plain[1], rtol=1e-2, atol=1e-2)


# The operations


def test_normed_linear() -> None:
    weight = torch.randn(40, 64) / 8
    packed = ops.pack(ops.quantize(weight, "q8_0"))
    x, norm, bias = torch.randn(2, 3, 64) * 5, torch.randn(64), torch.randn(40)
    wide = x.double()
    z = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()
    expected = z @ ops.dequantize(packed, torch.float32).double().T + bias.double()
    assert torch.allclose(normed_linear(x, Norm(norm, 1e-5), packed, bias).double(), expected, rtol=1e-4, atol=1e-4)
    gate, up = expected.chunk(2, -1)
    found = normed_linear(x, Norm(norm, 1e-5), packed, bias, gates="silu").double()
    assert torch.allclose(found, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)


def test_a_layer_norm_before_a_product() -> None:
    packed = ops.pack(ops.quantize(torch.randn(40, 64) / 8, "q8_0"))
    x, norm, shift = torch.randn(2, 3, 64) * 5 + 3, torch.randn(64), torch.randn(64)
    z = torch.nn.functional.layer_norm(x.double(), (64,), norm.double() + 1, shift.double(), 1e-5)
    layer_norm = Norm(norm, 1e-5, unit_offset=True, layer_norm=True, bias=shift)
    assert torch.allclose(normed(x, layer_norm).double(), z, rtol=1e-5, atol=1e-5)
    expected = z @ ops.dequantize(packed, torch.float32).double().T
    assert torch.allclose(normed_linear(x, layer_norm, packed).double(), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match=r"norm \[63\] of torch.float32"):
        normed(x, layer_norm._replace(bias=shift[1:]))
    with pytest.raises(ArgumentError, match="got a layer norm"):
        add_normed(x, x, layer_norm)


def test_arguments() -> None:
    packed = ops.pack(ops.quantize(torch.randn(3, 32), "q8_0"))
    assert isinstance(ops.unpack(packed), Codes)
    for x, norm in (
        (torch.randn(1, 32), torch.randn(31)),
        (torch.randn(1, 32), torch.randn(32).half()),
        (torch.tensor(1.0), torch.randn(32)),
    ):
        with pytest.raises(ArgumentError, match=r"takes x \[\.\.\., K\] and its weight \[K\] of one dtype"):
            normed_linear(x, Norm(norm, 1e-5), packed)
    with pytest.raises(ArgumentError, match=r"takes x \[\.\.\., 32\], got \[1, 31\]"):
        normed_linear(torch.randn(1, 31), Norm(torch.randn(31), 1e-5), packed)
    with pytest.raises(ArgumentError, match="half of 3 outputs"):
        normed_linear(torch.randn(1, 32), Norm(torch.randn(32), 1e-5), packed, gates="silu")
    heads = Heads(2, 2, 8, 1.0)
    rope, cache, length = torch.ones(1, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, dtype=torch.int64)
    for width in (7, 4 * 8, 7 * 8):
        with pytest.raises(ArgumentError, match="attend takes qkv"):
            attend(torch.zeros(1, width), (rope, rope), cache, cache.clone(), length, None, heads)
    with pytest.raises(ArgumentError, match="attend takes qkv"):
        attend(torch.zeros(1, 6 * 8), (rope, rope), cache, cache.clone(), length, torch.ones(1, 4, dtype=torch.bool), heads)


# What the report and explain say


def test_the_report_says_which_layers_are_left_and_why() -> None:
    from halfbyte.nn.report import report

    _, short = pair("llama")
    assert "model: 2 of 2 layers take native calls" in str(report(short))
    short.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "model: 1 of 2 layers take native calls; layer 0: its mlp has a hook" in str(report(short))
    model = KINDS["qwen2"]().eval()
    quantize_(model, Config("q4_0", compute="float", skip=["lm_head", "model.layers.1.mlp.down_proj"]))
    fuse_(model)
    replace_forwards_(model)
    text = str(report(model))
    assert "model: 1 of 2 layers take native calls; layer 1: its down_proj is a Linear, which is not quantized" in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.mlp.register_forward_hook(lambda *_: None), "its mlp has a hook"),
        (
            lambda layer: setattr(layer.self_attn.config, "hidden_act", "gelu"),
            f"its activation is gelu, not {' or '.join(ACTIVATIONS)}",
        ),
    ],
)
def test_why_a_layer_is_left(change: Callable[[Any], object], reason: str) -> None:
    model = KINDS["llama"]()
    quantize_(model, Config("q4_0", compute="float", skip=["lm_head"]))
    layer = model.model.layers[0]
    assert "are not computed together" in (forwards.why_not_native(layer) or "")
    fuse_(model)
    assert forwards.why_not_native(layer) is None
    change(layer)
    assert forwards.why_not_native(layer) == reason
    assert "is none of" in (forwards.why_not_native(torch.nn.Linear(2, 2)) or "")


def test_what_computes_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.decoder import kernels_gpu
    from halfbyte.decoder.program import layer_ops
    from halfbyte.integrations.transformers.decoder.live_layer import layer_spec
    from halfbyte.integrations.transformers.optimize.explain_model import explain_model
    from halfbyte.kernels.gpu.transformer import norm
    from halfbyte.machine import GPUS

    _, short = pair("llama")
    short.to(torch.bfloat16)
    found = explain_model(short, "sm_90")
    (group,) = found.groups
    assert group.names == ("model.layers.0", "model.layers.1")
    assert group.reason is None
    assert {lowered.op.name: lowered.kernel or f"in {lowered.fused_into}" for lowered in group.ops} == {
        "attn_norm": "in qkv",
        "qkv": "skinny",
        "rope": "in attention",
        "attention": "attend",
        "o_proj": "skinny",
        "attn_residual": "in o_proj",
        "mlp_norm": "norm",
        "gate_up": "skinny",
        "gate": "gates",  # half of 192 rows are not whole panels of 64: the gate is not in the product
        "down_proj": "skinny",
        "mlp_residual": "in down_proj",
    }
    spec = layer_spec(short.model.layers[0])
    assert not isinstance(spec, str)
    for rows in (9, 64, 300):
        many = kernels_gpu.layer_kernels(layer_ops(spec), GPUS["sm_90"], rows)
        assert all(lowered.reason is None for lowered in many)
        assert (many[0].op.name, many[0].kernel) == ("attn_norm", "norm")
    monkeypatch.setattr(norm, "MOST", 32)
    forget()
    wide = kernels_gpu.layer_kernels(layer_ops(spec), GPUS["sm_90"])
    assert wide[0].reason == "a norm of 64 columns is more than the 32 that a block's registers hold"
    forget()
    amd = kernels_gpu.layer_kernels(layer_ops(spec), GPUS["gfx942"])
    assert "NVIDIA GPUs only" in ({lowered.op.name: lowered for lowered in amd}["attention"].reason or "")
    here = explain_model(short, "cpu").groups[0]
    assert here.reason is None
    kernels = {lowered.op.name: lowered.kernel or f"in {lowered.fused_into}" for lowered in here.ops}
    assert [kernels[name] for name in ("attn_norm", "qkv", "rope", "attention")] == ["in qkv", "float", "in attention", "attend"]
    assert explain_model(short, "cpu", 65).groups[0].reason == "native calls are for 64 sequences at most"
    with pytest.raises(ArgumentError, match="1 or more sequences"):
        explain_model(short, "cpu", 0)


def test_explain_of_a_model_on_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from language_model import make_language_model

    from halfbyte.cli import main

    folder = make_language_model(tmp_path / "float")
    assert main(["explain", str(folder), "--format", "q4_0", "--device", "sm_90"]) == 0
    assert "attend" in capsys.readouterr().out
    assert main(["explain", str(folder), "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert "is not quantized" in groups[0]["reason"]
