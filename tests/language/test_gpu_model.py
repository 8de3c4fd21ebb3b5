"""Language models on a GPU without transformers: the logits of the CPU, steps as CUDA graphs, and text in batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("transformers")

from captured_graphs import count_replays
from language_model import make_language_model
from tiny_decoders import CASES, vary_

import halfbyte as hb
from halfbyte.checkpoint.export_checkpoint import export
from halfbyte.cli import main
from halfbyte.decoder import gpu_layer
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache, Slots
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.decoder.lower_gpu import GpuModel
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.language.model import LanguageModel
from halfbyte.ops.replay import tapes

KINDS = [
    *("LlamaDecoderLayer", "Qwen3DecoderLayer", "Gemma2DecoderLayer", "Gemma3DecoderLayer", "Glm4DecoderLayer", "Cohere2DecoderLayer"),
    *("GraniteDecoderLayer", "GptOssDecoderLayer", "Starcoder2DecoderLayer", "Phi3DecoderLayer, longrope", "Qwen2MoeDecoderLayer"),
    *("Olmo2DecoderLayer", "HunYuanDenseV1DecoderLayer", "NemotronDecoderLayer", "Glm4MoeDecoderLayer", "MistralDecoderLayer"),
    *("Gemma4TextDecoderLayer", "Gemma4TextDecoderLayer, shared keys", "PhiDecoderLayer"),
]
MIXTURES = "GptOss", "Qwen2Moe", "Glm4Moe"
# Relative to the norm of all logits. In 16 bits each of some 40 roundings adds at most a unit (2^-11, 2^-8), mostly with other signs; the
# choice of an expert that is as likely as another one may be another one.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
TOKENS = 24


def folder_of(kind: str, root: Path) -> Path:
    torch.manual_seed(7)
    model = CASES[kind]().eval()
    vary_(model)
    hb.quantize_(model, hb.Config("q8_0", compute="float"))
    hb.save(model, root / "model")
    return root / "model"


def opened(folder: Path, dtype: torch.dtype) -> tuple[CpuModel, GpuModel]:
    config, tensors = open_checkpoint(folder, device=torch.device("cuda", 0), dtype=dtype)
    assert tensors.dtype == dtype
    return CpuModel(build_spec(*open_checkpoint(folder))), GpuModel(build_spec(config, tensors), "cuda", dtype)


def ids_of(count: int) -> list[int]:
    found: list[int] = torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    return found


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The replays of each graph."""
    return count_replays(monkeypatch)


def in_pieces(model: CpuModel | GpuModel, ids: list[int], *, int8: bool = False) -> Tensor:
    cache, found = Cache(model.spec, int8=int8, where=model.where), []
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 15), *((i, i + 1) for i in range(15, len(ids)))):
        some = ids[start:stop]
        found.append(model.decode(some, cache) if len(some) == 1 else model.prefill(some, cache, every=True))
    return torch.cat(found).cpu()


