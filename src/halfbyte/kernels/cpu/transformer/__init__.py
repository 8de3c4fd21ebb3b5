"""Layers of language models on CPUs, each in one call.

decoder.py, encoder.py     whole layers; attend.py, attend_whole.py: their attention
attention_half.py, feed_forward.py    the halves of a decoder layer; experts.py, experts_plan.py: the second of experts;
                           sublayers.py: what they share
per_layer.py               what comes after them in layers with an input of their own
whole_model.py             one token through all of a model
embed.py                   rows of tables, added and normed
"""
