"""Continuous batching against one padded batch on a CPU: requests of different lengths, tokens per second, in turn.

    python benchmarks/batching.py SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/batching.py models/tiny-llama --format q4_0 --requests 16

All requests arrive at once and are answered greedily. "continuous" is `halfbyte.LanguageModel`, whose sequences join and leave the batch
one by one; "padded" is `generate` of transformers with the layers that `halfbyte.optimize_` compiled, which pads prompts on the left and
goes on until the longest answer ends. A ratio is the median over rounds of the ratio within a round.

    asked    tokens that the requests asked for, per second: a padded batch computes tokens that nobody asked for, too
    rows     tokens that a padded batch computes, with those that nobody asked for, per second: what it would reach if all were as long
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--format", help="of a model in floating point")
    parser.add_argument("--threads", type=int, help="(default: torch's)")
    parser.add_argument("--requests", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--prompt", type=int, nargs=2, default=[32, 256], metavar=("LEAST", "MOST"), help="tokens (default: %(default)s)")
    parser.add_argument("--new", type=int, nargs=2, default=[32, 128], metavar=("LEAST", "MOST"), help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of each round")
    args = parser.parse_args()
    rows = compare(args)
    asked = statistics.median(row["continuous"] / row["padded asked"] for row in rows)
    full = statistics.median(row["continuous"] / row["padded rows"] for row in rows)
    for name in ("continuous", "padded asked", "padded rows"):
        print(f"{name:14} {statistics.median(row[name] for row in rows):8.1f} tokens/s")
    print(f"continuous is {asked:.2f} x of the tokens asked for, {full:.2f} x of all rows of the padded batch")
    if args.json:
        found = {"command": sys.argv, "rows": rows, "asked": asked, "rows ratio": full}
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def compare(args: argparse.Namespace) -> list[dict[str, float]]:
    """Tokens per second of each round; the first, which compiles kernels, is not counted."""
    import torch

    import halfbyte as hb
    from halfbyte.integrations.transformers.text import open_model

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    continuous = hb.LanguageModel.open(args.model, format=args.format)
    padded = open_model(args.model, config=None if args.format is None else hb.Config(args.format))[0]
    vocabulary = padded.config.get_text_config().vocab_size
    rows = []
    for number in range(args.rounds + 1):
        rng = random.Random(number)
        prompts = [[rng.randrange(8, vocabulary) for _ in range(rng.randint(*args.prompt))] for _ in range(args.requests)]
        new = [rng.randint(*args.new) for _ in prompts]
        seconds, other = run_continuous(continuous, prompts, new), run_padded(padded, prompts, max(new))
        rates = {"continuous": sum(new) / seconds, "padded asked": sum(new) / other, "padded rows": len(new) * max(new) / other}
        rows += [rates] if number else []
    return rows


def run_continuous(model: Any, prompts: list[list[int]], new: list[int]) -> float:
    """Seconds until all requests are answered."""
    from halfbyte import Sampling

    batch = model.batch(len(prompts))
    begin = time.perf_counter()
    answers = [batch.submit(ids, Sampling(max_new_tokens=n, ignore_eos=True)) for ids, n in zip(prompts, new, strict=True)]
    while batch.running:
        batch.step()
    seconds = time.perf_counter() - begin
    if [len(answer.ids) for answer in answers] != new:
        raise SystemExit("an answer is not as long as was asked for")
    return seconds


def run_padded(model: Any, prompts: list[list[int]], new: int) -> float:
    """Seconds until `generate` has continued the padded prompts by `new` tokens."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    begin = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
    seconds = time.perf_counter() - begin
    if found.shape != (len(prompts), longest + new):
        raise SystemExit(f"generate wrote {list(found.shape)}, not {[len(prompts), longest + new]}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
