"""halfbyte in other projects, and language models as a whole.

on_import.py   registers with transformers, diffusers and peft when they are imported
transformers/  the quantizer of `from_pretrained`; models that are opened, made faster (`optimize_`) and write text
diffusers/     the quantizer of diffusers' `from_pretrained` and `from_single_file`
peft/          adapters and other training of quantized models
vllm/          the plugin of vLLM
"""
