"""Says in words why diffusers cannot read a single file into a quantized model. Imported with `from_single_file` (see on_import.py)."""

from __future__ import annotations

from functools import wraps
from pathlib import Path

from diffusers.loaders.single_file_model import FromOriginalModelMixin
from diffusers.loaders.single_file_utils import SingleFileComponentError

from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.integrations.transformers.quantizer import HalfbyteConfig
from halfbyte.io.gguf import read_header

_from_single_file = FromOriginalModelMixin.from_single_file.__func__


@wraps(_from_single_file)
def _in_words(cls: type, *args: object, **kwargs: object) -> object:
    try:
        return _from_single_file(cls, *args, **kwargs)
    except HalfbyteError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, SingleFileComponentError, TypeError, ValueError) as e:
        if not isinstance(kwargs.get("quantization_config"), HalfbyteConfig):
            raise
        file = args[0] if args else kwargs.get("pretrained_model_link_or_path_or_dict")
        why = " ".join(str(e).split("If you want to instead")[0].split())
        raise CheckpointError(
            f"diffusers cannot read {_described(file)} as a {cls.__name__} ({type(e).__name__}: {why.rstrip(' .')}): take the class and "
            "the config of the model that the file holds"
        ) from e


def _described(file: object) -> str:
    """The file, and if it is a GGUF file which architecture it names."""
    if not isinstance(file, str | Path) or Path(file).suffix != ".gguf" or not Path(file).is_file():
        return str(file) if isinstance(file, str | Path) else "the tensors"
    return f"{file}, of the architecture {read_header(Path(file)).metadata.get('general.architecture')!r},"


FromOriginalModelMixin.from_single_file = classmethod(_in_words)  # type: ignore[arg-type]
