"""What peft trains besides adapters, where it is quantized: whole layers (`modules_to_save`), single tokens (`trainable_token_indices`),
and the preparation of a model for training.

A layer that is trained whole becomes float in its copy of the adapter. Trained tokens replace rows of the result of a quantized embedding,
and columns of the result of a head that shares its weight. `register` is called by adapters.py.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils import other
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn import functional

from halfbyte.errors import UnsupportedError
from halfbyte.nn.dequantized import trainable_form
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear, QuantModule
from halfbyte.nn.modules.scaled import scaled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
_HEADS = ("SEQ_CLS", "TOKEN_CLS")  # tasks whose head is new
_WRAPPED = (".token_adapter", ".base_layer", ".original_module")  # in the names of modules that peft wraps


def check_head(config: object, model: nn.Module) -> None:
    """Warn of a task with a new head that nothing trains, as peft knows its name by `modules_to_save` only."""
    task, named = getattr(config, "task_type", None), tuple(getattr(config, "modules_to_save", None) or ())
    if getattr(task, "value", task) in _HEADS and not any(name.endswith(named) for name, _ in model.named_modules()):
        warnings.warn(
            f"peft trains no head of {type(model).__name__}, which has none of {', '.join(named) or 'modules_to_save'}: name it, "
            "modules_to_save=[...]",
            stacklevel=2,
        )


def register() -> None:
    """Extend the classes and functions of peft."""
    wrapper: Any = ModulesToSaveWrapper
    tokens: Any = TrainableTokensLayer
    wrapper.update = _float_copies(wrapper.update)
    tokens.forward_adapters = _replaced_tokens(tokens.forward_adapters)
    tokens.merge = _unmerged_tokens(tokens.merge)
    rebind(other._get_module_names_tied_with_embedding, _with_quantized)
    rebind(other.prepare_model_for_kbit_training, _with_checkpointing)


def rebind(function: Callable[..., T], decorate: Callable[[Callable[..., T]], Callable[..., T]]) -> None:
    """Decorate a function of peft in each of its modules that has imported it; those imported later get it from the first."""
    decorated, function_name = decorate(function), str(function.__name__)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "peft" and vars(module).get(function_name) is function:
            setattr(module, function_name, decorated)


def _float_copies(update: Callable[..., None]) -> Callable[..., None]:
    """Replace `ModulesToSaveWrapper.update`: the copy of a module that is trained is float."""

    @wraps(update)
    def updated(self: ModulesToSaveWrapper, adapter_name: str, *args: object, **kwargs: object) -> None:
        is_new = adapter_name not in self.modules_to_save
        update(self, adapter_name, *args, **kwargs)
        if is_new and any(isinstance(module, QuantModule) for module in self.original_module.modules()):
            trainable = trainable_form(self.modules_to_save[adapter_name])
            self.modules_to_save[adapter_name] = trainable.requires_grad_(adapter_name in self.active_adapters)

    return updated


def _replaced_tokens(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace `TrainableTokensLayer.forward_adapters`: a quantized layer computes all tokens, and those that are trained are computed
    again."""

    @wraps(forward)
    def forward_adapters(self: TrainableTokensLayer, x: Tensor, active_adapters: list[str], *args: object, **kwargs: object) -> Tensor:
        base = self.base_layer
        if not isinstance(base, QuantEmbedding | QuantLinear) or self.disable_adapters or self.merged or not active_adapters:
            return forward(self, x, active_adapters, *args, **kwargs)
        self._check_overlapping_tokens(active_adapters)
        y: Tensor = base(x, *args, **kwargs)
        for name in active_adapters:
            rows, tokens = self.trainable_tokens_delta[name].to(y.dtype), torch.tensor(self.token_indices[name], device=x.device)
            y = _with_columns(y, x, rows, tokens, base) if isinstance(base, QuantLinear) else _with_rows(y, x, rows, tokens, base)
        return y

    return forward_adapters


def _with_rows(y: Tensor, ids: Tensor, rows: Tensor, tokens: Tensor, base: QuantEmbedding) -> Tensor:
    """Embeddings y [..., K] of ids [...], with those of `tokens` [T] replaced by `rows` [T, K]."""
    is_token = ids.unsqueeze(-1) == tokens
    trained = scaled(functional.embedding(is_token.int().argmax(-1), rows), base.embed_scale)
    return torch.where(is_token.any(-1, keepdim=True), trained, y)


def _with_columns(y: Tensor, x: Tensor, rows: Tensor, tokens: Tensor, base: QuantLinear) -> Tensor:
    """Logits y [..., N] of x [..., K], with those of `tokens` [T] computed from `rows` [T, K]."""
    bias = None if base.bias is None else base.bias[tokens]
    return y.index_copy(-1, tokens, functional.linear(x.to(y.dtype), rows, bias))


def _unmerged_tokens(merge: Callable[..., None]) -> Callable[..., None]:
    """Replace `TrainableTokensLayer.merge`: refused, as rows of a quantized weight cannot be set."""

    @wraps(merge)
    def merged(self: TrainableTokensLayer, *args: object, **kwargs: object) -> None:
        if isinstance(self.base_layer, QuantModule):
            raise UnsupportedError(
                "trained tokens cannot be merged into a quantized weight: keep the adapter apart, or load it onto the float model, "
                "PeftModel.from_pretrained(model.dequantize(), folder), and merge it there"
            )
        merge(self, *args, **kwargs)

    return merged


def _with_quantized(tied_names: Callable[[nn.Module], list[str]]) -> Callable[[nn.Module], list[str]]:
    """Replace `_get_module_names_tied_with_embedding`: quantized layers that share the embedding's weight, which transformers does not
    tie."""

    @wraps(tied_names)
    def names_of(model: Any) -> list[str]:
        names: list[str] = tied_names(model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        model = model.model if hasattr(model, "tuner_layer_cls") else model
        inside = model.get_input_embeddings().modules() if hasattr(model, "get_input_embeddings") else ()
        weights = {module.packed.data.data_ptr() for module in inside if isinstance(module, QuantEmbedding)}
        for name, module in model.named_modules():
            if isinstance(module, QuantLinear) and module.packed.data.data_ptr() in weights:
                names += [name for name in [_unwrapped(name)] if name not in names]
        return names

    return names_of


def _unwrapped(name: str) -> str:
    """The name that a module had before peft wrapped it."""
    for part in _WRAPPED:
        name = name.partition(part)[0]
    return name


def _with_checkpointing(prepare: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """Replace `prepare_model_for_kbit_training`: gradient checkpointing is enabled, as for the methods that peft knows."""

    @wraps(prepare)
    def prepared(
        model: Any,
        use_gradient_checkpointing: bool = True,
        gradient_checkpointing_kwargs: dict[str, object] | None = None,
        **kwargs: object,
    ) -> PreTrainedModel:
        model = prepare(model, use_gradient_checkpointing, gradient_checkpointing_kwargs, **kwargs)
        if use_gradient_checkpointing and any(isinstance(module, QuantModule) for module in model.modules()):
            settings = gradient_checkpointing_kwargs or {}
            if settings.get("use_reentrant", True):
                model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        return model  # type: ignore[no-any-return]

    return prepared
