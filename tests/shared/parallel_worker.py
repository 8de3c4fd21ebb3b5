"""One of several processes that test a model which they share: python parallel_worker.py RANK|all COUNT FOLDER cpu|cuda [SCENARIO …]

Runs every scenario below, or those that are named, on gloo or, each process on a GPU of its own, on NCCL, and writes what became of each
to FOLDER/<rank>.json: "" or what went wrong. A scenario that fails in one process leaves the others waiting, so it is the last; nothing
waits longer than the timeout of the process group. With "all", on CPUs, the processes are children of one that has imported everything.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import kernel_cache
import pytest
import torch
import transformers
from torch import distributed, nn
from transformers.quantizers.base import HfQuantizer

import halfbyte as hb
from halfbyte.decoder import gpu_layer
from halfbyte.errors import ArgumentError, HalfbyteError, UnsupportedError
from halfbyte.integrations.transformers.decoder import gpu_run
from halfbyte.integrations.transformers.quantizer import HalfbyteQuantizer
from halfbyte.integrations.transformers.text import ready
from halfbyte.nn.fused import FusedLinear, fuse_
from halfbyte.nn.modules.quantized import QuantLinear, QuantModule
from halfbyte.nn.parallel.all_reduce import LARGEST, all_reduce, prepare
from halfbyte.nn.parallel.parallelize import part_of

HERE = Path(__file__).parents[1]
IDS = torch.randint(0, 300, (2, 7), generator=torch.Generator().manual_seed(1))
FORMATS = {"blocks": "int4_g16_zp", "rows": "int8_channel"}  # of which columns may be cut, and not


def main(rank: int, count: int, folder: Path, device: str, names: list[str]) -> None:
    kernel_cache.by_ir()
    how: dict[str, Any] = {"rank": rank, "world_size": count, "timeout": timedelta(seconds=500)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}  # as torchrun does
    if device == "cuda":
        torch.cuda.set_device(rank)
        how["device_id"] = torch.device("cuda", rank)
    distributed.init_process_group("gloo" if device == "cpu" else "nccl", init_method=f"file://{folder}/meet", **how)
    mesh = distributed.init_device_mesh(device, (count,))
    results: dict[str, str] = {}
    for name, scenario in SCENARIOS.items():
        if (name in CPU_ALONE and device != "cpu") or (names and name not in names):
            continue
        try:
            scenario(mesh, folder)
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
        if results[name]:
            os._exit(1)  # the others must not wait for what will not come
    distributed.destroy_process_group()


def on_one(folder: Path, mesh: Any) -> Any:
    """The whole model, on this process's device."""
    return hb.load(folder, mesh.device_type)


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(ids.to(model.device)).logits
    return out


def text(model: Any, **settings: Any) -> list[int]:
    prompt = IDS[:1, :4].to(model.device)
    with torch.inference_mode():
        return model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0, **settings)[0].tolist()  # type: ignore[no-any-return]


