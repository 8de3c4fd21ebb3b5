"""The type of what device code computes with."""

from typing import get_type_hints

import pytest

from halfbyte.kernels.gpu.hopper import ring, skinny_tile, tile
from halfbyte.kernels.gpu.values import Value

STRUCTURES = [ring.Shape, tile.Operands, tile.Ring, tile.WeightOffset, tile.XBoxes, skinny_tile.Operands, skinny_tile.Ring]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_fields_of_device_structures_are_values(structure: type[tuple[Value, ...]]) -> None:
    """Triton's compiler flattens a NamedTuple by its values; an annotation of another type would promise what only the host has."""
    assert set(get_type_hints(structure).values()) == {Value}
