"""The format in which a weight is packed for a device: its own if the device's kernels read it, otherwise int8 codes of the same values."""

from __future__ import annotations

from halfbyte.formats.spec import Format


def packed_format(fmt: Format, *, on_cpu: bool) -> Format:
    """Return the format of the codes that `ops.pack` arranges.

        device                   codes of 5 and 6 bits   codes of iq4       all others
        GPU                      int8                    int8               as they are
        CPU with AMX or i8mm     int8                    as they are        as they are
        other CPUs               as they are             as they are        as they are

    Args:
        fmt: The format of the weight's Codes.
        on_cpu: For this CPU; otherwise for GPUs.
    """
    if not on_cpu:
        return fmt.integers if fmt.has_limited_codes and fmt.family != "fp4" else fmt
    if not fmt.packed_bits:
        return fmt
    from halfbyte.kernels.cpu.codegen.isas import current

    return fmt if current().reads_packed_bits else fmt.integers
