"""What commands are made of.

output.py        arguments, tables, progress bars; device.py: the device and dtype of language models
eval_models.py   the models of `halfbyte eval`; selftest.py: the tests of `halfbyte doctor`
"""
