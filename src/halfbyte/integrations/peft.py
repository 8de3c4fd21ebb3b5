"""peft: LoRA adapters on quantized linear layers, as in QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

    from peft import LoraConfig, get_peft_model

    model = get_peft_model(hb.quantize_(model, "int4_g64"), LoraConfig(target_modules="all-linear"))

The codes do not change; the adapters are trained, in the dtype of the float weight that was quantized. This module is imported together
with peft's LoRA (see on_import.py).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft.tuners import tuners_utils
from peft.tuners.lora.layer import Linear
from peft.tuners.lora.model import LoraModel
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_adapters_to_merge
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from torch import nn

from halfbyte import ops
from halfbyte.errors import UnsupportedError
from halfbyte.nn.modules import AnyPacked, QuantLinear, pack_like
from halfbyte.nn.permuted import PermutedLinear

_ALL_LINEAR = "all-linear"


class QuantLoraLinear(Linear):
    """y = QuantLinear(x) + scaling * B(A(dropout(x))), by peft's own `forward`."""

    _before_merge: AnyPacked | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fan_in_fan_out = False  # for a Conv1D too, whose quantized weight is transposed

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight and quantizes it again to its format, which rounds the sum. `unmerge` restores the original."""
        base: Any = self.get_base_layer()
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        reasons = {
            "its columns are permuted": isinstance(base, PermutedLinear),
            "they are DoRA or similar": any(name in getattr(self, "lora_variant", ()) for name in names),
            "they have biases": any(getattr(self, "lora_bias", {}).get(name) for name in names),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            raise UnsupportedError(
                f"adapters cannot be merged into a quantized weight if {reason}: keep them apart, or dequantize the model"
            )
        for name in names:
            with torch.no_grad():
                weight = base.weight.float() + self.get_delta_weight(name).float()
            if safe_merge and not torch.isfinite(weight).all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
            codes = ops.quantize(weight, base.packed.codes_format, name=f"the weight with {name}")
            if self._before_merge is None:
                self._before_merge = base.packed
            self._put(base, pack_like(base.packed, codes, base.packed.device))
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Removes all merged adapters."""
        if self._before_merge is not None:
            self._put(self.get_base_layer(), self._before_merge)
            self._before_merge = None
        self.merged_adapters.clear()

    @staticmethod
    def _put(base: Any, packed: AnyPacked) -> None:
        base._set_packed(packed)
        base.error = None
        base.refresh()


_lora: Any = LoraModel
if not hasattr(_lora, "_create_new_module"):
    raise ImportError("its LoraModel makes layers in another way", name="peft")
_create_new_module = _lora._create_new_module


def _create(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
    lora_config._register_custom_module({QuantLinear: QuantLoraLinear})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unsupported layer type .*QuantLinear")  # it knows in_features by itself
        made: nn.Module = _create_new_module(lora_config, adapter_name, target, **kwargs)
    return made


def _include(peft_config: Any, model: Any) -> Any:
    """Of quantized layers too: all but the head."""
    asked = getattr(peft_config, "target_modules", None)
    config: Any = _maybe_include_all_linear_layers(peft_config, model)
    if isinstance(asked, str) and asked.lower() == _ALL_LINEAR:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        classifiers = {getattr(model, name, None) for name in SEQ_CLS_HEAD_NAMES} if head is None else set()
        names = {n for n, m in model.named_modules() if isinstance(m, QuantLinear) and m is not head and m not in classifiers}
        config.target_modules = {*config.target_modules, *names}
    return config


_lora._create_new_module = staticmethod(_create)
tuners_utils._maybe_include_all_linear_layers = _include
