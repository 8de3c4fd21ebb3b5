"""Programs of kernel calls: their steps compute what ops do, and a step may be in several programs."""

import torch
from torch import Tensor

import halfbyte as hb
from halfbyte import ops
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.steps import Program, ProgramNode, ProgramStep
from halfbyte.ops.cpu import qlinear_step
from halfbyte.ops.functions import requantization_table

SCALES = {"in_scale": 0.02, "in_zero": 3, "out_scale": 0.5, "out_zero": -7}


def layer(n: int, k: int, x: Tensor) -> tuple[hb.Packed, ProgramStep]:
    packed = hb.pack(hb.quantize(torch.randn(n, k), "int8_channel"))
    table = requantization_table(packed, None, **SCALES)  # type: ignore[arg-type]
    step = qlinear_step(x, packed, table, (-128, 127))
    assert step is not None
    return packed, step


def test_a_step_may_be_in_several_programs() -> None:
    torch.manual_seed(0)
    x = torch.randint(-128, 128, (64, 96), dtype=torch.int8)
    hidden = torch.empty(64, 160, dtype=torch.int8)
    (first, one), (second, two) = layer(160, 96, x), layer(32, 160, hidden)
    assert any(int.from_bytes(bytes(step.block)[at : at + 8], "little") for step in (one, two) for at in [LINEAR.offset("second_phase")])
    wanted = ops.qlinear(ops.qlinear(x, first, **SCALES), second, **SCALES)
    programs = [Program([ProgramNode(one, (0,), False), ProgramNode(two, (1,), True)], 1) for _ in range(2)]
    for program in programs:
        out = torch.zeros(64, 32, dtype=torch.int8)
        program([x, out])
        assert torch.equal(out, wanted)
