"""Layers that are computed together give, save and report what they do alone."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.bounded import count_write, version_of, writes_to
from halfbyte.checkpoint import load_tensors, save
from halfbyte.errors import UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen.elementary import GELU_BOUND
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.dequantized import dequantize_
from halfbyte.nn.frozen import Frozen
from halfbyte.nn.fused import FusedLinear, fuse_
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.report import report


class Block(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(72, 72, bias), nn.Linear(72, 17, bias), nn.Linear(72, 17, bias)
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(72, 100, bias), nn.Linear(72, 100, bias), nn.Linear(100, 72, bias)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
        return torch.cat((y, self.down_proj(self.gate_proj(x) * self.up_proj(x))), -1)


def fused(model: nn.Module) -> tuple[str, ...]:
    """What the report says of it."""
    assert fuse_(model) is model
    return report(model).notes


def pair(config: Config, bias: bool = False) -> tuple[nn.Module, nn.Module]:
    """(alone, together), with the same weights."""
    block = nn.Sequential(Block(bias))
    alone, together = (quantize_(copy.deepcopy(block), config) for _ in range(2))
    assert fused(together) == ("0: computed together: q_proj+k_proj+v_proj, gate_proj+up_proj",)
    return alone, together


def test_outputs_are_those_of_the_input_as_it_is_and_of_no_other_layer() -> None:
    alone, together = (model[0] for model in pair(Config("q8_0", compute="float"), bias=True))
    x = torch.randn(3, 72)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            first = together.q_proj(x)
            first *= 2  # neither refused nor seen by the next call
            assert torch.equal(together.q_proj(x), alone.q_proj(x))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            x = torch.randn(3, 72)  # torch counts no writes to one of inference mode
            together.q_proj(x)
            x.mul_(3)
            assert torch.equal(together.k_proj(x), alone.k_proj(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("compiled", [False, True])
def test_siblings_are_one_product(
    mode: Callable[[], AbstractContextManager[None]], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, together = pair(Config("q8_0", compute="float"))
    block, calls, linear = together[0], list[int](), ops.linear
    monkeypatch.setattr(ops, "linear", lambda *args, **kwargs: (calls.append(1), linear(*args, **kwargs))[1])

    def siblings(x: Tensor) -> Tensor:
        x = x * 2
        return torch.cat((block.q_proj(x), block.k_proj(x), block.v_proj(x)), -1)

    with mode():
        (torch.compile(siblings, backend="eager", fullgraph=True) if compiled else siblings)(torch.randn(3, 72))
    assert len(calls) == 1


def test_a_write_to_a_bias_between_siblings_is_seen() -> None:
    alone, together = (model[0] for model in pair(Config("q8_0", compute="float"), bias=True))
    x = torch.randn(3, 72)
    together.q_proj(x)
    with torch.no_grad():
        for block in (alone, together):
            block.k_proj.bias.add_(1)
    assert torch.equal(together.k_proj(x), alone.k_proj(x))


def test_a_model_copied_and_fused_in_inference_mode_has_biases_without_versions() -> None:
    """Of a parameter whose data was an inference tensor and is none, torch raises instead of giving a version."""
    with torch.inference_mode():
        together = fuse_(quantize_(copy.deepcopy(Block(bias=True)), "q8_0"))
    bias = together.q_proj.bias
    assert not bias.is_inference()
    assert version_of(bias) is None
    writes = writes_to(bias)
    count_write(bias)
    assert writes_to(bias) != writes
    assert Frozen(together).is_unchanged()


@torch.inference_mode()
def test_loaded_codes_are_those_of_later_calls_where_torch_counts_no_writes() -> None:
    blocks = [quantize_(Block(), "int8_channel") for _ in range(2)]
    together = fuse_(copy.deepcopy(blocks[0]))
    x = torch.randint(-128, 128, (3, 72), dtype=torch.int8)

    def output(block: nn.Module) -> Tensor:
        weight = block.q_proj.together[0] if isinstance(block.q_proj, FusedLinear) else block.q_proj.packed
        return ops.qlinear(x, weight, in_scale=0.1, in_zero=100, out_scale=0.1, out_zero=0)[:, : block.q_proj.out_features]

    assert torch.equal(output(together), output(blocks[0]))
    together.load_state_dict(blocks[1].state_dict())
    assert torch.equal(output(together), output(blocks[1]))


def test_outputs_are_those_of_the_modes_that_are_on() -> None:
    alone, together = (model[0] for model in pair(Config("q8_0", compute="float"), bias=True))
    x = torch.randn(3, 72, requires_grad=True)
    with torch.no_grad():
        together.q_proj(x)
    together.k_proj(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(torch.vmap(together.v_proj)(x), alone.v_proj(x), rtol=1e-5, atol=1e-5)  # sums of 72 products
    together.q_proj(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert together.k_proj(x).dtype == alone.k_proj(x).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert together.v_proj(x).dtype == torch.float16
    together.q_proj(x)
    assert torch.equal(copy.deepcopy(together).k_proj(x), alone.k_proj(x)), "a copy takes no outputs along"


def test_queries_of_other_inputs_stay_alone() -> None:
    """Together, a decoder's queries would compute keys and values that nobody asks for, at each token."""
    assert fused(quantize_(nn.ModuleDict({"encoder_attn": Block()}), "q4_0")) == ()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("config", [Config("q4_0"), Config("int4_g24_zp", compute="float"), Config("int8_channel", activation="row")])
