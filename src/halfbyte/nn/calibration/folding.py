"""Finds the modules that can divide the input channels of a linear layer by a scale at no cost, so that its weight may be multiplied
by that scale.

Two kinds of module can: a norm whose output the layer reads, by its weight and bias; and a linear layer whose outputs reach this one
channel by channel, by rows of its weight (up_proj before down_proj, v_proj before o_proj, also where several heads share one v).

The search does not depend on names. The decoder layer is run and traced: which layers read the output of a norm, and which linear layers
ran before within the same module. Each possible fold is then tried on a copy with random scales, and kept if the outputs of the decoder
layer and of all its linear layers do not change. So every fold that is used is correct, whatever the architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

_TOLERANCE = 1e-3  # relative, of outputs in float32; a wrong fold by factors of e^±0.5 changes them by tenths


@dataclass(frozen=True, eq=False, slots=True)
class Fold:
    """A way to divide the input of `consumers`, linear layers and stacks of experts that read the same tensor of K channels.

    producer  the module that divides
    kind      "norm": y = n * w + b;  "shifted": y = n * (1 + w) + b;  "linear": its last C rows
    channel   int64 [K] in [0, C): which output of the producer each channel comes from
    followers  routers that read the tensor too, whose weights [E, K] are multiplied in floating point
    """

    producer: str
    kind: Literal["norm", "shifted", "linear"]
    channel: Tensor
    consumers: tuple[str, ...]
    followers: tuple[str, ...] = ()

    def apply(self, block: nn.Module, scale: Tensor, dtypes: Mapping[str, torch.dtype]) -> tuple[Tensor, dict[str, Tensor]]:
        """Divide the producer in `block`, a float32 module, and multiply the weights of the consumers.

        scale   [K], above 0, equal for columns of the same channel
        dtypes  of the producer's parameters in the model, by name, to which their new values are rounded

        Returns the scale that was used, and the new values of parameters that stay in floating point, by name. For norms the scale is
        adjusted slightly, so that it matches their rounded weights exactly.
        """
        producer = block.get_submodule(self.producer)
        weight, bias = producer.get_parameter("weight"), producer._parameters.get("bias")
        by = scale.new_ones(int(self.channel.max()) + 1).index_copy_(0, self.channel, scale)
        changed: dict[str, Tensor] = {}
        if self.kind == "linear":
            rows = slice(len(weight) - len(by), None)
            weight.data[rows] /= by.unsqueeze(-1)
        else:
            rows, one = slice(None), float(self.kind == "shifted")
            key = f"{self.producer}.weight"
            changed[key] = ((weight.data + one) / by - one).to(dtypes[key])
            old, new = weight.data + one, changed[key].to(weight.dtype) + one
            by = torch.where((new == 0) | (old == 0), 1.0, old / new)
            weight.data.copy_(torch.where(by == 1, weight.data, changed[key].to(weight.dtype)))
            changed[key] = weight.data.to(dtypes[key])
            scale = by[self.channel]
        if bias is not None:
            key = f"{self.producer}.bias"
            divided = bias.data.clone()
            divided[rows] /= by
            changed[key] = divided.to(dtypes[key])
            bias.data.copy_(changed[key])
        for name in self.consumers:
            block.get_submodule(name).get_parameter("weight").data.mul_(scale)
        for name in self.followers:
            key, weight = f"{name}.weight", block.get_submodule(name).get_parameter("weight")
            changed[key] = (weight.data * scale).to(dtypes[key])
            weight.data.copy_(changed[key])
        return scale, changed


@torch.no_grad()
def find_folds(block: nn.Module, targets: Sequence[str], run: Callable[[nn.Module], Tensor]) -> list[Fold]:
    """The folds of a decoder layer, in execution order; at most one for each tensor that its linear layers read.

    block    the layer, in float32
    targets  the linear layers and stacks of experts to be quantized: no others are scaled or divided, except routers
    run      runs a copy of the layer on some input
    """
    trace = _Trace(block)
    with trace:
        reference = run(block)
    folds, generator = [], torch.Generator().manual_seed(0)
    for consumers, x in trace.readers(targets):
        for fold in _candidates(block, trace, targets, consumers, x):
            trial = deepcopy(block)
            size = int(fold.channel.max()) + 1
            scale = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").mul(0.5).exp().to(x.device)[fold.channel]
            fold.apply(trial, scale, {name: torch.float32 for name, _ in block.named_parameters()})
            with _Trace(trial) as again:
                output = run(trial)
            linears = {name for name, module in block.named_modules() if isinstance(module, nn.Linear)}
            others = linears & trace.outputs.keys() - {fold.producer}
            if same_outputs(output, reference) and all(
                same_outputs(again.outputs[name], trace.outputs[name]) for name in others if name in trace.outputs
            ):
                folds.append(fold)
                break
    return folds


class _Trace:
    """A context that records the first tensor argument and the result of each module, in the order of the calls."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def __enter__(self) -> _Trace:
        self._hooks = [module.register_forward_hook(self._hook(name)) for name, module in self.block.named_modules() if name]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            if args and isinstance(args[0], Tensor):
                self.inputs[name] = args[0]
                if isinstance(output, Tensor):
                    self.outputs[name] = output

        return hook

    def readers(self, targets: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """The targets that read the same tensor, and that tensor."""
        groups: dict[int, list[str]] = {}
        for name, x in self.inputs.items():
            if name in targets:
                groups.setdefault(id(x), []).append(name)
        yield from ((tuple(names), self.inputs[names[0]]) for names in groups.values())


def _candidates(block: nn.Module, trace: _Trace, targets: Sequence[str], consumers: tuple[str, ...], x: Tensor) -> Iterator[Fold]:
    k = x.shape[-1]
    followers = tuple(name for name, other in trace.inputs.items() if _is_view(x, other) and _routes(block.get_submodule(name), k))
    for name, output in trace.outputs.items():
        weight = block.get_submodule(name)._parameters.get("weight")
        if _is_view(x, output) and weight is not None and tuple(weight.shape) == (k,):
            for kind in ("norm", "shifted"):
                yield Fold(name, kind, torch.arange(k, device=x.device), consumers, followers)
    if not isinstance(block.get_submodule(consumers[0]), nn.Linear):  # of experts see calibrate_experts.py
        return
    parent = consumers[0].rpartition(".")[0]
    before = list(trace.inputs)[: list(trace.inputs).index(consumers[0])]
    for name in reversed(before):
        if name in targets and name.rpartition(".")[0] == parent and isinstance(block.get_submodule(name), nn.Linear):
            out = len(block.get_submodule(name).get_parameter("weight"))
            for channel in _channels(block.get_submodule(parent), k):
                if int(channel.max()) < out:
                    yield Fold(name, "linear", channel.to(x.device), consumers)


def _is_view(x: Tensor, other: Tensor) -> bool:
    """Whether both are the same rows, as [batch, tokens, K] or [rows, K]."""
    return x is other or (x.data_ptr() == other.data_ptr() and x.numel() == other.numel() and x.shape[-1] == other.shape[-1])


def _routes(module: nn.Module, k: int) -> bool:
    """Whether a module is a router: a matrix of its own, which is never quantized."""
    weight = module._parameters.get("weight")
    return not isinstance(module, nn.Linear | nn.Embedding) and weight is not None and weight.dim() == 2 and weight.shape[1] == k


def _channels(parent: nn.Module, k: int) -> Iterator[Tensor]:
    """The possible mappings of K channels to those of the producer: one to one, or query heads to the key-value heads that they share."""
    yield torch.arange(k, device="cpu")
    groups, head = getattr(parent, "num_key_value_groups", 1), getattr(parent, "head_dim", None)
    if isinstance(groups, int) and isinstance(head, int) and groups > 1 and k % (groups * head) == 0:
        yield torch.arange(k // groups, device="cpu").reshape(-1, 1, head).expand(-1, groups, -1).flatten()


def same_outputs(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are the same up to the rounding of float32."""
    return a.shape == b.shape and float((a - b).norm()) <= _TOLERANCE * float(b.norm())
