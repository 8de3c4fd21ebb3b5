"""Checkpoints of every kind are opened without transformers, with the logits of `halfbyte.load`; what is not supported says why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from language_model import TEXT, make_language_model, make_tokenizer
from safetensors.torch import load_file, save_file
from tiny_decoders import CASES, GEMMA4, make_config
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import halfbyte as hb
from halfbyte.checkpoint import convert, export, load
from halfbyte.cli import main
from halfbyte.decoder.cache import Cache
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError
from halfbyte.language.model import LanguageModel
from halfbyte.nn.modules.experts import QuantExperts
from halfbyte.nn.modules.quantized import QuantLinear

IDS = [5, 17, 33, 2, 90, 60, 61, 62, 5, 17]
# Relative to the norm of all logits. float: float32 sums in another order. int8: an activation between two codes may get the other one.
FLOAT, INT8 = 1e-4, 0.03


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_language_model(root / "tied")
    make_language_model(root / "float", tied=False)
    convert(root / "float", root / "halfbyte", "int4_g32_zp")
    convert(root / "float", root / "symmetric", "int4_g32")
    for kind in ("awq", "gptq", "compressed-tensors"):
        export(root / "halfbyte", root / kind, kind)
    return root


def transformers_logits(model: Any) -> Tensor:
    for module in model.modules():
        if isinstance(module, QuantLinear | QuantExperts):
            module.compute = "float"
    with torch.inference_mode():
        found: Tensor = model.eval().float()(torch.tensor([IDS])).logits[0]
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["halfbyte", "awq", "gptq", "compressed-tensors"])
def test_folders_of_others(kind: str, folders: Path) -> None:
    model = LanguageModel.open(folders / kind)
    assert distance(model.logits(IDS), transformers_logits(load(folders / kind))) < INT8
    assert model.generate("the quick brown", max_new_tokens=3).ids


@pytest.mark.parametrize("format", ["q4_0", "q8_0"])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_files(format: str, tied: bool, folders: Path, tmp_path: Path) -> None:
    source = folders / ("tied" if tied else "float")
    convert(source, tmp_path / "quantized", hb.Config(format, skip=[] if tied else ["lm_head"]))
    export(tmp_path / "quantized", tmp_path / "m.gguf", "gguf")
    model = LanguageModel.open(tmp_path / "m.gguf")
    assert distance(model.logits(IDS), transformers_logits(load(tmp_path / "m.gguf"))) < INT8


CONFIGS: dict[str, Any] = {
    "everything": hb.Config("q8_0", compute="float"),
    "without head": hb.Config("q8_0", compute="float", skip=["lm_head"]),
    "embedding in float": hb.Config("q8_0", compute="float", skip=["model.embed_tokens"]),
    "formats that differ in qkv": hb.Config("q8_0", compute="float", overrides={"*v_proj": "int4_g32_zp", "*k_proj": "q4_0"}),
    "down in another": hb.Config("int4_g32_zp", compute="float", overrides={"*down_proj": "q8_0"}),
}


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_halfbyte_folders(case: str, tied: bool, folders: Path, tmp_path: Path) -> None:
    source = folders / ("tied" if tied else "float")
    convert(source, tmp_path / "m", CONFIGS[case])
    assert distance(LanguageModel.open(tmp_path / "m").logits(IDS), transformers_logits(load(tmp_path / "m"))) < FLOAT


@pytest.mark.parametrize("prepare", ["fuse_", "optimize_"])
def test_saved_after_modules_were_replaced(prepare: str, folders: Path, tmp_path: Path) -> None:
    model = hb.quantize_(LlamaForCausalLM.from_pretrained(folders / "float").eval(), hb.Config("q8_0", compute="float"))
    expected = transformers_logits(model)
    getattr(hb, prepare)(model)
    hb.save(model, tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    assert distance(LanguageModel.open(tmp_path / "m").logits(IDS), expected) < FLOAT


# Of the families whose files name tensors in another way than modules, of each way one; stacks of experts in files and one by one.
FLOAT_FOLDERS = ("Llama", "Qwen2", "Qwen3Moe", "GptOss", "Mixtral", "MiniMaxM2", "GraniteMoe", "Ernie4_5_Moe", "ExaoneMoe", "HYV3")


@pytest.mark.parametrize("case", [*(f"{name}DecoderLayer" for name in FLOAT_FOLDERS), "Gemma4TextDecoderLayer, shared keys"])
def test_float_folders_are_quantized_as_they_are_read(case: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = CASES[case]().eval()
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor, 0.5, 0.3)
    model.save_pretrained(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    config = hb.Config("q8_0", compute="float")
    found = LanguageModel.open(tmp_path / "m", format=config).logits(IDS)
    quantized = hb.quantize_(AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval(), config)
    assert distance(found, transformers_logits(quantized)) < FLOAT


def test_columns_in_another_order_are_refused(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "gptq", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.g_idx"
    tensors[name] = torch.arange(64, dtype=torch.int32) % 2  # of which group each column is
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    hb.save(load(tmp_path / "m"), tmp_path / "saved")
    make_tokenizer().save_pretrained(tmp_path / "saved")
    for folder in ("m", "saved"):
        with pytest.raises(UnsupportedError, match=r"columns of .*layers\.1\.self_attn\.o_proj.* desc_act"):
            LanguageModel.open(tmp_path / folder)


def test_prompts_of_other_types(folders: Path) -> None:
    model = LanguageModel.open(folders / "halfbyte")
    for prompt in (5, b"text", None, torch.tensor([1, 2]), [1, True], [1.0]):
        with pytest.raises(ArgumentError, match="a text, token ids or messages"):
            model.generate(prompt)
    for empty in ("", [], ()):
        with pytest.raises(ArgumentError, match="no tokens"):
            model.generate(empty)
    found = model.generate(["the quick", "brown fox"], max_new_tokens=3)
    assert [one.ids for one in found] == [model.generate(text, max_new_tokens=3).ids for text in ("the quick", "brown fox")]
    mixed: list[Any] = [[5, 17], "brown fox"]
    assert [one.ids for one in model.generate(mixed, max_new_tokens=3)] == [model.generate([5, 17], max_new_tokens=3).ids, found[1].ids]
    with pytest.raises(ArgumentError, match="a text, token ids or messages"):
        model.generate([*mixed, b"text"])


def test_methods_that_need_a_calibration_text(folders: Path) -> None:
    for method in ("gptq", "awq"):
        with pytest.raises(ArgumentError, match=rf"^{method} needs a calibration text, .*halfbyte quantize --method {method} first$"):
            LanguageModel.open(folders / "float", format=hb.Config("int4_g32", method=method))


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line, and prints which modules of transformers it has loaded and the exit code."""
    code = (
        "import sys\n"
        "from halfbyte.cli.main import main\n"
        "status = main(sys.argv[1:])\n"
        "print(sorted(n for n in sys.modules if n.split('.')[0] == 'transformers' or n.startswith('halfbyte.integrations.')), status)\n"
    )
    run = [sys.executable, "-c", code, *arguments]
    return subprocess.run(run, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)


