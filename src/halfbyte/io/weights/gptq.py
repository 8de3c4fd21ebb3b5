"""GPTQ's weights <-> Codes. Nothing is rounded.

    qweight  int32 [K * bits / 32, N]  codes of neighbouring inputs, lowest bits first
    qzeros   int32 [G, N * bits / 32]  zero points of neighbouring outputs; version 1 stores each minus one, modulo 2^bits
    scales   [G, N]
    g_idx    int32 [K]                 the block of each input; without it, k / g
    w[n, k] = scales[g_idx[k], n] * (q[k, n] - point[g_idx[k], n])

With "activation order" (desc_act) g_idx is not sorted. The columns of the codes are then sorted by block and their order is kept:
column j of the codes belongs to input order[j]. No number changes, every block is contiguous, and a module reorders x at each call.

The version that a file claims can be wrong. A symmetric model has the same zero point everywhere, 8 or 128, which reveals the version;
the zero points of an asymmetric one average about 7.5, as weights are distributed symmetrically. `version_of` uses both.

Sources: https://arxiv.org/abs/2210.17323; github.com/AutoGPTQ/AutoGPTQ, qlinear_cuda.py (version 1, where a stored 15 is the point 0);
github.com/ModelCloud/GPTQModel (version 2, `checkpoint_format: gptq_v2`)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.io.weights import zero_points

PARTS = ("qweight", "qzeros", "scales", "g_idx")
# When the zero points of an asymmetric model overrule the claimed version: those of real weights vary little.
_LEAST_POINTS = 4096
_MOST_SPREAD = 3.0
_MOST_DISTANCE = 0.25


def read(parts: Mapping[str, Tensor], bits: int, group_size: int, version: int, where: str) -> tuple[Codes, Tensor | None]:
    """The weight [N, K], and the order of its columns (int32 [K]) where it is not that of the inputs."""
    qweight = zero_points.take(parts, "qweight", (torch.int32,), (None, None), where)
    k, n = qweight.shape[0] * 32 // bits, qweight.shape[1]
    block = zero_points.block_of(group_size, k)
    blocks = -(-k // block)
    stored = zero_points.unpack(zero_points.take(parts, "qzeros", (torch.int32,), (blocks, -(-n * bits // 32)), where), bits, n)
    scales = zero_points.take(parts, "scales", zero_points.SCALES, (blocks, n), where)
    zeros = stored if version == 2 else stored + 1 & (1 << bits) - 1
    data = zero_points.bytes_of(qweight.T)
    order = None
    if "g_idx" in parts:
        order = order_of(zero_points.take(parts, "g_idx", (torch.int32, torch.int64), (k,), where), block, where)
    if order is not None:
        data = zero_points.reorder(data, bits, order)
    return zero_points.codes_of(bits, group_size, k, data, scales.T.contiguous(), zeros.T.contiguous()), order


def write(codes: Codes, order: Tensor | None, version: int) -> dict[str, Tensor]:
    """The four tensors of a weight for which `why_not` gives None."""
    bits, k = codes.format.bits, codes.shape[1]
    data, zeros = zero_points.unsigned(codes)
    g_idx = torch.arange(k, dtype=torch.int32, device=data.device) // codes.format.block_size(k)
    if order is not None:
        back = order.long().argsort()
        data, g_idx = zero_points.reorder(data, bits, back), g_idx[back]
    stored = zeros if version == 2 else zeros - 1 & (1 << bits) - 1
    return {
        "qweight": zero_points.words(data).T.contiguous(),
        "qzeros": zero_points.pack(stored.T, bits),
        "scales": codes.scale.T.contiguous(),
        "g_idx": g_idx.contiguous(),
    }


def why_not(fmt: Format, shape: tuple[int, ...]) -> str | None:
    """Why a weight cannot be written, or None."""
    return zero_points.why_not(fmt, shape, (4, 8), n_multiple=32 // fmt.bits, k_multiple=32 // fmt.bits)


def version_of(stored: Tensor, bits: int, symmetric: bool, claimed: int) -> int:
    """1 or 2: how a model's zero points (`stored`, uint8) are encoded, judged by their values; `claimed` where that is not conclusive."""
    middle = zero_points.middle(bits)
    if stored.numel() == 0:
        return claimed
    if bool((stored == stored.flatten()[0]).all()):
        return {middle - 1: 1, middle: 2}.get(int(stored.flatten()[0]), claimed)
    values = stored.double()
    if symmetric or len(values.flatten()) < _LEAST_POINTS or bits != 4 or float(values.std()) > _MOST_SPREAD:
        return claimed
    other = 3 - claimed
    far = abs(float(values.mean()) - (middle - 0.5 - (other == 1)))
    return other if far < _MOST_DISTANCE else claimed


def order_of(g_idx: Tensor, block: int, where: str) -> Tensor | None:
    """The inputs sorted by block, int32; None where they are sorted already."""
    k = len(g_idx)
    blocks = -(-k // block)
    if k and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < blocks:
        raise CheckpointError(
            f"{where}.g_idx lies in {int(g_idx.min())} … {int(g_idx.max())}, there are {blocks} blocks: the checkpoint is damaged"
        )
    order = g_idx.argsort(stable=True)
    if not torch.equal(g_idx[order], torch.arange(k, dtype=g_idx.dtype, device="cpu") // block):
        raise CheckpointError(f"{where}.g_idx makes blocks of other sizes than {block}: the checkpoint is damaged")
    return None if torch.equal(order, torch.arange(k, device="cpu")) else order.to(torch.int32)
