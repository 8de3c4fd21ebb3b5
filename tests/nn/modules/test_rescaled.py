"""Arithmetic in place by numbers on quantized weights, and models that do it as they run."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import RwkvConfig, RwkvForCausalLM

import halfbyte as hb
from halfbyte.checkpoint import load, save
from halfbyte.errors import UnsupportedError
from halfbyte.integrations.transformers.quantizer import HalfbyteConfig
from halfbyte.nn.modules.conv import QuantConv2d
from halfbyte.nn.modules.quantized import QuantLinear

IDS = torch.arange(2, 14).reshape(2, 6)


def linear(fmt: str, bias: bool = False) -> Any:
    torch.manual_seed(0)
    return hb.quantize_(nn.Sequential(nn.Linear(64, 16, bias=bias)), fmt)[0]  # type: ignore[index]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "q8_0", "int4_g32_zp", "int8_channel_offset", "mxfp4", "nvfp4", "iq4_nl", "int6_g16"])
def test_powers_of_two_are_exact(fmt: str) -> None:
    module = linear(fmt)
    before, x = module.weight.clone(), torch.randn(3, 64)
    y = module(x)
    module.weight.div_(4)
    assert torch.equal(module.weight + 0, before / 4)
    assert torch.equal(module(x), y / 4)
    module.weight.mul_(torch.tensor(2.0))
    module.weight.data.mul_(2)
    module.weight *= 2
    module.weight.data *= -1.0
    module.weight /= 2
    assert torch.equal(module.weight + 0, -before)
    assert torch.equal(module(x), -y)


def test_other_numbers_are_rounded_once() -> None:
    module = linear("q4_0")
    before = module.weight.clone()
    module.weight.mul_(0.3)
    assert relative(module.weight + 0, before * 0.3) < 2**-11  # half a unit of float16
    module.weight.mul_(0)
    assert not bool((module.weight + 0).any())


def test_all_modules_that_share_a_weight_have_it() -> None:
    model: Any = nn.Module()
    model.embedding, model.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
    model.head.weight = model.embedding.weight
    hb.quantize_(model, "q8_0")
    before = model.embedding(torch.arange(32))
    model.head.weight.div_(2)
    assert torch.equal(model.embedding(torch.arange(32)), before / 2)
    assert isinstance(model.head, QuantLinear)


def test_what_scales_can_not_hold() -> None:
    module = linear("q4_0")
    before = module.weight.clone()
    for factor in (1e-8, 1e9, float("nan"), float("inf")):
        with pytest.raises(UnsupportedError, match="as its float16 scales cannot hold the result: quantize it with float32 scales"):
            module.weight.mul_(factor)
    assert torch.equal(module.weight + 0, before)
    wide = linear("int4_g32_f32")
    before = wide.weight.clone()
    wide.weight.mul_(2.0**-30)
    assert torch.equal(wide.weight + 0, before * 2.0**-30)


def test_what_stays_refused() -> None:
    module = linear("q8_0")
    conv = hb.quantize_(nn.Sequential(nn.Conv2d(16, 16, 3)), "int8_channel")[0]  # type: ignore[index]
    assert isinstance(conv, QuantConv2d)
    for act in (
        lambda: module.weight.mul_(torch.ones(64)),
        lambda: module.weight.add_(1),
        lambda: module.weight.div_(0),
        lambda: module.weight.div_(2, rounding_mode="floor"),
        lambda: conv.weight.mul_(2),
    ):
        with pytest.raises(UnsupportedError, match="a quantized weight is frozen"):
            act()
    with pytest.raises(UnsupportedError, match="cannot be set"):
        module.weight = linear("q8_0").weight


# RWKV


def rwkv(**settings: int) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 4, "attention_hidden_size": 32, "intermediate_size": 64}
    model = RwkvForCausalLM(RwkvConfig(**({**sizes, "rescale_every": 2} | settings))).eval()
    model.rwkv.embeddings.weight.data.normal_(0, 0.5)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("fmt", ["q8_0", "int6_g16"])
@pytest.mark.parametrize("run_first", [False, True])
def test_rwkv_quantized_saved_and_loaded(run_first: bool, fmt: str, tmp_path: Path) -> None:
    """Its weights are divided by 2 in place in half of the layers when it first runs: each time that it is built anew."""
    expected, model = logits(rwkv()), rwkv()
    if run_first:
        logits(model)
    hb.quantize_(model, hb.Config(fmt, compute="float"))
    quantized = logits(model)
    assert relative(quantized, expected) < 0.05
    save(model, tmp_path / "m")
    assert torch.equal(logits(load(tmp_path / "m")), quantized)
    assert torch.equal(logits(model), quantized)
    model.train()
    assert torch.allclose(logits(model), quantized, rtol=0, atol=1e-4 * float(quantized.abs().max()))
    save(model, tmp_path / "m")
    assert torch.equal(logits(load(tmp_path / "m")), quantized)


@pytest.mark.parametrize("fmt", ["q8_0", "int6_g16"])
def test_rwkv_of_transformers(fmt: str, tmp_path: Path) -> None:
    rwkv().save_pretrained(tmp_path / "float")
    config = HalfbyteConfig(fmt, compute="float")
    model = RwkvForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config).eval()
    quantized = logits(model)
    assert relative(quantized, logits(rwkv())) < 0.05
    model.save_pretrained(tmp_path / "m")
    assert torch.equal(logits(model), quantized)
    for again in (RwkvForCausalLM.from_pretrained(tmp_path / "m").eval(), load(tmp_path / "m")):
        assert torch.equal(logits(again), quantized)


# Recorded and compiled


class Halving(nn.Module):
    """Divides its weight in place each time that it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.div_(2)
        y: Tensor = self.linear(x)
        return y


