"""The tensors of any checkpoint that halfbyte reads, packed for a device, as `decoder.build` asks for them. transformers is not imported.

Called by `model.py`. Names are those of transformers' modules, which all readers of `checkpoint` give.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.checkpoint.entries import Entries, Entry, Quantized
from halfbyte.checkpoint.native.quantization_config import dtype_of
from halfbyte.checkpoint.stored_model import checked_finite, order_name
from halfbyte.decoder.cache import OnGpu
from halfbyte.decoder.config import find_family
from halfbyte.decoder.family import MoEFamily
from halfbyte.decoder.offload.placement import ON_GPU
from halfbyte.errors import CheckpointError, FormatError, UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.io.files import is_file, paths_in
from halfbyte.io.gguf import File, is_gguf, read_header
from halfbyte.io.tensors import TensorSpec
from halfbyte.language.packed_cache import PackedCache, open_cache
from halfbyte.layouts.base import Packed
from halfbyte.layouts.cpu_tiles import PANEL
from halfbyte.nn.described import LOW_RANK, Candidate
from halfbyte.ops.transformer.weights import Weight

if TYPE_CHECKING:
    from halfbyte.checkpoint.native.checkpoint_model import Checkpoint
    from halfbyte.nn.config import Config

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_STACKS = (".experts.gate_up_proj.weight", ".experts.down_proj.weight")
_EMBEDDINGS = "model.embed_tokens.weight", "model.embed_tokens_per_layer.weight"
# The last parts of the names of weights of Linears, Embeddings and experts: those of routers and norms end otherwise.
_LINEARS = tuple(
    f"{name}.weight"
    for name in (
        *("proj", "linear", "lm_head", "embed_tokens", "dense", "fc1", "fc2", "c_fc"),
        *("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection", "embed_tokens_per_layer"),
    )
)


class Form(NamedTuple):
    """How a weight is quantized: what must be the same for weights that are joined."""

    format: Format
    compute: str
    activation: str


def _native_entries(model: Checkpoint) -> Entries:
    """Return the entries of a halfbyte folder, of tied tensors too."""
    if model.static is not None:
        raise UnsupportedError("it is a network on int8 codes")
    entries: dict[str, Entry] = {}
    for name, stored in model.names():
        if stored in entries:  # tied to it
            entries[name] = entries[stored]
            continue
        weight = model.weights.get(stored)
        if weight is None:
            spec = model.plain[stored]
            entries[name] = Entry(spec, spec.nbytes, partial(_plain_tensor, model, stored))
            continue
        *stack, n, k = weight.shape
        order = partial(model.tensor, order_name(stored)) if order_name(stored) in model.plain else None
        spec = TensorSpec(torch.float32, (*stack, k, n) if weight.transposed else weight.shape)
        how = Quantized(weight.format, str(weight.format), order, weight.compute, weight.activation, weight.transposed)
        entries[name] = Entry(spec, weight.stored_bytes, partial(_stored_codes, model, stored), how)
    return Entries(entries)


def _plain_tensor(model: Checkpoint, name: str, dtype: torch.dtype | None) -> Tensor:
    return model.tensor(name).to(dtype)


def _stored_codes(model: Checkpoint, name: str, dtype: torch.dtype | None) -> Codes:
    return model.codes(name)


class Source:
    """The tensors of a checkpoint, by their names in transformers' modules, as codes or in floating point.

    With a Config, weights in floating point are quantized as they are read. Experts that files have one by one are stacked.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, object],
        entries: Entries,
        quantize: Config | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Find the weights, and choose the format of each where they are to be quantized.

        Args:
            path: The checkpoint, for errors.
            config: Its config.json.
            entries: Its tensors, by their names in the files.
            quantize: How to quantize a model in floating point; None: codes are read as they are.
            device: Quantizes; None: the CPU.
        """
        self._path, self._entries, self._device = path, entries, device or torch.device("cpu")
        self._quantizing = threading.Lock()  # a GPU quantizes one weight at a time
        family = find_family(config)
        moe = None if family is None else family.moe
        # Stacks of experts are parameters in transformers: files name them with and without ".weight", or have the experts one by one.
        self._names = {self._module_name(name, moe): name for name in entries.entries}
        self._stacks = _stacks(self._names)
        inputs_first = moe is not None and moe.inputs_first
        self._inputs_first = {name for name in self._names if inputs_first and name.endswith(_STACKS)}
        self._quantize, self._formats = quantize, {}
        self._has_codes = any(entry.quantized is not None for entry in entries.entries.values())
        if quantize is not None:
            from halfbyte.nn.config import choose

            candidates = [
                Candidate(name.removesuffix(".weight"), "Embedding" if name in _EMBEDDINGS else "Linear", name)
                for name, stored in self._names.items()
                if name.endswith(_LINEARS) and len(entries.spec(stored).shape) in (2, 3)
            ]
            candidates += [Candidate(name.removesuffix(".weight"), "Experts", name) for name in self._stacks]
            self._formats = {name: each for name, each in choose(candidates, quantize).items() if isinstance(each, Format)}
            self._has_codes = bool(self._formats)

    @staticmethod
    def _module_name(name: str, moe: MoEFamily | None) -> str:
        for in_files, in_modules in () if moe is None else moe.names_in_files:
            name = name.replace(in_files, in_modules)
        return f"{name}.weight" if f"{name}.weight".endswith(_STACKS) else name

    def names(self) -> set[str]:
        """Return all names, of tied tensors too."""
        return {*self._names, *self._stacks}

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are one, or have the same values."""
        return self._entries.same(self._names[name], self._names[other])

    def form(self, name: str) -> Form | None:
        """Return how a weight is quantized; None where it is not, or where parts of a stack differ.

        Raises:
            UnsupportedError: Its columns are in another order than its inputs.
        """
        if name in self._stacks and self._quantize is None:
            forms = {self.form(part) for expert in self._stacks[name] for part in expert}
            return forms.pop() if len(forms) == 1 else None
        if self._quantize is not None:
            chosen = self._formats.get(name.removesuffix(".weight"))
            return None if chosen is None else Form(chosen, self._quantize.compute, self._quantize.activation)
        quantized = self._entries.entries[self._names[name]].quantized
        if quantized is None:
            return None
        if quantized.order is not None:
            raise UnsupportedError(
                f"the columns of {name} are in another order than its inputs (GPTQ's desc_act), which kernels of whole layers do not read"
            )
        return Form(quantized.format, quantized.compute, quantized.activation)

    def dtype(self, names: Sequence[str]) -> torch.dtype | None:
        """Return the dtype in which these weights, outputs first, are held without rounding; None where the model has no quantized weights
        at all, or where a weight of experts has its inputs first."""
        if not self._has_codes or not self._inputs_first.isdisjoint(names):
            return None
        parts = chain.from_iterable(chain.from_iterable(self._stacks.get(name, [[name]])) for name in names)
        entries = [self._entries.entries[self._names[part]] for part in parts]
        dtypes = {torch.float32 if entry.quantized is not None else entry.spec.dtype for entry in entries}
        return dtypes.pop() if len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16} else torch.float32

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight's codes, or of a tensor in floating point."""
        if name in self._stacks:
            first = self._stacks[name][0]
            return len(self._stacks[name]), sum(self.shape(part)[0] for part in first), self.shape(first[0])[-1]
        stored = self._names[name]
        shape = self._entries.spec(stored).shape
        if len(shape) < 2:
            return shape
        quantized, (*rest, n, k) = self._entries.entries[stored].quantized, shape
        swapped = name in self._inputs_first if quantized is None or self._quantize is not None else quantized.transposed
        return (*rest, k, n) if swapped else (*rest, n, k)

    def codes(self, name: str) -> Codes:
        """Read a quantized weight."""
        if self._quantize is None and name in self._stacks:
            return _joined([_joined([self.codes(part) for part in expert], _ROWS) for expert in self._stacks[name]], _EXPERTS)
        if self._quantize is None:
            return self._entries.codes(self._names[name])
        fmt = self._formats[name.removesuffix(".weight")]
        if name in self._stacks and fmt.block != "tensor":  # one by one, as all in floating point take much memory
            experts = (torch.cat([self.floats(part) for part in expert]) for expert in self._stacks[name])
            return _joined([self._quantized(name, expert, fmt) for expert in experts], _EXPERTS)
        weight = self.floats(name)
        return self._quantized(name, weight.mT.contiguous() if name in self._inputs_first else weight, fmt)

    def _quantized(self, name: str, weight: Tensor, fmt: Format) -> Codes:
        assert self._quantize is not None
        with self._quantizing if self._device.type != "cpu" else nullcontext():
            return ops.quantize(weight.to(self._device), fmt, self._quantize.method, name=name)

    def floats(self, name: str) -> Tensor:
        """Read a tensor as float32, dequantized if need be."""
        if name in self._stacks:
            return torch.stack([torch.cat([self.floats(part) for part in expert]) for expert in self._stacks[name]])
        stored = self._entries.spec(self._names[name])
        if not stored.dtype.is_floating_point:
            raise CheckpointError(f"{name} of {self._path} is {stored.dtype}, codes of a format that is not named: take the float model")
        return checked_finite(self._entries.read(self._names[name], torch.float32), name, self._path, parameter=True)