def in_float64(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    """What the model computes with its weights as they are and no rounding of float32."""
    whole = deepcopy(model).dequantize(torch.float64).double()
    whole.set_experts_implementation("eager")  # the others know no float64
    return logits(whole, ids)


def a_checkpoint_is_loaded_in_parts(mesh: Any, folder: Path) -> None:
    for kind in FORMATS:
        alone, shared = on_one(folder / kind, mesh), hb.load(folder / kind, mesh=mesh)
        whole, here = (sum(m.codes().nbytes for m in model.modules() if isinstance(m, QuantModule)) for model in (alone, shared))
        assert here < whole * (1 / mesh.size() + 0.16), "heads, blocks and key heads do not come out even"
        exactly, expected, actual = in_float64(alone), logits(alone), logits(shared)
        # Sums in another order are as good as the order of one process, give or take.
        assert (actual - exactly).abs().max() <= 3 * (expected - exactly).abs().max(), kind
        assert torch.equal(actual, same_everywhere(actual)), "all processes have the same bits"
        assert text(shared) == text(alone)


def same_everywhere(x: torch.Tensor) -> torch.Tensor:
    """What the first process has."""
    first = x.clone()
    distributed.broadcast(first, 0)
    return first


def rows_alone_give_the_same_bits(mesh: Any, folder: Path) -> None:
    for kind in FORMATS:
        alone, shared = hb.load(folder / kind), hb.load(folder / kind, mesh=mesh, exact=True)
        for module in shared.modules():
            assert (part := part_of(module)) is None or not part.cut.parts or part.cut.along == "outputs"
        for model in (alone, shared):
            for module in model.modules():
                if isinstance(module, QuantLinear):
                    module.compute = "int8"
        assert torch.equal(logits(shared), logits(alone))
        assert text(shared, cache_implementation="static") == text(alone, cache_implementation="static")


def a_model_in_memory_is_spread(mesh: Any, folder: Path) -> None:
    """The same parts as those that are read from files; fused and compiled they compute the same."""
    alone = on_one(folder / "blocks", mesh)
    loaded, spread = hb.load(folder / "blocks", mesh=mesh), hb.parallelize_(deepcopy(alone), mesh)
    for (name, one), (_, other) in zip(loaded.named_modules(), spread.named_modules(), strict=True):
        assert part_of(one) == part_of(other), name
        if isinstance(one, QuantModule) and isinstance(other, QuantModule):
            assert torch.equal(one.packed_data, other.packed_data), name
        for parameter, (_, value) in zip(one.parameters(recurse=False), other.named_parameters(recurse=False), strict=True):
            assert torch.equal(parameter, value), name
    wanted = logits(spread)
    before = [row.after for row in hb.parallel_report(spread).rows]
    fuse_(spread)
    assert any(isinstance(module, FusedLinear) and part_of(module) for module in spread.modules())
    # On a GPU another shape may have another kernel; torch's own SiLU rounds rows that do not follow each other otherwise where AVX-512 is.
    exactly = in_float64(alone)
    assert (logits(spread) - exactly).abs().max() <= 3 * (wanted - exactly).abs().max()
    assert before == [row.after for row in hb.parallel_report(loaded).rows]
    layer, x = loaded.model.layers[0].mlp, torch.randn(2, 3, 64, device=mesh.device_type)
    with pytest.raises(UnsupportedError, match="gradients do not cross processes"):
        layer(x.clone().requires_grad_())
    if mesh.size() > 2:  # compiling takes its time
        return
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
        embed = torch.compile(loaded.model.embed_tokens, fullgraph=True, backend="aot_eager")
        ids = IDS.to(x.device)
        assert torch.equal(embed(ids), alone.model.embed_tokens(ids))
        assert embed(torch.tensor([-1, 999], device=x.device)).isnan().all()


def experts_are_cut(mesh: Any, folder: Path) -> None:
    """Parts of multiples of 32, since torch rounds the gate otherwise at the end of a row that is none."""
    for name in ("mixtral", "qwen3_moe"):
        alone = on_one(folder / name, mesh)
        exactly, expected = in_float64(alone), logits(alone)
        for exact in (False, True):
            actual = logits(hb.load(folder / name, mesh=mesh, exact=exact))
            if exact and mesh.device_type == "cpu":
                assert torch.equal(actual, expected), name
            assert torch.equal(actual, same_everywhere(actual)), "or they choose different experts"
            assert (actual - exactly).abs().max() <= 3 * (expected - exactly).abs().max(), (name, exact)


def a_custom_plan(mesh: Any, folder: Path) -> None:
    """Any module; biases are added once; what a plan does not name stays whole."""
    torch.manual_seed(5)
    net = nn.ModuleDict({"up": nn.Linear(64, 200), "down": nn.Linear(200, 48), "whole": nn.Linear(48, 5), "odd": nn.Linear(5, 7)}).to(
        mesh.device_type
    )

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return net["odd"](net["whole"](net["down"](net["up"](x).relu()))).double()  # type: ignore[no-any-return]

    x, plan = torch.randn(3, 64).to(mesh.device_type), {"up": "colwise", "down": "rowwise", "odd": "rowwise_split_input"}
    for fmt in (None, hb.Config("int4_g40_offset", compute="float"), hb.Config("int8_channel"), hb.Config("int4_g7", compute="float")):
        model = deepcopy(net) if fmt is None else hb.quantize_(deepcopy(net), fmt)
        wanted = run(model, x)
        shared = hb.parallelize_(deepcopy(model), mesh, plan)
        # The error bound of nn/parallel/parallelize.py for each of two sums of products that are at most `scale` in sum, in float32.
        scale = float((run_abs(model, x)).max())
        assert (run(shared, x) - wanted).abs().max() <= 2 * (200 + mesh.size()) * 2**-24 * scale, fmt
        rows = {row.name: row for row in hb.parallel_report(shared).rows}
        assert rows["whole"].how == "whole"
        assert rows["whole"].why == "the plan does not name it"
        assert "of 200" in rows["up"].how


def run_abs(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A bound of the sums of absolute products, through all layers."""
    x = x.abs()
    for name in ("up", "down", "whole", "odd"):
        module = net[name]
        x = x @ module.weight.detach().float().abs().T + module.bias.abs()
    return x.detach()


def what_is_refused(mesh: Any, folder: Path) -> None:
    alone = hb.load(folder / "blocks")
    shared = hb.load(folder / "blocks", mesh=mesh)
    square = distributed.init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("a", "b"))
    calls: list[tuple[Callable[[], object], type[HalfbyteError], str]] = [
        (lambda: shared(torch.tensor([[0, 320]])), ArgumentError, r"lie in 0 … 319, got 0 … 320"),
        (lambda: hb.save(shared, folder / "no"), UnsupportedError, "each process has only a part of the model"),
        (lambda: shared.save_pretrained(folder / "no"), UnsupportedError, "each process has only a part of the model"),
        (lambda: hb.parallelize_(shared, mesh), ArgumentError, "distributed over processes already"),
        (lambda: hb.parallel_report(alone), ArgumentError, "not distributed over processes"),
        (lambda: hb.parallelize_(alone, mesh, {"*.upp_proj": "colwise"}), ArgumentError, "'[*].upp_proj' matches no module: .*up_proj"),
        (lambda: hb.parallelize_(alone, mesh, {"*.up_proj": "sideways"}), UnsupportedError, "up_proj is one of colwise.* got 'sideways'"),
        (lambda: hb.parallelize_(nn.Sequential(nn.Linear(2, 2)), mesh), ArgumentError, "Sequential has no tp_plan"),
        (lambda: hb.parallelize_(alone, square), ArgumentError, r'the one called "tp", got 2 dimensions'),
        (lambda: hb.load(folder / "blocks", exact=True), ArgumentError, "pass their mesh"),
        (lambda: hb.load(folder / "blocks", "cuda", mesh=mesh), ArgumentError, "a mesh of cpu devices"),
        (lambda: (fuse_(alone), hb.parallelize_(alone, mesh)), ArgumentError, "call parallelize_ first, then fuse_"),
    ]
    for call, error, words in calls:
        with pytest.raises(error, match=words):
            call()
    assert not (folder / "no" / "model.safetensors").exists()


def operands_in_parts_are_refused(mesh: Any, folder: Path) -> None:
    """A DTensor looks like a tensor of the right shape and device, and has no memory that a kernel could read."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def spread(*shape: int) -> Any:
        return distribute_tensor(torch.ones(shape, device=mesh.device_type), mesh, [Shard(len(shape) - 1)])

    packed = hb.pack(hb.quantize(torch.ones(64, 64), "int8_channel"), mesh.device_type)
    stacked = hb.pack(hb.quantize(torch.ones(2, 64, 64), "int8_channel"), mesh.device_type)
    image = hb.pack_conv(hb.quantize_conv(torch.ones(64, 64, 1, 1), "int8_channel"), 1, device=mesh.device_type)
    x, experts = torch.ones(3, 64, device=mesh.device_type), torch.zeros(3, dtype=torch.int64, device=mesh.device_type)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: hb.linear(x, packed, spread(64)), "bias"),
        (lambda: hb.linear(x, packed, nn.Parameter(spread(64))), "bias"),
        (lambda: hb.linear(x, packed, residual=spread(3, 64)), "residual"),
        (lambda: hb.linear(distribute_tensor(x, mesh, [Replicate()]), packed), "input"),
        (lambda: hb.grouped_linear(x, stacked, experts, spread(2, 64)), "bias"),
        (lambda: hb.conv2d(x[..., None, None], image, spread(64)), "bias"),
        (lambda: hb.conv2d(x[..., None, None], image, residual=spread(3, 64, 1, 1)), "residual"),
    ]
    # Also where a call that fits has been looked up before.
    for warm in (x, x.clone()):
        hb.linear(warm, packed, torch.ones(64, device=x.device), residual=x)
    for graded in (False, True):
        for call, what in calls:
            with torch.set_grad_enabled(graded), pytest.raises(ArgumentError, match=rf"the {what} is a plain tensor, got a DTensor"):
                call()


