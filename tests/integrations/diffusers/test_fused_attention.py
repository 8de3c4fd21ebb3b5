"""`optimize_` of diffusion models: queries, keys and values, also those of the prompt, are one product each, and GELU is in the product
before it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

import tiny_diffusers
from test_diffusers_gguf import flux, output, qwen_image, sd3, wan

import halfbyte as hb
from halfbyte.nn.dequantized import dequantize_
from halfbyte.nn.fused import FusedLinear, Geglu, GeluLinear


def unet() -> tuple[Any, None, dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    latents, prompt = (torch.randn(*shape, generator=generator) for shape in ((2, 4, 7, 9), (2, 5, 32)))
    return tiny_diffusers.unet(), None, {"sample": latents, "timestep": torch.tensor(3), "encoder_hidden_states": prompt}


QKV, CONTEXT = "to_q+to_k+to_v", "add_q_proj+add_k_proj+add_v_proj"
# What is computed together in one attention of each kind.
CASES: dict[str, tuple[Any, dict[str, set[str]]]] = {
    "flux": (flux, {"transformer_blocks.0.attn": {QKV, CONTEXT}, "single_transformer_blocks.0.attn": {QKV}}),
    "sd3": (sd3, {"transformer_blocks.0.attn": {QKV, CONTEXT}}),
    "qwen": (qwen_image, {"transformer_blocks.0.attn": {QKV, CONTEXT}}),
    "wan": (wan, {"blocks.0.attn1": {QKV}, "blocks.0.attn2": {"to_k+to_v"}}),
    "unet": (
        unet,
        {
            "mid_block.attentions.0.transformer_blocks.0.attn1": {QKV},
            "mid_block.attentions.0.transformer_blocks.0.attn2": {"to_k+to_v"},
        },
    ),
}
cases = pytest.mark.parametrize("name", CASES)


def run(model: Any, call: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
    found: Tensor = output(model, call, dtype).float()
    return found


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["float", "int8"])
def test_the_same_as_unfused(name: str, dtype: torch.dtype, how: str) -> None:
    torch.manual_seed(0)
    build, together = CASES[name]
    model, _, call = build()
    small: Any = hb.quantize_(model.eval().to(dtype), hb.Config("q8_0", compute=how))
    unfused, exact = run(small, call, dtype), copy.deepcopy(small)
    dequantize_(exact)
    floats = run(exact, call, dtype)
    fused: Any = hb.optimize_(small)
    for path, groups in together.items():
        remark = fused.get_submodule(path).halfbyte_remark
        assert set(remark.removeprefix("computed together: ").split(", ")) == groups
    assert "computed together: to_q+to_k+to_v" in str(hb.report(fused))
    gelus = [module for module in fused.modules() if type(module).__name__ == "GELU" and hasattr(module, "proj")]
    assert all(type(module.proj) is GeluLinear and module.approximate == module.proj.approximate for module in gelus)
    assert bool(gelus) == (name != "unet")  # which has GEGLU
    geglus = [module for module in fused.modules() if type(module) is Geglu]
    assert bool(geglus) == (name == "unet")
    assert not any(type(module).__name__ == "GEGLU" for module in fused.modules())
    if name == "flux":
        assert type(fused.single_transformer_blocks[0].proj_mlp) is GeluLinear
    found = run(fused, call, dtype)
    if name != "unet" or dtype == torch.float32:  # of a UNet in bfloat16, GEGLU is rounded once, not twice: its codes are others
        # The same products of the same codes: sums in another order in float32, each rounded once to the dtype; a few blocks pass that on.
        bound = float(unfused.norm()) * (1e-5 if dtype == torch.float32 else 2**-7)
        if (name, how) == ("unet", "int8"):
            # Norms and GELU also differ by 2^-20. Where a code becomes its neighbour by that, layers behind it round other numbers: at most
            # as if all errors of rounding were others, of the same size.
            bound = 2 * float((unfused - floats).norm())
        assert float((found - unfused).norm()) < bound
    # int8 rounds each activation by 2^-8 of the largest of its block.
    assert float((found - floats).norm() / floats.norm()) < (0.05 if how == "int8" else 1e-4 if dtype == torch.float32 else 0.03)


@cases
def test_activations_are_multiplied_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte import ops

    torch.manual_seed(0)
    model, _, call = CASES[name][0]()
    fused: Any = hb.optimize_(hb.quantize_(model.eval(), hb.Config("q8_0", compute="float")))
    products = []
    linear = ops.linear

    def counted(x: Tensor, packed: Any, *args: Any, **settings: Any) -> Tensor:
        products.append(packed.shape)
        return linear(x, packed, *args, **settings)

    monkeypatch.setattr(ops, "linear", counted)
    run(fused, call)
    # Transformer blocks of UNets are one native call each.
    native = {layer for block in fused.modules() if type(block).__name__ == "BasicTransformerBlock" for layer in block.modules()}
    sizes = {name: module for name, module in fused.named_modules() if isinstance(module, FusedLinear) and module not in native}
    rows = [sum(module._group.sizes) for module in sizes.values() if module.index == 0]
    assert sizes or native
    gated = [module.proj for module in fused.modules() if type(module) is Geglu]  # which call ops.linear_geglu
    others = [module for module in fused.modules() if type(module) is hb.QuantLinear and module not in (*gated, *native)]
    assert len(products) == len(rows) + len(others)  # none of the groups is computed twice


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_compiled(name: str) -> None:
    torch.manual_seed(0)
    model, _, call = CASES[name][0]()
    fused: Any = hb.optimize_(hb.quantize_(model.eval(), hb.Config("q8_0", compute="float")))
    want = run(fused, call)
    torch.compiler.reset()  # torch keeps eight graphs of a forward
    fused.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(fused, call), want, rtol=1e-4, atol=1e-4)


@cases
def test_a_fused_model_is_saved_as_before(name: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, _, _ = CASES[name][0]()
    small: Any = hb.quantize_(model.eval(), "q8_0")
    before = {key: tensor.clone() for key, tensor in small.state_dict().items()}
    hb.optimize_(small).save_pretrained(tmp_path)  # type: ignore[operator]
    after = type(model).from_pretrained(tmp_path).state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_offloaded_in_groups(kind: str) -> None:
    torch.manual_seed(0)
    model, _, call = unet()
    fused: Any = hb.optimize_(hb.quantize_(model, hb.Config("q8_0", compute="float")))
    resident, cpu = copy.deepcopy(fused), torch.device("cpu")
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    fused.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type=kind, **blocks)
    for path, module in fused.named_modules():
        if "forward" in vars(module):  # as diffusers hooks it: blocks leave such layers to diffusers' forwards, which add in another order
            layer = resident.get_submodule(path)
            layer.forward = layer.forward
    # Layers leave their groups, and so blocks their native calls: float32 sums in another order.
    want = run(resident, call)
    assert float((run(fused, call) - want).norm()) < 1e-5 * float(want.norm())


def test_a_feed_forward_layer_with_geglu() -> None:
    """diffusers' own GEGLU is the oracle; what replaces it is saved as before, copied, and gives way to an adapter or a hook."""
    from diffusers.models.attention import FeedForward

    torch.manual_seed(0)
    model: Any = hb.quantize_(nn.Sequential(FeedForward(64)), hb.Config("q8_0", compute="float"))
    x, state = torch.randn(2, 7, 64), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    want = model(x)
    hb.optimize_(model)
    gated = model[0].net[0]
    assert type(gated) is Geglu
    assert "computed together: proj+geglu" in str(hb.report(model))
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    seen = []
    handle = gated.proj.register_forward_hook(lambda *arguments: seen.append(arguments[2].shape))
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)
    handle.remove()
    assert seen == [(2, 7, 512)]
    dequantize_(model)
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)  # sums of 64 and 256 products in another order
