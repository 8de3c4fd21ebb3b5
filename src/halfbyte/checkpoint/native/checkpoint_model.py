"""A checkpoint that halfbyte saved, as a `StoredModel`, which `loading.py` loads.

Whole tensors are read with their checksums. A process that holds a shard of the model reads only its ranges of a tensor, which are not
compared with the checksum of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from halfbyte.checkpoint.native.folder import complete
from halfbyte.checkpoint.native.manifest import Manifest, read_manifest
from halfbyte.checkpoint.stored_model import StoredModel
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.codes import Codes
from halfbyte.formats.dense import from_dense
from halfbyte.formats.sharding import Ranges, stored_ranges
from halfbyte.io.safetensors import Reader
from halfbyte.io.tensors import checksum

if TYPE_CHECKING:
    from halfbyte.nn.report import Report


def _open(folder: Path) -> tuple[dict[str, object], Manifest, Reader]:
    """Return config.json without halfbyte's section, that section, and a reader of the files that it names.

    Another process may save to the folder meanwhile: where the files could not be opened and the section has changed since it was read, the
    new section's are opened.
    """
    while True:
        config, manifest = read_manifest(folder)
        complete(folder, manifest)
        try:
            return config, manifest, Reader([folder / name for name in manifest.files])
        except CheckpointError:
            if read_manifest(folder)[1].files == manifest.files:
                raise


class Checkpoint(StoredModel):
    """A checkpoint that halfbyte saved."""

    def __init__(self, folder: Path) -> None:
        """Read config.json and the headers of the files, and check that they agree.

        Raises:
            CheckpointError: They do not, or are damaged.
        """
        config, manifest, reader = _open(folder)
        stored = (weight.stored(name) for name, weight in manifest.weights.items())
        parts = {part: spec for tensors in stored for part, spec in tensors.items()}
        if mismatched := (reader.places.keys() - manifest.weights.keys()) ^ (parts.keys() | manifest.plain.keys()):
            raise CheckpointError(f"{folder}: {min(mismatched)} is in only one of the files and config.json: the checkpoint is damaged")
        for name, spec in parts.items():
            if (stored_spec := reader.spec(name)) != spec:
                got, wanted = (f"{each.dtype} {list(each.shape)}" for each in (stored_spec, spec))
                raise CheckpointError(f"{folder}: {name} is {got}, config.json makes it {wanted}: the checkpoint is damaged")
        plain = {name: reader.spec(name) for name in manifest.plain}
        super().__init__(folder, config, manifest.weights, plain, manifest.tied, manifest.static)
        self._reader, self._checksums = reader, manifest.plain

    def codes(self, name: str) -> Codes:
        weight = self.weights[name]
        return self._checked(name, weight.shape, {part: self._read(f"{name}.{part}", crc32) for part, crc32 in weight.crc32.items()})

    def _plain_tensor(self, name: str) -> Tensor:
        return self._read(name, self._checksums[name])

    def nbytes(self, name: str) -> int:
        return self.weights[name].stored_bytes if name in self.weights else self.plain[name].nbytes

    def part_of_codes(self, name: str, dim: int, ranges: Ranges) -> Codes:
        weight = self.weights[name]
        stored = stored_ranges(weight.format, weight.shape, dim, ranges)
        if stored is None:  # a boundary lies within a byte: read all of it, and cut its codes
            return super().part_of_codes(name, dim, ranges)
        shape = list(weight.shape)
        shape[dim] = sum(stop - start for start, stop in ranges)
        tensors = {}
        for part, crc32 in weight.crc32.items():
            stored_name, some = f"{name}.{part}", stored[part]
            tensors[part] = self._read(stored_name, crc32) if some is None else self._reader.read_part(stored_name, dim, some)
        return self._checked(name, tuple(shape), tensors)

    def part_of_tensor(self, name: str, dim: int, ranges: Ranges) -> Tensor:
        return self._reader.read_part(name, dim, ranges)

    def _read(self, name: str, crc32: int) -> Tensor:
        """Read a whole tensor and compare its checksum."""
        tensor = self._reader.read(name)
        if checksum(tensor) != crc32:
            path = self._reader.places[name].path
            raise CheckpointError(f"{path}: the bytes of {name} do not match their checksum: the file is damaged")
        return tensor

    def _checked(self, name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Codes:
        """Return the codes of weight `name`, or of a part of it with this shape, from its stored tensors; check that all are valid."""
        try:
            codes = from_dense(self.weights[name].format, shape, tensors)
            codes.check_values()
        except FormatError as e:
            raise CheckpointError(f"{self.path}: {name}: {e}") from e
        return codes

    def report(self) -> Report:
        from halfbyte.nn.report import Report, Row

        rows = []
        for name, owner in self.names():
            tied_to = None if owner == name else owner
            if weight := self.weights.get(owner):
                name, tied_to = name.removesuffix(".weight"), tied_to and tied_to.removesuffix(".weight")
                before, after = weight.float_bytes, weight.stored_bytes
                row = Row(name, weight.kind, weight.shape, weight.format, None, before, after, weight.error, tied_to)
            else:
                spec = self.plain[owner]
                row = Row(name, "tensor", spec.shape, None, "stored as it is", spec.nbytes, spec.nbytes, None, tied_to)
            rows.append(row if tied_to is None else replace(row, bytes_before=0, bytes_after=0))
        return Report(tuple(rows))
