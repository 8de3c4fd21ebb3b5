"""Benchmarks: halfbyte and its peers, each in its own process, compared with the machine's ceilings."""
