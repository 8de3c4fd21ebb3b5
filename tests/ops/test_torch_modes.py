"""Every mode of torch that an operation can meet, for every kind of operation and layer: it is served, or refused in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import halfbyte as hb
from halfbyte import ops
from halfbyte.errors import ArgumentError, HalfbyteError, UnsupportedError
from halfbyte.kernels.problem import Combination
from halfbyte.ops import fake_quantize, modes, registration
from halfbyte.ops.conv import elementwise
from halfbyte.ops.transformer import attention, norms

Call = Callable[[Tensor], Tensor]
ROWS, IMAGES, LINES = (4, 64), (2, 16, 5, 5), (2, 16, 9)
# Operations with a gradient, and those without: name -> (a function that makes one, the shape of its input).
DIFFERENTIABLE: dict[str, tuple[Callable[[], Call], tuple[int, ...]]] = {}
OTHERS: dict[str, tuple[Callable[[], Call], tuple[int, ...]]] = {}


def operation(shape: tuple[int, ...], *, differentiable: bool = True) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
    def add(make: Callable[[], Call]) -> Callable[[], Call]:
        (DIFFERENTIABLE if differentiable else OTHERS)[make.__name__.lstrip("_")] = make, shape
        return make

    return add


def packed(format: str = "q8_0", *lead: int) -> hb.Packed:
    return hb.pack(hb.quantize(torch.randn(*lead, 8, 64), format))


def quantized(module: nn.Module, **settings: Any) -> nn.Module:
    return hb.quantize_(nn.Sequential(module).eval(), hb.Config("int8_channel", **settings))


@operation(ROWS)
def _linear() -> Call:
    weight, bias = packed(), torch.randn(8)
    return lambda x: hb.linear(x, weight, bias)


@operation(ROWS)
def _clamped_with_residual() -> Call:
    weight = packed("q4_0")
    return lambda x: hb.linear(x, weight, None, residual=x[:, :8], compute="float", clamp=(-1, 1))


@operation(ROWS)
def _linear_gelu() -> Call:
    weight, bias = packed(), torch.randn(8)
    return lambda x: ops.linear_gelu(x, weight, bias, compute="float")


@operation(ROWS)
def _module() -> Call:
    return quantized(nn.Linear(64, 8))


@operation(IMAGES)
def _conv2d() -> Call:
    weight, bias = hb.pack_conv(hb.quantize_conv(torch.randn(8, 8, 3, 3), "int8_channel"), 3, groups=2), torch.randn(8)
    return lambda x: hb.conv2d(x, weight, bias, stride=2, padding=((1, 0), (2, 1)), clamp=(0, 50))


@operation(LINES)
def _conv1d() -> Call:
    return quantized(nn.Conv1d(16, 8, 3))


@operation(ROWS)
def _grouped() -> Call:
    weight, ids, bias = packed("q8_0", 3), torch.tensor([[0, 2], [2, 2], [1, 0], [0, 1]]), torch.randn(3, 8)
    return lambda x: hb.grouped_linear(x, weight, ids, bias)


@operation(ROWS)
def _fake_quantized_weight() -> Call:
    return lambda x: fake_quantize.fake_quantize(x, "q4_0")


@operation(ROWS)
def _fake_quantized_to_a_grid() -> Call:
    return lambda x: fake_quantize.fake_quantize_given(x, "int8_channel", torch.full((4, 1), 0.02), None)


@operation(ROWS)
def _fake_quantized_activation() -> Call:
    return lambda x: fake_quantize.fake_quantize_activation(x, 32, "block")


@operation(IMAGES)
def _fake_quantized_images() -> Call:
    return fake_quantize.fake_quantize_images


@operation(ROWS)
def _in_training() -> Call:
    return hb.prepare_qat_(nn.Sequential(nn.Linear(64, 8)), hb.Config("int8_channel", compute="int8"))


@operation(ROWS)
def _normed() -> Call:
    norm = norms.Norm(torch.rand(64), 1e-6, False)
    return lambda x: norms.normed(x, norm)


@operation(IMAGES, differentiable=False)
def _network() -> Call:
    model = nn.Sequential(nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5)).eval()
    return hb.quantize_(model, hb.Config("int8_channel", activations="static"), [torch.randn(IMAGES)])


@operation(ROWS, differentiable=False)
def _combine() -> Call:
    return lambda x: elementwise.combine(x, Combination(torch.float32, 2.0), x)


@operation((1, 2, 4, 64), differentiable=False)
def _attend() -> Call:
    return lambda x: attention.attend(x, x, x, None, 0.1)


ALL = DIFFERENTIABLE | OTHERS
OF_LAYERS = "normed", "combine", "attend"  # which layers check before they call them
IDS = torch.tensor([[1, 2], [0, 7]])
Built = tuple[Call, Tensor]


@pytest.fixture
def built(request: pytest.FixtureRequest) -> Built:
    torch.manual_seed(0)
    make, shape = ALL[request.param]
    return make(), torch.randn(shape)


differentiable = pytest.mark.parametrize("built", DIFFERENTIABLE, indirect=True)
others = pytest.mark.parametrize("built", OTHERS, indirect=True)
every = pytest.mark.parametrize("built", ALL, indirect=True)


def pulled_back(f: Call, x: Tensor, along: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(leaf), leaf, along)
    return grad


def near(a: Tensor, b: Tensor) -> bool:
    """Equal but for the order of float32 sums of at most 200 terms."""
    a, b = a.detach(), b.detach()
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


# Derivatives


@differentiable
def test_forward_mode_has_the_tangent_of_reverse_mode(built: Built) -> None:
    """<v, J u> = <Jᵀ v, u>, whichever side is computed."""
    f, x = built
    u = torch.randn_like(x)
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, u)))
        assert torch.allclose(y, f(x), rtol=0, atol=1e-6)  # GELU is torch's there, after the product
    assert tangent is not None
    v = torch.randn_like(y)
    assert near((v * tangent).sum(), (pulled_back(f, x, v) * u).sum())
    with torch.no_grad(), forward_ad.dual_level():
        assert torch.equal(forward_ad.unpack_dual(f(forward_ad.make_dual(x, u))).tangent, tangent)


@differentiable
def test_torch_func(built: Built) -> None:
    f, x = built
    y, u = f(x), torch.randn_like(x)
    v = torch.randn_like(y)
    grad = pulled_back(f, x, v)
    assert near(torch.func.grad(lambda x: (f(x) * v).sum())(x), grad)
    assert near(torch.func.vjp(f, x)[1](v)[0], grad)
    assert near((torch.func.jvp(f, (x,), (u,))[1] * v).sum(), (grad * u).sum())
    backward, forward = torch.func.jacrev(f)(x), torch.func.jacfwd(f)(x)
    assert near(backward, forward)
    assert near((v.reshape(-1, 1) * backward.reshape(v.numel(), -1)).sum(0), grad.flatten())


@others
def test_operations_without_derivatives_say_so(built: Built, request: pytest.FixtureRequest) -> None:
    f, x = built
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(UnsupportedError, match=r"no derivatives, got a dual tensor: pass its detach\(\)"):
            f(dual)
        assert torch.equal(f(dual.detach()), f(x))
    with pytest.raises(UnsupportedError, match="no derivatives"):
        torch.func.jvp(f, (x,), (x,))
    if request.node.callspec.params["built"] == "network":  # whose gradients are straight-through: test_static_operations.py
        return
    with pytest.raises(UnsupportedError, match="no derivatives, got a tensor that requires grad"):
        torch.func.grad(lambda x: f(x).sum())(x)


def test_tangents_of_biases_and_residuals() -> None:
    weight, bias, x, residual = packed(), torch.randn(8), torch.randn(3, 64), torch.randn(3, 8)
    conv, image = hb.pack_conv(hb.quantize_conv(torch.randn(8, 4, 1, 1), "int8_channel"), 1), torch.randn(2, 4, 3, 3)
    experts, ids = packed("q8_0", 2), torch.tensor([0, 1, 1])
    with forward_ad.dual_level():
        dual, along = forward_ad.make_dual(bias, 2 * bias), forward_ad.make_dual(residual, 3 * residual)
        tangent = forward_ad.unpack_dual(hb.linear(x, weight, dual, residual=along)).tangent
        assert torch.allclose(tangent, 2 * bias + 3 * residual)
        tangent = forward_ad.unpack_dual(hb.conv2d(image, conv, dual)).tangent
        assert torch.allclose(tangent, (2 * bias).view(-1, 1, 1).expand(2, 8, 3, 3))
        biases = forward_ad.make_dual(torch.stack((bias, -bias)), torch.stack((2 * bias, bias)))
        tangent = forward_ad.unpack_dual(hb.grouped_linear(x, experts, ids, biases)).tangent
        assert torch.allclose(tangent, torch.stack((2 * bias, bias, bias)))


def test_biases_of_experts_have_gradients() -> None:
    weight, ids, bias = packed("q8_0", 3), torch.tensor([[0, 2], [2, 2]]), torch.zeros(3, 8, requires_grad=True)
    along = torch.randn(2, 2, 8)
    hb.grouped_linear(torch.randn(2, 64), weight, ids, bias).backward(along)
    expected = torch.stack([along[ids == e].sum(0) for e in range(3)])
    assert torch.allclose(bias.grad, expected, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["q4_0", "int8_channel", "int8_tensor", "int4_g32_offset"])
def test_learned_scales_have_the_same_derivative_in_all_modes(format: str) -> None:
    weight, fmt = torch.randn(4, 70), hb.as_format(format)
    codes = hb.quantize(weight, fmt)
    scale, zero = codes.scale.float() * 0.8, codes.zero  # so that some weights lie beyond the grid

    def loss(weight: Tensor, scale: Tensor) -> Tensor:
        return fake_quantize.fake_quantize_given(weight, fmt, scale, zero).square().sum()

    leaves = weight.clone().requires_grad_(), scale.clone().requires_grad_()
    loss(*leaves).backward()
    of_weight, of_scale = torch.func.grad(loss, argnums=(0, 1))(weight, scale)
    assert near(of_weight, leaves[0].grad)  # type: ignore[arg-type]
    assert near(of_scale, leaves[1].grad)  # type: ignore[arg-type]
    _, tangent = torch.func.jvp(loss, (weight, scale), (weight, scale))
    assert near(tangent, (of_weight * weight).sum() + (of_scale * scale).sum())


# Batches, subclasses, tensors without data


@every
def test_vmap_is_a_loop(built: Built) -> None:
    f, x = built
    both = torch.stack((x, x.flip(0)))
    assert torch.allclose(torch.func.vmap(f)(both), torch.stack([f(one) for one in both]), rtol=1e-5, atol=1e-4)


class Subclass(Tensor):
    pass


@every
def test_subclasses_and_views(built: Built) -> None:
    f, x = built
    for other in (x.as_subclass(Subclass), nn.Parameter(x, requires_grad=False), torch.complex(x, -x).conj().imag):
        assert torch.equal(f(other).as_subclass(Tensor), f(x))


@every
def test_tensors_without_data(built: Built) -> None:
    f, x = built
    y = f(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = f(mode.from_tensor(x))
    assert (fake.shape, fake.dtype, fake.device) == (y.shape, y.dtype, y.device)


@every
def test_inference_mode(built: Built) -> None:
    f, x = built
    with torch.inference_mode():
        assert torch.equal(f(x.clone()), f(x))


# Refusals, and that their advice works


@pytest.mark.parametrize("built", sorted(ALL.keys() - {"clamped_with_residual", "in_training", *OF_LAYERS}), indirect=True)
def test_other_layouts_and_complex_numbers(built: Built) -> None:
    f, x = built
    expected = f(x)
    with pytest.raises(HalfbyteError, match=r"a dense tensor, got a sparse_coo one: convert it with .to_dense\(\) first"):
        f(x.to_sparse())
    assert torch.equal(f(x.to_sparse().to_dense()), expected)
    with pytest.raises(HalfbyteError, match="float16"):
        f(x.to(torch.complex64))
    if torch.backends.mkldnn.is_available():
        with pytest.raises(HalfbyteError, match="a dense tensor, got a mkldnn one"):
            f(x.to_mkldnn())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize(
    "built", ["linear", "linear_gelu", "module", "conv2d", "conv1d", "network", "fake_quantized_images"], indirect=True
)
def test_nested_tensors(built: Built, layout: torch.layout) -> None:
    f, x = built
    parts = [x, torch.cat((x, x))]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    with pytest.raises(ArgumentError, match=r"a dense tensor, got a nested one: pass the tensors of its unbind\(\) one by one"):
        f(nested)
    for y, part in zip(map(f, nested.unbind()), parts, strict=True):
        assert torch.equal(y, f(part))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_ids_and_weights_of_other_layouts() -> None:
    weight = packed()
    for ids in (IDS.to_sparse(), torch.nested.nested_tensor([IDS[0], IDS[1][:1]], layout=torch.jagged)):
        with pytest.raises(ArgumentError, match="the input is a dense tensor"):
            hb.embedding(ids, weight)
    nested = torch.nested.nested_tensor([torch.randn(2, 64), torch.randn(3, 64)])
    with pytest.raises(ArgumentError, match=r"weight is a dense tensor, got a nested one: pass the tensors of its unbind\(\)"):
        hb.quantize(nested, "q8_0")
    assert [hb.quantize(part, "q8_0").shape for part in nested.unbind()] == [(2, 64), (3, 64)]


# Autocast


PRODUCTS = ["linear", "clamped_with_residual", "linear_gelu", "module", "conv2d", "conv1d", "grouped", "network", "in_training"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("built", PRODUCTS, indirect=True)
def test_products_give_the_dtype_of_autocast(built: Built, dtype: torch.dtype) -> None:
    f, x = built
    with torch.no_grad():
        exact = f(x)
        with torch.autocast("cpu", dtype):
            y = f(x)
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(f(x), exact)
    assert y.dtype == dtype
    # x and the result are rounded, in each of up to two layers.
    assert torch.allclose(y.float(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps * float(exact.abs().max()))


@pytest.mark.parametrize("built", [name for name in PRODUCTS if name in DIFFERENTIABLE], indirect=True)
def test_gradients_under_autocast_have_the_dtype_of_their_tensor(built: Built) -> None:
    f, x = built
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = f(leaf)
        of_func = torch.func.grad(lambda x: f(x).float().sum())(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert leaf.grad is not None
    assert leaf.grad.dtype == of_func.dtype == torch.float32
    assert torch.allclose(leaf.grad, of_func)


def test_rows_of_embeddings_keep_their_dtype_under_autocast() -> None:
    module = hb.quantize_(nn.Sequential(nn.Embedding(8, 64)).eval(), "q8_0")
    with torch.autocast("cpu", torch.bfloat16):
        assert module(IDS).dtype == nn.Embedding(8, 64)(IDS).dtype == torch.float32


class Routed(nn.Module):
    """Rows of a quantized layer, and of one in floating point added to them in place."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.expert = base, copy.deepcopy(base)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(self.base(x)).index_add_(0, torch.arange(len(x)), self.expert(x))


