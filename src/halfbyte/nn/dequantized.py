"""The float forms of quantized modules: of a whole model, of layers that are to be trained, and of embeddings that get another size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from halfbyte.errors import UnsupportedError
from halfbyte.nn.described import RESIDUAL
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules.conv import QUANT_CONVOLUTIONS, QuantConv2d, QuantConvTranspose2d
from halfbyte.nn.modules.expanded import collapse_
from halfbyte.nn.modules.experts import MixtureOfExperts, QuantExperts, StackedExperts
from halfbyte.nn.modules.low_rank import LowRankLinear
from halfbyte.nn.modules.permuted import PermutedLinear
from halfbyte.nn.modules.quantized import PART, QuantEmbedding, QuantEmbeddingBag, QuantLinear, QuantModule, keep_hooks
from halfbyte.nn.modules.scaled import ScaledEmbedding, set_factor
from halfbyte.nn.modules.subclassed import float_skeleton
from halfbyte.nn.modules.transposed import conv1d

_Weights = dict[tuple[int, int], nn.Parameter]

# Classes that compute what their float form computes. Others also apply an activation, or are part of an integer network.
_CONVERTIBLE = (QuantLinear, PermutedLinear, QuantEmbedding, QuantEmbeddingBag, *QUANT_CONVOLUTIONS.values(), QuantExperts)


def dequantize_(
    model: nn.Module, is_chosen: Callable[[QuantModule], bool] = lambda module: True, dtype: torch.dtype | None = None
) -> list[str]:
    """Replace quantized modules inside of `model` by their float forms, in place.

    Modules that share a packed weight share the float parameter. Experts whose stacks are all float become transformers' module again.

    Args:
        is_chosen: Which of the quantized modules are replaced.
        dtype: Of the float weights; by default each module's own.

    Returns:
        The names of the replaced modules.

    Raises:
        UnsupportedError: A chosen module has no float form; then nothing has changed.
    """
    modules = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name and isinstance(module, QuantModule)]
    chosen = {name: module for name, module in modules if is_chosen(module)}
    for module in chosen.values():
        check_convertible(module, with_group=len(chosen) == len(modules))
    weights: _Weights = {}
    for name, module in chosen.items():
        model.set_submodule(name, _float_module(module, weights, dtype))
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, LowRankLinear) and name and f"{name}.{RESIDUAL}" in chosen:
            model.set_submodule(name, module.merged())
    experts = {name: module for name, module in model.named_modules() if name and isinstance(module, MixtureOfExperts)}
    collapse_(model, {name: module for name, module in experts.items() if not any(isinstance(m, QuantExperts) for m in module.modules())})
    return list(chosen)


def trainable_form(module: nn.Module) -> nn.Module:
    """The module with every quantized module in it, or itself, replaced by its float form, whose weight can be trained.

    Raises:
        UnsupportedError: A quantized module has no float form; the message says why.
    """
    if not isinstance(module, QuantModule):
        dequantize_(module)
        return module
    check_convertible(module)
    return _float_module(module, {}, None)


def check_convertible(module: QuantModule, *, with_group: bool = False) -> None:
    """Raise UnsupportedError for a quantized module that computes more than its float form would, or is part of a distributed weight.

    Args:
        with_group: All layers with which it is fused become float layers, too.
    """
    if getattr(module, PART, None) is not None:
        raise UnsupportedError(
            f"a {type(module).__name__} whose weight is distributed over processes cannot become a float layer: do it in one process, and "
            "distribute the model then"
        )
    if (
        type(module) not in _CONVERTIBLE
        and getattr(module, "float_class", None) is None
        and not (with_group and isinstance(module, FusedLinear))
    ):
        raise UnsupportedError(
            f"a {type(module).__name__} is fused with other layers and cannot become a float layer: load the model again, and do it before "
            "fuse_ or optimize_"
        )


def _float_module(module: QuantModule, weights: _Weights, dtype: torch.dtype | None) -> nn.Module:
    """The float module that `module` replaced; `weights` has the parameters made so far, by the address of the packed weight and
    its place among fused ones."""
    key = module.packed.data.data_ptr(), module.index if isinstance(module, FusedLinear) else 0  # fused layers share their bytes
    if key not in weights:
        weights[key] = nn.Parameter(module.weight.clone().to(dtype or module.dtype))
    weight, float_module = weights[key], _skeleton(module, weights[key])
    if not (isinstance(module, QuantExperts) or module.transposed):
        float_module.weight = weight
        if not isinstance(module, QuantEmbedding | QuantEmbeddingBag):
            float_module.bias = module.bias
    keep_hooks(module, float_module)
    return float_module.train(module.training)


def _skeleton(module: QuantModule, weight: nn.Parameter) -> nn.Module:
    """The float module without its weight on the meta device; a Conv1D of transformers and experts already with it."""
    if isinstance(module, QuantExperts):
        return StackedExperts(weight, module.transposed)
    if module.transposed:
        return conv1d(weight, module.bias)  # type: ignore[arg-type]
    if isinstance(module, QuantLinear):
        return nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    if isinstance(module, QuantEmbedding):
        form = nn.Embedding if module.embed_scale is None else ScaledEmbedding
        float_module = form(module.num_embeddings, module.embedding_dim, module.padding_idx, device="meta")
        if module.embed_scale is not None:
            set_factor(float_module, module.embed_scale)
        return float_module
    if isinstance(module, QuantEmbeddingBag):
        return nn.EmbeddingBag(
            module.num_embeddings,
            module.embedding_dim,
            mode=module.mode,
            padding_idx=module.padding_idx,
            include_last_offset=module.include_last_offset,
            device="meta",
        )
    assert isinstance(module, QuantConv2d)
    more = {"output_padding": module.output_padding} if isinstance(module, QuantConvTranspose2d) else {}
    return float_skeleton(
        module,
        in_channels=module.in_channels,
        out_channels=module.out_channels,
        kernel_size=module.kernel_size,
        stride=module.stride,
        padding=module.padding,
        dilation=module.dilation,
        groups=module.groups,
        bias=False,
        padding_mode=module.padding_mode,
        device="meta",
        **more,
    )