@torch.inference_mode()
def test_the_same_numbers(config: Config, bias: bool) -> None:
    alone, together = pair(config, bias)
    for m in (1, 5):
        x = torch.randn(2, m, 72)
        assert torch.equal(together(x), alone(x))
    for name in ("q_proj", "v_proj", "up_proj"):
        assert torch.equal(together[0].get_submodule(name).weight + 0, alone[0].get_submodule(name).weight + 0)
        assert together[0].get_submodule(name)._group.cached_outputs is None, "nothing is kept"
    assert torch.equal(together.bfloat16()(x.bfloat16()), alone.bfloat16()(x.bfloat16()))


@torch.inference_mode()
def test_some_have_biases() -> None:
    """As in Whisper."""
    block = nn.Sequential(Block(bias=True))
    block[0].k_proj = nn.Linear(72, 17, bias=False)
    alone = quantize_(block, "q4_0")
    together = fuse_(copy.deepcopy(alone))
    assert isinstance(together[0].k_proj, FusedLinear)
    assert together[0].k_proj.bias is None
    x = torch.randn(2, 3, 72)
    assert torch.equal(together(x), alone(x))
    assert together.state_dict().keys() == alone.state_dict().keys()
    alone[0].q_proj.bias.requires_grad_(True)  # a fused layer would not train it
    assert type(fuse_(alone)[0].k_proj) is QuantLinear


@torch.inference_mode()
def test_transformers_names_them_in_two_ways() -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
    alone = quantize_(BertModel(BertConfig(vocab_size=50, **sizes)).eval(), "q4_0")
    together = copy.deepcopy(alone)
    said = (
        "encoder.layer.0.attention.self: computed together: query+key+value",
        "encoder.layer.0.intermediate: computed together: dense+intermediate_act_fn",
    )
    assert report(fuse_(together, activated=())).notes == said[:1]
    ids = torch.randint(0, 50, (2, 7))
    assert torch.equal(together(ids).last_hidden_state, alone(ids).last_hidden_state)
    assert fused(together) == said
    # The GELU differs in its last bits, by which a code of the next layer's activations may become its neighbour.
    torch.testing.assert_close(together(ids).last_hidden_state, alone(ids).last_hidden_state, atol=0.05, rtol=0)


class Mlp(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(72, 100), act, nn.Linear(100, 72)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_in_the_product(dtype: torch.dtype, approximate: str, tmp_path: Path) -> None:
    alone = quantize_(nn.Sequential(Mlp(nn.GELU(approximate))), "q4_0").to(dtype)
    together = copy.deepcopy(alone)
    assert fused(together) == ("0: computed together: fc1+act",)
    assert report(together).rows == report(alone).rows
    assert together.state_dict().keys() == alone.state_dict().keys()
    x = torch.randn(5, 72, dtype=dtype)
    with torch.no_grad():
        inside, expected = together[0].fc1(x), nn.functional.gelu(alone[0].fc1(x).double(), approximate=approximate)
    # Where the result is rounded to bfloat16, so is what torch's GELU takes, whose slope is at most 1.13.
    bound = GELU_BOUND + (2 * 2.0**-8 if dtype == torch.bfloat16 else 0)
    assert bool(((inside.double() - expected).abs() <= bound * alone[0].fc1(x).double().abs() + 2.0**-40).all())
    compiled = torch.compile(together[0].fc1, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), inside)
    gradients = []
    for model in (alone, together):
        leaf = x.clone().requires_grad_()
        model(leaf).float().square().sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert torch.equal(*gradients), "torch's own GELU, where gradients are asked for"


