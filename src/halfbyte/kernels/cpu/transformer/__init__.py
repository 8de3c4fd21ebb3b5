"""Layers of language models on CPUs, each in one native call.

decoder.py                  decoder layers: attention_sublayer.py, then feed_forward.py or a mixture of experts (experts/), then
                            per_layer.py in models with per-layer inputs; sublayers.py: what these share
encoder.py, embed.py        encoder layers, and their embeddings; cross_block.py: blocks of UNets, with cross-attention
attend.py, attend_whole.py  attention of a few new tokens, and of whole prompts or sequences; attend_bf16.py: in layers with int8 products
whole_model.py              a decode step: new tokens through all layers of a model
"""
