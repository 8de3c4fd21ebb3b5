"""The language models of `halfbyte eval`: computed without transformers where halfbyte's own decoder supports them, else by transformers.

Both kinds are called as transformers' models are, which is what `halfbyte.evaluate` does.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from halfbyte.cli.shared.device import asked_dtype, offloads, placed, waking
from halfbyte.cli.shared.output import settling
from halfbyte.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from halfbyte.language.model import LanguageModel
    from halfbyte.nn.config import Config


class Opened(NamedTuple):
    """A language model.

    Attributes:
        model: Called with input_ids [1, t], returns an object with `logits` [1, t, N].
        tokenizer: Called with a text, returns a mapping with "input_ids".
        weight_bytes: Bytes of its weights.
        max_positions: Positions that it was made for; None where its config does not say.
        int8_cached: The same with keys and values in 8 bits.
    """

    model: Any
    tokenizer: Any
    weight_bytes: int
    max_positions: int | None
    int8_cached: object


@settling()
def open_model(args: argparse.Namespace, path: Path, name: str, format: str | None = None) -> Opened:
    """Open a model on the device of the arguments.

    Args:
        args: Of the command.
        path: A Hugging Face folder, a halfbyte folder or a .gguf file.
        name: What messages call it.
        format: Quantize it to this format.
    """
    with waking(args.device):
        from halfbyte.nn.config import Config

        config = None if format is None else Config(format)
    try:
        return _open_native(args, path, config)
    except UnsupportedError as e:
        if offloads(args):
            raise
        if not args.quiet:
            print(f"transformers runs {name}, as halfbyte's own decoder does not: {e}", file=sys.stderr)
    from halfbyte.integrations.transformers import text

    model, tokenizer = text.open_model(path, args.device, config, asked_dtype(args))
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Opened(model, tokenizer, text.weight_bytes(model), most, _Cached(model))


def _open_native(args: argparse.Namespace, path: Path, config: Config | None) -> Opened:
    from halfbyte.language.model import LanguageModel

    if args.device == "cpu" and args.dtype not in (None, "float32"):
        raise UnsupportedError(f"it computes in float32 on a CPU, not in {args.dtype}")
    model = LanguageModel.open(path, format=config, dtype=asked_dtype(args), **placed(args, context=args.context))
    for note in () if args.quiet else (*model.notes, *([] if model.plan is None else [model.plan])):
        print(note, file=sys.stderr)
    return Opened(_Native(model), _Encoder(model), model.spec.nbytes, model.spec.max_positions, _Native(model, int8=True))


@dataclass(frozen=True, slots=True)
class _Logits:
    logits: Tensor


class _Native:
    """A model without transformers."""

    def __init__(self, model: LanguageModel, *, int8: bool = False) -> None:
        self._model, self._int8 = model, int8

    @property
    def device(self) -> torch.device:
        return self._model.spec.embedding.device

    def __call__(self, *, input_ids: Tensor, use_cache: bool) -> _Logits:
        return _Logits(self._model.logits(input_ids[0].tolist(), int8_cache=self._int8)[None])


class _Encoder:
    """The tokenizer of a model without transformers."""

    def __init__(self, model: LanguageModel) -> None:
        self._tokenizer = model.tokenizer

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens)}


class _Cached:
    """A model of transformers that reads keys and values from a cache of 8 bits, those of its own window too."""

    def __init__(self, model: Any) -> None:
        self._model, self.device = model, model.device

    def __call__(self, *, input_ids: Any, use_cache: bool) -> Any:
        from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache
        from halfbyte.integrations.transformers.optimize.calls import KV_CACHE

        return self._model(input_ids=input_ids, use_cache=True, **{KV_CACHE: Int8Cache(self._model.config)})