def distance(found: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_cpu(kind: str, dtype: torch.dtype, tmp_path: Path, captures: list[int]) -> None:
    cpu, gpu = opened(folder_of(kind, tmp_path), dtype)
    ids = ids_of(TOKENS)
    expected = cpu.prefill(ids, Cache(cpu.spec), every=True)
    tolerance = TOLERANCES[dtype] * (4 if dtype != torch.float32 and kind.startswith(MIXTURES) else 1)
    assert distance(gpu.prefill(ids, Cache(gpu.spec, where=gpu.where), every=True), expected) < tolerance
    assert distance(in_pieces(gpu, ids), expected) < tolerance
    assert len(captures) == 1
    assert captures[0] >= TOKENS - 15 - 1
    assert not [note for note in gpu.notes if "capture" in note]
    assert distance(in_pieces(gpu, ids, int8=True), in_pieces(cpu, ids, int8=True)) < tolerance + 0.03


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", ["LlamaDecoderLayer", "Gemma3DecoderLayer", "Qwen2MoeDecoderLayer"])
def test_graphs_and_chains_compute_the_same_bits(kind: str, int8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of sequences of different lengths, with all launches of a layer by one call and one by one, with graphs and without."""
    gpu = opened(folder_of(kind, tmp_path), torch.bfloat16)[1]
    tapes.clear()

    def steps() -> Tensor:
        slots = Slots(gpu.spec, 3, int8=int8, where=gpu.where)
        for count in (9, 5, 1):
            cache = Cache(gpu.spec, int8=int8, where=gpu.where)
            gpu.prefill(ids_of(count), cache)
            slots.join(cache)
        return torch.stack([gpu.decode([token, token + 1, token + 2], slots) for token in range(3, 30)])

    first = steps()
    replayed = [key for key, tape in tapes.items() if isinstance(key, tuple) and key[0] == "token" and tape.replay is not None]
    assert replayed or gpu._layers[0].launch_id is None
    assert torch.equal(steps(), first)
    monkeypatch.setattr(gpu_layer, "replay_layer", lambda _name, _layer, steps, *_, **__: steps())
    assert torch.equal(steps(), first)
    monkeypatch.setattr("halfbyte.decoder.gpu_step.can_capture", lambda device: False)
    assert torch.equal(steps(), first)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", ["LlamaDecoderLayer", "Gemma3DecoderLayer", "Qwen2MoeDecoderLayer"])
def test_prompts_that_are_read_together(kind: str, int8: bool, tmp_path: Path) -> None:
    cpu, gpu = opened(folder_of(kind, tmp_path), torch.float32)
    texts, tolerance = [ids_of(count) for count in (9, 30, 1, 17)], TOLERANCES[torch.float32] + 0.03 * int8
    for _ in range(3):  # the last time by recorded launches
        cache, slots = Cache(gpu.spec, 4, int8=int8, most=32, where=gpu.where), Slots(gpu.spec, 4, int8=int8, where=gpu.where)
        found = gpu.prefill_together(texts, cache)
        slots.join(cache, [len(text) for text in texts])
        then = gpu.decode([5, 6, 7, 8], slots)
        for index, text in enumerate(texts):
            alone = Cache(cpu.spec, int8=int8)
            assert distance(found[index], cpu.prefill(text, alone)) < tolerance
            assert distance(then[index], cpu.decode([5 + index], alone)[0]) < tolerance


@pytest.mark.parametrize("kind", ["LlamaDecoderLayer", "Gemma3DecoderLayer", "Phi3DecoderLayer, longrope"])
def test_steps_that_are_launched_ahead(kind: str, tmp_path: Path, captures: list[int]) -> None:
    cpu, gpu = opened(folder_of(kind, tmp_path), torch.float32)
    ids, count = ids_of(9), 100
    texts = []
    for model in (cpu, gpu):
        cache = Cache(model.spec, where=model.where)
        text = [int(model.prefill(ids, cache).argmax())]
        while len(text) < count:
            if isinstance(model, GpuModel):
                text += model.decode_tokens(text[-1:], cache, launch_ahead=True)
            else:
                text.append(int(model.decode(text[-1:], cache)[0].argmax()))
        texts.append(text)
    assert texts[0] == texts[1]
    assert sum(captures) in (count - 1, count)  # longrope's tables change on the way


# Text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "float")


PROMPTS = ["the quick brown fox jumps", "an old oak", "hen", "the slow red hen sleeps under an old oak tree", "lazy dog"]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("cache", [None, "int8"])
def test_text_is_that_of_a_cpu(settings: dict[str, Any], cache: str | None, folder: Path) -> None:
    """In float32, where no two tokens are so close that the order of a sum decides between them."""
    how = {"format": hb.Config("q8_0", compute="float"), "cache": cache}
    here = LanguageModel.open(folder, **how)
    there = LanguageModel.open(folder, device="cuda", dtype=torch.float32, **how)
    asked = {"max_new_tokens": 24, "ignore_eos": True, **settings}
    for prompts in (PROMPTS[0], PROMPTS, PROMPTS[:1], [*PROMPTS * 2]):
        found, expected = (model.generate(prompts, **asked) for model in (there, here))
        texts = [[one.text for one in (result if isinstance(result, list) else [result])] for result in (found, expected)]
        assert texts[0] == texts[1]


def test_a_gguf_file_in_16_bits(folder: Path, tmp_path: Path) -> None:
    hb.convert(folder, tmp_path / "q", hb.Config("q4_0"))
    export(tmp_path / "q", tmp_path / "model.gguf", "gguf")
    model = LanguageModel.open(tmp_path / "model.gguf", device="cuda:0")
    other = LanguageModel.open(tmp_path / "q", device="auto", dtype=torch.bfloat16)
    assert model.logits([3, 4, 5]).is_cuda
    assert float((model.logits([3, 4, 5]) - other.logits([3, 4, 5])).norm() / model.logits([3, 4, 5]).norm()) < 0.1
    assert model.generate("the quick", max_new_tokens=8).text


def test_the_command_line_without_transformers(folder: Path) -> None:
    asked = ["generate", str(folder), "--device", "cuda", "--format", "q8_0", "--prompt", PROMPTS[0], "--max-new-tokens", "12", "--json"]
    code = f"import sys; from halfbyte.cli import main; code = main({asked!r}); print('transformers' in sys.modules); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts, loaded = done.stdout.rsplit("\n", 2)[0], done.stdout.rsplit("\n", 2)[1]
    assert json.loads(facts)["new_tokens"] == 12
    assert loaded == "False"
    assert main([*asked[:-1], "--dtype", "float32", "--cache", "int8", "--temperature", "0.7"]) == 0
