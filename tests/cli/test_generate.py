"""Text from quantized models: the same however it is asked for, from every kind of folder, and on the command line."""

from __future__ import annotations

import gc
import io
import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from language_model import TEXT, make_language_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, TextIteratorStreamer
from transformers.generation.configuration_utils import CompileConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import halfbyte
from halfbyte.checkpoint.export_checkpoint import export
from halfbyte.cli import main
from halfbyte.cli.shared.device import settle_device
from halfbyte.cli.shared.output import settling
from halfbyte.errors import ArgumentError, CheckpointError
from halfbyte.integrations.transformers.attention import _written_out, attention
from halfbyte.integrations.transformers.text import generate, open_model, weight_bytes
from halfbyte.machine import GPUS
from halfbyte.memory import peak_memory
from halfbyte.nn.config import Config
from halfbyte.nn.modules.quantized import QuantModule

PROMPT = "the quick brown fox"
QUERIES, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "float")


@pytest.fixture(scope="module")
def opened(folder: Path) -> tuple[Any, Any]:
    return open_model(folder, config=Config("q4_0"))


def answer(model: Any, tokenizer: Any, text: str = PROMPT, **settings: Any) -> Any:
    return generate(model, tokenizer, tokenizer(text, return_tensors="pt"), lambda _: None, **{**GREEDY, **settings})


# Generating


def test_what_is_told_is_true(opened: tuple[Any, Any]) -> None:
    model, tokenizer = opened
    pieces: list[str] = []
    prompt = tokenizer(PROMPT, return_tensors="pt")
    done = generate(model, tokenizer, prompt, pieces.append, **GREEDY)
    expected = model.generate(**prompt, **GREEDY)[0]
    assert torch.equal(done.tokens, expected)
    count = prompt["input_ids"].shape[1]
    assert (done.prompt_tokens, done.new_tokens) == (count, len(expected) - count)
    assert done.text == tokenizer.decode(expected[count:], skip_special_tokens=True)
    assert "".join(pieces) == done.text
    assert len(pieces) > 2, "it comes as it is written"
    assert done.prompt_rate == pytest.approx(count / done.prompt_seconds)
    assert done.decode_rate == pytest.approx((done.new_tokens - 1) / done.decode_seconds)


def test_one_token_has_no_rate(opened: tuple[Any, Any]) -> None:
    done = answer(*opened, max_new_tokens=1)
    assert (done.new_tokens, done.decode_rate) == (1, 0.0)


def test_a_static_cache_compiles_without_graph_breaks(opened: tuple[Any, Any]) -> None:
    model, tokenizer = opened
    expected = answer(model, tokenizer).tokens
    torch._dynamo.reset()
    counters.clear()
    settings = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    settings._compile_all_devices = True  # type: ignore[assignment]
    prompt = tokenizer(PROMPT, return_tensors="pt")
    found = model.generate(**prompt, **GREEDY, cache_implementation="static", compile_config=settings)
    assert torch.equal(found[0], expected)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_torchs(masked: bool, t: int) -> None:
    query, key, value = torch.randn(2, 6, t, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    mask = torch.rand(2, 1, t, 9) > 0.4 if masked else None
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.2)  # type: ignore[arg-type]
    found, _ = attention(module, query, key, value, mask, scaling=0.2)  # type: ignore[arg-type]
    assert found.shape == (2, t, 6, 16)
    # Weighted means of at most 9 numbers of about 1, in float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    if t == 1:
        found = _written_out(query.reshape(2, 2, 3, 16), key, value, mask, scale=0.2)
        torch.testing.assert_close(found.reshape(2, 1, 6, 16), expected, rtol=0, atol=1e-5)


