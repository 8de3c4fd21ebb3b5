"""Mixtures of experts in GGUF: names, settings and codes both ways, and files as llama.cpp's quantizer and the gguf package write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from language_model import make_tokenizer
from llama_server import LlamaCpp, needs_llama_cpp
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, GraniteMoeConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

import halfbyte as hb
from halfbyte.checkpoint import convert, describe, export, load, load_tensors
from halfbyte.errors import CheckpointError
from halfbyte.formats import Codes, as_format, ggml
from halfbyte.integrations.transformers.gguf import load_gguf
from halfbyte.io import gguf
from halfbyte.nn.modules.experts import QuantExperts

package = pytest.importorskip("gguf")

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "qwen2moe": Qwen2MoeConfig(**SMALL, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, shared_expert_intermediate_size=64),
    "qwen3moe": Qwen3MoeConfig(
        **SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32, norm_topk_prob=True, tie_word_embeddings=True
    ),
    "olmoe": OlmoeConfig(**SMALL, num_experts=6, num_experts_per_tok=2),
    "granitemoe": GraniteMoeConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5,
        attention_multiplier=0.3,
    ),
    "gptoss": GptOssConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, head_dim=32, sliding_window=8, tie_word_embeddings=False, rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 16,
        },
    ),
}  # fmt: skip
ARCHITECTURES = {"mixtral": "llama", "gptoss": "gpt-oss"}
TOKENS = torch.randint(0, 101, (2, 13), generator=torch.Generator().manual_seed(1))


def make(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict() | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # routers and norms that matter
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(TOKENS).logits
    return found


def float_file(name: str, folder: Path) -> Any:
    model = make(name)
    model.save_pretrained(folder / "float")
    export(folder / "float", folder / "m.gguf", "gguf")
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_float_model_comes_back(name: str, tmp_path: Path) -> None:
    """Weights, and every setting that the logits depend on; under the names that llama.cpp gives its tensors."""
    model = float_file(name, tmp_path)
    back, _ = load_gguf(tmp_path / "m.gguf")
    assert type(back) is type(model)
    assert torch.equal(logits(back), logits(model))
    expected = package.GGUFReader(tmp_path / "m.gguf")
    architecture = next(a for a, title in package.MODEL_ARCH_NAMES.items() if title == ARCHITECTURES.get(name, name))
    known = {package.TENSOR_NAMES[kind].format(bid=layer) for kind in package.MODEL_TENSORS[architecture] for layer in range(2)}
    assert {tensor.name.rpartition(".")[0] for tensor in expected.tensors} <= known
    assert all(tensor.tensor_type == 0 for tensor in expected.tensors if "ffn_gate_inp" in tensor.name)
    assert not {"ffn_gate", "ffn_up"} & {tensor.name.split(".")[2] for tensor in expected.tensors if tensor.name.startswith("blk")}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "int4_g32_zp", "mxfp4"])
def test_a_quantized_model_comes_back_code_for_code(name: str, fmt: str, tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "q", fmt)
    report = export(tmp_path / "q", tmp_path / "m.gguf", "gguf")
    assert {row.name for row in report.kept if row.reason and "dequantized" in row.reason} <= {
        f"model.layers.{layer}.mlp.shared_expert_gate.weight" for layer in range(2)
    }
    actual, expected = load_tensors(tmp_path / "q"), load_tensors(tmp_path / "m.gguf")
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        other = expected[key]
        if isinstance(other, Codes):
            assert isinstance(value, Codes)
            assert torch.equal(value.dequantize(), other.dequantize()), key
            if fmt != "int4_g32_zp":  # which Q5_0 holds as 8-bit codes
                assert (value.format, value.shape) == (other.format, other.shape)
        else:
            assert torch.equal(value.dequantize() if isinstance(value, Codes) else value, other.reshape(value.shape)), key
    model = load(tmp_path / "m.gguf")
    sparse = "block_sparse_moe" if name == "granitemoe" else "mlp"
    assert isinstance(model.get_submodule(f"model.layers.1.{sparse}.experts.gate_up_proj"), QuantExperts)
    back = convert_back(tmp_path)
    assert back.keys() == expected.keys()
    assert all(torch.equal(floats(back[key]), floats(value)) for key, value in expected.items())


def convert_back(folder: Path) -> dict[str, Any]:
    export(folder / "m.gguf", folder / "again", "halfbyte")
    return load_tensors(folder / "again")


def floats(value: Any) -> Tensor:
    found: Tensor = value.dequantize() if isinstance(value, Codes) else value
    return found


def requantized(source: Path, target: Path, kinds: dict[str, int]) -> dict[str, Tensor]:
    """Copies a file with the tensors of these names in other types, by the gguf package. What the package makes of each."""
    reader = package.GGUFReader(source)
    writer = package.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    expected = {}
    rng = np.random.default_rng(0)
    for tensor in reader.tensors:
        kind = package.GGMLQuantizationType(next((k for part, k in kinds.items() if part in tensor.name), tensor.tensor_type))
        values = np.array(tensor.data)
        if kind == tensor.tensor_type:
            raw = values
        elif kind.name in ("Q4_K", "Q6_K"):  # the package reads these, and does not write them
            block, size = package.GGML_QUANT_SIZES[kind]
            raw = rng.integers(0, 256, (values.size // block, size), dtype=np.uint8)
            for at in (0, 2) if kind.name == "Q4_K" else (208,):
                raw[:, at : at + 2] = np.float16(1e-4).reshape(1).view(np.uint8)
            raw = raw.reshape(*values.shape[:-1], -1)
        else:
            raw = package.quantize(values, kind)
        expected[tensor.name] = torch.from_numpy(np.array(package.dequantize(raw, kind)))
        writer.add_tensor(tensor.name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


KINDS = {
    "q8_0": ({"_exps": 8, "_shexp.": 8, "attn_q.": 2}, "q8_0"),
    "k": ({"gate_exps": 12, "up_exps": 12, "down_exps": 14}, "int4_g32_offset_f32"),
}


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "qwen3moe"])
def test_files_of_other_types(name: str, case: str, tmp_path: Path) -> None:
    """As quantizers leave them: every weight is what the gguf package makes of it, and runs as codes."""
    kinds, fmt = KINDS[case]
    changes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    make(name, **changes).save_pretrained(tmp_path / "float")
    export(tmp_path / "float", tmp_path / "m.gguf", "gguf")
    expected = requantized(tmp_path / "m.gguf", tmp_path / "k.gguf", kinds)
    report = describe(tmp_path / "k.gguf")
    rows = {row.name: row for row in report.quantized}
    actual = load_tensors(tmp_path / "k.gguf")
    for layer in range(2):
        at, file = f"model.layers.{layer}.mlp.experts", f"blk.{layer}.ffn"
        assert str(rows[f"{at}.gate_up_proj"].format) == fmt
        stacked = torch.cat([expected[f"{file}_gate_exps.weight"], expected[f"{file}_up_exps.weight"]], 1)
        assert torch.equal(floats(actual[f"{at}.gate_up_proj.weight"]), stacked)
        assert torch.equal(floats(actual[f"{at}.down_proj.weight"]), expected[f"{file}_down_exps.weight"])
    model = load(tmp_path / "k.gguf")
    assert isinstance(model.get_submodule("model.layers.0.mlp.experts.down_proj"), QuantExperts)
    assert bool(logits(model).isfinite().all())


def test_parts_of_several_types(tmp_path: Path) -> None:
    """Gate and up are one weight here: with different types there is no format for both."""
    float_file("qwen3moe", tmp_path)
    expected = requantized(tmp_path / "m.gguf", tmp_path / "k.gguf", {"blk.0.ffn_gate_exps": 8, "blk.0.ffn_up_exps": 2, "blk.1.ffn_": 8})
    report = describe(tmp_path / "k.gguf")
    assert any("model.layers.0.mlp.experts.gate_up_proj (q8_0, q4_0)" in note for note in report.notes)
    actual = load_tensors(tmp_path / "k.gguf")
    stacked = torch.cat([expected["blk.0.ffn_gate_exps.weight"], expected["blk.0.ffn_up_exps.weight"]], 1)
    assert torch.equal(actual["model.layers.0.mlp.experts.gate_up_proj"], stacked)
    assert isinstance(actual["model.layers.1.mlp.experts.gate_up_proj.weight"], Codes)
    assert bool(logits(load(tmp_path / "k.gguf")).isfinite().all())


def test_the_other_ways_in_which_experts_lie(tmp_path: Path) -> None:
    """One tensor for each expert, as before 2024, and gate and up in one, as in the newest files."""
    model = float_file("mixtral", tmp_path)
    source = gguf.read_header(tmp_path / "m.gguf")
    values = {name: gguf.read(entry) for name, entry in source.entries.items()}
    for way in ("one by one", "gate and up"):
        tensors: dict[str, Tensor] = {}
        for name, value in values.items():
            assert isinstance(value, Tensor)
            if "_exps" in name and way == "one by one":
                tensors |= {name.replace("_exps", f".{e}"): one for e, one in enumerate(value)}
            elif "gate_exps" in name:
                up = values[name.replace("gate", "up")]
                assert isinstance(up, Tensor)
                tensors[name.replace("gate_exps", "gate_up_exps")] = torch.cat([value, up], 1)
            elif "up_exps" not in name:
                tensors[name] = value
        path = tmp_path / f"{way}.gguf"
        kinds = {name: (gguf.plain_number(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
        writer = gguf.Writer(path, dict(source.metadata), kinds)
        for name, tensor in tensors.items():
            writer.write(name, tensor.contiguous())
        writer.finish()
        assert torch.equal(logits(load(path)), logits(model))


def test_what_llama_cpp_cannot_be_told(tmp_path: Path) -> None:
    cases = {
        "norm_topk_prob False": ("qwen3moe", {"norm_topk_prob": False}),
        "norm_topk_prob True": ("olmoe", {"norm_topk_prob": True}),
        "some of whose layers have no experts": ("qwen3moe", {"mlp_only_layers": [0]}),
        "clips": ("olmoe", {"clip_qkv": 8.0}),
        "tied": ("qwen2moe", {"tie_word_embeddings": True}),
    }
    for number, (message, (name, changes)) in enumerate(cases.items()):
        make(name, **changes).save_pretrained(tmp_path / str(number))
        with pytest.raises(CheckpointError, match=message):
            export(tmp_path / str(number), tmp_path / f"{number}.gguf", "gguf")
        assert not (tmp_path / f"{number}.gguf").exists()


def test_stacks_that_do_not_fit(tmp_path: Path) -> None:
    float_file("qwen3moe", tmp_path)
    source = gguf.read_header(tmp_path / "m.gguf")
    entries = {name: entry.shape for name, entry in source.entries.items()}
    gate = "blk.0.ffn_gate_exps.weight"
    for changed in ({gate: (7, 32, 64)}, {gate: (8, 32, 65)}, {gate: (8, 32)}, {"blk.1.ffn_up_exps.weight": None}, {gate: (8, 33, 64)}):
        shapes = {name: shape for name, shape in (entries | changed).items() if shape is not None}
        writer = gguf.Writer(tmp_path / "bad.gguf", dict(source.metadata), {name: (0, shape) for name, shape in shapes.items()})
        for name, shape in shapes.items():
            writer.write(name, torch.zeros(shape))
        writer.finish()
        with pytest.raises(CheckpointError):
            load(tmp_path / "bad.gguf")
    metadata = dict(source.metadata) | {"qwen3moe.expert_count": 0}
    gguf.Writer(tmp_path / "dense.gguf", metadata, {"token_embd.weight": (0, (101, 64))}).write("token_embd.weight", torch.zeros(101, 64))
    with pytest.raises(CheckpointError, match="a qwen3moe without experts"):
        load(tmp_path / "dense.gguf")


def test_damaged_headers(tmp_path: Path) -> None:
    """A model, or one clear error."""
    float_file("qwen2moe", tmp_path)
    content, random = (tmp_path / "m.gguf").read_bytes(), np.random.default_rng(0)
    header = min(entry.place.offset for entry in gguf.read_header(tmp_path / "m.gguf").entries.values())
    errors = []
    for _ in range(150):
        damaged = bytearray(content)
        for at in random.integers(0, header, 3):
            damaged[at] = random.integers(0, 256) if random.random() < 0.5 else damaged[at] ^ (1 << random.integers(0, 8))
        (tmp_path / "bad.gguf").write_bytes(damaged)
        try:
            describe(tmp_path / "bad.gguf")
        except CheckpointError as error:
            errors.append(str(error))
    assert len(errors) > 50
    assert not any("\n" in error for error in errors)


def test_a_folder_of_transformers_is_written_too(tmp_path: Path) -> None:
    """What `save_pretrained` wrote of a quantized model, whose stacks have names of their own."""
    model = hb.quantize_(make("qwen3moe"), hb.Config("q4_0", compute="float"))
    model.save_pretrained(tmp_path / "theirs")
    expected = logits(model)
    assert torch.equal(logits(load(tmp_path / "theirs")), expected)
    export(tmp_path / "theirs", tmp_path / "m.gguf", "gguf")
    rows = {row.name: row.format for row in describe(tmp_path / "m.gguf").quantized}
    assert rows["model.layers.0.mlp.experts.gate_up_proj"] == as_format("q4_0")
    assert ggml.TYPES[2].format == as_format("q4_0")


@needs_llama_cpp
@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    """The likeliest next tokens. llama.cpp rounds activations to 8 bits at each of some twenty products, errors of up to 2^-8 of a
    block's largest value that add up as a random walk: some hundredths of a logit here. A wrong router or order changes whole units."""
    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "vocab_size": len(tokenizer)}
    # One layer, so that only its own experts change a token's logits: which ones they are depends on the roundings where the last one
    # that is chosen and the first one that is not have close router logits, and there nothing is compared.
    sizes["num_hidden_layers"], top_k = 1, CONFIGS[name].num_experts_per_tok
    if layer_types := CONFIGS[name].to_dict().get("layer_types"):
        sizes["layer_types"] = layer_types[:1]
    if name == "gptoss":  # llama.cpp rounds the bounds of yarn's ramp
        sizes["rope_parameters"] = CONFIGS[name].rope_parameters | {"truncate": True}
    make(name, **sizes).save_pretrained(tmp_path / "float")
    tokenizer.save_pretrained(tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "q", hb.Config("q4_0", compute="float"))
    export(tmp_path / "q", tmp_path / "m.gguf", "gguf")
    reference, model = LlamaCpp(tmp_path / "m.gguf"), load(tmp_path / "q")
    ids = tokenizer("the quick brown fox jumps over the lazy dog, 27 hens slept under an old oak tree")["input_ids"]
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_router_logits=True)
    expected, routed = torch.log_softmax(output.logits[0], -1), output.router_logits[0].sort(descending=True).values
    is_clear = routed[:, top_k - 1] - routed[:, top_k] > 0.1
    compared = 0
    for count, next_tokens in reference.next_tokens(ids, 4, 10):
        if not is_clear[count - 1]:
            continue
        for token, found in next_tokens.items():
            assert abs(found - float(expected[count - 1, token])) < 0.15
            compared += 1
    assert compared >= 20
