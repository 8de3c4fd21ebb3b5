"""Layers of language models on CPUs, each in one native call.

decoder.py, encoder.py     whole layers; attend.py, attend_whole.py: their attention
cross_block.py             a block of a UNet, with cross-attention; attend_bf16.py: its attention beside int8 products
attention_half.py, feed_forward.py    the sublayers of a decoder layer; experts.py, experts_plan.py: a mixture of experts as the second;
                           sublayers.py: what they share
per_layer.py               the last sublayer of layers with a per-layer input
whole_model.py             a decode step: new tokens through all layers
embed.py                   embeddings of an encoder, added and normed
"""
