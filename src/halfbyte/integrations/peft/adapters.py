"""peft: LoRA adapters on quantized linear layers, convolutions and embeddings, as in QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

    from peft import LoraConfig, get_peft_model

    model = get_peft_model(hb.quantize_(model, "int4_g64"), LoraConfig(target_modules="all-linear"))

The codes do not change; the adapters are trained, in the dtype of the float weight that was quantized. What peft trains besides adapters is
in modules.py and prompts.py. This module is imported together with peft's LoRA (see on_import.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import torch
from peft.tuners import tuners_utils
from peft.tuners.adaption_prompt import AdaptionPromptModel
from peft.tuners.lora.layer import Conv1d, Conv2d, Conv3d, Embedding, Linear
from peft.tuners.lora.model import LoraModel
from peft.tuners.tuners_utils import BaseTuner, check_adapters_to_merge, check_target_module_exists
from peft.utils import PeftType
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from torch import Tensor, nn
from torch.nn import functional

from halfbyte.errors import HalfbyteError, UnsupportedError
from halfbyte.integrations.peft import modules as peft_modules
from halfbyte.nn.described import RESIDUAL
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.kinds import quantize_weight
from halfbyte.nn.modules.conv import QuantConv1d, QuantConv2d, QuantConv3d, fold_of
from halfbyte.nn.modules.experts import QuantExperts
from halfbyte.nn.modules.permuted import PermutedLinear
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear, QuantModule
from halfbyte.nn.modules.subclassed import float_skeleton
from halfbyte.nn.modules.weight_view import AnyPacked, WeightView, pack_like

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig

    _Include = Callable[[PeftConfig, nn.Module], PeftConfig]
    _Sizes = Callable[..., tuple[int, int] | tuple[None, None]]

_ALL_LINEAR = "all-linear"
_ADAPTABLE = (QuantLinear, PermutedLinear, FusedLinear, QuantEmbedding, QuantConv1d, QuantConv2d, QuantConv3d)
# Adapters that can be attached to quantized layers; XLORA is a mixture of LoRA adapters.
_SERVED = (PeftType.LORA, PeftType.XLORA, PeftType.TRAINABLE_TOKENS)


class _Requantized(nn.Module):
    """Merges adapters into the codes of the base layer. Precedes a LoRA layer of peft."""

    _before_merge: AnyPacked | None = None
    get_base_layer: Callable[[], Any]
    get_delta_weight: Callable[[str], Tensor]
    merged_adapters: list[str]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the original weight and quantize the sum to its format, which rounds it. `unmerge` restores the original."""
        base: object = self.get_base_layer()
        if not isinstance(base, QuantModule):  # the model was dequantized
            super().merge(safe_merge, adapter_names)  # type: ignore[misc]
            return
        names = [name for name in check_adapters_to_merge(cast(Any, self), adapter_names) if name in self._adapters_here()]
        reasons = {
            "its columns are permuted": isinstance(base, PermutedLinear),
            "they are DoRA or similar": any(name in getattr(self, "lora_variant", ()) for name in names),
            "it is a convolution with groups": isinstance(base, QuantConv2d) and base.groups > 1,
            "they have biases": any(getattr(self, "lora_bias", {}).get(name) for name in names),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            raise UnsupportedError(
                f"adapters cannot be merged into a quantized weight if {reason}: keep them apart, or dequantize the model"
            )
        if not names:
            return
        warnings.warn(
            f"merging rounds the sums of weights and adapters to {base.packed.codes_format}, which changes the model's outputs: for exact "
            "sums, load the adapters onto model.dequantize() and merge them there",
            stacklevel=2,
        )
        merged, packed = [*self.merged_adapters, *names], base.packed
        before = packed if self._before_merge is None else self._before_merge
        self._put(base, before)  # the sum of all adapters is rounded once
        try:
            packed = self._sum(base, merged, safe_merge)
        finally:
            self._put(base, packed)
        self._before_merge, self.merged_adapters = before, merged

    def _sum(self, base: QuantModule, adapters: list[str], safe_merge: bool) -> AnyPacked:
        """The weight plus adapters, summed in float32 and quantized to the format of the weight."""
        view = cast(WeightView, base.weight)
        with torch.no_grad():
            weight: Tensor = WeightView(view.packed, torch.float32, view.shape, view.rows, steps=view.steps, base=view.base)
            for name in adapters:
                weight = weight + self.get_delta_weight(name).float()
                if safe_merge and not torch.isfinite(weight).all():
                    raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
        named = f"the weight with {', '.join(adapters)}"
        codes = quantize_weight(base.kind, weight, base.packed.codes_format, "absmax", named, fold_of(base))
        return pack_like(base.packed, codes, base.packed.device)

    def unmerge(self) -> None:
        """Remove all merged adapters."""
        if not isinstance(self.get_base_layer(), QuantModule):
            super().unmerge()  # type: ignore[misc]
            return
        if self._before_merge is not None:
            self._put(self.get_base_layer(), self._before_merge)
            self._before_merge = None
        self.merged_adapters.clear()

    def _adapters_here(self) -> nn.ModuleDict | nn.ParameterDict:
        """The names of the adapters that this layer has."""
        raise NotImplementedError

    @staticmethod
    def _put(base: QuantModule, packed: AnyPacked) -> None:
        base._set_packed(packed)
        base.error = None
        base.refresh()


class QuantLoraLinear(_Requantized, Linear):
    """y = QuantLinear(x) + scaling * B(A(dropout(x))), by peft's own `forward`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fan_in_fan_out = False  # for a Conv1D too, whose quantized weight is transposed

    def _adapters_here(self) -> nn.ModuleDict | nn.ParameterDict:
        return self.lora_A


class _QuantLoraConv(_Requantized):
    """y = QuantConv(x) + scaling * B(A(dropout(x))), by peft's own `forward`."""

    _like: nn.Module | None = None  # what peft takes for the base layer while it creates A and B, of whose class they are

    def update_layer(self, *args: object, **kwargs: object) -> None:
        base = self.get_base_layer()
        if isinstance(base, QuantConv2d):
            sizes = {name: getattr(base, name) for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "groups")}
            like = float_skeleton(base, **sizes, bias=base.bias is not None, device="meta")
            like.register_parameter("weight", nn.Parameter(base.dtype_mark, requires_grad=False))  # of its dtype and device
            vars(self)["_like"] = like  # not a submodule
        try:
            super().update_layer(*args, **kwargs)  # type: ignore[misc]
        finally:
            vars(self).pop("_like", None)

    def get_base_layer(self) -> Any:
        return super().get_base_layer() if self._like is None else self._like

    def _adapters_here(self) -> nn.ModuleDict | nn.ParameterDict:
        return cast(nn.ModuleDict, self.lora_A)


