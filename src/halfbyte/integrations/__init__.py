"""halfbyte in other projects, and language models as a whole.

on_import.py   registers with transformers and peft when they are imported
transformers/  the quantizer of `from_pretrained`; models that are opened, made faster (`optimize_`) and write text
peft/          adapters and other training of quantized models
vllm/          the plugin of vLLM
"""
