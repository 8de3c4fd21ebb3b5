"""Quantized modules, quantize_ and the report."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaConfig, LlamaForCausalLM

from halfbyte import ops
from halfbyte.errors import ArgumentError, FormatError, UnsupportedError
from halfbyte.formats.spec import as_format
from halfbyte.nn.candidates import ATTENTION, PARAMETRIZED
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.described import NOT_A_KIND
from halfbyte.nn.kinds import relative_error
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear
from halfbyte.nn.report import report

FORMATS = ("q4_0", "q8_0", "int4_g24_zp", "int8_channel_offset", "int4_tensor")


def linear(fmt: str = "q4_0", n: int = 24, k: int = 33, bias: bool = True) -> QuantLinear:
    packed = ops.pack(ops.quantize(torch.randn(n, k), fmt))
    return QuantLinear(packed, torch.randn(n) if bias else None, compute="float")


def bert() -> BertModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return BertModel(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)).eval()


def llama(tied: bool = True) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, tie_word_embeddings=tied, **sizes)).eval()


# The modules


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_multiplies_by_the_dequantized_weight(fmt: str, dtype: torch.dtype) -> None:
    module = linear(fmt).to(dtype)
    one_hot = torch.eye(33, dtype=dtype)
    module.bias = None
    expected = module.codes().dequantize(dtype)
    assert torch.equal(module(one_hot), expected.T)
    assert torch.equal(torch.as_tensor(module.weight + 0), expected)


@pytest.mark.parametrize("fmt", FORMATS)
def test_embedding_looks_up_the_dequantized_rows(fmt: str) -> None:
    module = QuantEmbedding(ops.pack(ops.quantize(torch.randn(20, 33), fmt)), padding_idx=3, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 19], [3, 3]])
    assert torch.equal(module(ids), module.codes().dequantize(torch.bfloat16)[ids])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 3])
def test_embedding_bags_reduce_the_dequantized_rows(mode: str, padding: int | None) -> None:
    bags, ended = nn.EmbeddingBag(9, 40, mode=mode, padding_idx=padding), nn.EmbeddingBag(9, 40, mode=mode, include_last_offset=True)
    bags, ended = model = quantize_(nn.ModuleList([bags, ended]), "q4_0")
    ids, offsets = torch.tensor([3, 1, 8, 3, 3, 0, 1]), torch.tensor([0, 3, 3, 5])
    weights = torch.randn(7) if mode == "sum" else None

    def expected(module: Any, ids: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
        return nn.functional.embedding_bag(ids, module.weight.clone(), *args, mode=mode, **settings)

    got = bags(ids, offsets, weights)
    assert torch.equal(got, expected(bags, ids, offsets, per_sample_weights=weights, padding_idx=padding))
    assert torch.equal(bags(ids[:6].view(2, 3)), expected(bags, ids[:6].view(2, 3), padding_idx=padding))
    assert torch.equal(ended(ids, offsets.int()), expected(ended, ids, offsets, include_last_offset=True))
    assert torch.equal(torch.compile(bags, backend="eager", fullgraph=True)(ids, offsets, weights), got)
    with pytest.raises(ArgumentError, match="… 9"):
        bags(torch.tensor([[9]]))
    assert [row.kind for row in report(model).quantized] == ["EmbeddingBag", "EmbeddingBag"]
    assert "and 1 more: the rows of all bags are dequantized" in str(report(model))


def test_gradients_flow_to_the_activations_and_nowhere_else() -> None:
    module = linear()
    x = torch.randn(5, 33, requires_grad=True)
    g = torch.randn(5, 24)
    module(x).backward(g)
    w = module.codes().dequantize()
    # A sum of 24 products in float32: each rounding is at most 2^-24 of the sum of magnitudes.
    assert x.grad is not None
    assert bool(((x.grad - g @ w).abs() <= 2 * 24 * 2**-24 * (g.abs() @ w.abs())).all())
    assert not any(p.requires_grad for p in module.parameters())


def test_the_dtype_changes_and_the_packed_bytes_do_not() -> None:
    module = linear()
    before = module.packed_data.clone()
    for convert in (nn.Module.half, nn.Module.double, nn.Module.bfloat16, lambda m: m.to(torch.float32)):
        convert(module)
        assert module.dtype == module.weight.dtype == module.bias.dtype
        assert module.packed.data is module.packed_data
        assert torch.equal(module.packed_data, before)


def test_another_device_is_refused_before_anything_moves() -> None:
    module = linear()
    with pytest.raises(UnsupportedError, match="cannot be packed for device 'meta'"):
        module.to("meta")
    assert module.bias is not None
    assert module.bias.device.type == "cpu"


def test_copies_are_independent() -> None:
    module = linear()
    twin = copy.deepcopy(module)
    assert twin.packed.data is twin.packed_data
    twin.packed_data.zero_()
    assert bool(module.packed_data.any())


@pytest.mark.parametrize("fmt", FORMATS)
def test_state_dict_is_canonical_and_loads_again(fmt: str) -> None:
    module, other = linear(fmt), linear(fmt)
    state = module.state_dict()
    assert set(state) == {"bias", "weight", *(f"weight.{name}" for name in module.codes().tensors())}
    for name, tensor in module.codes().tensors().items():
        assert torch.equal(state[f"weight.{name}"], tensor)
    other.load_state_dict(state)
    x = torch.randn(3, 33)
    assert torch.equal(other(x), module(x))


def test_state_dict_that_does_not_fit_is_refused() -> None:
    module = linear("int4_g24_zp")
    before = module.packed_data.clone()
    good = module.state_dict()
    bad: dict[str, dict[str, Any]] = {
        "Missing key.*weight.scale": {k: v for k, v in good.items() if k != "weight.scale"},
        "the data of int4_g24_zp codes": good | {"weight.data": good["weight.data"][:-1]},
        "a scale that is not finite": good | {"weight.scale": torch.full_like(good["weight.scale"], math.nan)},
        "points of int4_g24_zp codes lie in": good | {"weight.zero": torch.full_like(good["weight.zero"], 16)},
        "the unused last nibble": good | {"weight.data": good["weight.data"] | 0xF0},
        "Unexpected key.*weight": good | {"weight": torch.zeros(24, 33)},
    }
    for message, state in bad.items():
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict(state)
        if "Unexpected" not in message:  # torch loads the rest before it complains
            assert torch.equal(module.packed_data, before)
    assert module.load_state_dict({"bias": good["bias"]}, strict=False).missing_keys == [k for k in good if k.startswith("weight.")]


def test_weight_can_be_looked_at_and_not_written_to() -> None:
    module = linear()
    view, numbers = module.weight, module.codes().dequantize()
    assert (view.shape, view.dtype, view.device, view.requires_grad) == (numbers.shape, torch.float32, torch.device("cpu"), False)
    assert view.numel() == 24 * 33
    assert torch.equal(view[2:4], numbers[2:4])
    assert torch.equal(view.T.contiguous(), numbers.T)
    assert torch.equal(copy.deepcopy(view), numbers)
    assert "q4_0" in repr(view)
    writes: list[Callable[[], object]] = [view.zero_, view.data.normal_, lambda: view.detach().add_(1), lambda: view.__setitem__(0, 1.0)]
    for write in writes:
        with pytest.raises(UnsupportedError, match="frozen"):
            write()
    for weight in (numbers, nn.Parameter(numbers)):
        with pytest.raises(UnsupportedError, match="frozen, and cannot be set: change the float weight and quantize again"):
            module.weight = weight


def test_no_graph_break() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = QuantEmbedding(ops.pack(ops.quantize(torch.randn(24, 33), "q8_0")))
            self.linear = linear()

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.linear(self.embedding(ids).to(self.linear.weight.dtype))
            return y

    model, ids = Both(), torch.tensor([[1, 2, 3]])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), model(ids))


def test_wrong_arguments() -> None:
    packed = ops.pack(ops.quantize(torch.randn(4, 8), "q4_0"))
    with pytest.raises(ArgumentError, match=r"is \[4\], got \[5\]"):
        QuantLinear(packed, torch.zeros(5))
    with pytest.raises(ArgumentError, match="compute is one of auto, int8, float"):
        QuantLinear(packed, compute="int4")
    with pytest.raises(ArgumentError, match="activation is one of"):
        QuantLinear(packed, activation="column")
    assert "in_features=8, out_features=4, bias=False, format=q4_0" in repr(QuantLinear(packed))


# quantize_


@pytest.mark.parametrize("make", [bert, llama])
def test_transformers_run_quantized(make: Callable[[], nn.Module]) -> None:
    model = make()
    expected = copy.deepcopy(model)
    ids = torch.arange(10)[None]
    assert quantize_(model, "q8_0") is model
    for module in expected.modules():  # the same model with the numbers that the codes stand for
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data = ops.quantize(module.weight, "q8_0").dequantize()
    with torch.no_grad():
        got, want = model(ids)[0], expected(ids)[0]
    # Activations are quantized to 8 bits too: each product within 2^-8 of its block's largest, averaged out over the sums.
    assert float((got - want).norm() / want.norm()) < 0.02


def test_llama_generates() -> None:
    model = quantize_(llama(), "q8_0")
    assert isinstance(model, LlamaForCausalLM)
    out = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert isinstance(out, Tensor)
    assert out.shape == (1, 7)


@pytest.mark.parametrize("make", [llama, lambda: BertForMaskedLM(BertConfig(**bert().config.to_diff_dict())).eval()])
def test_tied_weights_stay_tied(make: Callable[[], Any]) -> None:
    model = quantize_(make(), "q4_0")
    for m in (model, copy.deepcopy(model), copy.deepcopy(model).bfloat16()):
        head, embedding = m.get_output_embeddings(), m.get_input_embeddings()
        assert isinstance(head, QuantLinear)
        assert head.packed_data is embedding.packed_data
        assert head.packed.format == as_format("q8_0")
    rows = {row.name: row for row in report(model).rows}
    tied = [row for row in rows.values() if row.tied_to]
    assert [row.bytes_after for row in tied if row.format] == [0]


def test_one_module_under_two_names_stays_one() -> None:
    layer = nn.Linear(8, 8)
    model = quantize_(nn.ModuleDict({"a": layer, "b": layer, "c": nn.Sequential(layer)}), "q8_0")
    assert isinstance(model, nn.ModuleDict)
    assert model["a"] is model["b"]
    assert model["a"] is model["c"][0]  # type: ignore[index]


def test_skipping_one_of_two_tied_keeps_both() -> None:
    model = quantize_(llama(), Config("q4_0", skip=["lm_head"]))
    reasons = {row.name: row.reason for row in report(model).kept}
    assert reasons["lm_head"] == "skip pattern 'lm_head'"
    assert reasons["model.embed_tokens"] == "shares its weight with lm_head, which stays (skip pattern 'lm_head')"
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_skip_and_overrides() -> None:
    overrides = {"*.0.mlp.*": "int8_channel", "*.mlp.*": "q8_0", "lm_head": "q4_1"}
    config = Config("q4_0", embedding=None, skip=["*.o_proj"], overrides=overrides)
    rows = {row.name: row for row in report(quantize_(llama(), config)).rows}
    assert str(rows["model.layers.0.mlp.up_proj"].format) == "int8_channel"
    assert str(rows["model.layers.1.mlp.up_proj"].format) == "q8_0"
    assert str(rows["model.layers.1.self_attn.q_proj"].format) == "q4_0"
    assert rows["model.layers.1.self_attn.o_proj"].reason == "skip pattern '*.o_proj'"
    assert str(rows["model.embed_tokens"].format) == "q4_1"  # tied to lm_head


@pytest.mark.parametrize("setting", [{"skip": ["lm_haed"]}, {"overrides": {"lm_haed": "q8_0"}}])
def test_a_pattern_that_matches_nothing_names_the_closest(setting: dict[str, Any]) -> None:
    model = llama()
    with pytest.raises(ArgumentError, match=r"'lm_haed' matches no module: the closest names are lm_head,"):
        quantize_(model, Config("q4_0", **setting))
    assert not report(model).quantized


@pytest.mark.parametrize("wrong", [{"skip": "lm_head"}, {"method": "best"}, {"compute": "int9"}, {"activation": "x"}])
def test_config_refuses_nonsense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"one of|list of patterns"):
        Config("q4_0", **wrong)
    for name in ("format", "embedding", "overrides"):
        with pytest.raises(FormatError, match="unknown format 'q5'"):
            Config(**{"format": "q4_0", name: {"*": "q5"} if name == "overrides" else "q5"})


def test_everything_else_is_reported_with_its_reason() -> None:
    class Subclass(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return -super().forward(input)

    class Called(nn.Linear):
        def __call__(self, input: Tensor) -> Tensor:
            return -super().__call__(input)

    class Holding(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(shape))

    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda *_: None)
    used_elsewhere = nn.Linear(8, 8)
    holder = nn.ParameterList([used_elsewhere.weight])
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(8, 8),
            "own": Subclass(8, 8),
            "called": Called(8, 8),
            "parametrized": parametrizations.weight_norm(nn.Linear(8, 8)),
            "hooked": hooked,
            "renorm": nn.Embedding(4, 8, max_norm=1.0),
            "wide": nn.Linear(8, 8, dtype=torch.float64),
            "meta": nn.Linear(8, 8, device="meta"),
            "empty": nn.Embedding(0, 8),
            "attention": nn.MultiheadAttention(8, 2, kdim=4),
            "elsewhere": used_elsewhere,
            "holder": holder,
            "norm": nn.LayerNorm(8),
            "batch": nn.BatchNorm1d(8, affine=False),
            "prelu": nn.PReLU(),
            "mirrored": nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
            "experts": Holding(2, 4, 8),
            "factors": Holding(8, 1, 1),
            "lazy": nn.LazyLinear(8),
            "nothing": nn.ReLU(),
        }
    )
    result = report(quantize_(model, "q8_0"))
    assert [row.name for row in result.quantized] == ["plain", "mirrored"]
    reasons = {row.name: row.reason for row in result.kept}
    assert reasons == {
        "own": "Subclass has a forward of its own",
        "called": "Called has a forward of its own",
        "parametrized": PARAMETRIZED,
        "parametrized.parametrizations.weight": "what a parametrized weight is made of",
        "hooked": "it has forward hooks, which would be lost",
        "renorm": "max_norm rescales its weight as it runs",
        "wide": "its weight is torch.float64: kernels take torch.float32, torch.bfloat16, torch.float16",
        "meta": "its weight has no data (meta device)",
        "empty": "its weight is empty",
        "attention": ATTENTION,
        "attention.out_proj": "MultiheadAttention reads its weight without calling it",
        "elsewhere": "its weight is also holder.0, which is not a module that can be quantized",
        "holder": NOT_A_KIND,
        "norm": NOT_A_KIND,
        "batch": NOT_A_KIND,
        "prelu": NOT_A_KIND,
        "experts": "it has stacked weights, and is not a module of experts as transformers builds them",
        "factors": NOT_A_KIND,
        "lazy": "its weight is a UninitializedParameter",
    }


def test_transformer_encoder_calls_its_quantized_layers() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        want = model(x)
        quantize_(model, "int8_channel")
        calls: list[nn.Module] = []
        model.layers[0].linear1.register_forward_hook(lambda module, *_: calls.append(module))
        got = model(x)
    assert calls, "torch's fused path would read the weights instead"
    assert float((got - want).norm() / want.norm()) < 0.02


def test_nothing_changes_if_one_weight_cannot_be_quantized() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight[3, 4] = math.nan
    with pytest.raises(ArgumentError, match=r"1\.weight"):
        quantize_(model, "q4_0")
    assert [type(module) for module in model] == [nn.Linear, nn.Linear]


def test_a_lone_layer_has_no_place_to_be_replaced_in() -> None:
    with pytest.raises(ArgumentError, match="wrap it"):
        quantize_(nn.Linear(8, 8), "q4_0")


# The report


def test_report_says_what_is_tied() -> None:
    for model in (llama(), quantize_(llama(), Config("q4_0", skip=["lm_head"]))):
        assert re.search(r"\nlm_head  .* tied to model.embed_tokens\n", str(report(model)))
    assert "tied" not in str(report(llama(tied=False)))


def test_report_counts_bytes_and_bits() -> None:
    model = nn.Sequential(nn.Linear(64, 10), nn.LayerNorm(10))
    before = report(model)
    assert [row.reason for row in before.rows] == ["not quantized yet", NOT_A_KIND]
    assert before.bytes_before == before.bytes_after == 4 * (64 * 10 + 10 + 20)
    after = report(quantize_(model, "q4_0"))
    assert after.bytes_before == before.bytes_before
    assert after.bytes_after == 10 * 2 * 18 + 4 * (10 + 20)  # 2 blocks of 18 bytes a row
    assert after.bits_per_weight == 4.5
    assert "1 quantized at 4.50 bits per weight, 1 kept; 2.7 kB before, 480 B after, 5.58 times smaller" in str(after)
    assert str(before).endswith("2.7 kB before, 2.7 kB after")
    assert json.loads(json.dumps(after.to_json()))["totals"]["bytes_after"] == after.bytes_after


@pytest.mark.parametrize("fmt", FORMATS)
def test_relative_error_is_the_frobenius_norm(fmt: str) -> None:
    weight = torch.randn(70, 50, dtype=torch.bfloat16)
    codes = ops.quantize(weight, fmt)
    w = weight.double()
    exact = float((w - codes.dequantize(torch.float64)).norm() / w.norm())
    assert relative_error(weight, codes) == pytest.approx(exact, rel=1e-4)  # the differences are taken in float32
    assert relative_error(torch.zeros(3, 5), ops.quantize(torch.zeros(3, 5), fmt)) == 0.0
    row = report(quantize_(nn.Sequential(nn.Embedding(70, 50, _weight=weight)), Config("q4_0", embedding=fmt))).rows[0]
    assert row.error == pytest.approx(exact, rel=1e-4)
