"""What a network on int8 codes takes over from torch: all arguments of its operations, gradients, hooks, and optional inputs. The rest runs
in floating point, which the report notes, or is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfbyte as hb
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.nn.modules.quantized import QuantModule
from halfbyte.nn.static.build import calibration_of
from halfbyte.nn.static.integer import Dequantize, IntegerConv2d, IntegerModule

STATIC = hb.Config("int8_channel", activations="static")


class _With(nn.Module):
    """Convolutions, and an operation on what they give."""

    def __init__(self, operation: Callable[..., Any], modules: dict[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 1, 1)
        self.operation, self.inner = operation, nn.ModuleDict(modules or {})

    def forward(self, x: Tensor) -> Any:
        return self.operation(self, x)


def images(count: int = 2, size: tuple[int, int] = (9, 8), seed: int = 0) -> Tensor:
    return torch.randn(count, 4, *size, generator=torch.Generator().manual_seed(seed))


def built(operation: Callable[..., Any], modules: dict[str, nn.Module] | None = None) -> tuple[nn.Module, nn.Module]:
    """A float network, and its copy on codes."""
    torch.manual_seed(0)
    model = _With(operation, modules).eval()
    return model, hb.quantize_(copy.deepcopy(model), STATIC, [images(), images(seed=1)])


def check(model: nn.Module, static: nn.Module) -> None:
    """Each operation rounds to the nearest step of its result, an error of 0.29 steps (root mean square). After three of them, of which one
    may add up several numbers, it is below one step of the result with the widest range, of which a number of usual size has 50."""
    found = calibration_of(static)
    assert found is not None
    step = max(scale.step for scale in found.scales.values())
    with torch.no_grad():
        for _ in range(3):  # node by node, then as programs
            for x in (images(), images(seed=1).contiguous(memory_format=torch.channels_last)):
                wanted, got = model(x), static(x)
                assert got.shape == wanted.shape
                assert got.dtype == wanted.dtype
                assert float((got - wanted).square().mean().sqrt()) < step


POOLS: list[nn.Module] = [
    nn.AvgPool2d(2, divisor_override=1),
    nn.AvgPool2d(3, 2, 1, divisor_override=20),
    nn.AvgPool2d((3, 2), (2, 1), (1, 0), ceil_mode=True, count_include_pad=False),
    nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    nn.AdaptiveAvgPool2d((3, None)),
    nn.AdaptiveAvgPool2d([1, 1]),  # type: ignore[arg-type]
    nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    nn.MaxPool2d(2, 1, dilation=(3, 2)),
    nn.MaxPool2d([3, 2], [2, 1], [1, 0]),  # type: ignore[arg-type]
    nn.MaxPool2d(2, 3, ceil_mode=True),
    nn.Upsample((12, 20)),
    nn.Upsample(scale_factor=2.0, mode="nearest-exact"),
    nn.Upsample(scale_factor=(1.5, 2.4), recompute_scale_factor=True),
    nn.UpsamplingNearest2d(scale_factor=2),
    nn.Flatten(2),
    nn.Flatten(0, 1),
]


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_the_arguments_of_modules(pool: nn.Module) -> None:
    model, static = built(lambda self, x: self.inner.pool(self.a(x)), {"pool": pool})
    assert hb.report(static).notes == ()
    check(model, static)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool2d": lambda y: F.max_pool2d(y, 3, 2, 1, 1, True),  # ceil_mode
    "max_pool2d without a stride": lambda y: torch.max_pool2d(y, (3, 2)),
    "max_pool2d by names": lambda y: F.max_pool2d(y, kernel_size=2, dilation=2, ceil_mode=True),
    "max_pool1d": lambda y: F.max_pool1d(y.flatten(2), 3, 2, 1, 2, True),
    "avg_pool2d": lambda y: F.avg_pool2d(y, 3, 2, 1, True, False),
    "avg_pool2d that adds up": lambda y: F.avg_pool2d(y, 2, None, 0, False, True, 1),
    "avg_pool1d": lambda y: torch.avg_pool1d(y.flatten(2), 4, 3, 2, True, False),
    "adaptive_avg_pool2d": lambda y: F.adaptive_avg_pool2d(y, (None, 3)),
    "interpolate": lambda y: F.interpolate(y, (20, 5), None, "nearest"),
    "hardtanh": lambda y: F.hardtanh(y, 0.0, 6.0, True),
    "cat": lambda y: torch.cat((y, y.relu()), dim=-1),
    "reshape": lambda y: y.reshape(-1, 8, 6, 12),
    "squeeze": lambda y: F.adaptive_avg_pool2d(y, 1).squeeze(-1),
}
FLOATS: dict[str, Callable[[Tensor], Tensor]] = {
    "alpha": lambda y: torch.add(y, y.relu(), alpha=-3),
    "a number": lambda y: y + 3.5,
    "hardtanh with other ends": lambda y: F.hardtanh(y, -0.1, 0.2),
    "max_pool2d with indices": lambda y: F.max_pool2d(y, 2, return_indices=True)[0],
    "bilinear": lambda y: F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True),
    "bits": lambda y: y.view(torch.int32).view(torch.float32),
    "another dtype": lambda y: y.double().float(),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *FLOATS])
def test_the_arguments_of_functions(name: str) -> None:
    function = (FUNCTIONS | FLOATS)[name]
    model, static = built(lambda self, x: function(self.a(x)))
    assert bool(hb.report(static).notes) == (name in FLOATS)
    check(model, static)


SUMS: dict[str, Callable[[_With, Tensor], Tensor]] = {
    "context": lambda self, x: self.a(x) + self.b(x.mean((2, 3), keepdim=True)),
    "pooled first": lambda self, x: torch.add(F.adaptive_avg_pool2d(self.b(x), 1), self.a(x)).relu(),
    "one channel": lambda self, x: self.a(x) + self.c(x),
    "one image": lambda self, x: self.a(x) + self.b(x)[:1],
    "fewer dimensions": lambda self, x: self.a(x) + F.adaptive_avg_pool2d(self.b(x)[0], (1, 8)),
    "both ways": lambda self, x: F.adaptive_avg_pool2d(self.a(x), (1, 8)) + F.adaptive_avg_pool2d(self.c(x), (9, 1)),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_broadcast(name: str) -> None:
    model, static = built(SUMS[name])
    assert "add" not in str(hb.report(static).notes)
    check(model, static)


@torch.no_grad()
def test_a_convolution_that_adds_its_codes_to_others_that_broadcast() -> None:
    from halfbyte.nn.static.programs import with_fused_additions

    _, static = built(SUMS["one channel"])
    x = images()
    assert torch.equal(with_fused_additions(static)(x), static.node_by_node(x))  # type: ignore[arg-type,operator]


def _everything(self: _With, x: Tensor) -> Tensor:
    a, b = self.a(x), self.b(x)
    y = F.avg_pool2d(a, 2, 1, divisor_override=2) + F.adaptive_avg_pool2d(b, 1)
    y = torch.cat((y, F.interpolate(b, size=(8, 7), mode="nearest")), 1)
    return self.inner.linear(y.flatten(1).reshape(-1, 16, 8, 7).flatten(1))  # type: ignore[no-any-return]


def _dequantized(model: nn.Module, static: nn.Module) -> nn.Module:
    """The float model with the weights of the network on codes."""
    model = copy.deepcopy(model)
    for name, module in static.named_modules():
        if isinstance(module, QuantModule):
            layer: Any = model.get_submodule(name)
            layer.weight.data = module.weight.clone().view(layer.weight.shape)
    return model


def _gradient(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad((model(x) * weights).sum() + x.square().sum(), x)
    return found


def test_gradients_pass_the_rounding_unchanged() -> None:
    model, static = built(_everything, {"linear": nn.Linear(16 * 8 * 7, 5)})
    assert hb.report(static).notes == ()
    x, weights = images() / 2, torch.randn(2, 5)  # no number is near the end of its range
    wanted = _gradient(_dequantized(model, static), x, weights)  # of a linear network: the same whatever is rounded
    torch.testing.assert_close(_gradient(static, x, weights), wanted, rtol=1e-4, atol=1e-4)
    by_func = torch.func.grad(lambda x: (static(x) * weights).sum() + x.square().sum())(x)
    torch.testing.assert_close(by_func, wanted, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(static, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_gradient(compiled, x, weights), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(static(x.clone().requires_grad_()), static(x))


def test_gradients_stop_where_codes_are_clamped() -> None:
    model, static = built(lambda self, x: self.inner.pool(self.a(x).relu()) * 2, {"pool": nn.MaxPool2d(2)})
    x, weights = images(), torch.randn(2, 8, 4, 4)
    wanted, got = _gradient(_dequantized(model, static), x, weights), _gradient(static, x, weights)
    # Of two numbers that round to one code the pool takes the first one, and half a step below 0 passes the ReLU: about 1 % of the outputs.
    assert float((got - wanted).norm() / wanted.norm()) < 0.2
    far = 50 * images(seed=2)  # beyond the range of the images that were seen: nothing but the other term has a gradient there
    beyond = (far.abs() > images().abs().max() * 1.01).expand_as(far)
    torch.testing.assert_close(_gradient(static, far, weights)[beyond], 2 * far[beyond])


def test_parameters_in_floating_point_have_gradients() -> None:
    model, static = built(lambda self, x: self.b(self.inner.norm(x)) + self.b(x), {"norm": nn.GroupNorm(2, 4)})
    assert "inner.norm (GroupNorm) runs in floating point" in hb.report(static).notes
    for _ in range(3):  # programs have no gradients
        static(images())
        with torch.no_grad():
            static(images())
    static(images()).square().sum().backward()
    model(images()).square().sum().backward()
    wanted, got = (network.get_submodule("inner.norm").weight.grad for network in (model, static))
    assert float((got - wanted).norm() / wanted.norm()) < 0.05


def test_codes_in_floating_point_without_gradients_are_refused() -> None:
    _, static = built(lambda self, x: self.a(x))
    with pytest.raises(ArgumentError, match=r"takes int8, or codes in floating point with gradients, got torch.float32"):
        static.get_submodule("a")(images())


@torch.no_grad()
def test_images_without_a_batch() -> None:
    model, static = built(lambda self, x: F.avg_pool2d(self.a(x) + self.b(x), 2))
    line = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU()).eval()
    lines = hb.quantize_(copy.deepcopy(line), STATIC, [images()[:, :, 0]])
    for _ in range(3):
        assert torch.equal(static(images()[0]), static(images())[0])
        assert static(images()[0]).stride() == model(images()[0]).stride()
        assert torch.equal(lines(images()[0, :, 0]), lines(images()[:, :, 0])[0])


@torch.no_grad()
def test_results_keep_their_dtypes() -> None:
    model = _With(lambda self, x: (torch.relu(self.a(x).float()), torch.relu(self.b(x)))).eval().bfloat16()
    x = images().bfloat16()
    static = hb.quantize_(copy.deepcopy(model), STATIC, [x])
    for wanted, got in zip(model(x), static(x), strict=True):
        assert got.dtype == wanted.dtype
        assert float((got - wanted).norm() / wanted.norm()) < 0.05  # 8 bits an activation, and as many of bfloat16
    assert any("relu" in note for note in hb.report(static).notes)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_follow_a_network_to_another_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(2, 3, 10, 10)
    static = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", activations="static", skip=["2"]), [x])
    wanted = static(x)
    moved = static.to(dtype)
    for _ in range(3):  # the last by the native programs
        got = moved(x.to(dtype))
        assert got.dtype == dtype
        # Rounding images and parameters to 8 bits or more moves some codes by one: 8 bits an activation, as in the test above.
        assert float((got.float() - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.ReLU(inplace=True)])
@pytest.mark.parametrize("read", [False, True])
def test_relu_of_a_float_layer_is_the_saturation_of_its_codes(act: nn.Module, read: bool) -> None:
    def operation(model: _With, x: Tensor) -> tuple[Tensor, ...]:
        y = model.inner["act"](model.a(8 * x))
        return (model.inner["last"](y), y) if read else (model.inner["last"](y),)

    model = _With(operation, {"act": act, "last": nn.Conv2d(8, 4, 3)}).eval()
    static = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", activations="static", skip=["a"]), [images()])
    assert [type(module) for module in static.modules()].count(type(act)) == read  # its numbers are read too
    x = images(seed=1)
    quantize, last = static.get_submodule("inner_act_quantize"), static.get_submodule("inner.last")
    assert isinstance(last, IntegerConv2d)
    with torch.no_grad():
        activated = act(model.a(8 * x))
        wanted = Dequantize(last.result, torch.float32)(last(quantize(activated)))
        for _ in range(3):  # node by node, then as programs
            got = static(x)
            assert torch.equal(got[0], wanted)
            assert not read or torch.equal(got[1], activated)


@pytest.mark.parametrize("also", ["", "read", "called"])
def test_relu_writes_to_a_float_convolution_that_nothing_else_reads(also: str) -> None:
    def operation(model: _With, x: Tensor) -> Tensor:
        y = model.a(8 * x)
        z = model.inner["act"](y) + 1
        return z + y if also == "read" else z + model.inner["act"](z - 2) if also == "called" else z

    model = _With(operation, {"act": nn.ReLU()}).eval()
    static = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", activations="static", skip=["a"]), [images()])
    relus = [module.inplace for module in static.modules() if isinstance(module, nn.ReLU)]
    assert relus == [not also]
    x = images(seed=1)
    with torch.no_grad():
        y = model.a(8 * x)
        z = static.get_submodule("inner.act")(y.clone())
        assert torch.equal(z, y.relu())
    check(model, static)


class _Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
        self.norm.running_mean = torch.randn(8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.norm(self.c(x))
        return x if y is None else x + self.c(y)


class _Optional(_Folded):
    def forward(self, x: Tensor, y: Tensor | None = None, *, scaled: bool = False, sizes: tuple[int, ...] = (1, 2)) -> Tensor:
        x = self.norm(self.c(x))
        if scaled:
            x = x * 2
        return x if y is None else x + self.c(y)


def test_optional_inputs_have_their_defaults() -> None:
    model = _Optional().eval()
    static = hb.quantize_(copy.deepcopy(model), STATIC, [images(), images(seed=1)])
    check(model, static)
    x = images()
    with torch.no_grad():
        assert torch.equal(static(x=x, y=None, scaled=False), static(x, None, sizes=(1, 2)))
    for named, got in (({"y": x}, "y=None, its default, got a Tensor"), ({"scaled": True}, "scaled=False, its default, got True")):
        with pytest.raises(ArgumentError, match=f"^the network on int8 codes was made for {got}: pass the images alone"):
            static(x, **named)
    with pytest.raises(TypeError, match="other"):
        static(x, other=1)

    class Scaled(nn.Module):  # the remedy
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x, scaled=True)  # type: ignore[no-any-return]

    wrapped = Scaled().eval()
    check(wrapped, hb.quantize_(copy.deepcopy(wrapped), STATIC, [images(), images(seed=1)]))


def test_norms_are_folded_only_if_optional_inputs_allow_it() -> None:
    model, x = _Folded().eval(), images()
    wanted = model(x, x), model(x)
    hb.fold_batch_norms_(model)  # the convolution is also called for y, without the norm
    torch.testing.assert_close((model(x, x), model(x)), wanted)

    class Either(_Folded):
        def forward(self, x: Tensor, y: Tensor | None = None, **_: Any) -> Tensor:
            return self.c(x) if y is None else self.norm(self.c(y))  # type: ignore[no-any-return]

    other = Either().eval()
    wanted = other(x, x), other(x)
    hb.fold_batch_norms_(other)
    torch.testing.assert_close((other(x, x), other(x)), wanted)

    with pytest.raises(UnsupportedError, match=r"or quantize it with its norms$"):
        hb.fold_batch_norms_(nn.Sequential(_Branching(), nn.BatchNorm2d(8)).eval())


def norm_of_timm(channels: int, act: nn.Module) -> nn.Module:
    """timm's norm with an activation, whose forward calls the function, and traced shows its parts."""

    def forward(self: Any, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "images")
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.act(self.drop(x))  # type: ignore[no-any-return]

    norm = type("BatchNormAct2d", (nn.BatchNorm2d,), {"__module__": "timm.layers.norm_act", "forward": forward})(channels)
    norm.drop, norm.act = nn.Identity(), act
    nn.init.uniform_(norm.running_mean), nn.init.uniform_(norm.running_var, 0.5, 2), nn.init.normal_(norm.weight)
    assert isinstance(norm, nn.Module)
    return norm


