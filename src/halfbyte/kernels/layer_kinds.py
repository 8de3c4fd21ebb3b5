"""What layers of language models differ in, by name: each kind's names, and its definition in torch, which is also its reference.

A kind that is added to a Literal here is an error of mypy, and an UnsupportedError where it is used, until each place below computes it:

    GateFunction     `gate_in_torch`, `kernels/cpu/step_sequence.GATES`, `kernels/gpu/epilogue.activated`; `decoder/family.py`
    Gelu             `kernels/cpu/linear/epilogue.py`, torch's functional.gelu
    LogitsFunction   `logits_in_torch`, `kernels/cpu/step_sequence.EACH`
    RouterScores     `scores_in_torch`, `kernels/cpu/transformer/experts.py`, `kernels/gpu/experts/routing.py`
    Projections      `key_value_heads`, `kernels/cpu/transformer/attend.py`
    RopeInterleaved  `is_interleaved`, `kernels/cpu/transformer/attend.py`, `kernels/gpu/transformer/attend.py`,
                     `kernels/gpu/transformer/rope.py`
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.errors import lookup, unreachable

GateFunction = Literal["silu", "gelu_tanh", "relu2"]  # of gated linear units, f(gate) * up, and of feed-forward layers without gates
GATES: tuple[GateFunction, ...] = get_args(GateFunction)
Gelu = Literal["", "none", "tanh"]  # of a product's results, in torch's words: "": no GELU, exact, and by tanh
LogitsFunction = Literal["over", "times", "cap"]  # of logits y and a constant c: y / c, y * c, c * tanh(y / c)
RouterScores = Literal["", "sigmoid", "softmax"]  # by which a row chooses its experts; "": by logits
SCORES: tuple[RouterScores, ...] = get_args(RouterScores)
Projections = Literal["qkv", "qk", "q"]  # of a layer; "qk": values are keys before norm and rope; "q": another layer has keys and values
PROJECTIONS: tuple[Projections, ...] = get_args(Projections)
RopeInterleaved = Literal[
    "", "half", "repeated"
]  # "": elements i and i + R / 2 are a pair; else 2 i and 2 i + 1, by R / 2 cosines, or by R
ROPE_INTERLEAVED: tuple[RopeInterleaved, ...] = get_args(RopeInterleaved)


def gate_in_torch(x: Tensor, function: GateFunction) -> Tensor:
    """f(x) in x's dtype.

    silu       x * sigmoid(x)                                              (Elfwing and others, arXiv:1702.03118)
    gelu_tanh  x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x³)))      (Hendrycks and Gimpel, arXiv:1606.08415)
    relu2      max(x, 0)²                                                  (So and others, arXiv:2109.08668)
    """
    match function:
        case "silu":
            return functional.silu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu2":
            return x.relu().square()
        case _:
            raise unreachable(function, "the gate function")


def logits_in_torch(y: Tensor, logits: tuple[LogitsFunction, float] | None) -> Tensor:
    """The function of logits y and its constant; None: y."""
    if logits is None:
        return y
    function, constant = logits
    match function:
        case "over":
            return y / constant
        case "times":
            return y * constant
        case "cap":
            return torch.tanh(y / constant) * constant
        case _:
            raise unreachable(function, "the function of logits")


def scores_in_torch(logits: Tensor, scores: Literal["sigmoid", "softmax"]) -> Tensor:
    """Scores [M, E] of a router's logits."""
    match scores:
        case "sigmoid":
            return logits.sigmoid()
        case "softmax":
            return logits.softmax(-1)
        case _:
            raise unreachable(scores, "the scores of a router,")


def key_value_heads(projections: Projections) -> int:
    """Number of heads that a layer computes for each key-value head in addition to queries."""
    match projections:
        case "qkv":
            return 2
        case "qk":
            return 1
        case "q":
            return 0
        case _:
            raise unreachable(projections, "the projections of attention,")


def projections_of(count: int) -> Projections:
    """The first `count` of queries, keys and values."""
    return lookup({len(projections): projections for projections in PROJECTIONS}, count, "the number of projections")


def is_interleaved(rope_interleaved: RopeInterleaved) -> bool:
    """Whether rope rotates neighbours, not elements that lie half of the rotated ones apart."""
    match rope_interleaved:
        case "":
            return False
        case "half" | "repeated":
            return True
        case _:
            raise unreachable(rope_interleaved, "the interleaving of rope,")
