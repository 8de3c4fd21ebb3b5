"""Whole models as ONNX: ONNX Runtime computes the same from the same codes and scales."""

from __future__ import annotations

import builtins
import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte import ops
from halfbyte.deploy import onnx_graph, onnx_static
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError
from halfbyte.nn.fused import FusedLinear

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")


def computed(path: Path, **inputs: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0])


def operators(path: Path) -> Counter[str]:
    model = onnx.load(path)
    assert {entry.domain: entry.version for entry in model.opset_import}[""] >= 22
    return Counter(node.op_type for node in model.graph.node)


def dequantized(model: nn.Module) -> nn.Module:
    """The model in float64, with the numbers that its codes stand for."""
    plain = copy.deepcopy(model)
    for name, module in list(plain.named_modules()):
        if isinstance(module, hb.QuantLinear):
            linear = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            linear.weight = nn.Parameter(hb.dequantize(module.packed))
            linear.bias = module.bias
            plain.set_submodule(name, linear)
        elif isinstance(module, hb.QuantEmbedding):
            plain.set_submodule(name, nn.Embedding.from_pretrained(hb.dequantize(module.packed)))
    return plain.double()


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)).eval()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("compute", ["float", "int8"])
@pytest.mark.parametrize(("build", "fmt"), [(bert, "q8_0"), (llama, "int4_g32_zp"), (llama, "int5_g32")])
@torch.no_grad()
def test_language_models(build: Callable[[], nn.Module], fmt: str, compute: str, tmp_path: Path) -> None:
    """The float64 model with the same weights judges both: they round at the same places, so that their errors are of one size."""
    torch.manual_seed(0)
    model = hb.quantize_(build(), hb.Config(fmt, compute=compute))
    assert hb.export_onnx(model, tmp_path / "m.onnx") == []
    assert operators(tmp_path / "m.onnx")["MatMulNBits"] == sum(isinstance(m, hb.QuantLinear) for m in model.modules())
    exact = dequantized(model)
    for batch, tokens in ((1, 1), (3, 20)):
        ids = torch.randint(96, (batch, tokens))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        wanted = exact(**inputs)[0]
        allowed = 4 * max(error(model(**inputs)[0], wanted), torch.finfo(torch.float32).eps)
        assert error(computed(tmp_path / "m.onnx", **inputs), wanted) <= allowed


