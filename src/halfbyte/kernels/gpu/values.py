"""What device code computes with, as Python's types see it."""

from __future__ import annotations

from typing import Any, TypeAlias

# A value in a kernel: a tensor of Triton's, a pointer, a TMA descriptor, shared memory, a barrier, or a constant of the compilation.
# Triton's compiler gives it a type (`tl.tensor`, `gl.shared_memory_descriptor`, …); on the host the same field takes a torch tensor, an int
# or None. Python has no type that is all of these.
Value: TypeAlias = Any
