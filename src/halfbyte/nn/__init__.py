"""Modules with quantized weights, and what puts them into a model.

Quantizing in place
  described.py      what configs and checkpoints say of modules
  config.py         what a model is quantized to; candidates.py: which modules that concerns; kinds.py: what each kind becomes
  convert.py        `quantize_`; report.py: what became of each module, and why
  modules.py        QuantLinear, QuantEmbedding and their base; conv.py, experts.py, permuted.py, scaled.py: others;
                    weight_view.py, under_compile.py: their weights, as other code sees them; packed_check.py: whether it has
                    computed with their bytes; rescaled.py: those that a model rescales as it runs
  expanded.py       modules put in place for the moment, so that each weight is a module's: experts.py, transposed.py, attention.py
  dequantized.py    their float forms, of a model or of layers that are trained
Calibration
  calibrate.py, calibrate_experts.py    layer by layer, on text; runs.py: what each layer gets
  folding.py        where scales of input channels can be folded; sensitivity.py: of single weights
Networks on int8 codes
  static.py         from a traced network; traced.py: what is looked for there; batchnorm.py: folded before
  integer.py        their modules; network.py: all of them as one call
  memory_format.py  channels_last within a network, here and in `fuse_`
Faster
  fused.py, fused_convolutions.py       `fuse_`
Training and pruning
  qat.py            quantization-aware training; fake_quantized.py: its modules
  sparsity.py       `prune_`, `drop_zeros_`
Several processes
  parallel.py       `parallelize_`; parallel_plan.py: how weights are cut; parallel_sum.py: sums
"""
