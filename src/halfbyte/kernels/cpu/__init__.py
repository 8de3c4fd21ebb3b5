"""The arithmetic on CPUs: LLVM IR, generated in Python and compiled when it is first needed.

codegen/         the emitter, the instruction sets, and what compiles, caches and starts kernels
linear/          products with a weight: tiles, and the loops around them
conv/            convolutions, and what lies between them in int8 networks
transformer/     layers of decoders and encoders, attention, experts
quantize/        weights to codes and back, and codes into the layout of tiles
step_sequence.py         steps in one call, which threads are woken once for; steps.py: programs of such calls
normed_convs.py  GroupNorms and the convolutions behind them as such steps: residual blocks of UNets
upsampled_conv.py        convolutions of images enlarged by nearest neighbours, which they do not need
plan_cache.py    what a thread keeps between calls; probe.py: what this machine can do at the most
"""
