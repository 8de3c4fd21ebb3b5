"""halfbyte in other projects, and language models as a whole.

on_import.py        registers with transformers and peft when they are imported
transformers.py     the quantizer of `from_pretrained`; tensor_parallel.py: for several processes
vocabulary.py       embeddings get another size; training.py: the Trainer
peft.py             LoRA; peft_modules.py: whole layers and single tokens that are trained; peft_prompts.py: prompts
peft_untested.py    quantized models are refused in other versions of peft than those that were tested
gguf.py, text.py    models are opened; text is generated and timed; compiling.py: GPU kernels are compiled before the first prompt
optimizing.py       all that makes a model faster (`optimize_`); self_check.py: compares it with the plain model the first time
calls.py            the arguments of transformers' forwards that are replaced, and which values of these are understood
attention.py        an implementation of attention for transformers; cache.py: a cache in 8 bits; static_codes.py: on GPUs
Forwards that `optimize_` replaces
  stack.py          compiled decoder stacks on a CPU; compiled_layers.py: a call through their layers; token_step.py: a decode step
  model_step.py     a decode step with the model's head; kv_place.py: where keys and values go; growing.py: growing caches
  live_layers.py    what live decoder layers compute; frozen.py: whether a module has changed since; hooked.py: whether it has hooks
  gpu_run.py        a call through the layers on a GPU; decoding_gpu.py: for a token, prompt_gpu.py: for prompts; layer_gpu.py: what both
                    read; rings.py: windows
  forwards.py       replaces the forwards of a model
  families.py       finds the parts of decoder layers (by decoder/families/); mixtures.py: those that have experts
  encoder_stack.py  compiled encoder stacks; encoding.py: their layers; embedding.py: what is before them
  generating.py     writes tokens; steps.py: a model's call for each, without transformers' preparation; graphs.py: as a CUDA graph
  replaced.py       their classes
  explain_model.py  what computes each layer, and why
"""
