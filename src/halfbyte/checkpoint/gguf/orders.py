"""The orders of rows and columns in which tensors of GGUF files differ from transformers'.

An order is, for a tensor by llama.cpp's name in a layer, the row of transformers' tensor for each of its rows, or None where they are the
same. `config` is the model's config.json.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halfbyte.decoder.family import Config

Order = Callable[[str, Config, int], Tensor | None]


def interleaved(inner: str, config: Config, rows: int) -> Tensor | None:
    """Queries and keys: the two halves of each head are interleaved."""
    counts = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    count = int(config[counts[inner]]) if inner in counts else 0
    if count < 1 or rows % (2 * count):
        return None
    return torch.arange(rows, device="cpu").view(count, 2, -1).transpose(1, 2).flatten()


def tiled(inner: str, config: Config, rows: int) -> Tensor | None:
    """Linear attention: value heads follow each other by key heads, 0 1 0 1, not 0 0 1 1."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    before = 2 * keys * config["linear_key_head_dim"] if inner in ("attn_qkv", "ssm_conv1d") else 0
    if (not before and inner not in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a", "ssm_out")) or (rows - before) % values:
        return None
    heads = torch.arange(before, rows, device="cpu").view(keys, values // keys, -1)
    return torch.cat([torch.arange(before, device="cpu"), heads.transpose(0, 1).flatten()])


def separate(inner: str, config: Config, rows: int) -> Tensor | None:
    """Linear attention: transformers has the queries, keys, values and gates of each key head together, the file one after the other."""
    keys, share = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    sizes = [config["linear_key_head_dim"]] * 2 + [share * config["linear_value_head_dim"]] * 2
    if inner != "attn_qkv" or rows != keys * sum(sizes):
        return None
    return torch.cat([part.flatten() for part in torch.arange(rows, device="cpu").view(keys, -1).split(sizes, 1)])


# Functions by `GGUF.row_order`.
ORDERS: dict[str, Order] = {"interleaved": interleaved, "tiled": tiled, "separate": separate}
