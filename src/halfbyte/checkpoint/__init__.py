"""Models on disk. docs/checkpoint.md specifies halfbyte's own files.

stored_model.py     any model on disk; planned_model.py: all but halfbyte's own, by a plan
loading.py          `load`; sharded_loading.py: for one of several processes
quantize_checkpoint.py  `convert`, float models to checkpoints, tensor by tensor; materialize.py: of modules in memory for the moment
export_checkpoint.py  `export`, from any kind of files to another; export_items.py: one weight
files.py            which files a model has; sources.py: of which kind they are; entries.py: their tensors
wrappers.py         the names that torch.compile and DataParallel give tensors
native/             halfbyte's own checkpoints
mapping/            which tensor of the files is which of the model
foreign/            other projects' folders
gguf/               GGUF files
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfbyte.checkpoint.export_checkpoint import export as export
    from halfbyte.checkpoint.loading import describe as describe
    from halfbyte.checkpoint.loading import load as load
    from halfbyte.checkpoint.loading import load_tensors as load_tensors
    from halfbyte.checkpoint.native.saving import save as save
    from halfbyte.checkpoint.quantize_checkpoint import convert as convert

# Imported when they are first used, so that one module of this package can be imported without the others.
_HOME_OF = {
    "convert": "halfbyte.checkpoint.quantize_checkpoint",
    "export": "halfbyte.checkpoint.export_checkpoint",
    "describe": "halfbyte.checkpoint.loading",
    "load": "halfbyte.checkpoint.loading",
    "load_tensors": "halfbyte.checkpoint.loading",
    "save": "halfbyte.checkpoint.native.saving",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'halfbyte.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
