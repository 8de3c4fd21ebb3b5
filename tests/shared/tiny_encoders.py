"""Tiny encoders of transformers' families, with random weights.

CASES  functions that make a model for each layer of `halfbyte.integrations.transformers.encoder.encoding`, by the name of its family
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 60,
    "initializer_range": 0.2,
}
OF_IMAGES = SIZES | {"image_size": 24, "patch_size": 8}
OF_DISTILBERT = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 40, "vocab_size": 60, "initializer_range": 0.2}
OF_WHISPER = {"d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "max_source_positions": 12}
CASES: dict[str, Callable[..., Any]] = {
    "bert": lambda **more: tf.BertModel(tf.BertConfig(**SIZES | more)),
    "camembert": lambda **more: tf.CamembertModel(tf.CamembertConfig(**SIZES | more)),
    "electra": lambda **more: tf.ElectraModel(tf.ElectraConfig(embedding_size=16, **SIZES | more)),
    "roberta": lambda **more: tf.RobertaModel(tf.RobertaConfig(**SIZES | more)),
    "xlm_roberta": lambda **more: tf.XLMRobertaModel(tf.XLMRobertaConfig(**SIZES | more)),
    "distilbert": lambda **more: tf.DistilBertModel(tf.DistilBertConfig(**OF_DISTILBERT | more)),
    "mpnet": lambda **more: tf.MPNetModel(tf.MPNetConfig(**SIZES | more)),
    "vit": lambda **more: tf.ViTModel(tf.ViTConfig(**OF_IMAGES | more)),
    "deit": lambda **more: tf.DeiTModel(tf.DeiTConfig(**OF_IMAGES | more)),
    "whisper": lambda **more: WhisperEncoder(tf.WhisperConfig(**OF_WHISPER | {"num_mel_bins": 8, "init_std": 0.2} | more)),
}


def make_encoder(case: str, **settings: Any) -> Any:
    """A model in eval mode, whose norms and biases, which are initialized to ones and zeros, have random values."""
    model = CASES[case](**settings).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() or "bias" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


def inputs(model: Any, *lengths: int) -> dict[str, Tensor]:
    """Sequences of these lengths, padded; or as many images, or spectrograms."""
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(len(lengths), 8, 2 * model.max_source_positions, generator=torch.Generator().manual_seed(1))}
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(len(lengths), 3, 24, 24, generator=torch.Generator().manual_seed(1))}
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 60, mask.shape, generator=torch.Generator().manual_seed(1)).where(mask, 1)
    return {"input_ids": ids, "attention_mask": mask.long()}


def states(model: Any, given: dict[str, Tensor], **settings: Any) -> Tensor:
    """The last hidden states, without those of padding."""
    with torch.inference_mode():
        found: Tensor = model(**given, **settings).last_hidden_state
    return found if "attention_mask" not in given else found[given["attention_mask"].bool()]
