"""Quantizing a language model by what its layers compute from real text, one decoder layer at a time.

The text's tokens go through the embeddings once. Then, for each decoder layer: a float32 copy of it is made on the device, the
inputs of its linear layers are measured, these are quantized, and the hidden states go through the quantized copy to the next layer.
So each layer learns to make up for the errors of those before it, and there is never more in memory than the model, the codes, one
decoder layer and the hidden states. Linear layers outside the decoder layers (the head) come last.

Moments of the inputs x of a linear layer, over all tokens: sum(x x^T) and sum(|x|).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.nn.folding import Fold, find_folds
from halfbyte.quantizers.awq import AWQ, awq, search_scale
from halfbyte.quantizers.check import check_finite
from halfbyte.quantizers.gptq import GPTQ, gptq
from halfbyte.quantizers.mse import mse

Progress = Callable[[int, int, str], object]
_Folds = dict[tuple[object, ...], list[Fold]]  # by the structure of the layer: its class and the names of its linear layers


@dataclass(frozen=True, eq=False)
class Calibration:
    """What a method that looks at activations learns from, and how.

    tokens   int64 [n, t]: n passages of t tokens each, such as `calibration_tokens` makes
    batch    passages that run at a time
    device   where the layers run; None: where they are
    gptq, awq   options of these methods
    """

    tokens: Tensor
    batch: int = 8
    device: torch.device | str | None = None
    gptq: GPTQ = field(default_factory=GPTQ)
    awq: AWQ = field(default_factory=AWQ)

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or not self.tokens.numel() or self.tokens.is_floating_point():
            raise ArgumentError(
                f"calibration takes token ids [passages, tokens], at least one, got {self.tokens.dtype} {list(self.tokens.shape)}: "
                "use calibration_tokens(tokenizer, text)"
            )
        if self.batch < 1:
            raise ArgumentError(f"calibration runs 1 or more passages at a time, got a batch of {self.batch}")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as e:  # torch raises either where it has no such device
            raise ArgumentError(f"calibration cannot run on device {str(self.device)!r} ({str(e).splitlines()[0]}): use cpu") from e


def calibration_tokens(tokenizer: Any, text: str, passages: int = 128, length: int = 512) -> Tensor:
    """Token ids int64 [n, length] of at most `passages` passages, spread evenly over a text; shorter ones if the text is short.

    tokenizer  a transformers tokenizer, or anything that is called with a text and answers with its "input_ids"
    """
    if passages < 1 or length < 1:
        raise ArgumentError(f"calibration takes 1 or more passages of 1 or more tokens, got {passages} of {length}")
    ids = torch.as_tensor(tokenizer(text)["input_ids"], dtype=torch.int64).flatten()
    if not len(ids):
        raise ArgumentError("the calibration text has no tokens: use a few pages of text of the kind that the model will see")
    length = min(length, len(ids))
    whole = len(ids) // length
    take = torch.linspace(0, whole - 1, min(passages, whole)).round().long()
    return ids[: whole * length].reshape(whole, length)[take]


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

    def divide(self, scale: Tensor) -> None:
        """What they are when every input is divided by `scale` [K]."""
        self.second /= torch.outer(scale, scale)
        self.first /= scale


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """The codes of a weight, or the new value of a parameter that stays in floating point, by the parameter's name.

    error   ||float weight - quantized weight|| / ||float weight|| (Frobenius), of the weight as it was scaled
    """

    name: str
    value: Codes | Tensor
    error: float | None = None


def calibrate(
    model: nn.Module,
    formats: Mapping[str, Format],
    method: str,
    calibration: Calibration,
    *,
    materialize: Callable[[str, nn.Module], nn.Module] | None = None,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """Quantizes the linear layers named in `formats`, and yields their codes as they are done. `model` stays as it is.

    method       "gptq", "awq", or "mse" weighted by the inputs
    materialize  (name, module) -> a copy of a decoder layer (or of another Linear) that has data; None: a deep copy
    progress     called with (decoder layers done, all of them, name)

    New values are those of parameters that AWQ divides by its scales; they belong together with the codes. A linear layer that no
    token reaches (an expert that is never chosen) is left out. Raises ArgumentError for tokens that the model does not have.
    """
    name, layers = decoder_layers(model)
    copy = materialize or (lambda _, module: deepcopy(module))
    with torch.no_grad():
        runs = _Runs(model, layers, calibration)
    folds: _Folds = {}
    for i, layer in enumerate(layers):
        prefix = f"{name}.{i}"
        mine = {full[len(prefix) + 1 :]: fmt for full, fmt in formats.items() if full.startswith(f"{prefix}.")}
        with torch.no_grad():
            block = copy(prefix, layer).eval().float().to(runs.device)
            results = _quantize_layer(runs, i, block, prefix, mine, method, calibration, folds) if mine else []
            runs.advance(i, block)
        yield from results
        if progress is not None:
            progress(i + 1, len(layers), prefix)
    outside = {full: fmt for full, fmt in formats.items() if not full.startswith(f"{name}.")}
    with torch.no_grad():
        measured = runs.outside(list(outside))
    for full, moments in measured.items():
        linear = copy(full, model.get_submodule(full)).float().to(runs.device)
        yield _quantize(linear, full, outside[full], method, moments, calibration)


def _quantize_layer(
    runs: _Runs,
    i: int,
    block: nn.Module,
    prefix: str,
    formats: Mapping[str, Format],
    method: str,
    calibration: Calibration,
    folds: _Folds,
) -> list[Result]:
    """Quantizes the linear layers of decoder layer i in `block`, a copy of it. `folds` remembers those of layers of one structure."""
    linears = {name: block.get_submodule(name) for name in formats}
    for name, linear in linears.items():
        check_finite(linear.get_parameter("weight"), f"{prefix}.{name}.weight")
    moments = runs.measure(i, block, list(formats))
    results = []
    if method == "awq":
        structure = (type(block), *formats)
        if structure not in folds:
            folds[structure] = find_folds(block, list(formats), lambda copy: runs.forward(i, copy, 0))
        dtypes = {name: parameter.dtype for name, parameter in runs.layers[i].named_parameters()}
        changed = _scale(block, formats, moments, folds[structure], calibration.awq, dtypes)
        results += [Result(f"{prefix}.{name}", value.cpu()) for name, value in changed.items()]
    for name, linear in linears.items():
        if name in moments:
            results.append(_quantize(linear, f"{prefix}.{name}", formats[name], method, moments[name], calibration))
    return results


def unreached(name: str) -> str:
    """What a report says about a linear layer that calibration left out."""
    return f"no calibration token reaches {name}: mse without calibration is used"


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of layers that hidden states go through one after the other: of all nn.ModuleList that with the most parameters."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise UnsupportedError(
            f"{type(model).__name__} has no nn.ModuleList of layers, through which calibration goes: use mse or hqq without it"
        )
    return max(lists, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))


class _Stop(Exception):
    """Ends a forward pass of which no more is needed."""


class _Runs:
    """Forward passes over the calibration tokens: hidden states before the next layer, and what else each layer is called with."""

    def __init__(self, model: nn.Module, layers: nn.ModuleList, calibration: Calibration) -> None:
        self.model, self.layers = model, layers
        self.batches = list(calibration.tokens.split(calibration.batch))
        first = next(p for p in model.parameters() if not p.is_meta)
        self.home = first.device
        self.device = torch.device(calibration.device) if calibration.device is not None else self.home
        any_model: Any = model
        embedding = any_model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        known = embedding.weight.shape[0] if isinstance(embedding, nn.Embedding) else torch.inf
        if int(calibration.tokens.min()) < 0 or int(calibration.tokens.max()) >= known:  # a GPU would not survive the look-up
            largest = int(calibration.tokens.max())
            raise ArgumentError(f"the calibration has tokens up to {largest}, the model {known} of them: use the model's own tokenizer")
        self.hidden: list[Tensor] = []
        self.others: list[list[tuple[Any, Any]]] = [[] for _ in layers]  # of each layer, for each batch
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


def _scale(
    block: nn.Module,
    formats: Mapping[str, Format],
    moments: Mapping[str, Moments],
    folds: Sequence[Fold],
    options: AWQ,
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """Scales the input channels of linear layers of a decoder layer, and their moments; returns the parameters that divide instead."""
    changed: dict[str, Tensor] = {}
    for fold in folds:
        if not all(name in moments for name in fold.consumers):
            continue
        found = moments[fold.consumers[0]]
        weights = [(block.get_submodule(name).get_parameter("weight"), formats[name]) for name in fold.consumers]
        scale = search_scale(weights, found.second, found.first / found.count, options, fold.channel)
        scale, parameters = fold.apply(block, scale, dtypes)
        for shared in {id(moments[name]): moments[name] for name in fold.consumers}.values():
            shared.divide(scale)
        changed |= parameters
    return changed


@torch.no_grad()
def _quantize(linear: nn.Module, name: str, fmt: Format, method: str, moments: Moments, calibration: Calibration) -> Result:
    """Quantizes the weight of a float32 Linear called `name`, and replaces it by what its codes stand for."""
    weight, full = linear.get_parameter("weight"), f"{name}.weight"
    if method == "gptq":
        codes = gptq(weight, fmt, moments.second, calibration.gptq, full)
    elif method == "awq":
        codes = awq(weight, fmt, moments.second, calibration.awq, full)
    else:
        codes = mse(weight, fmt, full, moments.second)
    rounded, norm = codes.dequantize(), float(weight.norm())
    error = float((rounded - weight).norm()) / norm if norm else 0.0
    weight.data = rounded
    return Result(full, codes.to("cpu"), error)


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
