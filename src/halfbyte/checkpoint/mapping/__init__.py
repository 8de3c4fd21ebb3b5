"""Which tensor of the files is which of the model.

architecture.py        what transformers knows of a model; plan.py: which tensor of the files is which of the model;
                       left_out.py: and which does not matter
generation_settings.py values of generation_config.json
"""
