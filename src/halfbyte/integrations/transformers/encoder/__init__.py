"""Compiled encoder stacks of transformers.

encoder_stack.py the stack; encoding.py: specifications of its layers; embedding.py: what is before them
"""
