"""halfbyte's own checkpoints.

checkpoint_model.py    one as a model on disk
saving.py              `save`; folder.py: so that a reader finds a whole checkpoint at every moment
manifest.py, quantization_config.py    the sections of config.json
model_card.py    its README.md
"""
