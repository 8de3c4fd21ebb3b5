"""The quantizer for diffusers: the components of a pipeline are quantized while they load.

    transformer = FluxTransformer2DModel.from_pretrained(folder, quantization_config=halfbyte.HalfbyteConfig("q8_0"))
    transformer.save_pretrained("small")
    transformer = FluxTransformer2DModel.from_pretrained("small")

A float model is read tensor by tensor, and each weight is quantized and packed before the next is read. Blocks of a GGUF file become codes
without being rounded again. Quantized modules replace the float ones as soon as all weights are read: before diffusers distributes the
model over devices, and attaches hooks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from halfbyte.checkpoint.native.quantization_config import METHOD, Module, describe, with_branches
from halfbyte.errors import CheckpointError, FormatError, UnsupportedError
from halfbyte.formats import ggml
from halfbyte.formats.codes import Codes
from halfbyte.formats.dense import to_dense
from halfbyte.formats.spec import Format
from halfbyte.integrations.diffusers import api
from halfbyte.integrations.transformers.quantizer import HalfbyteConfig
from halfbyte.integrations.transformers.weights_in_files import (
    PackedWeight,
    check_finite,
    check_shape,
    expect_branches,
    expect_codes,
    missing,
    put,
    quantized_weight,
    read_codes,
)
from halfbyte.nn.candidates import candidates
from halfbyte.nn.config import Config, choose, formats_of
from halfbyte.nn.convert import after_quantizing, nothing_to_quantize, quantize_
from halfbyte.nn.dequantized import dequantize_
from halfbyte.nn.kinds import pack_weight
from halfbyte.nn.modules.quantized import QuantModule
from halfbyte.nn.report import CONFIG_ATTRIBUTE, add_kept

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

_REMEDY = "use the diffusers that saved them, and their config.json"
_WEIGHT = ".weight"
_UNET, _FIRST = "model.diffusion_model.", "input_blocks.0.0.weight"  # the prefix of a UNet's names, and one of them
_ROW = 256  # numbers of a row of reshaped tensors, as city96's tool writes those of UNets that K-quants would not fit
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # ggml's numbers


class HalfbyteDiffusersQuantizer(DiffusersQuantizer):
    """The hooks that diffusers calls while it loads and saves a model."""

    quantization_config: HalfbyteConfig
    use_keep_in_fp32_modules = True

    def __init__(self, quantization_config: HalfbyteConfig, **kwargs: object) -> None:
        super().__init__(quantization_config, **kwargs)
        self._codes: dict[str, Module] = {}  # by module, of a model that was saved quantized
        self._formats: dict[str, Format] = {}  # of float weights
        self._waiting: set[str] = set()  # names of the tensors of these that are not read yet
        self._packed: dict[str, PackedWeight] = {}  # by module
        self._kept: dict[str, str] = {}  # modules that stay in floating point -> the reason
        self._in_float32: set[str] = set()  # parts of names of modules that compute in float32, whatever the model's dtype

    @property
    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters: see peft/adapters.py

    @property
    def is_compileable(self) -> bool:
        return True

    @property
    def supports_parallel_loading(self) -> bool:
        return False

    def validate_environment(self, *args: object, device_map: object = None, **kwargs: object) -> None:
        """Raise UnsupportedError for layers that would be offloaded to the disk."""
        if isinstance(device_map, Mapping) and (places := [name for name, place in device_map.items() if place == "disk"]):
            raise UnsupportedError(f"packed weights cannot be offloaded to the disk, the device_map of {places[0]}: map it to a device")

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype of what is not quantized. Without one diffusers would convert the bytes of blocks, too."""
        return torch_dtype or torch.get_default_dtype()

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: object) -> list[str]:
        """Leaves out the guards of quantized weights, which no model has."""
        guards = {f"{name}{_WEIGHT}" for name in self.quantization_config.modules}
        return [key for key in loaded_keys if key not in guards]

    def maybe_update_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give the tensors of a UNet without the prefix by which diffusers finds them, as in city96's files, that prefix."""
        return {f"{_UNET}{name}": tensor for name, tensor in state_dict.items()} if _FIRST in state_dict else state_dict

    # Before the weights are read

    def _process_model_before_weight_loading(
        self, model: nn.Module, keep_in_fp32_modules: Sequence[str] = (), state_dict: dict[str, Tensor] | None = None, **kwargs: object
    ) -> None:
        config, self._in_float32 = self.quantization_config, set(keep_in_fp32_modules)
        for name, shape in _reshaped(model, state_dict or {}).items():
            assert state_dict is not None
            state_dict[name] = state_dict[name].reshape(shape)
        types = {name: api.ggml_type(tensor) for name, tensor in (state_dict or {}).items()}
        blocks = {name for name, number in types.items() if number in ggml.TYPES}
        if config.modules:
            self._expect_codes(model, state_dict)
        elif config.calibration is None and (config.has_format or not blocks):
            self._decide(model, config.float_config(), blocks)
        self._waiting |= {f"{name}{_WEIGHT}" for name in self._formats}

    def _expect_codes(self, model: nn.Module, state_dict: Mapping[str, object] | None) -> None:
        expect_branches(model, self.quantization_config.modules)
        names = {name for name, _ in model.named_modules()}
        for name, settings in self.quantization_config.modules.items():
            if name not in names:
                raise CheckpointError(f"{type(model).__name__} has no {name}, which is quantized in the files: {_REMEDY}")
            expect_codes(model, name, settings, _REMEDY)
            self._codes[name] = settings
            module = model.get_submodule(name)
            self._waiting |= {f"{name}.{key}" for key, tensor in module.named_buffers() if tensor.is_meta}

    def _decide(self, model: nn.Module, config: Config, blocks: set[str]) -> None:
        found = candidates(model, without_data=True)
        decisions = choose(found, config)
        formats = {name: fmt for name, fmt in formats_of(decisions).items() if not self._stays_float32(model, name)}
        if not formats and not blocks:
            raise nothing_to_quantize(model, {**decisions, **self._kept})
        for name in [name for name in formats if f"{name}{_WEIGHT}" in blocks]:
            if isinstance(model.get_submodule(name), nn.Linear):  # its codes are taken over
                del formats[name]
        self._formats = formats

    def _stays_float32(self, model: nn.Module, name: str) -> bool:
        """Return whether the model computes a module in float32, whatever its dtype; note that for the report."""
        if self._in_float32.isdisjoint(name.split(".")):
            return False
        self._kept[name] = f"{type(model).__name__} computes it in float32"
        return True

    # While they are read

    def check_if_quantized_param(
        self, model: nn.Module, param_value: Tensor, param_name: str, state_dict: object, **kwargs: object
    ) -> bool:
        return param_name in self._waiting or api.ggml_type(param_value) is not None

    def check_quantized_param_shape(self, param_name: str, current_param: Tensor, loaded_param: Tensor) -> bool:
        """Leaves it to `create_quantized_param`."""
        return True

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: Tensor,
        param_name: str,
        target_device: torch.device | str | int,
        state_dict: Mapping[str, Tensor],
        unexpected_keys: object = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name, _, key = param_name.rpartition(".")
        if (number := api.ggml_type(param_value)) is not None and name not in self._formats:
            self._read_blocks(model, param_name, state_dict[param_name], number, torch.device(target_device), dtype)
        elif name in self._formats:
            part = cast("Part", model.get_submodule(name))
            weight = param_value if number is None else _floats(param_name, state_dict[param_name], number, part.weight.shape)
            self._quantize(name, part, weight.to(target_device, dtype))
        else:  # with the scales of the file: in `param_value` they have the dtype of the model
            module = model.get_submodule(name)
            module.register_buffer(key, state_dict[param_name].to(target_device))
        self._waiting.discard(param_name)
        if not self._waiting and (self._codes or self._formats):
            self._put(model)

    def _quantize(self, name: str, module: Part, weight: Tensor) -> None:
        config = self.quantization_config.float_config()
        check_shape(name, module, weight)
        try:
            self._packed[name] = quantized_weight(name, module, weight, self._formats[name], config.method)
        except FormatError as e:
            if config.strict:
                raise
            self._kept[name] = str(e)
            module.weight = nn.Parameter(weight, requires_grad=False)
        else:
            module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def _read_blocks(
        self, model: nn.Module, name: str, tensor: Tensor, number: int, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        """Take over a tensor of a GGUF file: as codes where it is the weight of a linear layer, else in floating point."""
        home, _, key = name.rpartition(".")
        module = cast("Part", model.get_submodule(home))
        wanted = getattr(module, key).shape
        decoded = _decoded(name, api.ggml_bytes(tensor).contiguous(), number)
        value = _of_shape(decoded, wanted)
        if value.shape != wanted:
            what = f"{name} is {list(value.shape)} in the GGUF file, and {list(wanted)} in the model"
            raise CheckpointError(f"{what}: pass config=, the folder with the config.json of the model in the file")
        if isinstance(value, Codes):
            if isinstance(module, nn.Linear) and key == "weight" and not self._stays_float32(model, home):
                self._packed[home] = PackedWeight(pack_weight(module, value, device), dtype or torch.float32, None)
                module.weight = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
                return
            value = value.dequantize()
        if isinstance(decoded, Codes) and len(wanted) > 2:
            self._kept[home] = "its blocks in the file are not along its inputs: name a format to round it again"
        value = value.to(device, dtype if self._in_float32.isdisjoint(home.split(".")) else torch.float32)
        if key in module._parameters:
            module._parameters[key] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[key] = value

    # After

    def _put(self, model: nn.Module) -> None:
        """Replace the float modules by quantized ones."""
        config = self.quantization_config
        for name in self._codes:
            put(model, name, read_codes(name, cast("Part", model.get_submodule(name))), config.modules[name])
        for name, weight in self._packed.items():
            assert config.config is not None
            put(model, name, weight, config.config)
        self._codes.clear()
        self._packed.clear()

    def _process_model_after_weight_loading(self, model: Part, **kwargs: object) -> Part:
        config = self.quantization_config
        if self._waiting:
            name, _, key = min(self._waiting).partition(_WEIGHT)
            raise missing(name, f"weight{key}")
        self._put(model)
        if config.calibration is not None and not config.modules:
            quantize_(model, config.float_config(), config.calibration)
        elif config.config is not None:
            if self._kept and not _quantized(model):
                raise FormatError(next(iter(self._kept.values())))
            setattr(model, CONFIG_ATTRIBUTE, config.config)
            add_kept(model, self._kept)
        if unread := next((name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta), None):
            raise missing(*unread.rpartition(".")[::2])
        check_finite(model)
        self.adopt(model)
        return model

    def adopt(self, model: Part) -> None:
        """Prepare a quantized model for `save_pretrained`."""
        self._model = model
        model.hf_quantizer = self
        model.is_quantized = False  # diffusers would refuse `to(dtype)`, which works
        api.set_description(model, _Description(model))

    # Saving

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Tensor], safe_serialization: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors to write: codes of 5 and 6 bits without the bits that they leave unused in a byte."""
        for name, module in _quantized(self._model).items():
            if module.packed_anywhere.codes_format.packed_bits:
                state_dict |= {f"{name}{_WEIGHT}.{part}": tensor for part, tensor in to_dense(module.codes()).items()}
        return state_dict, {}

    def _dequantize(self, model: Part) -> Part:
        dequantize_(model)
        api.set_description(model, None)
        return model


class _Description:
    """The `quantization_config` of a model's config: it describes the modules that the model has when it is saved."""

    quant_method = METHOD

    def __init__(self, model: Part) -> None:
        self._model = model

    def to_dict(self) -> dict[str, object]:
        """Raise UnsupportedError for a model with adapters, which could not be loaded under the names that its layers have now."""
        quantized = _quantized(self._model)
        if adapted := next((name for name in quantized if name.endswith(".base_layer")), None):
            raise UnsupportedError(
                f"a quantized model is saved without adapters, and {adapted.removesuffix('.base_layer')} has one: save the adapter by "
                "save_lora_adapter, or merge it by fuse_lora, and call unload_lora"
            )
        shapes = {name: parameter.shape for name, parameter in self._model.named_parameters()}
        return describe(with_branches({name: Module.of(module, self._model.dtype) for name, module in quantized.items()}, shapes))


