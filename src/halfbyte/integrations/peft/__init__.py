"""peft on quantized models.

adapters.py    LoRA; modules.py: whole layers and single tokens that are trained; prompts.py: prompts
untested.py    quantized models are refused in other versions of peft than those that were tested
"""