def _stacks(names: Iterable[str]) -> dict[str, list[list[str]]]:
    """Find stacks of experts that files have one by one.

    Returns:
        The name of each stack -> for each expert the names of its matrices, gate before up.
    """
    experts: dict[str, int] = {}
    for name in names:
        home, _, number = name.removesuffix(".down_proj.weight").rpartition(".")
        if name.endswith(".down_proj.weight") and home.endswith(".experts") and number.isdecimal():
            experts[home] = max(experts.get(home, 0), int(number) + 1)
    stacks = {}
    for home, count in experts.items():
        for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            stacks[f"{home}.{stack}.weight"] = [[f"{home}.{i}.{part}.weight" for part in parts] for i in range(count)]
    return stacks


_ROWS = cast(Callable[[list[Tensor]], Tensor], partial(torch.cat, dim=-2))
_EXPERTS = cast(Callable[[list[Tensor]], Tensor], torch.stack)


def _joined(parts: Sequence[Codes], join: Callable[[list[Tensor]], Tensor]) -> Codes:
    return parts[0] if len(parts) == 1 and join is _ROWS else Codes.joined(parts, join)


class PackedTensors:
    """`decoder.build.Tensors` of a source, packed for a device.

    Attributes:
        dtype: Of activations.
        placement: What is packed for a CPU, where others are packed for a GPU.
        in_floating_point: Names of the linear layers that are multiplied in floating point, as their weights are not quantized or are in
            formats that differ.
    """

    def __init__(self, source: Source, *, sparse: bool | None = None, where: OnGpu | None = None, cache: PackedCache | None = None) -> None:
        """Prepare to read.

        Args:
            source: The checkpoint's tensors.
            sparse: As for `ops.pack`.
            where: A GPU and its type of activations; None: the CPU, float32.
            cache: Weights that are packed for the CPU already; None: all are packed.
        """
        self._cache, self.placement, self.in_floating_point = cache, ON_GPU, set[str]()
        self._source, self._names, self._sparse = source, source.names(), sparse
        self._device, self.dtype = (torch.device("cpu"), torch.float32) if where is None else where[:2]
        # A GPU packs one weight at a time, so that the memory for what lies in between is that of one; threads read others meanwhile.
        self._packing: AbstractContextManager[object] = nullcontext() if where is None else threading.Lock()

    def sized(self) -> PackedTensors:
        """Return the same tensors without the bytes of weights: a specification of these tells what a model takes."""
        return _SizedTensors(self._source, sparse=self._sparse, where=OnGpu(self._device, self.dtype))

    def _device_of(self, name: str) -> torch.device:
        """Return the device for which a tensor is packed."""
        layer = _LAYER.search(name)
        is_on_cpu = layer is not None and self.placement.on_cpu(int(layer[1]), experts=".experts." in name)
        return torch.device("cpu") if is_on_cpu else self._device

    def has(self, name: str) -> bool:
        return name in self._names

    def same(self, name: str, other: str) -> bool:
        return self._source.same(name, other)

    def weight(self, names: Sequence[str], bias: Sequence[str] = (), *, floats: bool = False) -> Weight | None:
        for name in names:
            self._check(name)
        form = self._form(names)
        is_float = form is None and floats
        if is_float:
            form = self._float_form(names)
        if form is None:
            return None
        shapes = [self._source.shape(name) for name in names]
        for name, shape in zip(names, shapes, strict=True):
            rank = 3 if ".experts." in name and len(names) == 1 else 2
            if len(shape) != rank or 0 in shape:
                raise CheckpointError(f"{name} is {list(shape)} in the files, a weight of {rank} axes, none of them empty, is expected")
        if len({shape[-1] for shape in shapes}) > 1:
            name, shape = min(zip(names, shapes, strict=True), key=lambda pair: [s[-1] for s in shapes].count(pair[1][-1]))
            other = next(s[-1] for s in shapes if s[-1] != shape[-1])
            raise CheckpointError(f"{name} is {list(shape)} in the files, but config.json makes it {[*shape[:-1], other]}")
        rows = sum(shape[-2] for shape in shapes)
        biases = [self.tensor(name) for name in bias]
        for name, each in zip(bias, biases, strict=True):
            if each.dim() != len(shapes[0]) - 1:
                raise CheckpointError(f"{name} is {list(each.shape)} in the files, a bias of {len(shapes[0]) - 1} axes is expected")
        joined = None if not biases else torch.cat(biases, -1)
        if joined is not None and joined.shape[-1] != rows:
            raise CheckpointError(f"{bias[0]} has {joined.shape[-1]} elements, its weight {rows} rows: not of one layer")
        shape = (*shapes[0][:-2], rows, shapes[0][-1])
        cache = self._cache if self._device_of(names[0]).type == "cpu" else None
        whole = None if cache is None else cache.weight(names, form.format, shape, self._sparse)
        if whole is None:
            whole = self._packed(names, form.format, is_float=is_float)
            if cache is not None:
                cache.add(names, whole)
        return Weight(whole, joined, form.compute, form.activation)  # type: ignore[arg-type]

    def _form(self, names: Sequence[str]) -> Form | None:
        """Return how weights are quantized; None where they are not, or not so that they can be joined."""
        forms = {self._source.form(name) for name in names}
        form = forms.pop()
        return None if forms or form is None or (len(names) > 1 and form.format.block == "tensor") else form

    def _float_form(self, names: Sequence[str]) -> Form | None:
        """Return the form in which weights are held in floating point, and note that they are; None where `Source.dtype` is."""
        dtype = self._source.dtype(names)
        if dtype is None:
            return None
        self.in_floating_point.update(name.removesuffix(".weight") for name in names)
        return Form(Format.of_floats(dtype), "float", "block")

    def _packed(self, names: Sequence[str], fmt: Format, *, is_float: bool) -> Packed:
        device = self._device_of(names[0])
        try:
            source = self._source
            parts = [Codes.of_floats(source.floats(name).to(fmt.scale)) if is_float else source.codes(name) for name in names]
            if device.type != "cpu" or not _fill_panels(parts):
                parts = [_joined(parts, _ROWS)]
        except FormatError as e:
            is_named = any(str(e).startswith(name) for name in names)
            raise UnsupportedError(str(e) if is_named else f"{names[0]} cannot be {fmt}: {e}") from e
        with self._packing if device == self._device else nullcontext():
            packed = [ops.pack(part, device, sparse=self._sparse) for part in parts]
        return packed[0] if len(packed) == 1 else ops.join(packed)

    def tensor(self, name: str) -> Tensor:
        self._check(name)
        return self._source.floats(name).to(self._device_of(name)).contiguous()

    def _check(self, name: str) -> None:
        if f"{name.removesuffix('weight')}{LOW_RANK}" in self._names:
            raise UnsupportedError(f"LanguageModel computes no products of low rank, which {name} has: use transformers, or load")
        if name not in self._names:
            raise UnsupportedError(f"the checkpoint has no {name}: it is incomplete, or names its tensors as another version")

    def table(self, name: str) -> Weight | Tensor:
        found = self.weight([name])
        return self._matrix(name) if found is None else found

    def _matrix(self, name: str) -> Tensor:
        """Read a weight in floating point, in the type of activations."""
        self._check(name)
        cache = self._cache if self._device.type == "cpu" else None
        matrix = None if cache is None else cache.table(name, self.dtype)
        if matrix is None:
            matrix = self._source.floats(name).to(self.dtype).to(self._device).contiguous()
            if cache is not None:
                cache.add([name], matrix)
        return matrix

    def store(self) -> None:
        """Write what was packed to the cache, in the background, after the model was opened."""
        if self._cache is not None:
            self._cache.store()

    def each(self, reads: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call functions that read, in parallel, and return their results."""
        from halfbyte.kernels.cpu.codegen import runtime

        def call(read: Callable[[], Any]) -> Any:
            return read()

        return runtime.each(call, reads)


def _fill_panels(parts: Sequence[Codes]) -> bool:
    """Return whether each weight fills whole panels: they are then packed for a CPU one by one, into memory side by side, and their codes
    are not copied to join them."""
    return all(len(part.shape) == 2 and part.shape[0] % PANEL == 0 for part in parts)


class _SizedTensors(PackedTensors):
    """Weights without their bytes."""

    def _packed(self, names: Sequence[str], fmt: Format, *, is_float: bool) -> Packed:
        shapes = [self._source.shape(name) for name in names]
        shape = (*shapes[0][:-2], sum(shape[-2] for shape in shapes), shapes[0][-1])
        return Packed(fmt, shape, "", torch.empty(0, dtype=torch.uint8, device="meta"))

    def _matrix(self, name: str) -> Tensor:
        self._check(name)
        return torch.empty(self._source.shape(name), dtype=self.dtype, device="meta")


def open_checkpoint(
    path: Path,
    quantize: Config | None = None,
    header: File | None = None,
    *,
    sparse: bool | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    offloads: bool = False,
) -> tuple[dict[str, object], PackedTensors]:
    """Open a checkpoint of any kind.

    Args:
        path: A halfbyte folder, a folder in floating point or quantized by another project, or a GGUF file.
        quantize: How to quantize a model in floating point as it is read.
        header: That of a GGUF file, where it has been read already.
        sparse: As for `ops.pack`.
        device: For which weights are packed; None: the CPU.
        dtype: Of activations on a GPU; None: what the checkpoint names.
        offloads: Whether the device is a GPU, and a part of the weights may be packed for the CPU, as `PackedTensors.placement` says.

    Returns:
        Its config.json and its tensors. Scales of a GGUF file that would be float32 are rounded to float16.
    """
    if header is None and is_file(path) and is_gguf(path):
        header = read_header(path)
    config, source = _opened(path, quantize, header, device)
    on_cpu = (device is None or device.type == "cpu") and not offloads
    where = None if on_cpu or device is None else OnGpu(device, dtype or dtype_on_gpu(config))
    cache = _cache_of(path, quantize, header, sparse) if on_cpu or offloads else None
    return config, PackedTensors(source, sparse=sparse, where=where, cache=cache)


def _cache_of(path: Path, quantize: Config | None, header: File | None, sparse: bool | None) -> PackedCache | None:
    """Open the cache of the checkpoint's packed weights; None where there is none."""
    if quantize is not None and quantize.calibration is not None:  # which a Config's `repr` does not tell
        return None
    if header is not None:
        files = sorted({path, *(entry.place.path for entry in header.entries.values())})
    else:
        files = [file for file in paths_in(path) if file.suffix in (".json", ".safetensors") and is_file(file)]
    return open_cache(files, (quantize, sparse))


def dtype_on_gpu(config: Mapping[str, object]) -> torch.dtype:
    """Find the type of activations on a GPU: the one that config.json names if it has 16 bits, and otherwise bfloat16.

    A GGUF file names none. Most models are trained in bfloat16, and the hidden states of some leave the range of float16.
    """
    config_dtype = dtype_of(config)
    return config_dtype if config_dtype in (torch.float16, torch.bfloat16) else torch.bfloat16


def _opened(path: Path, quantize: Config | None, header: File | None, device: torch.device | None) -> tuple[dict[str, object], Source]:
    if quantize is not None:
        from halfbyte.checkpoint.sources import open_floats

        config, entries = open_floats(path, torch.float32)
        return config, Source(path, config, entries, quantize, device)
    if header is not None:
        from halfbyte.checkpoint.gguf.model import read_file

        config, entries = read_file(header, torch.float32, half_scales=True)
        return config, Source(path, config, entries)
    from halfbyte.checkpoint.sources import open_source

    opened = open_source(path)
    if opened is not None:
        return opened[0], Source(path, *opened)
    from halfbyte.checkpoint.native.checkpoint_model import Checkpoint

    model = Checkpoint(path)
    return model.config, Source(path, model.config, _native_entries(model))