def halving() -> Any:
    torch.manual_seed(0)
    return hb.quantize_(Halving(), "q8_0")


def test_within_torch_compile() -> None:
    """The graph breaks there, and the write acts on the scales; with fullgraph=True it is refused."""
    model, x = halving(), torch.randn(3, 64)
    y, before = model.linear(x), model.linear.weight.clone()
    compiled = torch.compile(model, backend="eager")
    for i in (1, 2):
        assert torch.equal(compiled(x), y / 2**i)
        assert torch.equal(model.linear.weight + 0, before / 2**i)
    torch.compiler.reset()

    def operators(x: Tensor) -> Tensor:
        model.linear.weight *= 2
        model.linear.weight.data *= 2
        return model.linear(x)  # type: ignore[no-any-return]

    assert torch.equal(torch.compile(operators, backend="eager")(x), y)
    with pytest.raises(Exception, match=r"frozen within torch\.compile: write to it before"):  # a class of torch's
        torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.equal(model.linear.weight + 0, before)


_PARTS = (lambda w: w[0].zero_(), lambda w: w.T.mul_(2), lambda w: w.__setitem__(0, 1.0), lambda w: w.data[0].mul_(2))


@pytest.mark.parametrize("write", _PARTS)
def test_writes_to_parts_within_torch_compile(write: Any) -> None:
    module = linear("q8_0")
    before = module.weight.clone()
    for full in (False, True):
        with pytest.raises(Exception, match="quantized weight is frozen"):
            torch.compile(lambda x: x + write(module.weight), backend="eager", fullgraph=full)(torch.zeros(()))
    assert torch.equal(module.weight + 0, before)


def test_reading_within_torch_compile() -> None:
    module, x = linear("q8_0"), torch.randn(3, 64)

    def read(x: Tensor) -> Tensor:
        weight = module.weight
        assert weight.is_floating_point()
        return x.to(weight.dtype)[:, : weight.shape[1]] @ weight.T + weight.data[:, 0] + weight.float().abs().max()

    assert torch.equal(torch.compile(read, backend="eager", fullgraph=True)(x), read(x))


