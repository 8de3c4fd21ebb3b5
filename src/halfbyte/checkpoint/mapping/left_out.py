"""Tensors of a model's files that the model does not have: which ones it computes the same without; all others are refused.

Called by plan.py for architectures of transformers, whose `from_pretrained` warns of such tensors and drops them all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from halfbyte.checkpoint.entries import Entries
from halfbyte.checkpoint.mapping.architecture import Step
from halfbyte.errors import CheckpointError
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.candidates import direct_tensors, named_tensors

# Scales of caches and of activations, which are not used; stacks of experts have the latter behind the name of their weight.
CACHE_PARTS = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point", "q_zero_point")
RUN_TIME = re.compile(rf".*(\.|_)(input_scale|input_scale_ub|activation_scale|output_scale)|.*\.({'|'.join(CACHE_PARTS)})")
# Buffers that models of older versions saved, and compute since.
_COMPUTED = re.compile(
    r"(^|.*\.)((original_)?inv_freq|cos_cached|sin_cached|position_ids|token_type_ids|masked_bias|causal_mask|relative_position_index|version)"
)


def left_out(model: nn.Module, steps: Sequence[Step], unused: Mapping[str, str], files: Entries) -> dict[str, str]:
    """Return why each unused tensor does not matter to what the model computes.

    Args:
        model: On the meta device.
        steps: Which tensors of the model are built from which of the files.
        unused: The other tensors of the files: name there -> name in the model.
        files: To compare tensors, and to read biases.

    Raises:
        CheckpointError: One matters: the model has its module, but no such tensor, or has it from another tensor of the files.
    """
    sources = {target: step.sources[0] for step in steps for target in step.targets}
    from_files = {id(tensor) for name, _, tensor in named_tensors(model) if name in sources}
    reasons, without_place = {}, []
    for name, target in unused.items():
        if (used := sources.get(target)) is not None:
            if not files.same(name, used):
                raise CheckpointError(f"the files have both {used} and {name} for {target}, which differ: remove one of them")
            reasons[name] = f"equal to {used}"
        elif (reason := _why_harmless(model, name, target, files)) is not None:
            reasons[name] = reason
        elif any(id(tensor) not in from_files for _, tensor in direct_tensors(_innermost(model, target)[1])):
            reasons[name] = f"{type(model).__name__} does not use it"  # the plan then raises for what is missing in its place
        else:
            without_place.append(name)
    if without_place:
        first, more = without_place[0], f" and {len(without_place) - 1} more" if len(without_place) > 1 else ""
        at = type(_innermost(model, unused[first])[1]).__name__
        raise CheckpointError(
            f"the files have {first}{more}, for which the {at} of {type(model).__name__} has no place, so that the model would compute "
            "something else: correct what config.json (or the header of a GGUF file) says of the model, or remove what is not part of it"
        )
    return reasons


def _why_harmless(model: nn.Module, name: str, target: str, files: Entries) -> str | None:
    """Return why a tensor, called `name` in the files and `target` in the model, does not matter; None where it does."""
    path, module = _innermost(model, target)
    tensor_name, spec = target.removeprefix(f"{path}."), files.specs()[name]
    if tensor_name in module._non_persistent_buffers_set or _COMPUTED.fullmatch(name) or _is_mask(name, spec):
        return "the model computes it"
    if RUN_TIME.fullmatch(name):
        return "activations and caches are not quantized statically"
    if any(re.search(pattern, each) for pattern in _ignored(model) for each in (name, target)):
        return f"{type(model).__name__} does not use it"
    # A part that this class does not have: another head, a layer beyond the last, a second model.
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or hasattr(module, "base_model_prefix"):
        return f"{type(model).__name__} does not have it"
    if tensor_name == "bias" and not bool(files.read(name).any()):
        return "a bias of zeros"
    return None


def _innermost(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """Return the innermost module of the model that a tensor of this name would be in, with its path."""
    path, module = "", model
    for part in name.split(".")[:-1]:
        if (child := module._modules.get(part)) is None:
            break
        path, module = f"{path}.{part}" if path else part, child
    return path, module


def _is_mask(name: str, spec: TensorSpec) -> bool:
    """Whether it is a causal mask [1, 1, n, n], which models such as GPT-2 had as a buffer called bias."""
    return name.endswith(".bias") and len(spec.shape) == 4 and spec.shape[:2] == (1, 1) and spec.shape[2] == spec.shape[3]


def _ignored(model: nn.Module) -> Sequence[str]:
    """Return the patterns of names that the model's class declares superfluous."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    return [each for each in patterns if isinstance(each, str)] if isinstance(patterns, list | set | tuple) else []
