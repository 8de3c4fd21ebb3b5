"""AWQ: what folds, that folding changes nothing, and what scales gain."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from halfbyte.formats import as_format
from halfbyte.nn.calibration.calibrate import Calibration, Result, calibrate
from halfbyte.nn.calibration.folding import Fold, find_folds
from halfbyte.quantizers.awq import AWQ, output_error, search_scale

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 32, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")
LLAMA = {
    ("input_layernorm", ATTENTION), ("self_attn.v_proj", ("self_attn.o_proj",)),
    ("post_attention_layernorm", MLP), ("mlp.up_proj", ("mlp.down_proj",)),
}  # fmt: skip
GEMMA = {pair for pair in LLAMA if pair[1] != MLP} | {("pre_feedforward_layernorm", MLP)}
# Who divides what in one decoder layer. phi's gelu lets nothing through; phi3 has its three and two matrices in one.
EXPECTED = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma": LLAMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi3": {
        ("input_layernorm", ("self_attn.qkv_proj",)),
        ("self_attn.qkv_proj", ("self_attn.o_proj",)),
        ("post_attention_layernorm", ("mlp.gate_up_proj",)),
        ("mlp.gate_up_proj", ("mlp.down_proj",)),
    },
    "phi": {("input_layernorm", (*ATTENTION, "mlp.fc1")), ("self_attn.v_proj", ("self_attn.dense",))},
}


def language_model(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of random weights whose norms, biases and channels all differ."""
    torch.manual_seed(0)
    sizes = SIZES | ({"head_dim": 8} if "gemma" in kind else {}) | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
                if "norm" in name and name.endswith("weight"):
                    parameter[3] += 4  # an outlier channel
    return model.to(dtype)


def tokens(n: int = 4, t: int = 16) -> Tensor:
    return torch.randint(0, 64, (n, t), generator=torch.Generator().manual_seed(1))


def linears(layer: nn.Module) -> list[str]:
    return [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]


def layer_and_run(model: Any) -> tuple[nn.Module, Any]:
    """The first decoder layer, and a function that runs a copy of it in its place: the logits of the model up to there."""
    base = model.model
    x = tokens()

    def run(layer: nn.Module) -> Tensor:
        whole = copy.deepcopy(base)
        whole.layers = nn.ModuleList([layer])
        whole.config.num_hidden_layers = 1
        whole.norm = whole.final_layernorm = nn.Identity()
        with torch.no_grad():
            output: Tensor = whole(x, use_cache=False).last_hidden_state
        return output

    return base.layers[0], run


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_folds_of_a_decoder_layer(kind: str) -> None:
    layer, run = layer_and_run(language_model(kind))
    folds = find_folds(layer, linears(layer), run)
    assert {(fold.producer, tuple(sorted(fold.consumers))) for fold in folds} == {(p, tuple(sorted(c))) for p, c in EXPECTED[kind]}
    assert {fold.kind for fold in folds if "norm" in fold.producer} == {"shifted" if "gemma" in kind else "norm"}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_folded_model_is_the_same_model(kind: str) -> None:
    model = language_model(kind).double()
    layer, run = layer_and_run(model)
    folds = find_folds(layer, linears(layer), run)
    trial = copy.deepcopy(layer)
    for fold in folds:
        scale = torch.rand(int(fold.channel.max()) + 1, dtype=torch.float64).add(0.1)[fold.channel]
        used, _ = fold.apply(trial, scale, {name: torch.float64 for name, _ in layer.named_parameters()})
        assert torch.allclose(used, scale, rtol=1e-9)
    expected = run(layer)
    changed = [n for (n, a), b in zip(layer.named_parameters(), trial.parameters(), strict=True) if not torch.equal(a, b)]
    assert len(changed) >= len(folds)
    # float64 but for the norms and rotations, which these models compute in float32: some tens of roundings of 2^-24.
    assert float((run(trial) - expected).abs().max()) <= 2**-17 * float(expected.abs().max())


