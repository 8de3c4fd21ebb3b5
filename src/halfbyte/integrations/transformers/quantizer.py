"""The quantizer for transformers: models are quantized while they load, and load again after `save_pretrained`.

    import halfbyte
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=halfbyte.HalfbyteConfig("q4_0"))
    model.save_pretrained("small")
    model = AutoModelForCausalLM.from_pretrained("small")

A float model is read tensor by tensor, and each weight is quantized and packed before the next is read. docs/engineering/checkpoint.md
describes the files that are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from halfbyte.checkpoint.mapping.architecture import keep_dtypes_
from halfbyte.checkpoint.native.quantization_config import METHOD, Module, describe, parse, with_branches
from halfbyte.dispatch.packed import packed_format
from halfbyte.errors import ArgumentError, CheckpointError, FormatError, HalfbyteError, UnsupportedError
from halfbyte.formats.codes import stored_tensors
from halfbyte.formats.dense import to_dense
from halfbyte.formats.spec import Format
from halfbyte.integrations.transformers import tensor_parallel
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
from halfbyte.nn.calibration.calibrate import Calibration
from halfbyte.nn.candidates import candidates
from halfbyte.nn.config import Config, choose, formats_of, take_calibration, with_known_settings
from halfbyte.nn.convert import after_quantizing, nothing_to_quantize, quantize_
from halfbyte.nn.dequantized import dequantize_
from halfbyte.nn.kinds import FLOAT_MODULES
from halfbyte.nn.modules.expanded import collapse_, expand_, expanded
from halfbyte.nn.modules.experts import MixtureOfExperts, QuantExperts, StackedExperts
from halfbyte.nn.modules.quantized import QuantLinear, QuantModule
from halfbyte.nn.modules.rescaled import as_trained
from halfbyte.nn.parallel.parallelize import PARTS_ONLY, is_parallel
from halfbyte.nn.report import CONFIG_ATTRIBUTE, add_kept, add_notes

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

NEW_WEIGHT = "{} was in no file, and stays float: it is initialized at random and has to be trained"
OLDEST_TRANSFORMERS = (5, 17)  # in older versions layers and configs of some families differ
if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST_TRANSFORMERS:
    oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
    raise ImportError(f"this is {transformers.__version__}, the oldest that is taken {oldest}", name="transformers")

_REMEDY = "use the transformers that saved them, and their config.json"


class _Method(StrEnum):
    """The value of `quant_method`: diffusers reads its `value`."""

    HALFBYTE = METHOD


@register_quantization_config(METHOD)
@with_known_settings
class HalfbyteConfig(QuantizationConfigMixin):
    """The `quantization_config` of `from_pretrained`, in transformers and diffusers: the arguments of `Config`, or a Config.

    Args:
        format: The format of all layers, or a Config. None: those of a GGUF file that diffusers' `from_single_file` reads.
        calibration: As for `quantize_`. With it the float model is loaded whole, and quantized then.
        settings: The other arguments of Config.

    Attributes:
        device: Where weights are quantized and packed as they are read: a GPU to which the caller then moves the rest of the model. None:
            where transformers reads them to.
        has_format: Whether a format was given. Without one only GGUF files can be read, which have formats of their own.
        config: How a float model is quantized; None for a model that was saved quantized.
        modules: The quantized modules of a model, by name, as they are written to config.json.

    Example:
        >>> hb.HalfbyteConfig("q4_0", compute="float").to_dict()["quant_method"]
        'halfbyte'
    """

    def __init__(
        self, format: str | Format | Config | None = None, *, calibration: Calibration | Tensor | None = None, **settings: Any
    ) -> None:
        if isinstance(format, Config) and settings:
            raise ArgumentError(f"a Config holds all settings, got {', '.join(settings)} in addition: use dataclasses.replace")
        self.quant_method = _Method.HALFBYTE  # type: ignore[assignment]
        self.has_format = format is not None
        config = format if isinstance(format, Config) else Config("q8_0" if format is None else format, **settings)
        self.config: Config | None
        self.config, self.calibration = take_calibration(config, calibration, in_memory=False)
        self.device: torch.device | str | None = None
        self.modules: dict[str, Module] = {}

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, object], return_unused_kwargs: bool = False, **kwargs: object) -> object:
        """The `quantization_config` of a saved model's config.json. Raises CheckpointError where it is invalid."""
        config = cls.of(parse(config_dict))
        return (config, kwargs) if return_unused_kwargs else config

    @classmethod
    def of(cls, modules: dict[str, Module]) -> HalfbyteConfig:
        """The config of a model with these quantized modules."""
        instance = cls.__new__(cls)
        instance.quant_method = _Method.HALFBYTE  # type: ignore[assignment]
        instance.config, instance.calibration, instance.device, instance.modules, instance.has_format = None, None, None, modules, True
        return instance

    def to_dict(self) -> dict[str, object]:
        return describe(self.modules)

    def float_config(self) -> Config:
        """How a float model is quantized. Raises ArgumentError where no format was given."""
        if self.config is None or not self.has_format:
            raise ArgumentError('HalfbyteConfig() without a format reads GGUF files, and this model is float: write HalfbyteConfig("q8_0")')
        return self.config

    def __repr__(self) -> str:
        return f"HalfbyteConfig({self.config or f'{len(self.modules)} modules'})"