class QuantLoraConv1d(_QuantLoraConv, Conv1d):
    """LoRA on a QuantConv1d."""


class QuantLoraConv2d(_QuantLoraConv, Conv2d):
    """LoRA on a QuantConv2d."""


class QuantLoraConv3d(_QuantLoraConv, Conv3d):
    """LoRA on a QuantConv3d."""


class QuantLoraEmbedding(_Requantized, Embedding):
    """y = QuantEmbedding(ids) + scaling * B(A[ids]), by peft's own `forward`."""

    def _adapters_here(self) -> nn.ModuleDict | nn.ParameterDict:
        return self.lora_embedding_A

    def _embed(self, input: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
        return functional.embedding(input, weight, self.get_base_layer().padding_idx)


_lora: Any = LoraModel
if not hasattr(_lora, "_create_new_module"):
    raise ImportError("its LoraModel makes layers in another way", name="peft")
_create_new_module = _lora._create_new_module


def _create(lora_config: LoraConfig, adapter_name: str, target: nn.Module, **kwargs: object) -> nn.Module:
    layers: dict[type[nn.Module], type[nn.Module]] = {QuantLinear: QuantLoraLinear, QuantEmbedding: QuantLoraEmbedding}
    layers |= {QuantConv1d: QuantLoraConv1d, QuantConv3d: QuantLoraConv3d, QuantConv2d: QuantLoraConv2d}  # their base class last
    lora_config._register_custom_module(layers)
    adapter: nn.Module = _create_new_module(lora_config, adapter_name, target, **kwargs)
    return adapter


def _including(include: _Include) -> _Include:
    """Replace `_maybe_include_all_linear_layers`: quantized layers too, all but the head; targets that could not be trained are refused."""

    @wraps(include)
    def included(peft_config: PeftConfig, model: Any) -> PeftConfig:
        asked = getattr(peft_config, "target_modules", None)
        config: Any = include(peft_config, model)
        if isinstance(asked, str) and asked.lower() == _ALL_LINEAR:
            head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            classifiers = {getattr(model, name, None) for name in SEQ_CLS_HEAD_NAMES} if head is None else set()
            names = {n for n, m in model.named_modules() if isinstance(m, QuantLinear) and m is not head and m not in classifiers}
            config.target_modules = {*config.target_modules, *names}
        quantized = {name: module for name, module in model.named_modules() if isinstance(module, QuantModule)}
        if quantized and getattr(config, "target_modules", None):
            _check_modules(config, quantized)
        for parameter in getattr(config, "target_parameters", None) or ():
            _check_parameter(parameter, quantized)
        if quantized:
            peft_modules.check_head(config, model)
        return config  # type: ignore[no-any-return]

    return included


def _check_modules(config: Any, quantized: dict[str, QuantModule]) -> None:
    """Raise UnsupportedError for target modules that are quantized, and get no adapters of this kind."""
    for name, module in quantized.items():
        if (home := name.removesuffix(f".{RESIDUAL}")) != name and check_target_module_exists(config, home):
            raise UnsupportedError(f"peft's {config.peft_type.value} cannot train {home}, a LowRankLinear: quantize without low_rank")
        if config.peft_type in _SERVED and type(module) in _ADAPTABLE:
            continue
        if not check_target_module_exists(config, name):
            continue
        kind, layer, last = config.peft_type.value, type(module).__name__, name.rpartition(".")[2]
        if type(module).__bases__[0] is not QuantModule and isinstance(module, QuantLinear):
            remedy = "attach adapters first, and call fuse_ or optimize_ then"
        elif config.peft_type in _SERVED or not isinstance(module, QuantLinear | QuantEmbedding):
            remedy = f'quantize the model with skip=["*{last}"]'
        else:
            remedy = f'take LoraConfig, or quantize the model with skip=["*{last}"]'
        raise UnsupportedError(f"peft's {kind} cannot train {name}, a {layer}: {remedy}")


def _check_parameter(target: str, quantized: dict[str, QuantModule]) -> None:
    """Raise UnsupportedError for a name of `target_parameters` that is a quantized weight, which is no parameter."""
    for name, module in quantized.items():
        if any(f".{spelled}".endswith(f".{target}") for spelled in (name, f"{name}.weight")):
            stack, last = isinstance(module, QuantExperts), name.rpartition(".")[2]  # experts have parameters where both stacks are float
            raise UnsupportedError(
                f"target_parameters has {target!r}, and the weight of {name} is quantized: name a linear layer in target_modules, or "
                f'quantize the model with skip=["*{"experts*" if stack else last}"]'
            )


def _in_words(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate the `__init__` of a model of peft: what it raises where it finds no layer or parameter that it knows gets a remedy."""

    @wraps(init)
    def checked(self: BaseTuner, model: nn.Module, config: Any, *args: object, **kwargs: object) -> None:
        try:
            init(self, model, config, *args, **kwargs)
        except HalfbyteError:
            raise
        except Exception as e:
            kinds = {c.peft_type for c in (config.values() if isinstance(config, dict) else [config])}
            if kinds <= set(_SERVED) or not any(isinstance(module, QuantModule) for module in model.modules()):
                raise
            name, why = ", ".join(kind.value for kind in kinds), " ".join(str(e).split()) or type(e).__name__
            raise UnsupportedError(
                f"peft's {name} cannot be attached to this quantized model ({why}): take LoraConfig, or quantize the model with "
                "skip=[...] for the layers that it changes"
            ) from e

    return checked


def _knowing_sizes(features: _Sizes) -> _Sizes:
    """Replace `_get_in_out_features`, which warns of classes that it does not know."""

    @wraps(features)
    def sizes_of(module: nn.Module) -> tuple[int, int] | tuple[None, None]:
        if isinstance(module, QuantEmbedding):
            return module.num_embeddings, module.embedding_dim
        if isinstance(module, QuantConv2d):
            return module.in_channels, module.out_channels
        return (module.in_features, module.out_features) if isinstance(module, QuantLinear) else features(module)

    return sizes_of


_lora._create_new_module = staticmethod(_create)
peft_modules.rebind(tuners_utils._maybe_include_all_linear_layers, _including)
peft_modules.rebind(tuners_utils._get_in_out_features, _knowing_sizes)
_models: list[Any] = [BaseTuner, AdaptionPromptModel]
for _model in _models:
    _model.__init__ = _in_words(_model.__init__)
peft_modules.register()
