"""Tracing: in-place operations, operands passed by keyword, dropouts that are active, and the module that an error names."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import halfbyte as hb
from halfbyte.errors import UnsupportedError
from halfbyte.nn.static.tracing import IDENTITIES_IN_EVAL, IN_PLACE_OPERATORS, TracedModules, Tracer, graph_of, writes_first_input


def traced(model: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(model, Tracer().trace(model))


class _InPlace(nn.Module):
    def __init__(self, operation: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        written = y
        written = self.operation(written, 2)
        return y, written


@pytest.mark.parametrize("operation", IN_PLACE_OPERATORS, ids=lambda o: o.__name__)
def test_in_place_operators_write_what_other_names_show(operation: Callable[[Tensor, int], Tensor]) -> None:
    x = torch.tensor([5, -3, 8], dtype=torch.float32 if operation is operator.itruediv else torch.int64)
    model = _InPlace(operation)
    for got, wanted in zip(traced(model)(x), model(x), strict=True):
        assert got.tolist() == wanted.tolist()


def test_every_in_place_operator_of_tensors_is_traced_as_one() -> None:
    conversions = {"__index__", "__invert__"}
    of_tensors = {name for name in vars(operator) if name.startswith("__i") and name in dir(Tensor)} - conversions
    assert {f"__{operation.__name__}__" for operation in IN_PLACE_OPERATORS} == of_tensors


class _KeywordOnly(nn.Module):
    def forward(self, *, x: Tensor) -> Tensor:
        return x + 1


class _Calls(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x=x)


class _Leaves(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _KeywordOnly) or super().is_leaf_module(m, module_qualified_name)


def test_an_operand_that_can_be_passed_by_keyword_alone_stays_so() -> None:
    model = _Calls(_KeywordOnly())
    assert fx.GraphModule(model, _Leaves().trace(model))(torch.ones(2)).tolist() == [2, 2]


def test_operands_by_keyword_become_positional() -> None:
    class Joins(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(tensors=[x, torch.stack(tensors=[torch.relu(input=x)])[0]])

    graph = Tracer().trace(Joins())
    assert [len(node.kwargs) for node in graph.nodes if node.op == "call_function"] == [0] * 4
    assert fx.GraphModule(Joins(), graph)(torch.tensor([-1.0])).tolist() == [-1, 0]


def test_operations_that_write_to_their_first_input() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.act_in_place = nn.ReLU(), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            torch.clamp_(x, 0, 6)
            nn.functional.hardtanh_(x)
            nn.functional.relu(x, True)
            x.neg_()
            self.act_in_place(x)
            torch.clamp(x, 0, 6)
            x.neg()
            return self.act(x) + (x & x)

    model = Writes()
    graph, modules = Tracer().trace(model), dict(model.named_modules())
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    assert [writes_first_input(node, modules) for node in calls] == [True] * 5 + [False] * 5


def test_functions_whose_first_parameter_is_not_input_keep_their_meaning() -> None:
    class Selects(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.where(condition=x > 0, input=x, other=0 * x), torch.searchsorted(sorted_sequence=x, input=x)

    x = torch.tensor([-1.0, 2.0])
    assert [y.tolist() for y in traced(Selects())(x)] == [[0, 2], [0, 1]]


class _Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class _Catches(nn.Module):
    """Catches its module's error and raises one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = _Fails()

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.bad(x)
        except Exception:
            raise ValueError("of its own") from None
        return x


def test_an_error_names_the_module_that_raised_it() -> None:
    with pytest.raises(UnsupportedError, match=r"traced by torch.fx to test, in inner \(_Fails\) \(.*control flow"):
        graph_of(_Positional(_Fails()), "test", "do without", defaults=False)
    with pytest.raises(UnsupportedError, match=r"^_Catches cannot be traced by torch.fx to test \(of its own\)"):
        graph_of(_Catches(), "test", "do without", defaults=False)


class _Positional(_Calls):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("kind", IDENTITIES_IN_EVAL)
def test_what_counts_as_an_identity_is_one_in_evaluation(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 3, *(4,) * {nn.Dropout1d: 1, nn.Dropout2d: 2}.get(kind, 3))
    module = kind().eval()
    assert torch.equal(module(x), x)
    assert not TracedModules.of(_Calls(module)).in_training()
    assert TracedModules.of(_Calls(module.train())).in_training() == (kind is not nn.Identity)


class _Caches(nn.Module):
    """It stores a bias for each device, as timm's LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.bias, self.cache = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.Parameter(torch.randn(1, 16, 1, 2)), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = str(x.device)
        if key not in self.cache:
            self.cache[key] = self.bias[..., :1]
        return self.norm(self.conv(x)) + self.cache[key]  # type: ignore[no-any-return]


@torch.no_grad()
def test_a_trace_leaves_nothing_in_the_caches_of_modules() -> None:
    model, x = _Caches().eval(), torch.randn(1, 16, 4, 4)
    wanted = model(x)
    hb.fold_batch_norms_(model)  # traces it, and fuse_ does again
    hb.fuse_(hb.quantize_(model, hb.Config("int8_channel", compute="float")))
    assert list(model.cache) == ["cpu"]
    torch.testing.assert_close(model(x), wanted, rtol=0.05, atol=0.05)  # of int8 weights
