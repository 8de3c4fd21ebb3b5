"""Embeddings and heads of halfbyte checkpoints; a head may share the embedding's weight."""

from __future__ import annotations

from torch import Tensor, nn

from halfbyte import ops
from halfbyte.checkpoint.native.quantization_config import Module
from halfbyte.integrations.vllm import api
from halfbyte.integrations.vllm.linear import HalfbyteLinearMethod


@api.register_weight_loader_v2_supported_method
class HalfbyteEmbeddingMethod(HalfbyteLinearMethod):
    """Rows of a quantized table, and products with it.

    vLLM pads the vocabulary with rows of zeros, and gives each process some of the rows.

    Args:
        module: Of the checkpoint.
        prefix: The layer's name; some models give none.
    """

    def __init__(self, module: Module, prefix: str) -> None:
        super().__init__((module,), prefix or "the embedding")

    def embedding(self, layer: api.VocabParallelEmbedding, input_: Tensor) -> Tensor:
        """ids [...] -> rows [..., K]."""
        return ops.embedding(input_, layer.packed.products[0].packed, self._dtype)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Return the module that is the head: the embedding, whose packed weight serves both."""
        return embed_tokens
