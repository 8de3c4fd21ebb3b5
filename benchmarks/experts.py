"""Linear layers of experts on this GPU: halfbyte's, torch's own on bfloat16 weights, and how long the bytes take to be read:
`python benchmarks/experts.py [--every-config]`.

    grouped_mm   torch._grouped_mm on rows that lie sorted by expert already
    cuBLAS       a product for each expert that has rows, which are known on the host

Both get for nothing what a layer has to find out: which rows go where. Weights are random codes. Pairs of a token and an expert are drawn
anew for each launch of a graph, the experts of a token without repetition.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.errors import UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import as_format
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import experts as stacked
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import gpu
from halfbyte.ops import quantize

# Experts, N, K, experts of a token, and whether each of these has a row of its own; gate and up are one matrix.
SHAPES = {
    "mixtral": (8, 28672, 4096, 2, False),
    "mixtral-down": (8, 4096, 14336, 2, True),
    "qwen3-30b-a3b": (128, 1536, 2048, 8, False),
    "qwen3-30b-a3b-down": (128, 2048, 768, 8, True),
}
_DRAWS = 8  # of ids, for each number of tokens
_READ_BYTES = 1 << 30


@dataclass(frozen=True)
class ExpertsTime:
    """Seconds of one launch of `contender`. `floor`: what it takes to read the weights of the experts that are met."""

    shape: str
    format: str
    m: int
    contender: str
    seconds: float
    floor: float


def measure(shape: str, format: str, ms: Sequence[int], *, every_config: bool = False, peers: bool = True) -> list[ExpertsTime]:
    """bfloat16 activations on the current GPU."""
    if (reason := why_no_triton()) is not None or not torch.cuda.is_available():
        raise UnsupportedError(f"this benchmark runs on a GPU: {reason or 'torch sees none'}")
    from halfbyte.kernels.gpu.runtime.clock import graph_times

    experts, n, k, top, custom = SHAPES[shape]
    fmt, here, found = as_format(format), gpu(torch.cuda.current_device()), []
    one = quantize(torch.randn(n, k, device="cuda"), fmt)
    one_repeated = {name: t.expand(experts, *t.shape) for name, t in one.tensors().items()}
    weight = stacked.pack(Codes.from_tensors(fmt, (experts, n, k), one_repeated), gpu_tiles.pack, gpu_tiles.NAME).data
    dense = torch.randn(experts, n, k, dtype=torch.bfloat16, device="cuda") if peers else torch.empty(0, device="cuda")
    for m in ms:
        ids = [torch.rand(m, experts, device="cuda").topk(top, dim=1).indices for _ in range(_DRAWS)]
        x = torch.randn(m * top if custom else m, k, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(m * top, n, dtype=torch.bfloat16, device="cuda")
        problem = Problem("grouped_linear", m * top, n, k, fmt, x.dtype, experts=experts)
        launches: dict[str, list[Callable[[], object]]] = {}
        for i, option in enumerate(choose(problem, here).options[: None if every_config else 1]):
            kernel, run = option.candidate.name, partial(option.candidate.module.launch, problem, option.config, x, weight)
            name = f"halfbyte {i} {kernel} {option.config}" if every_config else f"halfbyte {kernel}"
            launches[name] = [partial(run, each.flatten(), out, None) for each in ids]
        if peers:
            launches |= _peers(x, dense, ids, out)
        times = {name: each.median for name, each in graph_times(launches, rounds=7).items()}
        floor = _reading(weight.numel() // experts, [len(each.unique()) for each in ids])
        found += [ExpertsTime(shape, format, m, name, seconds, floor) for name, seconds in times.items()]
    return found


def _peers(x: Tensor, dense: Tensor, ids: Sequence[Tensor], out: Tensor) -> dict[str, list[Callable[[], object]]]:
    grouped_mm, loop = list[Callable[[], object]](), list[Callable[[], object]]()
    for each in ids:
        rows = x.repeat_interleave(each.numel() // len(x), 0)
        counts = torch.bincount(each.flatten(), minlength=len(dense))
        offsets = counts.cumsum(0).to(torch.int32)
        grouped_mm.append(partial(torch._grouped_mm, rows, dense.transpose(1, 2), offs=offsets))
        ends = offsets.tolist()
        spans = [(e, end - count, end) for e, (end, count) in enumerate(zip(ends, counts.tolist(), strict=True)) if count]
        loop.append(partial(_loop, rows, dense, spans, out))
    return {"grouped_mm bf16": grouped_mm, "cuBLAS bf16": loop}


def _loop(rows: Tensor, dense: Tensor, spans: Sequence[tuple[int, int, int]], out: Tensor) -> None:
    for e, start, end in spans:
        torch.mm(rows[start:end], dense[e].t(), out=out[start:end])


def _reading(nbytes: int, used: Sequence[int]) -> float:
    """Seconds for reading so many experts of `nbytes`: those of the draws, on the average."""
    from halfbyte.kernels.gpu.runtime.clock import graph_times
    from halfbyte.kernels.gpu.runtime.probe import read_launches

    size = round(sum(used) / len(used) * nbytes) // 1024 * 1024
    memory = torch.randint(0, 256, (max(_READ_BYTES, size),), dtype=torch.uint8, device="cuda")
    parts = [memory[i * size : (i + 1) * size] for i in range(min(_DRAWS, memory.numel() // size))]
    return min(each.median for each in graph_times(read_launches(parts, gpu(torch.cuda.current_device())), rounds=3).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["q4_0", "int4_g128"])
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8, 64, 512, 4096], help="tokens")
    parser.add_argument("--every-config", action="store_true", help="time all configs of halfbyte's kernel, not the first alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for shape in args.shapes:
        for i, name in enumerate(args.formats):
            found += measure(shape, name, args.m, every_config=args.every_config, peers=i == 0)
    for one in found:
        time = f"{one.seconds * 1e6:8.1f} us  {one.floor / one.seconds:5.2f} of reading"
        print(f"{one.shape:14} {one.format:10} M={one.m:<4} {time}  {one.contender}")
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
