"""Runs a language model's decoder layers one after the other on a text, and measures the inputs of their linear layers.

The text's tokens go through the embeddings once. After that only the hidden states before the next layer are kept, and for each layer
the other arguments with which the model calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from halfbyte.errors import ArgumentError, HalfbyteError, UnsupportedError

Copy = Callable[[str, nn.Module], nn.Module]  # (name, module of the model) -> a copy of it that has data
Progress = Callable[[int, int, str], object]  # (layers done, all of them, name)


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """(name, list) of the decoder layers: of all nn.ModuleList the one with the most parameters."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise UnsupportedError(f"{type(model).__name__} has no nn.ModuleList of layers to calibrate: use mse or hqq without calibration")
    return max(lists, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))


class Moments:
    """Moments of the inputs of linear layers that read the same tensor: second = sum(x x^T) [K, K], first = sum(|x|) [K], float32."""

    def __init__(self, k: int, device: torch.device) -> None:
        self.second = torch.zeros(k, k, device=device, dtype=torch.float32)
        self.first = torch.zeros(k, device=device, dtype=torch.float32)
        self.count = 0

    def add(self, x: Tensor) -> None:
        """x [..., K]"""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self.second.addmm_(rows.T, rows)
        self.first += rows.abs().sum(dim=0)
        self.count += len(rows)

    def expected(self) -> Tensor:
        """An estimate of the expectation of `second`, up to a factor: float32 [K, K].

        The smallest eigenvalues of the moments of n tokens in K dimensions are too small and the largest too large, so codes overfit to
        these tokens: with n near K they are worse than without calibration. So the moments are shrunk towards a multiple of the
        identity with the same trace, as in Ledoit, Wolf: A well-conditioned estimator for large-dimensional covariance matrices
        (2004), here with the weight K / n.
        """
        drawn = self.second.clone()
        drawn.diagonal().add_(len(drawn) / max(1, self.count) * float(drawn.diagonal().mean()))
        return drawn

    def divide(self, scale: Tensor) -> None:
        """Update the moments to inputs divided by `scale` [K]."""
        self.second /= torch.outer(scale, scale)
        self.first /= scale


