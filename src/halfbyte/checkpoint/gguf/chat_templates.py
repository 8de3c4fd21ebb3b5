"""The chat templates of a tokenizer, which may have several by name: those of a Hugging Face folder, and those of a GGUF file.

Source: transformers, PreTrainedTokenizerBase.from_pretrained; gguf-py, GGUFWriter.add_chat_template and SpecialVocab
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as short

from halfbyte.checkpoint.files import COMPANION_BYTES
from halfbyte.errors import CheckpointError, unreadable
from halfbyte.io.files import is_file, is_folder
from halfbyte.io.gguf import Value
from halfbyte.io.safetensors import load_json, read_bytes

DEFAULT = "default"
_KEY = "tokenizer.chat_template"  # of the default one; the name of each other one follows a dot
_NAMES = "tokenizer.chat_templates"
_OTHER = re.compile(r"[^A-Za-z0-9]")  # characters that gguf-py replaces by "_" in a name


def of_folder(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """The templates of a folder by name, as transformers reads them. `settings`: its tokenizer_config.json."""
    found: dict[str, str] = {}
    if is_file(folder / "chat_template.jinja"):
        found[DEFAULT] = _text(folder / "chat_template.jinja")
    if is_folder(folder / "additional_chat_templates"):
        try:
            paths = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        except OSError as e:
            raise unreadable(folder, e) from e
        found |= {path.stem: _text(path) for path in paths}
    if not found:
        found = _stated(folder / "tokenizer_config.json", settings.get("chat_template"))
    if not found and is_file(file := folder / "chat_template.json"):  # of a processor
        found = _stated(file, load_json(file, COMPANION_BYTES).get("chat_template"))
    return found


def to_metadata(templates: Mapping[str, str]) -> tuple[dict[str, Value], list[str]]:
    """The metadata of a GGUF file for templates by name, and notes for the report."""
    out: dict[str, Value] = {}
    notes: list[str] = []
    names: dict[str, str] = {}  # in the file -> in the folder
    for name, template in sorted(templates.items(), key=lambda item: _OTHER.sub("_", item[0]) != item[0]):  # as they are called first
        if name == DEFAULT:
            out[_KEY] = template
            continue
        plain = _OTHER.sub("_", name)
        if not plain or plain in (names.keys() | {DEFAULT}):
            notes.append(f"the chat template {short(name)} is not written: its name is {plain!r} in GGUF, which another one has")
            continue
        if plain != name:
            notes.append(f"the chat template {short(name)} is called {plain!r} in the file: names in GGUF have letters, digits and _")
        names[plain] = name
        out[f"{_KEY}.{plain}"] = template
    if names:
        out[_NAMES] = list(names)
    return out, notes


def of_metadata(metadata: Mapping[str, Value]) -> dict[str, str]:
    """The templates of a GGUF file by name. Raises CheckpointError for a name with other characters than gguf-py writes, as names become
    those of files."""
    found: dict[str, str] = {}
    for key, value in metadata.items():
        name = DEFAULT if key == _KEY else key.removeprefix(f"{_KEY}.") if key.startswith(f"{_KEY}.") else None
        if name is None or not isinstance(value, str):
            continue
        if not name or _OTHER.sub("_", name) != name:
            raise CheckpointError(f"the GGUF file has a chat template {short(name)}, names have letters, digits and _: the file is damaged")
        found.setdefault(name, value)
    return found


def _stated(file: Path, value: object) -> dict[str, str]:
    """Templates as a JSON file states them: one, or several by name."""
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, Mapping) and all(isinstance(text, str) for item in value.items() for text in item):
        return dict(value)
    raise CheckpointError(f"the chat_template of {file} is a text, or several by name, got {short(value)}: repair or remove it")


def _text(path: Path) -> str:
    try:
        return read_bytes(path, COMPANION_BYTES).decode()
    except UnicodeDecodeError as e:
        raise CheckpointError(f"{path} is not UTF-8 ({e.reason} at byte {e.start}): repair or remove it") from e
