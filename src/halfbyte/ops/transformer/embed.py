"""What encoders begin with, the rows of quantized tables added and normed, in one call on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import TensorAddresses, why_not_packed


class NormedEmbeddings:
    """y = norm(tables[0][ids[0]] + tables[1][ids[1]] + …), added in this order, in float32.

    Args:
        tables: Packed for CPUs, [N, K] each with one K; `embed.MOST_TABLES` at most.
        norm: A LayerNorm with a bias, [K] each.

    Attributes:
        rows: N of each table.

    Raises:
        ArgumentError: Tables and norm do not fit together, or `why_not_packed` refuses the tables.
    """

    def __init__(self, tables: Sequence[Packed], norm: Norm) -> None:
        from halfbyte.kernels.cpu.transformer import embed

        if not norm.layer_norm or norm.bias is None or norm.unit_offset:
            raise ArgumentError("the norm of embeddings is a LayerNorm with a bias, got another one: compute it in torch")
        k = tables[0].shape[-1] if tables else 0
        sizes = [*(tuple(table.shape) for table in tables), *(tuple(t.shape) for t in (norm.weight, norm.bias))]
        if not 1 <= len(tables) <= embed.MOST_TABLES or k == 0 or any(size[1:] != (k,) for size in sizes[:-2]) or sizes[-2:] != [(k,)] * 2:
            raise ArgumentError(f"one to {embed.MOST_TABLES} tables [N, K] of one K > 0 and a norm of K elements are taken, got {sizes}")
        if (reason := why_not_packed(tables)) is not None:
            raise ArgumentError(f"these embeddings are not computed in one call: {reason}")
        self.rows = [table.shape[0] for table in tables]
        self._data = [table.data for table in tables]
        self._tensors = TensorAddresses()
        geometries = [cpu_tiles.geometry(table.format, table.shape, sparse=table.layout == cpu_tiles.SPARSE) for table in tables]
        addresses = [table.data.data_ptr() for table in tables]
        self._tables = embed.Tables(
            list(zip(geometries, addresses, strict=True)),
            (self._tensors.as_float32(norm.weight), self._tensors.as_float32(norm.bias), norm.eps),
        )

    def __call__(self, ids: Sequence[Tensor]) -> Tensor:
        """ids, int64 [B or 1, T] for each table, the first [B, T] -> float32 [B, T, K]. No gradients.

        Raises ArgumentError for ids of other shapes and for those that a table does not have.
        """
        if not ids_fit(ids, len(self.rows)):
            got = ", ".join(f"{one.dtype} {list(one.shape)}" for one in ids)
            raise ArgumentError(f"{len(self.rows)} tables take on the CPU ids int64 [B, T], and [B or 1, T] after the first, got {got}")
        self._tensors.refresh()
        empty = (*ids[0].shape, self._tables.k)
        y = self._tables(ids, *ids[0].shape) if ids[0].numel() else torch.empty(empty, dtype=torch.float32, device="cpu")
        if y is None:
            for rows, one in zip(self.rows, ids, strict=True):
                least, most = (int(bound) for bound in torch.aminmax(one))
                if least < 0 or most >= rows:
                    raise ArgumentError(f"embedding ids lie in 0 … {rows - 1}, got {least} … {most}")
        assert y is not None
        return y


def ids_fit(ids: Sequence[Tensor], tables: int) -> bool:
    """Whether so many tables take these ids."""
    if len(ids) != tables or ids[0].dim() != 2:
        return False
    batch, tokens = ids[0].shape
    same_kind = all(one.dtype == torch.int64 and one.is_cpu and one.dim() == 2 and one.shape[1] == tokens for one in ids)
    return same_kind and all(len(one) in (1, batch) for one in ids)
