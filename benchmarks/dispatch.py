"""Whether the kernel that is taken on this GPU is the fastest: `python benchmarks/dispatch.py`.

Each kernel for linear layers that can multiply takes turns with its first configs, as in `benchmarks/gpu.py`. A line is what is taken, by
the tables of times where they have the shape, and the fastest; the last one sums up. Default shapes are those of layers of Llama, Qwen,
Gemma, Phi and SmolLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from halfbyte.dispatch.candidate import Option
from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.gpu import GpuCandidate, packs_code_pairs, why_no_triton
from halfbyte.dispatch.measure import compile_launches, linear_launches
from halfbyte.errors import UnsupportedError
from halfbyte.formats.spec import as_format
from halfbyte.kernels.problem import Problem
from halfbyte.machine import Gpu, gpu

SIDES = {  # N: each K
    1024: (3072, 4096),
    2048: (2048, 4096),
    2304: (2048,),
    2560: (2048, 4096, 9728, 10240),
    3072: (1024, 3072, 8192),
    3584: (3584, 18944),
    4096: (2560, 4096, 14336),
    4608: (3584,),
    5120: (2048,),
    6144: (2560, 4096),
    9216: (3072,),
    16384: (3072,),
    19456: (2560,),
    20480: (2560,),
    28672: (4096,),
}


def measure(problem: Problem, here: Gpu, most: int) -> tuple[Option[GpuCandidate], dict[str, float]]:
    """What is taken, and the seconds of up to `most` configs of each kernel."""
    from halfbyte.kernels.gpu.runtime.clock import graph_times

    taken, *others = choose(problem, here).options
    rope_cache, counts = [taken], {taken.candidate.name: 1}
    for option in others:
        counts[option.candidate.name] = counts.get(option.candidate.name, 0) + 1
        if counts[option.candidate.name] <= most:
            rope_cache.append(option)
    device = torch.device("cuda")
    launches = {name_of(option): linear_launches(problem, here, option.candidate, option.config, device) for option in rope_cache}
    compile_launches(launches, device)
    return taken, {name: times.median for name, times in graph_times(launches, rounds=7).items()}


def name_of(option: Option[GpuCandidate]) -> str:
    return f"{option.candidate.name} {option.config}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[f"{n}x{k}" for n, ks in SIDES.items() for k in ks], help="NxK")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 4, 16, 64, 96, 128, 192, 256, 512, 1024, 2048])
    parser.add_argument("--formats", nargs="+", default=["q4_0"])
    parser.add_argument("--configs", type=int, default=3, help="of each kernel (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if (problem := why_no_triton()) is not None or not torch.cuda.is_available():
        raise UnsupportedError(f"this benchmark runs on a GPU: {problem or 'torch sees none'}")
    here, found, lost = gpu(torch.cuda.current_device()), [], []
    for shape in args.shapes:
        n, k = map(int, shape.split("x"))
        for fmt in map(as_format, args.formats):
            paired = packs_code_pairs(fmt, (n, k), here)
            for m in args.m:
                taken, times = measure(Problem("linear", m, n, k, fmt, torch.bfloat16, paired=paired), here, args.configs)
                actual, fastest = name_of(taken), min(times, key=lambda name: times[name])
                lost.append(times[actual] / times[fastest])
                line = f"{shape:12} {fmt!s:10} M={m:<5} {times[actual] * 1e6:8.1f} us  {actual}"
                print(line if actual == fastest else f"{line}; fastest {times[fastest] * 1e6:.1f} us: {fastest}", flush=True)
                found.append({"shape": shape, "format": str(fmt), "m": m, "taken": actual, "expected": taken.seconds, "times": times})
                if args.json:
                    args.json.write_text(json.dumps(found, indent=1))
    mean, worst = 100 * (statistics.mean(lost) - 1), 100 * (max(lost) - 1)
    print(f"{len(lost)} cells: {mean:.1f} % slower than the fastest on the average, {worst:.0f} % at worst")


if __name__ == "__main__":
    main()
