"""Pruning: which weights go, what the others make up for, and that codes of what is 0 mean 0, to the file and back."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import halfbyte as hb
from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import PRESETS, as_format
from halfbyte.quantizers.gptq import gptq
from halfbyte.quantizers.sparse import SPARSE_METHODS, Sparsity, as_sparsity, prune

FORMATS = [
    f for f in (*PRESETS, "int4_g128", "int4_g24_zp", "int4_channel", "int4_tensor_zp", "int8_channel") if as_format(f).zero != "offset"
]
SPARSITIES = ("2:4", "1:2", "3:7", 0.5, 0.25)


def problem(n: int = 24, k: int = 66) -> tuple[Tensor, Tensor]:
    """A weight, and the moments of inputs that are correlated and differ in size."""
    x = torch.randn(4 * k, k) @ torch.randn(k, k) * torch.logspace(-1, 1, k)[torch.randperm(k)]
    return torch.randn(n, k), x.T @ x


def loss(weight: Tensor, pruned: Tensor, moments: Tensor) -> float:
    """tr(D H D^T): the squared error of the outputs."""
    d = (pruned - weight).double()
    return float(((d @ moments.double()) * d).sum())


def check_sparsity(pruned: Tensor, sparsity: Sparsity) -> None:
    """Weights [N, K] without zeros of their own before."""
    n, k = pruned.shape
    if sparsity.of:
        for start in range(0, k, sparsity.of):
            group = pruned[:, start : start + sparsity.of]
            assert torch.equal((group != 0).sum(1), torch.full((n,), min(sparsity.keep, group.shape[1])))


@pytest.mark.parametrize("method", SPARSE_METHODS)
@pytest.mark.parametrize("text", SPARSITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_many_weights_go_as_the_sparsity_says(method: str, text: str | float, dtype: torch.dtype) -> None:
    weight, moments = problem()
    sparsity = as_sparsity(text)
    assert str(sparsity) == str(text)
    pruned = prune(weight.to(dtype), sparsity, method, None if method == "magnitude" else moments)
    assert pruned.dtype == dtype
    check_sparsity(pruned, sparsity)
    if not sparsity.of:
        wanted = {"magnitude": 24 * 66, "wanda": 66, "sparsegpt": 24 * 66}[method]
        rows = 24 if method == "wanda" else 1
        assert int((pruned == 0).sum()) == rows * math.floor(sparsity.zeros * wanted)
    if method != "sparsegpt":
        kept = pruned != 0
        assert torch.equal(pruned[kept], weight.to(dtype)[kept])


def test_the_smallest_go() -> None:
    weight = torch.tensor([[1.0, -4.0, 3.0, 2.0, -0.1, 0.3]])
    assert prune(weight, as_sparsity("2:4"), "magnitude").tolist() == [[0, -4, 3, 0, pytest.approx(-0.1), pytest.approx(0.3)]]
    assert prune(weight, as_sparsity(0.5), "magnitude").tolist() == [[0, -4, 3, 2, 0, 0]]
    moments = torch.diag(torch.tensor([100.0, 1, 1, 1, 1, 1]))
    assert prune(weight, as_sparsity("2:4"), "wanda", moments)[0, :4].tolist() == [1, -4, 0, 0]
    same = torch.ones(3, 8)
    assert int((prune(same, as_sparsity(0.5), "magnitude") == 0).sum()) == 12
    check_sparsity(prune(same, as_sparsity("2:4"), "magnitude"), as_sparsity("2:4"))


@pytest.mark.parametrize("text", ["2:4", 0.5])
def test_knowing_the_inputs_helps_and_making_up_for_the_loss_helps_more(text: str | float) -> None:
    weight, moments = problem(64, 160)
    sparsity = as_sparsity(text)
    magnitude, wanda, sparsegpt = (
        loss(weight, prune(weight, sparsity, method, None if method == "magnitude" else moments), moments) for method in SPARSE_METHODS
    )
    assert wanda < 0.8 * magnitude
    assert sparsegpt < 0.95 * wanda


def test_sparsegpt_solves_for_the_columns_after_a_zero() -> None:
    """Where one weight of a row goes, the change of the later columns is that which minimises d H d^T with d = -w at the zero."""
    weight, moments = problem(8, 12)
    pruned = prune(weight, Sparsity(zeros=1 / 12 + 1e-9), "sparsegpt", moments, damping=1e-9)  # 8 of 96 weights
    h, checked = moments.double(), 0
    for row, before in zip(pruned.double(), weight.double(), strict=True):
        gone = (row == 0).nonzero().flatten().tolist()
        if len(gone) == 1 and gone[0] < 11:
            assert torch.equal(row[: gone[0]], before[: gone[0]])
            later = slice(gone[0] + 1, None)
            wanted = torch.linalg.solve(h[later, later], h[later, gone[0]] * before[gone[0]])
            # The damping, and float32, are magnified by the condition of H, 1e5 or so.
            torch.testing.assert_close((row - before)[later], wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
            checked += 1
    assert checked


# Codes


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("method", ["absmax", "mse", "hqq", "gptq"])
def test_what_is_pruned_has_codes_that_mean_0(fmt: str, method: str) -> None:
    weight, moments = problem()
    pruned = prune(weight, as_sparsity("2:4"), "wanda", moments)
    codes = gptq(pruned, as_format(fmt), moments) if method == "gptq" else hb.quantize(pruned, fmt, method)
    zero = 0 if codes.zero is None else codes.spread(codes.zero).to(torch.int16)
    assert bool((codes.values() == zero)[pruned == 0].all())
    assert bool((codes.dequantize()[pruned == 0] == 0).all())


def test_gptq_makes_up_for_rounding_where_weights_are_left() -> None:
    weight, moments = problem(64, 160)
    pruned = prune(weight, as_sparsity("2:4"), "sparsegpt", moments)
    fmt = as_format("int4_g128")
    assert loss(pruned, gptq(pruned, fmt, moments).dequantize(), moments) < 0.7 * loss(
        pruned, hb.quantize(pruned, fmt).dequantize(), moments
    )


# Models


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, tie_word_embeddings=False, **sizes)).eval()


def tokens() -> Tensor:
    return torch.randint(0, 50, (16, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", SPARSE_METHODS)
def test_a_language_model_is_pruned_quantized_and_saved(method: str, tmp_path: Path) -> None:
    model = llama()
    before = copy.deepcopy(model)
    hb.prune_(model, "2:4", method, None if method == "magnitude" else tokens(), skip=["lm_head"])
    assert torch.equal(model.lm_head.weight, before.lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, before.model.embed_tokens.weight)
    linears = {name: m.weight.detach().clone() for name, m in model.model.layers.named_modules() if isinstance(m, nn.Linear)}
    assert len(linears) == 14
    for weight in linears.values():
        check_sparsity(weight, as_sparsity("2:4"))
    total = sum(w.numel() for w in linears.values())
    said = f"pruned to 2:4 by {method}: {total // 2} of {total} weights in 14 layers became 0, a density of 0.500"
    assert said in str(hb.report(model))
    hb.quantize_(model, hb.Config("int4_g128_zp", method="gptq"), tokens())
    hb.save(model, tmp_path / "sparse")
    again: Any = hb.load(tmp_path / "sparse")
    for name, weight in linears.items():
        assert bool((again.model.layers.get_submodule(name).codes().dequantize()[weight == 0] == 0).all())
    assert said in str(hb.report(model))


def test_layers_are_pruned_for_what_the_pruned_ones_before_them_give() -> None:
    """With the first layer left whole, the second meets other inputs, and other weights go."""
    for method in SPARSE_METHODS:
        calibration = None if method == "magnitude" else tokens()
        torch.manual_seed(0)
        model = llama()
        alone = hb.prune_(copy.deepcopy(model), 0.5, method, calibration, skip=["model.layers.0.*"])
        both = hb.prune_(model, 0.5, method, calibration)
        weights = [m.model.layers[1].mlp.down_proj.weight for m in (alone, both)]  # type: ignore[union-attr,index]
        assert torch.equal(*weights) == (method == "magnitude")


def test_convolutions_are_pruned_by_magnitude_alone() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv1d(8, 16, 3), nn.Linear(16, 16), nn.Embedding(9, 16))
    embedding = copy.deepcopy(model[3])
    hb.prune_(model, "2:4")
    taps: Any = model[0].weight.movedim(1, -1).reshape(16, -1)  # type: ignore[union-attr]
    check_sparsity(taps, as_sparsity("2:4"))
    assert torch.equal(model[3].weight, embedding.weight)  # type: ignore[arg-type]
    hb.quantize_(model, "int8_channel")
    codes: Any = model[0]
    assert torch.equal(codes.codes().values() == 0, taps == 0)


def test_a_model_whose_only_layers_are_convolutions_is_refused_with_calibration() -> None:
    model = llama()
    model.conv = nn.Conv1d(8, 8, 4)
    with pytest.raises(ArgumentError, match="has no Linear in floating point with a weight of its own for wanda to prune"):
        hb.prune_(model, "2:4", "wanda", tokens(), skip=["*_proj", "lm_head"])
    assert not (model.conv.weight == 0).any()
    assert not hb.report(model).notes


def test_what_cannot_be_pruned_is_refused_and_nothing_changes() -> None:
    for sparsity in ("4:2", "2:2", "0:4", "50%", 0.0, 1.0, 1, "2:4:1"):
        with pytest.raises(ArgumentError, match="a sparsity is"):
            as_sparsity(sparsity)
    model = llama()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for settings, message in (
        ({"method": "random"}, "is one of magnitude, wanda, sparsegpt, got 'random'"),
        ({"method": "wanda"}, "wanda needs calibration"),
        ({"calibration": tokens()}, "magnitude has no use for calibration, which wanda, sparsegpt learn from"),
        ({"skip": ["nothing"]}, "matches no module"),
        ({"skip": ["*_proj", "lm_head"]}, "has no Linear or convolution in floating point with a weight of its own for magnitude to prune"),
        ({"method": "wanda", "calibration": tokens() + 50}, "use the model's own tokenizer"),
    ):
        with pytest.raises(ArgumentError, match=message):
            hb.prune_(model, "2:4", **settings)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="for magnitude to prune: prune the float model"):
        hb.prune_(hb.quantize_(copy.deepcopy(model), "q4_0"), "2:4")
    with pytest.raises(ArgumentError, match="to prune: pass a model that has some"):
        hb.prune_(nn.Sequential(nn.ReLU()), "2:4")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    for method in SPARSE_METHODS:
        with pytest.raises(ArgumentError, match=r"up_proj\.weight \[48, 32\] holds 1 NaN|moments .* NaN"):
            hb.prune_(model, "2:4", method, None if method == "magnitude" else tokens())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items() if "layers.1.mlp.up_proj" not in name)
    with pytest.raises(ArgumentError, match=r"takes a weight \[N, K\] and moments \[K, K\]"):
        prune(torch.ones(4, 8), as_sparsity("2:4"), "wanda", torch.ones(4, 4))
