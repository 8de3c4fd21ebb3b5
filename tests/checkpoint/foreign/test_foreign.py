"""Folders and files that other projects wrote: what is loaded, what they may lie about, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import random_codes
from test_hostile_files import outcome, places, with_value
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from halfbyte.checkpoint import convert, describe, export, load, load_tensors
from halfbyte.checkpoint.foreign.folders import _matches
from halfbyte.errors import CheckpointError
from halfbyte.formats import Codes, as_format
from halfbyte.io import gguf
from halfbyte.io.weights import compressed_tensors, gptq
from halfbyte.nn.modules.experts import QuantExperts
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.quantizers import absmax

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
NONSENSE: tuple[Any, ...] = (None, True, -1, 0, 3, 1 << 70, 1.5, "", "x" * 99, [], {}, {"a": {}})
PROJ = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    config = LlamaConfig(**SMALL, vocab_size=64, max_position_embeddings=32, tie_word_embeddings=False)
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(root / "float")
    convert(root / "float", root / "halfbyte", "int4_g16_zp")
    convert(root / "float", root / "symmetric", "int4_g16")
    for kind in ("awq", "gptq", "compressed-tensors"):
        export(root / "halfbyte", root / kind, kind)
    export(root / "symmetric", root / "gptq-v1", "gptq")
    export(root / "symmetric", root / "m.gguf", "gguf")
    return root


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(20)[None]).logits.float()
    return found


def copied(source: Path, target: Path, **settings: Any) -> Path:
    """A copy whose quantization_config says something else."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] |= settings
    (target / "config.json").write_text(json.dumps(config))
    return target


def edited(folder: Path, **tensors: Tensor | None) -> Path:
    """Some tensors of a folder replaced, added or removed."""
    file = folder / "model.safetensors"
    state = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, file, {"format": "pt"})
    return folder


# What is loaded


@pytest.mark.parametrize("kind", ["awq", "gptq", "compressed-tensors"])
def test_a_folder_loads_as_a_model(kind: str, folders: Path) -> None:
    model = load(folders / kind)
    assert isinstance(model.get_submodule(PROJ), QuantLinear)
    assert model.dtype == torch.float16
    assert torch.allclose(logits(model), logits(load(folders / "halfbyte")), rtol=0, atol=2e-3)  # the head is plain in AWQ
    names = {row.name for row in describe(folders / kind).quantized}
    assert PROJ in names


def test_symmetric_points_are_left_out(folders: Path) -> None:
    codes = load_tensors(folders / "gptq-v1")[f"{PROJ}.weight"]
    assert isinstance(codes, Codes)
    assert str(codes.format) == "int4_g16"


def test_gptq_of_a_version_that_it_is_not(folders: Path, tmp_path: Path) -> None:
    """A file of version 1 that says 2: its points are all 7, which nobody's symmetric codes have."""
    lying = copied(folders / "gptq-v1", tmp_path / "lying", checkpoint_format="gptq_v2")
    assert torch.equal(logits(load(lying)), logits(load(folders / "gptq-v1")))
    assert any("GPTQ version 2, the zero points are those of version 1" in note for note in describe(lying).notes)
    assert not describe(folders / "gptq-v1").notes


def test_a_module_that_is_not_quantized(folders: Path, tmp_path: Path) -> None:
    folder = copied(folders / "awq", tmp_path / "m")
    weight = torch.randn(64, 32).half()
    parts: dict[str, Tensor | None] = {f"{PROJ}.{part}".replace(".", "__"): None for part in ("qweight", "qzeros", "scales")}
    edited(folder, **parts, **{f"{PROJ}.weight".replace(".", "__"): weight})
    model = load(folder)
    assert torch.equal(model.get_submodule(PROJ).weight, weight)  # type: ignore[arg-type]


def test_names_of_older_versions(folders: Path, tmp_path: Path) -> None:
    """transformers' renamings reach quantized weights too: a superfluous prefix here."""
    folder = copied(folders / "awq", tmp_path / "m")
    state = load_file(folder / "model.safetensors")
    save_file({f"model.{n}" if n.startswith("model.") else n: t for n, t in state.items()}, folder / "model.safetensors")
    result = outcome(lambda: logits(load(folder)))
    assert result is None or torch.equal(result, logits(load(folders / "awq")))  # type: ignore[arg-type]


def test_a_folder_without_an_architecture(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "gptq", tmp_path / "m")
    settings = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    (tmp_path / "m" / "config.json").write_text(json.dumps({"quantization_config": settings}))
    tensors = load_tensors(tmp_path / "m")
    assert isinstance(tensors[f"{PROJ}.weight"], Codes)


