"""The settings of generation_config.json that transformers uses without examining them, checked when a model is opened.

Called by architecture.py (`load`) and integrations/transformers/text.py (the command line).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from reprlib import repr as short

from halfbyte.errors import CheckpointError

FILE = "generation_config.json"
_MOST_TOKENS = 1 << 31
_LONGEST_NGRAM = 1 << 16  # tokens; transformers makes a list of as many
_LEAST, _MOST = 1e-5, 1e5  # of what logits are multiplied or divided by: more is infinite, or all zeros, in float32


def _is_token(value: object) -> bool:
    return type(value) is int and -1 <= value < _MOST_TOKENS  # -1 is none, in some files


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_token, value))


def _are_lists_of_tokens(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_are_tokens, value))


def _number(least: float = -math.inf, most: float = math.inf) -> Callable[[object], bool]:
    """Return whether a value is a finite number from `least` to `most`, and no bool."""

    def is_in_range(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and least <= value <= most

    return is_in_range


def _count(most: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and 0 <= value <= most


_TOKEN = _is_token, "a token id"
_TOKENS = _are_tokens, "a list of token ids"
_TOKEN_OR_SEVERAL = lambda value: _is_token(value) or _are_tokens(value), "a token id or a list of them"
_FLAG = lambda value: isinstance(value, bool) or value in (0, 1), "true or false"
_FACTOR = _number(_LEAST, _MOST), f"a number from {_LEAST:g} to {_MOST:g}"
_PROBABILITY = _number(math.nextafter(0, 1), 1), "a number above 0 and at most 1"
_FRACTION = _number(0, 1), "a number from 0 to 1"
_COUNT = _count(_MOST_TOKENS), "a number of tokens"
_NGRAM = _count(_LONGEST_NGRAM), f"a number of tokens, at most {_LONGEST_NGRAM}"
_NUMBER = _number(), "a number"

# Name of a setting -> (whether a value is one that transformers can use, in words). null is none, for all of them.
_SETTINGS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("bos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"), _TOKEN),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), _TOKEN_OR_SEVERAL),
    "decoder_start_token_id": _TOKEN_OR_SEVERAL,
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _TOKENS),
    "bad_words_ids": (_are_lists_of_tokens, "a list of lists of token ids"),
    **dict.fromkeys(("output_hidden_states", "output_attentions", "output_scores", "output_logits", "return_dict_in_generate"), _FLAG),
    **dict.fromkeys(("do_sample", "use_cache", "remove_invalid_values", "renormalize_logits", "low_memory", "token_healing"), _FLAG),
    **dict.fromkeys(("temperature", "repetition_penalty", "encoder_repetition_penalty"), _FACTOR),
    **dict.fromkeys(("top_p", "typical_p"), _PROBABILITY),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), _FRACTION),
    **dict.fromkeys(("top_k", "max_length", "max_new_tokens", "min_length", "min_new_tokens"), _COUNT),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), _NGRAM),
    **dict.fromkeys(("num_beams", "num_return_sequences"), _NGRAM),
    **dict.fromkeys(("guidance_scale", "length_penalty", "max_time"), _NUMBER),
}
_EMPTY = {"suppress_tokens", "begin_suppress_tokens", "eos_token_id"}  # [] is none here, in files of Whisper for example


def check_generation(config: object, folder: Path) -> None:
    """Check the settings of a GenerationConfig, and make floats of the integers that transformers wants as floats.

    Raises:
        CheckpointError: A setting has a value that transformers could not use; the message names it.
    """
    for name, (is_valid, wanted) in _SETTINGS.items():
        value = getattr(config, name, None)
        if value == [] and name in _EMPTY:
            setattr(config, name, None)
        elif value is not None and not is_valid(value):
            raise CheckpointError(
                f"{name} of {folder / FILE}, or of the config.json next to it, is {wanted}, got {short(value)}: repair or remove it"
            )
        elif type(value) is int and wanted == _FACTOR[1]:
            setattr(config, name, float(value))
