"""The variants of layers in language models, as Literals: gate functions, logits functions, router scores, projections and rope.

A function in torch defines each variant, and is the reference of kernels in tests. A variant that is added to a Literal is implemented in
the places below: until then mypy reports an error there, and a model that has it raises UnsupportedError.

    GateFunction     `gate_in_torch`, `kernels/cpu/step_sequence.GATES`, `kernels/gpu/epilogue.activated`; `decoder/family.py`
    Gelu             `kernels/cpu/linear/epilogue.py`, torch's functional.gelu
    LogitsFunction   `logits_in_torch`, `kernels/cpu/step_sequence.EACH`
    RouterScores     `scores_in_torch`, `kernels/cpu/transformer/experts.py`, `kernels/gpu/experts/routing.py`
    Projections      `num_kv_projections`, `kernels/cpu/transformer/attend.py`
    RopeInterleaved  `is_interleaved`, `kernels/cpu/transformer/attend.py`, `kernels/gpu/transformer/attend.py`,
                     `kernels/gpu/transformer/rope.py`
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.errors import lookup, unreachable

# f of a gated MLP, f(gate) * up, and of an MLP without gates, f(up).
GateFunction = Literal["silu", "gelu_tanh", "relu2"]
GATES: tuple[GateFunction, ...] = get_args(GateFunction)

# GELU of a linear layer's outputs. "" for no GELU; the other values are those of torch's `approximate`: "none" for erf, "tanh".
Gelu = Literal["", "none", "tanh"]

# A function of logits y with a constant c: "over" y / c, "times" y * c, "cap" c * tanh(y / c).
LogitsFunction = Literal["over", "times", "cap"]

# The scores of a router's logits, whose largest choose the experts of a token; "" for the logits themselves.
RouterScores = Literal["", "sigmoid", "softmax"]
SCORES: tuple[RouterScores, ...] = get_args(RouterScores)

# The projections of an attention layer: all; none of values, which are the keys before norm and rope; queries alone, as the layer reuses
# the keys and values of an earlier one.
Projections = Literal["qkv", "qk", "q"]
PROJECTIONS: tuple[Projections, ...] = get_args(Projections)

# Which elements of a head rope rotates together, of the first R = rotary_dim ones: "" for i and i + R / 2, else 2 i and 2 i + 1. Then the
# tables of cosines and sines have R / 2 columns ("half"), or R, each of them twice in a row ("repeated").
RopeInterleaved = Literal["", "half", "repeated"]
ROPE_INTERLEAVED: tuple[RopeInterleaved, ...] = get_args(RopeInterleaved)


def gate_in_torch(x: Tensor, function: GateFunction) -> Tensor:
    """Return f(x) in x's dtype, of any shape.

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
    """Return the function of logits y, of any shape, given by its name and its constant; y if there is none."""
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
    """Return the scores [M, E] of a router's logits [M, E], for M tokens and E experts."""
    match scores:
        case "sigmoid":
            return logits.sigmoid()
        case "softmax":
            return logits.softmax(-1)
        case _:
            raise unreachable(scores, "the scores of a router,")


def num_kv_projections(projections: Projections) -> int:
    """Return how many of keys and values a layer projects: 2, 1 or 0. Its fused product has so many blocks of num_kv_heads heads."""
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
    """Return the projections of a layer that has the first `count` of q_proj, k_proj and v_proj."""
    return lookup({len(projections): projections for projections in PROJECTIONS}, count, "the number of projections")


def is_interleaved(rope_interleaved: RopeInterleaved) -> bool:
    """Whether rope rotates adjacent pairs, 2 i and 2 i + 1, not the halves i and i + R / 2."""
    match rope_interleaved:
        case "":
            return False
        case "half" | "repeated":
            return True
        case _:
            raise unreachable(rope_interleaved, "the interleaving of rope,")
