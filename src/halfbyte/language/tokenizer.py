"""Text ↔ token ids, without transformers.

Called by the language model and the commands that generate text. The tokenizer itself is an object of the package `tokenizers`, which
tokenizer_folder.py builds from a folder and checkpoint/gguf/tokenizer.py from a .gguf file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.checkpoint.gguf import tokenizer as gguf_tokenizer
from halfbyte.errors import ArgumentError, CheckpointError, check_type, not_there
from halfbyte.io.files import is_file, is_folder, is_there
from halfbyte.io.gguf import File, is_gguf
from halfbyte.language import tokenizer_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_LONG = 1 << 14  # characters: a text from here on is tokenized without Python's lock, so that other threads run
_ID_LIMIT = 1 << 32  # tokenizers stores ids in 32 bits
# What transformers' clean_up_tokenization replaces, in this order.
_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
CLEAN_UP_CHARACTERS = frozenset("".join(pattern for pattern, _ in _CLEAN_UP))


class Tokenizer:
    """The tokenizer of a language model.

    Attributes:
        special_tokens: Texts of the special tokens by transformers' names, such as `{"bos_token": "<s>"}`: variables of chat templates.
        chat_templates: Chat templates by name; the usual one is called "default".
        eos_ids: Ids of the tokens that end an answer: the tokenizer's own, then those of generation_config.json or config.json, or those
            that the .gguf file names and llama.cpp knows.

    Example:
        tokenizer = Tokenizer.open(Path("SmolLM2-135M-Instruct.gguf"))
        tokenizer.decode(tokenizer.encode("a text"))
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        *,
        chat_templates: Mapping[str, str] | None = None,
        end_ids: Sequence[int] = (),
        clean_up: bool = False,
    ) -> None:
        """Wrap a tokenizer; `Tokenizer.open` reads one from a file.

        Args:
            backend: A `tokenizers.Tokenizer`.
            special_tokens: Texts of the special tokens by transformers' names.
            chat_templates: Chat templates by name.
            end_ids: Ids of further tokens that end an answer.
            clean_up: Remove spaces before punctuation from decoded text, as transformers does for some tokenizers.
        """
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates or {})
        self.clean_up = clean_up
        eos = [backend.token_to_id(text) for name, text in special_tokens.items() if name == "eos_token"]
        self.eos_ids = tuple(dict.fromkeys([*(id for id in eos if id is not None), *end_ids]))

    @classmethod
    def open(cls, path: Path, header: File | None = None) -> Tokenizer:
        """Open the tokenizer of a model.

        Args:
            path: A Hugging Face folder with tokenizer.json, a halfbyte folder or a .gguf file.
            header: That of the .gguf file, where it has been read already.

        Returns:
            A tokenizer that gives the same ids as transformers' AutoTokenizer for the folder.

        Raises:
            CheckpointError: There is no tokenizer, it is damaged, or it is of a kind that `tokenizers` cannot read.

        Example:
            Tokenizer.open(Path("SmolLM2-135M-Instruct")).encode("a text")
        """
        if is_folder(path):
            return cls(**tokenizer_folder.read(path)._asdict())
        if not is_there(path):
            raise not_there(path, "a Hugging Face folder, a halfbyte folder or a .gguf file")
        if not is_file(path) or not is_gguf(path):
            raise CheckpointError(f"{path} is no .gguf file: name a Hugging Face folder, a halfbyte folder or a .gguf file")
        file = gguf_tokenizer.read(path, header)
        if file is None:
            raise CheckpointError(f"{path} has no tokenizer: start from another file of the model")
        return cls(**file._asdict())

    def has_vocabulary_of(self, other: Tokenizer) -> bool:
        """Return whether both have the same tokens with the same ids."""
        return self.backend.get_vocab(with_added_tokens=True) == other.backend.get_vocab(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that `decode` skips by default."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Split a text into tokens.

        Args:
            text: The text; special tokens that occur in it become their ids.
            add_special_tokens: Add the tokens that the tokenizer begins and ends a text with. False for the text of a chat template, which
                has them already.

        Returns:
            Token ids.

        Raises:
            ArgumentError: The text is no str, or has lone surrogates, which are no text.
        """
        check_type(text, str, "the text to encode is a str", "pass one text at a time")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise ArgumentError(
                f"the text has a lone surrogate {text[e.start]!a} at character {e.start}, which is no text: decode it as UTF-8 first"
            ) from e
        if len(text) > _LONG:  # `encode` would hold Python's lock
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Args:
            ids: Token ids; those without a token, as in rows of an embedding that are padding, give no text.
            skip_special_tokens: Leave out special tokens, such as the end of an answer.

        Returns:
            The text; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ArgumentError: An id is negative, or does not fit into 32 bits.
        """
        for id in ids:
            if not 0 <= id < _ID_LIMIT:
                raise ArgumentError(f"a token id is from 0 to {_ID_LIMIT - 1}, got {id}: pass ids of this tokenizer")
        text = self.backend.decode(ids, skip_special_tokens)
        return clean(text) if self.clean_up else text


def clean(text: str) -> str:
    """Remove spaces before punctuation and contractions, as transformers' `clean_up_tokenization`."""
    for pattern, replacement in _CLEAN_UP:
        text = text.replace(pattern, replacement)
    return text
