"""Which tensor of the files is which of the model.

plan.py                what becomes of each tensor of the files; left_out.py: tensors without a place in the model; ties.py: tied ones
architecture.py        transformers' model of a config.json, and its mapping of names
generation_settings.py values of generation_config.json
"""