@register_quantizer(METHOD)
class HalfbyteQuantizer(HfQuantizer):
    """The hooks that transformers calls while it loads and saves a model.

    Three kinds of loading, each with its steps before, while and after transformers reads the weights:

                                    before                   for each weight                      after
        quantized files             `_insert_placeholders`   read into the placeholders' buffers  `_insert_stored`
        float files                 `_choose_formats`        `_Quantize` calls `quantize`         `_insert_quantized`
        float files, calibration    nothing                  read as float                        `quantize_`

    Quantized modules are inserted after reading, as transformers would initialize their packed weights, which it does not know, at random.

    Attributes:
        kept_float: The reason why a weight stays float, as its format cannot hold it, by module.
    """

    quantization_config: HalfbyteConfig

    def __init__(self, quantization_config: HalfbyteConfig, **kwargs: object) -> None:
        super().__init__(quantization_config, **kwargs)
        self.kept_float: dict[str, str] = {}
        self._formats: dict[str, Format] = {}  # the chosen formats of a float model, by module
        # Names in `_formats` that are stacks of experts [E, N, K]: parameters in transformers, not modules with a `weight`.
        self._expert_stacks: set[str] = set()
        self._packed_weights: dict[str, PackedWeight] = {}  # quantized while reading, by module, until they are inserted
        self._tied_to: dict[str, str] = {}  # a module whose weight is tied -> the module that owns the weight
        self._failure: HalfbyteError | None = None  # the first error of `quantize`
        self._parallel_plan: dict[str, str] | None = None  # transformers' plan of tensor parallelism; None: not asked for

    # Properties that transformers queries

    @property
    def is_trainable(self) -> bool:
        return True  # adapters: see peft/adapters.py

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: object, device_map: object = None, **kwargs: object) -> None:
        """Raise UnsupportedError for a device map that offloads layers to the disk, or to the CPU next to a GPU.

        transformers calls this with the caller's device map, and once more with the map that it computes from "auto".
        """
        if not isinstance(device_map, Mapping):
            return
        if places := [name for name, place in device_map.items() if place == "disk"]:
            raise UnsupportedError(f"packed weights cannot be offloaded to the disk, the device_map of {places[0]}: map it to a device")
        on_cpu = [name for name, place in device_map.items() if str(place).startswith("cpu")]
        if 0 < len(on_cpu) < len(device_map):
            more = f" and {len(on_cpu) - 1} more" if len(on_cpu) > 1 else ""
            raise UnsupportedError(
                f"packed weights are not moved to a GPU for each call, got a device_map with {on_cpu[0]!r}{more} on the CPU: map all to "
                "GPUs, or open a language model by halfbyte.LanguageModel.open(path, device={'experts': 'cpu'}) or memory='12 GB', which "
                "computes these on the CPU"
            )

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: object) -> bool:
        return param_name in self._expert_stacks or (param_name.endswith(".weight") and param_name.removesuffix(".weight") in self._formats)

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        """Return bytes per element, scales included, from which transformers computes a device map."""
        fmt = self._formats.get(param_name.removesuffix(".weight"))
        if fmt is None or not (param.dim() == 2 or param_name in self._expert_stacks):
            return param.element_size()
        return packed_format(fmt, on_cpu=False).bits_per_weight(param.shape[-1]) / 8

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def update_parallel_plan(self, model: Part, plan: dict[str, str]) -> None:
        if plan is model.tp_plan and tensor_parallel.is_asked(model):
            self._parallel_plan = tensor_parallel.take_over(plan)

    # Before transformers reads the weights

    def _process_model_before_weight_loading(self, model: Part, **kwargs: object) -> None:
        tensor_parallel.check_asks(model, asks=hasattr(HfQuantizer, "update_parallel_plan"))
        self._tied_to = _tied_modules(model)
        if self.pre_quantized:
            self._insert_placeholders(model)
        elif self.quantization_config.calibration is None:
            self._choose_formats(model)

    def _choose_formats(self, model: nn.Module) -> None:
        """Choose the format of each weight of a float model by its Config."""
        config = self.quantization_config.float_config()
        with expanded(model):
            weights = candidates(model, without_data=True)
        # transformers ties weights after reading. Until then tied modules have a parameter each, and `weight` says which are the same.
        weights = [replace(weight, weight=self._tied_to.get(weight.name, weight.name)) for weight in weights]
        decisions = choose(weights, config)
        self._formats = formats_of(decisions)
        if not self._formats:
            raise nothing_to_quantize(model, decisions)
        self._expert_stacks = {weight.name for weight in weights if weight.kind == "Experts" and weight.name in self._formats}

    def _insert_placeholders(self, model: Part) -> None:
        """Replace float weights by placeholders for codes: `weight` becomes a module whose buffers are the tensors of the files."""
        if hasattr(model.config, "halfbyte"):  # `save` adds this section to config.json. It describes the files, not the model.
            del model.config.halfbyte
        keep_dtypes_(model, model.dtype)
        replacements = expand_(model)  # stacked experts and the like have a module for each weight then
        expect_branches(model, self.quantization_config.modules)
        self.quantization_config.modules = wanted = self._find_modules(model)
        for name, settings in wanted.items():
            expect_codes(model, name, settings, _REMEDY)._is_hf_initialized = True
        collapse_(model, replacements, wanted.__contains__)
        for target, source in list(model.all_tied_weights_keys.items()):
            name, owner = target.removesuffix(".weight"), source.removesuffix(".weight")
            if owner in wanted and name not in wanted:  # `_insert` gives the head the owner's weight: no float weight is read
                head: Any = model.get_submodule(name)
                weight_without_data = torch.empty(head.weight.shape, device="meta")
                del head.weight
                head.weight = weight_without_data  # modules that initialise their children or read sizes expect a weight
                head.weight._is_hf_initialized = head._is_hf_initialized = True
            if owner in wanted or name in wanted:
                del model.all_tied_weights_keys[target]
        self._tied_to = {name: owner for name, owner in self._tied_to.items() if owner in wanted and name not in wanted}
        model._keys_to_ignore_on_load_unexpected |= {rf"(^|\.){re.escape(name)}\.weight$" for name in wanted}

    def update_weight_conversions(self, weight_conversions: list[object], *model: nn.Module) -> list[object]:
        """Leave out conversions of the float weights that codes replace, such as a transposition of stacked experts.

        Args:
            weight_conversions: How transformers makes a model's tensors of those in the files.
            model: The model, which older versions of transformers do not pass.
        """
        conversions: list[object] = super().update_weight_conversions(weight_conversions, *model)  # type: ignore[no-untyped-call]
        if not self.pre_quantized:
            return conversions
        names = [f"{name}.weight.data" for name in self.quantization_config.modules]
        return [
            entry
            for entry in conversions
            if not isinstance(entry, WeightConverter) or not any(re.search(p, name) for p in entry.source_patterns for name in names)
        ]

    def _find_modules(self, model: Part) -> dict[str, Module]:
        """Return the quantized modules of the files by their names in the model.

        The model may be the base of the saved one, or built on top of it: then names differ by `base_model_prefix`. Modules that it does
        not have are left out. Raises CheckpointError for these if the model is of the class that was saved.
        """
        prefix = f"{model.base_model_prefix}."
        names = {name for name, _ in model.named_modules(remove_duplicate=False)}
        modules = {}
        for name, settings in self.quantization_config.modules.items():
            name_in_model = next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in names), None)
            if name_in_model is not None:
                modules[name_in_model] = settings
            elif type(model).__name__ in (model.config.architectures or ()):
                raise CheckpointError(f"{type(model).__name__} has no {name}, which is quantized in the files: {_REMEDY}")
        return modules

    # While transformers reads the weights

    def quantize(self, name: str, module: nn.Module, weight: Tensor) -> None:
        """Quantize and pack the weight [N, K] or [E, N, K] of a module, and keep it until all weights are read.

        A weight that its format cannot hold stays float, unless Config.strict. transformers would intercept other errors here, so the first
        of them is raised after reading.
        """
        config = self.quantization_config.config
        assert config is not None
        try:
            check_shape(name, module, weight)
            device = self.quantization_config.device or weight.device
            self._packed_weights[name] = quantized_weight(name, module, weight.to(device), self._formats[name], config.method)
        except HalfbyteError as e:
            if isinstance(e, FormatError) and not config.strict:
                self.kept_float[name] = str(e)
            else:
                self._failure = self._failure or e

    # After transformers has read the weights

    def _process_model_after_weight_loading(self, model: Any, **kwargs: object) -> None:
        tensor_parallel.check_asks(model, asks=self._parallel_plan is not None)
        if self._failure is not None:
            raise self._failure
        if self.pre_quantized:
            self._insert_stored(model)
        elif self.quantization_config.calibration is not None:
            given = self.quantization_config.float_config()
            new_modules = [
                name for name, module in model.named_modules() if isinstance(module, FLOAT_MODULES) and _is_uninitialized(module.weight)
            ]
            config = replace(given, skip=(*given.skip, *new_modules))
            quantize_(model, config, self.quantization_config.calibration)
            add_notes(model, [NEW_WEIGHT.format(name) for name in new_modules])
            model.hf_quantizer, model.config.quantization_config = self, self.quantization_config
        else:
            self._insert_quantized(model)
        self.quantization_config.modules = self._modules_to_save(model)
        check_finite(model)
        _untie(model)
        if self._parallel_plan is not None:
            tensor_parallel.share_(model, self._parallel_plan)

    def _insert_stored(self, model: Any) -> None:
        """Replace the modules with placeholders by quantized ones. Raises CheckpointError for a tensor that is in no file."""
        for name in self.quantization_config.modules:
            module = model.get_submodule(name)
            if hasattr(module, "scalar_embed_scale"):  # transformers fills this buffer when it initializes weights
                module.embed_scale.fill_(module.scalar_embed_scale)._is_hf_initialized = True
            # transformers only warns of tensors that are in no file; without them a quantized module would compute nonsense.
            for key, tensor in (*module.named_parameters(), *module.named_buffers()):
                if not getattr(tensor, "_is_hf_initialized", False):
                    raise missing(name, key)
            self._insert(model, name, read_codes(name, module))

    def _insert_quantized(self, model: Any) -> None:
        """Replace the modules whose weights were quantized while reading. Raises FormatError if no format could hold its weight."""
        self._drop_new_weights(model)
        for name in self._formats:
            owner = self._tied_to.get(name, name)
            if name not in self._packed_weights and owner not in self._packed_weights and not self.kept_float.keys() & {name, owner}:
                # transformers split this weight from a fused tensor of the files, so `_Quantize` has not seen it.
                if name in self._expert_stacks:
                    self.quantize(name, _stacked_experts(model, name), model.get_parameter(name))
                else:
                    self.quantize(name, module := model.get_submodule(name), module.weight)
                if self._failure is not None:
                    raise self._failure
        if self.kept_float and not self._packed_weights:
            raise FormatError(next(iter(self.kept_float.values())))
        stacks = self._expert_stacks - self.kept_float.keys()
        collapse_(model, expand_(model, stacks.__contains__), stacks.__contains__)
        for name in self._formats:
            if name in self._packed_weights:
                self._insert(model, name, self._packed_weights[name])
        self._packed_weights.clear()
        setattr(model, CONFIG_ATTRIBUTE, self.quantization_config.config)
        add_kept(model, self.kept_float)

    def _drop_new_weights(self, model: nn.Module) -> None:
        """Leave float the modules whose weights were in no file, such as a new head, which has to be trained."""
        read = {name for name in self._formats if name in self._packed_weights or self._tied_to.get(name, name) in self._packed_weights}
        for name in [name for name in self._formats if name not in read]:
            if _is_uninitialized(model.get_parameter(name if name in self._expert_stacks else f"{name}.weight")):
                del self._formats[name]
                add_notes(model, [NEW_WEIGHT.format(name)])

    def _insert(self, model: Part, name: str, weight: PackedWeight) -> None:
        """Replace the module `name`, and those whose weights are tied to its weight, by quantized ones."""
        config = self.quantization_config
        for place in [name, *(n for n, owner in self._tied_to.items() if owner == name and n not in self._packed_weights)]:
            put(model, place, weight, config.config or config.modules[name])
            model.all_tied_weights_keys.pop(f"{place}.weight", None)

    # Saving

    def get_state_dict_and_metadata(self, model: Part) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors to write, and update the config. Tied codes are written once, and a guard for each weight (checkpoint.md)."""
        if is_parallel(model):
            raise UnsupportedError(PARTS_ONLY)
        self.quantization_config.modules = modules = self._modules_to_save(model)
        with as_trained(model) as rescaled:
            state = self._state_to_save(model, modules)
            return {name: tensor.clone() for name, tensor in state.items()} if rescaled else state, {}

    @staticmethod
    def _state_to_save(model: Part, modules: Mapping[str, Module]) -> dict[str, Tensor]:
        """Return the model's state, with codes as files hold them, and without those of modules that are not in `modules`: tied ones."""
        state: dict[str, Tensor] = model.state_dict()
        if any(isinstance(module, QuantExperts) for module in model.modules()):
            _save_stacks_whole(model)
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, QuantModule):
                if name in modules:
                    if module.packed.codes_format.packed_bits:
                        state |= {f"{name}.weight.{part}": tensor for part, tensor in to_dense(module.codes()).items()}
                else:
                    del state[f"{name}.weight"]
                    for part in stored_tensors(module.packed.codes_format, module.codes_shape):
                        del state[f"{name}.weight.{part}"]
        return state

    def _modules_to_save(self, model: Part) -> dict[str, Module]:
        """Return the settings of the quantized modules that own their weight; tied modules are not saved."""
        quantized = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, QuantModule)}
        pairs = [(name, owner) for name, owner in self._tied_to.items() if name in quantized and owner in quantized]
        tied = {name for name, owner in pairs if _share_codes(quantized[name], quantized[owner])}
        settings = {name: Module.of(module, model.dtype) for name, module in quantized.items() if name not in tied}
        for name in tied:  # the settings of a tied head's product are saved with the embedding that owns the weight and has none
            if isinstance(module := quantized[name], QuantLinear):
                owner = self._tied_to[name]
                settings[owner] = replace(settings[owner], compute=module.compute, activation=module.activation)
        return with_branches(settings, {name: parameter.shape for name, parameter in model.named_parameters()})

    def adopt(self, model: Any) -> None:
        """Prepare a model that `quantize_` has quantized, not `from_pretrained`, for `save_pretrained`."""
        self._tied_to = _tied_modules(model)
        self.quantization_config.modules = self._modules_to_save(model)
        for place in [n for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, QuantModule)]:
            model.all_tied_weights_keys.pop(f"{place}.weight", None)
        _untie(model)
        model.hf_quantizer = self
        _copied_config(model).quantization_config = self.quantization_config

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> object:
        dequantize_(model, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        for part in model.modules():
            vars(part).pop("_tied_weights_keys", None)  # what `_untie` put there
        return model


class _Quantize(ConversionOps):
    """The operation of transformers' loader that hands float weights to `HalfbyteQuantizer.quantize`."""

    def __init__(self, quantizer: HalfbyteQuantizer) -> None:
        self._quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], model: Any = None, missing_keys: set[str] | None = None, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Quantize the weights of `input_dict` that have a format; return the other ones, which transformers sets itself.

        Args:
            input_dict: By the name of a parameter, its value, or a list of that one value.
            model: The model that is loaded.
            missing_keys: Names of parameters that transformers has not read yet; those that are quantized are removed.
            kwargs: Other arguments of transformers, not used.
        """
        float_weights = {}
        for target, value in input_dict.items():
            if not self._quantizer.param_needs_quantization(model, target):
                float_weights[target] = value
                continue
            name = target.removesuffix(".weight")
            module = _stacked_experts(model, name) if target == name else model.get_submodule(name)
            (weight,) = value if isinstance(value, list) else [value]
            self._quantizer.quantize(name, module, weight)
            if name in self._quantizer.kept_float:
                float_weights[target] = weight.to(model.get_parameter(target).dtype)
                continue
            model.get_parameter(target)._is_hf_initialized = True  # so that it is not initialised
            if missing_keys is not None:
                missing_keys.discard(target)
        return float_weights


def _copied_config(model: nn.Module) -> Any:
    """Replace the model's config by a copy in all its modules, as other models may share the object. Return the copy."""
    shared = model.config
    copied = copy(shared)
    hidden = [module.float_module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    for module in (*model.modules(), *hidden):
        for name in [name for name, value in vars(module).items() if value is shared]:
            setattr(module, name, copied)
    return copied


def _is_uninitialized(weight: Tensor) -> bool:
    """Whether a weight was in no file, so that transformers initializes it at random."""
    return not getattr(weight, "_is_hf_initialized", False)


def _stacked_experts(model: Any, name: str) -> StackedExperts:
    """Return a module of one stack of experts' weights, by the name of its parameter, with whether that parameter is transposed."""
    return StackedExperts(model.get_parameter(name), model.get_submodule(name.rpartition(".")[0]).is_transposed)


def _adopt(model: nn.Module) -> None:
    """Adopts the model, or the transformers models that it contains, as with sentence-transformers."""
    from transformers.modeling_utils import PreTrainedModel  # not at the top: it may be importing this file

    if not isinstance(model, PreTrainedModel):
        for part in model.children():
            _adopt(part)
    elif any(isinstance(module, QuantModule) for module in model.modules()):
        HalfbyteQuantizer(HalfbyteConfig.of({})).adopt(model)


after_quantizing.append(_adopt)


def _save_stacks_whole(model: Any) -> None:
    """Make `save_pretrained` write the codes of stacked experts as they are; it would split float weights into those of each expert."""
    names = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, QuantExperts)]
    conversions = getattr(model, "_weight_conversions", None)  # the conversions of loading, which saving inverts
    if conversions is None:
        conversions = [entry for entry in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(entry, PrefixChange)]
    model._weight_conversions = [
        entry
        for entry in conversions
        if not isinstance(entry, WeightConverter) or not any(re.search(p, name) for p in entry.target_patterns for name in names)
    ]


def _tied_modules(model: Part) -> dict[str, str]:
    """Return the modules of a transformers model whose weights are tied: name -> name of the module that owns the weight."""
    return {target.removesuffix(".weight"): source.removesuffix(".weight") for target, source in model.all_tied_weights_keys.items()}


def _untie(model: nn.Module) -> None:
    """Prevent `tie_weights` from tying quantized weights, which are no parameters and share their codes already."""
    part: Any
    for part in model.modules():
        keys = getattr(part, "_tied_weights_keys", None)
        if isinstance(keys, dict):
            quantized = {f"{name}.weight" for name, module in part.named_modules(remove_duplicate=False) if isinstance(module, QuantModule)}
            part._tied_weights_keys = {target: source for target, source in keys.items() if target not in quantized}


def tie_again(model: Part) -> None:
    """Prepares a model whose embedding has become float for `tie_weights`: what is not quantized is tied as transformers does."""
    for part in model.modules():
        vars(part).pop("_tied_weights_keys", None)  # what `_untie` put there
    _untie(model)
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _share_codes(a: QuantModule, b: QuantModule) -> bool:
    """Whether two modules have the same packed weight in memory."""
    return a.packed.data.data_ptr() == b.packed.data.data_ptr()
