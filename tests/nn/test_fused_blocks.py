"""Blocks of diffusers with forwards of halfbyte's: the same numbers, in channels_last, and diffusers' forward where something watches."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D

import halfbyte as hb
from halfbyte import versions
from halfbyte.nn import fused_blocks
from halfbyte.nn.fused_blocks import fuse_blocks_
from halfbyte.ops.conv.group_norm import NormedConvs
from halfbyte.ops.conv.upsampled import UpsampledConv
from halfbyte.ops.transformer import attention

OF_VAE = {"temb_channels": None, "time_embedding_norm": "group"}
FLOAT = hb.Config("int8_channel", compute="float")


def block(out: int = 48, **settings: Any) -> Any:
    torch.manual_seed(0)
    return ResnetBlock2D(in_channels=32, out_channels=out, groups=8, **{"temb_channels": 16, **settings}).eval()


def inputs() -> tuple[Tensor, Any]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 32, 9, 7, generator=generator), torch.randn(2, 16, generator=generator)


def run(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        found = model(*args, **kwargs)
    first: Tensor = found[0] if isinstance(found, tuple) else found
    return first


def reloaded(model: Any) -> Any:
    """A model that was pickled."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def same(found: Tensor, wanted: Tensor) -> bool:
    """The same sums in float32, of which norms and the residual add some in another order."""
    return float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each block of norms and convolutions that halfbyte computes."""
    calls: list[int] = []
    call = NormedConvs.__call__

    def counted(convs: NormedConvs, *args: Any) -> Tensor | None:
        y = call(convs, *args)
        calls.extend([1] if y is not None else [])
        return y

    monkeypatch.setattr(NormedConvs, "__call__", counted)
    return calls


@pytest.mark.parametrize("settings", [{}, {"out": 32}, {"output_scale_factor": 2.0}, OF_VAE])
def test_residual_blocks_as_on_gpus(settings: dict[str, Any], native: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch norms, the second convolution adds the residual, and all is channels_last, in one graph of torch.compile, too."""
    monkeypatch.setattr(fused_blocks, "_on_gpu", lambda x: True)
    model, (x, temb) = hb.quantize_(block(**settings), FLOAT), inputs()
    temb = None if settings == OF_VAE else temb
    wanted, residuals = run(model, x, temb), list[bool]()
    fused = hb.fuse_(model)
    forward = hb.QuantConv2d.forward

    def watched(conv: Any, image: Tensor, added: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        residuals.append(added is not None)
        return forward(conv, image, added, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(hb.QuantConv2d, "forward", watched)
        found = run(fused, x, temb)
    assert same(found, wanted)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert (sum(residuals), native) == (1, [])
    torch.compiler.reset()
    assert same(run(torch.compile(fused, fullgraph=True, backend="aot_eager"), x, temb), wanted)


@pytest.mark.parametrize("settings", [{}, {"out": 32}, {"output_scale_factor": 2.0}, {"skip_time_act": True}, OF_VAE])
def test_residual_blocks(settings: dict[str, Any], native: list[int]) -> None:
    model, (x, temb) = hb.quantize_(block(**settings), FLOAT), inputs()
    temb = None if settings == OF_VAE else temb
    wanted, before = run(model, x, temb), {key: value.clone() for key, value in model.state_dict().items()}
    fused = hb.fuse_(model)
    fuse_blocks_(fused)  # again changes nothing
    assert isinstance(fused, ResnetBlock2D)
    assert type(fused).__mro__[1] is fused_blocks._Block
    found = run(fused, x, temb)
    assert same(found, wanted)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert len(native) == 1
    assert "the second convolution with the residual" in str(hb.report(fused))
    assert all(torch.equal(value, before[key]) for key, value in fused.state_dict().items())
    for other in (copy.deepcopy(fused), reloaded(fused)):
        assert torch.equal(run(other, x, temb), found)
    assert len(native) == 3


def test_a_block_in_sixteen_bits(native: list[int]) -> None:
    model, (x, temb) = hb.quantize_(block().bfloat16(), FLOAT), inputs()
    wanted = run(model.float(), x.bfloat16().float(), temb.bfloat16().float())
    found = run(hb.fuse_(model.bfloat16()), x.bfloat16(), temb.bfloat16())
    assert found.dtype == torch.bfloat16
    assert float((found.float() - wanted).norm() / wanted.norm()) < 2**-7  # a few roundings of 2^-9
    assert len(native) == 1


def test_diffusers_computes_what_is_watched(native: list[int]) -> None:
    fused: Any = hb.fuse_(hb.quantize_(block(), FLOAT))
    x, temb = inputs()
    wanted = run(fused, x, temb)
    native.clear()
    seen: list[int] = []
    for name in ("norm1", "conv1", "norm2", "conv2", "nonlinearity", "dropout"):
        handle = fused.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
        assert same(run(fused, x, temb), wanted)
        handle.remove()
    assert len(seen) == 8  # the nonlinearity is called for both norms and the time embedding
    fused.conv1.forward = fused.conv1.forward  # as group offloading does
    assert same(run(fused, x, temb), wanted)
    del fused.conv1.forward
    x.requires_grad_()
    fused(x, temb).sum().backward()
    assert x.grad is not None
    fused.conv2 = nn.Conv2d(48, 48, 3, padding=1)
    run(fused, x.detach(), temb)
    assert not native


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("dropout", nn.Tanh()),  # not left out
        ("nonlinearity", nn.GELU()),
        ("norm1", nn.GroupNorm(8, 64)),  # of other channels: the kernel would read beyond the image
        ("norm2", nn.GroupNorm(8, 64)),
        ("norm2", nn.BatchNorm2d(48)),
        ("conv2", nn.Conv2d(48, 48, 3, padding=1)),
        ("time_emb_proj", nn.Linear(16, 32)),
        ("time_emb_proj", nn.Linear(16, 1)),
        ("conv_shortcut", nn.Conv2d(32, 1, 1)),
    ],
)
def test_replaced_layers(name: str, layer: nn.Module) -> None:
    """Of a fused block, whatever layer is replaced: diffusers' result, or an error where diffusers has one."""
    small, (x, temb) = hb.quantize_(block(), FLOAT), inputs()
    fused = hb.fuse_(copy.deepcopy(small))
    for model in (small, fused):
        setattr(model, name, layer.eval())
    try:
        wanted = run(small, x, temb)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            run(fused, x, temb)
    else:
        assert same(run(fused, x, temb), wanted)


