"""What pruning costs a language model: perplexity of the tiny Llama by method, in floating point and quantized after it.

    python benchmarks/sparsity.py                    --sparsity 0.5 for the half of all weights instead of 2 of 4
    python benchmarks/sparsity.py --speed            instead, products on this CPU, 2:4 sparse codes packed as any others and without zeros;
                                                     --device cuda: on this GPU, of bfloat16 in CUDA graphs

Activations are not quantized; the embedding, which is the head too, is not pruned, and q8_0 where the rest is quantized.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import halfbyte
from halfbyte.evaluate import evaluate_language
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import gpu, machine
from halfbyte.ops.functions import pack_dense
from halfbyte.quantizers.sparse import as_sparsity, prune

ROOT = Path(__file__).parent.parent
TEXTS = ROOT / "examples" / "tiny-llama"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", default="2:4")
    parser.add_argument("--methods", nargs="+", default=["magnitude", "wanda", "sparsegpt"])
    parser.add_argument("--format", default="int4_g128", help="by gptq, after pruning (default: %(default)s)")
    parser.add_argument("--passages", type=int, default=32, help="of 512 tokens (default: %(default)s)")
    parser.add_argument("--bytes", type=int, default=60_000, help="of heldout.txt (default: %(default)s)")
    parser.add_argument("--speed", action="store_true", help="time products")
    parser.add_argument("--formats", nargs="+", default=["int4_g128", "q4_0", "int8_channel"], help="of products (default: %(default)s)")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128], help="of products (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of products (default: %(default)s)")
    parser.add_argument("--outputs", type=int, default=14336, help="of products (default: %(default)s)")
    parser.add_argument("--inputs", type=int, default=4096, help="of products (default: %(default)s)")
    args = parser.parse_args()
    if args.speed:
        return speed(args) if args.device == "cpu" else speed_of_gpu(args)
    sparsity = args.sparsity if ":" in args.sparsity else float(args.sparsity)

    transformers.utils.logging.set_verbosity_error()
    folder = ROOT / "models" / "tiny-llama"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = torch.tensor(tokenizer((TEXTS / "heldout.txt").read_bytes()[: args.bytes].decode(errors="ignore"))["input_ids"])
    tokens = halfbyte.calibration_tokens(tokenizer, (TEXTS / "calibration.txt").read_text(encoding="utf-8"), args.passages)
    models: dict[str, Any] = {}
    config = halfbyte.Config(args.format, method="gptq", compute="float")
    for method in args.methods:
        pruned = halfbyte.prune_(copy.deepcopy(model), sparsity, method, None if method == "magnitude" else tokens)
        models[f"{args.sparsity}, {method}"] = pruned
        models[f"{args.sparsity}, {method}, then {args.format}"] = halfbyte.quantize_(copy.deepcopy(pruned), config, tokens)
        print(method, file=sys.stderr)
    models[f"all, {args.format}"] = halfbyte.quantize_(copy.deepcopy(model), config, tokens)
    reference, found = evaluate_language(model, models, ids)
    print(f"{len(ids)} tokens, {len(tokens)} passages of {tokens.shape[1]}; torch {torch.__version__}, halfbyte {halfbyte.__version__}\n")
    print("| weights | perplexity | increase | divergence | same top token |\n| --- | ---: | ---: | ---: | ---: |")
    print(f"| all, float32 | {reference.perplexity:.4f} | | | |")
    for name, quality in found.items():
        increase = f"{quality.perplexity / reference.perplexity - 1:+.1%}"
        print(f"| {name} | {quality.perplexity:.4f} | {increase} | {quality.divergence:.4f} | {quality.top1:.2%} |")
    return 0


def speed(args: argparse.Namespace) -> int:
    """Medians of calls in turn, over more copies of the weight than the last-level cache holds, and the ratios."""
    most = 2 * (machine().caches.l3 or 1 << 25)
    print(f"{machine().cpu}, {torch.get_num_threads()} threads: {args.outputs} x {args.inputs}, ms")
    print("| format | rows | all codes | without zeros | speed | bytes |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in args.formats:
        weight = prune(torch.randn(args.outputs, args.inputs), as_sparsity("2:4"), "magnitude")
        codes = halfbyte.quantize(weight, name)
        copies = [[pack(codes) for _ in range(1 + most // codes.data.nbytes)] for pack in (pack_dense, halfbyte.pack)]
        for rows in args.rows:
            x, times = torch.randn(rows, args.inputs), list[list[float]]([[], []])
            for i in range(max(20, min(300, 1000 // rows))):
                for some, one in zip(times, copies, strict=True):
                    begin = time.perf_counter()
                    halfbyte.linear(x, one[i % len(one)])
                    some.append(time.perf_counter() - begin)
            dense, sparse = (statistics.median(some[3:]) * 1e3 for some in times)
            ratio = copies[1][0].nbytes / copies[0][0].nbytes
            print(f"| {name} | {rows} | {dense:.2f} | {sparse:.2f} | ×{dense / sparse:.2f} | {ratio:.2f} |", flush=True)
    return 0


def speed_of_gpu(args: argparse.Namespace) -> int:
    """Medians of launches in turn, as `kernels/gpu/runtime/clock.py` has them."""
    from halfbyte.kernels.gpu.runtime.clock import copies, graph_times

    here = gpu(0)
    print(f"{here.name}: {args.outputs} x {args.inputs}, us")
    print("| format | rows | all codes | without zeros | speed | bytes |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in args.formats:
        weight = prune(torch.randn(args.outputs, args.inputs, device="cuda"), as_sparsity("2:4"), "magnitude")
        codes = halfbyte.quantize(weight, name)
        ways = {"dense": gpu_tiles.pack(codes), "sparse": halfbyte.pack(codes, "cuda", sparse=True)}
        weights = {way: [replace(one, data=one.data.clone()) for _ in range(copies(one.nbytes, here.l2))] for way, one in ways.items()}
        for rows in args.rows:
            x = torch.randn(rows, args.inputs, device="cuda", dtype=torch.bfloat16)
            times = graph_times({way: [partial(halfbyte.linear, x, one) for one in some] for way, some in weights.items()})
            dense, sparse = (times[way].median * 1e6 for way in ways)
            ratio = ways["sparse"].nbytes / ways["dense"].nbytes
            print(f"| {name} | {rows} | {dense:.2f} | {sparse:.2f} | ×{dense / sparse:.2f} | {ratio:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