def test_other_activations_stay() -> None:
    hooked = nn.GELU()
    hooked.register_forward_hook(lambda *_: None)
    for act in (nn.SiLU(), nn.ReLU(), hooked):
        assert not fused(quantize_(nn.Sequential(Mlp(act)), "q4_0"))


class _Mixed(nn.Module):
    """The MLP of SegFormer: its activation is that of the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.dwconv, self.activation_fn = nn.Linear(64, 64), nn.Conv1d(64, 64, 1), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.activation_fn(self.dwconv(x.mT).mT)  # type: ignore[no-any-return]


@torch.no_grad()
def test_an_activation_of_another_layer_stays() -> None:
    model, x = quantize_(nn.Sequential(_Mixed()).eval(), Config("q8_0", compute="float")), torch.randn(2, 5, 64)
    wanted = model(x)
    reason = "the source of _Mixed does not show that only activation_fn reads the output of fc1"
    assert fused(model) == (f"0: fc1+activation_fn are not all computed together: {reason}",)
    torch.testing.assert_close(model(x), wanted)


def test_an_activation_whose_forward_was_replaced_or_that_is_watched_stays() -> None:
    replaced = quantize_(nn.Sequential(Mlp(nn.GELU())), Config("q8_0", compute="float"))
    replaced[0].forward = lambda x: replaced[0].fc2(replaced[0].fc1(x))
    reason = "the source of Mlp does not show that only act reads the output of fc1"
    assert fused(replaced) == (f"0: fc1+act are not all computed together: {reason}",)
    watched = quantize_(nn.Sequential(Mlp(nn.GELU())), Config("q8_0", compute="float"))
    watched[0].fc1.register_forward_hook(lambda *_: None)
    assert fused(watched) == ("0: fc1+act are not all computed together: fc1 has hooks, a forward of its own or a bias to train",)
    assert type(watched[0].fc1) is QuantLinear


def test_saved_and_reported_as_if_alone(tmp_path: Path) -> None:
    alone, together = pair(Config("q4_0"))
    assert report(together).rows == report(alone).rows
    save(alone, tmp_path / "a")
    save(together, tmp_path / "t")
    a, t = load_tensors(tmp_path / "a"), load_tensors(tmp_path / "t")
    assert a.keys() == t.keys()
    for name, codes in a.items():
        assert isinstance(codes, Codes)
        other = t[name]
        assert isinstance(other, Codes)
        assert all(torch.equal(v, other.tensors()[part]) for part, v in codes.tensors().items())


@pytest.mark.parametrize("config", [Config("q4_0"), Config("int4_g24_zp", compute="float"), Config("int8_channel", activation="row")])
def test_state_dicts_are_those_of_layers_alone(config: Config) -> None:
    """They go both ways; a model takes another's while others have looked at its weights and computed with them, and keeps its own."""
    alone, together = pair(config, bias=True)
    other, other_together = pair(config, bias=True)
    x = torch.randn(3, 72)
    with torch.inference_mode():
        before, after = alone(x), other(x)
        packed = together[0].k_proj.together[0]
        together.load_state_dict(together.state_dict())
        assert torch.equal(together(x), before)
        for state in (other.state_dict(), other_together.state_dict()):
            together.load_state_dict(alone.state_dict())
            assert torch.equal(together(x), before)
            together.load_state_dict(state)
            assert torch.equal(together(x), after)
        assert together[0].k_proj.together[0] is packed
        assert all(torch.equal(a, b) for a, b in zip(together.state_dict().values(), other.state_dict().values(), strict=True))
        alone.load_state_dict(together.state_dict())
        assert torch.equal(alone(x), after)


def test_a_state_dict_for_some_of_the_layers() -> None:
    alone, together = pair(Config("q4_0"))
    other, _ = pair(Config("q4_0"))
    values = {name: tensor for name, tensor in other.state_dict().items() if "k_proj" in name}
    for model in (alone, together):
        model.load_state_dict(values, strict=False)
    x = torch.randn(3, 72)
    assert torch.equal(together(x), alone(x))
    assert torch.equal(together[0].k_proj.weight + 0, other[0].k_proj.weight + 0)


def test_a_state_dict_of_dense_weights_for_sparse_ones() -> None:
    block = nn.Sequential(Block())
    alone = quantize_(copy.deepcopy(block), "q4_0")
    with torch.no_grad():
        for parameter in block.parameters():
            parameter[:, 2::4], parameter[:, 3::4] = 0, 0
    together = fuse_(quantize_(block, "q4_0"))
    if together[0].q_proj.together[0].layout != cpu_tiles.SPARSE:
        pytest.skip("this CPU has no kernels for sparse weights")
    before = together.state_dict()
    together.load_state_dict(before)
    with pytest.raises(UnsupportedError, match="are 2:4 sparse, and the weight to be loaded is not: load the model first"):
        together.load_state_dict(alone.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(together.state_dict().values(), before.values(), strict=True))


