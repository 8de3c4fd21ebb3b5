"""One step of Flux-dev-shaped blocks or of SDXL's UNet on a GPU: halfbyte, bfloat16, torchao, bitsandbytes, quanto and GGUF.

    python benchmarks/diffusion_gpu.py --part flux --batch 1 --json flux.json

Weights are random and not 0. Blocks are compiled one by one (`--whole`: the model in one graph, which takes minutes for a UNet). Each
contender's step is one CUDA graph, so that no host overhead counts; steps take turns, every other round backwards. What cannot be captured
is launched from Python and marked. Errors are relative to the float32 model with the same weights. torchao leaves linear layers of fewer
than 17 rows, such as those of adaLN, in bf16: its int8 product takes no fewer. `weights_mb`: parameters, buffers and packed weights of the
model; `peak_mb`: those, and what a forward allocates at most in addition. `--tiny --device cpu` tries it all.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.timing import interleave

Step = Callable[[], Tensor]
Make = Callable[[nn.Module, Mapping[str, Any]], nn.Module]
BASELINE = "bf16, compiled"
_LEAST_ROWS = 17  # of torch._int_mm, by which torchao multiplies
_BLOCKS = {"flux": ("FluxTransformerBlock", "FluxSingleTransformerBlock"), "sdxl": ("BasicTransformerBlock", "ResnetBlock2D")}


class Flux(nn.Module):
    """Blocks of FLUX.1-dev at full width: image tokens [B, 4096, 64], text tokens [B, 512, 4096]."""

    def __init__(self, double: int, single: int, *, tiny: bool) -> None:
        from diffusers import FluxTransformer2DModel

        super().__init__()
        self.side, self.tokens, heads = (8, 16, 2) if tiny else (64, 512, 24)
        sizes = {"num_layers": double, "num_single_layers": single, "num_attention_heads": heads, "guidance_embeds": True}
        if tiny:
            sizes |= {"joint_attention_dim": 64, "pooled_projection_dim": 32}
        self.text = sizes.get("joint_attention_dim", 4096)
        self.pooled = sizes.get("pooled_projection_dim", 768)
        self.model = FluxTransformer2DModel(**sizes)

    def inputs(self, batch: int, dtype: torch.dtype) -> dict[str, Any]:
        """The arguments of one step."""
        tokens = self.side * self.side
        ids = torch.zeros(tokens, 3)
        ids[:, 1], ids[:, 2] = torch.arange(tokens) // self.side, torch.arange(tokens) % self.side
        return {
            "hidden_states": torch.randn(batch, tokens, 64, dtype=dtype),
            "encoder_hidden_states": torch.randn(batch, self.tokens, self.text, dtype=dtype),
            "pooled_projections": torch.randn(batch, self.pooled, dtype=dtype),
            "timestep": torch.full((batch,), 0.5, dtype=dtype),
            "guidance": torch.full((batch,), 3.5, dtype=torch.float32),
            "img_ids": ids.to(dtype),
            "txt_ids": torch.zeros(self.tokens, 3, dtype=dtype),
        }


class Sdxl(nn.Module):
    """The UNet of SDXL: latents [B, 4, 128, 128], text tokens [B, 77, 2048]."""

    def __init__(self, *, tiny: bool) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__()
        self.side, self.text = (16, 64) if tiny else (128, 2048)
        self.model = UNet2DConditionModel(
            sample_size=self.side,
            block_out_channels=(32, 64, 128) if tiny else (320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 1, 2) if tiny else (1, 2, 10),
            attention_head_dim=(1, 2, 4) if tiny else (5, 10, 20),
            cross_attention_dim=self.text,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )

    def inputs(self, batch: int, dtype: torch.dtype) -> dict[str, Any]:
        """The arguments of one step."""
        latents = torch.randn(batch, 4, self.side, self.side, dtype=dtype).to(memory_format=torch.channels_last)
        conditions = {"text_embeds": torch.randn(batch, 1280, dtype=dtype), "time_ids": torch.ones(batch, 6, dtype=dtype)}
        text = torch.randn(batch, 77, self.text, dtype=dtype)
        return {
            "sample": latents,
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": text,
            "added_cond_kwargs": conditions,
        }


# Contenders: each takes a copy of the bfloat16 model, on the device, and the arguments of a step, and may change the model.


def halfbyte(model: nn.Module, _: Mapping[str, Any], config: hb.Config) -> nn.Module:
    return hb.optimize_(hb.quantize_(model, config))


def torchao(model: nn.Module, call: Mapping[str, Any]) -> nn.Module:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # type: ignore[import-not-found]

    rows = rows_of_linears(model, call)
    quantize_(model, Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda module, _: rows.get(module, 0) >= _LEAST_ROWS)
    return model


def rows_of_linears(model: nn.Module, call: Mapping[str, Any]) -> dict[nn.Module, int]:
    """The fewest rows that each linear layer multiplies in a step, of those that it has."""
    rows: dict[nn.Module, int] = {}

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given = inputs[0].numel() // inputs[0].shape[-1]
        rows[module] = min(given, rows.get(module, given))

    hooks = [module.register_forward_pre_hook(count) for module in model.modules() if type(module) is nn.Linear]
    model(**call)
    for hook in hooks:
        hook.remove()
    return rows


def bitsandbytes(model: nn.Module, _: Mapping[str, Any], bits: int) -> nn.Module:
    import bitsandbytes as bnb  # type: ignore[import-not-found]

    def replaced(linear: nn.Linear) -> nn.Module:
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        weight = linear.weight.detach()
        if bits == 4:
            new = bnb.nn.Linear4bit(*sizes, compute_dtype=weight.dtype, quant_type="nf4", device="meta")
            new.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4").to(weight.device)
        else:
            new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, device="meta")
            new.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False).to(weight.device)
        new.bias = linear.bias
        return new  # type: ignore[no-any-return]

    return _replace_linears(model, replaced)


def quanto(model: nn.Module, _: Mapping[str, Any]) -> nn.Module:
    from optimum.quanto import freeze, qint8, quantize  # type: ignore[import-not-found]

    quantize(model, weights=qint8)
    freeze(model)
    return model


def gguf(model: nn.Module, _: Mapping[str, Any], name: str) -> nn.Module:
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
    from gguf import GGMLQuantizationType

    from halfbyte.formats.ggml import NUMBERS, TYPES
    from halfbyte.formats.ggml_encoding import encode

    kind = GGMLQuantizationType[name.upper()]

    def replaced(linear: nn.Linear) -> nn.Module:
        new = GGUFLinear(linear.in_features, linear.out_features, linear.bias is not None, linear.weight.dtype, "meta")
        blocks = encode(TYPES[NUMBERS[name]], hb.quantize(linear.weight.detach().float(), name))
        new.weight = GGUFParameter(blocks, quant_type=kind)
        new.bias = linear.bias
        return new

    return _replace_linears(model, replaced)


def _replace_linears(model: nn.Module, replaced: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.in_features % 64 == 0:
            model.set_submodule(name, replaced(module))
    return model


@dataclass(frozen=True)
class Contender:
    """make: of the bfloat16 model and the arguments of a step; compiled: whether its blocks are compiled."""

    make: Make
    compiled: bool = True


def contenders(part: str) -> Mapping[str, Contender]:
    """All contenders, by their names in the table. Convolutions have a scale for each image in W8A8, and stay in 16 bits elsewhere."""
    w8a8 = hb.Config("int8_channel", compute="int8", activation="image" if part == "sdxl" else "row")
    linears = hb.Config("int8_channel", skip=["*conv*"], compute="int8", activation="row")
    of_unets = {"halfbyte W8A8, convolutions bf16, compiled": Contender(partial(halfbyte, config=linears))} if part == "sdxl" else {}
    return {
        BASELINE: Contender(lambda model, _: model),
        "bf16, eager": Contender(lambda model, _: model, compiled=False),
        "halfbyte W8A8, compiled": Contender(partial(halfbyte, config=w8a8)),
        **of_unets,
        "halfbyte W8A8": Contender(partial(halfbyte, config=w8a8), compiled=False),
        "halfbyte W4A16, compiled": Contender(partial(halfbyte, config=hb.Config("int4_g128", compute="float"))),
        "halfbyte W4A8 rank 32, compiled": Contender(
            partial(halfbyte, config=hb.Config("int4_g128", low_rank=32, compute="int8", activation="row"))
        ),
        "halfbyte W4A8 per channel, rank 32, compiled": Contender(
            partial(halfbyte, config=hb.Config("int4_channel", low_rank=32, compute="int8", activation="row"))
        ),
        "torchao int8 dynamic, compiled": Contender(torchao),
        "bitsandbytes nf4": Contender(partial(bitsandbytes, bits=4), compiled=False),
        "bitsandbytes int8": Contender(partial(bitsandbytes, bits=8), compiled=False),
        "quanto int8 weights": Contender(quanto, compiled=False),
        "GGUF q8_0": Contender(partial(gguf, name="q8_0"), compiled=False),
        "GGUF q4_0": Contender(partial(gguf, name="q4_0"), compiled=False),
    }


def compile_(model: nn.Module, part: str, args: argparse.Namespace) -> None:
    """Compile the blocks of a model in place, or all of it."""
    for module in [model] if args.whole else model.modules():
        if args.whole or any(kind.__name__ in _BLOCKS[part] for kind in type(module).__mro__):
            module.compile(dynamic=False, backend=args.backend)


@dataclass
class Prepared:
    """A contender's step, ready to be timed.

    run        one step: a replay of its CUDA graph, or the call itself
    captured   whether it is a graph
    weights    bytes of the model (`model_bytes`)
    peak       these, and what a forward allocates at most in addition
    """

    run: Callable[[], object]
    captured: bool
    error: float
    weights: int = 0
    peak: int = 0


def prepare(model: nn.Module, call: dict[str, Any], exact: Tensor) -> Prepared:
    """Warm a model up, compare it with the float32 one, and capture its step."""

    def step() -> Tensor:
        return model(**call, return_dict=False)[0]  # type: ignore[no-any-return]

    y = step()
    error = float((y.double() - exact.double()).norm() / exact.double().norm())
    weights = model_bytes(model)
    if not y.is_cuda:
        return Prepared(step, False, error, weights, weights)
    from halfbyte.ops.graph_capture import CapturedGraph

    for _ in range(3):  # the third call records launches
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = weights + torch.cuda.max_memory_allocated() - before
    graph = CapturedGraph(y.device)
    try:
        graph.capture(step)
    except Exception as error_of_capture:
        print(f"  not captured: {str(error_of_capture).splitlines()[0][:150]}", flush=True)
        torch.cuda.synchronize()
        return Prepared(step, False, error, weights, peak)
    graph.replay()
    torch.cuda.synchronize()
    return Prepared(graph.replay, True, error, weights, peak)


def gpu_times(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each step by CUDA events, the median of `rounds`, of which every other one runs backwards."""
    runs: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(rounds):
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            steps[name]()
            end.record()
            end.synchronize()
            runs[name].append(start.elapsed_time(end) / 1e3)
        order.reverse()
    return {name: median(times) for name, times in runs.items()}


