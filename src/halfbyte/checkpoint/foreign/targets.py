"""The kinds of quantized folders that are written for other projects: which weights each can hold, and its config.json."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from halfbyte.checkpoint.native.manifest import Weight
from halfbyte.checkpoint.stored_model import StoredModel, order_name
from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.formats.spec import Format
from halfbyte.io.tensors import TensorSpec
from halfbyte.io.weights import awq, compressed_tensors, gptq

_HEAD = "lm_head.weight"
_CONV1D = "its readers support Linear, but not Conv1D"


class Target(ABC):
    """One kind of folder, for one model.

    Attributes:
        kept: The weights that stay quantized.
        reasons: Why each of the others is dequantized.
    """

    name: str

    def __init__(self, model: StoredModel) -> None:
        self.ordered = {name for name in model.weights if order_name(name) in model.plain}
        self.reasons: dict[str, str] = {}
        for name, weight in model.weights.items():
            reason = "only linear layers are quantized there" if weight.kind != "Linear" else self.why_not(name, weight)
            if reason is not None:
                self.reasons[name] = reason
        self.kept = {name: weight for name, weight in model.weights.items() if name not in self.reasons}
        self._settle()
        if not self.kept:
            reasons = Counter(self.reasons.values()).most_common(1)
            why = reasons[0][0] if reasons else "none is quantized, quantize the model first"
            raise ArgumentError(f"no weight of {model.path} can be written as {self.name}: {why}")
        self.others = sorted(
            {name.removesuffix(".weight") for name in self._linears(model)} - {n.removesuffix(".weight") for n in self.kept}
        )

    def _linears(self, model: StoredModel) -> set[str]:
        """Names of weights that are or may be those of linear layers: all matrices."""
        matrices = {name for name, spec in model.plain.items() if name.endswith(".weight") and len(spec.shape) == 2}
        tied = {name for name, owner in model.tied.items() if name.endswith(".weight") and (owner in model.weights or owner in matrices)}
        return matrices | tied | set(model.weights)

    def _settle(self) -> None:
        """If a folder has one setting for all its weights, keeps only those with the most frequent one."""
        elements: Counter[Hashable] = Counter()
        for weight in self.kept.values():
            elements[self.setting(weight.format)] += weight.shape[0] * weight.shape[1]
        if len(elements) > 1:
            most = elements.most_common(1)[0][0]
            for name, weight in list(self.kept.items()):
                if self.setting(weight.format) != most:
                    self.reasons[name] = f"a folder of {self.name} has one format, and most weights have another than {weight.format}"
                    del self.kept[name]

    @property
    def format(self) -> Format:
        """The format of one of the weights, which all share as far as `setting` compares it."""
        return next(iter(self.kept.values())).format

    def setting(self, fmt: Format) -> Hashable:
        """The part of a format that must be the same for all weights of a folder."""
        return fmt.bits, _group_size(fmt)

    def specs(self, name: str) -> dict[str, TensorSpec]:
        """The tensors that a weight is written as, by their full names."""
        weight = self.kept[name]
        empty = {
            part: torch.empty(size, dtype=dtype, device="meta")
            for part, (dtype, size) in stored_tensors(weight.format, weight.shape).items()
        }
        order = torch.empty(weight.shape[-1], dtype=torch.int32, device="meta") if name in self.ordered else None
        parts = self.write(name, Codes.from_tensors(weight.format, weight.shape, empty), order)
        return {full: TensorSpec(tensor.dtype, tuple(tensor.shape)) for full, tensor in parts.items()}

    def write(self, name: str, codes: Codes, order: Tensor | None) -> dict[str, Tensor]:
        """The tensors of a weight, by their full names."""
        module = name.removesuffix(".weight")
        return {f"{module}.{part}": tensor for part, tensor in self.parts(name, codes, order).items()}

    @abstractmethod
    def why_not(self, name: str, weight: Weight) -> str | None:
        """Why a weight of a Linear cannot stay quantized, or None."""

    @abstractmethod
    def parts(self, name: str, codes: Codes, order: Tensor | None) -> dict[str, Tensor]:
        """The tensors of a weight, by their names in a module."""

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """The quantization_config."""


class Awq(Target):
    name = "awq"

    def why_not(self, name: str, weight: Weight) -> str | None:
        if name in self.ordered:
            return "its columns are in activation order, which AWQ does not have"
        if name == _HEAD:
            return "readers of AWQ expect the head in floating point"
        if weight.transposed:
            return _CONV1D
        return awq.why_not(weight.format, weight.shape)

    def parts(self, name: str, codes: Codes, order: Tensor | None) -> dict[str, Tensor]:
        return awq.write(codes)

    def settings(self) -> dict[str, object]:
        group = _group_size(self.format)
        skipped = {"modules_to_not_convert": self.others} if self.others else {}
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **skipped}


class Gptq(Target):
    name = "gptq"

    def why_not(self, name: str, weight: Weight) -> str | None:
        return gptq.why_not(weight.format, weight.shape)

    @property
    def symmetric(self) -> bool:
        return all(weight.format.zero == "none" for weight in self.kept.values())

    @property
    def version(self) -> int:
        """Every reader supports version 1; version 2 is unambiguous for asymmetric weights."""
        return 1 if self.symmetric else 2

    def parts(self, name: str, codes: Codes, order: Tensor | None) -> dict[str, Tensor]:
        return gptq.write(codes, order, self.version)

    def settings(self) -> dict[str, object]:
        skipped: dict[str, object] = {f"-:^{re.escape(name)}$": {} for name in self.others if name != "lm_head"}
        settings = {
            "quant_method": "gptq",
            "bits": self.format.bits,
            "group_size": _group_size(self.format),
            "sym": self.symmetric,
            "desc_act": any(name in self.ordered for name in self.kept),
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "lm_head": _HEAD in self.kept,
        }
        return {**settings, "dynamic": skipped} if skipped else settings


class CompressedTensors(Target):
    name = "compressed-tensors"

    def __init__(self, model: StoredModel) -> None:
        super().__init__(model)
        self.schemes: dict[str, list[str]] = {}
        self._groups: list[dict[str, object]] = []
        for name, weight in self.kept.items():
            group = self._scheme(weight, name in self.ordered)
            if group not in self._groups:
                self._groups.append(group)
            self.schemes.setdefault(str(self._groups.index(group)), []).append(name.removesuffix(".weight"))

    def why_not(self, name: str, weight: Weight) -> str | None:
        return _CONV1D if weight.transposed else compressed_tensors.why_not(weight.format, weight.shape)

    def setting(self, fmt: Format) -> Hashable:
        return None

    def _integer(self, weight: Weight) -> bool:
        """Whether a weight is W8A8: multiplied with activations quantized per row."""
        return weight.format.bits == 8 and weight.format.block == "channel" and weight.compute == "int8" and weight.activation != "block"

    def parts(self, name: str, codes: Codes, order: Tensor | None) -> dict[str, Tensor]:
        return compressed_tensors.write(codes, order, packed=not self._integer(self.kept[name]))

    def _scheme(self, weight: Weight, ordered: bool) -> dict[str, object]:
        size, fmt = _group_size(weight.format), weight.format
        weights: dict[str, object] = {"num_bits": fmt.bits, "type": "int", "symmetric": fmt.zero == "none", "dynamic": False}
        weights |= {"strategy": "channel"} if size < 0 else {"strategy": "group", "group_size": size}
        if ordered:
            weights["actorder"] = "group"
        inputs: dict[str, object] | None = None
        if self._integer(weight):
            inputs = {"num_bits": 8, "type": "int", "symmetric": weight.activation == "row", "dynamic": True, "strategy": "token"}
        form = "int-quantized" if inputs else "pack-quantized"
        return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": form}

    def settings(self) -> dict[str, object]:
        groups = {
            f"group_{number}": {"targets": ["Linear"] if len(self._groups) == 1 else self.schemes[str(number)], **group}
            for number, group in enumerate(self._groups)
        }
        forms = {group["format"] for group in self._groups}
        return {
            "quant_method": "compressed-tensors",
            "format": forms.pop() if len(forms) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": self.others,
            "kv_cache_scheme": None,
        }


TARGETS: Mapping[str, type[Target]] = {target.name: target for target in (Awq, Gptq, CompressedTensors)}


def _group_size(fmt: Format) -> int:
    return fmt.block if isinstance(fmt.block, int) else -1
