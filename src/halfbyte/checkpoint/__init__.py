"""Models on disk. docs/checkpoint.md specifies the files."""

from halfbyte.checkpoint.converting import convert as convert
from halfbyte.checkpoint.exporting import export as export
from halfbyte.checkpoint.loading import describe as describe
from halfbyte.checkpoint.loading import load as load
from halfbyte.checkpoint.loading import load_tensors as load_tensors
from halfbyte.checkpoint.saving import save as save
