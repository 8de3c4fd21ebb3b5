"""Embeddings whose rows are multiplied by one factor, as in Gemma and BART: transformers has a subclass of nn.Embedding with an attribute
`embed_scale` for each such family."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

Factor = float | Tensor
ATTRIBUTE = "embed_scale"


class ScaledEmbedding(nn.Embedding):
    """Rows of a weight, times `embed_scale` if it has one: a number, or a one-element tensor, rounded to the weight's dtype first."""

    def forward(self, ids: Tensor) -> Tensor:
        return scaled(super().forward(ids), factor_of(self))


def scaled(rows: Tensor, factor: Factor | None) -> Tensor:
    """The rows of an embedding, times `factor`."""
    if factor is None:
        return rows
    return rows * (factor.to(rows.dtype) if isinstance(factor, Tensor) else factor)


def set_factor(module: nn.Module, factor: Factor | None) -> None:
    """Give an embedding its factor: a tensor becomes a non-persistent buffer, as in transformers."""
    if isinstance(factor, Tensor):
        module.register_buffer(ATTRIBUTE, factor, persistent=False)
    else:
        setattr(module, ATTRIBUTE, factor)


def factor_of(module: nn.Embedding) -> Factor | None:
    """The factor of an embedding whose forward does nothing else besides the look-up; None for any other.

    Determined by a trial on a small table, as the name of the attribute alone does not tell what the forward computes.
    """
    factor = getattr(module, ATTRIBUTE, None)
    if isinstance(module, ScaledEmbedding):
        return factor
    if type(module).forward is nn.Embedding.forward or not isinstance(factor, float | int | Tensor):
        return None
    if isinstance(factor, Tensor) and factor.numel() != 1:
        return None
    trial = copy.copy(module)
    table = torch.tensor([[0.5, -3.0], [1.25, 7.0], [-0.125, 0.0]], device="cpu")  # transformers may have set the default device to "meta"
    known: Factor = torch.tensor(2.5, device="cpu") if isinstance(factor, Tensor) else float(factor)  # on a skeleton it has no data yet
    trial.__dict__ = {**vars(module), "_parameters": {"weight": nn.Parameter(table, requires_grad=False)}, "padding_idx": None}
    trial.__dict__.pop("weight", None)  # the placeholder of a weight that has not been read, while a model loads
    if isinstance(factor, Tensor):
        trial.__dict__["_buffers"] = {ATTRIBUTE: known}
    ids = torch.tensor([[2, 0], [1, 1]], device="cpu")
    try:
        with torch.no_grad():
            same = torch.allclose(type(module).forward(trial, ids), scaled(table[ids], known))
    except Exception:  # another forward may fail in any way
        return None
    return factor if same else None
