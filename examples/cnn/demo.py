"""A small residual network that reads handwritten digits, in 8 and 4 bits: its accuracy, size and speed beside the float model.

    python examples/cnn/demo.py            trains it first, in under a minute on two cores

The digits are scikit-learn's (1797 images of 8 x 8, from the UCI repository), so nothing is downloaded. A third of them is held out.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.machine import machine
from halfbyte.timing import interleave

SIDE = 16  # the images are enlarged, so that the network has something to do
BATCH = 64


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity() if stride == 1 and channels == out else shortcut
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.second(self.first(x)) + self.shortcut(x))
        return out


def network() -> nn.Sequential:
    stem = nn.Conv2d(1, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
    body = Residual(32, 32, 2), Residual(32, 64, 2), Residual(64, 128, 2)
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, and those held out."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = nn.functional.interpolate(images, size=(SIDE, SIDE), mode="bilinear")
    labels, order = torch.tensor(found.target), torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    cut = 2 * len(images) // 3
    return images[order[:cut]], labels[order[:cut]], images[order[cut:]], labels[order[cut:]]


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    fit(model, images, labels, epochs, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * steps(images)))


def steps(images: Tensor) -> int:
    """Of an epoch."""
    return len(images) // BATCH


def fit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    epochs: int,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """The digits in another order in each epoch, moved by up to two pixels."""
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for step in range(steps(images)):
            chosen = order[step * BATCH : (step + 1) * BATCH]
            shift = torch.randint(-2, 3, (2,)).tolist()
            loss = nn.functional.cross_entropy(model(images[chosen].roll(shift, (2, 3))), labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def megabytes(model: nn.Module) -> float:
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers())) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each model (default: %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    images, labels, test_images, test_labels = digits()
    model = network()
    train(model, images, labels, args.epochs)
    model.eval()
    hb.fold_batch_norms_(model)
    models: dict[str, nn.Module] = {"fp32": model}
    for name, config in {
        "int8_channel, activations quantized on the fly": hb.Config("int8_channel"),
        "int8_channel, each image quantized once": hb.Config("int8_channel", activation="image"),
        "int8_channel, float activations": hb.Config("int8_channel", compute="float"),
        "q4_0, activations quantized on the fly": hb.Config("q4_0"),
        "int4_channel, float activations": hb.Config("int4_channel", compute="float"),
    }.items():
        models[name] = hb.quantize_(copy.deepcopy(model), config)
    static = hb.Config("int8_channel", activations="static")
    models["int8 throughout, static"] = hb.quantize_(copy.deepcopy(model), static, images[:256].split(64))
    last = torch.channels_last
    with torch.inference_mode():
        right = {name: float((m(test_images).argmax(1) == test_labels).float().mean()) for name, m in models.items()}
        times = {}
        for count in (1, 32):
            batch = test_images[:count].contiguous(memory_format=last)
            times[count] = interleave({name: (lambda m=m, batch=batch: m(batch)) for name, m in models.items()}, rounds=args.rounds)
    table = Table("weights and activations", "held-out accuracy", "MB in memory", "batch 1, ms", "batch 32, ms", box=MARKDOWN)
    for name, m in models.items():
        milliseconds = [f"{times[count][name].median * 1e3:.2f}" for count in times]
        table.add_row(name, f"{right[name]:.2%}", f"{megabytes(m):.2f}", *milliseconds)
    console = Console(width=140)
    console.print(table)
    about = f"{machine().cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, halfbyte {hb.__version__}"
    console.print(f"{about}; {len(images)} images to train on, {len(test_images)} held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
