"""The format in which a weight is packed: that of its codes, but where no kernel of the device reads these."""

from __future__ import annotations

from halfbyte.formats.spec import Format


def packed_format(fmt: Format, *, on_cpu: bool) -> Format:
    """On this CPU or on GPUs, which hold codes of 5 and 6 bits, and of codebooks but 4-bit floats, as integers of 8 bits; CPUs with AMX or
    i8mm those of 5 and 6 bits."""
    if on_cpu and fmt.packed_bits:
        from halfbyte.kernels.cpu.codegen.isas import current

        return fmt if current().reads_packed_bits else fmt.integers
    return fmt.integers if not on_cpu and fmt.has_limited_codes and fmt.family != "fp4" else fmt
