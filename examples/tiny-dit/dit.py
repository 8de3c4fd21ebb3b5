"""A class-conditional diffusion transformer (DiT, Peebles and Xie, arXiv:2212.09748) in plain torch, and its sampler.

Its parameters have the names of diffusers' DiTTransformer2DModel, where each block has a copy of the embedding of time and class, which is
shared here: `to_diffusers` copies it. It predicts the velocity of a rectified flow (Liu and others, arXiv:2209.03003; Esser and others,
arXiv:2403.03206):

    x_t = (1 - t) x_0 + t noise,  v(x_t, 1000 t, class) = noise - x_0;  t from 1, noise, to 0, a picture
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

_FREQUENCIES = 256  # of the embedding of time

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]  # of noisy pictures, times and classes


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; the class `classes` is that without a condition."""

    hidden: int = 384
    layers: int = 10
    heads: int = 6
    patch: int = 2
    side: int = 32
    classes: int = 150


def positions(hidden: int, side: int) -> Tensor:
    """Sines and cosines of the column, then of the row, of side x side patches: [1, side², hidden]."""
    rows, columns = torch.meshgrid(*[torch.arange(side, dtype=torch.float64)] * 2, indexing="ij")
    rate = 10000.0 ** -(torch.arange(hidden // 4, dtype=torch.float64) / (hidden // 4))
    angles = [place.flatten()[:, None] * rate for place in (columns, rows)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1).float()[None]


class Patches(nn.Module):
    """pixels [B, 3, S, S] -> [B, (S / patch)², hidden]"""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.hidden, shape.patch, shape.patch)
        self.register_buffer("positions", positions(shape.hidden, shape.side // shape.patch), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).mT + self.positions


class Condition(nn.Module):
    """The embeddings of time, by sines and cosines and two layers, and class, added: [B, hidden]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        layers = {"linear_1": nn.Linear(_FREQUENCIES, shape.hidden), "linear_2": nn.Linear(shape.hidden, shape.hidden)}
        self.timestep_embedder = nn.ModuleDict(layers)
        self.class_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(shape.classes + 1, shape.hidden)})

    def forward(self, time: Tensor, label: Tensor) -> Tensor:
        half = _FREQUENCIES // 2
        angles = time.float()[:, None] * (-math.log(10000) / (half - 1) * torch.arange(half, device=time.device)).exp()
        first, second = self.timestep_embedder["linear_1"], self.timestep_embedder["linear_2"]
        waves = torch.cat([angles.cos(), angles.sin()], dim=1).to(first.weight.dtype)
        return second(functional.silu(first(waves))) + self.class_embedder["embedding_table"](label)


class SelfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(hidden, hidden)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v))
        return self.to_out[0](functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.ModuleDict({"proj": nn.Linear(hidden, 4 * hidden)}), nn.Identity(), nn.Linear(4 * hidden, hidden)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](functional.gelu(self.net[0]["proj"](x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP behind LayerNorms without weights, which the condition scales, shifts and gates (adaLN-Zero)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.ModuleDict({"linear": nn.Linear(shape.hidden, 6 * shape.hidden)})
        self.attn1 = SelfAttention(shape.hidden, shape.heads)
        self.ff = FeedForward(shape.hidden)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift_ff, scale_ff, gate_ff = self.norm1["linear"](condition)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attn1(normed(x) * (1 + scale) + shift)
        return x + gate_ff * self.ff(normed(x) * (1 + scale_ff) + shift_ff)


def normed(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6)


class DiT(nn.Module):
    """(x [B, 3, S, S], 1000 t [B], class [B]) -> velocity [B, 3, S, S]"""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.pos_embed = Patches(shape)
        self.emb = Condition(shape)
        self.transformer_blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.proj_out_1 = nn.Linear(shape.hidden, 2 * shape.hidden)
        self.proj_out_2 = nn.Linear(shape.hidden, 3 * shape.patch**2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The paper's: Xavier for matrices, 0 for what modulates and for the output, so that each block is the identity first."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or ".norm1." in name or name.startswith("proj_out"):
                nn.init.zeros_(parameter)
            elif name.startswith("emb."):
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.xavier_uniform_(parameter.flatten(1))

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        condition = functional.silu(self.emb(time, label))
        patch, count = self.shape.patch, self.shape.side // self.shape.patch
        tokens = self.pos_embed(x)
        for block in self.transformer_blocks:
            tokens = block(tokens, condition)
        shift, scale = self.proj_out_1(condition)[:, None].chunk(2, dim=-1)
        pixels = self.proj_out_2(normed(tokens) * (1 + scale) + shift)
        return pixels.view(-1, count, count, patch, patch, 3).permute(0, 5, 1, 3, 2, 4).reshape(x.shape)


def to_diffusers(model: DiT) -> nn.Module:
    """The same model as diffusers' DiTTransformer2DModel, with the same weights."""
    from diffusers import DiTTransformer2DModel

    shape = model.shape
    found = DiTTransformer2DModel(
        num_attention_heads=shape.heads,
        attention_head_dim=shape.hidden // shape.heads,
        in_channels=3,
        num_layers=shape.layers,
        sample_size=shape.side,
        patch_size=shape.patch,
        num_embeds_ada_norm=shape.classes,
        norm_eps=1e-6,
    )
    found.load_state_dict(dict(_renamed(model)))
    return found.eval()


def _renamed(model: DiT) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        if name.startswith("emb."):
            yield from ((f"transformer_blocks.{i}.norm1.{name}", tensor) for i in range(model.shape.layers))
        else:
            yield name, tensor


@torch.no_grad()
def sample(velocity: Velocity, labels: Tensor, shape: Shape, *, seed: int = 0, steps: int = 30, guidance: float = 2.0) -> Tensor:
    """Pictures [B, 3, S, S] from -1 to 1 of classes [B], by Euler's method, with classifier-free guidance (arXiv:2207.12598).

    Picture i starts from noise of seed + i, on the CPU, so it does not depend on the batch or the device.
    """
    generators = (torch.Generator().manual_seed(seed + i) for i in range(len(labels)))
    x = torch.stack([torch.randn(3, shape.side, shape.side, generator=generator) for generator in generators]).to(labels.device)
    both = torch.cat([labels, torch.full_like(labels, shape.classes)])
    times = torch.linspace(1, 0, steps + 1).tolist()
    for time, following in pairwise(times):
        now = torch.full((len(both),), 1000 * time, device=x.device)
        conditional, free = velocity(x.repeat(2, 1, 1, 1), now, both).float().chunk(2)
        x = x + (following - time) * (free + guidance * (conditional - free))
    return x.clamp(-1, 1)
