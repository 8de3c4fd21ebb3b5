"""Generates, compiles and starts kernels on CPUs. To read it: kernel.py, ir.py, isa.py, then jit.py.

kernel.py        a kernel: a specification, and the function that emits its code
ir.py            emits LLVM IR; elements.py: element types in memory; elementary.py: exp, GELU and others
isa.py           what kernels ask of an instruction set; isa_x86.py, isa_amx.py, isa_arm.py, isa_riscv.py: each; isas.py: which is used
tuning.py        numbers chosen by measurement for each microarchitecture: tile sizes, prefetch distances, thresholds
jit.py           compiles, caches and links
arguments.py     the blocks of memory that hold a call's arguments; runtime.py: the threads that run it
"""
