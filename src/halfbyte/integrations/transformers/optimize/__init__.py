"""`optimize_`: forwards of a model of transformers are replaced.

optimizing.py    all that makes a model faster; self_check.py: compares it with the plain model the first time
forwards.py      which forwards are replaced; replaced.py: the classes of their modules
calls.py         the arguments of these forwards, and which values are understood
frozen.py        whether a module has changed since; hooked.py: whether it has hooks
explain_model.py the ops of each layer and their kernels
"""
