"""One of several processes that test a model which they share: python parallel_worker.py RANK COUNT FOLDER

Runs every scenario below on gloo and writes what became of each to FOLDER/<rank>.json: "" or what went wrong. A scenario that fails in one
process leaves the others waiting, so it is the last; nothing waits longer than the timeout of the process group.
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

import pytest
import torch
import transformers
from torch import distributed, nn

import halfbyte as hb
from halfbyte.errors import ArgumentError, HalfbyteError, UnsupportedError
from halfbyte.nn.fused import FusedLinear, fuse_
from halfbyte.nn.modules import QuantLinear, QuantModule
from halfbyte.nn.parallel import part_of

HERE = Path(__file__).parent
IDS = torch.randint(0, 300, (2, 7), generator=torch.Generator().manual_seed(1))
FORMATS = {"blocks": "int4_g16_zp", "rows": "int8_channel"}  # of which columns may be cut, and not


def main(rank: int, count: int, folder: Path) -> None:
    timeout = timedelta(seconds=150)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}  # as torchrun does
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count, timeout=timeout)
    mesh = distributed.init_device_mesh("cpu", (count,))
    results: dict[str, str] = {}
    for name, scenario in SCENARIOS.items():
        try:
            scenario(mesh, folder)
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
        if results[name]:
            os._exit(1)  # the others must not wait for what will not come
    distributed.destroy_process_group()


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(IDS).logits
    return out


def text(model: Any, **settings: Any) -> list[int]:
    prompt = IDS[:1, :4]
    with torch.inference_mode():
        return model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0, **settings)[0].tolist()  # type: ignore[no-any-return]


def in_float64(model: Any) -> torch.Tensor:
    """What the model computes with its weights as they are and no rounding of float32."""
    whole = deepcopy(model).dequantize(torch.float64).double()
    whole.set_experts_implementation("eager")  # the others know no float64
    return logits(whole)


def a_checkpoint_is_loaded_in_parts(mesh: Any, folder: Path) -> None:
    for kind in FORMATS:
        alone, shared = hb.load(folder / kind), hb.load(folder / kind, mesh=mesh)
        whole, here = (sum(m.codes().nbytes for m in model.modules() if isinstance(m, QuantModule)) for model in (alone, shared))
        assert here < whole * (1 / mesh.size() + 0.16), "heads, blocks and key heads do not come out even"
        exactly, theirs, mine = in_float64(alone), logits(alone), logits(shared)
        # Sums in another order are as good as the order of one process, give or take.
        assert (mine - exactly).abs().max() <= 3 * (theirs - exactly).abs().max(), kind
        assert torch.equal(mine, same_everywhere(mine)), "all processes have the same bits"
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
    alone = hb.load(folder / "blocks")
    loaded, spread = hb.load(folder / "blocks", mesh=mesh), hb.parallelize_(deepcopy(alone), mesh)
    for (name, one), (_, other) in zip(loaded.named_modules(), spread.named_modules(), strict=True):
        assert part_of(one) == part_of(other), name
        if isinstance(one, QuantModule) and isinstance(other, QuantModule):
            assert torch.equal(one.packed_data, other.packed_data), name
        for parameter, (_, value) in zip(one.parameters(recurse=False), other.named_parameters(recurse=False), strict=True):
            assert torch.equal(parameter, value), name
    wanted = logits(spread)
    before = [row.after for row in hb.parallel_report(spread).rows]
    assert fuse_(spread)
    assert any(isinstance(module, FusedLinear) and part_of(module) for module in spread.modules())
    assert torch.equal(logits(spread), wanted)
    assert before == [row.after for row in hb.parallel_report(loaded).rows]
    layer, x = loaded.model.layers[0].mlp, torch.randn(2, 3, 64)
    with pytest.raises(UnsupportedError, match="gradients do not cross processes"):
        layer(x.clone().requires_grad_())
    if mesh.size() > 2:  # compiling takes its time
        return
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
        embed = torch.compile(loaded.model.embed_tokens, fullgraph=True, backend="aot_eager")
        assert torch.equal(embed(IDS), alone.model.embed_tokens(IDS))
        assert embed(torch.tensor([-1, 999])).isnan().all()


def experts_are_cut(mesh: Any, folder: Path) -> None:
    """Parts of multiples of 16, since torch rounds the gate otherwise at the end of a row that is none."""
    for name in ("mixtral", "qwen3_moe"):
        alone = hb.load(folder / name)
        exactly, theirs = in_float64(alone), logits(alone)
        for exact in (False, True):
            mine = logits(hb.load(folder / name, mesh=mesh, exact=exact))
            if exact:
                assert torch.equal(mine, theirs), name
            assert (mine - exactly).abs().max() <= 3 * (theirs - exactly).abs().max(), (name, exact)


def a_plan_of_ones_own(mesh: Any, folder: Path) -> None:
    """Any module; biases are added once; what a plan does not name stays whole."""
    torch.manual_seed(5)
    net = nn.ModuleDict({"up": nn.Linear(64, 200), "down": nn.Linear(200, 48), "whole": nn.Linear(48, 5), "odd": nn.Linear(5, 7)})

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return net["odd"](net["whole"](net["down"](net["up"](x).relu()))).double()  # type: ignore[no-any-return]

    x, plan = torch.randn(3, 64), {"up": "colwise", "down": "rowwise", "odd": "rowwise_split_input"}
    for fmt in (None, hb.Config("int4_g40_offset", compute="float"), hb.Config("int8_channel"), hb.Config("int4_g7", compute="float")):
        model = deepcopy(net) if fmt is None else hb.quantize_(deepcopy(net), fmt)
        wanted = run(model, x)
        shared = hb.parallelize_(deepcopy(model), mesh, plan)
        # The error bound of nn/parallel.py for each of two sums of products that are at most `scale` in sum, in float32.
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
        (lambda: hb.save(shared, folder / "no"), UnsupportedError, "each process has a part of the model"),
        (lambda: shared.save_pretrained(folder / "no"), UnsupportedError, "each process has a part of the model"),
        (lambda: hb.parallelize_(shared, mesh), ArgumentError, "spread over processes already"),
        (lambda: hb.parallel_report(alone), ArgumentError, "not spread over processes"),
        (lambda: hb.parallelize_(alone, mesh, {"*.upp_proj": "colwise"}), ArgumentError, "'[*].upp_proj' matches no module: .*up_proj"),
        (lambda: hb.parallelize_(alone, mesh, {"*.up_proj": "sideways"}), UnsupportedError, "up_proj is one of colwise.* got 'sideways'"),
        (lambda: hb.parallelize_(nn.Sequential(nn.Linear(2, 2)), mesh), ArgumentError, "Sequential has no tp_plan"),
        (lambda: hb.parallelize_(alone, square), ArgumentError, r'the one called "tp", got 2 dimensions'),
        (lambda: hb.load(folder / "blocks", exact=True), ArgumentError, "pass the mesh"),
        (lambda: hb.load(folder / "blocks", "cuda", mesh=mesh), ArgumentError, "a mesh of cpu devices"),
        (lambda: (fuse_(alone), hb.parallelize_(alone, mesh)), ArgumentError, "call parallelize_ first, then fuse_"),
    ]
    for call, error, words in calls:
        with pytest.raises(error, match=words):
            call()
    assert not (folder / "no" / "model.safetensors").exists()


def transformers_asks_for_it(mesh: Any, folder: Path) -> None:
    """tp_plan="auto", of a quantized folder and of a float one that is quantized as it loads."""
    alone = hb.load(folder / "blocks")
    wanted = logits(hb.parallelize_(alone, mesh))
    build = transformers.AutoModelForCausalLM.from_pretrained
    mine = build(folder / "blocks", tp_plan="auto")
    assert torch.equal(logits(mine), wanted)
    assert hb.parallel_report(mine).count == mesh.size()
    made = build(folder / "float", tp_plan="auto", quantization_config=hb.HalfbyteConfig("q8_0", compute="float"))
    assert any(part_of(module) for module in made.modules())
    whole = build(folder / "float", quantization_config=hb.HalfbyteConfig("q8_0", compute="float"))
    assert text(made, cache_implementation="static") == text(whole, cache_implementation="static")
    with pytest.raises(UnsupportedError, match="each process has a part of the model"):
        made.save_pretrained(folder / "no")


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        a_checkpoint_is_loaded_in_parts,
        rows_alone_give_the_same_bits,
        a_model_in_memory_is_spread,
        experts_are_cut,
        a_plan_of_ones_own,
        what_is_refused,
        transformers_asks_for_it,
    )
}

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
