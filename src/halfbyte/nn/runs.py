"""A language model's decoder layers on a text, one after the other, and what their linear layers are called with.

The text's tokens go through the embeddings once. From then on there are the hidden states before the next layer, and for each layer the
other arguments that the model calls it with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from halfbyte.errors import ArgumentError, HalfbyteError, UnsupportedError


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of layers that hidden states go through one after the other: of all nn.ModuleList that with the most parameters."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise UnsupportedError(
            f"{type(model).__name__} has no nn.ModuleList of layers, through which calibration goes: use mse or hqq without it"
        )
    return max(lists, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))


class Moments:
    """Of the inputs of linear layers that read the same tensor: second = sum(x x^T) [K, K], first = sum(|x|) [K], float32."""

    def __init__(self, k: int, device: torch.device) -> None:
        self.second = torch.zeros(k, k, device=device)
        self.first = torch.zeros(k, device=device)
        self.count = 0

    def add(self, x: Tensor) -> None:
        """x [..., K]"""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self.second.addmm_(rows.T, rows)
        self.first += rows.abs().sum(dim=0)
        self.count += len(rows)

    def expected(self) -> Tensor:
        """What `second` would be of tokens without end, up to a factor, as far as these tell: float32 [K, K].

        The moments of n tokens in K dimensions have eigenvalues that are too small and too large, and codes that are made for them are
        made for these tokens alone: with n near K they are worse than those of no calibration. So they are drawn towards a multiple of
        the identity with the same trace, as in Ledoit, Wolf: A well-conditioned estimator for large-dimensional covariance matrices
        (2004), here with the weight K / n.
        """
        drawn = self.second.clone()
        drawn.diagonal().add_(len(drawn) / max(1, self.count) * float(drawn.diagonal().mean()))
        return drawn

    def divide(self, scale: Tensor) -> None:
        """What they are when every input is divided by `scale` [K]."""
        self.second /= torch.outer(scale, scale)
        self.first /= scale


class _Stop(Exception):
    """Ends a forward pass of which no more is needed."""


@contextmanager
def takes_tokens(model: nn.Module) -> Iterator[None]:
    """Inside, `model` is given token ids alone; what it says to that is an ArgumentError: it may want images or two sequences."""
    try:
        yield
    except HalfbyteError:
        raise
    except (ValueError, TypeError, AttributeError) as e:
        why = " ".join(str(e).split())[:200]
        raise ArgumentError(
            f"calibration gives a model token ids alone, and {type(model).__name__} does not run on those ({why}): use mse or hqq"
        ) from e


class Runs:
    """Forward passes over the calibration tokens: hidden states before the next layer, and what else each layer is called with."""

    def __init__(
        self, model: nn.Module, layers: nn.ModuleList, tokens: Tensor, batch: int, device: torch.device | str | None = None
    ) -> None:
        self.model, self.layers = model, layers
        self.batches = list(tokens.split(batch))
        first = next(p for p in model.parameters() if not p.is_meta)
        self.home = first.device
        self.device = torch.device(device) if device is not None else self.home
        any_model: Any = model
        embedding = any_model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        known = embedding.weight.shape[0] if isinstance(embedding, nn.Embedding) else torch.inf
        if int(tokens.min()) < 0 or int(tokens.max()) >= known:  # a GPU would not survive the look-up
            largest = int(tokens.max())
            raise ArgumentError(f"the calibration has tokens up to {largest}, the model {known} of them: use the model's own tokenizer")
        self.hidden: list[Tensor] = []
        self.others: list[list[tuple[Any, Any]]] = [[] for _ in layers]  # of each layer, for each batch
        with takes_tokens(model):
            self._embed()

    def _embed(self) -> None:
        """Runs what comes before the layers, and lets the model hand each layer its arguments without running any."""

        def record(i: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
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
        training = self.model.training
        cacheless = {"use_cache": False} if hasattr(getattr(self.model, "config", None), "use_cache") else {}
        try:
            self.model.eval()
            self.model(tokens.to(self.home), **cacheless)
        except _Stop:
            pass
        except IndexError as e:
            raise ArgumentError(f"the calibration tokens do not fit the model ({e}): use its own tokenizer, or shorter passages") from e
        finally:
            self.model.train(training)

    def forward(self, i: int, block: nn.Module, batch: int) -> Tensor:
        """The output of `block`, in the place of layer i, for a batch of hidden states."""
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
        """Of a stack of experts of the block: moments of the inputs that are sent to each of `experts`."""
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

    def advance(self, i: int, block: nn.Module) -> None:
        """Takes the hidden states through the block."""
        for batch in range(len(self.batches)):
            self.hidden[batch] = self.forward(i, block, batch)
        self.others[i] = []

    def outside(self, names: Sequence[str]) -> dict[str, Moments]:
        """Moments of the inputs of linear layers of the model that are in none of the decoder layers, once all of these are done."""
        if not names:
            return {}
        hidden = iter(self.hidden)

        def deliver(i: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
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

    waiting  when the last of these has been called, the run ends
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

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
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


def _take_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden states that a layer is called with, and its other arguments."""
    if args:
        return args[0], args[1:], dict(kwargs)
    return kwargs["hidden_states"], (), {key: value for key, value in kwargs.items() if key != "hidden_states"}


@contextmanager
def _forwards(layers: nn.ModuleList, make: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
    """Inside, make(i) is called in the place of layer i's forward; its attributes stay what they are."""
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
