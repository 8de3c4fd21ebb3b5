"""What weights become while files are read: float ones are packed, codes wait in placeholders, quantized modules replace float ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte.checkpoint.native.quantization_config import Module
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.dense import to_dense
from halfbyte.integrations.transformers.weights_in_files import check_finite, check_shape, expect_codes, put, quantized_weight, read_codes
from halfbyte.nn.described import ORDER
from halfbyte.nn.modules.permuted import PermutedLinear

FORMAT = hb.as_format("int5_g32")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 8), nn.Conv2d(32, 8, 3), nn.ReLU())


def filled(name: str, fmt: hb.Format = FORMAT, dtype: torch.dtype | None = None) -> tuple[nn.Sequential, nn.Module]:
    """A model whose placeholder `name` has read the codes of a quantized one, and the module of that."""
    quantized = hb.quantize_(model(), fmt).get_submodule(name)
    assert isinstance(quantized, hb.QuantModule)
    net = model()
    expect_codes(net, name, replace(Module.of(quantized, torch.float32), dtype=dtype), "save them again")
    placeholder: Any = net.get_submodule(f"{name}.weight")
    for part, tensor in to_dense(quantized.codes()).items():
        placeholder.register_buffer(part, tensor)
    return net, quantized


@pytest.mark.parametrize(("name", "x"), [("0", torch.ones(2, 64)), ("1", torch.ones(1, 32, 5, 5))])
def test_codes_that_were_read(name: str, x: torch.Tensor) -> None:
    net, want = filled(name)
    weight = read_codes(name, net.get_submodule(name))
    put(net, name, weight, hb.Config(FORMAT, compute="float"))
    assert (weight.dtype, weight.error) == (torch.float32, None)
    assert torch.equal(net.get_submodule(name).weight.clone(), want.weight.clone())
    assert net.get_submodule(name)(x).shape == want(x).shape


@pytest.mark.parametrize("name", ["0", "1"])
def test_float_weights_that_were_read(name: str) -> None:
    net = model()
    module = net.get_submodule(name)
    weight = quantized_weight(name, module, module.weight.bfloat16(), hb.as_format("q8_0"), "absmax")
    assert weight.dtype == torch.bfloat16
    assert 0 < (weight.error or 0) < 0.01
    with pytest.raises(FormatError, match=rf"{name}\.weight"):
        quantized_weight(name, module, torch.full_like(module.weight, 1e38), hb.as_format("q8_0"), "absmax")


def test_permuted_inputs() -> None:
    net, _ = filled("0")
    net.get_submodule("0").register_buffer(ORDER, torch.arange(63, -1, -1, dtype=torch.int32))
    put(net, "0", read_codes("0", net.get_submodule("0")), hb.Config(FORMAT))
    assert isinstance(net.get_submodule("0"), PermutedLinear)


def test_the_dtype_in_the_files() -> None:
    net, _ = filled("0", dtype=torch.float16)
    assert read_codes("0", net.get_submodule("0")).dtype == torch.float32  # of a model in float32 nothing is in less


def test_what_does_not_fit() -> None:
    settings = Module(FORMAT, (8, 64))
    with pytest.raises(
        CheckpointError, match=r"2 is a ReLU of Sequential, which cannot be quantized, but is in the files: save them again"
    ):
        expect_codes(model(), "2", settings, "save them again")
    with pytest.raises(CheckpointError, match=r"0\.weight is \[8, 32\] in the files, \[8, 64\] in the model: save them again"):
        expect_codes(model(), "0", replace(settings, shape=(8, 32)), "save them again")
    with pytest.raises(CheckpointError, match=r"0\.weight is \[8, 32\] in the files, but config\.json makes it \[8, 64\]"):
        check_shape("0", model()[0], torch.zeros(8, 32))
    net, _ = filled("0")
    placeholder: Any = net.get_submodule("0.weight")
    placeholder.scale = placeholder.scale[:-1]
    with pytest.raises(CheckpointError, match=r"0\.weight: the scale of int5_g32 codes"):
        read_codes("0", net.get_submodule("0"))
    assert check_finite(net) is None
    nn.init.constant_(net[1].bias, torch.inf)
    with pytest.raises(CheckpointError, match=r"1\.bias .*: the file is damaged"):
        check_finite(net)
