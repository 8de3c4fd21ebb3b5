"""llama.cpp's answers, by way of the package xllamacpp (pip install xllamacpp); tests that ask for them are skipped without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_llama_cpp = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed: pip install xllamacpp")


class LlamaCpp:
    """A model in a GGUF file, as llama.cpp runs it on one thread."""

    def __init__(self, path: Path) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path, parameters.n_ctx, parameters.n_parallel, parameters.warmup = str(path), 256, 1, False
        parameters.cpuparams.n_threads = 1
        # Attention in float32: flash attention sums values in float16, and keys and values would be rounded to it.
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server: Any = xllamacpp.Server(parameters)

    def next_token(self, prompt: str | Sequence[int], most: int) -> dict[int, float] | None:
        """The logarithm of the probability of each of the `most` likeliest tokens; None where it would write a part of a character."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        request = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": most, "cache_prompt": False}
        found = self._server.handle_completions(request)["choices"][0]["logprobs"]
        return None if found is None else {token["id"]: token["logprob"] for token in found["content"][0]["top_logprobs"]}

    def next_tokens(self, ids: Sequence[int], first: int, most: int) -> Iterator[tuple[int, dict[int, float]]]:
        """For each count of tokens from `first` on, unless it answers with None: (count, `next_token`)."""
        for count in range(first, len(ids)):
            if (found := self.next_token(ids[:count], most)) is not None:
                yield count, found
