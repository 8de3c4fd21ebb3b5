"""The arithmetic on CPUs: LLVM IR, generated in Python and compiled when it is first needed.

Making code
  ir.py            an emitter of LLVM IR; elements.py: element types in memory
  isa.py, isas.py  what kernels ask of an instruction set, and which one is taken: isa_x86.py, isa_amx.py, isa_arm.py, isa_riscv.py
  kernel.py        a kernel: its specification, and the function that generates its code; jit.py compiles and caches
  arguments.py     the tables through which arguments get there; runtime.py: the threads that run it
  chain.py         steps in one call, which threads are woken once for; steps.py: programs of such calls
  plan_cache.py    what a thread keeps between calls; probe.py: what this machine can do at the most

Linear layers
  linear.py        the call: from arguments to a plan; grouped.py: of experts
  tile.py          the micro-kernel; tile_spec.py: what it is compiled for; biased.py: what sums begin at; block_end.py: how they are scaled
  expanded.py, bracketed.py, amx.py    tiles on codes expanded once, with scale and offset multiplied at once, on matrix units
  driver.py        the loops around tiles; prefetch.py: weights on their way before they are needed
  activations.py   activations into the order of tiles
  pack.py          codes into the layout of tiles; sparse.py: into that of 2:4 sparse weights; tight.py: codes of 5 and 6 bits
  quantize.py      float weights to codes; dequantize.py: and back; extract.py: codes out of llama.cpp's blocks

Convolutions and int8 networks
  conv/            convolutions
  pool.py, elementwise.py    what lies between them

Language models
  decoder.py, encoder.py     whole layers in one call; attend.py, attend_whole.py: their attention
  attention_half.py, feed_forward.py    the halves of a decoder layer; experts.py: the second of experts; halves.py: what they share
  per_layer.py                          what comes after them in layers with an input of their own
  decoding_step.py           one token through all of a model
  embed.py         rows of tables, added and normed
  exponential.py, gelu.py    functions of each lane
"""