class _OfTimm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn1 = nn.Conv2d(4, 16, 3), norm_of_timm(16, nn.ReLU6())
        self.b, self.bn2, self.rest = nn.Conv2d(16, 16, 1), norm_of_timm(16, nn.Identity()), norm_of_timm(16, nn.SiLU())
        linear = {"__module__": "timm.layers.linear", "forward": lambda self, x: F.linear(x, self.weight, self.bias)}
        self.head = type("Linear", (nn.Linear,), linear)(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.a(x))
        return self.head(self.rest(x + self.bn2(self.b(x))).mean((2, 3)))  # type: ignore[no-any-return]


@torch.no_grad()
def test_norms_and_heads_of_timm() -> None:
    """The norms behind convolutions are folded, with their activations in the clamps; another one, behind a sum, stays as it is."""
    torch.manual_seed(0)
    model, x = _OfTimm().eval(), images()
    wanted = model(x)
    static = hb.quantize_(copy.deepcopy(model), STATIC, [x, images(seed=1)])
    check(model, static)
    report = hb.report(static)
    assert report.notes[0] == "2 batch norms were folded into the layers before"
    assert [row.name for row in report.rows if row.format] == ["a", "b", "head"]
    assert not any("relu6" in note.lower() or "bn" in note or "batch_norm" in note for note in report.notes[1:])
    rest = model.rest
    hb.fold_batch_norms_(model)
    torch.testing.assert_close(model(x), wanted)
    assert (model.rest, type(model.bn1.act)) == (rest, nn.ReLU6)  # type: ignore[union-attr]
    assert {key.partition(".")[0] for key in model.state_dict()} == {"a", "b", "rest", "head"}


