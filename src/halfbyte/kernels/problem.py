"""One multiplication."""

from __future__ import annotations

from typing import Literal

Compute = Literal["float", "int8"]
Activation = Literal["block", "row", "block_offset", "row_offset"]
