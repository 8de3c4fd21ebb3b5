"""The settings of sampling that a model's generation_config.json gives, for those that the caller leaves open."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from halfbyte.checkpoint.mapping.generation_settings import FILE, check_generation
from halfbyte.errors import UnsupportedError
from halfbyte.io.files import is_file
from halfbyte.io.safetensors import load_json

TOP_K = 50  # transformers' default
_TAKEN = ("top_k", "top_p", "min_p", "repetition_penalty")
# Settings that do not change which tokens are chosen here, or that the caller always decides.
_WITHOUT_EFFECT = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
    *("temperature", "do_sample", "max_length", "max_new_tokens", "use_cache", "cache_implementation", "return_dict_in_generate"),
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "trust_remote_code", "chat_format"),
    *("num_beams", "num_return_sequences", "remove_invalid_values", "renormalize_logits", "low_memory", "is_assistant"),
    *("early_stopping", "length_penalty", "max_time", "num_assistant_tokens", "max_window_size"),
}
# Values with which a setting does nothing.
_NEUTRAL: dict[str, object] = {
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "min_length": 0,
    "diversity_penalty": 0,
    "guidance_scale": 1,
    "num_beam_groups": 1,
    "token_healing": False,
}


def sampling_defaults(path: Path) -> dict[str, Any]:
    """Read the settings of sampling that a model's folder gives.

    Args:
        path: A model's folder, or a file, which has none.

    Returns:
        Those of top_k, top_p, min_p and repetition_penalty that there are.

    Raises:
        CheckpointError: A value is of a wrong type or range.
        UnsupportedError: The file has a setting that transformers alone follows.
    """
    if not is_file(path / FILE):
        return {}
    settings = {name: value for name, value in load_json(path / FILE).items() if value is not None}
    checked = SimpleNamespace(**settings)
    check_generation(checked, path)
    for name, value in vars(checked).items():
        has_effect = name not in (*_TAKEN, *_WITHOUT_EFFECT) and value not in (None, [], {})
        if has_effect and not (name in _NEUTRAL and _NEUTRAL[name] == value):
            raise UnsupportedError(f"its {FILE} has {name}, which transformers alone follows")
    found = {name: getattr(checked, name) for name in _TAKEN if getattr(checked, name, None) is not None}
    if found.get("top_k") == 0:  # all tokens
        del found["top_k"]
    return found
