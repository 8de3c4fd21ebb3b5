"""Models that several processes share, on gloo, and on NCCL where there are GPUs: what one process computes (parallel_worker.py)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.cli.main import main
from halfbyte.errors import UnsupportedError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or sys.platform == "win32", reason="torch has no gloo here")

import parallel_worker  # noqa: E402
from language_model import make_language_model  # noqa: E402

from halfbyte.integrations.transformers.quantizer import HalfbyteQuantizer  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def build(architecture: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**{**SIZES, **sizes})
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # of the usual size, biases too, so that what is lost shows
            parameter.normal_(0, parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) / 4)
    return model


def write(folder: Path) -> None:
    """The models that the processes load."""
    llama = {"intermediate_size": 112, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    build("Llama", **llama).save_pretrained(folder / "float")
    for name, fmt in parallel_worker.FORMATS.items():
        config = hb.Config(fmt, compute="float", skip=["model.layers.1.mlp.up_proj"])
        hb.save(hb.quantize_(build("Llama", **llama), config), folder / name)
    wide = build("Llama", hidden_size=512, intermediate_size=1024)
    hb.save(hb.quantize_(wide, hb.Config("int4_g32", compute="float")), folder / "wide")
    experts = hb.Config("int4_g8", compute="float")
    mixtral = build("Mixtral", intermediate_size=192, num_local_experts=4, num_experts_per_tok=2)
    hb.save(hb.quantize_(mixtral, experts), folder / "mixtral")
    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "head_dim": 16, "intermediate_size": 32}
    hb.save(hb.quantize_(build("Qwen3Moe", **sparse), hb.Config("int8_g32", compute="float")), folder / "qwen3_moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write(folder)
    return folder


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module", params=[("cpu", 2), ("cpu", 3), pytest.param(("cuda", 2), marks=two_gpus)], ids=lambda p: f"{p[0]}-{p[1]}")
def outcomes(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each process says of each scenario."""
    device, count = request.param
    folder = tmp_path_factory.mktemp("run")
    for model in models.iterdir():
        (folder / model.name).symlink_to(model, target_is_directory=True)
    names = [name for name in parallel_worker.SCENARIOS if count == 2 or name not in parallel_worker.OF_TWO]
    command = [str(Path(parallel_worker.__file__)), "all" if device == "cpu" else "{rank}", str(count), str(folder), device, *names]
    said = run_processes(1 if device == "cpu" else count, command)
    files = [folder / f"{rank}.json" for rank in range(count)]
    assert all(file.exists() for file in files), said
    skipped = dict.fromkeys(parallel_worker.CPU_ALONE, "skipped") if device != "cpu" else {}
    skipped |= dict.fromkeys(parallel_worker.OF_TWO, "skipped") if count != 2 else {}
    return [json.loads(file.read_text()) | skipped for file in files]


def run_processes(
    count: int, command: list[str], environment: dict[str, str] | None = None, *, seconds: float = 600
) -> list[tuple[str, str]]:
    """(stdout, stderr) of `count` processes that run together, none of them forever. (Kernels of many formats are compiled.)"""
    source = str(Path(hb.__file__).parent.parent)
    everywhere = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    started = []
    for rank in range(count):
        actual = {**everywhere, **{key: value.format(rank=rank) for key, value in (environment or {}).items()}}
        arguments = [argument.format(rank=rank) for argument in command]
        started.append(
            subprocess.Popen([sys.executable, *arguments], env=actual, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        return [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("name", parallel_worker.SCENARIOS)
def test_processes_share_a_model(outcomes: list[dict[str, str]], name: str) -> None:
    if all(said.get(name) == "skipped" for said in outcomes):
        pytest.skip(parallel_worker.CPU_ALONE.get(name, "is the same for any number of processes"))
    for rank, said in enumerate(outcomes):
        assert name in said, f"process {rank} ended before: {said}"
        assert not said[name], f"process {rank}: {said[name]}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
def test_generate_under_torchrun(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first process alone prints, and what one process would."""
    folder = make_language_model(tmp_path / "model")
    command = ["generate", str(folder), "--format", "q8_0", "--prompt", "the quick", "--max-new-tokens", "8"]
    command += ["--device", device, "--dtype", "float32"]
    assert main(command) == 0
    alone = capsys.readouterr().out
    torchrun = {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as bound:  # bound as long as the processes run, so that the system gives its port to nobody else
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as theirs does, which may then share the port: this one never listens
        bound.bind(("127.0.0.1", 0))
        torchrun["MASTER_PORT"] = str(bound.getsockname()[1])
        (first, said), (second, _) = run_processes(2, ["-m", "halfbyte", *command], torchrun)
    assert alone.startswith("the quick")
    assert first == alone
    assert not second
    assert "in each of 2 processes" in said


def test_layers_on_devices_of_a_map(models: Path, tmp_path: Path) -> None:
    """accelerate's hooks change nothing; layers on the disk are refused."""
    accelerate = pytest.importorskip("accelerate")
    ids = parallel_worker.IDS
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    model = hb.load(models / "blocks")
    wanted = model(ids).logits
    assert torch.equal(accelerate.dispatch_model(model, dict.fromkeys(names, "cpu"), force_hooks=True)(ids).logits, wanted)
    build_mapped = transformers.AutoModelForCausalLM.from_pretrained
    assert torch.equal(build_mapped(models / "blocks", device_map=dict.fromkeys(names, "cpu"))(ids).logits, wanted)
    with pytest.raises(UnsupportedError, match=r"the device_map of model\.layers\.1"):
        build_mapped(models / "blocks", device_map={**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}, offload_folder=tmp_path)


@pytest.mark.parametrize("place", ["cpu", torch.device("cpu")])
def test_layers_on_the_cpu_next_to_a_gpu(models: Path, place: object) -> None:
    """What accelerate would move to the GPU for each call is refused, with what to use instead; also where the map is computed."""
    quantizer = HalfbyteQuantizer(hb.HalfbyteConfig("q8_0"))
    remedy = r"open a language model by halfbyte\.LanguageModel\.open\(path, device=\{'experts': 'cpu'\}\) or memory='12 GB'"
    for gpu in (0, "cuda:0", torch.device("cuda", 1)):
        device_map = {"": gpu, "model.layers.0.mlp.experts": place, "model.layers.1.mlp.experts": place}
        match = rf"got a device_map with 'model\.layers\.0\.mlp\.experts' and 1 more on the CPU: map all to GPUs, or {remedy}"
        with pytest.raises(UnsupportedError, match=match):
            quantizer.validate_environment(device_map=device_map)
        with pytest.raises(UnsupportedError, match=remedy):
            transformers.AutoModelForCausalLM.from_pretrained(models / "blocks", device_map=device_map)
        quantizer.validate_environment(device_map=dict.fromkeys(device_map, gpu))


def test_an_optimized_model_of_a_map(models: Path) -> None:
    """Layers with accelerate's hooks, which move activations from device to device, are called one by one, as the notes say."""
    accelerate = pytest.importorskip("accelerate")
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    model = hb.load(models / "blocks")
    wanted = model(parallel_worker.IDS).logits.detach()
    model = hb.optimize_(accelerate.dispatch_model(model, dict.fromkeys(names, "cpu"), force_hooks=True))
    # fuse_ computes projections of the same input in one product: float32 sums in the same order
    assert torch.allclose(model(parallel_worker.IDS).logits, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert any("its layers are called one by one: layer 0: gate_proj+up_proj" in note for note in hb.report(model).notes)
