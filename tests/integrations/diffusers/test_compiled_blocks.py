"""Blocks of Flux, SD3 and SDXL under torch.compile as on a GPU: which operations multiply, and low-rank branches of fused layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock

import halfbyte as hb
from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.layouts import gpu_tiles
from halfbyte.ops import functions, row_codes

WIDTH, TOKENS = 256, 256  # whole tiles
X, TEXT, TEMB = torch.randn(1, TOKENS, WIDTH), torch.randn(1, TOKENS, WIDTH), torch.randn(1, WIDTH)
SIZES = {"dim": WIDTH, "num_attention_heads": 2, "attention_head_dim": 128}
# A block, its arguments, products of rows of tokens, and of the one row of adaLN
BLOCKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], int, int]] = {
    "flux": (lambda: FluxTransformerBlock(**SIZES), {"hidden_states": X, "encoder_hidden_states": TEXT, "temb": TEMB}, 8, 2),
    "flux_single": (lambda: FluxSingleTransformerBlock(**SIZES), {"hidden_states": X, "encoder_hidden_states": TEXT, "temb": TEMB}, 3, 1),
    "sd3": (lambda: JointTransformerBlock(**SIZES), {"hidden_states": X, "encoder_hidden_states": TEXT, "temb": TEMB}, 8, 2),
    "sdxl": (lambda: BasicTransformerBlock(**SIZES, cross_attention_dim=WIDTH), {"hidden_states": X, "encoder_hidden_states": TEXT}, 7, 0),
}


class Traced(Exception):
    """Ends a compilation whose graph is known."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_pack", lambda codes, *_: gpu_tiles.pack(codes, paired=codes.format.bits == 8))
    for module in (functions, row_codes):
        monkeypatch.setattr(module, "fused_by_inductor", lambda x: torch.compiler.is_dynamo_compiling())
    torch.compiler.reset()


@pytest.mark.parametrize(("format", "rank", "op"), [("int8_channel", 0, "linear_codes"), ("int4_channel", 32, "linear_low_rank")])
@pytest.mark.parametrize("name", BLOCKS)
def test_no_layer_quantizes_within_its_product(name: str, format: str, rank: int, op: str) -> None:
    make, arguments, products, of_one_row = BLOCKS[name]
    config = hb.Config(format, compute="int8", activation="row", low_rank=rank)
    block = hb.optimize_(hb.quantize_(make().eval().bfloat16().requires_grad_(False), config))
    called: list[tuple[str, int]] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function" and str(node.target).startswith("halfbyte."):
                shape = node.args[0].meta["example_value"].shape
                called.append((str(node.target).split(".")[1], shape[:-1].numel()))
        raise Traced

    with torch.inference_mode(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Traced"):
        torch.compile(block, fullgraph=True, dynamic=False, backend=backend)(**{key: x.bfloat16() for key, x in arguments.items()})
    of_tokens = [name for name, rows in called if rows >= TOKENS]
    assert of_tokens == [op] * products
    assert len(called) == products + of_one_row


def test_branches_of_fused_layers() -> None:
    """Each layer gets its own branch, and torch.compile the numbers of float64."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, 128) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.to_q(x), self.to_k(x), self.to_v(x)], -1)

    def linear_low_rank(x: Tensor, inner: Tensor, outer: Tensor, weight: Tensor, bias: Tensor, *settings: object) -> Tensor:
        name, n, k, *ways = settings
        geo = gpu_tiles.geometry_of(as_format(name), n, k, weight.numel())  # type: ignore[arg-type]
        codes = gpu_tiles.unpack(hb.Packed(geo.format, (n, k), geo.layout, weight))  # type: ignore[arg-type]
        branches = inner.shape[-1] // outer.shape[1]
        parts = zip(inner.double().chunk(branches, -1), outer.double().chunk(branches), strict=True)
        branch = torch.cat([a @ b.T for a, b in parts], -1)
        return reference.linear(x, codes, bias, *ways, None, branch).to(x.dtype)  # type: ignore[arg-type]

    library = torch.library.Library("halfbyte", "IMPL")
    library.impl("linear_low_rank", linear_low_rank, "CPU")
    torch.manual_seed(0)
    config = hb.Config("int4_channel", compute="int8", activation="row", low_rank=16)
    model = hb.optimize_(hb.quantize_(Attention().requires_grad_(False), config))
    x, expected = torch.randn(33, WIDTH), []
    for name in ("to_q", "to_k", "to_v"):
        layer: Any = model.get_submodule(name)
        parts = layer.low_rank_in, layer.low_rank_out
        quantized = reference.quantize_activation(x, WIDTH, "row")
        codes = layer.residual.codes().dequantize(torch.float64)
        branch = x.double() @ parts[0].double().T @ parts[1].double().T
        expected.append((quantized.q.double() * quantized.scale.double()) @ codes.T + layer.bias.double() + branch)
    with torch.inference_mode():
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    library._destroy()
    # x A^T is rounded to float32 after WIDTH products; all else is of float64.
    assert torch.allclose(y.double(), torch.cat(expected, -1), rtol=0, atol=1e-5)
