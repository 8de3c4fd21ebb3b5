"""GGUF files as models, read and written.

model.py      a file as a model on disk: names.py, orders.py, config.py, rope.py, tokenizer.py, chat_templates.py
export.py     writes one; vocabulary.py: its tokenizer
"""