def test_what_differs_stays() -> None:
    model = quantize_(nn.Sequential(Block()), Config("q4_0", overrides={"*.k_proj": "q8_0"}, skip=["*.up_proj"]))
    skipped = "gate_proj+up_proj are not all computed together: up_proj is a Linear"
    said = "q_proj+k_proj+v_proj are not all computed together: k_proj differs from q_proj in format, v_proj differs from k_proj in format"
    assert fused(model)[0].startswith(f"0: {said}; {skipped}")
    assert type(model[0].q_proj) is QuantLinear
    some = quantize_(nn.Sequential(Block()), Config("q4_0", overrides={"*.v_proj": "q8_0"}, skip=["*.up_proj"]))
    said = "q_proj+k_proj+v_proj are not all computed together: v_proj differs from k_proj in format"
    assert fused(some) == (f"0: computed together: q_proj+k_proj; {said}; {skipped}",)
    assert fused(some) == (f"0: computed together: q_proj+k_proj; {said}; {skipped}",), "said once"
    assert type(some[0].v_proj) is QuantLinear
    scaled = quantize_(nn.Sequential(Block()), Config("int4_tensor"))
    assert "computed together: " not in fused(scaled)[0].replace("are not all computed together: ", ""), "each has a scale of its own"
    hooked = quantize_(nn.Sequential(Block()), "q4_0")
    hooked[0].q_proj.register_forward_hook(lambda *_: None)
    watched = "are not all computed together: q_proj has hooks, a forward of its own or a bias to train"
    assert fused(hooked) == (f"0: q_proj+k_proj+v_proj {watched}; computed together: gate_proj+up_proj",)
    paired = fuse_(quantize_(nn.Sequential(Block()), "q4_0"), siblings=[("k_proj", "v_proj")])
    assert report(paired).notes == ("0: computed together: k_proj+v_proj",)


def test_one_asked_alone() -> None:
    alone, together = pair(Config("q4_0"))
    x, other = torch.randn(3, 72), torch.randn(3, 72)
    with torch.inference_mode():
        assert torch.equal(together[0].k_proj(x), alone[0].k_proj(x))
        assert torch.equal(together[0].v_proj(other), alone[0].v_proj(other)), "another input"
        assert torch.equal(together[0].q_proj(other), alone[0].q_proj(other))
        for model in (alone, together):
            for name in ("q_proj", "k_proj", "v_proj"):
                model[0].get_submodule(name).compute = "float"
        assert torch.equal(together[0].q_proj(x), alone[0].q_proj(x))
    weight = weakref.ref(together[0].k_proj.together[0].data)
    del together, model
    assert weight() is None, "no garbage collector needed"


def test_gradients_and_copies() -> None:
    alone, together = pair(Config("q4_0"), bias=True)
    gradients = []
    for model in (alone, together, copy.deepcopy(together)):
        x = torch.linspace(-1, 1, 72).repeat(2, 1).requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(gradients[1], gradients[2])
    torch.testing.assert_close(gradients[0], gradients[1])
    with torch.no_grad():
        for model in (alone, together, copied := copy.deepcopy(together)):
            model[0].k_proj.bias.add_(1)
            model[0].up_proj.bias = nn.Parameter(model[0].up_proj.bias + 1, requires_grad=False)
            model[0].v_proj.bias.data = torch.ones(17)
        assert all(torch.equal(model(x), alone(x)) for model in (together, copied))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_biases_written_to_by_way_of_data(dtype: torch.dtype) -> None:
    """torch does not count these writes."""

    expected_biases: dict[tuple[int, str], Tensor] = {}

    def rewritten(number: int, model: nn.Module, seed: int) -> nn.Module:
        for name, linear in model.named_modules():
            if isinstance(linear, QuantLinear) and linear.bias is not None:
                data = expected_biases.setdefault((number, name), linear.bias.data)
                data.copy_(torch.randn(data.shape, generator=torch.Generator().manual_seed(seed)))
                if dtype == torch.float32:
                    linear.bias.numpy()[0] = 7
        return model

    alone, together = (model.to(dtype) for model in pair(Config("q4_0"), bias=True))
    for model in (alone, together):
        model[0].k_proj.bias = None
    with torch.inference_mode():
        models = [alone, together, copy.deepcopy(together), pickle.loads(pickle.dumps(together))]  # noqa: S301
    x = torch.randn(3, 72, dtype=dtype)
    with torch.no_grad():
        models.append(copy.deepcopy(together))
        for seed in (1, 2):
            expected, *found = [rewritten(i, model, seed)(x) for i, model in enumerate(models)]
            assert all(torch.equal(y, expected) for y in found)


