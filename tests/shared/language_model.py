"""Small language models with random weights: in memory, and as a Hugging Face folder with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "the quick brown fox jumps over the lazy dog while the slow red hen sleeps under an old oak tree\n" * 40
TEMPLATE = (
    "{% if tools %}<s>tools: {{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def make_decoder(kind: str, **settings: Any) -> Any:
    """A model of one of transformers' families, such as "Llama", with these settings of its config; by default of two layers."""
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    usual = {"num_hidden_layers": 2, "vocab_size": 99, "initializer_range": 0.2}
    config = getattr(transformers, f"{kind}Config")(**usual | settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    make: Any = PreTrainedTokenizerFast  # its __init__ has no types
    return cast(PreTrainedTokenizerFast, make(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE))


def make_language_model(folder: Path, *, tied: bool = True) -> Path:
    """Writes the model and its tokenizer to `folder`, and returns it."""
    tokenizer = make_tokenizer()
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    }
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=128, tie_word_embeddings=tied)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.initializer_range = 0.2  # so that what a model says depends on what it is told
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_mixture(folder: Path) -> Path:
    """Writes a quantized mixture of experts, both of whose layers have experts, and its tokenizer to `folder`, and returns it."""
    import halfbyte as hb

    tokenizer = make_tokenizer()
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 96}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    config = transformers.Qwen3MoeConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=600)
    hb.save(hb.quantize_(transformers.Qwen3MoeForCausalLM(config), hb.Config("q8_0", compute="float")), folder)
    tokenizer.save_pretrained(folder)
    return folder


class FloatTensors:
    """`decoder.build.Tensors` whose quantized weights compute in floating point, whatever their checkpoint says."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensors, name)

    def weight(self, names: Any, bias: Any = (), *, floats: bool = False) -> Any:
        found = self._tensors.weight(names, bias, floats=floats)
        return None if found is None else found._replace(compute="float")

    def table(self, name: str) -> Any:
        found = self._tensors.table(name)
        return found._replace(compute="float") if hasattr(found, "compute") else found
