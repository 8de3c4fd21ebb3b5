"""GGUF: every type of block against the gguf package, the container both ways, and whole models against transformers and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ggml_blocks import to_blocks
from llama_server import LlamaCpp, needs_llama_cpp
from samples import random_codes, same_codes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from halfbyte.checkpoint import convert, describe, export, load, load_tensors
from halfbyte.checkpoint.gguf.names import architecture_of_config
from halfbyte.checkpoint.gguf.rope import llama3_factors
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats import Codes, as_format, ggml
from halfbyte.integrations.transformers.gguf import load_gguf
from halfbyte.io import gguf
from halfbyte.kernels.cpu.quantize.extract import extract
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear

package = pytest.importorskip("gguf")

# Where the float16 numbers of a block are.
_NUMBERS = {"q4_1": (0, 2), "q5_1": (0, 2), "q2_K": (80, 82), "q3_K": (108,), "q4_K": (0, 2), "q5_K": (0, 2), "q6_K": (208,)}
_NUMBERS |= {"tq1_0": (52,), "tq2_0": (64,), "mxfp4": (), "nvfp4": (), "iq1_m": ()}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama3": LlamaConfig(**SMALL, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32}, tie_word_embeddings=True),
    "llama-bias": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "linear-rope": LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "mistral": MistralConfig(**SMALL, sliding_window=None, head_dim=32),
    "mistral-window": MistralConfig(**SMALL, sliding_window=4, head_dim=32),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True),
    "phi3": Phi3Config(**SMALL, pad_token_id=0, sliding_window=None),
    "gemma": GemmaConfig(**SMALL, head_dim=16),
    "gemma2": Gemma2Config(**SMALL, head_dim=32, query_pre_attn_scalar=32, sliding_window=16),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=32, query_pre_attn_scalar=32, sliding_window=16),
}


def random_blocks(kind: ggml.BlockType, rows: int, blocks: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Any bytes, with finite scales."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (rows * blocks, kind.nbytes), dtype=np.uint8)
    for at in _NUMBERS.get(kind.name, (0,)):
        raw[:, at : at + 2] = rng.normal(size=(len(raw), 1)).astype(np.float16).view(np.uint8)
    if kind.name == "mxfp4":
        raw[:, 0] %= 252  # 2^123 times 12 is finite
    if kind.name == "nvfp4":
        raw[:, :4] &= 127  # scales have no sign
    if kind.name == "iq1_m":
        raw[:, 55] &= 0xBF  # the exponent of d, whose four pieces lie in bytes 49 to 55
    return raw.reshape(rows, -1)


# Blocks


@pytest.mark.parametrize("number", ggml.TYPES)
def test_blocks_are_what_the_gguf_package_makes_of_them(number: int) -> None:
    kind, expected = ggml.TYPES[number], package.GGMLQuantizationType(number)
    assert package.GGML_QUANT_SIZES[expected] == (kind.weights, kind.nbytes)
    assert expected.name.lower() == kind.name.lower()
    raw = random_blocks(kind, 5, 3)
    codes = ggml.decode(kind, (5, 3 * kind.weights), torch.from_numpy(raw))
    codes.check_values()
    assert codes.format == kind.format
    # Each product is exact in float32, so that there is one rounding at most, the same on both sides.
    assert np.array_equal(codes.dequantize().numpy(), package.dequantize(raw, expected))
    if kind.fields:
        blocks = torch.from_numpy(raw).reshape(-1, kind.nbytes)
        for part in (blocks, blocks[1:4], blocks[:0], blocks.repeat(4000, 1)):  # the last in several threads
            assert torch.equal(extract(kind, part), ggml.extract(kind, part))


def test_the_scales_of_k_quants_are_exact_products() -> None:
    """Every product of a float16 and a 6-bit integer, the largest and the least included."""
    for d in (65504.0, 6e-8, -1.0009765625, 1 / 3):
        half = torch.tensor(d).half()
        for s in range(64):
            assert float(half.float() * s) == float(half) * s
    # As float16, too, they are rounded once by 2^-11 at most, small ones not at all: all are multiples of 2^-24.
    products = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).double()[:, None] * torch.arange(64)
    products = products[products < 65520]
    assert bool(((products.half().double() - products).abs() <= products * 2**-11).all())


def test_rows_that_are_no_blocks() -> None:
    for number, k in ((2, 33), (12, 128), (6, 16)):
        with pytest.raises(FormatError, match="multiple"):
            ggml.TYPES[number].row_bytes(k)
    with pytest.raises(FormatError, match="is uint8"):
        ggml.decode(ggml.TYPES[12], (2, 256), torch.zeros(2, 143, dtype=torch.uint8))


# The container


def test_what_is_written_the_package_reads(tmp_path: Path) -> None:
    codes, norm = random_codes(as_format("q4_1"), (6, 64)), torch.randn(7)
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "n": 3,
        "negative": -1,
        "large": 1 << 40,
        "x": 0.5,
        "yes": True,
        "no": False,
        "names": ["a", "", "bé\n"],
        "types": [1, 3, 6],
        "scores": [0.0, -1.5],
        "flags": [True, False],
        "none": [],
    }
    tensors = {"w": (3, (6, 64)), "norm": (0, (7,)), "half": (30, (2, 3)), "scalar": (0, ())}
    writer = gguf.Writer(tmp_path / "a.gguf", metadata, tensors)
    writer.write("half", torch.ones(2, 3, dtype=torch.bfloat16))
    writer.write("w", to_blocks(codes))
    writer.write("norm", norm)
    writer.write("scalar", torch.tensor(2.0))
    writer.finish()
    expected = package.GGUFReader(tmp_path / "a.gguf")
    read = {name: field.contents() for name, field in expected.fields.items() if not name.startswith("GGUF.")}
    assert {name: value for name, value in read.items() if name != "none"} == {n: v for n, v in metadata.items() if n != "none"}
    found = {tensor.name: tensor for tensor in expected.tensors}
    assert np.array_equal(package.dequantize(found["w"].data, found["w"].tensor_type), codes.dequantize().numpy())
    assert np.array_equal(found["norm"].data, norm.numpy())
    assert [int(size) for size in found["half"].shape] == [3, 2]
    actual = gguf.read_header(tmp_path / "a.gguf")
    assert {n: list(v) if isinstance(metadata[n], list) else v for n, v in actual.metadata.items()} == metadata  # type: ignore[arg-type]
    back = gguf.read(actual.entries["w"])
    assert isinstance(back, Codes)
    assert all(torch.equal(back.tensors()[name], tensor) for name, tensor in codes.tensors().items())
    assert torch.equal(gguf.read(actual.entries["half"]), torch.ones(2, 3, dtype=torch.bfloat16))  # type: ignore[arg-type]


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    writer = package.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int64("i64", -(1 << 40))
    writer.add_float64("f64", 1e-300)
    writer.add_array("tokens", ["<s>", "é"])
    writer.add_array("ints", [1, 2, 3])
    weights = {
        kind: np.random.default_rng(0).normal(size=(5, 256)).astype(np.float32)
        for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")
    }
    for name, weight in weights.items():
        kind = package.GGMLQuantizationType[name]
        data = package.quantize(weight, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf.read_header(tmp_path / "a.gguf")
    assert (file.metadata["u8"], file.metadata["i64"], file.metadata["f64"]) == (200, -(1 << 40), 1e-300)
    assert list(file.metadata["tokens"]) == ["<s>", "é"]  # type: ignore[arg-type]
    assert list(file.metadata["ints"]) == [1, 2, 3]  # type: ignore[arg-type]
    for name, weight in weights.items():
        kind = package.GGMLQuantizationType[name]
        value = gguf.read(file.entries[name])
        expected = package.dequantize(package.quantize(weight, kind), kind)
        got = value.dequantize() if isinstance(value, Codes) else value.float()
        assert isinstance(value, Codes) == (name[0] == "Q")
        assert np.array_equal(got.numpy(), expected), name


def test_tensors_longer_than_a_chunk(tmp_path: Path) -> None:
    codes = random_codes(as_format("q8_0"), (3, 2 << 20))
    writer = gguf.Writer(tmp_path / "a.gguf", {}, {"w": (8, codes.shape)})
    writer.write("w", to_blocks(codes))
    writer.finish()
    back = gguf.read(gguf.read_header(tmp_path / "a.gguf").entries["w"])
    assert isinstance(back, Codes)
    assert torch.equal(back.data, codes.data)
    assert torch.equal(back.scale, codes.scale)


@pytest.mark.parametrize("kernel", [ggml.extract, extract], ids=["torch", "kernel"])
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_1", "q8_0", "q4_K", "tq1_0", "mxfp4"])
def test_tensors_in_chunks(name: str, kernel: ggml.Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types with fields, whose codes are extracted into their place, and others; the last chunk is a shorter one."""
    number = ggml.NUMBERS[name]
    shape = (5, 256)
    torch.manual_seed(0)
    blocks = torch.randint(60, (5, ggml.TYPES[number].row_bytes(256)), dtype=torch.uint8)  # of which no float16 is infinite
    writer = gguf.Writer(tmp_path / "a.gguf", {}, {"w": (number, shape)})
    writer.write("w", blocks)
    writer.finish()
    entry = gguf.read_header(tmp_path / "a.gguf").entries["w"]
    monkeypatch.setattr(gguf, "_CHUNK_WEIGHTS", 512)
    back = gguf.read(entry, kernel)
    assert isinstance(back, Codes)
    assert same_codes(back, ggml.decode(ggml.TYPES[number], shape, blocks))


