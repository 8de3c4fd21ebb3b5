"""Transformer blocks of diffusers in one native call: the same numbers, and diffusers' forward where something is watched or changed."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor

import halfbyte as hb
from halfbyte.nn.frozen import Frozen
from halfbyte.nn.fused_transformers import compiled
from halfbyte.ops.transformer.cross_block import CrossBlock

X, PROMPT = torch.randn(2, 35, 40), torch.randn(2, 9, 24)


def blocks(**settings: Any) -> tuple[Any, Any]:
    """A quantized block and the same one, fused."""
    torch.manual_seed(0)
    model = BasicTransformerBlock(40, 2, 20, **{"cross_attention_dim": 24, "activation_fn": "geglu", "attention_bias": True, **settings})
    small = hb.quantize_(model.eval(), hb.Config("int8_channel", compute="float"))
    return small, hb.fuse_(copy.deepcopy(small))


def run(model: Any, x: Tensor = X, prompt: Tensor | None = PROMPT, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(x, encoder_hidden_states=prompt, **kwargs)
    return found


def same(found: Tensor, wanted: Tensor) -> bool:
    """The same sums in float32, of which some are added in another order."""
    return float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each native call."""
    calls, call = list[int](), CrossBlock.__call__

    def counted(self: CrossBlock, x: Tensor, context: Tensor) -> Tensor:
        calls.append(1)
        return call(self, x, context)

    monkeypatch.setattr(CrossBlock, "__call__", counted)
    return calls


def test_blocks(native: list[int]) -> None:
    small, fused = blocks()
    assert isinstance(fused, BasicTransformerBlock)
    assert type(fused).__name__ == "BasicTransformerBlock"
    wanted = run(small)
    assert same(run(fused), wanted)
    assert fused.halfbyte_remark == "one native call"
    file = io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    for other in (copy.deepcopy(fused), torch.load(file, weights_only=False)):
        assert same(run(other), wanted)
    assert len(native) == 3


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook": lambda block: block.attn2.to_q.register_forward_hook(lambda module, args, y: y * 2),
    "a layer": lambda block: setattr(block.ff.net, "2", nn.Linear(160, 40, dtype=torch.float32).requires_grad_(False).apply(zeroed)),
    "keys": lambda block: setattr(block.attn1, "to_k", linear(40)),
    "values": lambda block: setattr(block.attn1, "to_v", linear(40)),
    "values of the text": lambda block: setattr(block.attn2, "to_v", linear(24)),
    "order": lambda block: vars(block.attn2)["_modules"].update(to_k=block.attn2.to_v, to_v=block.attn2.to_k),
    "a last layer": lambda block: block.attn1.to_out.__setitem__(1, nn.Tanh()),
    "another attention": lambda block: setattr(block, "attn2", _Doubled()),
    "a processor": lambda block: block.attn1.set_processor(AttnProcessor()),
    "chunks": lambda block: block.set_chunk_feed_forward(35, 1),
    "training": lambda block: block.train(),
}


class _Doubled(nn.Module):
    heads = 2

    def forward(self, x: Tensor, **_: object) -> Tensor:
        return x * 2


def linear(k: int) -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(k, 40).requires_grad_(False)


def zeroed(linear: nn.Module) -> None:
    for parameter in linear.parameters():
        nn.init.constant_(parameter, 0.01)


@pytest.mark.parametrize("change", CHANGES)
def test_diffusers_computes_what_was_changed(change: str, native: list[int]) -> None:
    small, fused = blocks()
    run(fused)
    for model in (small, fused):
        CHANGES[change](model)
    assert same(run(fused), run(small))
    assert len(native) == 1


def test_written_parameters_are_seen(native: list[int]) -> None:
    small, fused = blocks()
    run(fused)
    for model in (small, fused):
        with torch.no_grad():
            model.norm2.weight.mul_(1.5)
            model.attn1.to_k.bias.add_(0.25)
            model.attn2.to_out[0].bias = nn.Parameter(torch.ones(40), requires_grad=False)
    assert same(run(fused), run(small))
    assert len(native) == 2


@pytest.mark.parametrize("kwargs", [{"attention_mask": torch.zeros(2, 1, 35)}, {"encoder_attention_mask": torch.zeros(2, 1, 9)}])
def test_masks_are_left_to_diffusers(kwargs: dict[str, Tensor], native: list[int]) -> None:
    small, fused = blocks()
    assert same(run(fused, **kwargs), run(small, **kwargs))
    x = X.clone().requires_grad_()
    fused(x, encoder_hidden_states=PROMPT).sum().backward()
    assert x.grad is not None
    assert not native


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"activation_fn": "gelu"}, "GEGLU"),
        ({"cross_attention_dim": None}, "attentions"),
        ({"norm_elementwise_affine": False}, "LayerNorm with a weight"),
        ({"final_dropout": True}, "GEGLU"),
        ({"attention_type": "gated"}, "fuser"),
    ],
)
def test_blocks_of_other_kinds(settings: dict[str, Any], reason: str, native: list[int]) -> None:
    small, fused = blocks(**settings)
    assert reason in str(compiled(fused))
    assert reason in fused.halfbyte_remark
    prompt = None if "cross_attention_dim" in settings else PROMPT
    assert same(run(fused, prompt=prompt), run(small, prompt=prompt))
    assert not native


def test_the_state_of_a_block() -> None:
    _, fused = blocks()
    state = Frozen(fused)
    assert state.is_unchanged()
    fused.ff.net[0].proj.compute = "int8"
    assert not state.is_unchanged()