class _Stop(Exception):
    """Ends a forward pass early."""


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """A context in which `model` is in evaluation; afterwards each of its modules is in the mode that it was in."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def takes_tokens(model: nn.Module) -> Iterator[None]:
    """A context in which `model` is called with only token ids; its errors become ArgumentError: it may need images or two sequences."""
    try:
        yield
    except HalfbyteError:
        raise
    except (ValueError, TypeError, AttributeError) as e:
        why = " ".join(str(e).split())[:200]
        raise ArgumentError(
            f"calibration calls a model with token ids only, and {type(model).__name__} does not run on those ({why}): use mse or hqq"
        ) from e


class Runs:
    """Forward passes over the calibration tokens: hidden states before the next layer, and the other arguments of each layer."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, tokens: Tensor, batch: int, device: torch.device | str | None = None) -> None:
        self.model = model
        self.name, self.layers = decoder_layers(model)
        self.batches = list(tokens.split(batch))
        first = next(p for p in model.parameters() if not p.is_meta)
        self.home = first.device
        self.device = torch.device(device) if device is not None else self.home
        get_embedding = getattr(model, "get_input_embeddings", None)
        embedding = None if get_embedding is None else get_embedding()
        known = embedding.weight.shape[0] if isinstance(embedding, nn.Embedding) else torch.inf
        if int(tokens.min()) < 0 or int(tokens.max()) >= known:  # on a GPU the look-up would be a fatal error
            largest = int(tokens.max())
            raise ArgumentError(f"the calibration has tokens up to {largest}, a vocabulary of {known}: use the model's own tokenizer")
        self.hidden: list[Tensor] = []
        self.others: list[list[tuple[object, object]]] = [[] for _ in self.layers]  # of each layer, for each batch
        with takes_tokens(model):
            self._embed()

    def _embed(self) -> None:
        """Run the modules before the layers, and record the arguments of each layer without running it."""

        def record(i: int) -> Callable[..., object]:
            def forward(*args: object, **kwargs: object) -> Tensor:
                hidden, args, kwargs = _take_hidden(args, kwargs)
                self.others[i].append((args, kwargs))
                if i == 0:
                    self.hidden.append(hidden.float())
                if i == len(self.layers) - 1:
                    raise _Stop
                return hidden

            return forward

        with _forwards(self.layers, record):
            for batch in self.batches:
                self._run_model(batch)

    def _run_model(self, tokens: Tensor) -> None:
        cacheless = {"use_cache": False} if hasattr(getattr(self.model, "config", None), "use_cache") else {}
        try:
            with in_evaluation(self.model):
                self.model(tokens.to(self.home), **cacheless)
        except _Stop:
            pass
        except IndexError as e:
            raise ArgumentError(f"the calibration tokens do not fit the model ({e}): use its own tokenizer, or shorter passages") from e

    def forward(self, i: int, block: nn.Module, batch: int) -> Tensor:
        """The output of `block`, in place of layer i, for a batch of hidden states."""
        args, kwargs = self.others[i][batch]
        floats = tree_map_only(Tensor, self._as_input, (args, kwargs))
        out = block(self.hidden[batch].to(self.device), *floats[0], **floats[1])
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        return hidden

    def _as_input(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, torch.float32) if tensor.is_floating_point() else tensor.to(self.device)

    def measure(self, i: int, block: nn.Module, names: Sequence[str]) -> dict[str, Moments]:
        """Moments of the inputs of the linear layers `names` of the block; those that read one tensor share them."""
        with _Meter(block, names, self.device) as meter:
            for batch in range(len(self.batches)):
                self.forward(i, block, batch)
        return meter.moments

    def measure_experts(self, i: int, block: nn.Module, name: str, experts: range) -> list[Moments]:
        """For a stack of experts of the block: the moments of the inputs that are routed to each of `experts`."""
        weight = block.get_submodule(name).get_parameter("weight")
        moments = [Moments(weight.shape[-1], self.device) for _ in experts]

        def hook(module: nn.Module, args: tuple[Tensor, Tensor, Tensor | None]) -> None:
            x, ids, _ = args
            for e, found in zip(experts, moments, strict=True):
                chosen = ids == e
                if bool(chosen.any()):
                    found.add(x[chosen] if x.dim() > ids.dim() else x[chosen.any(dim=-1)])

        handle = block.get_submodule(name).register_forward_pre_hook(hook)
        try:
            for batch in range(len(self.batches)):
                self.forward(i, block, batch)
        finally:
            handle.remove()
        return moments

    @torch.no_grad()
    def blocks(self, names: Iterable[str], copy: Copy, progress: Progress | None) -> Iterator[tuple[int, str, nn.Module, list[str]]]:
        """Each decoder layer: its index and name, a float32 copy of it, and which of the modules `names` it has, by their names in it.

        The hidden states go through the copy afterwards, as it then is, to the next layer.
        """
        for i, layer in enumerate(self.layers):
            prefix = f"{self.name}.{i}"
            block = self.in_float32(copy(prefix, layer)).eval()
            yield i, prefix, block, [name.removeprefix(f"{prefix}.") for name in names if name.startswith(f"{prefix}.")]
            self.advance(i, block)
            if progress is not None:
                progress(i + 1, len(self.layers), prefix)

    def in_float32(self, module: nn.Module) -> nn.Module:
        return module.float().to(self.device)

    def advance(self, i: int, block: nn.Module) -> None:
        """Take the hidden states through the block."""
        for batch in range(len(self.batches)):
            self.hidden[batch] = self.forward(i, block, batch)
        self.others[i] = []

    @torch.no_grad()
    def outside(self, names: Iterable[str]) -> dict[str, Moments]:
        """Moments of the inputs of those of these linear layers that are outside of the decoder layers, after all of these have been
        advanced."""
        names = [name for name in names if not name.startswith(f"{self.name}.")]
        if not names:
            return {}
        hidden = iter(self.hidden)

        def deliver(i: int) -> Callable[..., object]:
            def forward(*args: object, **kwargs: object) -> Tensor:
                passed, _, _ = _take_hidden(args, kwargs)
                return next(hidden).to(passed) if i == len(self.layers) - 1 else passed

            return forward

        with _forwards(self.layers, deliver), _Meter(self.model, names, self.device) as meter:
            for tokens in self.batches:
                meter.waiting = set(names)
                self._run_model(tokens)
        return meter.moments


class _Meter:
    """Collects the moments of the inputs of some linear layers while their model runs.

    waiting  the run ends when the last of these has been called
    """

    def __init__(self, root: nn.Module, names: Sequence[str], device: torch.device) -> None:
        self.root, self.names, self.device = root, list(names), device
        self.moments: dict[str, Moments] = {}
        self.waiting: set[str] = set()
        self._owner: dict[str, str] = {}  # of each layer, whose moments are its own: the first that read the same tensor
        self._last: tuple[Tensor, str] | None = None

    def __enter__(self) -> _Meter:
        self._hooks = [self.root.get_submodule(name).register_forward_pre_hook(self._hook(name)) for name in self.names]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._read(name, args[0])
            if name in self.waiting:
                self.waiting.remove(name)
                if not self.waiting:
                    raise _Stop

        return hook

    def _read(self, name: str, x: Tensor) -> None:
        if name not in self._owner:
            self._owner[name] = self._last[1] if self._last is not None and self._last[0] is x else name
            self.moments[name] = self.moments.get(self._owner[name]) or Moments(x.shape[-1], self.device)
        if self._owner[name] == name:
            self.moments[name].add(x.to(self.device))
            self._last = (x, name)


def _take_hidden(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[Tensor, tuple[object, ...], dict[str, object]]:
    """Split the arguments of a layer into the hidden states and the others."""
    if args:
        return cast(Tensor, args[0]), args[1:], dict(kwargs)
    return cast(Tensor, kwargs["hidden_states"]), (), {key: value for key, value in kwargs.items() if key != "hidden_states"}


@contextmanager
def _forwards(layers: nn.ModuleList, make: Callable[[int], Callable[..., object]]) -> Iterator[None]:
    """A context in which make(i) replaces the forward of layer i, whose attributes remain accessible."""
    before = [vars(layer).get("forward") for layer in layers]
    try:
        for i, layer in enumerate(layers):
            vars(layer)["forward"] = make(i)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del vars(layer)["forward"]
            if forward is not None:
                vars(layer)["forward"] = forward
