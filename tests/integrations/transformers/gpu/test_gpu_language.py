"""Language models on a GPU: every kind of file says what it says on the CPU; batches, streams and compiled steps say it too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import make_language_model
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("transformers")

import triton
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import halfbyte as hb
from halfbyte import ops
from halfbyte.checkpoint.export_checkpoint import export
from halfbyte.cli import main
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.formats import Codes, as_format
from halfbyte.integrations.transformers.gguf import load_gguf
from halfbyte.integrations.transformers.text import generate, open_model
from halfbyte.nn.modules.quantized import QuantLinear, QuantModule

# What torch.compile itself says.
pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:The CUDA Graph is empty")

ROOT = Path(__file__).parents[4]
TINY = ROOT / "models" / "tiny-llama"
HELD_OUT = ROOT / "examples" / "tiny-llama" / "heldout.txt"
PROMPT = "the quick brown fox"
GREEDY = {"do_sample": False, "max_new_tokens": 24}
LAYERS = ["model.embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "float")


@pytest.fixture(scope="module")
def opened(folder: Path) -> tuple[Any, Any]:
    """In float32, where no two tokens are so close that the order of a sum decides between them."""
    model, tokenizer = open_model(folder, "cuda", hb.Config("q4_0"))
    tokenizer.pad_token = tokenizer.eos_token
    assert model.dtype == torch.float32
    return model, tokenizer


def answer(opened: tuple[Any, Any], text: str = PROMPT, **settings: Any) -> Any:
    model, tokenizer = opened
    return generate(model, tokenizer, tokenizer(text, return_tensors="pt"), lambda _: None, **{**GREEDY, **settings})


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# The trained model, in every form


def perplexity(model: Any, ids: Tensor) -> float:
    with torch.no_grad():
        logits = model(ids[:, :-1].to(model.device)).logits.float().cpu()
    return math.exp(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


def say(model: Any, ids: Tensor) -> list[int]:
    found: Tensor = model.generate(ids[:1, :32].to(model.device), max_new_tokens=24, do_sample=False, pad_token_id=0)
    return found[0].tolist()  # type: ignore[no-any-return]


def in_float(model: Any) -> Any:
    """Computes without quantized activations, as a GPU does."""
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.compute = "float"
    return model


def forms(quantized: Path, root: Path, kinds: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    yield "itself", quantized
    for kind in kinds:
        target = root / ("model.gguf" if kind == "gguf" else kind)
        export(quantized, target, kind)
        yield kind, target


def held_out(windows: int = 4, length: int = 256) -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = torch.tensor(tokenizer(HELD_OUT.read_text(encoding="utf-8")[:20_000])["input_ids"])
    return ids[: windows * length].view(windows, length)


@pytest.mark.skipif(not (TINY / "model.safetensors").exists(), reason="models/tiny-llama is in the repository, not in the sdist")
@pytest.mark.parametrize("fmt", ["q4_0", "q8_0", "int4_g128", "int4_g64_zp"])
def test_a_trained_model_says_the_same_in_every_form(fmt: str, tmp_path: Path) -> None:
    """From one set of codes: on the GPU the same bits in every form, and what the CPU computes in floating point to a thousandth."""
    hb.convert(TINY, tmp_path / "q", hb.Config(fmt, skip=LAYERS))
    ids = held_out()
    here: Any = in_float(hb.load(tmp_path / "q").to(torch.float32))
    expected, text = perplexity(here, ids), say(here, ids)
    kinds = ("gguf", "gptq", "compressed-tensors", *(("awq",) if fmt != "q8_0" else ()))
    bits: dict[torch.dtype, Tensor] = {}
    for kind, path in forms(tmp_path / "q", tmp_path, kinds):
        for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 4e-3)):  # bfloat16 rounds every activation to 8 bits
            there: Any = load_gguf(path, "cuda", torch.bfloat16)[0] if kind == "gguf" else hb.load(path, "cuda")
            there = there.to(torch.float32) if dtype == torch.float32 else there
            found = perplexity(there, ids)
            assert math.isclose(found, expected, rel_tol=most), (kind, dtype)
            if dtype == torch.float32:
                assert say(there, ids) == text
            if kind == "gguf" and fmt.startswith("int4"):
                continue  # the same weights in shorter blocks, which are summed in another order
            with torch.no_grad():
                logits = there(ids[:1].cuda()).logits
            assert torch.equal(bits.setdefault(dtype, logits), logits), (kind, dtype)


K_QUANTS = ("int4_g32_offset_f32", "int8_g32_offset_f32", "int4_g16_offset_f32", "int8_g16_f32", "int4_g16_f32", "int8_g32_f32")


@pytest.mark.parametrize("fmt", K_QUANTS)
@pytest.mark.parametrize("m", [1, 5, 200])
def test_what_k_quants_are_held_in(fmt: str, m: int) -> None:
    """The formats of Q4_K, Q5_K, Q2_K, Q6_K, Q3_K and IQ4_XS, with scales as theirs are: float16 times 6 bits."""
    f, n, k = as_format(fmt), 96, 512
    shape = f.scale_shape((n, k))
    scale = (torch.rand(shape) * 0.01).half().float() * torch.randint(1, 64, shape)
    zero = -(torch.rand(shape) * 0.05).half().float() * torch.randint(0, 64, shape) if f.zero == "offset" else None
    codes = Codes.from_values(f, torch.randint(f.q_min, f.q_max + 1, (n, k), dtype=torch.int16), scale, zero)
    packed, x = hb.pack(codes, "cuda"), torch.randn(m, k)
    expected = x.double() @ codes.dequantize(torch.float64).T
    size = x.double().abs() @ codes.dequantize(torch.float64).abs().T
    assert torch.equal(hb.dequantize(packed, torch.float32).cpu(), codes.dequantize())
    for dtype, eps in ((torch.float32, 2**-20), (torch.float16, 2**-9), (torch.bfloat16, 2**-6)):
        y = hb.linear(x.cuda().to(dtype), packed).cpu().double()
        assert bool(((y - expected).abs() <= eps * size).all()), dtype


def test_a_file_of_k_quants(tmp_path: Path) -> None:
    from test_gguf import write_k_quants

    write_k_quants(tmp_path)
    ids = (torch.arange(48)[None] * 7) % 300
    here: Any = in_float(load_gguf(tmp_path / "k.gguf")[0])
    with torch.no_grad():
        expected = here(ids).logits
        for dtype, most in ((torch.float32, 1e-4), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)):
            there: Any = load_gguf(tmp_path / "k.gguf", "cuda", dtype)[0]
            assert {str(m.packed.format) for m in there.modules() if isinstance(m, QuantLinear)} >= {"int4_g32_offset_f32", "int8_g16_f32"}
            logits = there(ids.cuda()).logits.float().cpu()
            assert float((logits - expected).norm() / expected.norm()) < most


# Generating


def test_a_static_cache_compiles_without_graph_breaks_and_into_graphs(opened: tuple[Any, Any]) -> None:
    expected = answer(opened, eos_token_id=None)
    done = answer(opened, compiled=True, eos_token_id=None)
    assert torch.equal(done.tokens, expected.tokens)
    assert not counters["graph_break"]
    assert not counters["inductor"]["cudagraph_skips"]
    again = answer(opened, "an old oak tree sleeps", compiled=True, eos_token_id=None)
    assert torch.equal(again.tokens, answer(opened, "an old oak tree sleeps", eos_token_id=None).tokens)
    assert counters["stats"]["unique_graphs"] == 1, "another prompt needs no other graph"


def test_a_static_cache_by_transformers_own_settings(opened: tuple[Any, Any]) -> None:
    """On a GPU it compiles by itself."""
    model, tokenizer = opened
    prompt = tokenizer(PROMPT, return_tensors="pt").to("cuda")
    found = model.generate(**prompt, **GREEDY, cache_implementation="static")
    assert torch.equal(found[0].cpu(), answer(opened).tokens)
    assert not counters["graph_break"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_with_padding_on_the_left(compiled: bool, opened: tuple[Any, Any]) -> None:
    model, tokenizer = opened
    texts = [PROMPT, "an old oak tree sleeps under the lazy dog", "hen"]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to("cuda")
    assert not batch["attention_mask"].all()
    settings = {"cache_implementation": "static"} if compiled else {}
    found = model.generate(**batch, **GREEDY, **settings, eos_token_id=None)[:, batch["input_ids"].shape[1] :].cpu()
    for row, text in zip(found, texts, strict=True):
        done = answer(opened, text, eos_token_id=None)
        assert torch.equal(row, done.tokens[-done.new_tokens :])


def test_transformers_own_streamer(opened: tuple[Any, Any]) -> None:
    model, tokenizer = opened
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    model.generate(**tokenizer(PROMPT, return_tensors="pt").to("cuda"), **GREEDY, streamer=streamer)
    assert "".join(streamer) == answer(opened).text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loaded_by_transformers(dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=hb.HalfbyteConfig("q4_0"), dtype=dtype).to("cuda")
    model.save_pretrained(tmp_path)
    ids = torch.arange(24, device="cuda").view(2, 12)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).to("cuda")
    with torch.no_grad():
        assert model(ids).logits.dtype == dtype
        assert torch.equal(model(ids).logits, again(ids).logits)
        assert torch.equal(model(ids).logits, hb.load(tmp_path, "cuda")(ids).logits)


def test_kernels_are_compiled_before_the_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of those that the prompt and the tokens after it take. (No other test has this format.)"""
    monkeypatch.setenv("HALFBYTE_CHECK", "0")  # which compiles kernels, too
    opened = open_model(folder, "cuda", hb.Config("int4_g48"), torch.bfloat16)
    first, later = list[str](), list[str]()
    now, compile_first = later, GpuModel._compile_kernels

    def ahead(*what: Any) -> None:
        nonlocal now
        now = first
        compile_first(*what)
        now = later

    monkeypatch.setattr(GpuModel, "_compile_kernels", ahead)
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: now.append(src.name))
    answer(opened)
    assert len(first) >= 3
    assert later == []


