"""Which modules of a model can be quantized, and the reasons why others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import getattr_static
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from halfbyte.layouts.convolution import PackedConv
from halfbyte.nn.described import NOT_A_KIND, Candidate
from halfbyte.nn.kinds import FLOAT_MODULES, kind_of
from halfbyte.nn.modules.conv import fold_of
from halfbyte.nn.modules.experts import MixtureOfExperts, stack_names, why_not_experts
from halfbyte.nn.modules.low_rank import LowRankLinear
from halfbyte.nn.modules.quantized import QuantModule, why_not_hooks
from halfbyte.nn.modules.scaled import factor_of
from halfbyte.nn.modules.subclassed import is_same_as_base, why_not_forward
from halfbyte.nn.training.fake_quantized import FakeQuantized
from halfbyte.ops.checks import FLOATS

ATTENTION = "MultiheadAttention is quantized only with inputs of one width, without added keys, hooks and weights of other types"
CUSTOM_LOADER = "it is in a module with its own save and load, which do not read codes"
ROUTER = "it is a router, whose rounded scores would choose other experts"
STACKED = "it has stacked weights, and is not a module of experts as transformers builds them"
PARAMETRIZED = 'its weight is parametrized: torch.nn.utils.parametrize.remove_parametrizations(module, "weight") makes it plain'
# What torch.nn.utils adds to a module whose weight a hook computes at each call, and what makes the weight plain again.
_COMPUTED = {
    "weight_g": "remove_weight_norm(module)",
    "weight_u": "remove_spectral_norm(module)",
    "weight_mask": 'prune.remove(module, "weight")',
}
_NARROW = 16  # channels of a tap: with fewer per block, scales would take more space than codes


def candidates(model: nn.Module, *, without_data: bool = False) -> list[Candidate]:
    """The modules of `model` with tensors of their own that are not quantized yet, under each of their names.

    without_data    weights on the meta device are candidates too
    """
    modules = list(model.named_modules(remove_duplicate=False))
    weights = {f"{name}.weight" for name, module in modules if isinstance(module, FLOAT_MODULES)}
    elsewhere = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name not in weights}
    custom_loader, routers = _with_custom_loader(modules), _routers(modules)
    found = []
    for name, module in modules:
        if isinstance(module, FLOAT_MODULES) and not isinstance(module, QuantModule):
            reason = _why_not(module, without_data) or (CUSTOM_LOADER if name in custom_loader else None)
            reason = reason or (ROUTER if name in routers else None)
            if reason is None and (other := elsewhere.get(id(module.weight))):
                reason = f"its weight is also {other}, which is not a module that can be quantized"
            narrow = reason is None and 0 < _channels(module) < _NARROW
            found.append(Candidate(name, kind_of(module), id(module.weight), reason, narrow))
        elif not isinstance(module, QuantModule) and any(True for _ in direct_tensors(module)):
            reason = why_not_experts(module) if stack_names(module) else STACKED if _stacked(module) else NOT_A_KIND
            if isinstance(module, MixtureOfExperts):
                reason = "the biases of experts"
            elif isinstance(module, LowRankLinear):
                reason = "the product of low rank, which takes the outliers"
            elif isinstance(module, parametrize.ParametrizationList):
                reason = "what a parametrized weight is made of"
            elif isinstance(module, nn.MultiheadAttention):
                reason = ATTENTION
            found.append(Candidate(name, type(module).__name__, id(module), reason))
    return found


def _with_custom_loader(modules: Sequence[tuple[str, nn.Module]]) -> set[str]:
    """Names in a part of the model that its class saves with `save` and builds again with the class method `load`, as the Dense and
    StaticEmbedding of sentence-transformers do: they would find codes where they expect floats. A part with `save_pretrained` and
    `from_pretrained` is not one, nor is the whole model."""
    found: set[str] = set()
    for name, module in modules:
        cls, parent = type(module), name.rpartition(".")[0]
        pretrained = hasattr(cls, "save_pretrained") and hasattr(cls, "from_pretrained")
        has_load = hasattr(cls, "save") and isinstance(getattr_static(cls, "load", None), classmethod | staticmethod)
        if name and not pretrained and (has_load or parent in found):
            found.add(name)
    return found


def _routers(modules: Sequence[tuple[str, nn.Module]]) -> set[str]:
    """Names of the routers: Linears that are siblings of a module called `experts`, with as many outputs as that has experts."""
    found: set[str] = set()
    for name, module in modules:
        home, _, last_part = name.rpartition(".")
        if last_part != "experts":
            continue
        stacked = (tensor.shape[0] for tensor in module.parameters() if not is_lazy(tensor) and tensor.dim() == 3)
        count = len(module) if isinstance(module, nn.ModuleList) else next(stacked, 0)
        prefix = f"{home}." if home else ""
        for other, linear in modules:
            is_sibling = other.startswith(prefix) and not other.startswith((f"{name}.", f"{prefix}shared"))
            if is_sibling and isinstance(linear, nn.Linear) and linear.out_features == count > 1:
                found.add(other)
    return found


def _stacked(module: nn.Module) -> bool:
    """Whether it may be a mixture of experts with weights [experts, N, K], rather than positions [1, tokens, K] or factors [C, 1, 1]."""
    shapes = [t.shape for _, t in direct_tensors(module) if not is_lazy(t)]
    return not isinstance(module, nn.modules.conv._ConvNd) and any(len(shape) == 3 and min(shape) > 1 for shape in shapes)


def quantized(model: nn.Module) -> list[Candidate]:
    """The modules of `model` that are quantized, as the Candidates that they were before."""
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantModule):
            narrow = isinstance(packed := module.packed_anywhere, PackedConv) and packed.sizes.channels < _NARROW
            found.append(Candidate(name, module.kind, id(module.packed_data), None, narrow))
    return found


def direct_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a module itself, without its children's."""
    yield from module.named_parameters(recurse=False)
    yield from ((name, b) for name, b in module.named_buffers(recurse=False) if name not in module._non_persistent_buffers_set)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Every parameter and persistent buffer, under each of its names, with its module."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in direct_tensors(module):
            yield f"{prefix}.{name}" if prefix else name, module, tensor


