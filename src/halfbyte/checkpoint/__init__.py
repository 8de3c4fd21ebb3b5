"""Models on disk. docs/engineering/checkpoint.md specifies halfbyte's own files.

stored_model.py       any model on disk: checkpoint_model.py: halfbyte's own; other_model.py: all others, by a plan
loading.py            `load`; sharded_loading.py: for one of several processes
saving.py             `save`; folder.py: so that a reader finds a whole checkpoint at every moment
converting.py         `convert`, float models to checkpoints, tensor by tensor; materialize.py: of modules in memory for the moment
exporting.py          `export`, from any kind of files to another; export_items.py, targets.py: one weight, one kind
Files
  files.py            which files a model has; sources.py: of which kind they are; entries.py: their tensors
  wrappers.py         the names that torch.compile and DataParallel give them
  manifest.py, quantization_config.py    the sections of config.json
  foreign.py          other projects' folders: foreign_affine.py, foreign_floats.py, foreign_tensors.py
  gguf_model.py       GGUF files: gguf_names.py, gguf_orders.py, gguf_config.py, gguf_tokenizer.py,
                      chat_templates.py
  gguf_export.py      written: gguf_vocabulary.py
Models
  architecture.py     what transformers knows of a model; plan.py: which tensor of the files is which of the model;
                      left_out.py: and which does not matter
  generation_settings.py   values of generation_config.json
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfbyte.checkpoint.converting import convert as convert
    from halfbyte.checkpoint.exporting import export as export
    from halfbyte.checkpoint.loading import describe as describe
    from halfbyte.checkpoint.loading import load as load
    from halfbyte.checkpoint.loading import load_tensors as load_tensors
    from halfbyte.checkpoint.saving import save as save

# Imported when they are first used: a language model needs none of them.
_HOME_OF = {
    "convert": "halfbyte.checkpoint.converting",
    "export": "halfbyte.checkpoint.exporting",
    "describe": "halfbyte.checkpoint.loading",
    "load": "halfbyte.checkpoint.loading",
    "load_tensors": "halfbyte.checkpoint.loading",
    "save": "halfbyte.checkpoint.saving",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'halfbyte.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
