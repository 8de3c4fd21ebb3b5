"""Interprets the inline PTX of kernels on torch tensors: the few instructions that they have, and branches forward."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def run(text: str, inputs: list[Tensor], outputs: int) -> list[Tensor]:
    """int64 tensors of 32 bits in, so many out."""
    registers: dict[str, Tensor] = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def value(word: str) -> Any:
        return registers[word] if word in registers else torch.tensor(0 if word == "%smid" else int(word, 0))

    sought = ""  # the label that is gone to
    for line in re.sub(r"//.*|[{}]", "", text).split(";"):
        *labels, line = line.split(":")
        sought = "" if sought in [label.strip() for label in labels] else sought
        op, *words = line.replace(",", " ").split() or [""]
        if sought or not op or op == ".reg":
            continue
        if op.startswith("@"):
            if bool(registers[op.lstrip("@!")].all()) == op.startswith("@!"):
                continue
            op, *words = words
        if op == "bra.uni":
            sought = words[0]
            continue
        to, args = words[0], [value(word) for word in words[1:]]
        if op in ("mov.b32", "mov.u32"):
            found = args[0] + 0 * inputs[0]
        elif op == "setp.lt.s32":
            found = (args[0] ^ 0x80000000) - 0x80000000 < args[1]
        elif op == "cvt.u32.u16":
            found = args[0] & 0xFFFF
        elif op == "add.u32":
            found = args[0] + args[1] & 0xFFFFFFFF
        elif op in ("and.b32", "xor.b32", "or.b32"):
            found = {"and": torch.bitwise_and, "xor": torch.bitwise_xor, "or": torch.bitwise_or}[op[:-4]](*args)
        elif op in ("shr.b32", "shr.u32"):
            found = args[0] >> args[1]
        elif op == "shl.b32":
            found = args[0] << args[1] & 0xFFFFFFFF
        elif op == "lop3.b32":
            found = _lop3(*args)
        elif op == "prmt.b32":
            found = _prmt(*args)
        elif op.startswith("fma.rn."):
            found = _halves(functools.partial(_fma, dtype=torch.bfloat16 if "bf16" in op else torch.float16), args)
        else:
            raise NotImplementedError(line)
        registers[to] = found
    if sought:
        raise NotImplementedError(f"a branch backward to {sought}")
    return [registers.get(f"${i}", inputs[0]) for i in range(outputs)]


def _lop3(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    found = a * 0 + b * 0 + c * 0
    for i in range(8):
        if int(table) >> i & 1:
            terms = [operand if i >> place & 1 else operand ^ 0xFFFFFFFF for operand, place in ((a, 2), (b, 1), (c, 0))]
            found = found | terms[0] & terms[1] & terms[2]
    return found


def _prmt(a: Tensor, b: Tensor, order: Tensor) -> Tensor:
    found = a * 0 + b * 0
    for i in range(4):
        nibble = int(order) >> 4 * i & 15
        byte = (b if nibble & 4 else a) >> 8 * (nibble & 3) & 255
        found = found | (torch.where(byte > 127, 255, 0) if nibble & 8 else byte) << 8 * i
    return found


def _halves(work: Callable[[list[Tensor]], Tensor], args: list[Tensor]) -> Tensor:
    parts = [work([arg >> shift & 0xFFFF for arg in args]) for shift in (0, 16)]
    return parts[0] | parts[1] << 16


def _fma(args: list[Tensor], dtype: torch.dtype) -> Tensor:
    a, b, c = ((arg ^ 0x8000).sub(0x8000).to(torch.int16).view(dtype).double() for arg in args)
    return (a * b + c).to(dtype).view(torch.int16).long() & 0xFFFF
