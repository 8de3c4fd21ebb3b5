"""Modules with quantized weights, and what puts them into a model.

modules/          the modules
calibration/      layer by layer, on text
static/           networks that compute on int8 codes
training/         quantization-aware training, pruning
parallel/         several processes
Quantizing in place
  described.py    what configs and checkpoints say of modules
  config.py       what a model is quantized to; candidates.py: which modules that concerns; kinds.py: what each kind becomes
  convert.py      `quantize_`; report.py: what became of each module, and why
  dequantized.py  the float forms of modules, of a model or of layers that are trained
Faster
  fused.py, fused_convolutions.py    `fuse_`; fused_blocks.py, fused_transformers.py: blocks of diffusers on CPUs
  data_flow.py    whether the output of one submodule feeds only another one; fusion_notes.py: what the report says of fused ones
  frozen.py       whether a module is still what something was compiled from
"""
