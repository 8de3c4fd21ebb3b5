"""GGUF files of image and video models, with the names of city96's files: diffusers' `from_single_file` reads their codes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file
from tiny_diffusers import joined, renamed, swapped, write_gguf

import halfbyte as hb
from halfbyte.errors import CheckpointError

Call = dict[str, Any]
TYPES = ["q8_0", "q4_0", "q5_1", "bf16", "iq4_nl", "q4_1"]


def flux() -> tuple[Any, dict[str, Tensor], Call]:
    sizes = {"in_channels": 16, "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, axes_dims_rope=(8, 12, 12), guidance_embeds=True, **sizes)
    names = {
        "time_text_embed.timestep_embedder": "time_in",
        "time_text_embed.text_embedder": "vector_in",
        "time_text_embed.guidance_embedder": "guidance_in",
        "linear_1": "in_layer",
        "linear_2": "out_layer",
        "context_embedder": "txt_in",
        "x_embedder": "img_in",
        "single_transformer_blocks": "single_blocks",
        "transformer_blocks": "double_blocks",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "blocks.0.proj_out": "blocks.0.linear2",
        "norm1.linear": "img_mod.lin",
        "norm1_context.linear": "txt_mod.lin",
        "norm.linear": "modulation.lin",
        "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
        "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
        "double_blocks.0.attn.norm_q.weight": "double_blocks.0.img_attn.norm.query_norm.scale",
        "double_blocks.0.attn.norm_k.weight": "double_blocks.0.img_attn.norm.key_norm.scale",
        "single_blocks.0.attn.norm_q.weight": "single_blocks.0.norm.query_norm.scale",
        "single_blocks.0.attn.norm_k.weight": "single_blocks.0.norm.key_norm.scale",
        "attn.to_out.0": "img_attn.proj",
        "attn.to_add_out": "txt_attn.proj",
        "ff.net.0.proj": "img_mlp.0",
        "ff.net.2": "img_mlp.2",
        "ff_context.net.0.proj": "txt_mlp.0",
        "ff_context.net.2": "txt_mlp.2",
    }
    state = renamed(model.state_dict(), names)
    state = {name.replace("proj_out", "final_layer.linear"): tensor for name, tensor in state.items()}
    qkv = [f"single_blocks.0.attn.to_{part}" for part in "qkv"]
    parts = {
        "double_blocks.0.img_attn.qkv": [f"double_blocks.0.attn.to_{part}" for part in "qkv"],
        "double_blocks.0.txt_attn.qkv": [f"double_blocks.0.attn.add_{part}_proj" for part in "qkv"],
        "single_blocks.0.linear1": [*qkv, "single_blocks.0.proj_mlp"],
    }
    inputs = {"hidden_states": torch.randn(1, 4, 16), "encoder_hidden_states": torch.randn(1, 3, 32), "timestep": torch.tensor([0.5])}
    more = {"pooled_projections": torch.randn(1, 32), "img_ids": torch.zeros(4, 3), "txt_ids": torch.zeros(3, 3)}
    call = {**inputs, **more, "guidance": torch.ones(1)}
    return model, swapped(joined(state, parts), "final_layer.adaLN"), call


def sd3() -> tuple[Any, dict[str, Tensor], Call]:
    sizes = {"attention_head_dim": 32, "num_attention_heads": 2, "caption_projection_dim": 64, "joint_attention_dim": 32}
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, pooled_projection_dim=32, pos_embed_max_size=8, **sizes
    )
    names = {
        "pos_embed.pos_embed": "pos_embed",
        "pos_embed.proj": "x_embedder.proj",
        "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
        "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "proj_out": "final_layer.linear",
        "transformer_blocks": "joint_blocks",
        "attn.to_out.0": "x_block.attn.proj",
        "attn.to_add_out": "context_block.attn.proj",
        "norm1_context.linear": "context_block.adaLN_modulation.1",
        "norm1.linear": "x_block.adaLN_modulation.1",
        "ff_context.net.0.proj": "context_block.mlp.fc1",
        "ff_context.net.2": "context_block.mlp.fc2",
        "ff.net.0.proj": "x_block.mlp.fc1",
        "ff.net.2": "x_block.mlp.fc2",
    }
    parts = {}
    for i in range(2):
        parts[f"joint_blocks.{i}.x_block.attn.qkv"] = [f"joint_blocks.{i}.attn.to_{part}" for part in "qkv"]
        parts[f"joint_blocks.{i}.context_block.attn.qkv"] = [f"joint_blocks.{i}.attn.add_{part}_proj" for part in "qkv"]
    state = swapped(joined(renamed(model.state_dict(), names), parts), "final_layer.adaLN", "joint_blocks.1.context_block.adaLN")
    inputs = {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 5, 32)}
    return model, state, {**inputs, "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([3, 4])}


def wan() -> tuple[Any, dict[str, Tensor], Call]:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32}
    model = WanTransformer3DModel(patch_size=(1, 2, 2), ffn_dim=64, num_layers=1, rope_max_seq_len=32, **sizes)
    names = {
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        "proj_out": "head.head",
        "attn1": "self_attn",
        "attn2": "cross_attn",
        ".to_out.0.": ".o.",
        ".to_q.": ".q.",
        ".to_k.": ".k.",
        ".to_v.": ".v.",
        ".scale_shift_table": ".modulation",
        "scale_shift_table": "head.modulation",
        "ffn.net.0.proj": "ffn.0",
        "ffn.net.2": "ffn.2",
        "norm2": "norm3",
    }
    inputs = {"hidden_states": torch.randn(1, 4, 1, 4, 4), "timestep": torch.tensor([3]), "encoder_hidden_states": torch.randn(1, 3, 32)}
    return model, renamed(model.state_dict(), names), inputs


def qwen_image() -> tuple[Any, dict[str, Tensor], Call]:
    sizes = {"in_channels": 16, "out_channels": 4, "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 32}
    model = QwenImageTransformer2DModel(patch_size=2, num_layers=1, axes_dims_rope=(8, 12, 12), **sizes)
    inputs = {"hidden_states": torch.randn(1, 4, 16), "encoder_hidden_states": torch.randn(1, 3, 32), "timestep": torch.tensor([0.5])}
    return model, dict(model.state_dict()), {**inputs, "encoder_hidden_states_mask": torch.ones(1, 3), "img_shapes": [[(1, 2, 2)]]}


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Tensor], Call]]] = {"flux": flux, "sd3": sd3, "wan": wan, "qwen_image": qwen_image}


@pytest.fixture(autouse=True)
def _narrow_flux(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers splits Flux's fused layers at 3072, its only width."""
    convert = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers
    code: CodeType = convert.__code__
    monkeypatch.setattr(convert, "__code__", code.replace(co_consts=tuple(64 if c == 3072 else c for c in code.co_consts)))


