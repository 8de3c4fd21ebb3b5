"""A quantized tensor in canonical order: the form that is saved, loaded, and packed for a machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import FormatError, unreachable
from halfbyte.formats.spec import Format


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """uint8 [..., K] of values below 16 -> uint8 [..., ceil(K/2)], even elements in the low nibble."""
    if nibbles.shape[-1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def unpack_nibbles(packed: Tensor, k: int) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 [..., ceil(K/2)] -> uint8 [..., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :k]


def nibbles(fmt: Format, values: Tensor) -> Tensor:
    """Codes of 4 bits, numbers of any dtype, as they are stored: uint8, one each. Raises FormatError for one that is not in the table."""
    if not fmt.codebook:
        return (values - fmt.q_min).to(torch.uint8)
    indices = torch.full((256,), 16, dtype=torch.uint8, device=values.device)
    for i in reversed(range(16)):  # of two the first
        indices[fmt.codebook[i] + 128] = i
    found = indices[values.int() + 128]
    if found.numel() and int(found.max()) > 15:
        got = float(values[found > 15][0])
        raise FormatError(f"{fmt} codes are {', '.join(map(str, sorted({*fmt.codebook})))}, got {got:g}")
    return found


def stored_tensors(fmt: Format, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> (dtype, shape) of the tensors that hold codes of logical `shape`: data, scale and, where the format has one, zero."""
    width = (shape[-1] + 1) // 2 if fmt.bits == 4 else shape[-1]
    scale_shape = fmt.scale_shape(shape)
    stored = {
        "data": (torch.int8 if fmt.bits == 8 and fmt.signed else torch.uint8, (*shape[:-1], width)),
        "scale": (fmt.scale, scale_shape),
    }
    if fmt.zero_dtype is not None:
        stored["zero"] = (fmt.zero_dtype, scale_shape)
    return stored


