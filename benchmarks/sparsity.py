"""What pruning costs a language model: perplexity of the tiny Llama by method, in floating point and quantized after it.

    python benchmarks/sparsity.py                    --sparsity 0.5 for the half of all weights instead of 2 of 4

Activations are not quantized; the embedding, which is the head too, is not pruned, and q8_0 where the rest is quantized.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import halfbyte
from halfbyte.evaluate import evaluate_language

ROOT = Path(__file__).parent.parent
TEXTS = ROOT / "examples" / "tiny-llama"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", default="2:4")
    parser.add_argument("--methods", nargs="+", default=["magnitude", "wanda", "sparsegpt"])
    parser.add_argument("--format", default="int4_g128", help="by gptq, after pruning (default: %(default)s)")
    parser.add_argument("--passages", type=int, default=32, help="of 512 tokens (default: %(default)s)")
    parser.add_argument("--bytes", type=int, default=60_000, help="of heldout.txt (default: %(default)s)")
    args = parser.parse_args()
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


if __name__ == "__main__":
    sys.exit(main())
