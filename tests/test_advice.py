"""What error messages advise works: each mistake raises its error, and what the message says to do instead gives a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte import ops
from halfbyte.errors import HalfbyteError

X, IMAGE, IDS = torch.randn(3, 64), torch.randn(1, 4, 5, 5), torch.tensor([[0, 2], [1, 1], [2, 0]])
SCALES: dict[str, Any] = {"in_scale": 0.1, "in_zero": 0, "out_scale": 1.0, "out_zero": 0}


def packed(format: str = "q8_0", *lead: int, k: int = 64) -> hb.Packed:
    return hb.pack(hb.quantize(torch.randn(*lead, 8, k), format))


def filters(format: str = "int8_channel", size: int = 3) -> hb.PackedConv:
    return hb.pack_conv(hb.quantize_conv(torch.randn(8, 4, size, size), format), size)


def quantized(module: nn.Module, format: str = "q8_0", **settings: Any) -> nn.Module:
    return hb.quantize_(nn.Sequential(module).eval(), hb.Config(format, **settings))


LINEAR, CONV, STACK = packed(), filters(), packed("q8_0", 3)
CODES, INTEGERS = packed("int8_channel"), torch.randint(-128, 128, (3, 64), dtype=torch.int8)
EMBEDDING = nn.Embedding(8, 64)

# (what is asked, words of the message with the advice, what it advises)
ADVICE: list[tuple[Callable[[], object], str, Callable[[], object]]] = [
    # Operations
    (lambda: hb.linear(X.double(), LINEAR), "convert them first", lambda: hb.linear(X.float(), LINEAR)),
    (lambda: hb.linear(X.numpy(), LINEAR), r"pass torch.as_tensor\(x\)", lambda: hb.linear(torch.as_tensor(X.numpy()), LINEAR)),
    (lambda: hb.linear(X, X), r"pass pack\(quantize\(weight, format\)\)", lambda: hb.linear(X, hb.pack(hb.quantize(X, "q8_0")))),
    (lambda: hb.linear(X, LINEAR, clamp=6), r"write \(0, 6\) for ReLU6", lambda: hb.linear(X, LINEAR, clamp=(0, 6))),
    (lambda: hb.linear(X, LINEAR, clamp=(6, 0)), "write the lower number first", lambda: hb.linear(X, LINEAR, clamp=(0, 6))),
    (lambda: hb.linear(X, LINEAR, activation="image"), "use one of block, row, ", lambda: hb.linear(X, LINEAR, activation="row")),
    (lambda: hb.linear(X, LINEAR, compute="int4"), "use one of auto, int8, float", lambda: hb.linear(X, LINEAR, compute="int8")),
    (lambda: hb.linear(X, STACK), "use grouped_linear", lambda: hb.grouped_linear(X, STACK, IDS)),
    (lambda: hb.grouped_linear(X, LINEAR, IDS), "use linear", lambda: hb.linear(X, LINEAR)),
    (lambda: hb.linear(X, CONV), r"pass pack\(quantize", lambda: hb.linear(X, hb.pack(hb.quantize(X, "q8_0")))),
    (
        lambda: hb.linear(torch.randn(2, 48), packed("iq4_nl", k=48), compute="int8", activation="row_offset"),
        "use 'block' or 'row'",
        lambda: hb.linear(torch.randn(2, 48), packed("iq4_nl", k=48), compute="int8", activation="row"),
    ),
    (lambda: hb.embedding(IDS.float(), LINEAR), r"convert them with .long\(\) first", lambda: hb.embedding(IDS.float().long(), LINEAR)),
    (lambda: hb.embedding([1], LINEAR), r"pass torch.as_tensor\(ids\)", lambda: hb.embedding(torch.as_tensor([1]), LINEAR)),
    (lambda: hb.dequantize(X), r"pass quantize\(weight, format\)", lambda: hb.dequantize(hb.quantize(X, "q8_0"))),
    (
        lambda: hb.qlinear(INTEGERS, LINEAR, **SCALES),
        "quantize to int8_channel",
        lambda: hb.qlinear(INTEGERS, CODES, **SCALES),
    ),
    (
        lambda: hb.qlinear(INTEGERS, CODES, **SCALES, clamp=(0, 300)),
        r"write \(out_zero, 127\) for ReLU",
        lambda: hb.qlinear(INTEGERS, CODES, **SCALES, clamp=(0, 127)),
    ),
    (lambda: hb.conv2d(IMAGE, CONV, stride="same"), r"write stride=1 or stride=\(1, 1\)", lambda: hb.conv2d(IMAGE, CONV, stride=(1, 1))),
    (lambda: hb.conv2d(IMAGE, CONV, padding="full"), "write padding=0", lambda: hb.conv2d(IMAGE, CONV, padding=0)),
    (
        lambda: hb.conv2d(IMAGE, filters("int4_g32"), activation="image"),
        "use int8_channel, or 'row'",
        lambda: (hb.conv2d(IMAGE, CONV, activation="image"), hb.conv2d(IMAGE, filters("int4_g32"), compute="int8", activation="row")),
    ),
    (lambda: hb.conv2d(IMAGE, LINEAR), r"pass pack_conv\(quantize_conv\(weight, format\), size\)", lambda: hb.conv2d(IMAGE, filters())),
    (lambda: hb.pack_conv(hb.quantize(torch.randn(8, 36), "q8_0"), 3), "use quantize_conv", lambda: filters("q8_0")),
    (lambda: filters("iq4_nl"), "use int8_channel or int4_g32", lambda: (filters("int8_channel"), filters("int4_g32"))),
    (
        lambda: hb.qconv2d(IMAGE, CONV, **SCALES),
        "quantize them first",
        lambda: hb.qconv2d((IMAGE * 10).to(torch.int8), CONV, **SCALES),
    ),
    # Weights and formats
    (lambda: hb.quantize(X.double(), "q8_0"), r"convert it with .float\(\) first", lambda: hb.quantize(X.double().float(), "q8_0")),
    (
        lambda: hb.quantize(X.numpy(), "q8_0"),
        r"pass torch.as_tensor\(array\)",
        lambda: hb.quantize(torch.as_tensor(X.numpy()), "q8_0"),
    ),
    (lambda: hb.quantize(X * 1e9, "q8_0"), "for example int8_g32_bf16", lambda: hb.quantize(X * 1e9, "int8_g32_bf16")),
    (lambda: hb.quantize(X * 1e-7, "q4_0"), "for example int4_g32_bf16", lambda: hb.quantize(X * 1e-7, "int4_g32_bf16")),
    (lambda: hb.quantize(X, "q8_0", "gptq"), "use one of absmax, mse, hqq, or quantize_", lambda: hb.quantize(X, "q8_0", "hqq")),
    (lambda: hb.pack(hb.quantize(X, "q8_0"), "xpu"), "use device='cpu'", lambda: hb.pack(hb.quantize(X, "q8_0"), device="cpu")),
    (lambda: hb.pack(X), r"pass what quantize\(weight, format\) gives", lambda: hb.pack(hb.quantize(X, "q8_0"))),
    # Models
    (lambda: hb.quantize_(nn.Linear(64, 8), "q8_0"), r"wrap it, nn.Sequential\(module\)", lambda: quantized(nn.Linear(64, 8))),
    (lambda: hb.Config("q8_0", skip="head"), r"write skip=\['head'\]", lambda: hb.Config("q8_0", skip=["head"])),
    (lambda: hb.Config("q8_0", bits=4), r'Config\("int4_g64"\)', lambda: hb.Config("int4_g64")),
    (lambda: hb.Config("q8_0", load_in_8bit=True), r'Config\("int8_channel"\)', lambda: hb.Config("int8_channel")),
    (lambda: quantized(EMBEDDING).double()(IDS), r"convert a model with .float\(\)", lambda: quantized(EMBEDDING).double().float()(IDS)),
    (
        lambda: quantized(nn.Linear(64, 8)).load_state_dict(nn.Sequential(nn.Linear(64, 8)).state_dict()),
        "load the state into the float model, and quantize that",
        lambda: quantized(nn.Linear(64, 8)).load_state_dict(quantized(nn.Linear(64, 8)).state_dict()),
    ),
    (
        lambda: hb.quantize_(quantized(nn.Linear(64, 8)), "q4_0"),
        "load the float model again and quantize that",
        lambda: quantized(nn.Linear(64, 8), "q4_0"),
    ),
    (
        lambda: quantized(nn.Conv2d(4, 8, 3), "q8_0", activations="static", overrides={"0": "q8_0"}, calibration=[IMAGE]),
        "use int8_channel",
        lambda: quantized(nn.Conv2d(4, 8, 3), "int8_channel", activations="static", calibration=[IMAGE]),
    ),
    (
        lambda: quantized(nn.Conv2d(4, 8, 3), "int8_channel", activations="static"),
        "pass calibration=images",
        lambda: hb.quantize_(nn.Sequential(nn.Conv2d(4, 8, 3)), hb.Config("int8_channel", activations="static"), calibration=[IMAGE]),
    ),
    (
        lambda: hb.convert_qat_(nn.Sequential(nn.Linear(64, 8))),
        "call prepare_qat_ first",
        lambda: hb.convert_qat_(hb.prepare_qat_(nn.Sequential(nn.Linear(64, 8)), "q8_0")),
    ),
    (lambda: ops.unpack(hb.quantize(X, "q8_0")), "Codes are unpacked already", lambda: hb.quantize(X, "q8_0").dequantize()),
]


@pytest.mark.parametrize(("mistake", "words", "advised"), ADVICE, ids=[words for _, words, _ in ADVICE])
def test_advice_works(mistake: Callable[[], object], words: str, advised: Callable[[], object]) -> None:
    with pytest.raises((HalfbyteError, RuntimeError), match=words):  # load_state_dict collects messages in a RuntimeError
        mistake()
    assert advised() is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_attention_of_nested_tensors() -> None:
    module = quantized(nn.MultiheadAttention(64, 2, batch_first=True))[0]
    parts = [torch.randn(3, 64), torch.randn(5, 64)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        with pytest.raises(HalfbyteError, match="pass a padded tensor and a key_padding_mask"):
            module(nested, nested, nested)
        padded = torch.nested.to_padded_tensor(nested, 0.0)
        mask = torch.arange(5) >= torch.tensor([[3], [5]])
        y, _ = module(padded, padded, padded, key_padding_mask=mask)
        alone, _ = module(parts[0][None], parts[0][None], parts[0][None])
        assert torch.allclose(y[0, :3], alone[0], atol=1e-4)
