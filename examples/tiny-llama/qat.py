"""Train the tiny Llama for 4 bits: perplexity of what quantizers make of it, and of what a few minutes of training make of that.

    python examples/tiny-llama/qat.py --steps 60

The text is calibration.txt, and the loss is the divergence of the predictions from the float model's (Kullback-Leibler, as in LLM-QAT:
Liu et al., arXiv:2305.17888, 2023), so that what is learnt is to make up for the rounding, and not the text. Activations are not quantized.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

import halfbyte as hb
from halfbyte.evaluate import evaluate_language

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "models" / "tiny-llama"
CALIBRATED = ("gptq", "awq")


def distil(student: Any, teacher: Any, passages: torch.Tensor, steps: int, batch: int, rate: float) -> None:
    """Trains `student` to predict as `teacher` does, with a rate that rises for a tenth of the steps and falls to 0."""
    optimizer = torch.optim.Adam(student.parameters(), lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    generator, begin = torch.Generator().manual_seed(0), time.perf_counter()
    order = torch.cat([torch.randperm(len(passages), generator=generator) for _ in range(-(-steps * batch // len(passages)))])
    for step in range(steps):
        tokens = passages[order[step * batch : (step + 1) * batch]]
        with torch.no_grad():
            wanted = torch.log_softmax(teacher(tokens).logits.float(), -1)
        found = torch.log_softmax(student(tokens).logits.float(), -1)
        loss = functional.kl_div(found, wanted, log_target=True, reduction="sum") / tokens.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            print(f"step {step + 1}: divergence {loss.item():.4f}, {time.perf_counter() - begin:.0f} s", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["int4_g128"])
    parser.add_argument("--methods", nargs="*", default=["absmax", "mse", "gptq"], help="of quantizers, for comparison")
    parser.add_argument("--scales", nargs="*", default=["dynamic", "learned"], choices=["dynamic", "learned"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4, help="passages a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a passage (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--bytes", type=int, default=60_000, help="of heldout.txt (default: %(default)s)")
    args = parser.parse_args()

    transformers.utils.logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    text = (HERE / "calibration.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer((HERE / "heldout.txt").read_bytes()[: args.bytes].decode(errors="ignore"))["input_ids"])
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    passages = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    models: dict[str, Any] = {}
    for fmt in args.formats:
        for method in args.methods:
            calibration = hb.calibration_tokens(tokenizer, text, 32) if method in CALIBRATED else None
            models[f"{fmt}, {method}"] = hb.quantize_(copy.deepcopy(model), hb.Config(fmt, method=method, compute="float"), calibration)
        for scales in args.scales:
            config = hb.Config(fmt, method="absmax" if scales == "dynamic" else "mse", compute="float")
            student: Any = hb.prepare_qat_(copy.deepcopy(model), config, scales=scales)
            distil(student, model, passages, args.steps, args.batch, args.rate)
            models[f"{fmt}, trained, {scales} scales"] = hb.convert_qat_(student)
    reference, found = evaluate_language(model, models, ids)
    print(f"{len(ids)} tokens; {args.steps} steps of {args.batch} x {args.length}, rate {args.rate:g}; torch {torch.__version__}\n")
    print("| format, method | perplexity | increase | divergence | same top token |\n| --- | ---: | ---: | ---: | ---: |")
    print(f"| not quantized, float32 | {reference.perplexity:.4f} | | | |")
    for name, quality in found.items():
        increase = f"{quality.perplexity / reference.perplexity - 1:+.3%}"
        print(f"| {name} | {quality.perplexity:.4f} | {increase} | {quality.divergence:.6f} | {quality.top1:.2%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
