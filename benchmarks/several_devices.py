"""A language model of synthetic weights on one GPU and on several that share it, and what a sum over processes costs.

    torchrun --nproc-per-node 2 benchmarks/several_devices.py --size 8b --layers 8

Steps for one token are compiled (fullgraph) and run as CUDA graphs, with 512 tokens in a static cache of 1024; prompts are eager. A few
layers are timed, and the rest of a step (the last norm, the head and its likeliest token) by itself; "token" is that with all layers of the
model. While GPUs are compared one by one, each measures some of the batches. Times are medians, of the slowest process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from llm_models import FAMILIES, make_config, make_model
from torch import distributed

from halfbyte.integrations.transformers.generate.steps import likeliest
from halfbyte.nn.parallel import all_reduce as parallel_sum

KEPT, LONGEST = 512, 1024  # tokens in the cache, and that it has room for
SUMS = [1 << i for i in (13, 14, 15, 16, 17, 18, 19, 20, 22, 24)]  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to see that it runs")
    parser.add_argument("--size", dest="sizes", choices=FAMILIES["llama"].sizes, nargs="*", default=["8b"])
    parser.add_argument("--layers", type=int, default=8, help="that are timed (default: %(default)s)")
    parser.add_argument("--format", default="int4_g128")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens (default: %(default)s; 0: none)")
    parser.add_argument("--no-sums", action="store_true")
    args = parser.parse_args()
    local, count = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    how: dict[str, Any] = {"timeout": timedelta(seconds=120)}
    if args.device == "cuda":
        torch.cuda.set_device(local)
        how["device_id"] = torch.device("cuda", local)
    distributed.init_process_group("nccl" if args.device == "cuda" else "gloo", **how)
    mesh = distributed.init_device_mesh(args.device, (count,))
    with torch.inference_mode():
        if not args.no_sums:
            sums(mesh)
        for size in args.sizes:
            args.size = size
            alone(args, local, count)
            shared(args, mesh)
    distributed.destroy_process_group()


def say(**facts: Any) -> None:
    if distributed.get_rank() == 0:
        print(json.dumps(facts), flush=True)


def of_all(custom: Any) -> list[Any]:
    """What each process has."""
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, custom)
    return everyone


# Time


def repeated(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same work as a CUDA graph."""
    if not torch.cuda.is_available():
        return run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        run()
    return graph.replay


def milliseconds(run: Callable[[], Any], *, times: int = 10, rounds: int = 15, before: Callable[[], Any] = lambda: None) -> float:
    """Of one run among `times` in a row."""
    run()
    found = []
    for _ in range(rounds):
        before()
        synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            run()
        synchronize()
        found.append((time.perf_counter() - begin) / times * 1e3)
    return statistics.median(found)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Sums


def sums(mesh: Any) -> None:
    group = mesh.get_group().group_name
    largest, parallel_sum.LARGEST = parallel_sum.LARGEST, SUMS[-1]
    say(sums=parallel_sum.prepare(group, mesh.device_type))
    for nbytes in SUMS:
        x = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=mesh.device_type)
        ways: dict[str, Callable[[], Any]] = {"nccl": lambda x=x: parallel_sum._large(x, group)}  # type: ignore[misc]
        known = parallel_sum._group_buffers.get(group)
        if known is not None and known.buffer is not None:
            there = known.buffer[:nbytes].view(torch.bfloat16)
            ways["one-shot"] = lambda x=x: parallel_sum.all_reduce(x, group)  # type: ignore[misc]
            ways["two-shot"] = lambda there=there: torch.ops.symm_mem.two_shot_all_reduce_(there, "sum", group)  # type: ignore[misc]
        took = {}
        for name, way in ways.items():
            run = repeated(lambda way=way: [way() for _ in range(20)])  # type: ignore[misc]
            took[name] = round(max(of_all(milliseconds(run, times=2))) / 20 * 1e3, 2)
        say(bytes=nbytes, us=took)
    parallel_sum.LARGEST = largest


