"""Decode steps of a live model: from the newest token of each sequence to the next one, with as little Python as possible.

`Step.next` is what the loop of generating.py calls. transformers prepares the arguments of the first two steps as it always does
(`prepare_inputs_for_generation`). `StepArguments` compares these two to find what changes: the token, positions that grow by one, masks
[B, 1, 1, T] that show one token more, masks [B, t] that become longer. From then on these few arguments are advanced in place. A model
whose arguments change in another way takes transformers' preparation for each step.

`Step` calls the model, on a CPU its `native_step` where there is one. `GraphStep` (graphs.py) replays a CUDA graph of that call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from halfbyte.decoder.families import family_of_model
from halfbyte.decoder.family import Family
from halfbyte.decoder.spec import Logits
from halfbyte.errors import UnsupportedError
from halfbyte.integrations.transformers.decoder.live_ends import Head
from halfbyte.integrations.transformers.decoder.live_layer import family_of
from halfbyte.integrations.transformers.decoder.stack import CompiledStack, compiled, is_compiled_stack
from halfbyte.integrations.transformers.decoder.token_step import TokenStep
from halfbyte.integrations.transformers.generate.request import Request
from halfbyte.integrations.transformers.optimize.calls import CACHE, Arguments, Understood, any_value, bind, cache_name, is_true, unset
from halfbyte.integrations.transformers.optimize.hooked import why_hooked
from halfbyte.integrations.transformers.optimize.replaced import name_in_transformers, original
from halfbyte.kernels.layer_kinds import logits_in_torch
from halfbyte.nn.modules.quantized import has_global_hooks
from halfbyte.ops.modes import plain
from halfbyte.ops.transformer.weights import Weight

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

    from halfbyte.integrations.transformers.modules import Config, Part

TOKEN = "input_ids"
# Arguments of a causal model's call that are understood.
ARGUMENTS: Understood = {
    **dict.fromkeys(("input_ids", "attention_mask", "position_ids", CACHE), any_value),
    **dict.fromkeys(("inputs_embeds", "labels", "per_layer_inputs"), unset),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_router_logits"), unset),
    "logits_to_keep": lambda value: type(value) is int,
    **dict.fromkeys(("return_dict", "use_cache"), is_true),
}


class Step:
    """The decode steps of one call of `generate`, in which the model does not change.

    Attributes:
        choose: Chooses tokens.
        first: The first tokens after the prompt, [B].
    """

    def __init__(self, request: Request, outputs: ModelOutput) -> None:
        """Begin after the prompts of a call, from the outputs of the model's call that read them."""
        model = self._model = request.model
        self.choose, self._cached = request.choose, request.cached
        self.first, self._has_begun = self.choose(request.ids, outputs["logits"][:, -1]), False
        self._arguments: Arguments = model._update_model_kwargs_for_generation(outputs, request.arguments)
        self._native = native_step(model) if model.device.type == "cpu" else None
        self._unprepared = 0  # steps that `_arguments` do not count yet, as transformers has not prepared them
        self._before: Arguments | None = None  # the arguments of the last step that transformers has prepared
        self._inputs: StepArguments | None = None  # once it is known how arguments change
        # Whether transformers prepares each step: of caches of fixed size, masks change in another way once a window is full.
        self._prepare_each: bool = getattr(self._arguments[cache_name(self._arguments)], "is_compileable", False)

    def prepared(self, ids: Tensor) -> Arguments:
        """Return the arguments of the first step, as transformers prepares them. ids: The prompt, [B, t]."""
        ids = torch.cat((ids, self.first[:, None]), 1)
        arguments: Arguments = self._model.prepare_inputs_for_generation(ids, next_sequence_length=1, **self._arguments)
        return arguments

    def next(self, ids: Tensor, *, launch_ahead: bool) -> Tensor:
        """Return the next tokens [B], on the host.

        Args:
            ids: All tokens so far [B, t], on the host.
            launch_ahead: Whether the step after the next tokens may be launched before the host has read these.
        """
        if self._has_begun:
            return self._next_tokens(ids, ids[:, -1])
        self._has_begun = True
        return self.first

    def _next_tokens(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Return the tokens [B] that follow all tokens so far, ids [B, t], of which the last column is `tokens`."""
        if self._inputs is None:
            self._prepare(ids)
        if self._inputs is not None:
            self._unprepared += 1
            return self._decode(ids, tokens)
        assert self._before is not None
        outputs = self._model(**self._before, return_dict=True)
        self._arguments = self._model._update_model_kwargs_for_generation(outputs, self._arguments)
        return self.choose(ids, outputs.logits[:, -1])

    def close(self) -> None:
        """Free what the steps hold."""

    def _length(self, ids: Tensor) -> int:
        """Return the number of tokens in the cache before a step. ids: All tokens so far."""
        return ids.shape[1] - 1 + self._cached

    def _prepare(self, ids: Tensor) -> None:
        """Prepare a step as transformers does; the second time in a row, compare with the first to make `_inputs`."""
        if self._unprepared:
            self._arguments = self._model._update_model_kwargs_for_generation({}, self._arguments, num_new_tokens=self._unprepared)
            self._unprepared = 0
        before = self._before
        self._before = self._model.prepare_inputs_for_generation(ids, next_sequence_length=1, **self._arguments)
        if before is None or self._prepare_each:
            return
        try:
            self._inputs = StepArguments(before, self._before, self._length(ids))
        except UnsupportedError as error:
            self.refuse(str(error))
        else:
            self._before = None

    def refuse(self, reason: str) -> None:
        """Let transformers prepare each step from now on."""
        self._prepare_each, self._inputs = True, None

    def _decode(self, ids: Tensor, tokens: Tensor) -> Tensor:
        return self.choose(ids, self._compute_logits(tokens))

    def _compute_logits(self, tokens: Tensor) -> Tensor:
        """Compute the model's logits [B, N] after tokens [B], which enter the cache, from arguments that are advanced in place."""
        assert self._inputs is not None
        self._inputs.advance(tokens)
        native = None if self._native is None else self._native(self._inputs.values)
        logits: Tensor = self._model(**self._inputs.values, return_dict=True).logits if native is None else native
        return logits[:, -1]


def native_step(model: Part) -> Callable[[Arguments], Tensor | None] | None:
    """Return the decode step of a causal language model on a CPU as one native call; None for models that have none.

    The step takes the arguments of a call of the model, which must not have changed, and returns the logits [B, 1, N]; None for a call of
    another kind than one token of each sequence with a cache.
    """
    live = LiveModel.of(model)
    if live is None or why_hooked(model) is not None:
        return None
    head, logits = live.head, live.logits
    ends_with_logits = head is not None and isinstance(head.weight, Weight)
    step = live.stack.lowered(*((head, logits) if ends_with_logits else (None, None)), on_cpu=True)
    if not isinstance(step, TokenStep):
        return None

    def compute(arguments: Arguments) -> Tensor | None:
        call = bind((), (), arguments, ARGUMENTS)
        if call is None or torch.is_grad_enabled() or (past := call.get(CACHE)) is None:
            return None
        ids = call.get("input_ids")
        if ids is None or ids.dim() != 2 or ids.shape[1] != 1 or not plain(ids):
            return None
        y = step(ids, call.get("attention_mask"), call.get("position_ids"), past.layers)
        return y if y is None or ends_with_logits else logits_in_torch(model.lm_head(y), logits)

    return compute


class LiveModel(NamedTuple):
    """A causal language model that consists of a compiled stack, an output embedding, and perhaps parts that embed images.

    Attributes:
        stack: The compiled stack.
        head: The output embedding; None where it is no linear layer by itself.
        logits: Function of the logits.
    """

    stack: CompiledStack
    head: Head | None
    logits: Logits

    @classmethod
    def of(cls, model: Part) -> LiveModel | None:
        """Return what a model consists of, as it is now; None where it has other parts, or is in training."""
        stack = _stack_of(model)
        if stack is None or model.training or has_global_hooks():
            return None
        now, family = compiled(stack), family_of(stack.layers[0])
        if isinstance(now, str) or family is None:
            return None
        return cls(now, Head.of(model.lm_head), _logits(model, family, stack.config))


def _stack_of(model: Part) -> Part | None:
    """Return the compiled stack of a model; None where the model has other parts than those of `LiveModel`."""
    inner = getattr(model, "model", None)
    stack = getattr(inner, "language_model", inner)
    if not is_compiled_stack(stack) or model.config.get_text_config(decoder=True) is not stack.config:
        return None
    name, family = name_in_transformers(model), family_of(stack.layers[0])
    if stack is inner:
        return stack if family_of_model(name) is family is not None else None
    module = name_in_transformers(stack.layers[0]).rpartition(".")[0]
    return stack if name.startswith(f"{module}.") and name.endswith("ForConditionalGeneration") else None


def _logits(model: Part, family: Family, config: Config) -> Logits:
    """The function of a model's logits. Models of images may lack that of their family's text models: their forward does not read it."""
    read = None if model.config is config else inspect.unwrap(original(model).forward).__code__.co_names  # type: ignore[attr-defined]
    for function, name in family.logits:
        if (read is None or name in read) and (constant := getattr(config, name)) is not None:
            return function, constant
    return None


class StepArguments:
    """Arguments of a model's call that are advanced from one decode step to the next, in place.

    Attributes:
        values: The arguments.
        same_shapes: Whether no argument changes its shape, so that a CUDA graph can read them.
    """

    def __init__(self, before: Arguments, after: Arguments, at: int) -> None:
        """Find how arguments change.

        Args:
            before, after: Of two consecutive steps; `values` begin as those of the first.
            at: Index of the token of the second step in the text.

        Raises:
            UnsupportedError: They change in a way that is not known.
        """
        if before.keys() != after.keys() or TOKEN not in after or tuple(after[TOKEN].shape[1:]) != (1,):
            raise UnsupportedError("a step has other arguments than the one before")
        self.values = dict(after)
        self.same_shapes = True
        self._index = torch.full((1,), at - 1, device=after[TOKEN].device)  # of the last token
        self._advances: list[Callable[[], object]] = []
        for name, value in after.items():
            if name != TOKEN:
                self._compare(self.values, name, before[name], value, at)
        self.values[TOKEN] = torch.empty_like(after[TOKEN])

    def advance(self, tokens: Tensor) -> None:
        """Change the arguments to those of the next step, which decodes tokens [B]."""
        self.values[TOKEN].copy_(tokens[:, None])
        self._index += 1
        for advance in self._advances:
            advance()

    def _compare(self, values: Arguments, name: str, before: object, after: object, at: int) -> None:
        if isinstance(after, dict) and isinstance(before, dict) and before.keys() == after.keys():  # masks of several kinds of layers
            inner = values[name] = dict(after)
            for key, value in after.items():
                self._compare(inner, key, before[key], value, at)
        elif isinstance(after, Tensor) and isinstance(before, Tensor):
            if before is not after:
                self._compare_tensors(values, name, before, after, at)
        elif before is not after and before != after:
            raise UnsupportedError(f"its {name} changes from token to token")

    def _compare_tensors(self, values: Arguments, name: str, before: Tensor, after: Tensor, at: int) -> None:
        longer = after.dim() == 2 and after.shape == (before.shape[0], before.shape[1] + 1) and torch.equal(before, after[:, :-1])
        if before.shape == after.shape and torch.equal(before, after):
            return
        snapshot, last = before.clone(), self._index  # no `self` in what is kept: a cycle would keep the cache until garbage is collected
        values[name] = snapshot
        if longer and bool((after[:, -1] == 1).all()):
            self.same_shapes = False
            self._advances.append(lambda: values.update({name: torch.cat((values[name], torch.ones_like(snapshot[:, :1])), 1)}))
        elif before.shape != after.shape:
            raise UnsupportedError(f"its {name} changes its shape from token to token")
        elif after.dtype in (torch.int64, torch.int32) and torch.equal(before + 1, after):
            self._advances.append(lambda: snapshot.add_(1))
        elif after.dim() == 4 and at < after.shape[-1] and torch.equal(_seen(before, at), after):
            self._advances.append(lambda: snapshot.index_fill_(-1, last, _visible(snapshot)))
        elif after.dim() == 4 and torch.equal(_rolled(before), after):
            self._advances.append(lambda: snapshot.copy_(_rolled(snapshot)))
        else:
            raise UnsupportedError(f"its {name} changes from token to token in a way that is not known")


def _visible(mask: Tensor) -> bool | int:
    """Return the value with which a mask, bool or added to scores, shows a token."""
    return True if mask.dtype == torch.bool else 0


def _seen(mask: Tensor, at: int) -> Tensor:
    """Return a mask that shows one token more."""
    mask = mask.clone()
    mask[..., at] = _visible(mask)
    return mask


def _rolled(mask: Tensor) -> Tensor:
    """Return the mask of a sliding window after it has moved by one token."""
    return torch.cat((mask[..., 1:], torch.full_like(mask[..., :1], _visible(mask))), -1)
