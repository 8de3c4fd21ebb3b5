"""Speculative decoding on source code: tokens per second with and without, in turn, on a CPU at batch 1.

    python benchmarks/speculation.py models/tiny-llama --format q4_0
    python benchmarks/speculation.py SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/speculation.py large.gguf --draft small.gguf
    python benchmarks/speculation.py models/tiny-llama --format q8_0 --draft models/tiny-llama --draft-format q4_0

Each prompt is a piece of a module of Python's standard library, which the model continues greedily. The texts with and without have to be
the same. A module's speedup is the median over rounds of the ratio of tokens per second within a round. The last line has the median over
modules, with the share of guesses that were right.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = ["argparse", "ast", "calendar", "configparser", "copy", "dataclasses", "difflib", "fractions", "shutil", "statistics", "textwrap"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--format", help="of a model in floating point")
    parser.add_argument("--draft", type=Path, help="smaller model that guesses (default: guesses are looked up in the text)")
    parser.add_argument("--draft-format", help="of a draft in floating point (default: that of --format)")
    parser.add_argument("--speculate", type=int, default=8, help="guesses at a time, at most (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="(default: torch's)")
    parser.add_argument("--prompt", type=int, default=400, help="tokens of a module to read (default: %(default)s)")
    parser.add_argument("--new", type=int, default=128, help="tokens to write (default: %(default)s)")
    parser.add_argument("--modules", nargs="+", default=MODULES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = compare(args)
    speedup = statistics.median(each["speedup"] for each in results)
    right = sum(each["accepted"] for each in results) / max(1, sum(each["guessed"] for each in results))
    if args.json:
        print(json.dumps({"speedup": speedup, "right": right, "modules": results}))
        return 0
    for each in results:
        print(f"{each['module']:14} {each['without']:8.1f} -> {each['with']:8.1f} tokens/s  {each['speedup']:5.2f} x")
    print(f"{'median':14} {speedup:41.2f} x  {right:.0%} of guesses right")
    return 0


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each module. Raises SystemExit where the texts differ."""
    import torch

    import halfbyte as hb

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    plain = hb.LanguageModel.open(args.model, format=args.format)
    draft = None if args.draft is None else hb.LanguageModel.open(args.draft, format=args.draft_format or args.format)
    speculating = hb.LanguageModel.open(args.model, format=args.format, speculate=args.speculate, draft=draft)
    results = []
    for name in args.modules:
        ids = plain.tokenizer.encode(inspect.getsource(import_module(name)))[200 : 200 + args.prompt]
        rates, counts = [], (0, 0)
        for _ in range(args.rounds):
            (_, without), (batch, generation) = generated(plain, ids, args.new), generated(speculating, ids, args.new)
            if generation.ids != without.ids:
                sys.exit(f"{name}: the text with speculation is another one")
            rates.append((without.decode_rate, generation.decode_rate))
            counts = batch.guessed, batch.accepted
        results.append(
            {
                "module": name,
                "without": statistics.median(one for one, _ in rates),
                "with": statistics.median(other for _, other in rates),
                "speedup": statistics.median(other / one for one, other in rates),
                "guessed": counts[0],
                "accepted": counts[1],
            }
        )
    return results


def generated(model: Any, ids: list[int], new: int) -> tuple[Any, Any]:
    """Continue a prompt in a batch that has read nothing before: (batch, generation)."""
    from halfbyte import Sampling

    batch = model.batch(1)
    generation = batch.submit(ids, Sampling(max_new_tokens=new, ignore_eos=True))
    while batch.running:
        batch.step()
    return batch, generation


if __name__ == "__main__":
    sys.exit(main())
