"""What computes a language model's next token, or an encoder's sequences: kernel after kernel, and for each layer that is left to
transformers the reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from halfbyte.dispatch.cpu import choose_linear
from halfbyte.dispatch.explain_gpu import described_gpu
from halfbyte.dispatch.gpu import choose_gpu, compute_of
from halfbyte.errors import ArgumentError
from halfbyte.integrations import embedding, encoding
from halfbyte.integrations.decoding_gpu import Step, steps
from halfbyte.integrations.encoder_stack import EncoderStack
from halfbyte.integrations.forwards import is_decoder_layer, one_call, why_not_native
from halfbyte.integrations.replaced import ReplacedForward
from halfbyte.integrations.stack import is_compiled_stack
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.problem import Problem
from halfbyte.machine import Gpu
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules import QuantLinear
from halfbyte.ops.decoder import MOST_SEQUENCES
from halfbyte.ops.functions import sparse_on

_CPU = "the CPU"
_FOR_CPUS = "one call is for CPUs"
_NOT_CALLED = "optimize_ has not been called"


@dataclass(frozen=True)
class Explained:
    """Modules that are computed alike. `reason`: why a layer takes the steps of transformers; its products are in `steps` then."""

    names: tuple[str, ...]
    steps: tuple[Step, ...]
    reason: str | None


@dataclass(frozen=True)
class ModelExplanation:
    """What `explain_model` found. `machine` computes one new token of each of `rows` sequences, or, of an encoder, `rows` tokens. `notes`
    are the caller's."""

    machine: str
    rows: int
    groups: tuple[Explained, ...]
    encoder: bool = False
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        groups = [asdict(group) for group in self.groups]
        return {"machine": self.machine, "encoder": self.encoder, "rows": self.rows, "groups": groups, "notes": [*self.notes]}

    def __str__(self) -> str:
        lines = [f"{self._what()}, on {self.machine}"]
        for group in self.groups:
            first, *more = group.names
            lines.append(f"{first}{f' and {len(more)} more' if more else ''}")
            if group.reason is not None:
                lines.append(f"  as transformers computes it: {group.reason}")
            width = max((len(step.name) for step in group.steps), default=0)
            lines += [
                f"  {step.name.ljust(width)}{'  ' if width else ''}{step.kernel}{f' ({step.reason})' if step.reason else ''}"
                for step in group.steps
            ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _what(self) -> str:
        plural = "s" if self.rows > 1 else ""
        if self.encoder:
            return "whole sequences" if self.machine == _CPU else f"{self.rows} token{plural}"
        return f"one new token of {self.rows} sequence{plural}{'' if self.machine == _CPU else ' with a static cache'}"


def explain_model(model: nn.Module, device: str = "cpu", rows: int = 1, *, notes: Sequence[str] = ()) -> ModelExplanation:
    """Say what computes one new token of each of `rows` sequences, or, of a model that writes no text, `rows` tokens.

    model   as `integrations.text.ready` or `open_model` gave it; where its weights are does not matter
    device  "cpu", "cuda", "cuda:1", … or the architecture of a GPU that is not here, such as "sm_90"
    notes   what the explanation is to say besides
    """
    if rows < 1:
        raise ArgumentError(f"a step is for 1 or more sequences, got {rows}: pass how many there are")
    here = None if device == "cpu" else described_gpu(device)
    encoder = not callable(getattr(model, "generate", None))
    found: dict[tuple[tuple[Step, ...], str | None], list[str]] = defaultdict(list)
    if encoder:
        for name, module in model.named_modules():
            if embedding.tables_of(module) is not None:
                found[_embedding(module, here)].append(name)
    optimized = any(isinstance(module, EncoderStack) or is_compiled_stack(module) for module in model.modules())
    layers = _encoder_layers(model) if encoder else [(name, part) for name, part in model.named_modules() if is_decoder_layer(part)]
    for name, layer in layers:
        found[(_encoder_layer if encoder else _layer)(layer, here, rows, optimized=optimized)].append(name)
    inside = tuple(f"{name}." for name, _ in layers)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and not name.startswith(inside):
            found[(Step("", _product(module, here, rows)),), None].append(name)
    groups = tuple(Explained(tuple(names), parts, reason) for (parts, reason), names in found.items())
    return ModelExplanation(_CPU if here is None else here.name, rows, groups, encoder, tuple(notes))


def _encoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those that are known, and what else stands in a list and is quantized."""
    found = dict[str, nn.Module]()
    listed = {id(part) for module in model.modules() if isinstance(module, nn.ModuleList) for part in module}
    for name, module in model.named_modules():
        layer = id(module) in listed and len([part for part in module.modules() if isinstance(part, QuantLinear)]) > 1
        if (layer or encoding.parts_of(module) is not None) and not name.startswith(tuple(f"{outer}." for outer in found)):
            found[name] = module
    return list(found.items())


def _embedding(module: nn.Module, here: Gpu | None) -> tuple[tuple[Step, ...], str | None]:
    reason = _FOR_CPUS if here is not None else embedding.why_not(module)
    if reason is None and not isinstance(module, ReplacedForward):
        reason = _NOT_CALLED
    return () if reason else (Step("", "tables and norm in one call"),), reason


def _encoder_layer(layer: nn.Module, here: Gpu | None, rows: int, *, optimized: bool) -> tuple[tuple[Step, ...], str | None]:
    parts, products = encoding.parts_of(layer), _products(layer, here, rows, whole=True)
    if parts is None:
        kinds = sorted({name.rpartition(".")[2] for name in encoding.LAYERS})
        return products, f"a {type(layer).__name__} is none of {', '.join(kinds)}"
    reason = _FOR_CPUS if here is not None else encoding.why_not_whole(layer)
    if reason is None and not optimized:
        reason = _NOT_CALLED
    if reason is not None:
        return products, reason
    kernels = {step.name: step.kernel for step in products}
    qkv = f"{parts.attention}.{'+'.join(parts.qkv)}"
    first, last = (", after the norm", "") if parts.before else ("", ", then the norm")
    return (
        Step(qkv, f"{kernels[qkv]}{first}"),
        Step("attention", f"attend_whole{', with a bias' if parts.biased else ''}"),
        Step(parts.o, f"{kernels[parts.o]}, with the residual added{last}"),
        Step(parts.up, f"{kernels[parts.up]}{first}, with GELU"),
        Step(parts.down, f"{kernels[parts.down]}, with the residual added{last}"),
    ), None


def _layer(layer: nn.Module, here: Gpu | None, rows: int, *, optimized: bool) -> tuple[tuple[Step, ...], str | None]:
    reason = why_not_native(layer, "cpu" if here is None else "cuda")
    if reason is None and not optimized:
        reason = _NOT_CALLED
    if reason is None and here is None and rows > MOST_SEQUENCES:
        reason = f"one call is for {MOST_SEQUENCES} sequences at most"
    if reason is not None:
        return _products(layer, here, rows), reason
    parts = one_call(layer) if here is None else steps(layer, here, rows)
    products = {step.name: step for step in _products(layer, here, rows)}
    # Products that keep their own kernel say which it is.
    return tuple(_with_kernel(step, products) for step in parts), None


def _with_kernel(step: Step, products: dict[str, Step]) -> Step:
    own = products.get(step.name)
    return step if own is None or step.kernel.startswith("skinny") else Step(step.name, f"{own.kernel}, {step.kernel}", step.reason)


def _products(layer: nn.Module, here: Gpu | None, rows: int, *, whole: bool = False) -> tuple[Step, ...]:
    """The quantized products of a layer, those that are computed together as one, by their last or `whole` names."""
    found: list[Step] = []
    groups: dict[int, list[tuple[str, FusedLinear]]] = defaultdict(list)
    for name, module in layer.named_modules():
        if isinstance(module, FusedLinear):
            groups[id(module.together[0])].append((name, module))
        elif isinstance(module, QuantLinear):
            found.append(Step(name if whole else name.rpartition(".")[2], _product(module, here, rows)))
    together = []
    for (name, first), *more in groups.values():
        names = name if whole else name.rpartition(".")[2], *(n.rpartition(".")[2] for n, _ in more)
        together.append(Step("+".join(names), _product(first, here, rows)))
    return (*together, *found)


def _product(linear: QuantLinear, here: Gpu | None, rows: int) -> str:
    packed = linear.together[0]
    n, k = packed.shape
    if here is None:
        return choose_linear(packed.format, linear.dtype, linear.compute, current()).taken.inner
    activation: Any = linear.activation
    sparse = sparse_on(packed, here)
    problem = Problem("linear", rows, n, k, packed.format, linear.dtype, compute_of(linear.compute), activation, sparse=sparse)
    taken = choose_gpu(problem, here).taken
    return "torch, which dequantizes the whole weight at every call" if taken is None else taken.candidate.name
