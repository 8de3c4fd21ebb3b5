"""The parameters of quantized layers, which vLLM's own loaders shard and fill.

They hold codes as they are in files (`formats/dense.py`); each tensor is one of vLLM's classes of parameters, which knows along which
dimension tensor parallelism cuts it:

    data        [N, bytes of K]    PackedvLLMParameter
    scale, zero [N, blocks of K]   GroupQuantScaleParameter
                [N, 1]             ChannelQuantScaleParameter
                [1, 1]             BasevLLMParameter: a copy in each process
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.native.quantization_config import Module
from halfbyte.errors import UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.formats.dense import dense_tensors, from_dense
from halfbyte.formats.sharding import input_unit
from halfbyte.integrations.vllm import api
from halfbyte.integrations.vllm.names import PARTS
from halfbyte.nn.described import ORDER
from halfbyte.nn.modules.quantized import guard

Loader = Callable[..., None]


def check_inputs(module: Module, k: int, prefix: str) -> None:
    """Raise UnsupportedError unless a shard with `k` of the module's inputs has whole blocks, in whole bytes."""
    whole = module.shape[-1]
    if k == whole:
        return
    count, fmt = api.tensor_parallel_size(), module.format
    if module.ordered:
        raise UnsupportedError(
            f"the inputs of {prefix} are reordered (activation order), so {count} processes cannot share them: "
            "use --tensor-parallel-size 1, or a checkpoint without activation order"
        )
    unit = input_unit(fmt)
    if k % unit or k * fmt.stored_bits % 8:
        raise UnsupportedError(
            f"{prefix} has {whole} inputs in blocks of {unit} ({fmt}), which {count} processes cannot share evenly: "
            f"use a --tensor-parallel-size that divides {whole // unit}"
        )


def codes_parameters(module: Module, n: int, k: int, loader: Loader) -> dict[str, nn.Parameter]:
    """Return the parameters of one weight [n, k], a shard of the module's: the guard `weight`, `weight_data`, `weight_scale`, …"""
    fmt, device = module.format, torch.get_default_device()
    parameters: dict[str, nn.Parameter] = {"weight": api.BasevLLMParameter(data=guard(device), weight_loader=loader)}
    for name, (dtype, shape) in dense_tensors(fmt, (n, k)).items():
        settings: dict[str, object] = {"data": torch.zeros(shape, dtype=dtype, device=device), "weight_loader": loader}
        if name == "data":
            packing = {"packed_dim": 1, "packed_factor": Fraction(8, fmt.stored_bits)}
            parameter = api.PackedvLLMParameter(input_dim=1, output_dim=0, **packing, **settings)
        elif isinstance(fmt.block, int):
            parameter = api.GroupQuantScaleParameter(input_dim=1, output_dim=0, **settings)
        elif fmt.block == "channel":
            parameter = api.ChannelQuantScaleParameter(output_dim=0, **settings)
        else:
            parameter = api.BasevLLMParameter(**settings)
        parameters[f"weight_{name}"] = parameter
    if module.ordered:
        order = torch.zeros(k, dtype=torch.int32, device=device)
        parameters[ORDER] = api.BasevLLMParameter(data=order, weight_loader=loader)
    return parameters


def float_parameters(n: int, k: int, dtype: torch.dtype, loader: Loader) -> dict[str, nn.Parameter]:
    """Return the parameter of a weight [n, k] in floating point, part of a layer whose other parts are quantized."""
    data = torch.zeros((n, k), dtype=dtype, device=torch.get_default_device())
    return {"weight": api.ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)}


def fused_parameters(parts: Sequence[Mapping[str, nn.Parameter]], loader: Loader) -> dict[str, nn.Parameter]:
    """Return the parameters of a fused layer, such as queries, keys and values, from those of its parts."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _fused([part.get(name) for part in parts], loader) for name in names}


def _fused(parts: Sequence[nn.Parameter | None], loader: Loader) -> FusedParameter | FusedCopies:
    sharded = all(part is None or hasattr(part, "output_dim") for part in parts)
    return (FusedParameter if sharded else FusedCopies)(parts, loader)


class _Parts:
    """What fused layers load: each part's tensor goes to the part's own parameter, of vLLM's classes, which takes its shard."""

    parts: Sequence[api.BasevLLMParameter]
    tp_rank: int
    tp_size: int

    def load_merged_column_weight(self, loaded_weight: Tensor, shard_id: int, **_: object) -> None:
        self._load(loaded_weight, shard_id, self.tp_rank)

    def load_qkv_weight(self, loaded_weight: Tensor, shard_id: str | int, num_heads: int = 1, **_: object) -> None:
        """num_heads: processes that have the same head of keys and values."""
        index = {"q": 0, "k": 1, "v": 2}[shard_id] if isinstance(shard_id, str) else shard_id
        self._load(loaded_weight, index, self.tp_rank // num_heads if index else self.tp_rank)

    def _load(self, loaded_weight: Tensor, index: int, rank: int) -> None:
        part = self.parts[index]
        part.tp_rank, part.tp_size = rank, self.tp_size
        part.load_column_parallel_weight(loaded_weight)


class FusedParameter(_Parts, api.BasevLLMParameter):
    """The parts of a fused layer, each of which has its own format, and a shard in each process."""

    output_dim = 0

    def __new__(cls, parts: Sequence[object], loader: Loader) -> FusedParameter:
        return super().__new__(cls, data=torch.empty(0, dtype=torch.uint8, device=torch.get_default_device()))  # type: ignore[no-any-return]

    def __init__(self, parts: Sequence[object], loader: Loader) -> None:
        super().__init__(data=self.data, weight_loader=loader)
        self.parts = parts


class FusedCopies(_Parts, api.PerTensorScaleParameter):
    """The same for tensors of which each process has all, such as scales of whole tensors and guards.

    vLLM loads one that is fused in the checkpoint already into each part of a PerTensorScaleParameter, by the length of its data.
    """

    def __new__(cls, parts: Sequence[object], loader: Loader) -> FusedCopies:
        return super().__new__(cls, data=torch.empty(len(parts), dtype=torch.uint8, device=torch.get_default_device()))  # type: ignore[no-any-return]

    def __init__(self, parts: Sequence[object], loader: Loader) -> None:
        super().__init__(data=self.data, weight_loader=loader)
        self.parts = parts


def loaded_codes(module: Module, shape: tuple[int, ...], parameters: Mapping[str, nn.Parameter]) -> Codes:
    """Return the codes of `shape` that vLLM has loaded into the parameters `weight_data`, `weight_scale`, …"""
    tensors = {name: parameters[f"weight_{name}"].data for name in PARTS if f"weight_{name}" in parameters}
    return from_dense(module.format, shape, tensors)
