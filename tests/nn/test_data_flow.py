"""`feeds_only`: whether one submodule alone reads the output of another one."""

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.nn.data_flow import feeds_only


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


class _Sum(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x) + x))  # type: ignore[no-any-return]


class _Operator(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x) * 2
        return self.fc2(self.act(y))  # type: ignore[no-any-return]


class _Negated(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        return self.fc2(self.act(-y))  # type: ignore[no-any-return]


class _Function(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        return self.fc2(self.act(torch.sin(y)))  # type: ignore[no-any-return]


class _Optional(_Mlp):
    def forward(self, x: Tensor, active: bool = False) -> Tensor:
        y = self.fc1(x)
        if active:
            y = self.act(y)
        return self.fc2(y)  # type: ignore[no-any-return]


class _Twice(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x))) + self.fc1(x)  # type: ignore[no-any-return]


class _OtherMethod(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x))) + self.gate(x)  # type: ignore[no-any-return]

    def gate(self, x: Tensor) -> Tensor:
        return self.fc1(x)  # type: ignore[no-any-return]


class _Property(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x))) + self.gate(x)  # type: ignore[no-any-return]

    @property
    def gate(self) -> nn.Module:
        return self.fc1


class _TwoNames(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = z = self.fc1(x)
        return self.fc2(self.act(y) + z)  # type: ignore[no-any-return]


class _Walrus(_Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(y := self.fc1(x)) * y)  # type: ignore[no-any-return]


class _Loop(_Mlp):
    """A step reads the variable of the last one."""

    def forward(self, x: Tensor) -> Tensor:
        y, total = x, x
        for _ in range(2):
            total = total + y
            y = self.fc1(x)
            total = total + self.act(y)
        return self.fc2(total)  # type: ignore[no-any-return]


class _Inner(_Mlp):
    """Another function reads the variable."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        z = self.act(y)

        def before() -> Tensor:
            return y  # type: ignore[no-any-return]

        return self.fc2(z + before())  # type: ignore[no-any-return]


class _Weight(_Mlp):
    """The weight is read, not multiplied by."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x.to(self.fc1.weight.dtype))
        x = self.act(x)
        return self.fc2(x)  # type: ignore[no-any-return]


class _Decorated(_Mlp):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Text with `self.act` in it."""
        if x.dim() > 1:
            x = self.fc1(x)
            # A comment between them.
            x = self.act(x)
        return self.fc2(x)  # type: ignore[no-any-return]


class _NoSource(_Mlp):
    exec("def forward(self, x): return self.fc2(self.act(self.fc1(x)))")


FUSED = (_Nested, _OneVariable, _TwoVariables, _Weight, _Decorated)
OTHERS = (_Gated, _Residual, _Other, _Branches, _Between, _Sum, _Operator, _Negated, _Function, _Optional)
OTHERS += (_Twice, _OtherMethod, _Property, _TwoNames, _Walrus, _Loop, _Inner, _NoSource)


@pytest.mark.parametrize(("kind", "expected"), [*((kind, True) for kind in FUSED), *((kind, False) for kind in OTHERS)])
@torch.no_grad()
def test_only_what_nothing_else_reads_is_fused(kind: type[_Mlp], expected: bool) -> None:
    assert feeds_only(kind, "fc1", "act") is expected
    model, x = hb.quantize_(kind().eval(), hb.Config("q8_0", compute="float")), torch.randn(3, 32)
    wanted = model(x)
    assert (type(hb.fuse_(model).act) is nn.Identity) is expected
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)  # GELU differs by 2^-20 of its argument