OLD_SETTINGS = {
    "gptq": ("quantize_config.json", {"bits": 4, "group_size": 16, "damp_percent": 0.01, "desc_act": False, "sym": False}),
    "awq": ("quant_config.json", {"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"}),
}


@pytest.mark.parametrize("kind", OLD_SETTINGS)
def test_folders_that_say_it_beside_config_json(kind: str, folders: Path, tmp_path: Path) -> None:
    """As AutoGPTQ and AutoAWQ wrote them before transformers read such models; halfbyte's own files of GPTQ are asymmetric: version 2."""
    name, settings = OLD_SETTINGS[kind]
    folder = tmp_path / "old"
    shutil.copytree(folders / kind, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-16g.safetensors")
    (folder / name).write_text(json.dumps(settings | ({"checkpoint_format": "gptq_v2"} if kind == "gptq" else {})))
    assert torch.equal(logits(load(folder)), logits(load(folders / kind)))
    export(folder, tmp_path / "new", "compressed-tensors")
    assert not (tmp_path / "new" / name).exists(), "it says nothing of the copy"
    (folder / name).write_text(json.dumps(settings | {"bits": 3, "w_bit": 3}))
    with pytest.raises(CheckpointError, match="says 3 bits"):
        load(folder)
    (folder / name).write_text("[1]")
    with pytest.raises(CheckpointError, match=name):
        load(folder)


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_autoround_writes_the_layouts_of_others(kind: str, folders: Path, tmp_path: Path) -> None:
    settings = {"quant_method": "auto-round", "packing_format": f"auto_round:auto_{kind}", "extra_config": {PROJ: {"bits": 4}}}
    folder = copied(folders / kind, tmp_path / "m", **settings)
    if kind == "gptq":
        names = load_file(folder / "model.safetensors")
        edited(folder, **{name.replace(".", "__"): None for name in names if name.endswith("g_idx")})
    assert torch.equal(logits(load(folder)), logits(load(folders / kind)))
    with pytest.raises(CheckpointError, match="quant_method 'auto-round'"):
        load(copied(folders / kind, tmp_path / "own", **settings | {"packing_format": "auto_round:own"}))


def test_modules_with_settings_of_their_own(folders: Path, tmp_path: Path) -> None:
    """GPTQ's `dynamic`: 8 bits for one, another block size for another."""
    shutil.copytree(folders / "gptq", tmp_path / "m")
    changed = {"mlp.up_proj": ("int8_g16_zp", {"bits": 8}), "mlp.down_proj": ("int4_g32_zp", {"group_size": 32})}
    state = load_file(tmp_path / "m" / "model.safetensors")
    wanted = {}
    for name, (fmt, _) in changed.items():
        module = f"model.layers.0.{name}"
        old = load_tensors(folders / "gptq")[f"{module}.weight"]
        assert isinstance(old, Codes)
        wanted[module] = random_codes(as_format(fmt), old.shape)
        state |= {f"{module}.{part}": tensor for part, tensor in gptq.write(wanted[module], None, 2).items()}
    save_file(state, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["dynamic"] = {
        f"+:.*{name}$".replace(".mlp", r"\.mlp"): settings for name, (_, settings) in changed.items()
    }
    path.write_text(json.dumps(config))
    tensors = load_tensors(tmp_path / "m")
    for module, codes in wanted.items():
        found = tensors[f"{module}.weight"]
        assert isinstance(found, Codes)
        assert found.format == codes.format
        assert torch.equal(found.data, codes.data)


@pytest.mark.parametrize("odd", ["none", "one of w1", "order"])
def test_experts_are_stacked_as_codes(odd: str, tmp_path: Path) -> None:
    """The files hold experts one by one, transformers stacks them: codes too, unless one of a stack is of another kind."""
    torch.manual_seed(0)
    sizes = {**SMALL, "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 64}
    model = MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "m")
    file, path = tmp_path / "m" / "model.safetensors", tmp_path / "m" / "config.json"
    plain = load_file(file)
    state: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        if ".experts." in name or "_proj" in name:
            if odd == "one of w1" and "experts.1.w1" in name:
                state[name] = tensor
                continue
            codes, order = absmax(tensor, as_format("int4_g16_zp")), None
            plain[name] = codes.dequantize()
            if odd == "order" and "experts.0.w2" in name:
                order = torch.randperm(tensor.shape[1], generator=torch.Generator().manual_seed(0)).int()
                plain[name] = plain[name][:, order.long().argsort()]
            state |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in gptq.write(codes, order, 2).items()}
        else:
            state[name] = tensor
    assert len(state) > len(plain)
    save_file(plain, file, {"format": "pt"})
    expected = logits(MixtralForCausalLM.from_pretrained(tmp_path / "m").eval())
    save_file(state, file, {"format": "pt"})
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "checkpoint_format": "gptq_v2"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    loaded = load(tmp_path / "m")
    for module in loaded.modules():
        if isinstance(module, QuantLinear | QuantExperts):
            module.compute = "float"
    assert torch.allclose(logits(loaded), expected, rtol=1e-4, atol=1e-5)
    report = describe(tmp_path / "m")
    stacks = {row.name.rpartition(".")[2] for row in report.quantized if row.kind == "Experts"}
    assert stacks == {"none": {"gate_up_proj", "down_proj"}, "one of w1": {"down_proj"}, "order": {"gate_up_proj"}}[odd]
    reasons = [row.reason or "" for row in report.kept]
    assert sum("GPTQ, dequantized: transformers keeps it fused" in reason for reason in reasons) == (odd != "none")
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(MixtralForCausalLM.from_pretrained(tmp_path / "again").eval()), logits(loaded))


