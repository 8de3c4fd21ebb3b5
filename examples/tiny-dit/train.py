"""Train the tiny DiT on the pictures that prepare_data.py packed; needs torch and numpy alone.

    python train.py --data emoji32.npz --out out --minutes 9.5        one GPU, bfloat16
    python train.py --data emoji32.npz --out out --minutes 10 --tiny  a CPU

The learning rate follows the clock (or, with --steps, the step count, which makes a run repeatable to the rounding of the device). Writes
to --out: model.pt (the averaged weights and the shape, which torch.load reads with weights_only=True), checkpoint.pt, from which the same
command continues, log.tsv (step, seconds, loss, held-out loss) and samples.png. Losses are mean squared errors of the velocity; 1 + the
variance of the pixels is that of predicting 0.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from dit import DiT, Shape, sample
from pictures import grid, write_png
from torch import Tensor, nn
from torch.nn import functional

START = time.monotonic()
DROPPED = 0.1  # share of labels that classifier-free guidance trains without
DECAY = 0.9995  # of the averaged weights


@dataclass
class Data:
    """Pictures uint8 [N, 3, S, S] and their classes, on the device."""

    images: Tensor
    labels: Tensor

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Pictures from -1 to 1, and their classes."""
        index = index.to(self.images.device, non_blocking=True)
        return self.images[index].float() / 127.5 - 1, self.labels[index]


def read(path: Path, device: str) -> tuple[Data, Data, list[str]]:
    """Training and held-out pictures, and the names of the classes."""
    with np.load(path) as stored:
        images = torch.from_numpy(stored["images"]).permute(0, 3, 1, 2).contiguous()
        labels, held_out = torch.from_numpy(stored["labels"]).long(), torch.from_numpy(stored["held_out"])
        classes = stored["classes"].tolist()
    parts = (Data(images[mask].to(device), labels[mask].to(device)) for mask in (~held_out, held_out))
    return *parts, classes


def loss_of(model: nn.Module, pictures: Tensor, labels: Tensor, times: Tensor, noise: Tensor) -> Tensor:
    blend = times[:, None, None, None]
    with torch.autocast(pictures.device.type, dtype=torch.bfloat16):
        found = model((1 - blend) * pictures + blend * noise, 1000 * times, labels)
    return functional.mse_loss(found.float(), noise - pictures)