def parts_of(source: Path, folder: Path, count: int, **changes: Any) -> Path:
    """A file in parts, as llama-gguf-split leaves it: the first has the metadata. The path of the first."""
    file = gguf.read_header(source)
    names = list(file.entries)
    paths = [folder / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        actual = [name for j, name in enumerate(names) if j * count // len(names) == i]
        counts = {"split.no": i, "split.count": count, "split.tensors.count": len(names)} | changes
        metadata = {**(file.metadata if i == 0 else {}), **counts}
        writer = gguf.Writer(path, metadata, {name: (file.entries[name].kind, file.entries[name].shape) for name in actual})
        for name in actual:
            value = gguf.read(file.entries[name])
            writer.write(name, to_blocks(value) if isinstance(value, Codes) else value)
        writer.finish()
    return paths[0]


def test_a_file_in_parts(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "q", "q4_0")
    export(tmp_path / "q", tmp_path / "m.gguf", "gguf")
    first = parts_of(tmp_path / "m.gguf", tmp_path, 3)
    expected = logits(load(tmp_path / "m.gguf"))
    for part in (first, first.with_name("m-00003-of-00003.gguf")):
        assert torch.equal(logits(load_gguf(part)[0]), expected)
    second = first.with_name("m-00002-of-00003.gguf")
    sound = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="is not the part that its name says"):
        load(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"is a folder, load_gguf opens a \.gguf file: name the file, or open the folder by load"):
        load_gguf(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no .*nowhere\.gguf: name a \.gguf file"):
        load_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(CheckpointError, match=r"cannot read .*m-00002-of-00003\.gguf"):
        load(first)
    second.write_bytes(sound[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load(first)
    for changes, message in (
        ({"split.tensors.count": 99}, "not 99: one of them is damaged"),
        ({"split.count": 1 << 30}, "says that it is one of 1073741824 files"),
        ({"split.count": "x"}, "says that it is one of 'x' files"),
        ({"split.count": 2}, "which are called"),
    ):
        parts_of(tmp_path / "m.gguf", tmp_path, 3, **changes)
        with pytest.raises(CheckpointError, match=message):
            load(first)


def test_a_float_file_is_quantized(tmp_path: Path) -> None:
    """As its folder would be."""
    make("llama").save_pretrained(tmp_path / "float")
    export(tmp_path / "float", tmp_path / "m.gguf", "gguf")
    convert(tmp_path / "m.gguf", tmp_path / "q", "q4_0")
    convert(tmp_path / "float", tmp_path / "wanted", "q4_0")
    assert torch.equal(logits(load(tmp_path / "q")), logits(load(tmp_path / "wanted")))
    assert torch.equal(logits(load(tmp_path / "m.gguf", format="q4_0")), logits(load(tmp_path / "wanted")))
    export(tmp_path / "q", tmp_path / "q.gguf", "gguf")
    with pytest.raises(CheckpointError, match=r"quantized already \(as GGUF q"):
        convert(tmp_path / "q.gguf", tmp_path / "again", "q8_0")


@pytest.mark.parametrize("kind", ["nvfp4", "q8_0", "f32"])
def test_tensors_with_a_factor_beside_them(kind: str, tmp_path: Path) -> None:
    """nvfp4 has a number for each matrix in a tensor of its own, <name>.scale."""
    make("qwen3").save_pretrained(tmp_path / "float")
    export(tmp_path / "float", tmp_path / "m.gguf", "gguf")
    file, number = gguf.read_header(tmp_path / "m.gguf"), {**ggml.NUMBERS, "f32": 0}[kind]
    up = "blk.0.ffn_up.weight"
    metadata = {key: value for key, value in file.metadata.items() if not key.startswith("tokenizer")}
    types = {name: (number if name == up else entry.kind, entry.shape) for name, entry in file.entries.items()}
    writer = gguf.Writer(tmp_path / "s.gguf", metadata, {**types, "blk.0.ffn_up.scale": (0, (1,))})
    shape = file.entries[up].shape
    raw = (
        torch.from_numpy(random_blocks(ggml.TYPES[number], shape[0], shape[1] // ggml.TYPES[number].weights))
        if number
        else torch.randn(shape)
    )
    for name, entry in file.entries.items():
        writer.write(name, raw if name == up else gguf.read(entry))  # type: ignore[arg-type]
    writer.write("blk.0.ffn_up.scale", torch.tensor([0.37]))
    writer.finish()
    plain = torch.from_numpy(package.dequantize(raw.numpy(), package.GGMLQuantizationType(number)))
    value = load_tensors(tmp_path / "s.gguf")["model.layers.0.mlp.up_proj.weight"]
    got = value.dequantize(torch.float64) if isinstance(value, Codes) else value.double()
    assert torch.allclose(got, plain.double() * float(torch.tensor(0.37)), rtol=2**-22, atol=0)
    assert isinstance(value, Codes) == (kind != "f32")
    assert not any("scale" in note for note in describe(tmp_path / "s.gguf").notes)


# Models


def make(name: str | Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[name] if isinstance(name, str) else name
    config.vocab_size, config.max_position_embeddings = 300, 64
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # norms of ones and biases of zeros would hide mistakes
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model((torch.arange(48)[None] * 7) % 300).logits.float()
    return found


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    built.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8").split("\n")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(text, trainers.BpeTrainer(vocab_size=296, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token="</s>", chat_template="{{ messages }}")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_float_model_comes_back(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Weights and every setting that the logits depend on."""
    model = make(name)
    model.save_pretrained(tmp_path / "float")
    tokenizer.save_pretrained(tmp_path / "float")
    export(tmp_path / "float", tmp_path / "m.gguf", "gguf")
    back, its_tokenizer = load_gguf(tmp_path / "m.gguf")
    architecture = architecture_of_config(model.config.to_dict())
    # Without a window a Mistral is a Llama, and files call both so.
    assert type(back).__name__ == ("LlamaForCausalLM" if name == "mistral" else architecture.model)
    # Norms of gemma are stored plus one, in float32: one rounding of 2^-24 relative to one, in a few of a row's terms.
    tolerance = 1e-4 if architecture.family.unit_offset else 0.0 if model.config.model_type == "llama" and "3" not in name else 1e-5
    assert torch.allclose(logits(back), logits(model), rtol=0, atol=tolerance)
    text = "The weights of a model, in 4 bits: naïve?"
    assert its_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (its_tokenizer.bos_token, its_tokenizer.eos_token) == ("<s>", "</s>")
    assert its_tokenizer.chat_template == "{{ messages }}"
    names = {field for field in package.GGUFReader(tmp_path / "m.gguf").fields if not field.startswith("GGUF.")}
    assert names >= {"general.architecture", "tokenizer.ggml.tokens", "general.file_type"}


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_a_quantized_model_comes_back_code_for_code(name: str, tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "q", "q4_0")
    export(tmp_path / "q", tmp_path / "m.gguf", "gguf")
    actual, reference = load_tensors(tmp_path / "q"), load_tensors(tmp_path / "m.gguf")
    assert actual.keys() == reference.keys()
    for key, value in actual.items():
        other = reference[key]
        if isinstance(value, Codes):
            assert isinstance(other, Codes), key
            assert value.format == other.format
            assert all(torch.equal(other.tensors()[part], tensor) for part, tensor in value.tensors().items()), key
        else:
            assert torch.equal(value, other), key  # type: ignore[arg-type]
    model, expected = load(tmp_path / "m.gguf"), load(tmp_path / "q")
    assert torch.equal(logits(model), logits(expected))
    kinds = {type(module) for module in model.modules()}
    assert {QuantLinear, QuantEmbedding} <= kinds
    notes = describe(tmp_path / "m.gguf")
    assert {row.format for row in notes.quantized} == {as_format("q4_0"), as_format("q8_0")}


def test_transformers_reads_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    make("llama").save_pretrained(tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "q", "q8_0")
    export(tmp_path / "q", tmp_path / "m.gguf", "gguf")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    actual = load_tensors(tmp_path / "m.gguf")
    for name, parameter in expected.named_parameters():
        value = actual[name]
        assert torch.equal(parameter, value.dequantize() if isinstance(value, Codes) else value), name


def write_k_quants(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Writes folder/k.gguf, with layers of several types as llama.cpp's quantizer leaves them. Its model before, its weights in float."""
    model = make(LlamaConfig(**SMALL | {"hidden_size": 256, "intermediate_size": 512}))
    model.save_pretrained(folder / "float")
    export(folder / "float", folder / "m.gguf", "gguf")
    source = gguf.read_header(folder / "m.gguf")
    kinds = {"attn_q": 12, "attn_k": 10, "attn_v": 14, "attn_output": 13, "ffn_gate": 11, "ffn_up": 20, "ffn_down": 23}
    types = {
        name: (next((k for part, k in kinds.items() if f".{part}.weight" in name), entry.kind), entry.shape)
        for name, entry in source.entries.items()
    }
    metadata = {key: value for key, value in source.metadata.items() if not key.startswith("tokenizer")}
    writer = gguf.Writer(folder / "k.gguf", metadata, types)
    float_state: dict[str, Tensor] = {}
    for name, (number, shape) in types.items():
        value = gguf.read(source.entries[name])
        assert isinstance(value, Tensor)
        if number in ggml.TYPES:
            raw = random_blocks(ggml.TYPES[number], shape[0], shape[1] // ggml.TYPES[number].weights)
            for at in _NUMBERS.get(ggml.TYPES[number].name, (0,)):  # small numbers, so that the model stays in range
                halves = raw.reshape(-1, ggml.TYPES[number].nbytes)
                halves[:, at : at + 2] = np.float16(1e-4).reshape(1).view(np.uint8)
            value = torch.from_numpy(raw)
            float_state[name] = torch.from_numpy(package.dequantize(raw, package.GGMLQuantizationType(number)))
        else:
            float_state[name] = value
        writer.write(name, value)
    writer.finish()
    return model, float_state


def test_k_quants_in_a_model(tmp_path: Path) -> None:
    model, float_state = write_k_quants(tmp_path)
    loaded, _ = load_gguf(tmp_path / "k.gguf")
    state, heads = {}, {"attn_q": 4, "attn_k": 2}
    for name, weight in float_state.items():
        if (count := next((c for part, c in heads.items() if f".{part}." in name), 0)) > 0:
            weight = weight.reshape(count, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)  # as llama.cpp's converter back
        state[architecture_of_config({"model_type": "llama"}).to_transformers(name)] = weight
    model.load_state_dict(state)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            actual = loaded.get_submodule(name)
            expected = module.weight
            assert torch.equal(actual.weight + 0, expected), name  # type: ignore[operator]
    halves, _ = load_gguf(tmp_path / "k.gguf", half_scales=True)
    for name, module in loaded.named_modules():
        if isinstance(module, QuantLinear | QuantEmbedding):
            actual, exact = halves.get_submodule(name).codes(), module.codes()  # type: ignore[operator]
            assert torch.equal(actual.data, exact.data)
            assert actual.format.scale == actual.scale.dtype == torch.float16
            assert torch.equal(actual.scale, exact.scale.half())
            assert exact.zero is None or torch.equal(actual.zero, exact.zero.half())
    formats = {str(row.format) for row in describe(tmp_path / "k.gguf").quantized}
    assert {"int4_g32_offset_f32", "int6_g16_f32", "int4_g16_offset_f32"} <= formats


def test_llama3_scaling_is_what_transformers_computes() -> None:
    model = make("llama3")
    inverse = model.model.rotary_emb.inv_freq.double()
    plain = 5e5 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    factors = llama3_factors(CONFIGS["llama3"].rope_parameters, 5e5, 16)
    assert torch.allclose(plain / factors, inverse, rtol=1e-5)


def test_sentencepiece_bpe(tmp_path: Path) -> None:
    built = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    built.train_from_iterator(["the weights of the model"] * 9, trainers.BpeTrainer(vocab_size=299, special_tokens=specials))
    actual = PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    model = make("llama")
    model.save_pretrained(tmp_path / "float")
    actual.save_pretrained(tmp_path / "float")
    export(tmp_path / "float", tmp_path / "m.gguf", "gguf")
    metadata = gguf.read_header(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert len(metadata["tokenizer.ggml.scores"]) == 300  # type: ignore[arg-type]
    expected = load_gguf(tmp_path / "m.gguf")[1]
    text = "the weights of the model"
    assert expected(text, add_special_tokens=False)["input_ids"] == actual(text, add_special_tokens=False)["input_ids"]


def test_files_of_other_kinds(tmp_path: Path) -> None:
    def write(metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...]]] | None = None) -> Path:
        path = tmp_path / "a.gguf"
        path.unlink(missing_ok=True)
        writer = gguf.Writer(path, metadata, tensors or {})
        for name, (number, shape) in (tensors or {}).items():
            assert number == 0
            writer.write(name, torch.zeros(shape))
        writer.finish()
        return path

    with pytest.raises(CheckpointError, match=r"architecture 'bert', halfbyte reads apertus, .*llama.*: use its safetensors"):
        load(write({"general.architecture": "bert"}))
    with pytest.raises(CheckpointError, match="with experts"):
        load(write({"general.architecture": "gemma", "gemma.expert_count": 8}))
    with pytest.raises(CheckpointError, match=r"has no llama\.context_length"):
        load(write({"general.architecture": "llama"}))
    with pytest.raises(CheckpointError, match=r"one of 3 files, which are called <name>-00001-of-00003\.gguf"):
        load(write({"general.architecture": "llama", "split.count": 3}))
    sizes = {"context_length": 8, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64, "attention.head_count": 4}
    whole = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in sizes.items()}}
    with pytest.raises(CheckpointError, match=r"says .x. for llama\.attention\.layer_norm_rms_epsilon"):
        load(write(whole | {"llama.attention.layer_norm_rms_epsilon": "x"}))
    with pytest.raises(CheckpointError, match="which LlamaForCausalLM needs"):
        load(write(whole | {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": 10}))


# llama.cpp


@needs_llama_cpp
@pytest.mark.parametrize(("name", "format"), [("llama", "q4_0"), ("qwen3", "q8_0"), ("llama3", "q4_1")])
def test_llama_cpp_reads_what_is_written(name: str, format: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    make(name).save_pretrained(tmp_path / "float")
    tokenizer.save_pretrained(tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "q", format)
    export(tmp_path / "q", tmp_path / "m.gguf", "gguf")
    expected, text = LlamaCpp(tmp_path / "m.gguf"), "The weights of a model"
    ids = tokenizer(text)["input_ids"]
    assert expected.next_token(text, 5) == expected.next_token(ids, 5), "the same tokens"
    with torch.no_grad():
        wanted = torch.log_softmax(load(tmp_path / "m.gguf")(torch.tensor([ids])).logits[0].double(), -1)
    errors = [
        abs(found - float(wanted[count - 1, token]))
        for count, next_tokens in expected.next_tokens(ids, 2, len(tokenizer))
        for token, found in next_tokens.items()
    ]
    # Both quantize activations to 8 bits per block: an error of about 1/254 of a block's largest, here in two layers of random weights.
    assert len(errors) > 2 * len(tokenizer)
    assert max(errors) < 0.15
    assert sum(errors) / len(errors) < 0.02
