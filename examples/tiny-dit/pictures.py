"""Grids of pictures as PNG files, written by the standard library alone: a GPU machine may have no Pillow."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor


def grid(pictures: Tensor, columns: int, gap: int = 2) -> Tensor:
    """Pictures [B, 3, S, S] from -1 to 1 as uint8 [H, W, 3], row by row, on white."""
    side = pictures.shape[-1] + gap
    rows = -(-len(pictures) // columns)
    canvas = torch.full((rows * side + gap, columns * side + gap, 3), 255, dtype=torch.uint8)
    pixels = ((pictures.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    for i, picture in enumerate(pixels):
        top, left = gap + i // columns * side, gap + i % columns * side
        canvas[top : top + side - gap, left : left + side - gap] = picture
    return canvas


def write_png(path: Path, pixels: Tensor, scale: int = 1) -> None:
    """Writes uint8 [H, W, 3], each pixel scale x scale (PNG, ISO/IEC 15948)."""
    pixels = pixels.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
    height, width, _ = pixels.shape
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels.reshape(height, -1)], dim=1)  # a filter type, 0, before each

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(lines.numpy().tobytes(), 9)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))
