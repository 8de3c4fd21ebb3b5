"""Layers of language models and encoders.

sublayers.py  what a layer consists of: norms, heads, attention, MLP; experts.py: mixtures of experts, few rows of them on a CPU;
              weights.py: weights, and their addresses for native programs
decoder.py    decoder layers in native calls on a CPU; whole_model_decode.py: a token through a whole model
encoder.py    encoder layers in native calls; embed.py: the embeddings before them; attention.py: attention of whole sequences by itself
cross_block.py  blocks of UNets, with cross-attention, in one native call on a CPU

The steps of a decoder layer one by one, by kernels of a GPU, or in torch's operations on any device:
normed_linear.py  a norm, a product and gates; norms.py: norms; routing.py: mixtures of experts
attend.py     rope, the KV cache and attention of one token of each sequence; prefill_ops.py: of many tokens
"""
