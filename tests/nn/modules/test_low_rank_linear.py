"""Linear layers whose outliers are a product of low rank: `Config(low_rank=...)`."""

import copy
import pickle
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import halfbyte as hb
from halfbyte import ops
from halfbyte.errors import ArgumentError, CheckpointError, FormatError, UnsupportedError
from halfbyte.kernels import reference
from halfbyte.nn.dequantized import dequantize_
from halfbyte.nn.modules import low_rank as low_rank_module
from halfbyte.nn.modules.low_rank import LowRankLinear
from halfbyte.nn.modules.permuted import PermutedLinear
from halfbyte.nn.parallel.plan import holders

K, OUTLIERS = 256, [7, 100, 140, 250]  # one in each block of 64 inputs


def network(*, weights: float = 1.0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, 96), nn.Linear(96, 8))
    with torch.no_grad():
        for layer in model:
            layer.weight.normal_()
        model[0].weight[:, OUTLIERS] *= weights
    return model.to(dtype)


def config(**settings: Any) -> hb.Config:
    return hb.Config("int4_g64", **{"skip": ["1"], "low_rank": 8, "compute": "int8", **settings})


def error(model: nn.Module, x: Tensor, want: Tensor) -> float:
    return float((model(x).float() - want).norm() / want.norm())