@pytest.mark.parametrize("name", ["dropout", "nonlinearity", "norm1", "conv2"])
def test_a_layer_with_a_forward_of_its_own(name: str, native: list[int]) -> None:
    small, (x, temb) = hb.quantize_(block(), FLOAT), inputs()
    fused = hb.fuse_(copy.deepcopy(small))
    for model in (small, fused):
        layer = model.get_submodule(name)
        layer.forward = lambda x, forward=layer.forward: forward(x) * 2
    assert same(run(fused, x, temb), run(small, x, temb))
    assert not native


def test_embeddings_of_one_row_and_autocast(native: list[int]) -> None:
    small, (x, temb) = hb.quantize_(block(), FLOAT), inputs()
    fused = hb.fuse_(copy.deepcopy(small))
    assert same(run(fused, x, temb[:1]), run(small, x, temb[:1]))
    assert len(native) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(fused, x, temb), run(small, x, temb))
    assert torch.equal(run(fused.train(), x, temb), run(small.train(), x, temb))
    assert len(native) == 1


def test_other_blocks_stay(native: list[int]) -> None:
    others = [block(time_embedding_norm="scale_shift"), block(up=True), block(down=True)]
    x, temb = inputs()
    for model in others:
        small = hb.quantize_(model, FLOAT)
        wanted = run(small, x, temb)
        assert torch.equal(run(hb.fuse_(small), x, temb), wanted)
        assert type(small) is ResnetBlock2D
    assert not native


def test_blocks_of_versions_that_were_not_tested_stay(native: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda *_: "0.99.0")
    versions.why_untested.cache_clear()
    small, (x, temb) = hb.quantize_(block(), FLOAT), inputs()
    wanted = run(small, x, temb)
    try:
        with pytest.warns(RuntimeWarning, match="diffusers 0.99.0 is newer than .* and fuses no blocks"):
            hb.fuse_(small)
    finally:
        versions.why_untested.cache_clear()
    assert type(small) is ResnetBlock2D
    assert torch.equal(run(small, x, temb), wanted)
    assert not native