@pytest.mark.parametrize("build", [bert, llama])
@torch.no_grad()
def test_optimized_language_models(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Layers that are computed together have products of their own in the file, and attention is torch's."""
    torch.manual_seed(0)
    model = hb.quantize_(build(), hb.Config("q8_0", compute="float"))
    exact, layers = dequantized(model), sum(isinstance(m, hb.QuantLinear) for m in model.modules())
    hb.optimize_(model)
    assert any(isinstance(m, FusedLinear) for m in model.modules())
    assert hb.export_onnx(model, tmp_path / "m.onnx") == []
    assert operators(tmp_path / "m.onnx")["MatMulNBits"] == layers
    for batch, tokens in ((1, 1), (3, 20)):
        ids, mask = torch.randint(96, (batch, tokens)), torch.ones(batch, tokens, dtype=torch.int64)
        mask[1:, 15:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        wanted = exact(**inputs)[0]
        allowed = 4 * max(error(model(**inputs)[0], wanted), torch.finfo(torch.float32).eps)
        assert error(computed(tmp_path / "m.onnx", **inputs), wanted) <= allowed


@torch.no_grad()
def test_a_unet_whose_input_and_output_have_one_name(tmp_path: Path) -> None:
    """A file with two values of one name does not load, so that one result is `out_sample`. Batches are limited as in diffusers."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    sizes = {"block_out_channels": (16,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    unet = diffusers.UNet2DModel(sample_size=8, layers_per_block=1, norm_num_groups=8, **sizes).eval()
    hb.quantize_(unet, hb.Config("q8_0", compute="float"))
    inputs = {"sample": torch.randn(1, 3, 8, 8), "timestep": torch.tensor([500])}
    hb.export_onnx(unet, tmp_path / "m.onnx", inputs, {"sample": {0: "batch"}, "timestep": {0: "batch"}})
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["out_sample"]
    for batch in (1, 3):
        inputs = {"sample": torch.randn(batch, 3, 8, 8), "timestep": torch.full((batch,), 500)}
        # As below; about 20 layers follow each other, and norms between them divide by their inputs' size.
        assert error(computed(tmp_path / "m.onnx", **inputs), unet(**inputs).sample.double()) < 256 * torch.finfo(torch.float32).eps


@torch.no_grad()
def test_limits_of_sizes_are_noted(tmp_path: Path) -> None:
    """A forward that branches on a size is exported with one branch, and runtimes do not check which."""

    class Branching(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y * 2 if x.shape[0] < 64 else y * 3

    torch.manual_seed(0)
    model = hb.quantize_(Branching(nn.Linear(32, 8)), hb.Config("int8_channel", compute="float")).eval()
    x = torch.randn(63, 32)
    limit = "batch up to 63: the forward takes another branch for larger ones, which is not exported"
    assert hb.export_onnx(model, tmp_path / "m.onnx", [x[:2]], {"x": {0: "batch"}}) == [limit]
    torch.testing.assert_close(computed(tmp_path / "m.onnx", x=x), model(x))
    assert hb.export_onnx(model, tmp_path / "m.onnx", [x[:2]]) == []


@pytest.mark.parametrize(
    "squeezed",
    [
        lambda x: x.squeeze(1).squeeze(-1),
        lambda x: x.squeeze((1, 2)),
        lambda x: x[:, :1].squeeze((1, 2)),
        lambda x: x.squeeze(()),
        lambda x: (x + 1).squeeze_(1),
        lambda x: torch.squeeze_copy(x, 1),
        lambda x: x.sum() + x.sum().squeeze(0) + x.sum().squeeze((0,)) + x.sum().squeeze(),
        lambda x: x.squeeze(),
    ],
)
@torch.no_grad()
def test_squeezes(squeezed: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """A squeeze of a size other than 1 does nothing in torch, and fails in ONNX."""

    class Squeezed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return squeezed(super().forward(x)) * 2

    model = hb.quantize_(Squeezed(nn.Linear(32, 3)), hb.Config("int8_channel", compute="float")).eval()
    hb.export_onnx(model, tmp_path / "m.onnx", [torch.randn(2, 3, 32)], {"x": {0: "batch"}})
    for x in (torch.randn(5, 3, 32), torch.randn(1, 3, 32)):
        torch.testing.assert_close(computed(tmp_path / "m.onnx", x=x), model(x))


@pytest.mark.parametrize("fmt", ["int8_tensor", "int8_channel", "q4_1", "int4_g32_zp", "iq4_nl", "int5_g32"])
@torch.no_grad()
def test_embeddings(fmt: str, tmp_path: Path) -> None:
    """Also of 4 bits, and with one scale for the tensor, which is not gathered with the rows; the products are computed in float64."""
    torch.manual_seed(0)
    model = hb.quantize_(nn.Sequential(nn.Embedding(20, 32)), hb.Config(fmt, embedding=None)).eval()
    ids = torch.randint(20, (2, 5))
    assert isinstance(model[0], hb.QuantEmbedding)
    hb.export_onnx(model, tmp_path / "m.onnx", [ids])
    assert torch.equal(computed(tmp_path / "m.onnx", input=ids), hb.dequantize(model[0].packed)[ids])


class _Every(nn.Module):
    """Layers of all kinds that have a form in ONNX."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 24, 1))
        self.linear = nn.Sequential(nn.Flatten(), nn.Linear(24 * 16, 40), nn.GELU(), nn.Linear(40, 8, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.conv(x))
        return y


@pytest.mark.parametrize("fmt", ["int8_channel", "int4_channel", "q4_0", "q4_1", "iq4_nl", "int8_g32"])
@torch.no_grad()
def test_weight_only_networks(fmt: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, 8, 8)
    model = hb.quantize_(_Every().eval(), hb.Config(fmt, compute="float"))
    hb.fuse_(model)
    notes = hb.export_onnx(model, tmp_path / "m.onnx", [x], {"x": {0: "batch"}})
    assert all(" is stored in floating point: " in note for note in notes)
    assert bool(notes) == (fmt in ("q4_0", "q4_1", "int8_g32"))  # convolutions with blocks, float offsets
    for images in (x, x[:1]):  # fewer than 64 roundings follow each other, and sums of up to 384 products have another order
        assert error(computed(tmp_path / "m.onnx", x=images), model(images).double()) < 64 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("activation", ["none", "tanh", "geglu"])
@torch.no_grad()
def test_activations_within_products(activation: str, tmp_path: Path) -> None:
    packed, x = hb.pack(hb.quantize(torch.randn(64, 32), "q8_0")), torch.randn(3, 32)

    class Active(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if activation == "geglu":
                return ops.linear_geglu(x, packed, compute="float")
            return ops.linear_gelu(x, packed, compute="float", approximate=activation)

    model = Active().eval()
    hb.export_onnx(model, tmp_path / "m.onnx", [x])
    # As above; another 64 roundings for GELU itself.
    assert error(computed(tmp_path / "m.onnx", x=x), model(x).double()) < 128 * torch.finfo(torch.float32).eps


class _Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU6(), nn.MaxPool2d(2))
        self.body, self.up = nn.Conv2d(16, 16, 3, 1, 1), nn.Upsample(scale_factor=2)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = torch.relu(self.body(x) + x)
        y = torch.cat((self.up(y), torch.relu(self.up(x))), 1)
        return self.head(self.pool(y).flatten(1))


@torch.no_grad()
def test_a_network_on_int8_codes_is_fused_by_the_runtime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 3, 32, 32)
    model = hb.quantize_(_Static().eval(), hb.Config("int8_channel", activations="static"), [images])
    assert hb.export_onnx(model, tmp_path / "m.onnx", [images], {"x": {0: "batch"}}) == []
    assert operators(tmp_path / "m.onnx")["Conv"] == 2
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 3, str(tmp_path / "fused.onnx")
    onnxruntime.InferenceSession(tmp_path / "m.onnx", options, providers=["CPUExecutionProvider"])
    fused = Counter(node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node)
    assert (fused["QLinearConv"], fused["QLinearAdd"], fused["Conv"]) == (2, 1, 0)
    # Biases are rounded to steps of the sum there, and factors have float32's precision: few codes of 8 bits differ, by 1.
    for batch in (images, images[:1]):
        assert error(computed(tmp_path / "m.onnx", x=batch), model(batch).double()) < 0.01


def test_parts() -> None:
    module = nn.Sequential(nn.ReLU())
    assert onnx_static.with_qdq(module)[0] is not module[0]
    traced = torch.fx.symbolic_trace(module)
    assert onnx_graph.replace_ops(traced) == []


def test_what_onnx_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, model = torch.randn(2, 32), hb.quantize_(nn.Sequential(nn.Linear(32, 8)), "q8_0").eval()
    with pytest.raises(ArgumentError, match=r"lacks: write model\.onnx"):
        hb.export_onnx(model, tmp_path / "model", [x])

    half = hb.quantize_(nn.Sequential(nn.Linear(32, 8).bfloat16()), "q8_0").eval()
    with pytest.raises(
        ArgumentError, match=r"float32 or float16, got a Sequential in bfloat16: call model\.float\(\), and pass such inputs"
    ):
        hb.export_onnx(half, tmp_path / "model.onnx", [x.bfloat16()])
    hb.export_onnx(half.float(), tmp_path / "model.onnx", [x])
    (tmp_path / "model.onnx").unlink()

    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.eigvalsh(x.mT @ x)

    with pytest.raises(UnsupportedError, match="torch has no ONNX form of an operation"):
        hb.export_onnx(Spectrum().eval(), tmp_path / "model.onnx", [x])
    real = builtins.__import__

    def without(name: str, *more: object) -> object:
        if name == "onnxscript":
            raise ImportError(name)
        return real(name, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match=r"onnxscript: pip install 'halfbyte\[onnx\]'"):
        hb.export_onnx(model, tmp_path / "model.onnx", [x])
    assert not list(tmp_path.iterdir())