@dataclass(frozen=True, eq=False, slots=True)
class Codes:
    """A quantized tensor of logical `shape` [..., N, K].

    Attributes:
        format: The number format.
        shape: The logical shape [..., N, K].
        data: 8 bits: int8 (signed) or uint8 [..., N, K]; 4 bits: uint8 [..., N, ceil(K/2)], element 2i in the low nibble of byte i and 2i+1
            in the high one, each as q + 8 (signed), q (unsigned) or the index of q in the format's table; the last nibble of an odd K is 0.
        scale: [..., N, ceil(K/block)] (a channel has one block, a tensor one scale in all) in the format's scale dtype.
        zero: None, or zero points (uint8) or offsets (the scale's dtype), in the scale's shape.

    Raises:
        FormatError: The tensors have other dtypes or shapes than the format gives them.

    Example:
        >>> codes = hb.quantize(torch.ones(2, 32), "q8_0")
        >>> codes.dequantize().shape
        torch.Size([2, 32])
    """

    format: Format
    shape: tuple[int, ...]
    data: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def __post_init__(self) -> None:
        fmt, shape = self.format, self.shape
        if len(shape) < 1 or any(s < 0 for s in shape):
            raise FormatError(f"codes have a shape of at least one dimension, got {list(shape)}")
        if self.zero is None and fmt.zero != "none":
            raise FormatError(f"{fmt} codes need a {fmt.zero} for each scale, got none")
        if self.zero is not None and fmt.zero == "none":
            raise FormatError(f"{fmt} codes have no zero, got a tensor of shape {list(self.zero.shape)}")
        tensors = self.tensors()
        for name, (dtype, wanted) in stored_tensors(fmt, shape).items():
            tensor = tensors[name]
            if tuple(tensor.shape) != wanted or tensor.dtype != dtype:
                raise FormatError(
                    f"the {name} of {fmt} codes of shape {list(shape)} is {dtype} {list(wanted)}, got {tensor.dtype} {list(tensor.shape)}"
                )

    def __repr__(self) -> str:
        return f"Codes({self.format}, {list(self.shape)}, on {self.data.device})"

    def check_values(self) -> None:
        """Raise FormatError for values that no quantizer writes; for codes from untrusted files."""
        for name, tensor in {"scale": self.scale, "offset": self.zero}.items():
            if tensor is not None and tensor.is_floating_point() and tensor.numel() and not tensor.abs().max() < torch.inf:
                raise FormatError(f"{self.format} codes of shape {list(self.shape)} have a {name} that is not finite")
        if self.format.packed_bits and self.data.numel():
            least, most = (int(bound) for bound in torch.aminmax(self.data))
            if least < self.format.q_min or most > self.format.q_max:
                raise FormatError(f"{self.format} codes lie in [{self.format.q_min}, {self.format.q_max}], got [{least}, {most}]")
        if self.format.bits == 4 and self.data.numel():
            if self.format.zero == "point" and self.zero is not None and int(self.zero.max()) > self.format.q_max:
                raise FormatError(f"the zero points of {self.format} codes lie in [0, {self.format.q_max}], got {int(self.zero.max())}")
            if self.shape[-1] % 2 and bool((self.data[..., -1] > 15).any()):
                raise FormatError(f"the unused last nibble of {self.format} codes of shape {list(self.shape)} is 0, got another value")

    @classmethod
    def from_values(cls, fmt: Format, values: Tensor, scale: Tensor, zero: Tensor | None = None) -> Codes:
        """From integer codes [..., N, K], one per element, of any integer dtype, within the format's range."""
        if values.is_floating_point():
            raise FormatError(f"{fmt} codes are integers, got {values.dtype}: round them first")
        if values.numel() and (int(values.min()) < fmt.q_min or int(values.max()) > fmt.q_max):
            raise FormatError(f"{fmt} codes lie in [{fmt.q_min}, {fmt.q_max}], got [{int(values.min())}, {int(values.max())}]")
        if fmt.bits == 8:
            data = values.to(torch.int8 if fmt.signed else torch.uint8)
        else:
            data = pack_nibbles(nibbles(fmt, values))
        return cls(fmt, tuple(values.shape), data, scale, zero)

    @classmethod
    def of_floats(cls, weight: Tensor) -> Codes:
        """A tensor [..., N, K] of float32, float16 or bfloat16 in the format `Format.of_floats`: dequantized, it is the same again."""
        ones = torch.ones(weight.shape, dtype=torch.uint8, device=weight.device)
        return cls.from_values(Format.of_floats(weight.dtype), ones, weight.contiguous())

    def values(self) -> Tensor:
        """The integer codes q, int16 [..., N, K]."""
        if self.format.bits == 8:
            return self.data.to(torch.int16)
        stored = unpack_nibbles(self.data, self.shape[-1])
        if table := self.format.codebook:
            return torch.tensor(table, dtype=torch.int16, device=stored.device)[stored.int()]
        return stored.to(torch.int16) + self.format.q_min

    def integers(self) -> Codes:
        """The same weight with plain 4- or 8-bit integer codes, where the format has a table or codes of 5 or 6 bits."""
        if self.format.codebook:
            return Codes.from_values(self.format.integers, self.values(), self.scale)
        return Codes.from_tensors(self.format.integers, self.shape, self.tensors())

    def limited_to(self, fmt: Format) -> Codes:
        """The inverse of `integers`: the same weight in `fmt`, which must have all of these codes."""
        if fmt.codebook:
            return Codes.from_values(fmt, self.values(), self.scale)
        return Codes.from_tensors(fmt, self.shape, self.tensors())

    def spread(self, per_block: Tensor) -> Tensor:
        """Values per block (scales, zeros) broadcast to elements: [..., N, K]; unchanged (all sizes 1) where one is for the tensor."""
        if self.format.block == "tensor":
            return per_block
        k = self.shape[-1]
        return per_block.repeat_interleave(self.format.block_size(k), dim=-1)[..., :k]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that these codes represent, [..., N, K]: computed in float64, rounded once to `dtype`."""
        q, scale = self.values().double(), self.spread(self.scale.double())
        if self.zero is None:
            return (q * scale).to(dtype)
        zero = self.spread(self.zero.double())
        match self.format.zero:
            case "point":
                return ((q - zero) * scale).to(dtype)
            case "offset":
                return (q * scale + zero).to(dtype)
            case "none":
                raise FormatError(f"{self.format} codes have no zero, got a tensor of shape {list(self.zero.shape)}")
            case _:
                raise unreachable(self.format.zero, "the zero of a format")

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    @property
    def rows(self) -> int:
        """N of the matrix [N, K], all leading dimensions flattened."""
        return math.prod(self.shape[:-1])

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name: data, scale and, where the format has one, zero."""
        named = {"data": self.data, "scale": self.scale, "zero": self.zero}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, fmt: Format, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Codes:
        """The inverse of `tensors()`; raises FormatError where a shape or dtype does not fit."""
        if missing := {"data", "scale"} - set(tensors):
            raise FormatError(f"{fmt} codes of shape {list(shape)} lack their {' and '.join(sorted(missing))}")
        return cls(fmt, tuple(shape), tensors["data"], tensors["scale"], tensors.get("zero"))

    @classmethod
    def zeros(cls, fmt: Format, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Codes:
        """Codes whose tensors are all zero bytes, for shapes without elements."""
        stored = stored_tensors(fmt, shape)
        return cls.from_tensors(fmt, shape, {name: torch.zeros(size, dtype=dtype, device=device) for name, (dtype, size) in stored.items()})

    def select(self, index: int | slice | Tensor) -> Codes:
        """A part along the first dimension, as of a tensor: one expert, some experts or rows. A scale of the whole tensor stays."""
        tensors = {name: t if self._has_one(name) else t[index] for name, t in self.tensors().items()}
        return self._reshaped((*tensors["data"].shape[:-1], self.shape[-1]), tensors)

    def reshape(self, shape: tuple[int, ...]) -> Codes:
        """The same codes with other leading dimensions; K stays, or both have whole blocks and bytes, which are then in the same order."""
        return self._reshaped(shape, self.tensors())

    @classmethod
    def joined(cls, parts: Sequence[Codes], join: Callable[[list[Tensor]], Tensor]) -> Codes:
        """Codes of one format and K put together by torch.cat or torch.stack along other dimensions. A scale of the whole tensor is the
        first one's."""
        first = parts[0]
        tensors = {n: t if first._has_one(n) else join([part.tensors()[n] for part in parts]) for n, t in first.tensors().items()}
        return first._reshaped((*tensors["data"].shape[:-1], first.shape[-1]), tensors)

    def _has_one(self, name: str) -> bool:
        """Whether the tensor called `name` has one value for all codes."""
        return self.format.block == "tensor" and name != "data"

    def _reshaped(self, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Codes:
        stored = stored_tensors(self.format, shape)
        return Codes.from_tensors(self.format, shape, {name: tensor.reshape(stored[name][1]) for name, tensor in tensors.items()})

    def to(self, device: torch.device | str) -> Codes:
        return Codes.from_tensors(self.format, self.shape, {name: tensor.to(device) for name, tensor in self.tensors().items()})