@pytest.mark.parametrize("linear", [False, True])
def test_transformers_of_images(linear: bool, native: list[int]) -> None:
    torch.manual_seed(0)
    settings = {"in_channels": 32, "cross_attention_dim": 16, "norm_num_groups": 8, "use_linear_projection": linear}
    model = Transformer2DModel(2, 20, **settings).eval()
    if linear:
        model = Transformer2DModel(2, 16, **settings).eval()
    x, prompt = inputs()[0], torch.randn(2, 5, 16)
    small = hb.quantize_(model, FLOAT)
    wanted = run(small, x, prompt, return_dict=False)
    fused = hb.fuse_(small)
    found = run(fused, x.to(memory_format=torch.channels_last), prompt, return_dict=False)
    assert same(found, wanted)
    assert len(native) == (0 if linear else 1)
    assert linear or found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(run(copy.deepcopy(fused), x.to(memory_format=torch.channels_last), prompt, return_dict=False), found)


@pytest.mark.parametrize("name", ["norm", "proj_in", "proj_out"])
def test_hooks_within_transformers_of_images(name: str) -> None:
    """A hook gets what the layer computes in diffusers, without the residual."""
    torch.manual_seed(0)
    small = hb.quantize_(Transformer2DModel(2, 20, in_channels=32, cross_attention_dim=16, norm_num_groups=8).eval(), FLOAT)
    fused, x, prompt = hb.fuse_(copy.deepcopy(small)), inputs()[0], torch.randn(2, 5, 16)
    for model in (small, fused):
        model.get_submodule(name).register_forward_hook(lambda module, args, y: y * 2)
    assert same(run(fused, x, prompt, return_dict=False), run(small, x, prompt, return_dict=False))


@pytest.mark.parametrize("kind", ["self", "cross", "image", "masked"])
def test_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attended: list[int] = []
    attend = attention.attend

    def counted(*args: Any) -> Tensor:
        attended.append(1)
        return attend(*args)

    monkeypatch.setattr(attention, "attend", counted)
    torch.manual_seed(0)
    of_image = {"norm_num_groups": 4, "residual_connection": True, "rescale_output_factor": 2.0, "bias": True}
    model: Any = Attention(40, 24 if kind == "cross" else None, heads=2, dim_head=20, **(of_image if kind == "image" else {})).eval()
    x = torch.randn(2, 40, 5, 7) if kind == "image" else torch.randn(2, 35, 40)
    settings: dict[str, Tensor] = {}
    if kind == "cross":
        settings = {"encoder_hidden_states": torch.randn(2, 9, 24)}
    if kind == "masked":
        settings = {"attention_mask": torch.where(torch.rand(2, 1, 35) < 0.8, 0.0, -1e4)}
    small: Any = hb.quantize_(model, hb.Config("q8_0", compute="float"))
    wanted = run(small, x, **settings)
    fused: Any = hb.fuse_(small)
    assert isinstance(fused.processor, AttnProcessor2_0)
    assert same(run(fused, x, **settings), wanted)
    assert len(attended) == (kind != "masked")
    assert type(reloaded(fused).processor) is type(fused.processor)
    halves = {key: value.bfloat16() for key, value in settings.items()}
    found = run(fused.bfloat16(), x.bfloat16(), **halves).float()  # by torch's attention
    assert float((found - wanted).norm() / wanted.norm()) < 2**-6  # some roundings of 2^-9, of weights too
    assert len(attended) == (kind != "masked")


def test_the_convolution_behind_an_enlargement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits from the small image; diffusers' forward where the call, the layer or the compute is another."""
    torch.manual_seed(0)
    model = nn.Sequential(Upsample2D(32, use_conv=True, out_channels=48)).eval()
    x, calls = torch.randn(2, 32, 5, 3).to(memory_format=torch.channels_last), list[bool]()
    call = UpsampledConv.__call__

    def counted(convs: UpsampledConv, x: Tensor) -> Tensor | None:
        y = call(convs, x)
        calls.append(y is not None)
        return y

    monkeypatch.setattr(UpsampledConv, "__call__", counted)
    small: Any = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", activation="image"))
    wanted = run(small, x)
    fuse_blocks_(small)
    for again in (small, copy.deepcopy(small), reloaded(small)):
        assert torch.equal(run(again, x), wanted)
    if not all(calls):
        pytest.skip("this CPU has no native call of it")
    assert len(calls) == 3
    assert type(small[0]).__name__ == "Upsample2D"
    with torch.no_grad():
        small[0].conv.bias += 1
    assert torch.allclose(run(small, x), wanted + 1, atol=1e-5)
    assert run(small[0], x, (7, 5)).shape == (2, 48, 7, 5)
    assert small(x.requires_grad_()).requires_grad
    assert len(calls) == 4
    floats: Any = hb.quantize_(model, FLOAT)
    wanted = run(floats, x)
    fuse_blocks_(floats)
    assert torch.equal(run(floats, x), wanted)
    assert calls[4:] == [False]
