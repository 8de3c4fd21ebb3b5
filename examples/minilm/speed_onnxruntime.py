"""The demo's model at 8 and 4 bits beside ONNX Runtime's int8 model of it: milliseconds for a batch.

    pip install '.[demo]' onnx onnxruntime
    python examples/minilm/speed_onnxruntime.py          two minutes

ONNX Runtime runs what its own `quantize_dynamic` (int8 weights a channel) makes of torch's export. Each contender has a process of its
own, since their threads would spin against each other; the processes take turns, and medians are over all rounds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from demo import model_folder
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging

import halfbyte as hb

SHAPES = ((1, 69), (32, 73))  # sentences, tokens of each
ROUNDS, SECONDS = 3, 2.0
CONTENDERS = ("torch fp32", "halfbyte q8_0", "halfbyte int8_channel", "halfbyte q4_0", "ONNX Runtime fp32", "ONNX Runtime int8")


def float_model(attention: str = "sdpa") -> nn.Module:
    model: nn.Module = AutoModel.from_pretrained(model_folder(), local_files_only=True, dtype=torch.float32, attn_implementation=attention)
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
    runtime, _, kind = name.rpartition(" ")
    if runtime == "ONNX Runtime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(folder / f"{kind}.onnx", options, providers=["CPUExecutionProvider"])
        return lambda ids: session.run(None, {"ids": ids.numpy(), "mask": torch.ones_like(ids).numpy()})
    hb.keep_freed_memory()
    model = float_model()
    if runtime == "halfbyte":
        hb.quantize_(model, hb.Config(kind))
    return lambda ids: model(input_ids=ids, attention_mask=torch.ones_like(ids))


@torch.inference_mode()
def work(name: str, folder: Path) -> None:
    """Prints the seconds of each run, shape by shape."""
    run = runner(name, folder)
    times = []
    for shape in SHAPES:
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
    logging.disable_progress_bar()
    if len(sys.argv) == 3:
        work(sys.argv[1], Path(sys.argv[2]))
        return
    found: dict[str, list[list[float]]] = {name: [[] for _ in SHAPES] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="halfbyte-onnx-") as folder:
        export(Path(folder))
        for _ in range(ROUNDS):
            for name in CONTENDERS:
                done = subprocess.run([sys.executable, __file__, name, folder], stdout=subprocess.PIPE, text=True, check=True)
                for all_times, new in zip(found[name], json.loads(done.stdout.splitlines()[-1]), strict=True):
                    all_times += new
    print("| | " + " | ".join(f"batch {batch} of {tokens} tokens, ms" for batch, tokens in SHAPES) + " |")
    print("| --- " * (1 + len(SHAPES)) + "|")
    for name, times in found.items():
        print(f"| {name} | " + " | ".join(f"{statistics.median(one) * 1e3:.1f}" for one in times) + " |")


if __name__ == "__main__":
    main()
