"""Blocks of arguments: names are unique, and a field takes and gives values of its own type alone."""

from __future__ import annotations

import importlib
import pkgutil
import struct

import pytest

import halfbyte.kernels.cpu as room
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Block
from halfbyte.kernels.cpu.codegen.ir import Module


def test_a_block_begins_with_the_header_and_extends_another() -> None:
    block = Block("x", "eps", floats=["eps"]).extended("y", "clamp", floats=["clamp"])
    assert block.fields == ("first_phase", "second_phase", "openmp", "counter", "x", "eps", "y", "clamp")
    buffer = block.buffer({"x": -3, "eps": (0.5, 0.0), "clamp": (-1.0, 2.0)})
    assert struct.unpack("<5q2fq2f", buffer.raw) == (0, 0, 0, 0, -3, 0.5, 0.0, 0, -1.0, 2.0)
    assert block.nbytes == len(buffer.raw)


def test_a_field_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="got units twice"):
        LINEAR.extended("units")  # generated code of LINEAR would read the first one, and Python write the second


@pytest.mark.parametrize("name", [m.name for m in pkgutil.walk_packages(room.__path__, room.__name__ + ".") if not m.ispkg])
def test_no_block_has_two_fields_of_one_name(name: str) -> None:
    blocks = [value for value in vars(importlib.import_module(name)).values() if isinstance(value, Block)]
    assert all(len(set(block.fields)) == len(block.fields) for block in blocks)


def test_values_of_the_wrong_type_are_errors() -> None:
    with pytest.raises(TypeError):
        LINEAR.buffer({"clamp": 1})  # its bits would be two floats
    with pytest.raises(struct.error):
        LINEAR.buffer({"k": (1.0, 2.0)})
    args = Module().function("f", ["ptr"]).parameters[0]
    with pytest.raises(AssertionError, match="load_floats"):
        LINEAR.load(args, "clamp")
    with pytest.raises(AssertionError, match="no pair"):
        LINEAR.load_floats(args, "k")
