"""What makes, compiles and starts kernels on CPUs.

ir.py            an emitter of LLVM IR; elements.py: element types in memory
isa.py, isas.py  what kernels ask of an instruction set, and which one is taken: isa_x86.py, isa_amx.py, isa_arm.py, isa_riscv.py
tuning.py        numbers chosen by measurement for each microarchitecture: tile sizes, prefetch distances, thresholds
kernel.py        a kernel: its specification, and the function that generates its code; jit.py compiles and caches
arguments.py     the tables through which arguments get there; runtime.py: the threads that run it
elementary.py    elementary functions of each lane
"""