def draw(data: Data, batch: int, classes: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The arguments of `loss_of` for random pictures; times have the logistic-normal distribution of Stable Diffusion 3.

    Small numbers come from the CPU's generator, which a checkpoint keeps; it seeds the noise, which is drawn on the device.
    """
    pictures, labels = data.at(torch.randint(len(data.labels), (batch,), generator=generator))
    device = pictures.device
    labels = torch.where((torch.rand(batch, generator=generator) < DROPPED).to(device), classes, labels)
    times = torch.randn(batch, generator=generator).sigmoid().to(device)
    noisy = torch.Generator(device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
    return pictures, labels, times, torch.randn(pictures.shape, generator=noisy, device=device)


@torch.no_grad()
def held_out_loss(model: nn.Module, data: Data, classes: int, batches: int = 4) -> float:
    """Over all held-out pictures, with the same times and noise each time."""
    generator = torch.Generator().manual_seed(1)
    losses = [loss_of(model, *draw(data, len(data.labels), classes, generator)) for _ in range(batches)]
    return float(torch.stack(losses).mean())


def learning_rate(progress: float, peak: float) -> float:
    """Linear over the first 2 %, then a half cosine to 2 % of the peak."""
    if progress < 0.02:
        return peak * max(progress, 1e-4) / 0.02
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (min(progress, 1.0) - 0.02) / 0.98)))


class Trainer:
    """A model, its averaged weights and its optimizer; all that a checkpoint holds."""

    def __init__(self, shape: Shape, data: Data, device: str, *, batch: int, peak: float, seed: int, compiled: bool) -> None:
        torch.manual_seed(seed)
        self.data, self.batch, self.peak, self.shape = data, batch, peak, shape
        self.model = DiT(shape).to(device)
        self.averaged = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01, fused=device == "cuda")
        self.runner: Callable[..., Tensor] = torch.compile(self.model) if compiled else self.model
        self.generator = torch.Generator().manual_seed(seed)
        self.step, self.seconds = 0, 0.0

    def train_step(self, progress: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress, self.peak)
        loss = loss_of(self.runner, *draw(self.data, self.batch, self.shape.classes, self.generator))  # type: ignore[arg-type]
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        share = 1 - min(DECAY, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.averaged.parameters()), list(self.model.parameters()), share)
        return loss.detach()

    def save(self, folder: Path) -> None:
        state: dict[str, object] = {
            "model": self.model.state_dict(),
            "averaged": self.averaged.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        state |= {"generator": self.generator.get_state(), "step": self.step, "seconds": self.seconds}
        write(state, folder / "checkpoint.pt")
        weights = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in self.averaged.state_dict().items()}
        write({"shape": asdict(self.shape), "weights": weights}, folder / "model.pt")

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name in ("model", "averaged", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        self.step, self.seconds = state["step"], state["seconds"]


def write(state: Mapping[str, object], path: Path) -> None:
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def trained(path: Path) -> DiT:
    """The model of model.pt, in float32."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model = DiT(Shape(**state["shape"]))
    model.load_state_dict(state["weights"])
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="emoji32.npz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.5, help="of training, from the first step on (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="this many steps, whatever the clock says")
    parser.add_argument("--batch", type=int, help="pictures a step (default: 512, tiny: 64)")
    parser.add_argument("--peak", type=float, default=1e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of 1.3 M parameters and patches of 4 x 4")
    parser.add_argument("--classes", default="", help="only classes whose names contain this, for example flag")
    parser.add_argument("--save-seconds", type=float, default=120, help="between checkpoints (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")

    data, held_out, classes = read(args.data, device)
    chosen = torch.tensor([args.classes in name for name in classes], device=device)
    data, held_out = (Data(part.images[chosen[part.labels]], part.labels[chosen[part.labels]]) for part in (data, held_out))
    sizes = {"hidden": 128, "layers": 4, "heads": 2, "patch": 4} if args.tiny else {}
    shape = Shape(**sizes, side=data.images.shape[-1], classes=len(classes))
    batch = args.batch or (64 if args.tiny else 512)
    compiled = device == "cuda" and not args.no_compile
    trainer = Trainer(shape, data, device, batch=batch, peak=args.peak, seed=args.seed, compiled=compiled)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {len(data.labels)} pictures and {len(held_out.labels)} held out, {device}", flush=True)
    if (args.out / "checkpoint.pt").exists():
        trainer.load(args.out / "checkpoint.pt")
        print(f"continues after step {trainer.step}", flush=True)

    limit, last, saved, losses = 60 * args.minutes, time.monotonic(), time.monotonic(), []
    with (args.out / "log.tsv").open("a") as log:
        if trainer.step == 0:
            log.write("step\tseconds\tloss\theld_out\n")
        while trainer.step < args.steps if args.steps else trainer.seconds < limit:
            losses.append(trainer.train_step(trainer.step / args.steps if args.steps else trainer.seconds / limit))
            if trainer.step % 20 and trainer.step != args.steps and trainer.step > 1:
                continue
            mean = float(torch.stack(losses).mean())  # waits for the device
            now = time.monotonic()
            trainer.seconds += 0.0 if trainer.step == 1 else now - last  # the first step compiles
            last = now
            done = trainer.step == args.steps if args.steps else trainer.seconds >= limit
            if done or trainer.step % 200 == 0:
                score = held_out_loss(trainer.averaged, held_out, shape.classes)
                line = f"{trainer.step}\t{trainer.seconds:.1f}\t{mean:.4f}\t{score:.4f}"
                log.write(f"{line}\n")
                log.flush()
                print(line.replace("\t", "  "), flush=True)
                losses = []
            if done or now - saved > args.save_seconds:
                trainer.save(args.out)
                saved = time.monotonic()

    labels = data.labels.unique()
    labels = labels[torch.linspace(0, len(labels) - 1, 48).long().to(device)]
    write_png(args.out / "samples.png", grid(sample(trainer.averaged, labels, shape), 12), scale=2)
    epochs = trainer.step * batch / len(data.labels)
    print(f"done at {time.monotonic() - START:.0f} s, step {trainer.step}, {epochs:.1f} epochs", flush=True)


if __name__ == "__main__":
    main()