def built(name: str, folder: Path, types: list[str] = TYPES) -> tuple[Any, Path, Call, dict[str, Tensor]]:
    """A model, its GGUF file, inputs, and the values in the file by their names there."""
    torch.manual_seed(5)
    model, tensors, call = MODELS[name]()
    model.eval().save_config(folder / "config")
    stored = write_gguf(folder / f"{name}.gguf", name, tensors, types)
    return model, folder / f"{name}.gguf", call, stored


def opened(cls: Any, file: Path, *formats: str, **settings: Any) -> Any:
    config = hb.HalfbyteConfig(*formats, compute="float")
    return cls.from_single_file(str(file), config=str(file.parent / "config"), quantization_config=config, **settings)


@torch.no_grad()
def output(model: Any, call: Call, dtype: torch.dtype = torch.float32) -> Tensor:
    found: Tensor = model(**{name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()})[0]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_codes_of_the_file(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The oracle: diffusers' model with the values of the file, which it reads from a file of floats."""
    model, file, call, stored = built(name, tmp_path)
    quantized = opened(type(model), file, torch_dtype=dtype)
    formats = {str(module.packed.codes_format) for module in quantized.modules() if isinstance(module, hb.QuantModule)}
    assert {"q8_0", "q4_0", "iq4_nl"} <= formats
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, tmp_path / "floats.safetensors")
    oracle = type(model).from_single_file(str(tmp_path / "floats.safetensors"), config=str(tmp_path / "config"), torch_dtype=dtype)
    for place, module in quantized.named_modules():
        if isinstance(module, hb.QuantModule):
            assert torch.equal(module.weight.clone(), oracle.get_submodule(place).weight.to(dtype)), place
    found, want = output(quantized, call, dtype).float(), output(oracle, call, dtype).float()
    assert (found - want).norm() < (1e-5 if dtype == torch.float32 else 3e-2) * want.norm()
    quantized.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", torch_dtype=dtype)
    state = again.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in quantized.state_dict().items())


def test_modules_in_float32(tmp_path: Path) -> None:
    model, file, _, _ = built("wan", tmp_path, ["q8_0"])
    quantized = opened(type(model), file, torch_dtype=torch.bfloat16)
    layer = quantized.condition_embedder.time_embedder.linear_1
    assert (type(layer), layer.weight.dtype) == (nn.Linear, torch.float32)
    assert isinstance(quantized.condition_embedder.time_proj, hb.QuantLinear)


def test_a_format_is_for_what_the_file_has_in_floats(tmp_path: Path) -> None:
    model, file, _, _ = built("sd3", tmp_path, ["q8_0", "bf16"])
    formats = [
        {str(module.packed.codes_format) for module in opened(type(model), file, *given).modules() if isinstance(module, hb.QuantModule)}
        for given in ((), ("int4_g32",))
    ]
    assert formats[0] == {"q8_0"}
    assert {"q8_0", "int4_g32"} <= formats[1]


@pytest.mark.parametrize("other", ["sizes", "architecture", "missing", "type"])
def test_files_of_other_models(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file, _, _ = built("sd3", tmp_path)
    cls: Any = type(model)
    messages = {
        "sizes": r"SD3Transformer2DModel.*expected shape.*: take the class and the config of the model that the file holds",
        "architecture": r"diffusers cannot read .*sd3\.gguf, of the architecture 'sd3', as a FluxTransformer2DModel .*: take the class",
        "missing": r"diffusers cannot read .*KeyError: 'context_embedder\.bias'",
        "type": r"is of ggml type 8, halfbyte reads q4_0",
    }
    match other:
        case "sizes":
            config = dict(copy.deepcopy(model.config)) | {"num_attention_heads": 4, "caption_projection_dim": 128}
            cls.from_config(config).save_config(file.parent / "config")
        case "architecture":
            cls = FluxTransformer2DModel
        case "missing":
            _, tensors, _ = sd3()
            write_gguf(file, "sd3", {name: tensor for name, tensor in tensors.items() if name != "context_embedder.bias"}, TYPES)
        case "type":
            from halfbyte.formats import ggml

            monkeypatch.setattr(ggml, "TYPES", {number: kind for number, kind in ggml.TYPES.items() if number != 8})
    with pytest.raises(CheckpointError, match=messages[other]):
        opened(cls, file)