def transformers_asks_for_it(mesh: Any, folder: Path) -> None:
    """tp_plan="auto", of a quantized folder and of a float one that is quantized as it loads."""
    build = transformers.AutoModelForCausalLM.from_pretrained
    asks, refused = getattr(HfQuantizer, "update_parallel_plan", None), "cuts a model without asking its quantizer"
    with pytest.MonkeyPatch.context() as older:  # before 5.21 nothing was asked; before 5.16 the config said nothing either
        if asks is not None:
            older.setattr(HalfbyteQuantizer, "update_parallel_plan", asks)
            with pytest.raises(UnsupportedError, match=refused):
                build(folder / "blocks", tp_plan="auto")
            older.delattr(HfQuantizer, "update_parallel_plan")
        with pytest.raises(UnsupportedError, match=refused):
            build(folder / "blocks", tp_plan="auto")
    if asks is None:
        return
    alone = on_one(folder / "blocks", mesh)
    wanted = logits(hb.parallelize_(alone, mesh))
    actual = build(folder / "blocks", tp_plan="auto")
    assert torch.equal(logits(actual), wanted)
    assert hb.parallel_report(actual).count == mesh.size()
    built = build(folder / "float", tp_plan="auto", quantization_config=hb.HalfbyteConfig("q8_0", compute="float"))
    assert any(part_of(module) for module in built.modules())
    whole = build(folder / "float", device_map=mesh.device_type, quantization_config=hb.HalfbyteConfig("q8_0", compute="float"))
    assert text(built, cache_implementation="static") == text(whole, cache_implementation="static")
    with pytest.raises(UnsupportedError, match="each process has only a part of the model"):
        built.save_pretrained(folder / "no")