def _graphs() -> int:
    """How many graphs torch.compile has made: as many as blocks differ, if none is compiled again."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def model_bytes(model: nn.Module) -> int:
    """Bytes of parameters, buffers and packed weights, each memory once."""
    memories: dict[tuple[str, int], int] = {}
    for tensor in _tensors(model):
        storage = tensor.untyped_storage()
        memories[str(tensor.device), storage.data_ptr()] = storage.nbytes()
    return sum(memories.values())


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """The tensors that modules have, also within tensor subclasses and as attributes: bitsandbytes has codes and their scales there."""
    pending: list[object] = []
    for module in model.modules():
        pending += [*module._parameters.values(), *module._buffers.values()]
        pending += [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
            pending += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        elif isinstance(value, Tensor):
            yield value
            pending.append(getattr(value, "quant_state", None))
        elif isinstance(value, hb.Packed):
            pending.append(value.data)
        elif type(value).__name__ in ("QuantState", "MatmulLtState"):
            pending += vars(value).values()


def measure(part: str, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each contender."""
    torch.manual_seed(0)
    with torch.device(args.device):
        whole = Flux(*args.blocks, tiny=args.tiny) if part == "flux" else Sdxl(tiny=args.tiny)
        call = whole.inputs(batch, torch.bfloat16)
    model: nn.Module = whole.model.eval().bfloat16()
    model.requires_grad_(False)
    if args.attention and part == "flux":
        model.set_attention_backend(args.attention)  # type: ignore[operator]
    if part == "sdxl":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    reference = copy.deepcopy(model).float()
    floats = {name: x.float() if isinstance(x, Tensor) else {k: v.float() for k, v in x.items()} for name, x in call.items()}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        exact = reference(**floats, return_dict=False)[0]
    del reference, floats
    prepared = dict[str, Prepared]()
    for name, contender in contenders(part).items():
        if args.only and name != BASELINE and not any(word in name for word in args.only):
            continue
        start = time.perf_counter()
        torch.compiler.reset()  # torch keeps a few graphs of each forward
        torch._dynamo.utils.counters.clear()
        try:
            quantized = contender.make(copy.deepcopy(model), call)
            if contender.compiled:
                compile_(quantized, part, args)
            prepared[name] = prepare(quantized, call, exact)
        except Exception as error:
            if name == BASELINE or args.strict:
                raise
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}", flush=True)
            continue
        print(
            f"  {name}: error {prepared[name].error:.4f}, ready after {time.perf_counter() - start:.0f} s, {_graphs()} graphs", flush=True
        )
    steps = {name: one.run for name, one in prepared.items()}
    if args.device == "cuda":
        seconds = gpu_times(steps, args.rounds)
    else:
        seconds = {name: timing.median for name, timing in interleave(steps, rounds=args.rounds).items()}
    rows: list[dict[str, Any]] = []
    for name, one in prepared.items():
        row: dict[str, Any] = {"part": part, "batch": batch, "contender": name, "ms": round(seconds[name] * 1e3, 3)}
        row |= {"speedup": round(seconds[BASELINE] / seconds[name], 3), "error": round(one.error, 4), "graph": one.captured}
        row |= {"weights_mb": round(one.weights / 1e6, 1), "peak_mb": round(one.peak / 1e6, 1)}
        if base := prepared[BASELINE].weights:
            row["weights_of_bf16"] = round(one.weights / base, 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def results(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows as a file of benchmarks/results: a row for each contender, with fields such as `flux_1_ms`; earlier ones stay."""
    table: dict[str, dict[str, Any]] = {}
    columns = [{"name": "", "cell": "{contender}"}]
    if args.json.exists():
        earlier = json.loads(args.json.read_text(encoding="utf-8"))
        table, columns = {row["contender"]: row for row in earlier["rows"]}, earlier["columns"]
    for row in rows:
        name, at = row["contender"], f"{row['part']}_{row['batch']}"
        merged = table.setdefault(name, {"id": name.replace(",", "").replace(" ", "-"), "contender": name})
        merged |= {f"{at}_{field}": value for field, value in row.items() if field not in ("part", "batch", "contender")}
        merged[at] = f"{row['ms']:.2f} ({row['speedup']:.2f}×)"
        if (column := {"name": f"{row['part']}, batch {row['batch']}", "cell": f"{{{at}}}"}) not in columns:
            columns.append(column)
    for column in columns[1:]:
        for merged in table.values():
            merged.setdefault(column["cell"][1:-1], "")
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    card = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    return {
        "title": "One step of Flux-shaped blocks and of SDXL's UNet on a GPU, ms; in brackets bf16 torch.compile's time over it",
        "date": time.strftime("%Y-%m-%d"),
        "commit": args.commit or commit,
        "machine": {card.split()[1] if card.startswith("NVIDIA ") else card: card},
        "versions": _versions(),
        "command": "python benchmarks/diffusion_gpu.py --part flux sdxl --batch 1 4",
        "left": 1,
        "columns": columns,
        "rows": list(table.values()),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "diffusers", "torchao", "bitsandbytes", "optimum-quanto", "gguf"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=["flux", "sdxl"], choices=("flux", "sdxl"))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--blocks", nargs=2, type=int, default=[2, 4], metavar=("DOUBLE", "SINGLE"), help="of Flux (default: 2 4)")
    parser.add_argument("--only", nargs="+", help="contenders whose names have one of these words, and the baseline")
    parser.add_argument("--attention", help="diffusers' attention backend of Flux, such as _native_cudnn (default: torch's choice)")
    parser.add_argument("--whole", action="store_true", help="compile the whole model, not its blocks")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager to try the script quickly")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--strict", action="store_true", help="end where a contender fails")
    parser.add_argument("--commit", help="for the file, where there is no git")
    parser.add_argument("--json", type=Path, help="write the figures to this file, as benchmarks/results has them, beside those it has")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    torch.backends.cudnn.benchmark = True
    with torch.inference_mode():
        for part in args.part:
            for batch in args.batch:
                rows = measure(part, batch, args)
                if args.json:
                    args.json.write_text(json.dumps(results(rows, args), indent=1) + "\n", encoding="utf-8")
                if args.device == "cuda":
                    gc.collect()
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