# What is refused


def test_groups_of_compressed_tensors_that_do_not_divide_the_inputs(folders: Path, tmp_path: Path) -> None:
    codes = random_codes(as_format("int4_g24"), (64, 32))
    parts = {f"{PROJ}.{name}".replace(".", "__"): tensor for name, tensor in compressed_tensors.write(codes, None, packed=True).items()}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 24}
    settings = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    folder = copied(folders / "compressed-tensors", tmp_path / "m", **settings)
    found = load_tensors(edited(folder, **parts, **{f"{PROJ}.weight_zero_point".replace(".", "__"): None}))[f"{PROJ}.weight"]
    assert isinstance(found, Codes)
    assert str(found.format) == "int4_g24"
    assert torch.equal(found.dequantize(torch.float64), codes.dequantize(torch.float64))


def transforms(*places: str) -> dict[str, Any]:
    """compressed-tensors' transform_config with Hadamard transforms at these places."""
    return {"config_groups": {"R": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": place} for place in places]}}}


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("awq", {"quant_method": "quanto"}, "halfbyte reads awq, gptq.*dequantize it with transformers and quanto"),
        ("awq", {"quant_method": None}, "halfbyte reads awq, gptq"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("awq", {"bits": 3}, "3 bits"),
        ("awq", {"group_size": 0}, "group_size 0"),
        ("awq", {"group_size": 32}, "the checkpoint is damaged"),
        ("gptq", {"bits": 2}, "says 2 bits"),
        ("gptq", {"bits": 8}, "the files, but config.json makes it|the checkpoint is damaged"),
        ("gptq", {"group_size": 64}, "the checkpoint is damaged"),
        ("compressed-tensors", {"config_groups": 3}, "not an object of objects"),
        ("compressed-tensors", {"config_groups": {}}, "packed in None bits"),
        ("compressed-tensors", {"transform_config": transforms("weight_output", "input")}, "changes values at 'input' as the model runs"),
    ],
)
def test_what_a_config_says_is_checked(kind: str, settings: dict[str, Any], message: str, folders: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(copied(folders / kind, tmp_path / "m", **settings))


FOR_EVER = ["(a|a)*c", "(a?){40}a{40}", "a?" * 30 + "a" * 30, "(?:a|a)" * 60, "a*" * 20 + "b", ".*" * 4000]
FOR_EVER += ["(?x)(a|a#)\n|a#(\n)*c", "(?:(a*)|b)*c", "(a|a[)])*c", "((a|(a)))*c"]
FOR_EVER += ["(?=" + "a*" * 20 + "b)", "(?:a(?!b)|a)*c", "(?:a(?=b|a)|a)*c", "(?:a(?=a)?|a)*c"]


@pytest.mark.parametrize("pattern", FOR_EVER)
def test_patterns_that_would_take_for_ever(pattern: str) -> None:
    """Python's `re` tries 2^30 ways or more to match such a name."""
    with pytest.raises(CheckpointError, match=r"^config\.json has the pattern .* may take exponential time: write it"):
        _matches(pattern, "a" * 40)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (r".*\.(?:mlp|self_attn)\.(q|k|v|o|gate|up|down)_proj", True),
        (r"^(?!.*up_proj).*", False),
        (r"model\.layers\.([0-9]|[1-2][0-9])\..*up_.*$", True),
        (r"(?i)MODEL\.layers\.\d+\.mlp.*", True),
        (r"(.*\.)?up_proj", True),
        (r"^(?!.*(?:self_attn\.(?:q_proj|k_proj|v_proj|b_proj)|vision_tower\..*|mm_projector\..*)$).*$", True),
        ("|".join(rf"model\.layers\.{i}\.mlp\.(gate|up|down)_proj" for i in range(200)), True),
        (r"(?!.*(?:mtp|stages)\.\d+\.)(?!.*visual.*).*(?:mlp|ffn)\.\d*(?:gate_proj|up_proj|down_proj|w[123]).*$", True),
        (r"model\.layers\.(\d)+\..*", True),
        (r"(?:(?!up_proj).)*$", False),
        (r"(?i:MODEL).*", True),
        (r"model[\])*]?\..*", True),
        (r"[(*]", False),
        ("(x", False),
    ],
)
def test_usual_patterns_of_modules(pattern: str, matches: bool) -> None:
    assert _matches(pattern, PROJ) is matches