def in_fake_mode(model: nn.Module, x: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y: Tensor = model(mode.from_tensor(x))
    return y


RECORDERS = {
    "torch.export": lambda model, x: torch.export.export(model, (x,)).module(),
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, (x,)),
    "make_fx": lambda model, x: make_fx(model)(x),
    "fake": in_fake_mode,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", RECORDERS)
def test_writes_that_would_not_be_recorded(name: str) -> None:
    model, x = halving(), torch.randn(3, 64)
    before = model.linear.weight.clone()
    with pytest.raises(UnsupportedError, match=r"does not record, got .*div_.*: call the model once before"):
        RECORDERS[name](model, x)
    assert torch.equal(model.linear.weight + 0, before)


def test_exported_reads() -> None:
    class Reading(Halving):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.linear.weight.dtype) @ self.linear.weight.T + self.linear.weight[:, 0]

    torch.manual_seed(0)
    model, x = hb.quantize_(Reading(), "q8_0"), torch.randn(3, 64)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w[0].zero_(),
        lambda w: w.T.mul_(2),
        lambda w: w.view(-1).mul_(2),
        lambda w: w.chunk(2)[1].mul_(2),
        lambda w: w.data[0].fill_(1),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: torch.add(w, w, out=w),
        lambda w: nn.functional.embedding(torch.tensor([0]), w, max_norm=0.1),
    ],
)
def test_writes_to_views_are_refused(write: Any) -> None:
    """They acted on a dequantized copy."""
    module = linear("q8_0")
    with pytest.raises(UnsupportedError, match="a quantized weight is frozen"):
        write(module.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_in_inference_mode_are_tensors_in_memory(dtype: torch.dtype) -> None:
    module = linear("q8_0").to(dtype)
    with torch.no_grad():
        expected = module.weight.to(torch.float32, copy=True).reshape(-1)
    with torch.inference_mode():
        copied = module.weight.to(torch.float32, copy=True).reshape(-1)
        assert type(copied) is Tensor
        assert copied.data_ptr()
        assert copied.dtype == torch.float32
        assert torch.equal(copied, expected)
        assert type(module.weight.T) is type(module.weight), "views are read as the weight is"
        assert type(module.weight.reshape(-1)) is type(module.weight)


@pytest.mark.parametrize("inference", [False, True])
def test_static_products_after_a_weight_was_multiplied(inference: bool) -> None:
    """Sums and scales of the codes are cached; torch counts no writes to what was made in inference mode."""
    with torch.inference_mode(inference):
        module = linear("int8_channel")
        x, how = torch.randint(-128, 127, (4, 64), dtype=torch.int8), {"in_scale": 0.05, "in_zero": 3, "out_scale": 0.2, "out_zero": 1}
        hb.qlinear(x, module.packed, **how)
        module.weight.mul_(2)
        assert torch.equal(hb.qlinear(x, module.packed, **how), hb.qlinear(x, hb.pack(module.codes()), **how))


def test_views_read_the_weight() -> None:
    module, x = linear("q8_0"), torch.randn(5, 64)
    view, weight = module.weight, module.weight.clone()
    assert torch.equal(view[2:9:2].T[3] * 1, weight[2:9:2].T[3])
    assert torch.equal(torch.stack(list(view)), weight)
    assert torch.equal(x.clone().mul_(view[:5]), x * weight[:5])
    assert torch.equal(x @ view.T, x @ weight.T)


def test_views_of_a_convolution_in_one_dimension() -> None:
    """Its codes have a dimension more than its weight."""
    module = hb.quantize_(nn.Sequential(nn.Conv1d(8, 8, 4, groups=8)), "q8_0")[0]
    weight = module.weight.clone()
    assert torch.equal(module.weight.squeeze(1).unsqueeze(1) * 1, weight)
    assert torch.equal(module.weight[2:4, 0] * 1, weight[2:4, 0])


def test_copies_of_a_rescaled_module() -> None:
    module, x = linear("q8_0"), torch.randn(3, 64)
    y = module(x)
    module.weight.div_(2)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.to("cpu")):  # noqa: S301
        assert torch.equal(twin(x), y / 2)


def test_rwkv_whose_first_call_is_compiled() -> None:
    expected, model = (hb.quantize_(rwkv(num_hidden_layers=2, rescale_every=1), hb.Config("q8_0", compute="float")) for _ in range(2))
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(IDS[:, :1]).logits
        assert torch.equal(found, expected(IDS[:, :1]).logits)