def test_a_batch_with_padding_on_the_left(opened: tuple[Any, Any]) -> None:
    model, tokenizer = opened
    texts = [PROMPT, "an old oak tree sleeps under the lazy dog", "hen"]
    tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    assert not batch["attention_mask"].all()
    found = model.generate(**batch, **GREEDY, eos_token_id=None)[:, batch["input_ids"].shape[1] :]
    for row, text in zip(found, texts, strict=True):
        done = answer(model, tokenizer, text, eos_token_id=None)
        # Sums over padding are of zeros, but in another order: greedy choices agree unless two tokens are all but tied.
        assert torch.equal(row, done.tokens[-done.new_tokens :])


def test_transformers_own_streamer(opened: tuple[Any, Any]) -> None:
    model, tokenizer = opened
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    model.generate(**tokenizer(PROMPT, return_tensors="pt"), **GREEDY, streamer=streamer)
    assert "".join(streamer) == answer(model, tokenizer).text


def test_a_cache_is_continued(opened: tuple[Any, Any]) -> None:
    from transformers import DynamicCache

    model, tokenizer = opened
    cache = DynamicCache(config=model.config)
    first = answer(model, tokenizer, cache=cache, eos_token_id=None)
    longer = {"input_ids": torch.cat((first.tokens, torch.tensor([5, 6])))[None]}
    done = generate(model, tokenizer, longer, lambda _: None, cache=cache, **GREEDY)
    assert done.prompt_tokens == 3, "the last token that was written and the two that are new"
    assert torch.equal(done.tokens, generate(model, tokenizer, longer, lambda _: None, **GREEDY).tokens)


def test_tokens_of_another_model(opened: tuple[Any, Any]) -> None:
    with pytest.raises(ArgumentError, match="token 4000"):
        generate(*opened, {"input_ids": torch.tensor([[1, 4000]])}, print, **GREEDY)


# Every kind of folder


def test_every_kind_of_folder_says_the_same(folder: Path, opened: tuple[Any, Any], tmp_path: Path) -> None:
    expected = answer(*opened).tokens
    halfbyte.convert(folder, tmp_path / "converted", "q4_0")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=halfbyte.HalfbyteConfig("q4_0"))
    model.save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    export(tmp_path / "converted", tmp_path / "model.gguf", "gguf")
    for path in (tmp_path / "converted", tmp_path / "saved", tmp_path / "model.gguf"):
        model, tokenizer = open_model(path)
        assert sum(isinstance(m, QuantModule) for m in model.modules()) == 16
        assert torch.equal(answer(model, tokenizer).tokens, expected)
        with pytest.raises(CheckpointError, match="quantized already"):
            open_model(path, config=Config("q8_0"))


