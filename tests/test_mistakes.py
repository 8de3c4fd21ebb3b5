"""Mistakes that users make: each is answered in one sentence, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import halfbyte as hb
from halfbyte.errors import ArgumentError, CheckpointError, FormatError, UnsupportedError

STATIC = hb.Config("int8_channel", activations="static")


def model(**more: nn.Module) -> nn.Sequential:
    built = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for name, module in more.items():
        built.add_module(name, module)
    return built


def formats(quantized: nn.Module) -> list[str]:
    return [str(row.format) for row in hb.report(quantized).rows]


# Quantizing again


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("q4_0", "q8_0", r"0 is quantized already, and stays q4_0 where q8_0 is asked for \(and 1 more\), and nothing is left"),
        ("q4_0", hb.Config("q4_0", overrides={"2": "q8_0"}), "2 is quantized already, and stays q4_0 where q8_0 is asked for, and nothing"),
        ("int8_channel", STATIC, 'not "static", and nothing'),
        (
            "q4_0",
            hb.Config("q4_0", compute="float"),
            r"0 is quantized already, and stays compute='auto' where 'float' is asked for \(and 1",
        ),
        (hb.Config("q4_0", activation="row"), "q4_0", "0 is quantized already, and stays activation='row' where 'block' is asked for"),
        ("q4_0", hb.Config("q4_0", method="mse"), "stays as absmax left it where mse is asked for, and nothing is left"),
        ("q4_0", hb.Config("q4_0", skip=["nope"]), "the skip pattern 'nope' matches no module"),
    ],
)
def test_quantizing_again_otherwise_is_refused(first: Any, second: Any, message: str) -> None:
    quantized = hb.quantize_(model(), first)
    before = formats(quantized)
    with pytest.raises(ArgumentError, match=message):
        hb.quantize_(quantized, second, [torch.zeros(1, 64)] if second is STATIC else None)
    assert formats(quantized) == before


@pytest.mark.parametrize(
    "config",
    [
        hb.Config("q4_0"),
        hb.Config("q4_0", overrides={"0": "q8_0"}),
        hb.Config("q4_0", skip=["2"]),
        hb.Config("int8_channel", activation="image", compute="float", method="mse"),
    ],
)
def test_quantizing_again_in_the_same_format_changes_nothing(config: hb.Config) -> None:
    quantized = hb.quantize_(model(stem=nn.Conv2d(3, 32, 3), body=nn.Conv2d(32, 32, 3), ids=nn.Embedding(9, 32)), config)
    before, modules = str(hb.report(quantized)), list(quantized.modules())
    assert hb.quantize_(quantized, config) is quantized
    assert str(hb.report(quantized)) == before
    assert list(quantized.modules()) == modules


def test_what_is_left_of_a_model_is_quantized_and_the_rest_reported() -> None:
    quantized = hb.quantize_(model(), hb.Config("q4_0", skip=["2"]))
    hb.quantize_(quantized, "q8_0")
    assert formats(quantized) == ["q4_0", "q8_0"]
    assert hb.report(quantized).notes == ("0 is quantized already, and stays q4_0 where q8_0 is asked for",)


def test_a_network_on_codes_is_quantized_once() -> None:
    seen = [torch.randn(4, 64)]
    quantized = hb.quantize_(model().eval(), STATIC, seen)
    assert hb.quantize_(quantized, STATIC, seen) is quantized
    with pytest.raises(ArgumentError, match="0 is quantized already, and stays int8_channel where int8_tensor"):
        hb.quantize_(quantized, "int8_tensor")


# Saving


@pytest.mark.parametrize("scales", ["dynamic", "learned"])
def test_a_model_in_training_for_its_codes_is_not_saved(scales: str, tmp_path: Path) -> None:
    prepared = hb.prepare_qat_(model(), "int4_g32", scales=scales)
    with pytest.raises(ArgumentError, match="0 is in training for its quantized form: call convert_qat_ first"):
        hb.save(prepared, tmp_path / "it")
    assert not (tmp_path / "it").exists()
    hb.save(hb.convert_qat_(prepared), tmp_path / "it")
    assert (tmp_path / "it" / "config.json").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "cannot write .*file, which is a file, and stays: choose another name for the folder"),
        ("link", "cannot write .*link, which is a link to nothing, and stays: choose another name"),
        ("file/below/it", "cannot write .*file/below/it, as .*file is a file: choose another place"),
        ("x" * 300, "cannot write .*: File name too long; .*: choose a shorter name"),
    ],
)
def test_a_place_where_no_folder_can_be(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nothing")
    quantized = hb.quantize_(model(), "q4_0")
    with pytest.raises(CheckpointError, match=message):
        hb.save(quantized, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize("damage", ["missing", "folder"])
def test_a_file_that_cannot_be_read_says_what_to_do(damage: str, tmp_path: Path) -> None:
    hb.save(hb.quantize_(model(), "q4_0"), tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.unlink()
    if damage == "folder":
        weights.mkdir()
    said = {
        "missing": "No such file .*: a file of the model is missing, copy or",
        "folder": "Is a directory: .* files back in their places",
    }
    with pytest.raises(CheckpointError, match=f"cannot read .*model.safetensors: {said[damage]}"):
        hb.load(tmp_path / "m", model=model())


# Arguments of the wrong type


WEIGHT, X = torch.ones(64, 128), torch.ones(3, 128)
CODES, CONV_CODES = hb.quantize(WEIGHT, "q4_0"), hb.quantize_conv(torch.ones(8, 4, 3, 3), "int8_channel")
PACKED, PACKED_CONV = hb.pack(CODES), hb.pack_conv(CONV_CODES, 3)
EXPERTS, IDS = hb.pack(hb.quantize(torch.ones(2, 64, 128), "q4_0")), torch.tensor([0, 1, 0])
PACKED_8, X8 = hb.pack(hb.quantize(WEIGHT, "int8_channel")), X.to(torch.int8)
STEPS = {"in_scale": 0.1, "in_zero": 0, "out_scale": 0.1, "out_zero": 0}
IMAGE = torch.ones(1, 4, 8, 8)
ANYTHING: Any = hb  # the same functions, of which no type is checked


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ANYTHING.quantize(WEIGHT.numpy(), "q4_0"), "weight is a tensor, got numpy.ndarray: pass torch.as_tensor"),
        (lambda: ANYTHING.quantize(nn.Linear(4, 4), "q4_0", name="w"), "w is a tensor, got torch.Linear: .* the weight of a module"),
        (lambda: hb.quantize(torch.tensor(1.0), "q4_0"), "weight has no dimensions"),
        (lambda: hb.quantize(torch.empty(4, 4, device="meta"), "q4_0"), "weight has no data .*: load it first"),
        (lambda: hb.quantize(WEIGHT.to_sparse(), "q4_0"), r"weight is a dense tensor, got a sparse_coo one: convert it with .to_dense\(\)"),
        (lambda: hb.linear(X.to_sparse(), PACKED), "the input is a dense tensor, got a sparse_coo one"),
        (lambda: hb.linear(X, PACKED, torch.ones(64).to_mkldnn()), "the bias is a dense tensor, got a mkldnn one"),
        (lambda: hb.conv2d(IMAGE.to_sparse(), PACKED_CONV), "the input is a dense tensor, got a sparse_coo one"),
        (lambda: hb.conv1d(torch.tensor(1.0), PACKED_CONV), r"conv1d takes \[B, C, L\] or \[C, L\], got \[\]"),
        (lambda: ANYTHING.quantize_conv(WEIGHT.numpy(), "q4_0"), "weight is a tensor, got numpy.ndarray"),
        (lambda: ANYTHING.pack(WEIGHT), r"pack takes Codes, got torch.Tensor: pass what quantize\("),
        (lambda: ANYTHING.pack(PACKED), "pack takes Codes, got halfbyte.Packed"),
        (lambda: ANYTHING.pack_conv(WEIGHT, 3), "pack_conv takes Codes, got torch.Tensor"),
        (lambda: hb.pack(CODES, "gpu"), "for device 'gpu', torch knows no such device: use device='cpu'"),
        (lambda: hb.pack_conv(CONV_CODES, 3, device="gpu"), "for device 'gpu', torch knows no such device"),
        (lambda: ANYTHING.linear(X, CODES), r"a weight that pack has made, got halfbyte.Codes: pass pack\(quantize"),
        (lambda: ANYTHING.linear(X, WEIGHT), "a weight that pack has made, got torch.Tensor"),
        (lambda: ANYTHING.linear(X, PACKED_CONV), "a weight that pack has made, got halfbyte.PackedConv"),
        (lambda: ANYTHING.linear(X.numpy(), PACKED), r"the input, a tensor, got numpy.ndarray: pass torch.as_tensor\(x\)"),
        (lambda: ANYTHING.linear(PACKED, X), "the input, a tensor, got halfbyte.Packed: .* the packed weight second"),
        (lambda: ANYTHING.linear(X, PACKED, [1.0] * 64), r"bias is a tensor or None, got list: pass torch.as_tensor\(bias\)"),
        (lambda: ANYTHING.linear(X, PACKED, residual=1), "residual is a tensor or None, got int"),
        (lambda: ANYTHING.linear(X, PACKED, clamp=6), r"clamp is \(low, high\) or None, got 6: write \(0, 6\)"),
        (
            lambda: hb.linear(X, hb.pack(hb.quantize(torch.ones(2, 64, 128), "q4_0"))),
            r"got one of shape \[2, 64, 128\]: use grouped_linear",
        ),
        (lambda: hb.linear(X, hb.pack(hb.quantize(torch.ones(8, 4, 3, 3), "q4_0"))), "for a convolution use quantize_conv"),
        (lambda: ANYTHING.embedding(torch.tensor([1]), WEIGHT), "a weight that pack has made, got torch.Tensor"),
        (lambda: ANYTHING.conv2d(IMAGE, hb.pack(CONV_CODES)), r"that pack_conv has made, got halfbyte.Packed: pass pack_conv\("),
        (lambda: ANYTHING.conv2d(IMAGE.numpy(), PACKED_CONV), "the input, a tensor, got numpy.ndarray"),
        (lambda: ANYTHING.conv2d(IMAGE, PACKED_CONV, [1.0] * 8), "bias is a tensor or None, got list"),
        (lambda: ANYTHING.conv1d(IMAGE.numpy(), PACKED_CONV), "the input, a tensor, got numpy.ndarray"),
        (lambda: ANYTHING.conv1d(IMAGE[0], PACKED), "that pack_conv has made, got halfbyte.Packed"),
        (lambda: ANYTHING.grouped_linear(X, CODES, IDS), "a weight that pack has made, got halfbyte.Codes"),
        (lambda: ANYTHING.grouped_linear(X.numpy(), EXPERTS, IDS), "the input, a tensor, got numpy.ndarray"),
        (lambda: ANYTHING.grouped_linear(X, EXPERTS, [0, 1, 0]), "the experts of each row are a tensor, got list"),
        (lambda: ANYTHING.grouped_linear(X, EXPERTS, IDS, 1.0), "bias is a tensor or None, got float"),
        (lambda: ANYTHING.grouped_linear(X, PACKED, IDS), r"stacked weights \[E, N, K\], got one of shape \[64, 128\]: use linear"),
        (lambda: ANYTHING.qlinear(X.numpy(), PACKED_8, **STEPS), "the input, a tensor, got numpy.ndarray"),
        (lambda: ANYTHING.qlinear(X8, CODES, **STEPS), "a weight that pack has made, got halfbyte.Codes"),
        (lambda: ANYTHING.qlinear(X8, PACKED_8, [1.0] * 64, **STEPS), "bias is a tensor or None, got list"),
        (lambda: ANYTHING.qlinear(X8, PACKED_8, clamp=6, **STEPS), r"clamp is \(low, high\) or None, got 6"),
        (
            lambda: ANYTHING.linear(X, PACKED, clamp=(0, None)),
            r"clamp is \(low, high\) or None, got \(0, None\): .* or \(0, inf\) for ReLU",
        ),
        (lambda: ANYTHING.linear(X, PACKED, clamp=("0", "6")), r"clamp is \(low, high\) or None, got \('0', '6'\): write"),
        (lambda: hb.linear(X, PACKED, clamp=(6, 0)), r"low <= high, got \(6, 0\): write the lower number first"),
        (
            lambda: ANYTHING.qlinear(X8, PACKED_8, clamp=(0, torch.inf), **STEPS),
            r"whole numbers in -128 … 127, got \(0, inf\): write \(out_zero",
        ),
        (lambda: ANYTHING.qconv2d(IMAGE.char(), PACKED_CONV, clamp=(0.5, 3), **STEPS), r"whole numbers in -128 … 127, got \(0.5, 3\)"),
        (
            lambda: ANYTHING.qlinear(X8, PACKED_8, **STEPS | {"out_scale": "0.1"}),
            "out_scale is a number, got str: pass the step of the codes",
        ),
        (
            lambda: ANYTHING.qlinear(X8, PACKED_8, **STEPS | {"in_zero": 0.5}),
            "in_zero is a whole number in -128 … 127, got 0.5: pass the code",
        ),
        (lambda: ANYTHING.qlinear(X8, PACKED_8, **STEPS | {"out_zero": None}), "out_zero is a whole number, got None: pass the code of 0"),
        (
            lambda: ANYTHING.conv2d(IMAGE, PACKED_CONV, stride=1.5),
            r"stride is one whole number or \(height, width\), got 1.5: write stride=1",
        ),
        (lambda: ANYTHING.conv2d(IMAGE, PACKED_CONV, stride=[2, 0.5]), r"stride is one whole number or \(height, width\), got \[2, 0.5\]"),
        (lambda: ANYTHING.conv2d(IMAGE, PACKED_CONV, dilation=None), r"dilation is one whole number or \(height, width\), got None: write"),
        (lambda: ANYTHING.conv2d(IMAGE, PACKED_CONV, padding=0.5), "padding is one whole number, .*, got 0.5: write padding=0"),
        (lambda: ANYTHING.conv2d(IMAGE, PACKED_CONV, padding=("same", "same")), r"padding is one whole number, .*, got \('same', 'same'\)"),
        (
            lambda: hb.conv2d(IMAGE, PACKED_CONV, stride=0),
            r"1 or more .* got stride \(0, 0\), dilation \(1, 1\), padding \(0, 0, 0, 0\): pass",
        ),
        (lambda: hb.pack_conv(CONV_CODES, 0), "a kernel's size is .*, each from 1 on, .*, got 0: pass the layer's"),
        (lambda: ANYTHING.pack_conv(CONV_CODES, 3.0), "a kernel's size is .*, got 3.0: pass the layer's"),
        (lambda: hb.pack_conv(CONV_CODES, 3, 0), "groups divide the 8 output channels, got groups=0"),
        (lambda: ANYTHING.qconv2d(IMAGE.numpy(), PACKED_CONV, **STEPS), "the input, a tensor, got numpy.ndarray"),
        (lambda: ANYTHING.qconv2d(IMAGE.char(), PACKED_8, **STEPS), "a weight that pack_conv has made, got halfbyte.Packed"),
        (lambda: ANYTHING.qconv2d(IMAGE.char(), PACKED_CONV, 1, **STEPS), "bias is a tensor or None, got int"),
        (lambda: ANYTHING.embedding([1, 2], PACKED), "the ids, a tensor, got list"),
        (lambda: ANYTHING.unpack(CODES), "that pack or pack_conv has made, got halfbyte.Codes: Codes are unpacked already"),
        (lambda: ANYTHING.dequantize(WEIGHT), "a weight that quantize or pack has made, got torch.Tensor"),
        (lambda: ANYTHING.quantize_("a/path", "q4_0"), "a model is a torch.nn.Module, got str: use halfbyte.convert for one on disk"),
        (lambda: ANYTHING.quantize_(model(), {"format": "q4_0"}), "a Config or a format, got dict: write Config"),
        (lambda: ANYTHING.quantize_(model(), None), "a Config or a format, got None: write Config"),
        (
            lambda: ANYTHING.quantize_(model(), hb.Config("q4_0", method="gptq"), "a text"),
            "token ids, a tensor, got str: pass calibration_tok",
        ),
        (lambda: ANYTHING.Calibration([[1, 2]]), "calibration takes token ids, a tensor, got list"),
        (lambda: ANYTHING.prepare_qat_(model(), None), "a Config or a format, got None: write Config"),
        (lambda: ANYTHING.Config("q4_0", bits=8), r"Config has no setting bits, got bits=8: the format says .* Config\(\"int8_channel"),
        (lambda: ANYTHING.Config(load_in_4bit=True), r"got load_in_4bit=True: the format says that, for example Config\(\"int4_g64"),
        (lambda: ANYTHING.Config("q4_0", modules_to_not_convert=["head"]), r"got modules_to_not_convert=\['head'\]: write skip=\["),
        (lambda: ANYTHING.Config("q4_0", threads=2), "Config has no setting threads, got threads=2: the settings are format, method"),
        (lambda: ANYTHING.fuse_(model()), "fuse_ takes a quantized model, got a Sequential without quantized layers: call quantize_ first"),
        (lambda: ANYTHING.fuse_("a/path"), "fuse_ takes a model, a torch.nn.Module, got str"),
        (lambda: ANYTHING.load(None), "a model is named by its folder or file, a str or a Path, got None: pass its path"),
        (lambda: ANYTHING.load(b"a/path"), "a str or a Path, got bytes: pass its path"),
        (lambda: hb.load("a\0b"), r"a str or a Path, got 'a\\x00b': pass its path"),
        (lambda: hb.save(hb.quantize_(model(), "q4_0"), ""), "a str or a Path, got '': write '.' for the current folder"),
        (lambda: ANYTHING.save(hb.quantize_(model(), "q4_0"), None), "a str or a Path, got None: pass its path"),
        (lambda: ANYTHING.convert("a/path", None, "q4_0"), "a str or a Path, got None: pass its path"),
        (lambda: ANYTHING.load("a/path", model()), r"device is a torch.device or its name, got torch.Sequential: a model is load"),
        (lambda: ANYTHING.load("a/path", model="a/path"), "model is a torch.nn.Module or None, got str: leave it out"),
        (lambda: ANYTHING.load_gguf("a/path", dtype="half"), "computes in float32, bfloat16 or float16, got 'half': pass dtype"),
        (lambda: ANYTHING.Config("q4_0", overrides=["head"]), "overrides are a dict of patterns and formats, got list: write"),
        (lambda: ANYTHING.Config("q4_0", skip=0), r"skip is a list of patterns, got int: write skip=\["),
        (lambda: ANYTHING.Config("q4_0", skip=[0]), "a pattern of skip or overrides is a str, part of a module's name, got int: write"),
        (lambda: ANYTHING.Config("q4_0", overrides={0: "q8_0"}), "a pattern of skip or overrides is a str, .*, got int: write"),
        (lambda: ANYTHING.report(WEIGHT), "report takes a model, a torch.nn.Module, got torch.Tensor"),
        (lambda: ANYTHING.save(WEIGHT, "nowhere"), "save takes a model, a torch.nn.Module, got torch.Tensor"),
        (lambda: ANYTHING.parallelize_(model(), None), "a torch.distributed DeviceMesh, got None: pass init_device_mesh"),
        (lambda: ANYTHING.calibration_tokens("text", lambda text: text), "the text a string, got function: pass the tokenizer first"),
        (lambda: ANYTHING.calibration_tokens("text", "text"), "a tokenizer is a callable, got str: pass one of transformers"),
    ],
)
@pytest.mark.parametrize("gradients", [True, False])
def test_arguments_of_the_wrong_type_are_named(call: Callable[[], object], message: str, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients), pytest.raises((ArgumentError, UnsupportedError), match=message):
        call()


def test_transformers_takes_a_config_of_its_own_kind(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="transformers takes a HalfbyteConfig, got a Config: write quantization_config="):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=hb.Config("q4_0"))


# Names that are nearly right


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("int4", "int4_g128"),
        ("int8", "int8_channel"),
        ("Q4_0", "q4_0"),
        ("int4-g128", "int4_g128"),
        ("INT4_G48_ZP", "int4_g48_zp"),
        ("q4", "q4_0"),
        ("q8", "q8_0"),
        ("int8_chanel", "int8_channel"),
    ],
)
def test_an_unknown_format_names_the_nearest(name: str, near: str) -> None:
    assert str(hb.as_format(near)) == near
    with pytest.raises(FormatError, match=rf"^unknown format '{name}' \(did you mean {near}\?\): use one of q4_0, "):
        hb.as_format(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("q4_K_M", "q4_0"),
        ("IQ3_XS", "q4_0"),
        ("q5_K_S", "int5_g32"),
        ("q6_k", "int6_g16"),
        ("q8_K", "q8_0"),
        ("nf4", "int4_g64"),
        ("w8a16", "int8_channel"),
    ],
)
def test_formats_of_others_name_the_nearest(name: str, near: str) -> None:
    with pytest.raises(FormatError, match=rf"^unknown format '{name}' \(the nearest is {near}\): use one of q4_0, "):
        hb.as_format(name)


@pytest.mark.parametrize("name", ["", "bogus", "q9_9", "gptq", None, 4, torch.int8, ["q4_0"], {"format": "q4_0"}])
def test_an_unknown_format_without_a_near_one_gets_the_list(name: Any) -> None:
    with pytest.raises(FormatError, match=r"^unknown format [^?]*: use one of q4_0, .* or int\{5\|6\}_g<block>"):
        hb.as_format(name)


@pytest.mark.parametrize("name", ["nope", "meta-llama/Llama-3.2-1B"])
def test_loading_from_a_folder_that_is_missing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=rf"^there is no folder {name}: name one that save\(\) or .* Hub, .*HalfbyteConfig\("):
        hb.load(name)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_file_that_git_lfs_has_not_fetched(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of Git LFS in the place of the file: fetch the file with git lfs"):
        hb.load(tmp_path / name if name.endswith(".gguf") else tmp_path, format="q4_0")


def test_loading_from_a_float_model_shows_the_call(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    save_file({"weight": WEIGHT}, tmp_path / "model.safetensors")
    calls = r"convert\('.*', 'new_folder', 'q4_0'\) does it once, load\('.*', format='q4_0'\) as it loads"
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError, match=f"not quantized by halfbyte, {calls}"):
            hb.load(path)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"a.weight": WEIGHT.double(), "b": WEIGHT}, r": a.weight stays as it is \(not a 2-D tensor of float32, .* \*.weight\)"),
        ({"a.weight": torch.ones(0, 64)}, r": a.weight stays as it is"),
        ({}, ", which has no tensors"),
    ],
)
def test_converting_files_with_nothing_to_quantize_is_refused(tensors: dict[str, torch.Tensor], why: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match=f"there is nothing to quantize in .*model.safetensors{why}"):
        hb.convert(tmp_path / "model.safetensors", tmp_path / "q", "q4_0")
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("load", [hb.load, lambda path: hb.load(path, format="q4_0"), lambda path: hb.convert(path, "nowhere", "q4_0")])
@pytest.mark.parametrize(
    ("files", "opened", "message"),
    [
        (["h.txt"], "h.txt", r"h.txt (is neither a folder nor a GGUF file: name a folder that|.* is not a safetensors file)"),
        (["model.pt"], "model.pt", r"model.pt is a pickle, which is never opened: save the model as safetensors first"),
        (["config.json", "model.ckpt"], "", r"has model.ckpt only, a pickle, which is never opened: save"),
        (["config.json"], "", r"has no \*.safetensors files: name a folder that has some, or one such file, or a GGUF file"),
        ([], "", r"has no \*.safetensors files: name a folder that has some, or one such file, or a GGUF file"),
        (["adapter_config.json", "adapter_model.safetensors"], "", r"holds an adapter, not a model: load the model that .* and then peft"),
        ([], "model.gguf", r"^there is no \S*model.gguf: name .*a GGUF file"),
    ],
)
def test_loading_what_is_no_model(load: Callable[[Path], object], files: list[str], opened: str, message: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / opened)


@pytest.mark.parametrize(
    ("built", "why"),
    [
        (lambda: model().double(), r": 0 stays as it is \(its weight is torch.float64: kernels take"),
        (lambda: model().to("meta"), r": 0 stays as it is \(its weight has no data \(meta device\)\)"),
        (lambda: nn.Sequential(nn.LayerNorm(8), nn.LSTM(8, 8)), r": 0 stays as it is \(only Linear, Embedding"),
        (lambda: nn.Sequential(nn.LayerNorm(8), model().double()), r": 1.0 stays as it is \(its weight is torch.float64"),
        (lambda: nn.Sequential(nn.ReLU()), ", which has no weights"),
    ],
)
def test_a_model_with_nothing_to_quantize_is_refused(built: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(ArgumentError, match=f"there is nothing to quantize in Sequential{why}"):
        hb.quantize_(built(), "q4_0")


def test_a_model_of_doubles_says_what_it_computes_in() -> None:
    built = hb.quantize_(nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 40)), "q4_0").double()
    with pytest.raises(ArgumentError, match=r"to float32, bfloat16 or float16, got torch.float64: convert a model with .float\(\)"):
        built(torch.tensor([1]))
    assert built.float()(torch.tensor([1])).dtype == torch.float32


def test_a_weight_is_read_like_a_tensor_of_floats() -> None:
    layer: Any = hb.quantize_(model(), "q4_0")[0]
    assert layer.weight.tolist() == layer.weight.numpy().tolist() == layer.codes().dequantize().tolist()


def test_the_state_of_a_float_model_says_where_it_goes() -> None:
    said = "0.weight is in floating point there, and this module takes q4_0 codes: load the state into the float model, and quantize that"
    with pytest.raises(RuntimeError, match=said):
        hb.quantize_(model(), "q4_0").load_state_dict(model().state_dict())


def test_loading_a_state_keeps_shared_weights_shared() -> None:
    def tied(seed: int) -> Any:
        torch.manual_seed(seed)
        built: Any = nn.ModuleList([nn.Embedding(40, 64), nn.Linear(64, 40, bias=False)])
        built[1].weight = built[0].weight
        return hb.quantize_(built, hb.Config("q8_0"))

    one, other = tied(1), tied(2)
    one.load_state_dict(other.state_dict())
    assert one[0].packed.data is one[1].packed.data
    assert torch.equal(one[1].weight + 0, other[1].weight + 0)
    state = other.state_dict()
    state["1.weight.data"] = -state["1.weight.data"]
    one.load_state_dict(state)
    assert torch.equal(one[1].weight + 0, -one[0].weight)
    one.load_state_dict(other.state_dict())
    assert torch.equal(one[1].weight + 0, other[0].weight + 0)
