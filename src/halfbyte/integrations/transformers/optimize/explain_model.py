"""`explain` of a live model of transformers: the ops of its layers and the kernel of each, and for each layer that is left to transformers
the reason.

Called by `halfbyte explain` for encoders, and for language models that `LanguageModel` does not open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from halfbyte.decoder import kernels_gpu, lower_cpu
from halfbyte.decoder.explain import Explained, Explanation
from halfbyte.decoder.program import INPUT, Lowered, Op, layer_ops, linear_op
from halfbyte.decoder.spec import LayerSpec
from halfbyte.dispatch.explain_gpu import described_gpu
from halfbyte.errors import ArgumentError
from halfbyte.integrations.transformers.decoder.live_layer import layer_spec, weight_of
from halfbyte.integrations.transformers.decoder.stack import is_compiled_stack
from halfbyte.integrations.transformers.encoder import embedding, encoding
from halfbyte.integrations.transformers.encoder.encoder_stack import EncoderStack
from halfbyte.integrations.transformers.optimize.forwards import is_decoder_layer, why_not_native
from halfbyte.integrations.transformers.optimize.replaced import ReplacedForward
from halfbyte.machine import Gpu
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.ops.transformer.decoder import MOST_SEQUENCES

_CPU = "the CPU"
_FOR_CPUS = "native calls are for CPUs"
_NOT_CALLED = "optimize_ has not been called"
_TABLES = Op("embedding", "tables, norm", None, ("ids",))


def explain_model(model: nn.Module, device: str = "cpu", rows: int = 1, *, notes: Sequence[str] = ()) -> Explanation:
    """Say what computes one new token of each of several sequences, or, of a model that writes no text, several tokens.

    Args:
        model: As `integrations.transformers.text.open_model` returns it; where its weights are does not matter.
        device: "cpu", "cuda", "cuda:1", … or the architecture of a GPU that is not here, such as "sm_90".
        rows: Number of sequences, or of tokens.
        notes: What the explanation is to say besides.
    """
    if rows < 1:
        raise ArgumentError(f"a step is for 1 or more sequences, got {rows}: pass how many there are")
    here = None if device == "cpu" else described_gpu(device)
    encoder = not callable(getattr(model, "generate", None))
    explain = _Explainer(here, rows, optimized=any(isinstance(m, EncoderStack) or is_compiled_stack(m) for m in model.modules()))
    found: dict[tuple[tuple[Lowered, ...], str | None], list[str]] = defaultdict(list)
    if encoder:
        for name, module in model.named_modules():
            if embedding.tables_of(module) is not None:
                found[explain.embedding(module)].append(name)
    layers = _encoder_layers(model) if encoder else [(name, part) for name, part in model.named_modules() if is_decoder_layer(part)]
    for name, layer in layers:
        found[(explain.encoder_layer if encoder else explain.decoder_layer)(layer)].append(name)
    inside = tuple(f"{name}." for name, _ in layers)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and not name.startswith(inside):
            found[explain.kernels([linear_op("linear", weight_of(module), INPUT)]), None].append(name)
    groups = tuple(Explained(ops, names=tuple(names), reason=reason) for (ops, reason), names in found.items())
    machine = _CPU if here is None else here.name
    dtype = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)
    plural = "s" if rows > 1 else ""
    if encoder:
        what = "whole sequences" if here is None else f"{rows} token{plural}"
    else:
        what = f"one new token of {rows} sequence{plural}{'' if here is None else ' with a static cache'}"
    return Explanation(f"{what}, on {machine}", machine, rows, dtype, groups, encoder, notes=tuple(notes))


def _encoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those that are known, and what else stands in a list and is quantized."""
    found = dict[str, nn.Module]()
    listed = {id(part) for module in model.modules() if isinstance(module, nn.ModuleList) for part in module}
    for name, module in model.named_modules():
        layer = id(module) in listed and len([part for part in module.modules() if isinstance(part, QuantLinear)]) > 1
        if (layer or encoding.family_of(module) is not None) and not name.startswith(tuple(f"{outer}." for outer in found)):
            found[name] = module
    return list(found.items())


class _Explainer:
    """Says what computes modules on a device: their ops with kernels, and why transformers computes what is around these."""

    def __init__(self, here: Gpu | None, rows: int, *, optimized: bool) -> None:
        self._here, self._rows, self._optimized = here, rows, optimized

    def embedding(self, module: nn.Module) -> tuple[tuple[Lowered, ...], str | None]:
        reason = _FOR_CPUS if self._here is not None else embedding.why_not(module)
        if reason is None and not isinstance(module, ReplacedForward):
            reason = _NOT_CALLED
        return () if reason else (Lowered(_TABLES, "embed"),), reason

    def encoder_layer(self, layer: nn.Module) -> tuple[tuple[Lowered, ...], str | None]:
        spec = encoding.layer_spec(layer)
        if isinstance(spec, str):
            return self._linears(layer), spec
        reason = _FOR_CPUS if self._here is not None else encoding.why_not_lowered(spec)
        return self._layer(layer, spec, reason)

    def decoder_layer(self, layer: nn.Module) -> tuple[tuple[Lowered, ...], str | None]:
        spec = layer_spec(layer)
        reason = why_not_native(layer, "cpu" if self._here is None else "cuda")
        if reason is None and self._here is None and self._rows > MOST_SEQUENCES:
            reason = f"native calls are for {MOST_SEQUENCES} sequences at most"
        return self._layer(layer, spec, reason)

    def _layer(self, layer: nn.Module, spec: LayerSpec | str, reason: str | None) -> tuple[tuple[Lowered, ...], str | None]:
        if reason is None and not self._optimized:
            reason = _NOT_CALLED
        if reason is not None or isinstance(spec, str):
            return self._linears(layer), reason
        return self.kernels([replace(op, layer=0) for op in layer_ops(spec)], next(layer.parameters()).dtype), None

    def kernels(self, ops: Iterable[Op], dtype: torch.dtype | None = None) -> tuple[Lowered, ...]:
        """Which kernels compute ops that belong together."""
        if self._here is None:
            return tuple(lower_cpu.layer_kernels([*ops]))
        return tuple(kernels_gpu.layer_kernels(ops, self._here, self._rows, dtype or torch.bfloat16))

    def _linears(self, layer: nn.Module) -> tuple[Lowered, ...]:
        """The quantized linear layers of a layer, those that are computed together as one."""
        dtype = next((part.dtype for part in layer.modules() if isinstance(part, QuantLinear)), None)
        return tuple(lowered for op in _linear_ops(layer) for lowered in self.kernels([op], dtype))


def _linear_ops(layer: nn.Module) -> Iterator[Op]:
    together: dict[int, list[tuple[str, QuantLinear]]] = defaultdict(list)
    for name, module in layer.named_modules():
        if isinstance(module, QuantLinear):
            together[id(module.together[0]) if isinstance(module, FusedLinear) else id(module)].append((name, module))
    for (name, first), *more in together.values():
        yield linear_op("+".join([name, *(other.rpartition(".")[2] for other, _ in more)]), weight_of(first), INPUT)
