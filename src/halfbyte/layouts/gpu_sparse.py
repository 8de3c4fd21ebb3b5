"""The codes of 2:4 sparse weights for GPUs: of four neighbours along K at most two are not 0, and two are stored, with their positions.

    codes = kept | positions       in place of the codes of `gpu_tiles.py`, which has panels, records, scales and zeros

A row of a record keeps 64 codes: two of each four k, in their order. 4 bits take 3 bits a weight, 8 bits 5.

    kept       4 bits: nibbles u = q + 8 where the codes are signed, u = q where they have a zero; 8 bits: bytes q, or q - 128. In 16-bit
               words, [panel][record][half][nt 4][row 8][k4 4][khalf 2][rowhalf 2][k 2]; half is 1 for 4 bits, 2 for 8. The word of row
               n = 16*nt + 8*rowhalf + row and kq = 8*khalf + 2*k4 + k holds what is kept in these places of a row and record:

                   bit       15 … 12 | 11 … 8 | 7 … 4 | 3 … 0      one lane's 16 bytes (lane = 4*row + k4), a word each:
                   4 bits    48 + kq |32 + kq |16 + kq|   kq       khalf     0 0 0 0   1 1 1 1
                   8 bits    32*half + 16 + kq |  32*half + kq     rowhalf   0 0 1 1   0 0 1 1      n = row, row + 8
                                                                   k         0 1 0 1   0 1 0 1      kq = 2*k4, 2*k4 + 1 (+ 8)

    positions  2 bits each, 16-bit words [panel][record][nt 4][row 8][k4 4][w 2][rowhalf 2]; a word has 16 k from 64*w + 16*k4 on:

                   bit       15 14 | 13 12 | 11 10 | 9 8 | 7 6 | 5 4 | 3 2 | 1 0
                   k         12 … 15       | 8 … 11      | 4 … 7     | 0 … 3       the second that is kept, the first

Sixteen bytes of codes and eight of positions are what one lane gives to four mma.sp.m16n8k32 (8 bits: to two): nibble j of the words is
the A operand for k = 32*j, and the pair of words w has the metadata for j = 2*w (lanes with k4 = 0, 1) and 2*w + 1 (k4 = 2, 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import FormatError

# The kept positions, two bits each, by the mask of which of four neighbours are not 0; 16 where more than two are.
_POSITIONS = (4, 4, 4, 4, 8, 8, 9, 16, 12, 12, 13, 16, 14, 16, 16, 16)


def kept(u: Tensor, pad_codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Stored codes uint8 [rows, K padded] -> the bytes of what is kept and of its positions, each uint8 [panels, bytes]. `pad_codes` are
    the codes that mean 0, [rows, K padded]. Raises FormatError where more than two of four neighbours are others."""
    used = (u != pad_codes).view(len(u), -1, 4)
    which = used[..., 0] + 2 * used[..., 1] + 4 * used[..., 2] + 8 * used[..., 3].to(torch.uint8)
    positions = torch.tensor(_POSITIONS, dtype=torch.uint8, device=u.device)[which.int()]
    if bool((positions == 16).any()):
        raise FormatError("the layout for 2:4 sparse weights keeps 2 of 4 neighbours along K, and more are not 0: pack them as they are")
    both = torch.stack((positions & 3, positions >> 2), dim=-1).long()
    u, bytes_ = u.view(len(u), -1, 4).gather(2, both).flatten(1), (positions[:, ::2] | positions[:, 1::2] << 4)
    if bits == 4:
        low, high = u.view(len(u), -1, 2, 16).unbind(2)
        u = (low | high << 4).flatten(1)
    #               nt rowhalf row record and half  byte khalf k4 k
    words = u.view(-1, 4, 2, 8, u.shape[1] // (8 * bits), bits // 4, 2, 2, 4, 2).permute(0, 4, 5, 1, 3, 8, 7, 2, 9, 6)
    #                     nt rowhalf row record          w k4 byte
    places = bytes_.view(-1, 4, 2, 8, bytes_.shape[1] // 16, 2, 4, 2).permute(0, 4, 1, 3, 6, 5, 2, 7)
    return words.flatten(1), places.flatten(1)