@torch.no_grad()
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("how", ["float", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference(dtype: torch.dtype, how: Literal["float", "int8"], scaled: bool) -> None:
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    if scaled:
        x[:, OUTLIERS] *= 64  # without outliers no scale may be the best
    small: Any = hb.quantize_(network(weights=1 if scaled else 50, dtype=dtype), config(compute=how), [x] if scaled else None)
    layer, codes = small[0], small[0].residual.codes()
    assert isinstance(layer, LowRankLinear)
    assert (layer.input_scale is not None) == scaled
    want = reference.low_rank_linear(x, codes, layer.low_rank_in, layer.low_rank_out, layer.bias, how, layer.input_scale)
    z = x if layer.input_scale is None else x * layer.input_scale
    inner = z.double() @ layer.low_rank_in.double().mT
    branch = inner @ layer.low_rank_out.double().mT
    # torch rounds the product of rank 8 twice: z A^T, and that with B^T; float32 sums of 256 and 8 terms besides.
    sizes = z.double().abs() @ layer.low_rank_in.double().abs().mT
    rounded = inner.abs() * torch.finfo(dtype).eps + sizes * K * 2.0**-24
    passed_on = rounded @ layer.low_rank_out.double().abs().mT
    passed_on += branch.abs() * torch.finfo(dtype).eps + inner.abs() @ layer.low_rank_out.double().abs().mT * 8 * 2.0**-24
    bound = reference.error_bound(z, codes, layer.bias, how, residual=branch) + passed_on
    assert reference.agrees(layer(x), want, bound).all()


@torch.no_grad()
def test_outliers_of_weights() -> None:
    """The best product of rank 4 is no further from W than the columns with the outliers are: |R| <= |W without these| (Eckart and Young),
    numbers near 1, of which the largest of 64 is near 2.5. A block's step is a seventh of its largest number: 2.5 / 7 with the branch,
    which leaves an error of 2.5 / 7 / sqrt(12) = 0.10 of each number near 1, rms. Without it the step is some 50 |g| / 7, g normal, and
    the others in the block become 0 or one step: their error is 1, rms, or more. So outputs are ten times as near, or more."""
    model, x = network(weights=50), torch.randn(64, K, generator=torch.Generator().manual_seed(1))
    first, want = copy.deepcopy(model)[:1], model[0](x)
    plain = hb.quantize_(copy.deepcopy(first), hb.Config("int4_g64", compute="int8"))
    small: Any = hb.quantize_(copy.deepcopy(first), hb.Config("int4_g64", compute="int8", low_rank=8))
    assert error(small, x, want) < error(plain, x, want) / 8
    # Each code is off by half a step, and int8 rounds x by half of its step: both bounds hold for every output.
    layer = small[0]
    rest = (model[0].weight - layer.low_rank_out @ layer.low_rank_in).view(96, -1, 64).abs().amax(-1) / 7
    steps = x.view(64, -1, 64).abs().amax(-1) / 127
    stored = layer.residual.weight.clone().view(96, -1, 64).abs().sum(-1)
    bound = x.view(64, -1, 64).abs().sum(-1) @ rest.mT / 2 + steps @ stored.mT / 2
    assert ((small(x) - want).abs() <= bound * 1.001 + 1e-3).all()  # scales are float16; 12 products of 50 in float32


@torch.no_grad()
def test_outliers_of_activations() -> None:
    """Inputs 64 times as large make steps of int8 64 times as large for the others in their blocks. Scales divide these inputs by 8 and
    multiply their weights by 8, which the branch takes: steps become 8 times as small, and 4 bits are what remains."""
    model, x = network(), torch.randn(64, K, generator=torch.Generator().manual_seed(1))
    x[:, OUTLIERS] *= 64
    first, want = copy.deepcopy(model)[:1], model[0](x)
    settings = hb.Config("int4_g64", compute="int8", low_rank=8)
    plain = hb.quantize_(copy.deepcopy(first), hb.Config("int4_g64", compute="int8"))
    unscaled, scaled = (hb.quantize_(copy.deepcopy(first), settings, samples) for samples in (None, [x]))
    assert error(scaled, x, want) < error(unscaled, x, want) / 2
    assert error(scaled, x, want) < error(plain, x, want) / 3


@torch.no_grad()
@pytest.mark.parametrize("scaled", [False, True])
def test_saved_and_loaded(scaled: bool, tmp_path: Path) -> None:
    x = torch.randn(3, K)
    small: Any = hb.quantize_(network(weights=50, dtype=torch.bfloat16), config(), [x.bfloat16()] if scaled else None)
    want, state = small(x.bfloat16()), small.state_dict()
    hb.save(small, tmp_path / "small")
    for start in (network(dtype=torch.bfloat16), hb.load(tmp_path / "small", model=network(dtype=torch.bfloat16))):
        again: Any = hb.load(tmp_path / "small", model=start)
        assert torch.equal(again(x.bfloat16()), want)
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in state.items())
    hb.save(again, tmp_path / "again")
    files = [next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in ("small", "again")]
    assert files[0] == files[1]
    for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):  # noqa: S301
        assert torch.equal(other(x.bfloat16()), want)
    plain = hb.quantize_(network(), hb.Config("int4_g64", skip=["1"]))
    hb.save(plain, tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        hb.load(tmp_path / "plain", model=small)
    broken: Any = nn.Sequential(nn.Linear(K, 90), nn.Linear(90, 8))
    with pytest.raises(CheckpointError):
        hb.load(tmp_path / "small", model=broken)
    assert type(broken[0]) is nn.Linear  # unchanged


@pytest.mark.parametrize("damage", ["no rank", "rank", "missing", "shape"])
def test_damaged_files(damage: str, tmp_path: Path) -> None:
    hb.save(hb.quantize_(network(), config()), tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    state = load_file(file)
    match damage:
        case "no rank":
            state["0.low_rank_in"] = torch.zeros(0, K)
        case "rank":
            state["0.low_rank_in"] = torch.zeros(96, K)
        case "missing":
            del state["0.low_rank_out"]
        case "shape":
            state["0.low_rank_in"] = torch.zeros(8, K - 1)
    save_file(state, file)
    model = network()
    with pytest.raises(CheckpointError, match=r"0\.(low_rank|residual)"):
        hb.load(tmp_path, model=model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]


@torch.no_grad()
def test_other_uses(tmp_path: Path) -> None:
    x = torch.randn(3, K)
    small: Any = hb.quantize_(network(weights=50), config(compute="float"), [x])
    want = small(x)
    assert hb.quantize_(small, config(compute="float")) is small
    assert "product of low rank" in str(hb.report(small))
    torch.compiler.reset()  # graphs of the forward of Sequential: torch keeps eight
    compiled: Any = torch.compile(small, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert small(x).dtype == torch.bfloat16
    assert error(small[0], x.bfloat16(), small[0](x)) < 0.02  # x, and each of two products, rounded by 2^-9
    with pytest.raises(ArgumentError, match=r"linear takes activations of float32, bfloat16 or float16, got torch\.float64"):
        small(x.double())
    floats: Any = copy.deepcopy(small)
    dequantize_(floats)
    assert [type(layer) for layer in floats] == [nn.Linear, nn.Linear]
    torch.testing.assert_close(floats(x), want, rtol=1e-3, atol=1e-2)  # sums of 256 products of up to 50 * 3
    torch.testing.assert_close(small[0].weight, floats[0].weight)
    assert torch.equal(hb.optimize_(small)(x), want)
    halves = small.half()
    torch.testing.assert_close(halves(x.half()).float(), want, rtol=2e-2, atol=2.0)


def test_gradients_reach_the_input() -> None:
    small = hb.quantize_(network(weights=50), config(compute="float"))
    x = torch.randn(3, K, requires_grad=True)
    small(x).square().sum().backward()
    floats = copy.deepcopy(small)
    dequantize_(floats)
    other = x.detach().requires_grad_()
    floats(other).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-3, atol=10.0)  # of numbers near 10^4


@pytest.mark.parametrize(
    ("settings", "samples", "message"),
    [
        ({"low_rank": -1}, None, "low_rank is a whole number, got -1"),
        ({"low_rank": 2.0}, None, r"low_rank is a whole number, got 2\.0"),
        (
            {"low_rank": 96},
            None,
            r"no linear layer can have a branch of low_rank=96 \(0 has no more than 96 inputs or outputs\): use a lower rank",
        ),
        ({"method": "gptq"}, torch.zeros(4, 32, dtype=torch.int64), "low_rank does not go together with method='gptq'"),
        ({"activations": "static"}, None, 'low_rank does not go together with activations="static"'),
        ({}, [torch.full((2, K), torch.nan)], "an input of 0 is NaN or infinite"),
        ({}, 3, "calibration for low_rank takes inputs of the model, got int"),
    ],
)
def test_bad_input(settings: dict[str, Any], samples: object, message: str) -> None:
    model = network()
    with pytest.raises(ArgumentError, match=message):
        hb.quantize_(model, config(**settings), samples)  # type: ignore[arg-type]
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    assert not any(layer._forward_pre_hooks for layer in model)


@torch.no_grad()
def test_layers_without_a_branch_are_quantized() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.5, batch_first=True), nn.Linear(64, 8))
    x = torch.randn(2, 5, 64)
    small: Any = hb.quantize_(model, hb.Config("int4_g32", low_rank=8), [x])
    assert small.training
    assert all(isinstance(small[0].get_submodule(name), LowRankLinear) for name in ("linear1", "linear2"))
    notes = hb.report(small).notes
    assert "low_rank: 1 has no branch, as it has no more than 8 inputs or outputs" in notes
    assert "low_rank: 0.self_attn.out_proj has no branch, as it belongs to a Conv1D or a MultiheadAttention" in notes
    assert {row.name for row in hb.report(small).quantized} >= {"1", "0.self_attn.out_proj", "0.linear1.residual"}


