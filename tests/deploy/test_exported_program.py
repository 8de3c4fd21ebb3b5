"""Exported programs: they run in a process of their own, which compiles nothing, and compute what the model does."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.deploy import decoder_step, example, program
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError

# Loads a program, and computes from the tensors of one file those of another; the sources of models are not imported.
_RUN = """
import sys
import halfbyte
from safetensors.torch import load_file, save_file
run, result = halfbyte.load_program(sys.argv[1]), {}
for path in sys.argv[2:]:
    found = run(**load_file(path))
    found = found if isinstance(found, dict) else {"y": found}
    save_file({name: y.contiguous() for name, y in found.items()}, path + ".result")
assert not {"transformers", "diffusers"} & set(sys.modules)
"""


def in_a_new_process(folder: Path, calls: list[dict[str, Tensor]]) -> tuple[list[dict[str, Tensor]], list[Path]]:
    """What a program computes where no kernel is cached, and what is in the cache then."""
    work = folder.parent / f"{folder.name}-calls"
    work.mkdir()
    files = [work / f"{i}.safetensors" for i in range(len(calls))]
    for file, inputs in zip(files, calls, strict=True):
        save_file(inputs, file)
    env = {**os.environ, "HALFBYTE_CACHE": str(work / "cache"), "PYTHONPATH": str(Path(hb.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", _RUN, str(folder), *map(str, files)], env=env, check=True, cwd=work)
    return [load_file(f"{file}.result") for file in files], [path for path in (work / "cache").rglob("*") if path.is_file()]


def close(got: Tensor, wanted: Tensor) -> bool:
    """Whether results in float32 differ by no more than the order of sums: fewer than 256 roundings follow each other."""
    return bool((got - wanted).norm() <= 256 * torch.finfo(torch.float32).eps * wanted.norm())


@torch.no_grad()
def test_an_encoder_runs_without_its_source_and_without_a_compiler(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    model = hb.quantize_(BertModel(config).eval(), hb.Config("q8_0", compute="float"))
    hb.export_program(model, tmp_path / "encoder")
    calls = []
    for batch, tokens in ((1, 1), (1, 7), (2, 16), (2, 3)):
        ids = torch.randint(96, (batch, tokens))
        mask = torch.ones_like(ids)
        mask[-1, tokens // 2 + 1 :] = 0
        calls.append({"input_ids": ids, "attention_mask": mask})
    found, compiled = in_a_new_process(tmp_path / "encoder", calls)
    assert compiled == []
    for result, inputs in zip(found, calls, strict=True):
        wanted = model(**inputs)
        assert set(result) == {"last_hidden_state", "pooler_output"}
        assert close(result["last_hidden_state"], wanted.last_hidden_state)
        assert close(result["pooler_output"], wanted.pooler_output)
    assert {path.name for path in (tmp_path / "encoder").iterdir()} == {
        "model.pt2", "kernels", "example.safetensors", "program.json", "load.py"
    }  # fmt: skip
    with pytest.raises(ArgumentError, match="takes input_ids, attention_mask, got 1 by position"):
        hb.load_program(tmp_path / "encoder")(calls[0]["input_ids"])


@torch.no_grad()
def test_a_decoder_step_continues_its_sequence(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    model = hb.quantize_(LlamaForCausalLM(config).eval(), hb.Config("q4_0", compute="float"))
    ids = torch.randint(96, (1, 9))
    step, inputs = decoder_step.decoder_step(model, ids[:, :4], 32)
    assert step(**inputs).shape == (1, 4, 96)
    hb.export_program(model, tmp_path / "step", context=32)
    at = (0, 6, 7, 8, 9)
    calls = [{"input_ids": ids[:, a:b].contiguous(), "position": torch.tensor(a)} for a, b in itertools.pairwise(at)]
    found, compiled = in_a_new_process(tmp_path / "step", [*calls, calls[0]])
    assert compiled == []
    wanted = model(input_ids=ids).logits
    assert close(torch.cat([one["y"] for one in found[:-1]], dim=1), wanted)
    assert close(found[-1]["y"], wanted[:, :6])  # a new sequence in the same cache


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.body, self.pool, self.head = nn.Conv2d(16, 16, 3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.pool(torch.relu(self.body(x) + x)).flatten(1))


@torch.no_grad()
def test_a_network_on_int8_codes_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 16, 16)
    model = hb.quantize_(_Residual().eval(), hb.Config("int8_channel", activations="static"), [images])
    hb.export_program(model, tmp_path / "cnn", [images[:2]], {"x": {0: "batch"}})
    found, compiled = in_a_new_process(tmp_path / "cnn", [{"x": images[:2]}, {"x": images[:1]}])
    assert compiled == []
    assert torch.equal(found[0]["y"], model(images[:2]))
    assert torch.equal(found[1]["y"], model(images[:1]))


@torch.no_grad()
def test_a_unet(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    ).eval()  # fmt: skip
    hb.quantize_(unet, hb.Config("q8_0", compute="float"))
    hb.export_program(unet, tmp_path / "unet")
    inputs = {"sample": torch.randn(1, 3, 8, 8), "timestep": torch.tensor([500])}
    found, compiled = in_a_new_process(tmp_path / "unet", [inputs])
    assert compiled == []
    assert close(found[0]["sample"], unet(**inputs).sample)


@torch.no_grad()
def test_inputs_that_a_program_was_not_compiled_for(tmp_path: Path) -> None:
    """Native code reads memory as it was compiled for it: strides of views, other sizes and dtypes gave wrong numbers or a crash."""
    model = hb.quantize_(nn.Sequential(nn.GELU(), nn.Linear(32, 8)).eval(), hb.Config("q8_0", compute="float"))
    compiled = hb.export_program(model, tmp_path / "out", [torch.randn(32, 3).t()], {"input": {0: "rows"}})
    for x in (torch.randn(32, 3).t(), torch.randn(3, 64)[:, ::2], torch.randn(1, 32).expand(5, 32)):
        torch.testing.assert_close(compiled(x), model(x))
    for bad in (
        torch.randn(3, 16),
        torch.randn(2, 3, 32),
        torch.randn(32),
        torch.randn(3, 32, dtype=torch.bfloat16),
        torch.randn(70000, 32),
    ):
        with pytest.raises(ArgumentError, match=r"compiled for input \[rows, 32\] torch.float32 on cpu, rows up to 65536, got \["):
            compiled(bad)
    with pytest.raises(ArgumentError, match=r"on meta: convert it, or export the model with such an input$"):
        compiled(torch.randn(3, 32, device="meta"))


class _Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class _Chunked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous() * 2 if x.shape[0] < 64 else x + x  # as diffusers' Upsample2D, whose forward depends on the batch


def test_sizes_of_1_vary_and_those_that_a_forward_depends_on_are_limited() -> None:
    traced, call = example.example_of(nn.Linear(4, 4).eval(), [torch.randn(1, 4)], {"input": {0: "batch"}}).trace()
    assert traced.module()(torch.zeros(3, 4)).shape == (3, 4)
    assert call.max_sizes == {"batch": 65536}
    assert call.inputs["input"].shape == (1, 4)
    traced, call = example.example_of(_Chunked().eval(), [torch.randn(2, 4)], {"x": {0: "batch"}}).trace()
    assert traced.module()(torch.ones(63, 4)).sum() == 63 * 8
    assert call.max_sizes == {"batch": 63}

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(2, 4) + 1

    with pytest.raises(UnsupportedError, match=r"cannot trace Fixed \(You marked batch as dynamic but your code specialized it to"):
        example.example_of(Fixed().eval(), [torch.randn(2, 4)], {"x": {0: "batch"}}).trace()


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, linear = torch.randn(2, 4), nn.Sequential(nn.Linear(4, 4)).eval()
    with pytest.raises(UnsupportedError, match=r"torch\.export cannot trace _Branching"):
        hb.export_program(_Branching().eval(), tmp_path / "out", [x])
    with pytest.raises(ArgumentError, match=r"in training mode.*model\.eval\(\)"):
        hb.export_program(nn.Linear(4, 4), tmp_path / "out", [x])
    with pytest.raises(ArgumentError, match=r"what Sequential takes is not known.*pass inputs="):
        hb.export_program(linear, tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"dimension 2 of input, got inputs of shapes \{'input': \[2, 4\]\}"):
        hb.export_program(linear, tmp_path / "out", [x], {"input": {2: "batch"}})
    with pytest.raises(ArgumentError, match="the input input of an exported model is a tensor, got int"):
        example.example_of(linear, [3], None)  # type: ignore[list-item]
    (tmp_path / "there").mkdir()
    with pytest.raises(ArgumentError, match="context of the KV cache of an exported program is a whole number from 1 on, got 0: ask for 1"):
        hb.export_program(linear, tmp_path / "out", [x], context=0)
    with pytest.raises(ArgumentError, match="there exists: choose another place"):
        hb.export_program(linear, tmp_path / "there", [x])

    def full(_: object, __: object, package: Path) -> None:
        package.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(program, "_compile", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*free some space"):
        hb.export_program(linear, tmp_path / "out", [x])
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder that export_program has written"):
        hb.load_program(tmp_path)
    good = {
        "halfbyte": hb.__version__, "torch": torch.__version__.partition("+")[0], "device": "cpu",
        "cpu": torch.backends.cpu.get_cpu_capability(), "inputs": ["x"], "sizes": {}, "max_sizes": {},
    }  # fmt: skip
    for change, error, message in (
        ({"torch": "1.0"}, UnsupportedError, "exported with torch 1.0.*install torch 1.0, or export it again"),
        ({"halfbyte": "9"}, UnsupportedError, "exported with halfbyte 9"),
        ({"cpu": "SVE9"}, UnsupportedError, "compiled for CPUs with SVE9, and this one has"),
        ({"device": []}, CheckpointError, "is not that of a program"),
        ({"inputs": "x"}, CheckpointError, "is not that of a program"),
        ({}, CheckpointError, r"model\.pt2 cannot be loaded .*damaged"),
    ):
        (tmp_path / "program.json").write_text(json.dumps(good | change))
        with pytest.raises(error, match=message):
            hb.load_program(tmp_path)
    for text in ("{", "[" * 100_000, "[]"):
        (tmp_path / "program.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"program\.json (is not JSON|holds a JSON list)"):
            hb.load_program(tmp_path)