@contextmanager
def only_nccl(group: str) -> Iterator[None]:
    before = parallel_sum._group_buffers[group]
    parallel_sum._group_buffers[group] = replace(before, buffer=None)
    try:
        yield
    finally:
        parallel_sum._group_buffers[group] = before


# Models


def config_of(args: argparse.Namespace) -> Any:
    return make_config("llama", args.size, args.prompt, args.layers)


def alone(args: argparse.Namespace, local: int, count: int) -> None:
    """Each process has a whole model."""
    model = make_model(config_of(args), args.device, args.format)
    found = {batch: decoding(args, model, batch) for i, batch in enumerate(args.batches) if i % count == local}
    for batch, facts in sorted({k: v for each in of_all(found) for k, v in each.items()}.items()):
        say(size=args.size, gpus=1, batch=batch, **facts)
    if args.prompt:
        say(size=args.size, gpus=1, **prompting(args, model))


def shared(args: argparse.Namespace, mesh: Any) -> None:
    model = make_model(config_of(args), args.device, args.format, mesh=mesh)
    group = mesh.get_group().group_name
    for batch in args.batches:
        step = compiled(model)
        say(size=args.size, gpus=mesh.size(), batch=batch, sums="as they come", **decoding(args, model, batch, step))
        if args.device == "cuda":
            with only_nccl(group):
                say(size=args.size, gpus=mesh.size(), batch=batch, sums="NCCL", **decoding(args, model, batch, step))
    if args.prompt:
        say(size=args.size, gpus=mesh.size(), **prompting(args, model))


def compiled(model: Any) -> Any:
    def forward(**inputs: Any) -> Any:
        return likeliest(model(**inputs).logits)

    torch.compiler.reset()
    return torch.compile(forward, fullgraph=True, dynamic=False, backend="inductor" if torch.cuda.is_available() else "aot_eager")


def decoding(args: argparse.Namespace, model: Any, batch: int, step: Any = None) -> dict[str, Any]:
    """Milliseconds of one step."""
    from transformers import StaticCache

    begin = time.perf_counter()
    step = step or compiled(model)
    config, attention = model.config, model.model.layers[0].self_attn
    cache = StaticCache(config=config, max_cache_len=LONGEST)
    heads = attention.k_proj.weight.shape[0] // config.head_dim
    cache.early_initialization(batch, heads, config.head_dim, model.dtype, model.device)
    ids, position = torch.full((batch, 1), 300, device=model.device), torch.full((1, 1), KEPT, device=model.device)
    lengths = [layer.cumulative_length for layer in cache.layers]

    def back() -> None:
        for length in lengths:
            length.fill_(KEPT)

    back()
    run = repeated(lambda: step(input_ids=ids, position_ids=position, past_key_values=cache))
    started = time.perf_counter() - begin
    whole = milliseconds(run, before=back)
    x = torch.zeros(batch, 1, config.hidden_size, dtype=model.dtype, device=model.device)
    rest = milliseconds(repeated(lambda: likeliest(model.lm_head(model.model.norm(x)))))
    whole, rest = (max(of_all(ms)) if step_is_shared(model) else ms for ms in (whole, rest))
    layer = (whole - rest) / args.layers
    token = rest + layer * make_config("llama", args.size).num_hidden_layers
    return {
        "step_ms": round(whole, 4),
        "rest_ms": round(rest, 4),
        "layer_us": round(layer * 1e3, 1),
        "token_ms": round(token, 3),
        "start_s": round(started, 1),
    }


def step_is_shared(model: Any) -> bool:
    from halfbyte.nn.parallel.parallelize import is_parallel

    return is_parallel(model)


def prompting(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Milliseconds until all tokens of a prompt are read."""
    ids = torch.randint(300, model.config.vocab_size, (1, args.prompt), generator=torch.Generator().manual_seed(1)).to(model.device)
    ms = milliseconds(lambda: model(ids, logits_to_keep=1), times=1, rounds=7)
    return {"prompt": args.prompt, "layers": args.layers, "ms": round(max(of_all(ms)), 2)}


if __name__ == "__main__":
    main()
