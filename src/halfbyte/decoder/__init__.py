"""What a decoder-only language model is, described once, and how it is computed.

families.py   the table of model families: the only file that a new family touches
"""