@torch.no_grad()
def test_a_rest_that_a_format_cannot_hold_stays_float() -> None:
    model = network()
    model[0].weight[:, 1:] = 0  # of rank 1: what the branch leaves is rounding, too small for float16 scales
    model[0].weight.mul_(1e-3)
    x = torch.randn(3, K)
    want = model[0](x)
    small: Any = hb.quantize_(model, config(skip=[], overrides={"1": "q8_0"}))
    assert type(small[0].residual) is nn.Linear
    assert "0.residual" in {row.name for row in hb.report(small).kept}
    torch.testing.assert_close(small[0](x), want, rtol=1e-4, atol=1e-6)


def test_nothing_changes_on_failure(tmp_path: Path) -> None:
    model: Any = network()
    with torch.no_grad():
        model[0].weight.mul_(1e-30)
    with pytest.raises(FormatError):
        hb.quantize_(model, config(strict=True))
    assert type(model[0]) is nn.Linear
    for call in (lambda: hb.HalfbyteConfig(config()), lambda: hb.convert(tmp_path, tmp_path / "new", config())):
        with pytest.raises(UnsupportedError, match=r"low_rank takes a float model that is in memory: load it, and call quantize_"):
            call()
    with pytest.raises(ArgumentError, match="cannot be trained"):
        hb.prepare_qat_(model, config())


