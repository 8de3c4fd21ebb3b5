"""A GGUF file whose metadata and tensors contradict each other is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_decoders import CASES

import halfbyte as hb
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.errors import CheckpointError
from halfbyte.io import gguf
from halfbyte.io.tensors import TensorSpec
from halfbyte.language.checkpoint_tensors import open_checkpoint


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for kind in ("Starcoder2DecoderLayer", "Phi3DecoderLayer, longrope"):
        torch.manual_seed(7)
        folder = tmp_path_factory.mktemp("gguf")
        hb.save(hb.quantize_(CASES[kind]().eval(), hb.Config("q8_0", compute="float")), folder / "model")
        hb.export(folder / "model", folder / "model.gguf")
        found[kind] = folder / "model.gguf"
    return found


def rewritten(source: Path, target: Path, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    """A copy of a file with other values of metadata, and with other shapes of tensors, whose bytes are repeated or cut."""
    file = gguf.read_header(source)
    values = {key: value if isinstance(value, int | float | str) else list(value) for key, value in file.metadata.items()}
    sizes = {name: (entry.kind, shapes.get(name, entry.shape)) for name, entry in file.entries.items()}
    writer, content = gguf.Writer(target, values | metadata, sizes), source.read_bytes()
    for name, (kind, shape) in sizes.items():
        spec: TensorSpec = gguf._bytes(target, name, kind, shape)
        place = file.entries[name].place
        old = content[place.offset : place.offset + place.spec.nbytes]
        new = bytearray((old * -(-spec.nbytes // len(old)))[: spec.nbytes])
        writer.write(name, torch.frombuffer(new, dtype=spec.dtype).reshape(spec.shape))
    writer.finish()
    return target


@pytest.mark.parametrize(
    ("kind", "metadata", "shapes", "message"),
    [
        ("Starcoder2DecoderLayer", {}, {"blk.0.attn_output.weight": (96,)}, r"o_proj\.weight is \[96\] in the files"),
        ("Phi3DecoderLayer, longrope", {}, {"output.weight": (96,)}, r"lm_head\.weight is \[96\] in the files"),
        ("Starcoder2DecoderLayer", {}, {"blk.1.attn_k.bias": (1, 32)}, r"k_proj\.bias is \[1, 32\] in the files"),
        ("Phi3DecoderLayer, longrope", {"phi3.attention.key_length": [0, 0, 0]}, {}, "heads of 0 elements"),
    ],
)
def test_what_does_not_fit_is_refused(
    kind: str, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], message: str, files: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as refused:
        CpuModel(build_spec(*open_checkpoint(rewritten(files[kind], tmp_path / "m.gguf", metadata, shapes))))
    assert "\n" not in str(refused.value)


def test_a_copy_without_changes_is_read(files: dict[str, Path], tmp_path: Path) -> None:
    for number, path in enumerate(files.values()):
        CpuModel(build_spec(*open_checkpoint(rewritten(path, tmp_path / f"{number}.gguf", {}, {}))))
