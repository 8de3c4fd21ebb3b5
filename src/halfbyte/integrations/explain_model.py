"""What computes a language model's next token: kernel after kernel, and for each layer that is left to transformers the reason."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from halfbyte.dispatch.explain_gpu import described_gpu
from halfbyte.dispatch.gpu import choose_gpu_linear, compute_of
from halfbyte.dispatch.rules import choose_linear
from halfbyte.errors import ArgumentError
from halfbyte.integrations.decoding import Step, is_decoder_layer, is_short, one_call, steps, why_not_short
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.problem import Problem
from halfbyte.machine import Gpu
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules import QuantLinear
from halfbyte.ops.decoder import MOST_ROWS

_CPU = "the CPU"


@dataclass(frozen=True)
class Explained:
    """Modules that are computed alike. `reason`: why a layer takes the steps of transformers; its products are in `steps` then."""

    names: tuple[str, ...]
    steps: tuple[Step, ...]
    reason: str | None


@dataclass(frozen=True)
class ModelExplanation:
    """What `explain_model` found. `machine` computes one new token of each of `rows` sequences."""

    machine: str
    rows: int
    groups: tuple[Explained, ...]

    def to_json(self) -> dict[str, Any]:
        return {"machine": self.machine, "rows": self.rows, "groups": [asdict(group) for group in self.groups]}

    def __str__(self) -> str:
        cache = "" if self.machine == _CPU else " with a static cache"
        lines = [f"one new token of {self.rows} sequence{'s' if self.rows > 1 else ''}{cache}, on {self.machine}"]
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
        return "\n".join(lines)


def explain_model(model: nn.Module, device: str = "cpu", rows: int = 1) -> ModelExplanation:
    """Say what computes one new token of each of `rows` sequences.

    model   as `integrations.text.ready` or `open_model` gave it; where its weights are does not matter
    device  "cpu", "cuda", "cuda:1", … or the architecture of a GPU that is not here, such as "sm_90"
    """
    if rows < 1:
        raise ArgumentError(f"a step is for 1 or more sequences, got {rows}")
    here = None if device == "cpu" else described_gpu(device)
    found: dict[tuple[tuple[Step, ...], str | None], list[str]] = defaultdict(list)
    layers = [(name, module) for name, module in model.named_modules() if is_decoder_layer(module)]
    for name, layer in layers:
        found[_layer(layer, here, rows)].append(name)
    inside = tuple(f"{name}." for name, _ in layers)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and not name.startswith(inside):
            found[(Step("", _product(module, here, rows)),), None].append(name)
    groups = tuple(Explained(tuple(names), parts, reason) for (parts, reason), names in found.items())
    return ModelExplanation(_CPU if here is None else here.name, rows, groups)


def _layer(layer: nn.Module, here: Gpu | None, rows: int) -> tuple[tuple[Step, ...], str | None]:
    reason = why_not_short(layer, "cpu" if here is None else "cuda")
    if reason is None and not is_short(layer):
        reason = "shorten_ has not been called"
    if reason is None and here is None and rows > MOST_ROWS:
        reason = f"one call is for {MOST_ROWS} tokens at most"
    if reason is not None:
        return _products(layer, here, rows), reason
    parts = one_call() if here is None else steps(layer, here, rows)
    products = {step.name: step for step in _products(layer, here, rows)}
    # Products that keep their own kernel say which it is.
    return tuple(_with_kernel(step, products) for step in parts), None


def _with_kernel(step: Step, products: dict[str, Step]) -> Step:
    own = products.get(step.name)
    return step if own is None or step.kernel.startswith("skinny") else Step(step.name, f"{own.kernel}, {step.kernel}", step.reason)


def _products(layer: nn.Module, here: Gpu | None, rows: int) -> tuple[Step, ...]:
    """The quantized products of a layer, those that are computed together as one."""
    found: list[Step] = []
    groups: dict[int, list[tuple[str, FusedLinear]]] = defaultdict(list)
    for name, module in layer.named_modules():
        if isinstance(module, FusedLinear):
            groups[id(module.together[0])].append((name, module))
        elif isinstance(module, QuantLinear):
            found.append(Step(name.rpartition(".")[2], _product(module, here, rows)))
    together = [Step("+".join(n.rpartition(".")[2] for n, _ in parts), _product(parts[0][1], here, rows)) for parts in groups.values()]
    return (*together, *found)


def _product(linear: QuantLinear, here: Gpu | None, rows: int) -> str:
    packed = linear.together[0] if isinstance(linear, FusedLinear) else linear.packed
    n, k = packed.shape
    if here is None:
        return choose_linear(packed.format, linear.dtype, linear.compute, current()).taken.inner
    activation: Any = linear.activation
    problem = Problem("linear", rows, n, k, packed.format, linear.dtype, compute_of(linear.compute), activation)
    taken = choose_gpu_linear(problem, here).taken
    return "torch, which dequantizes the whole weight at every call" if taken is None else taken.candidate.name
