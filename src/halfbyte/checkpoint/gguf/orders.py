"""The orders of rows by which tensors of GGUF files differ from transformers', for the families that name one (`GGUF.row_order`).

Each function takes llama.cpp's name of a tensor within its layer (such as "attn_q"), the model's config.json and the number of rows. It
returns int64 [rows], the row of transformers' tensor for each row of the file's, or None where the orders are the same. For ssm_out, whose
inputs have the order that other tensors' rows have, rows stand for columns. Called by `Architecture.row_order` (names.py).

Source: llama.cpp, convert_hf_to_gguf.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halfbyte.decoder.family import Config

Order = Callable[[str, Config, int], Tensor | None]


def interleaved(inner: str, config: Config, rows: int) -> Tensor | None:
    """Return the order in which the two halves of each head of queries and keys are interleaved, for rope of adjacent elements:
    0 d/2 1 d/2 + 1 … with heads of d rows."""
    keys = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    heads = int(config[keys[inner]]) if inner in keys else 0
    if heads < 1 or rows % (2 * heads):
        return None
    return torch.arange(rows, device="cpu").view(heads, 2, -1).transpose(1, 2).flatten()


def tiled(inner: str, config: Config, rows: int) -> Tensor | None:
    """Return the order of linear attention's value heads by their place within a key head: with key heads 0 and 1, value heads that read
    keys 0 1 0 1, where transformers has 0 0 1 1. Rows of queries and keys come before those of values, and stay."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first_value = 2 * keys * config["linear_key_head_dim"] if inner in ("attn_qkv", "ssm_conv1d") else 0
    has_values = first_value or inner in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a", "ssm_out")
    if not has_values or (rows - first_value) % values:
        return None
    heads = torch.arange(first_value, rows, device="cpu").view(keys, values // keys, -1)
    return torch.cat([torch.arange(first_value, device="cpu"), heads.transpose(0, 1).flatten()])


def separate(inner: str, config: Config, rows: int) -> Tensor | None:
    """Return the order of linear attention's fused projection: all queries, then all keys, values and gates, where transformers has those
    of each key head together."""
    keys, values_per_key = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    sizes = [config["linear_key_head_dim"]] * 2 + [values_per_key * config["linear_value_head_dim"]] * 2  # rows of one key head
    if inner != "attn_qkv" or rows != keys * sum(sizes):
        return None
    return torch.cat([part.flatten() for part in torch.arange(rows, device="cpu").view(keys, -1).split(sizes, 1)])


# Functions by `GGUF.row_order`.
ORDERS: dict[str, Order] = {"interleaved": interleaved, "tiled": tiled, "separate": separate}
