"""Quality metrics of quantized models.

outputs.py   embeddings, hidden states and logits of two models for the same lines
language.py  predictions of language models: perplexity, divergence, agreement, last words
"""

from halfbyte.evaluate.language import LanguageQuality as LanguageQuality
from halfbyte.evaluate.language import evaluate_language as evaluate_language
from halfbyte.evaluate.language import last_word_accuracy as last_word_accuracy
from halfbyte.evaluate.outputs import EmbeddingQuality as EmbeddingQuality
from halfbyte.evaluate.outputs import OutputQuality as OutputQuality
from halfbyte.evaluate.outputs import batches_by_length as batches_by_length
from halfbyte.evaluate.outputs import compare_embeddings as compare_embeddings
from halfbyte.evaluate.outputs import compare_outputs as compare_outputs
from halfbyte.evaluate.outputs import embed as embed
from halfbyte.evaluate.outputs import merge_outputs as merge_outputs
from halfbyte.evaluate.outputs import pool as pool
