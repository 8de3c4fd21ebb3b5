"""Language models without transformers: checkpoints of any kind, tokenizers, chat templates, generation.

checkpoint_tensors.py   the tensors of a checkpoint, for `decoder.build`
"""