def generate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command("generate", str(folder), "--prompt", "the quick", "--max-new-tokens", "2", *arguments)


def check_without_transformers(done: subprocess.CompletedProcess[str]) -> str:
    """What the command has printed."""
    assert done.returncode == 0, done.stderr
    printed, _, end = done.stdout.rpartition("\n[")
    names, status = end.rsplit("]", 1)
    loaded = [name for name in names.replace("'", "").split(", ") if name and name != "halfbyte.integrations.on_import"]
    assert (loaded, status.strip()) == ([], "0")
    return printed


def test_generate_loads_no_transformers(folders: Path) -> None:
    check_without_transformers(generate(folders / "halfbyte"))


def test_eval_loads_no_transformers(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT[:300])
    asked = ("eval", str(folders / "halfbyte"), "--context", "32", "--cache", "int8", "--json")
    rows = json.loads(check_without_transformers(command(*asked, "--text", str(tmp_path / "text"))))["models"]
    assert [row["model"] for row in rows] == ["halfbyte", "halfbyte, int8 cache"]
    assert rows[0]["weight_bytes"] == LanguageModel.open(folders / "halfbyte").spec.nbytes


def test_eval_says_which_models_transformers_runs(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT[:300])
    asked = ["eval", str(folders / "float"), "--text", str(tmp_path / "text"), "--context", "32", "--format", "q8_0"]
    for more, names in (([], ["original"]), (["--dtype", "bfloat16", "--device", "cpu"], ["original", "q8_0"]), (["--quiet"], [])):
        assert main([*asked, *more]) == 0
        said = [line for line in capsys.readouterr().err.splitlines() if "own decoder" in line]
        assert [line.partition(",")[0] for line in said] == [f"transformers runs {name}" for name in names]
        assert all(": in layer " in line or "in float32 on a CPU, not in bfloat16" in line for line in said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # transformers has renamed the argument of the cache
        assert main([*asked[:-2], "--cache", "int8"]) == 0


def test_explain_loads_no_transformers(folders: Path) -> None:
    document = json.loads(check_without_transformers(command("explain", "--model", str(folders / "halfbyte"), "--json")))
    assert [group["layers"] for group in document["groups"]] == [[], [0, 1], [], []][: len(document["groups"])]
    qkv = next(op for op in document["groups"][1]["ops"] if op["name"] == "qkv")
    assert (qkv["shape"], qkv["format"], qkv["kernel"], qkv["device"]) == ([128, 64], "int4_g32_zp", "int8", "cpu")


def explained(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["explain", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_explain_on_the_command_line(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folders / "halfbyte"
    said = explained(capsys, model)
    assert said == explained(capsys, "--model", model) == f"{LanguageModel.open(model).explain()}\n"
    assert "one native call (decode step)\n" in said
    assert "layers 0-1\n  attn_norm" in said
    assert "4 sequences on the CPU" in explained(capsys, model, "--m", 4)
    assert "q8_0" in explained(capsys, "--model", folders / "float", "--format", "q8_0")
    assert "one model is explained at a time" in explained(capsys, model, "--model", model, code=2)
    assert "1 to 64 sequences at a time on a CPU, got 65" in explained(capsys, model, "--m", 65, code=2)
    assert "'abacus'" in explained(capsys, model, "--device", "abacus", code=2)
    assert "'q9'" in explained(capsys, folders / "float", "--format", "q9", code=2)


def test_explain_for_a_gpu_that_is_not_here(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    said = explained(capsys, "--model", folders / "halfbyte", "--device", "sm_90", "--dtype", "float16")
    assert said.startswith("one new token of 1 sequence on NVIDIA H200, float16 activations\nembed_tokens")
    assert said == f"{LanguageModel.open(folders / 'halfbyte').explain('sm_90', dtype=torch.float16)}\n"
    document = json.loads(explained(capsys, folders / "halfbyte", "--device", "sm_80", "--json"))
    assert document["machine"] == "NVIDIA A100-SXM4-80GB"
    assert {op["device"] for group in document["groups"] for op in group["ops"]} == {"cuda"}


def test_explain_says_why_modules_of_transformers_are_shown(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "\nnote: modules of transformers, not a program of ops: "
    assert f"{note}in layer 0 " in explained(capsys, folders / "float")
    assert f"{note}it computes in float32, not in bfloat16" in explained(capsys, folders / "halfbyte", "--dtype", "bfloat16")
    experts = make_config("Gemma4Text", **GEMMA4, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)
    AutoModelForCausalLM.from_config(experts).save_pretrained(tmp_path / "gemma4")
    make_tokenizer().save_pretrained(tmp_path / "gemma4")
    document = json.loads(explained(capsys, tmp_path / "gemma4", "--format", "q8_0", "--json"))
    (said,) = document["notes"]
    assert said.endswith(": its config has enable_moe_block = True")


def test_a_damaged_model_is_not_explained(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folders / "float", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 96)  # its model has a width of 64
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    for device in ("cpu", "sm_90"):
        assert "do not fit together" in explained(capsys, tmp_path / "m", "--format", "q8_0", "--device", device, code=2)
    edit(tmp_path / "m", num_attention_heads=2)
    assert "config.json is of another model" in explained(capsys, tmp_path / "m", "--format", "q8_0", code=2)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("model.layers.0.self_attn.v_proj.weight", UnsupportedError, r"^model.layers.0.self_attn.v_proj.weight: the scale of row 1, .*use"),
        ("lm_head.weight", UnsupportedError, r"^lm_head.weight: the scale of row 1, .*use"),
        ("model.layers.0.input_layernorm.weight", CheckpointError, "NaN or infinite logits"),
        ("model.norm.weight", CheckpointError, "NaN or infinite logits"),
    ],
)
def test_numbers_near_the_largest_of_float32(name: str, error: type[Exception], says: str, folders: Path, tmp_path: Path) -> None:
    """One sentence names the tensor that has no codes, or says that logits overflow: there is no text of such a model."""
    shutil.copytree(folders / "float", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors[name].view(-1)[tensors[name].shape[-1] if tensors[name].dim() == 2 else slice(None)] = 3e38
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=says):
        LanguageModel.open(tmp_path / "m", format="q8_0").generate(IDS, max_new_tokens=2)


def test_generate_says_when_transformers_runs_a_model(folders: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folders / "tied")
    model.save_pretrained(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    edit(tmp_path / "m", hidden_act="gelu")
    done = generate(tmp_path / "m", "--format", "q8_0")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "own decoder" in line] == [
        "transformers runs this model, as halfbyte's own decoder does not: its activation is 'gelu', not one of silu, swish, "
        "gelu_pytorch_tanh, gelu_new, relu2"
    ]


def test_a_prompt_of_another_encoding(folders: Path) -> None:
    done = command("generate", str(folders / "halfbyte"), "--prompt", os.fsdecode(b"caf\xe9"))
    assert done.stderr.startswith("halfbyte: error: a prompt is text in this system's encoding, utf-8, got 'caf\\udce9': convert it"), done


def test_what_is_not_supported(folders: Path, tmp_path: Path) -> None:
    for settings, message in (
        ({"architectures": ["BloomForCausalLM"]}, "in no family"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
    ):
        make_language_model(tmp_path / message)
        edit(tmp_path / message, **settings)
        with pytest.raises(UnsupportedError, match=message):
            LanguageModel.open(tmp_path / message, format="q8_0")
    make_language_model(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="adapter"):
        LanguageModel.open(tmp_path / "adapter", format="q8_0")
    with pytest.raises(UnsupportedError, match=r"q_proj are not quantized, .*: open a float model with a format, such as q4_0"):
        LanguageModel.open(folders / "float")


# Layers that are not quantized: alone, all of an MLP, in some layers, one of two that are one product, with a head that torch multiplies.
SKIPPED = {
    "down_proj": ["model.layers.1.mlp.down_proj"],
    "a layer": ["model.layers.1.*"],
    "q_proj": ["*.q_proj"],
    "gate_proj, of a product with up_proj": ["model.layers.0.mlp.gate_proj", "lm_head"],
}


@pytest.mark.parametrize("case", SKIPPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_skipped_layers_run_in_floating_point(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_language_model(tmp_path / "float", tied=False)
    LlamaForCausalLM.from_pretrained(tmp_path / "float", dtype=dtype).save_pretrained(tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "m", hb.Config("q8_0", compute="float", skip=SKIPPED[case]))
    model = LanguageModel.open(tmp_path / "m")
    assert distance(model.logits(IDS), transformers_logits(load(tmp_path / "m"))) < FLOAT
    tokens = Cache(model.spec)
    for token in IDS:
        decoded = model._model.decode([token], tokens)
    assert distance(decoded[0], model.logits(IDS)[-1]) < FLOAT
    said = "in floating point, as in the checkpoint: model.layers."
    assert said in str(model.report())
    assert said in model.notes[0]
    document = cast(list[str], model.report().to_json()["in_floating_point"])
    assert set(document) >= {name for name in SKIPPED[case] if "*" not in name and name != "lm_head"}
    assert {lowered.op.format for lowered in model.explain().kernels if lowered.op.name == "down_proj"} <= {"q8_0", str(dtype)[6:]}


# inputs_first: files have the experts of GPT-OSS as [E, K, N], which nothing says of codes in floating point.
@pytest.mark.parametrize(("case", "inputs_first"), [("Qwen3MoeDecoderLayer", False), ("GptOssDecoderLayer", True)])
def test_experts_that_are_skipped(case: str, inputs_first: bool, tmp_path: Path) -> None:
    CASES[case]().save_pretrained(tmp_path / "float")
    make_tokenizer().save_pretrained(tmp_path / "float")
    convert(tmp_path / "float", tmp_path / "m", hb.Config("q8_0", compute="float", skip=["*.experts*"]))
    if inputs_first:
        with pytest.raises(UnsupportedError, match="the weights of the experts are not quantized"):
            LanguageModel.open(tmp_path / "m")
        return
    opened = LanguageModel.open(tmp_path / "m")
    assert distance(opened.logits(IDS), transformers_logits(load(tmp_path / "m"))) < FLOAT
    assert {name.rpartition(".")[2] for name in opened.report().in_floating_point} == {"gate_up_proj", "down_proj"}
