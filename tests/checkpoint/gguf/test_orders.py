"""The orders of rows in GGUF files, by examples that are written out."""

from __future__ import annotations

import pytest
import torch

from halfbyte.checkpoint.gguf.names import ARCHITECTURES
from halfbyte.checkpoint.gguf.orders import ORDERS
from halfbyte.decoder.family import Config

ATTENTION: Config = {"num_attention_heads": 2, "num_key_value_heads": 1}
# Two key heads of one number, and four value heads of two.
LINEAR: Config = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 1, "linear_value_head_dim": 2}


@pytest.mark.parametrize(
    ("order", "tensor", "config", "rows"),
    [
        ("interleaved", "attn_q", ATTENTION, [0, 2, 1, 3, 4, 6, 5, 7]),
        ("interleaved", "attn_k", ATTENTION, [0, 2, 1, 3]),
        ("tiled", "attn_gate", LINEAR, [0, 1, 4, 5, 2, 3, 6, 7]),
        ("tiled", "ssm_alpha", LINEAR, [0, 2, 1, 3]),
        ("tiled", "ssm_out", LINEAR, [0, 1, 4, 5, 2, 3, 6, 7]),
        ("tiled", "attn_qkv", LINEAR, [0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10, 11]),  # two queries and two keys, then values
        ("separate", "attn_qkv", LINEAR, [0, 10, 1, 11, 2, 3, 4, 5, 12, 13, 14, 15, 6, 7, 8, 9, 16, 17, 18, 19]),
    ],
)
def test_rows_of_a_file_by_their_place_in_transformers(order: str, tensor: str, config: Config, rows: list[int]) -> None:
    found = ORDERS[order](tensor, config, len(rows))
    assert found is not None
    assert found.dtype == torch.int64
    assert found.tolist() == rows


@pytest.mark.parametrize(
    ("order", "tensor", "config", "rows"),
    [
        ("interleaved", "attn_v", ATTENTION, 8),
        ("interleaved", "attn_q", ATTENTION, 6),  # heads of three rows have no halves
        ("tiled", "ffn_gate", LINEAR, 8),
        ("tiled", "ssm_norm", LINEAR, 2),
        ("separate", "attn_gate", LINEAR, 20),
        ("separate", "attn_qkv", LINEAR, 12),  # of another projection
    ],
)
def test_other_tensors_keep_their_order(order: str, tensor: str, config: Config, rows: int) -> None:
    assert ORDERS[order](tensor, config, rows) is None


def test_every_order_is_one_of_an_architecture() -> None:
    assert {architecture.gguf.row_order for architecture in ARCHITECTURES} == {"", *ORDERS}