@pytest.mark.parametrize(("layer", "shape"), [(nn.Linear(64, 8), ROWS), (nn.Conv2d(16, 8, 1), IMAGES), (nn.Conv1d(16, 8, 1), LINES)])
def test_float_and_quantized_layers_agree_on_a_dtype(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model, x = Routed(layer).eval(), torch.randn(shape)
    built = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", skip=["expert"]))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(built(x), model(x))


def test_only_plain_calls_bypass_the_dispatcher() -> None:
    x, seen = torch.ones(2), list[bool]()

    def look(y: Tensor) -> Tensor:
        seen.append(modes.plain(y))
        return y

    assert modes.plain(x)
    assert not modes.plain(nn.Parameter(x))
    assert not modes.plain(torch.complex(x, x).conj().imag)
    assert not modes.plain(x, bias=torch.complex(x, x).conj().imag)
    with torch.autocast("cpu"):
        look(x)
    with forward_ad.dual_level():
        look(x)
    with FakeTensorMode():
        look(x)
    torch.func.vmap(look)(x)
    torch.jit.trace(look, x, check_trace=False)
    assert not any(seen)
    assert modes.plain(x)


def test_autocast_leaves_what_torch_leaves() -> None:
    floats, doubles, codes = torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int8)
    assert registration.autocast(floats) is floats
    with torch.autocast("cpu", torch.float16):
        assert registration.autocast(floats).dtype == torch.float16
        assert registration.autocast(doubles) is doubles
        assert registration.autocast(codes) is codes
        assert registration.autocast(None) is None