def test_a_float_model_is_quantized_on_the_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the codes that the CPU makes of it."""
    expected = {
        name: module for name, module in open_model(folder, config=hb.Config("q4_0"))[0].named_modules() if isinstance(module, QuantModule)
    }
    monkeypatch.setattr(ops.cpu, "quantize", None)
    monkeypatch.setattr(ops.functions, "pack_dense", None)
    model, _ = open_model(folder, "cuda", hb.Config("q4_0"))
    found = {name: module for name, module in model.named_modules() if isinstance(module, QuantModule)}
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"cuda"}
    assert found.keys() == expected.keys()
    for name, module in found.items():
        for part, tensor in expected[name].codes().tensors().items():
            assert torch.equal(module.codes().tensors()[part].cpu(), tensor), f"{name}.{part}"
        assert module.error == pytest.approx(expected[name].error, rel=1e-4)


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["generate", str(folder), "--device", "cuda", "--format", "q4_0", "--prompt", PROMPT, "--max-new-tokens", "12"]
    asked += ["--dtype", "float32"]  # with and without transformers
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert out.startswith(PROMPT)
    assert "peak memory" in err
    assert main([*asked, "--json", "--compile"]) == 0
    assert out == f"{PROMPT}{json.loads(capsys.readouterr().out)['text']}\n"
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 30)
    found = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float16")):
        settings = ["--format", "q8_0", "--device", device, "--dtype", dtype, "--context", "64", "--json"]
        assert main(["eval", str(folder), "--text", str(text), *settings]) == 0
        found[device] = [row["perplexity"] for row in json.loads(capsys.readouterr().out)["models"]]
    assert found["cuda"] == pytest.approx(found["cpu"], rel=2e-3)