def _channels(module: nn.Module) -> int:
    """Channels of one tap of the convolution that is computed for this one; 0 where it is none."""
    fold = fold_of(module)
    return 0 if fold is None else fold.fold(torch.empty(module.get_parameter("weight").shape, device="meta")).shape[1]


def _why_not(module: nn.Module, without_data: bool) -> str | None:
    """Why a module cannot be replaced by its quantized form, or None."""
    if isinstance(module, FakeQuantized):
        return f"in training for {module.target.format}, to which convert_qat_ converts it"
    weight = cast("Tensor", module.weight)
    name, base = type(module).__name__, next(base for base in FLOAT_MODULES if isinstance(module, base))
    forward_reason = why_not_forward(module, base) if _differs(module, base) and not _known(module) else None
    undo = next((undo for added, undo in _COMPUTED.items() if hasattr(module, added)), None)
    reasons = {
        PARAMETRIZED: parametrize.is_parametrized(module),
        f"its weight is a {type(weight).__name__}": type(weight) not in (nn.Parameter, Tensor),
        str(forward_reason): forward_reason is not None,
        f"{name} has a {_overridden_method(module, base)} of its own": _overridden_method(module, base) is not None,
        f"a hook computes its weight: torch.nn.utils.{undo} makes it plain": undo is not None,
        str(why_not_hooks(module)): why_not_hooks(module) is not None,
        "MultiheadAttention reads its weight without calling it": isinstance(module, NonDynamicallyQuantizableLinear),
        "max_norm rescales its weight as it runs": isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None,
        f"its weight is {weight.dtype}: kernels take {', '.join(map(str, FLOATS))}": weight.dtype not in FLOATS,
        "its weight has no data (meta device)": weight.is_meta and not without_data,
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or ("its weight is empty" if weight.numel() == 0 else None)


# What torch's classes call and read on the way from a call of a module to its result, besides `forward`.
_METHODS = ("_conv_forward", "_output_padding", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")
_READ = (
    *("weight", "bias", "stride", "padding", "output_padding", "dilation", "groups", "padding_mode", "padding_idx", "mode"),
    "include_last_offset",
)


def _overridden_method(module: nn.Module, base: type[nn.Module]) -> str | None:
    """The first method or attribute by which a module may compute otherwise than `base`, besides `forward`; None if there is none."""
    for name in _METHODS:
        if name in vars(module) or getattr(type(module), name, None) is not getattr(base, name, None):
            return name
    return next((name for name in _READ if hasattr(type(module), name)), None)  # a property or constant: torch's are in the instance


def _differs(module: nn.Module, base: type[nn.Module]) -> bool:
    overrides_forward = type(module).forward is not base.forward or type(module).__call__ is not nn.Module.__call__
    return overrides_forward or "forward" in vars(module)


def _known(module: nn.Module) -> bool:
    """Whether a subclass's forward is known: it computes the same as its base class, or is an embedding that multiplies by one factor."""
    scaled = "forward" not in vars(module) and isinstance(module, nn.Embedding) and factor_of(module) is not None
    return scaled or is_same_as_base(module)
