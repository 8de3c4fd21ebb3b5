"""The decode step of a causal language model on a CPU, for the loop of `generate`: from tokens to logits in one native call.

It belongs to one call of `generate`, in which the model does not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.decoder.families import family_of_model
from halfbyte.decoder.family import Family
from halfbyte.integrations.transformers.decoder.live_layer import weight_of
from halfbyte.integrations.transformers.decoder.stack import compiled, is_compiled_stack
from halfbyte.integrations.transformers.decoder.token_step import Logits, TokenStep
from halfbyte.integrations.transformers.optimize.calls import CACHE, Arguments, Understood, any_value, bind, is_true, unset
from halfbyte.integrations.transformers.optimize.hooked import why_hooked
from halfbyte.integrations.transformers.optimize.replaced import name_in_transformers
from halfbyte.kernels.layer_kinds import logits_in_torch
from halfbyte.nn.modules.quantized import QuantLinear, has_global_hooks
from halfbyte.nn.parallel.parallelize import part_of
from halfbyte.ops.library import plain
from halfbyte.ops.transformer.layers import why_not_packed

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

# Arguments of a causal model's call that are understood.
ARGUMENTS: Understood = {
    **dict.fromkeys(("input_ids", "attention_mask", "position_ids", CACHE), any_value),
    **dict.fromkeys(("inputs_embeds", "labels", "per_layer_inputs"), unset),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_router_logits"), unset),
    "logits_to_keep": lambda value: type(value) is int,
    **dict.fromkeys(("return_dict", "use_cache"), is_true),
}


class ModelStep:
    """The decode step of a model."""

    def __init__(self, model: Part, step: TokenStep, logits: Logits, *, with_head: bool) -> None:
        """Make a step that ends with the model's head, or calls it (`with_head`: it is part of `step`)."""
        self._step, self._logits = step, logits
        self._head = None if with_head else model.lm_head

    @classmethod
    def of(cls, model: Part) -> ModelStep | None:
        """Make the step of a model; None if it is not computed in one native call."""
        family = family_of_model(name_in_transformers(model))
        stack = getattr(model, "model", None)
        if family is None or not is_compiled_stack(stack) or model.config is not stack.config or model.training:
            return None
        head, found = model.lm_head, compiled(stack)
        if isinstance(found, str) or has_global_hooks() or why_hooked(model) is not None or "forward" in vars(head):
            return None
        logits, weight = _logits(family, model.config), None
        if type(head) is QuantLinear:
            if part_of(head) is not None or why_not_packed([head.packed]) is not None:
                return None
            weight = weight_of(head)
        step = found.step(stack, weight, None if weight is None else logits)
        return None if step is None else cls(model, step, logits, with_head=weight is not None)

    def __call__(self, arguments: Arguments) -> Tensor | None:
        """Compute the logits [B, 1, N] of a call of the model with one token of each sequence; None if the call is of another kind."""
        call = bind((), (), arguments, ARGUMENTS)
        if call is None or torch.is_grad_enabled() or (past := call.get(CACHE)) is None:
            return None
        ids = call.get("input_ids")
        if ids is None or ids.dim() != 2 or ids.shape[1] != 1 or not plain(ids):
            return None
        y = self._step(ids, call.get("attention_mask"), call.get("position_ids"), past.layers)
        return y if y is None or self._head is None else logits_in_torch(self._head(y), self._logits)


def _logits(family: Family, config: object) -> Logits:
    """The function of a model's logits."""
    if family.logits_divisor is not None:
        return "over", getattr(config, family.logits_divisor)
    if family.logits_multiplier is not None:
        return "times", getattr(config, family.logits_multiplier)
    cap = None if family.logits_softcap is None else getattr(config, family.logits_softcap)
    return None if cap is None else ("cap", cap)