def test_bfloat16_on_disk_computes_in_float32(folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    halfbyte.convert(tmp_path, tmp_path / "q", "q8_0")
    for path, config in ((tmp_path, None), (tmp_path, Config("q8_0")), (tmp_path / "q", None)):
        model, _ = open_model(path, config=config)
        assert model(torch.tensor([[1, 2]])).logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dtype_of_choice(dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    """All kinds of files compute in it, and the same; positions are not rounded to it."""
    config = Config("q4_0", skip=["*.layers.0.*"])
    halfbyte.convert(folder, tmp_path / "q", config)
    export(tmp_path / "q", tmp_path / "model.gguf", "gguf")
    frequencies = open_model(folder)[0].model.rotary_emb.inv_freq
    models = [open_model(path, dtype=dtype)[0] for path in (tmp_path / "q", tmp_path / "model.gguf")]
    models.append(open_model(folder, config=config, dtype=dtype)[0])
    logits = [model(torch.tensor([[1, 2, 3]])).logits for model in models]
    assert [found.dtype for found in logits] == [dtype] * 3
    assert torch.equal(logits[0], logits[1])
    assert all(torch.equal(model.model.rotary_emb.inv_freq, frequencies) for model in models)


def test_what_is_no_language_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a language model"):
        open_model(tmp_path)
    with pytest.raises(CheckpointError, match="there is no"):
        open_model(tmp_path / "nowhere")
    BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=9)).save_pretrained(
        tmp_path / "bert"
    )
    with pytest.raises(CheckpointError, match="has no cls"):
        open_model(tmp_path / "bert")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "mute")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        open_model(tmp_path / "mute")
    weights = tmp_path / "mute" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"model.safetensors has \d+ bytes, its header describes \d+: the file is damaged"):
        open_model(tmp_path / "mute")
    weights.rename(tmp_path / "mute" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has pytorch_model\.bin only, a pickle, which is never opened"):
        open_model(tmp_path / "mute")


def test_sizes(opened: tuple[Any, Any], folder: Path) -> None:
    model, _ = opened
    packed = {m.packed.data.data_ptr(): m.packed.nbytes for m in model.modules() if isinstance(m, QuantModule)}
    norms = sum(p.nbytes for p in model.parameters())
    assert weight_bytes(model) == sum(packed.values()) + norms
    assert weight_bytes(open_model(folder)[0]) == (folder / "model.safetensors").stat().st_size - _header(folder / "model.safetensors")
    peak = peak_memory()
    assert peak is None or peak > 10_000_000


def _header(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


# The command line

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """On the CPU, also where there is a GPU."""
    monkeypatch.setattr("halfbyte.cli.shared.device._default", lambda: ("cpu", ""))

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def test_generate(run: Run, folder: Path, opened: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(*opened).text
    asked = ("generate", folder, "--format", "q4_0", "--prompt", PROMPT, "--max-new-tokens", 12)
    code, out, err = run(*asked)
    assert (code, out) == (0, f"{PROMPT}{expected}\n")
    assert all(word in err for word in ("prompt", "new", "weights", "peak memory"))
    assert run(*asked, "--quiet") == (0, f"{PROMPT}{expected}\n", "")
    found = json.loads(run(*asked, "--json")[1])
    assert (found["text"], found["new_tokens"]) == (expected, 12)
    assert found["weight_bytes"] == weight_bytes(opened[0])
    assert json.loads(run(*asked, "--json", "--cache", "int8")[1])["new_tokens"] == 12
    drawn = [json.loads(run(*asked, "--json", "--temperature", 5, "--seed", seed)[1])["text"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert json.loads(run(*asked, "--json", "--temperature", 5, "--top-k", 1)[1])["text"] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n"))
    assert run(*asked, "--quiet", "--prompt", "-") == (0, f"{PROMPT}{expected}\n", "")


def test_garbage_is_collected_again_after_an_error() -> None:
    @settling()
    def fails() -> None:
        assert not gc.isenabled()
        raise ArgumentError

    with pytest.raises(ArgumentError):
        fails()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    gc.unfreeze()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-new-tokens", 0), "--max-new-tokens"),
        (("--max-new-tokens", 1_000_000), "max_new_tokens is at most"),
        (("--temperature", -1), "--temperature"),
        (("--temperature", "1e-320"), "0 for greedy decoding, or 1e-05 to 100000"),
        (("--temperature", "1e300"), "--temperature"),
        (("--temperature", "nan"), "--temperature"),
        (("--repetition-penalty", "1e-320"), "--repetition-penalty is 1e-05"),
        (("--temperature", 1, "--top-p", 1.5), "--top-p is"),
        (("--temperature", 1, "--seed", 1 << 70), "--seed has 64 bits, got 1180591620717411303424: use a smaller"),
        (("--cache", "int8", "--compile"), "--cache int8 is another one"),
        (("--top-k", 0), "--top-k is"),
        (("--top-k", 9), "add --temperature"),
        (("--repetition-penalty", -1), "--repetition-penalty"),
        (("--device", "abacus"), "--device is cpu"),
        (("--format", "q9"), "q9"),
    ],
)
def test_generate_refuses(arguments: tuple[object, ...], said: str, run: Run, folder: Path) -> None:
    code, out, err = run("generate", folder, "--prompt", "a", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.splitlines()[-1].startswith("halfbyte: error")


@pytest.mark.parametrize(
    ("arch", "processes", "problem", "device", "said"),
    [
        (None, 1, None, "cpu", ""),
        ("sm_90", 1, None, "cuda", "device: cuda, an abacus\n"),
        ("sm_90", 2, None, "cpu", "torch sees 1 GPU for 2 processes"),
        ("sm_90", 1, "there is no Triton", "cpu", "there is no Triton"),
        ("gfx942", 1, None, "cpu", "--device cuda"),
    ],
)
def test_the_default_device_is_a_gpu_that_the_kernels_are_for(
    arch: str | None,
    processes: int,
    problem: str | None,
    device: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: arch is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "an abacus")
    monkeypatch.setattr("halfbyte.machine.gpu", lambda *_: GPUS[str(arch)])
    monkeypatch.setattr("halfbyte.dispatch.gpu.why_no_triton", lambda: problem)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    for quiet in (False, True):
        asked = Namespace(device=None, quiet=quiet)
        settle_device(asked)
        assert asked.device == device
        found = capsys.readouterr().err
        assert found == "" if quiet or not said else said in found
    for name in ("cpu", "cpu:0"):
        asked = Namespace(device=name, quiet=True)
        settle_device(asked)
        assert asked.device == "cpu"


@pytest.mark.parametrize("asked", [[], ["--format", "q4_0"]], ids=["float", "quantized"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.update({QUERIES: t[QUERIES][:, :48].clone()}),
            f"{QUERIES} is .*[64, 48] in the files, but config.json makes it [64, 64]",
        ),
        (lambda t: t.update({EMBEDDING: t[EMBEDDING][:50].clone()}), f"{EMBEDDING} is .*[50, 64] in the files, but config.json makes it"),
        (lambda t: t.update({QUERIES: t[QUERIES].to(torch.int8)}), f"{QUERIES} of .* is torch.int8, .*: take the float model"),
    ],
    ids=["a matrix", "the embedding", "integers"],
)
def test_weights_that_are_not_those_of_the_architecture(
    change: Callable[[dict[str, Tensor]], object], said: str, asked: list[str], run: Run, folder: Path, tmp_path: Path
) -> None:
    """Neither a kernel's error, nor an embedding of another size, nor codes that are taken for weights."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    change(tensors)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    code, out, err = run("generate", other, "--prompt", "the", *asked)
    assert (code, out) == (2, "")
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), err.splitlines()[-1]), err


def test_a_config_of_millions_of_layers_is_refused_at_once(run: Run, folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**7}))
    code, _, err = run("generate", other, "--prompt", "the")
    assert code == 2
    assert "num_hidden_layers: 10000000" in err


def test_a_damaged_tokenizer_says_what_to_do(run: Run, folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "tokenizer.json").write_text("{}")
    code, _, err = run("generate", other, "--prompt", "the")
    assert code == 2
    assert "its files are damaged, or need another release of transformers" in err


@pytest.mark.parametrize(("prompt", "said"), [("", "no tokens"), ("a", "token 4000")])
def test_generate_shows_nothing_of_a_prompt_that_it_refuses(
    prompt: str, said: str, run: Run, opened: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(text: str, **settings: Any) -> Any:
        return {"input_ids": torch.tensor([[1, 4000]][: len(text)] or [[]], dtype=torch.int64)}

    monkeypatch.setattr("halfbyte.cli.generate.open_asked", lambda *_: (opened[0], read, GREEDY))
    monkeypatch.setattr("halfbyte.cli.generate.open_native", lambda *_: None)
    code, out, err = run("generate", "m", "--prompt", prompt)
    assert (code, out) == (2, "")
    assert said in err


def test_a_gpu_that_is_too_small_is_told_in_one_line(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **settings: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

    monkeypatch.setattr("halfbyte.integrations.transformers.text.open_model", no_room)
    code, out, err = run("generate", folder, "--prompt", "a", "--quiet")
    assert (code, out) == (2, "")
    assert "20 GiB" in err
    assert "--device cpu" in err
    assert err.splitlines()[-1].startswith("halfbyte: error")


def test_gguf_is_known_by_its_content(run: Run, folder: Path, tmp_path: Path) -> None:
    assert run("convert", folder, tmp_path / "m.gguf", "--quiet")[0] == 0
    (tmp_path / "m.gguf").rename(tmp_path / "m")
    code, out, err = run("generate", tmp_path / "m", "--prompt", PROMPT, "--max-new-tokens", 2)
    assert (code, out.startswith(PROMPT)) == (0, True), err
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:300])
    code, out, err = run("eval", tmp_path / "m", "--text", text, "--context", 64)
    assert (code, "perplexity" in out) == (0, True), err
    code, out, err = run("eval", folder, "--text", text, "--stride", 256)
    assert (code, out) == (2, "")
    assert "--stride" in err
    assert "128 tokens" in err


def test_chat(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def talk(*lines: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code, out, err = run("chat", folder, "--format", "q4_0", "--max-new-tokens", 6, "--system", "be brief")
        assert code == 0
        assert err.count("new") == len(lines)
        return out

    both, first = talk("the fox", "the hen"), talk("the fox")
    assert both.startswith(first)
    assert len(both) > len(first)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert "no chat template" in run("chat", tmp_path)[2]
    tokenizer.chat_template = {"tool_use": "{{ messages }}", "rag": "{{ documents }}"}
    tokenizer.save_pretrained(tmp_path)
    assert "are rag, tool_use, chat uses the one called default" in run("chat", tmp_path)[2].replace("tool_use, rag", "rag, tool_use")


def test_eval(run: Run, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:1500])
    asked = ("eval", folder, "--text", text, "--format", "q8_0", "q4_0", "--context", 64)
    found = json.loads(run(*asked, "--stride", 32, "--json", "--plot", tmp_path / "p.svg")[1])
    original, q8, q4 = found["models"]
    assert (original["model"], original["divergence"]) == ("original", None)
    assert 0 < q8["divergence"] < q4["divergence"]
    assert 1 > q8["top1"] > q4["top1"] > 0.3
    assert original["weight_bytes"] > q8["weight_bytes"] > q4["weight_bytes"]
    assert original["tokens"] == q4["tokens"] == len(AutoTokenizer.from_pretrained(folder)(TEXT[:1500])["input_ids"]) - 1
    assert ElementTree.parse(tmp_path / "p.svg").getroot().tag.endswith("svg")
    _, table, err = run(*asked)
    assert all(word in table for word in ("perplexity", "divergence", "original", "q4_0"))
    assert "windows" not in err
    assert "windows have 128 tokens, the most that the model takes, in place of 512" in run("eval", folder, "--text", text)[2]
    halfbyte.convert(folder, tmp_path / "q", "q4_0")
    against = json.loads(run("eval", tmp_path / "q", "--against", folder, "--text", text, "--context", 64, "--stride", 32, "--json")[1])
    assert against["models"][1]["perplexity"] == q4["perplexity"]
    asked = ("eval", tmp_path / "q", "--text", text, "--context", 64, "--stride", 32, "--json", "--cache", "int8")
    alone, cached = json.loads(run(*asked)[1])["models"]
    assert alone["perplexity"] == q4["perplexity"]
    assert 0 < cached["divergence"] < q8["divergence"]
    assert cached["weight_bytes"] == q4["weight_bytes"]


def test_eval_of_last_words(run: Run, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "lines.txt"
    text.write_text(TEXT[:200])
    found = json.loads(run("eval", folder, "--lambada-like", text, "--json", "--format", "q8_0")[1])
    assert all(0 <= row["last_word_accuracy"] <= 1 for row in found["models"])
    assert "last word" in run("eval", folder, "--lambada-like", text)[1]
    assert "--device" in run("eval", folder, "--text", text, "--device", "abacus")[2]
    (tmp_path / "empty.txt").write_text("")
    assert "has 0 tokens" in run("eval", folder, "--text", tmp_path / "empty.txt")[2]
    assert ".svg" in run("eval", folder, "--lambada-like", text, "--plot", "a.svg")[2]
    assert "--against" in run("eval", folder, "--text", text, "--format", "q4_0", "--against", folder)[2]