@pytest.mark.parametrize("kind", ["norm", "shifted"])
def test_rounding_a_norm_is_made_up_for(kind: Any) -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 4, bias=False)
    nn.init.normal_(norm.weight)
    norm.weight.data = norm.weight.data.bfloat16().float()
    norm.weight.data[2] = -1 if kind == "shifted" else 0  # a channel that is off
    one, weight, w = (1 if kind == "shifted" else 0), norm.weight.detach().clone(), linear.weight.detach().clone()
    block = nn.ModuleDict({"norm": norm, "linear": linear})
    fold = Fold("norm", kind, torch.arange(8), ("linear",))
    wanted = torch.rand(8) + 0.5
    used, changed = fold.apply(block, wanted, {"norm.weight": torch.bfloat16, "norm.bias": torch.bfloat16})
    assert changed["norm.weight"].dtype == torch.bfloat16
    assert torch.equal(changed["norm.weight"].float(), norm.weight)
    # Two float32 roundings.
    assert torch.allclose((norm.weight + one) * linear.weight, (weight + one) * w, rtol=2**-22, atol=0)
    on = torch.arange(8) != 2
    assert torch.allclose(used[on], wanted[on], rtol=0.05)  # of (1 + w) near 0 bfloat16 leaves little
    assert used[2] == 1


def test_what_another_module_reads_is_not_scaled() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            out: Tensor = self.down(torch.relu(self.up(y))) + y
            return out

    torch.manual_seed(0)
    block, x = Router(), torch.randn(5, 8)
    folds = find_folds(block, ["up", "down"], lambda module: module(x))
    assert [(fold.producer, fold.consumers) for fold in folds] == [("up", ("down",))]  # relu lets a positive factor through
    assert not find_folds(block, ["down"], lambda module: module(x))  # what is not quantized divides nothing


def test_the_scale_protects_the_channels_that_matter() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(64, 128), torch.randn(400, 128)
    x[:, :4] *= 30
    moments, magnitude = x.T @ x, x.abs().mean(0)
    weights = [(w, as_format("int4_g128"))]
    scale = search_scale(weights, moments, magnitude, AWQ())
    assert float(scale[:4].min()) > 2 * float(scale[4:].max())
    plain = output_error(*weights[0], moments, torch.ones(128))
    assert output_error(*weights[0], moments, scale) < 0.5 * plain
    # The error is that of the outputs.
    from halfbyte.quantizers import absmax

    y = x.double() @ (absmax(w * scale, weights[0][1]).dequantize() / scale - w).double().T
    assert output_error(*weights[0], moments, scale) == pytest.approx(float(y.square().sum()), rel=1e-4)
    tied = search_scale(weights, moments, magnitude, AWQ(), torch.arange(128) % 32)
    assert torch.equal(tied[:32], tied[32:64])


@pytest.mark.parametrize("power", [-70, 90])
def test_weights_and_moments_of_any_magnitude_have_the_same_scale(power: int) -> None:
    torch.manual_seed(0)
    w, x, fmt = torch.randn(16, 64), torch.randn(100, 64) * torch.rand(64) * 9, as_format("int4_g32_f32")
    moments, magnitude, factor = x.T @ x, x.abs().mean(0), 2.0**power
    scale = search_scale([(w, fmt)], moments, magnitude, AWQ())
    assert not torch.equal(scale, torch.ones(64))
    assert torch.equal(search_scale([(w * factor, fmt)], moments * factor, magnitude, AWQ()), scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calibration_gives_norms_and_codes_that_belong_together(dtype: torch.dtype) -> None:
    """With 8 bits per channel the new model is nearly the old one, whatever was moved between norms and weights."""
    model = language_model("llama", dtype)
    before = copy.deepcopy(model.state_dict())
    formats = {name: as_format("int8_g16") for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    results: list[Result] = list(calibrate(model, formats, "awq", Calibration(tokens(32))))
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())
    values = {r.name: r.value if isinstance(r.value, Tensor) else r.value.dequantize() for r in results}
    assert sum("norm" in name for name in values) == 4
    assert len(values) == len(formats) + 4
    assert all(isinstance(r.value, Tensor) or (r.error is not None and r.error < 0.01) for r in results)
    other = copy.deepcopy(model).float()
    other.load_state_dict(values, strict=False)
    with torch.no_grad():
        a, b = model.float()(tokens()).logits, other(tokens()).logits
    assert float((a - b).norm() / a.norm()) < 0.02  # half a step of 127, in a few layers
    moved = {name: float((value.float() - before[name].float()).norm() / before[name].float().norm()) for name, value in values.items()}
    assert all(change > 0.05 for name, change in moved.items() if "norm" in name)
