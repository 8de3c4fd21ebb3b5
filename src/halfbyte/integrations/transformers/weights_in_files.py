"""What a model's weights become while transformers or diffusers reads its files: float weights are packed, stored codes wait in
placeholders until all are read, and quantized modules replace the float ones.

Called by `quantizer.py` here and in `integrations/diffusers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.native.quantization_config import Module
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.codes import Codes
from halfbyte.formats.dense import dense_tensors, from_dense
from halfbyte.formats.spec import Format
from halfbyte.nn.config import Config
from halfbyte.nn.described import ORDER, RESIDUAL
from halfbyte.nn.kinds import FLOAT_MODULES, codes_shape, kind_of, pack_weight, quantize_weight, quantized_module, relative_error
from halfbyte.nn.modules.conv import fold_of
from halfbyte.nn.modules.low_rank import expected
from halfbyte.nn.modules.permuted import PermutedLinear
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.modules.transposed import is_transposed
from halfbyte.nn.modules.weight_view import AnyPacked
from halfbyte.quantizers.check import non_finite

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part


class PackedWeight(NamedTuple):
    """A weight that was read: packed, the dtype of the float weight, and the error of its quantization if that is known."""

    packed: AnyPacked
    dtype: torch.dtype
    error: float | None


def check_shape(name: str, module: nn.Module, weight: Tensor) -> None:
    """Raises CheckpointError for a float weight that is not as large as the module's."""
    if weight.shape != (shape := cast(Tensor, module.weight).shape):
        what = f"{name}.weight is {list(weight.shape)} in the files, but config.json makes it {list(shape)}"
        raise CheckpointError(f"{what}: one of them is damaged, or of another model")


def quantized_weight(name: str, module: nn.Module, weight: Tensor, fmt: Format, method: str) -> PackedWeight:
    """Quantizes and packs the weight of a module for the device that it is on. Raises FormatError where `fmt` cannot hold it."""
    weight = weight.mT if is_transposed(module) else weight
    kind, fold = kind_of(module), fold_of(module)
    codes = quantize_weight(kind, weight, fmt, method, f"{name}.weight", fold)
    return PackedWeight(pack_weight(module, codes, weight.device), weight.dtype, relative_error(weight, codes, kind, fold))


class CodesPlaceholder(nn.Module):
    """The placeholder of a weight that is read as codes: its buffers have the names of the stored tensors."""

    def __init__(self, settings: Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.settings, self.dtype = settings, dtype
        self.shape = settings.shape  # which transformers asks of Whisper's positions
        self.stored = dense_tensors(settings.format, settings.shape)
        for part, (stored, shape) in self.stored.items():
            self.register_buffer(part, torch.empty(shape, dtype=stored, device="meta"))

    def codes(self) -> Codes:
        """Raises FormatError where the tensors read are not as expected."""
        # transformers may have cast scales to float32, where the architecture keeps the weight in that: casting back is exact.
        tensors = {part: t.to(self.stored[part][0]) if t.is_floating_point() else t for part, t in self.named_buffers()}
        codes = from_dense(self.settings.format, self.shape, tensors)
        codes.check_values()
        return codes


def expect_branches(model: nn.Module, modules: Mapping[str, Module]) -> None:
    """Puts a LowRankLinear without data in place of each float layer whose residual `modules` has."""
    ranks = {name.removesuffix(f".{RESIDUAL}"): (one.low_rank, one.scaled) for name, one in modules.items() if one.low_rank}
    for name, branch in expected(model, ranks).items():
        model.set_submodule(name, branch)


def expect_codes(model: nn.Module, name: str, settings: Module, remedy: str) -> Part:
    """Replaces the float weight of the module `name` by a placeholder for codes, and returns the module.

    Raises:
        CheckpointError: The module cannot be quantized, or its weight has another shape; `remedy` says what to do.
    """
    module = model.get_submodule(name)
    if not isinstance(module, FLOAT_MODULES) or not isinstance(module.weight, Tensor):
        what = f"{name} is a {type(module).__name__} of {type(model).__name__}"
        raise CheckpointError(f"{what}, which cannot be quantized, but is in the files: {remedy}")
    if (shape := codes_shape(module, module.weight.shape, settings.format)) != settings.shape:
        raise CheckpointError(f"{name}.weight is {list(settings.shape)} in the files, {list(shape)} in the model: {remedy}")
    dtype: torch.dtype = module.weight.dtype
    if settings.dtype is not None and dtype != torch.float32:  # of a model that is asked for in float32 nothing stays in less
        dtype = settings.dtype
    del module.weight
    module.add_module("weight", CodesPlaceholder(settings, dtype))
    if settings.ordered:
        module.register_buffer(ORDER, torch.empty(settings.shape[-1], dtype=torch.int32, device="meta"))
    return cast("Part", module)


def read_codes(name: str, module: Part) -> PackedWeight:
    """The weight whose codes are in the module's placeholder. Raises CheckpointError where they are not valid codes."""
    placeholder: CodesPlaceholder = module.weight
    try:
        codes = placeholder.codes()
    except FormatError as e:
        raise CheckpointError(f"{name}.weight: {e}") from e
    return PackedWeight(pack_weight(module, codes, codes.data.device), placeholder.dtype, None)


def missing(name: str, key: str) -> CheckpointError:
    """The error for a tensor that is in no file."""
    return CheckpointError(f"no file has {name}.{key}, which the quantized model needs: the checkpoint is damaged")


def put(model: nn.Module, name: str, weight: PackedWeight, settings: Config | Module) -> None:
    """Replaces the module `name` by the quantized one with this weight."""
    module = model.get_submodule(name)
    quantized = quantized_module(module, weight.packed, weight.dtype, settings.compute, settings.activation, weight.error)
    if isinstance(quantized, QuantLinear) and (order := getattr(module, ORDER, None)) is not None:
        quantized = PermutedLinear(quantized, order)
    model.set_submodule(name, quantized)


def check_finite(model: nn.Module) -> None:
    """Raises CheckpointError for a model with a NaN or infinity in what stays in floating point."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and (found := non_finite(parameter, name)) is not None:
            raise CheckpointError(f"{found}: the file is damaged, or the model's training failed: use another copy of the model")
