"""Pruning a model in place: weights become 0, and stay 0 when they are quantized. Zeros of 2:4 sparse weights are left out of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from halfbyte.errors import ArgumentError, check_type
from halfbyte.formats.spec import as_format
from halfbyte.layouts.convolution import channels_first, channels_last
from halfbyte.nn.calibration.calibrate import Calibration, as_calibration, check_given
from halfbyte.nn.calibration.runs import Progress, Runs
from halfbyte.nn.candidates import candidates
from halfbyte.nn.config import Config, choose, formats_of
from halfbyte.nn.convert import check_in_place
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.kinds import FLOAT_MODULES
from halfbyte.nn.modules.conv import FloatConv, fold_of
from halfbyte.nn.modules.expanded import expanded
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear, QuantModule
from halfbyte.nn.modules.transposed import is_conv1d
from halfbyte.nn.modules.weight_view import AnyPacked, pack_like
from halfbyte.nn.report import add_notes
from halfbyte.quantizers.sparse import SPARSE_METHODS, SparseMethod, Sparsity, as_sparsity, prune

_ROWS = as_format("int8_channel")  # any format whose codes are the rows of a convolution's matrix


def prune_(
    model: nn.Module,
    sparsity: str | float | Sparsity = "2:4",
    method: SparseMethod = "magnitude",
    calibration: Calibration | Tensor | None = None,
    *,
    skip: Sequence[str] = (),
    progress: Progress | None = None,
) -> nn.Module:
    """Set weights of the Linear layers of a model to 0, by magnitude also those of its convolutions, in place.

    The weights stay in floating point: call `quantize_` afterwards; it gives zeros a code that means 0, in all formats except those with
    offsets. Embeddings, experts and weights that modules share are not pruned. The notes of `report(model)` give the number of zeros.

    Args:
        model: The float model.
        sparsity: "n:m": of m neighbours along K at most n are kept, such as "2:4"; or the fraction that becomes 0, such as 0.5.
        method: "magnitude"; or, with calibration, "wanda" or "sparsegpt" (`quantizers/sparse.py`), one decoder layer after the other.
        calibration: Token ids [passages, tokens] or a Calibration, as for `quantize_`; of its options, "sparsegpt" uses GPTQ's damping.
        skip: patterns of module names that are not pruned, as in Config.
        progress: Called with (decoder layers done, all of them, name).

    Returns:
        `model`.

    Raises:
        ArgumentError: As for `quantize_`. Nothing has changed then.

    Example:
        >>> model = hb.prune_(nn.Sequential(nn.Linear(32, 4)), "2:4")
        >>> int((model[0].weight == 0).sum())
        64
    """
    wanted = as_sparsity(sparsity)
    if method not in SPARSE_METHODS:
        raise ArgumentError(f"a method of pruning is one of {', '.join(SPARSE_METHODS)}, got {method!r}")
    learning = [name for name in SPARSE_METHODS if name != "magnitude"]
    check_given(method, calibration is not None, need=learning, use=learning, other=("magnitude",))
    check_in_place(model)
    with expanded(model, {name for name, module in model.named_modules() if is_conv1d(module)}.__contains__):
        return _prune_expanded_(model, wanted, method, calibration, skip, progress)


def drop_zeros_(model: nn.Module, sparse: bool = True) -> nn.Module:
    """Pack the 2:4 sparse weights of QuantLinear and QuantEmbedding modules again, without their zeros, in place. No code changes.

    CPUs leave zeros out by themselves; Hopper GPUs are told to by this, as it makes many rows slower (docs/engineering/sparsity.md). The
    setting stays with the model when it moves to another device; it is not saved. Call it before `fuse_`.

    Args:
        model: A quantized model.
        sparse: Whether zeros are left out; False packs them again.

    Returns:
        `model`.

    Raises:
        ArgumentError: The model was fused.

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0")
        >>> model = hb.drop_zeros_(model)
    """
    check_type(model, nn.Module, "drop_zeros_ takes a model, a torch.nn.Module", "for codes there is pack(codes, device, sparse=True)")
    if any(isinstance(module, FusedLinear) for module in model.modules()):
        raise ArgumentError("the model computes some layers together: call drop_zeros_ first, then fuse_")
    done: dict[int, AnyPacked] = {}
    for module in model.modules():
        if isinstance(module, QuantLinear | QuantEmbedding):
            old = module.packed
            if id(old.data) not in done:
                done[id(old.data)] = pack_like(replace(old, sparse=sparse), module.codes(), old.device)
            module._set_packed(done[id(old.data)])
            module.refresh()
    return model


def _prune_expanded_(
    model: nn.Module,
    wanted: Sparsity,
    method: SparseMethod,
    calibration: Calibration | Tensor | None,
    skip: Sequence[str],
    progress: Progress | None,
) -> nn.Module:
    config = Config("int8_channel", skip=skip)  # only for its choice of modules
    chosen = formats_of(choose(candidates(model), config))
    uses = Counter(id(m.weight) for m in model.modules() if isinstance(m, FLOAT_MODULES))
    prunable = nn.Linear | FloatConv if calibration is None else nn.Linear
    layers = {name: m for name, m in model.named_modules() if isinstance(m, prunable) and uses[id(m.weight)] == 1 and name in chosen}
    if not layers:
        what = "Linear or convolution" if calibration is None else "Linear"
        quantized = any(isinstance(module, QuantModule) for module in model.modules())
        remedy = "prune the float model, and quantize it then" if quantized else "pass a model that has some, and do not skip all"
        raise ArgumentError(
            f"a {type(model).__name__} has no {what} in floating point with a weight of its own for {method} to prune: {remedy}"
        )
    if calibration is None:
        pruned = {name: _by_magnitude(layer, wanted, name) for name, layer in layers.items()}
    else:
        pruned = _by_inputs(model, list(layers), wanted, method, as_calibration(calibration), progress)
    with torch.no_grad():
        for name, weight in pruned.items():
            layers[name].weight.copy_(weight)
    add_notes(
        model, [_said(pruned, wanted, method), *(f"no calibration token reaches {n}: it was not pruned" for n in layers if n not in pruned)]
    )
    return model


def _by_magnitude(layer: nn.Linear | FloatConv, wanted: Sparsity, name: str) -> Tensor:
    weight, fold = layer.weight.detach(), fold_of(layer)
    if fold is None:
        return prune(weight, wanted, "magnitude", name=f"{name}.weight")
    rows = prune(channels_last(fold.fold(weight), _ROWS), wanted, "magnitude", name=f"{name}.weight")
    return fold.unfold(channels_first(rows, fold.image_kernel))


@torch.no_grad()
def _by_inputs(
    model: nn.Module, names: Sequence[str], wanted: Sparsity, method: SparseMethod, calibration: Calibration, progress: Progress | None
) -> dict[str, Tensor]:
    """Return the pruned weights of the Linears `names`, except those that no token reaches.

    Each decoder layer is a copy, pruned for the outputs of the pruned layers before it; the model itself does not change.
    """
    runs = Runs(model, calibration.tokens, calibration.batch, calibration.device)
    pruned: dict[str, Tensor] = {}

    def shrink(linear: nn.Module, name: str, moments: Tensor) -> None:
        weight = linear.get_parameter("weight")
        weight.data = prune(weight, wanted, method, moments, damping=calibration.gptq.damping, name=f"{name}.weight")
        pruned[name] = weight.data.to(runs.home)

    for i, prefix, block, layer_names in runs.blocks(names, lambda _, layer: deepcopy(layer), progress):
        for name, moments in runs.measure(i, block, layer_names).items():
            shrink(block.get_submodule(name), f"{prefix}.{name}", moments.second)
    for name, moments in runs.outside(names).items():
        shrink(runs.in_float32(deepcopy(model.get_submodule(name))), name, moments.second)
    return pruned


def _said(pruned: Mapping[str, Tensor], wanted: Sparsity, method: SparseMethod) -> str:
    total, zeros = sum(w.numel() for w in pruned.values()), sum(int((w == 0).sum()) for w in pruned.values())
    density = 1 - zeros / max(1, total)
    return f"pruned to {wanted} by {method}: {zeros} of {total} weights in {len(pruned)} layers became 0, a density of {density:.3f}"