def _quantized(model: nn.Module) -> dict[str, QuantModule]:
    """The quantized modules by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantModule)}


def _decoded(name: str, data: Tensor, number: int) -> Codes | Tensor:
    """The codes of blocks, or the numbers, in rows of bytes of a GGUF file; `number` is ggml's of their type."""
    from halfbyte.kernels.cpu.quantize.extract import extract

    if number in _FLOATS:
        return data.view(_FLOATS[number])
    if (kind := ggml.TYPES.get(number)) is None:
        known = ", ".join(kind.name for kind in ggml.TYPES.values())
        raise CheckpointError(f"{name} is of ggml type {number}, halfbyte reads {known}: take another file of the model")
    codes = ggml.decode(kind, (*data.shape[:-1], data.shape[-1] // kind.nbytes * kind.weights), data, extract)
    codes.check_values()
    return codes


def _floats(name: str, tensor: Tensor, number: int, shape: torch.Size) -> Tensor:
    """The numbers of a tensor of a GGUF file that belongs to a module with a weight of this shape."""
    value = _decoded(name, api.ggml_bytes(tensor).contiguous(), number)
    whole = value.dequantize() if isinstance(value, Codes) else value
    return whole.reshape(shape) if _is_reshaped(value.shape, shape) else whole


def _reshaped(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The shapes in the model of floating-point tensors that the file has in rows of 256."""
    shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
    floats = {name: tensor for name, tensor in tensors.items() if name in shapes and api.ggml_type(tensor) is None}
    return {name: shapes[name] for name, tensor in floats.items() if _is_reshaped(tensor.shape, shapes[name])}


def _is_reshaped(stored: Sequence[int], shape: Sequence[int]) -> bool:
    return tuple(stored) != tuple(shape) and len(stored) == 2 and stored[-1] == _ROW and math.prod(stored) == math.prod(shape)


def _of_shape(value: Codes | Tensor, shape: torch.Size) -> Codes | Tensor:
    """A tensor in rows of 256 in its shape in the model: as codes where blocks do not go across rows there."""
    if not _is_reshaped(value.shape, shape):
        return value
    if isinstance(value, Codes):
        block = value.format.block
        if len(shape) == 2 and isinstance(block, int) and shape[-1] % block == 0:
            return value.reshape(tuple(shape))
        value = value.dequantize()
    return value.reshape(shape)


def _adopt(model: nn.Module) -> None:
    """Adopt a model of diffusers that was quantized by `quantize_` or `load`."""
    if api.is_model(model) and _quantized(model):
        HalfbyteDiffusersQuantizer(HalfbyteConfig.of({})).adopt(cast("Part", model))


api.register(METHOD, HalfbyteConfig, HalfbyteDiffusersQuantizer)
after_quantizing.append(_adopt)