def test_biases_of_several_dtypes_are_not_fused() -> None:
    block = nn.Sequential(Block(bias=True))
    block[0].k_proj.bias = nn.Parameter(block[0].k_proj.bias.detach().half(), requires_grad=False)
    model = fuse_(quantize_(block.requires_grad_(False), "q4_0"))
    assert [type(model[0].get_submodule(name)) is FusedLinear for name in ("q_proj", "k_proj", "up_proj")] == [False, False, True]


def test_threads_do_not_mix() -> None:
    _, together = pair(Config("q4_0"))
    inputs = [torch.randn(4, 72) for _ in range(40)]
    with torch.no_grad():
        expected = [together(x) for x in inputs]

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            return together(x)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(call, inputs), expected, strict=True))


def test_compiles_in_one_graph() -> None:
    _, together = pair(Config("q4_0"))
    assert isinstance(together[0].q_proj, FusedLinear)
    x = torch.randn(2, 72)
    with torch.no_grad():
        expected = together(x)
        torch.compiler.reset()  # graphs of the forward of Sequential: torch keeps eight
        compiled = torch.compile(together, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected)
        assert torch.equal(compiled(2 * x), together(2 * x))
    assert together[0].q_proj._group.cached_outputs is None


@pytest.mark.parametrize("writes", [False, True])
def test_siblings_without_biases_are_exported_as_one_product(writes: bool) -> None:
    """Also where x is written to between them, which makes it another x."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 32, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.q_proj(x)
            if writes:
                x.add_(1)
            return y + self.k_proj(x) * self.v_proj(x)  # type: ignore[no-any-return]

    model, x = fuse_(quantize_(Attention(), "q8_0")).eval(), torch.randn(2, 64)
    exported = torch.export.export(model, (x.clone(),), strict=False)
    products = [node for node in exported.graph.nodes if str(node.target).startswith("halfbyte.linear")]
    assert len(products) == 1 + writes
    assert torch.equal(exported.module()(x.clone()), model(x.clone()))


def test_each_fused_layer_gets_its_own_weight_back() -> None:
    """Layers of one shape, whose bytes are at the same address."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_q, self.to_k, self.to_v = (nn.Linear(64, 64) for _ in range(3))

    torch.manual_seed(0)
    model = quantize_(Attention(), "q8_0")
    want = {name: model.get_submodule(name).weight.clone() for name in ("to_q", "to_k", "to_v")}  # type: ignore[operator,union-attr]
    dequantize_(fuse_(model))
    assert all(torch.equal(model.get_submodule(name).get_parameter("weight"), weight) for name, weight in want.items())


@pytest.mark.parametrize("compute", ["float", "int8"])
@torch.no_grad()
def test_a_layer_whose_bytes_move_by_themselves_leaves_its_group(compute: Literal["float", "int8"]) -> None:
    """As group offloading moves them, one by one; the others stay fused until they are moved, too."""
    alone, together = pair(Config("q8_0", compute=compute), bias=True)
    x = torch.randn(3, 72)
    block: Any = together[0]
    block.k_proj.keep_layout_of(torch.device("cpu"))
    assert [layer.count for layer in (block.q_proj, block.k_proj, block.v_proj)] == [3, 1, 3]
    assert torch.equal(together(x), alone(x))
    block.k_proj.packed_data.data = block.k_proj.packed_data.data.clone()  # as diffusers does
    assert torch.equal(together.to("cpu")(x), alone(x))
    assert torch.equal(copy.deepcopy(together)(x), alone(x))
    assert all(torch.equal(tensor, alone.state_dict()[name]) for name, tensor in together.state_dict().items())


@pytest.mark.parametrize("compute", ["int8", "float"])
def test_bytes_are_in_the_order_of_k_for_integers(compute: str) -> None:
    """On Hopper bytes are in pairs, which float compute takes; torch.compile writes codes of activations in the order of K."""
    codes = ops.quantize(torch.randn(8, 128), "int8_channel")
    linear = QuantLinear(gpu_tiles.pack(codes, paired=True), compute=compute)
    fuse_(nn.Sequential(linear))
    assert linear.packed.layout == (gpu_tiles.NAME if compute == "int8" else gpu_tiles.PAIRED)
    assert torch.equal(linear.codes().data, codes.data)