def test_transforms_of_stored_weights_are_read(folders: Path, tmp_path: Path) -> None:
    loaded = load(copied(folders / "compressed-tensors", tmp_path / "m", transform_config=transforms("weight_output", "weight_input")))
    assert torch.equal(logits(loaded), logits(load(folders / "compressed-tensors")))


def test_tensors_without_which_the_numbers_would_be_others(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "awq", tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"act_fn\.scales divides an activation function"):
        load(edited(tmp_path / "a", model__layers__0__mlp__act_fn__scales=torch.full((64,), 2.0)))
    shutil.copytree(folders / "awq", tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"no file has .*up_proj\.weight, which .* its qzeros, scales are not read"):
        load(edited(tmp_path / "c", **{f"{PROJ}.qweight".replace(".", "__"): None}))
    shutil.copytree(folders / "gptq", tmp_path / "b")
    parts = {f"{PROJ}.{part}".replace(".", "__"): None for part in ("qweight", "qzeros", "scales", "g_idx")}
    marlin = {f"{PROJ}.{part}".replace(".", "__"): torch.zeros(4) for part in ("B", "s")}
    with pytest.raises(CheckpointError, match=r"no file has .*up_proj\.weight, which .* its B, s are not read, take another form"):
        load(edited(tmp_path / "b", **parts, **marlin))


def test_missing_shards(folders: Path, tmp_path: Path) -> None:
    export(folders / "symmetric", tmp_path / "m", "gptq", shard_bytes=5000)
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 2
    assert torch.equal(logits(load(tmp_path / "m")), logits(load(folders / "gptq-v1")))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{shards[1].name}"):
        load(tmp_path / "m")


@pytest.mark.parametrize("kind", ["awq", "gptq", "compressed-tensors"])
def test_nonsense_in_a_config(kind: str, folders: Path, tmp_path: Path) -> None:
    """Any value may be nonsense: the model is refused with one line, or is the same."""
    good = logits(load(folders / kind))
    shutil.copytree(folders / kind, tmp_path / "m")
    config = json.loads((folders / kind / "config.json").read_text())
    for path in places(config["quantization_config"], ("quantization_config",)):
        for value in NONSENSE[:: 1 if len(path) < 3 else 3]:
            (tmp_path / "m" / "config.json").write_text(json.dumps(with_value(config, path, value)))
            found = outcome(lambda: load(tmp_path / "m"))
            if isinstance(found, nn.Module) and "quantization_config" in path and value:
                assert logits(found).shape == good.shape, (path, value)


def test_nonsense_in_the_metadata_of_a_gguf_file(folders: Path, tmp_path: Path) -> None:
    file = gguf.read_header(folders / "m.gguf")
    types = {name: (entry.kind, entry.shape) for name, entry in file.entries.items()}
    good = logits(load(folders / "m.gguf"))

    def write(metadata: dict[str, Any]) -> Path:
        path = tmp_path / "m.gguf"
        path.unlink(missing_ok=True)
        writer = gguf.Writer(path, metadata, types)
        for name, entry in file.entries.items():
            with open(entry.place.path, "rb") as source:
                source.seek(entry.place.offset)
                content = torch.frombuffer(bytearray(source.read(entry.place.spec.nbytes)), dtype=entry.place.spec.dtype)
            writer.write(name, content.reshape(entry.place.spec.shape))
        writer.finish()
        return path

    metadata = {key: value if isinstance(value, int | float | str) else list(value) for key, value in file.metadata.items()}
    assert torch.equal(logits(load(write(metadata))), good)
    for key in metadata:
        for value in (None, 0, -1, 7, 1 << 40, 1e30, "x", ["x"], [1.5, 2.5], [], True):
            changed = {k: v for k, v in metadata.items() if k != key} | ({} if value is None else {key: value})
            outcome(lambda changed=changed: load(write(changed)))  # type: ignore[misc]
