"""Models on disk that are not halfbyte checkpoints: float ones, those that other projects quantized, GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from halfbyte.checkpoint.entries import Entries
from halfbyte.checkpoint.files import weight_files
from halfbyte.checkpoint.gguf.model import read_file
from halfbyte.checkpoint.native.manifest import CONFIG, SECTION
from halfbyte.checkpoint.native.quantization_config import SETTINGS
from halfbyte.checkpoint.wrappers import plain_names
from halfbyte.errors import CheckpointError
from halfbyte.io.files import is_file, is_there
from halfbyte.io.gguf import is_gguf, read_header
from halfbyte.io.safetensors import Reader, load_json


def open_source(source: Path, dtype: torch.dtype | None = None, *, floats: bool = True) -> tuple[dict[str, object], Entries] | None:
    """Open the files of a model, of which no tensor is read.

    Args:
        source: A folder or a file.
        dtype: The dtype in which the model of a GGUF file computes; see gguf/model.py.
        floats: Open also models without a quantization_config.

    Returns:
        config.json, without its settings of quantization, and the tensors; None for a halfbyte checkpoint, and without `floats` for a model
        that is not quantized.

    Raises:
        CheckpointError: The files are damaged, or of a kind that is not read.
    """
    if is_file(source) and is_gguf(source):
        return read_file(read_header(source), dtype)
    config = load_json(source / CONFIG) if is_file(source / CONFIG) else {}
    if SECTION in config:
        return None
    from halfbyte.checkpoint.foreign.folders import read_folder, read_plain, settings_of

    if (settings := settings_of(source, config)) is not None:
        entries = read_folder(_reader(source, config), {**config, SETTINGS: settings})
        return {key: value for key, value in config.items() if key != SETTINGS}, entries
    if floats:
        return config, read_plain(_reader(source, config), config)
    if is_there(source):
        weight_files(source)  # says what is wrong, such as pickles, where there are no weights that could be quantized
    return None


def _reader(source: Path, config: Mapping[str, object]) -> Reader:
    """The tensors of a folder, by the names that they have in the model itself if it is one of transformers."""
    from halfbyte.checkpoint.mapping.architecture import is_transformers_model

    reader = Reader(weight_files(source))
    if is_transformers_model(config):
        reader.rename(plain_names(reader.places))
    return reader


def open_floats(source: Path, dtype: torch.dtype | None = None) -> tuple[dict[str, object], Entries]:
    """`open_source` for a model to be quantized: none of its weights may be codes, except those made of low-precision floats."""
    opened = open_source(source, dtype)
    if opened is None:
        raise CheckpointError(
            f"{source} is quantized already (config.json has {SECTION!r}): name the float model, or open this one without a format"
        )
    entries = opened[1].entries.values()
    forms = [entry.quantized.stored_as for entry in entries if entry.quantized is not None and not entry.quantized.from_floats]
    said = is_file(source / CONFIG) and load_json(source / CONFIG).get(SETTINGS) is not None
    if forms or (said and not any(entry.stored_as or entry.quantized for entry in entries)):
        where = f"config.json has {SETTINGS!r}" if said else f"as {forms[0]}"
        raise CheckpointError(f"{source} is quantized already ({where}): name the float model, or open this one without a format")
    return opened
