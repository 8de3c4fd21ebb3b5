"""Pack the emoji of two npm packages into one file of 32 x 32 pictures for train.py.

    python prepare_data.py work          # npm downloads 136 MB into work; work/emoji32.npz is under 20 MB

The pictures are Twemoji (CC-BY 4.0) and Noto Emoji (Apache-2.0), 64 x 64, composed on white and averaged over 2 x 2 pixels. A class is a
style and a Unicode subcategory ("twitter food-fruit"). An emoji is held out, in all skin tones and styles, when the SHA-256 of its code
points is 0 modulo 32.

The file holds images uint8 [N, 32, 32, 3], labels int16 [N], held_out bool [N], names [N] and classes [C].
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

VERSION = "16.0.0"
STYLES = ("google", "twitter")
SIDE = 32
SMALLEST = 8  # pictures of a class


def archive(folder: Path, style: str) -> Path:
    """The package of a style, downloaded by npm unless the folder has it."""
    path = folder / f"emoji-datasource-{style}-{VERSION}.tgz"
    if not path.exists():
        subprocess.run(["npm", "pack", "--silent", f"emoji-datasource-{style}@{VERSION}"], cwd=folder, check=True)
    return path


def emoji(entries: list[dict[str, object]]) -> Iterator[tuple[str, str, str]]:
    """The name of the file, the subcategory and the code points without skin tone of each emoji."""
    for entry in entries:
        variations = entry.get("skin_variations", {})
        assert isinstance(variations, dict)
        for one in [entry, *variations.values()]:
            yield str(one["image"]), str(entry["subcategory"]), str(entry["unified"])


def pixels(png: bytes) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3]"""
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    return np.asarray(Image.alpha_composite(white, picture).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX))


def read(folder: Path) -> Iterator[tuple[str, str, bool, np.ndarray]]:
    """The class, name, whether it is held out and the pixels of each picture."""
    for style in STYLES:
        with tarfile.open(archive(folder, style)) as package:
            files = {member.name: member for member in package.getmembers()}

            def content(name: str, package: tarfile.TarFile = package, files: dict[str, tarfile.TarInfo] = files) -> bytes:
                file = package.extractfile(files[f"package/{name}"])
                assert file is not None
                return file.read()

            for image, subcategory, base in emoji(json.loads(content("emoji.json"))):
                if f"package/img/{style}/64/{image}" in files:
                    held_out = int(hashlib.sha256(base.encode()).hexdigest(), 16) % 32 == 0
                    yield f"{style} {subcategory}", image.removesuffix(".png"), held_out, pixels(content(f"img/{style}/64/{image}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the packages and emoji32.npz")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    pictures = list(read(folder))
    sizes = Counter(kind for kind, *_ in pictures)
    pictures = [picture for picture in pictures if sizes[picture[0]] >= SMALLEST]
    classes = sorted({kind for kind, *_ in pictures})
    path = folder / f"emoji{SIDE}.npz"
    np.savez_compressed(
        path,
        images=np.stack([image for *_, image in pictures]),
        labels=np.array([classes.index(kind) for kind, *_ in pictures], dtype=np.int16),
        held_out=np.array([held_out for _, _, held_out, _ in pictures]),
        names=np.array([name for _, name, *_ in pictures]),
        classes=np.array(classes),
    )
    count = sum(held_out for _, _, held_out, _ in pictures)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {len(pictures)} pictures, of which {count} are held out, {len(classes)} classes")


if __name__ == "__main__":
    main()