def test_who_cannot_take_it_says_so(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    ids = torch.randint(50, (2, 16))
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    small: Any = hb.quantize_(model.eval(), hb.Config("int4_g64", low_rank=8, skip=["lm_head"]), ids)
    want = small(ids).logits
    hb.save(small, tmp_path / "native")
    small.save_pretrained(tmp_path / "transformers")
    assert torch.equal(hb.load(tmp_path / "native")(ids).logits, want)
    for name in ("native", "transformers"):
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits, want)
    with pytest.raises(UnsupportedError, match=r"computes no products of low rank, which .*q_proj\.weight has"):
        hb.LanguageModel.open(tmp_path / "native")
    for kind in ("gguf", "awq", "gptq", "compressed-tensors"):
        with pytest.raises(UnsupportedError, match=f"has products of low rank, .*, which {kind} cannot hold: quantize without"):
            hb.export(tmp_path / "native", tmp_path / f"other.{kind}", kind)
    with pytest.raises(UnsupportedError, match=r"peft's LORA cannot train .*q_proj, a LowRankLinear: quantize without low_rank"):
        get_peft_model(small, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match="has a product of low rank, which processes cannot share"):
        holders(small)


@pytest.fixture
def added_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches are added within the product, as where torch.compile traces for a GPU; torch computes it."""

    def low_rank(x: Tensor, inner: Tensor, outer: Tensor, packed: Any, bias: Tensor | None, compute: str, activation: str) -> Tensor:
        rank = outer.shape[1]
        branches = [a @ b.T for a, b in zip(inner.split(rank, -1), outer.chunk(inner.shape[-1] // rank), strict=True)]
        return ops.linear(x, packed, bias, compute=compute, activation=activation) + torch.cat(branches, -1)

    monkeypatch.setattr(low_rank_module, "adds_low_rank", lambda *_: True)
    monkeypatch.setattr(ops, "linear_low_rank", low_rank)


@torch.no_grad()
@pytest.mark.usefixtures("added_on_gpus")
def test_a_branch_is_added_to_what_the_residual_gives() -> None:
    """Also where that has its inputs in another order, or a hook."""
    small: Any = hb.quantize_(network(), config(compute="float"))
    layer, x = small[0], torch.randn(3, K)
    branch = x @ layer.low_rank_in.T @ layer.low_rank_out.T
    torch.testing.assert_close(layer(x), layer.residual(x) + branch)
    handle = layer.residual.register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(layer(x), layer.residual(x) + branch)
    handle.remove()
    layer.residual = PermutedLinear(layer.residual, torch.randperm(K))
    torch.testing.assert_close(layer(x), layer.residual(x) + branch)


@torch.no_grad()
@pytest.mark.usefixtures("added_on_gpus")
def test_a_fused_residual_alone_has_no_branch() -> None:
    """Though its sibling was just called with one, for the same input."""
    model = nn.Module()
    model.q_proj, model.k_proj, model.v_proj = (nn.Linear(K, 64) for _ in range(3))
    fused: Any = hb.fuse_(hb.quantize_(model, hb.Config("int4_g64", low_rank=8, compute="float")))
    x = torch.randn(3, K)
    want = x @ fused.k_proj.residual.weight.T + fused.k_proj.residual.bias
    fused.q_proj(x)
    torch.testing.assert_close(fused.k_proj.residual(x), want, rtol=1e-4, atol=1e-4)
