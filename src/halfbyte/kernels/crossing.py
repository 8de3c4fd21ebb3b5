"""The words of a crossing between a GPU and the CPU's experts: int64 in memory that both reach, each in a cache line of its own.

READY and DONE count crossings: the GPU adds one to READY when rows have arrived in the CPU's memory, the CPU makes DONE equal to it when
their experts' sum lies there. One crossing is under way at a time, so the CPU has work while they differ.
"""

from __future__ import annotations

READY, DONE = 0, 8
FAILED = 16  # 1 once the CPU has waited for READY too long
ARRIVED = 24  # threads that have finished their part; the last one sets DONE
WORDS = 32