class _TakesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(4, 8, 3)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.c(x) + self.c(other)


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(4, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x) if x.sum() > 0 else self.c(-x)  # type: ignore[no-any-return]


def _patched() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 8, 3))
    model.forward = lambda x: -x  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_TakesTwo, "^_TakesTwo takes other besides its images, .*: give these inputs defaults, or wrap the model in a module that passes"),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), _Branching()), r"cannot be traced by torch.fx to compute .*, in 1 \(_Branching"),
        (
            _Branching,
            r"^_Branching cannot be traced by torch.fx to compute on .* codes \(symbolically .*, or take activations=\"dynamic\"$",
        ),
        (_patched, r"^this Sequential has a forward of its own, set on the object, which is not traced: wrap it, nn.Sequential\(module\)$"),
    ],
)
def test_what_cannot_be_traced_is_named(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        hb.quantize_(make().eval(), STATIC, [images()])


def test_a_layer_whose_weight_is_read_stays_in_floating_point(tmp_path: Any) -> None:
    model, static = built(lambda self, x: self.b(x) + self.a(x) / self.a.weight.norm() + self.c.bias)
    assert {row.name for row in hb.report(static).quantized} == {"b"}
    assert any("a (Conv2d) runs in floating point: the network reads its weight" in note for note in hb.report(static).notes)
    check(model, static)
    hb.save(static, tmp_path / "a")
    loaded = hb.load(tmp_path / "a", model=copy.deepcopy(model))
    with torch.no_grad():
        assert torch.equal(loaded(images()), static(images()))


@pytest.mark.parametrize("place", ["a", "inner.act", "inner.pool", "inner.same"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_a_part_with_hooks_runs_them_in_floating_point(place: str, register: str) -> None:
    torch.manual_seed(0)
    inner = {"act": nn.ReLU(), "pool": nn.MaxPool2d(2), "same": nn.Identity()}
    model = _With(lambda self, x: self.inner.same(self.inner.pool(self.inner.act(self.a(x)))), inner).eval()
    runs = list[int]()
    static = copy.deepcopy(model)
    getattr(static.get_submodule(place), register)(lambda *_: runs.append(1))
    hb.quantize_(static, STATIC, [images(), images(seed=1)])
    check(model, static)
    runs.clear()
    static(images().requires_grad_()).sum().backward()
    assert runs == [1]
    assert f"{place} ({type(model.get_submodule(place)).__name__}) runs in floating point" in str(hb.report(static).notes)
    assert sum(isinstance(module, IntegerModule) for module in static.modules()) == (place != "a")


@torch.no_grad()
def test_a_bias_at_the_address_of_the_one_before_counts() -> None:
    model = hb.quantize_(nn.Sequential(nn.Conv2d(4, 8, 3)).eval(), STATIC, [images()])
    layer = next(module for module in model.modules() if isinstance(module, IntegerModule))
    codes = torch.randint(-128, 128, (1, 4, 5, 5), dtype=torch.int8)
    for value in range(8):
        layer.bias = None
        layer.bias = nn.Parameter(torch.full((8,), 0.1 * value), requires_grad=False)
        got = layer(codes)
        layer.refresh()
        assert torch.equal(got, layer(codes))


def test_hooks_of_the_network_are_kept_and_of_its_containers_refused() -> None:
    block = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU())
    model, runs = nn.Sequential(block, nn.Conv2d(8, 8, 1)).eval(), list[int]()
    block_hook = block.register_forward_hook(lambda *_: None)
    model.register_forward_hook(lambda *_: runs.append(1))
    model.register_state_dict_post_hook(lambda *_: runs.append(2))
    with pytest.raises(UnsupportedError, match=r"^0 \(Sequential\) cannot become a part of .*: it has forward hooks, which would be lost"):
        hb.quantize_(model, STATIC, [images()])
    block_hook.remove()  # the remedy
    hb.quantize_(model, STATIC, [images()])
    model(images()), model.state_dict()
    assert runs == [1, 2]


def test_hooks_that_a_network_on_codes_gets_run() -> None:
    _, static = built(lambda self, x: self.a(x))
    runs, x = list[int](), images()
    for _ in range(3):
        static(x)
    static.get_submodule("a").register_full_backward_hook(lambda *_: runs.append(1))
    static(x.requires_grad_()).sum().backward()
    assert runs == [1]


def test_a_part_whose_forward_was_replaced_runs_it() -> None:
    model, _ = built(lambda self, x: self.inner.act(self.a(x)), {"act": nn.ReLU()})
    act: Any = model.get_submodule("inner.act")
    act.forward = torch.neg
    static = hb.quantize_(copy.deepcopy(model), STATIC, [images(), images(seed=1)])
    assert "inner.act (ReLU) runs in floating point: it has a forward of its own" in hb.report(static).notes
    check(model, static)
