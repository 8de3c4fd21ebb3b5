"""Four bits after training, and trained for: the network of demo.py with weights in 4 bits, before and after a few epochs.

    python examples/cnn/qat.py             three networks, a minute or two on two cores

Batch norms are folded first, as they are for inference. The float network is trained on by the same recipe beside the others, so that
what more epochs are worth is not taken for what training for the format is.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from demo import digits, fit, network, steps, train
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import halfbyte as hb

FORMATS = ("int4_tensor", "int4_channel", "q4_0")
RATE = 3e-4  # a tenth of that of the training from scratch


def tune(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """A few epochs with a rate that falls to 0, so that weights come to rest on one code."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    fit(model, images, labels, epochs, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * steps(images)))
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="networks that the figures are means of (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="of training for the format (default: %(default)s)")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument(
        "--compute", default="float", choices=("float", "int8"), help="int8: activations are rounded too, in training and after"
    )
    args = parser.parse_args()
    images, labels, test_images, test_labels = digits()
    right: dict[tuple[str, str], list[float]] = {}

    def judge(weights: str, how: str, model: nn.Module) -> None:
        with torch.inference_mode():
            right.setdefault((weights, how), []).append(float((model(test_images).argmax(1) == test_labels).float().mean()))

    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = network()
        train(model, images, labels, 5)
        model.eval()
        hb.fold_batch_norms_(model)
        judge("fp32", "as trained", model)
        judge("fp32", "trained on", tune(copy.deepcopy(model), images, labels, args.epochs))
        for fmt in args.formats:
            for method in ("absmax", "mse"):
                config = hb.Config(fmt, method=method, compute=args.compute)
                judge(fmt, f"quantized after training, {method}", hb.quantize_(copy.deepcopy(model), config))
            for method, scales in (("absmax", "dynamic"), ("mse", "learned")):
                config = hb.Config(fmt, method=method, compute=args.compute)
                trained = hb.prepare_qat_(copy.deepcopy(model), config, scales=scales)
                judge(fmt, f"trained for it, {scales} scales", hb.convert_qat_(tune(trained, images, labels, args.epochs)))
    table = Table("weights", "how", "held-out accuracy, mean", "worst network", box=MARKDOWN)
    for (weights, how), accuracies in right.items():
        table.add_row(weights, how, f"{sum(accuracies) / len(accuracies):.2%}", f"{min(accuracies):.2%}")
    Console(width=140).print(table)
    about = f"{args.seeds} networks, {len(test_images)} images held out, compute={args.compute}, {args.epochs} epochs"
    print(f"{about}; torch {torch.__version__}, halfbyte {hb.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
