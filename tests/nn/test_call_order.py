"""`passes_on`: which child gets what another one returns, and whether anything else does."""

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.nn.call_order import passes_on


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2, self.drop = nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Dropout(0.0)


class _Nested(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class _OneVariable(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop(x) + x
        return self.fc2(x)  # type: ignore[no-any-return]


class _TwoVariables(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        return self.fc2(self.act(y)) + x  # type: ignore[no-any-return]


class _Gated(_Mlp):
    """Its argument is used again."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        z = self.act(y)
        return self.fc2(z * y)  # type: ignore[no-any-return]


class _Residual(_Mlp):
    """Its argument is used again, after the variable of the activation was assigned."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        y = self.act(y) + y
        return self.fc2(y)  # type: ignore[no-any-return]


class _Other(_Mlp):
    """The activation is that of another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        return self.act(x) + self.fc2(y)  # type: ignore[no-any-return]


class _Branches(_Mlp):
    """The activation may be that of another tensor."""

    def forward(self, x: Tensor, short: bool = True) -> Tensor:
        if short:
            y = self.drop(x)
        else:
            y = self.fc1(x)
        y = self.act(y)
        return self.fc2(y)  # type: ignore[no-any-return]


class _Between(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        y = self.drop(y) * 2
        return self.fc2(self.act(y))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(_Nested, True), (_OneVariable, True), (_TwoVariables, True)]
    + [(kind, False) for kind in (_Gated, _Residual, _Other, _Branches, _Between)],
)
@torch.no_grad()
def test_only_what_nothing_else_reads_is_fused(kind: type[_Mlp], expected: bool) -> None:
    assert passes_on(kind, "fc1", "act") is expected
    model, x = hb.quantize_(kind().eval(), hb.Config("q8_0", compute="float")), torch.randn(3, 32)
    wanted = model(x)
    assert (type(hb.fuse_(model).act) is nn.Identity) is expected
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)  # GELU differs by 2^-20 of its argument