def tensors_are_added(mesh: Any, folder: Path) -> None:
    """Of any dtype, size and place in memory; whole numbers, whose sums are exact."""
    group, rank, count = mesh.get_group().group_name, mesh.get_local_rank(), mesh.size()
    prepare(group, mesh.device_type)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for size in (0, 1, 3, 8, 4096, LARGEST // 4, LARGEST):
            whole = torch.arange(size + 1, device=mesh.device_type).remainder_(16)
            x = (whole * (rank + 1)).to(dtype)[1:]  # not where a kernel would like it
            total = all_reduce(x, group)
            assert torch.equal(total, (whole[1:] * (count * (count + 1) // 2)).to(dtype)), (dtype, size)
            assert torch.equal(x, (whole[1:] * (rank + 1)).to(dtype)), "what is added stays"
    wide = torch.full((6, 10), rank + 1.0, device=mesh.device_type)
    assert torch.equal(all_reduce(wide.T[1:8], group), torch.full((7, 6), count * (count + 1) / 2, device=wide.device))


TOKENS = torch.randint(0, 320, (2, 9), generator=torch.Generator().manual_seed(2))


def decoded(model: Any, forward: Any) -> torch.Tensor:
    """Logits [b, 4, v] of the last four TOKENS, each a step of its own after a prompt of the others."""
    cache, ids = transformers.StaticCache(config=model.config, max_cache_len=16), TOKENS.to(model.device)
    with torch.inference_mode():
        found = [model(ids[:, :6], past_key_values=cache, use_cache=True).logits[:, -1]]
        for at in range(6, 9):
            position = torch.full((1, 1), at, device=model.device)
            out = forward(input_ids=ids[:, at : at + 1], position_ids=position, past_key_values=cache)
            found.append(out.logits[:, -1].clone())
    return torch.stack(found, 1)


def one_token_in_few_kernels(mesh: Any, folder: Path) -> None:
    """Decoder layers as `generate` arranges them, norms and additions in the products; on GPUs in bfloat16, and as graphs."""
    calls = []
    attend, gpu_run.DEVICES = gpu_layer.attend, ("cpu", "cuda")

    def counted(*arguments: Any, **settings: Any) -> torch.Tensor:
        calls.append(1)
        return attend(*arguments, **settings)

    gpu_layer.attend = counted
    dtype = torch.float32 if mesh.device_type == "cpu" else torch.bfloat16
    exactly = in_float64(on_one(folder / "wide", mesh), TOKENS)[:, 5:]
    for exact in (False, True):
        alone = ready(on_one(folder / "wide", mesh), mesh.device_type, dtype)
        shared = ready(hb.load(folder / "wide", mesh=mesh, exact=exact), mesh.device_type, dtype)
        expected = decoded(alone, alone)
        calls.clear()
        actual = decoded(shared, shared)
        assert len(calls) == 3 * 2, "each token in each layer"
        assert torch.equal(actual, same_everywhere(actual))
        assert (actual - exactly).abs().max() <= 3 * (expected - exactly).abs().max()
    gpu_layer.attend = attend
    if mesh.device_type == "cpu":
        return
    step = torch.compile(shared.forward, fullgraph=True, dynamic=False, mode="reduce-overhead")
    for _ in range(2):  # compiled, captured and replayed
        actual = decoded(shared, step)
        assert torch.equal(actual, same_everywhere(actual))
        assert (actual - exactly).abs().max() <= 3 * (expected - exactly).abs().max()


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        tensors_are_added,
        a_checkpoint_is_loaded_in_parts,
        rows_alone_give_the_same_bits,
        a_model_in_memory_is_spread,
        experts_are_cut,
        one_token_in_few_kernels,
        a_custom_plan,
        operands_in_parts_are_refused,
        what_is_refused,
        transformers_asks_for_it,
    )
}
# What is the same for any number of processes: tested with two of them.
OF_TWO = ("operands_in_parts_are_refused", "what_is_refused", "transformers_asks_for_it")
CPU_ALONE = {"rows_alone_give_the_same_bits": "on GPUs shape chooses the kernel", "what_is_refused": "is the same on every device"}


def fork(count: int, folder: Path, device: str, names: list[str]) -> int:
    """Run `main` in `count` children; 0 where none of them failed. Nothing has started a thread yet, which a child would lack."""
    children = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            try:
                main(rank, count, folder, device, names)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    rest = int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:]
    if sys.argv[1] == "all":
        sys.exit(fork(*rest))
    main(int(sys.argv[1]), *rest)
