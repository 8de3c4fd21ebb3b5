"""The arithmetic on GPUs: Triton, and Gluon, its lower level, where a kernel is made for Hopper (`…_hopper.py`).

Starting kernels
  runtime/         launches, scratch buffers, and tapes, which replay launches
  hopper.py        what kernels for Hopper share; gluon_compat.py: what Gluon has in different ways in versions of Triton
  compile_time.py  the constants that kernels are compiled for: how compiled ones are found again on disk; weight_kinds.py: which kinds of
                   zeros, scales and codebooks they decode
  clock.py         times on a GPU; probe.py: what it can do at the most

Linear layers: docs/engineering/gpu-kernels.md says which one is taken when
  skinny.py, skinny_hopper.py                            floats, few rows; skinny_tile.py, skinny_hopper_tile.py: their tiles;
                                                         skinny_config.py, skinny_hopper_config.py: what they
                                                         are compiled for, the latter also which tiles;
                                                         sparse_tile.py: the latter's of 2:4 sparse weights, whose
                                                         zeros spread.py puts back for all other kernels
  gemm_hopper.py, dequantized.py, plain.py               floats, many rows; hopper_tile.py: the former's tile;
                                                         hopper_weights.py: codes to its operand in registers
  gemm_int8.py, skinny_int8_hopper.py, gemm_int8_hopper.py    integers; int8_hopper_tile.py: the third's tile
  skinny_rounded.py, rounded.py                               integers, multiplied as floats
  grouped.py, grouped_hopper.py, grouped_int8_hopper.py, grouped_dequantized.py    experts
  qlinear.py       int8 codes in and out
  quantize.py, dequantize.py, activations.py             numbers to codes and back; decode.py: bytes to floats in registers
  epilogue.py      what happens to sums before they are written; arithmetic.py: what kernels share

Convolutions: docs/engineering/convolution-kernels.md
  conv.py, conv_few.py, conv_teams.py, conv_hopper.py    products of patches; conv_tile.py: parts of them; conv_hopper_tile.py,
                                                         conv_hopper_write.py: the last one's kernel
  conv_dynamic.py, conv_image.py                         activations quantized on the fly
  conv_depthwise.py, conv_stem.py, conv_library.py       each channel by itself; images of few channels; cuDNN
  pool.py, elementwise.py                                what lies between them

Language models
  attend.py, norm.py, gates.py                           what lies between the products of a decoder layer; routing.py: of experts;
                                                         turn.py, attend_many.py: attention of many tokens; kv_codes.py: a cache in 8 bits
"""
