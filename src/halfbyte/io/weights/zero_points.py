"""Common to AWQ, GPTQ, compressed-tensors and ONNX: unsigned codes with zero points, w = scale * (q - point).

Where every zero point is the middle of the range, 8 or 128, the codes are read as those of a symmetric format, q - 8 or q - 128: the
numbers are the same, less is stored, and kernels have less to do. They are written with zero points again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes, pack_nibbles, unpack_nibbles
from halfbyte.formats.spec import SCALE_DTYPES, Format

SCALES = tuple(SCALE_DTYPES.values())


def middle(bits: int) -> int:
    """The zero point of unsigned codes that are equivalent to signed ones."""
    return 1 << (bits - 1)


def block_of(group_size: int, k: int) -> int:
    """Elements that share a scale: `group_size`, or all `k` where that is -1."""
    return group_size if group_size > 0 else max(1, k)


def codes_of(bits: int, group_size: int, k: int, data: Tensor, scale: Tensor, zero: Tensor | None) -> Codes:
    """Unsigned packed codes uint8 [N, K * bits / 8], scales and zero points [N, blocks] -> Codes, signed if all points are the middle."""
    channel = group_size <= 0
    if zero is not None and bool((zero == middle(bits)).all()):
        zero = None
    fmt = Format(bits, "channel" if channel else group_size, "none" if zero is None else "point", scale.dtype)
    if bits == 8 and zero is None:
        data = flip(data).view(torch.int8)
    return Codes(fmt, (data.shape[0], k), data, scale, zero)


def flip(data: Tensor) -> Tensor:
    """8-bit codes with the highest bit flipped: signed to unsigned (q + 128) or back, as bytes."""
    return data.view(torch.uint8) ^ 128


def unsigned(codes: Codes) -> tuple[Tensor, Tensor]:
    """Packed unsigned codes uint8 [N, ceil(K * bits / 8)] and zero points uint8 [N, blocks] of codes in any format without offsets."""
    if codes.zero is not None:
        return codes.data, codes.zero
    points = torch.full(codes.scale.shape, middle(codes.format.bits), dtype=torch.uint8, device=codes.scale.device)
    return (codes.data if codes.format.bits == 4 else flip(codes.data)), points


def words(data: Tensor) -> Tensor:
    """Bytes uint8 [R, B] -> int32 [R, ceil(B / 4)], the last word of a row padded with 0."""
    if data.shape[1] % 4:
        data = torch.nn.functional.pad(data, (0, -data.shape[1] % 4))
    # Flat first: a single row may have strides that `view` does not take.
    return data.flatten().view(torch.int32).reshape(data.shape[0], data.shape[1] // 4)


def bytes_of(words: Tensor) -> Tensor:
    """The inverse: int32 [R, W] -> uint8 [R, 4 W]."""
    return words.flatten().view(torch.uint8).reshape(words.shape[0], 4 * words.shape[1])


def unpack(words: Tensor, bits: int, n: int) -> Tensor:
    """Codes or zero points of 4 or 8 bits, lowest bits first: int32 [R, ceil(n * bits / 32)] -> uint8 [R, n]."""
    data = bytes_of(words)
    return data[:, :n] if bits == 8 else unpack_nibbles(data, n)


def pack(values: Tensor, bits: int) -> Tensor:
    """The inverse: uint8 [R, n] -> int32 [R, ceil(n * bits / 32)]."""
    return words(values.contiguous() if bits == 8 else pack_nibbles(values))


def reorder(data: Tensor, bits: int, order: Tensor) -> Tensor:
    """Packed codes uint8 [N, K * bits / 8] with their columns in another order."""
    if bits == 8:
        return data[:, order.long()]
    return pack_nibbles(unpack_nibbles(data, 2 * data.shape[1])[:, order.long()])


def why_not(fmt: Format, shape: tuple[int, ...], bits: tuple[int, ...], n_multiple: int, k_multiple: int) -> str | None:
    """Why codes cannot be written with zero points in int32 words, or None."""
    n, k = shape[-2:]
    reasons = {
        f"it has {fmt.bits} bits": fmt.bits not in bits,
        "its codes are those of a table": bool(fmt.codebook),
        "it has offsets, not integer zero points": fmt.zero == "offset",
        "one scale is for all of it": fmt.block == "tensor",
        f"its {n} rows are not a multiple of {n_multiple}": n % n_multiple != 0,
        f"its {k} columns are not a multiple of {k_multiple}": k % k_multiple != 0,
        f"its blocks of {fmt.block} do not divide its {k} columns": k % fmt.block_size(k) != 0,
        "it is not a matrix": len(shape) != 2,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def take(parts: Mapping[str, Tensor], name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], where: str) -> Tensor:
    """The tensor `name` of a weight; raises CheckpointError where it is missing or of another dtype or shape. None: a size of any."""
    tensor = parts.get(name)
    if tensor is None:
        raise CheckpointError(f"{where} has no {name}: the checkpoint is damaged")
    fits = tensor.dim() == len(shape) and all(want in (None, got) for want, got in zip(shape, tensor.shape, strict=True))
    if tensor.dtype not in dtypes or not fits:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        sizes = ", ".join("…" if size is None else str(size) for size in shape)
        raise CheckpointError(f"{where}.{name} is {got}, but {wanted} [{sizes}] fits the others: the checkpoint is damaged")
    return tensor
