"""The demo's model at 8 and 4 bits beside ONNX Runtime's int8 model of it: milliseconds for a batch.

    pip install '.[demo]' onnx onnxruntime
    python examples/minilm/speed_onnxruntime.py          some minutes
    python examples/minilm/speed_onnxruntime.py --rounds 2 --contenders 'halfbyte q4_0' 'ONNX Runtime int8' --shapes 1x8 1x32 32x128

ONNX Runtime runs what its own `quantize_dynamic` (int8 weights a channel) makes of torch's export. "compiled" is torch.compile of the
same model. Each contender has a process of its own, since their threads would spin against each other; the processes take turns, and
medians are over all rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from demo import model_folder
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging

import halfbyte as hb
from halfbyte.integrations.transformers import attention
from halfbyte.nn.fused import fuse_

SHAPES = ((1, 69), (32, 73))  # sentences, tokens of each, which `--shapes` replaces
Shapes = Sequence[tuple[int, int]]
SECONDS = 2.0
FORMATS = ("q8_0", "int8_channel", "q4_0")
CONTENDERS = (
    *(f"{name}{way}" for name in ("torch fp32", "torch bf16", *(f"halfbyte {fmt}" for fmt in FORMATS)) for way in ("", " compiled")),
    *("ONNX Runtime fp32", "ONNX Runtime int8"),
)


def float_model(attending: str = "sdpa", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Without the layer above the first token, which is not part of the export, and which no embedding of a sentence takes."""
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": attending, "add_pooling_layer": False}
    model: nn.Module = AutoModel.from_pretrained(model_folder(), local_files_only=True, **settings)
    return model.eval()


def export(folder: Path) -> None:
    """fp32.onnx and int8.onnx in `folder`."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = float_model("eager")

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            hidden: Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            return hidden

    ids = torch.ones(2, 16, dtype=torch.int64)
    axes = {name: {0: "batch", 1: "tokens"} for name in ("ids", "mask")}
    names: dict[str, Any] = {"input_names": ["ids", "mask"], "output_names": ["hidden"], "dynamic_axes": axes, "opset_version": 17}
    torch.onnx.export(Hidden(), (ids, ids), str(folder / "fp32.onnx"), dynamo=False, **names)
    quantize_dynamic(folder / "fp32.onnx", folder / "int8.onnx", weight_type=QuantType.QInt8, per_channel=True)


def runner(name: str, folder: Path) -> Callable[[Tensor], object]:
    """token ids [batch, tokens] -> the last hidden state."""
    runtime, _, kind = name.removesuffix(" compiled").rpartition(" ")
    if runtime == "ONNX Runtime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(folder / f"{kind}.onnx", options, providers=["CPUExecutionProvider"])
        return lambda ids: session.run(None, {"ids": ids.numpy(), "mask": torch.ones_like(ids).numpy()})
    hb.keep_freed_memory()
    model = float_model(attention.NAME if runtime == "halfbyte" else "sdpa", torch.bfloat16 if kind == "bf16" else torch.float32)
    if runtime == "halfbyte":
        hb.quantize_(model, hb.Config(kind))
        fuse_(model)
        hb.optimize_(model)
    if name.endswith(" compiled"):
        model = torch.compile(model, dynamic=False)  # type: ignore[assignment]
    return lambda ids: model(input_ids=ids, attention_mask=torch.ones_like(ids))


@torch.inference_mode()
def work(name: str, folder: Path, shapes: Shapes) -> None:
    """Prints the seconds of each run, shape by shape."""
    run = runner(name, folder)
    times = []
    for shape in shapes:
        ids = torch.randint(1000, 20000, shape)
        for _ in range(2):
            run(ids)
        taken: list[float] = []
        while sum(taken) < SECONDS or len(taken) < 3:
            start = perf_counter()
            run(ids)
            taken.append(perf_counter() - start)
        times.append(taken)
    print(json.dumps(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=list(SHAPES), metavar="BATCHxTOKENS")
    parser.add_argument("--folder", type=Path, help="where ONNX Runtime's models are kept from run to run (default: nowhere)")
    parser.add_argument("--worker", metavar="CONTENDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable_progress_bar()
    if args.worker:
        work(args.worker, args.folder, args.shapes)
        return
    if args.folder is not None:
        compare(args.contenders, args.rounds, args.folder, args.shapes)
        return
    with tempfile.TemporaryDirectory(prefix="halfbyte-onnx-") as folder:
        compare(args.contenders, args.rounds, Path(folder), args.shapes)


def shape_of(text: str) -> tuple[int, int]:
    batch, tokens = map(int, text.split("x"))
    return batch, tokens


def compare(contenders: list[str], rounds: int, folder: Path, shapes: Shapes) -> None:
    if not (folder / "int8.onnx").exists() and any(name.startswith("ONNX") for name in contenders):
        export(folder)
    found: dict[str, list[list[float]]] = {name: [[] for _ in shapes] for name in contenders}
    for _ in range(rounds):
        for name in contenders:
            command = [sys.executable, __file__, "--worker", name, "--folder", str(folder), "--shapes", *(f"{b}x{t}" for b, t in shapes)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            for all_times, new in zip(found[name], json.loads(done.stdout.splitlines()[-1]), strict=True):
                all_times += new
    print("| | " + " | ".join(f"batch {batch} of {tokens} tokens, ms" for batch, tokens in shapes) + " |")
    print("| --- " * (1 + len(shapes)) + "|")
    for name, times in found.items():
        print(f"| {name} | " + " | ".join(f"{statistics.median(one) * 1e3:.1f}" for one in times) + " |")


if __name__ == "__main__":
    main()
