"""halfbyte in transformers.

quantizer.py         the quantizer of `from_pretrained`; tensor_parallel.py: for several processes
weights_in_files.py  what weights become while transformers or diffusers reads their files
changed_models.py    imports vocabulary.py (embeddings get another size) and model_card.py
training.py          the Trainer
gguf.py, text.py     models are opened; text is generated and timed
attention.py         an implementation of attention
modules.py           types of what is read of transformers' modules and configurations
cache/               KV caches
optimize/            `optimize_`, and what all forwards that it replaces share
decoder/, encoder/   compiled stacks of layers
generate/            the loop of `generate`
"""
