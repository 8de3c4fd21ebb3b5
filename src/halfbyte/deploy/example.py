"""What a model is exported with: inputs by name, which of their sizes vary, and a module that takes and returns plain tensors.

Called by `program.py` and `onnx_model.py`, which write what `Example.trace` returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

from halfbyte.errors import ArgumentError, HalfbyteError, UnsupportedError, check_type

Inputs = Mapping[str, Tensor] | Sequence[Tensor]
Sizes = dict[int, str]  # names of the sizes of an input that vary, by dimension; those of one name are equal

_BATCH, _TOKENS, _CONTEXT = 2, 16, 2048
_MAX_SIZE = 1 << 16  # the maximum of a size that the model does not limit


class _Plain(nn.Module):
    """Call a model with tensors by position, and convert its result to plain containers; `names` are its keywords, if it takes those."""

    def __init__(self, model: nn.Module, names: Sequence[str] = (), **more: object) -> None:
        super().__init__()
        self.model, self.names, self.more = model, tuple(names), more

    def forward(self, *inputs: Tensor) -> object:
        named = dict(zip(self.names, inputs, strict=True)) if self.names else {}
        result = self.model(*(() if named else inputs), **named, **self.more)
        if isinstance(result, Mapping):  # such as transformers' ModelOutput
            return {name: value for name, value in result.items() if isinstance(value, Tensor)}
        return result


class _Positional(nn.Module):
    """Call a module with one variable argument, as `_Plain` does, so that torch.export takes the sizes in the same form."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> object:
        return self.module(*inputs)


@dataclass(frozen=True)
class Example:
    """A call of a model.

    Attributes:
        module: Takes the inputs by position.
        inputs: The tensors by name, in order.
        sizes: For each input the names of its sizes that vary; the others stay as they are.
        max_sizes: The maximum of each size that varies, by its name.
        model: The class of the model, for errors.
    """

    module: nn.Module
    inputs: Mapping[str, Tensor]
    sizes: Mapping[str, Sizes]
    max_sizes: Mapping[str, int]
    model: str = ""

    def of(self, module: nn.Module) -> Example:
        """Return the same call of another module."""
        return replace(self, module=_Positional(module))

    def trace(self) -> tuple[ExportedProgram, Example]:
        """Trace the model.

        Returns:
            The program, and this call with the maxima of the sizes for which the forward takes the same branches.

        Raises:
            UnsupportedError: torch.export cannot follow its forward.
        """
        symbols = {name: Dim(name, min=1, max=size) for name, size in self.max_sizes.items()}
        shapes = tuple({at: symbols[size] for at, size in self.sizes.get(name, {}).items()} for name in self.inputs)
        inputs = tuple(_repeated(tensor, self.sizes.get(name, {})) for name, tensor in self.inputs.items())
        try:
            with torch.no_grad():
                return torch.export.export(self.module, inputs, dynamic_shapes=(shapes,), strict=False), self
        except HalfbyteError:
            raise
        except Exception as error:  # whatever a forward raises
            suggestion, *_ = str(error).split("\n\n")
            if (max_sizes := self._suggested_max_sizes(suggestion, shapes)) is not None:
                return replace(self, max_sizes=max_sizes).trace()
            remedy = "rewrite what depends on the values of tensors, or export the part of the model that does not"
            raise UnsupportedError(f"torch.export cannot trace {self.model} ({first_line(error)}): {remedy}") from error

    def _suggested_max_sizes(self, message: str, shapes: tuple[dict[int, Dim], ...]) -> dict[str, int] | None:
        """Return the smaller maxima that an error of torch.export suggests where a forward branches on sizes; None for other errors."""
        try:
            refined = refine_dynamic_shapes_from_suggested_fixes(message, list(shapes))
        except Exception:  # the message has no such suggestions
            return None
        max_sizes = dict(self.max_sizes)
        for name, dims in zip(self.inputs, refined, strict=True):
            for at, size in self.sizes.get(name, {}).items():
                max_sizes[size] = min(max_sizes[size], getattr(dims[at], "max", 0))  # an integer is a size that does not vary
        return max_sizes if max_sizes != self.max_sizes and min(max_sizes.values()) > 1 else None

    def limits(self, before: Example) -> list[str]:
        """Return a sentence for each size whose maximum was larger before tracing."""
        return [
            f"{size} up to {limit}: the forward takes another branch for larger ones, which is not exported"
            for size, limit in self.max_sizes.items()
            if limit < before.max_sizes[size]
        ]


def _repeated(tensor: Tensor, sizes: Sizes) -> Tensor:
    """Repeat a tensor along the dimensions of size 1 that vary: torch.export takes a size of 1 as one that does not."""
    for at in (at for at in sizes if tensor.shape[at] == 1):
        tensor = torch.cat([tensor, tensor], at)
    return tensor


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class; torch.export's first reason where it lists sizes that cannot vary."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[1 if lines[0].startswith("Constraints violated") and lines[1:] else 0].lstrip(" -")[:300]


def example_of(model: nn.Module, inputs: Inputs | None, sizes: Mapping[str, Sizes] | None, context: int | None = None) -> Example:
    """Return the call that a model is exported with.

    Args:
        model: In evaluation mode.
        inputs: Tensors by name, or in the order of the arguments of its forward; None for those of a model of transformers or diffusers.
        sizes: Names of the sizes that vary, by input and dimension.
        context: For a model that generates text: positions of the KV cache that the program contains; None: no cache.

    Raises:
        ArgumentError: The model is in training mode, or its inputs are not known.
    """
    check_type(model, nn.Module, "a model to export is a torch.nn.Module", "load it first: hb.load(folder)")
    if model.training:
        raise ArgumentError(f"{type(model).__name__} is in training mode, and a program computes as in evaluation: call model.eval() first")
    if inputs is None:
        if sizes is not None:
            raise ArgumentError("sizes names dimensions of inputs, got no inputs: pass both")
        return replace(_known(model, context), model=type(model).__name__)
    by_name = isinstance(inputs, Mapping)
    if not isinstance(inputs, Mapping):
        parameters = inspect.signature(model.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        inputs = {names[i] if i < len(names) else f"input_{i}": tensor for i, tensor in enumerate(inputs)}
    for name, tensor in inputs.items():
        check_type(tensor, Tensor, f"the input {name} of an exported model is a tensor", "wrap it in a module that takes only tensors")
    sizes = {} if sizes is None else sizes
    for name, at in ((name, at) for name, varying in sizes.items() for at in varying):
        if name not in inputs or not 0 <= at < inputs[name].dim():
            got = {name: list(tensor.shape) for name, tensor in inputs.items()}
            raise ArgumentError(f"sizes names dimension {at} of {name}, got inputs of shapes {got}: name a dimension of one of them")
    module = _Plain(model, tuple(inputs) if by_name else ())
    max_sizes = {size: _MAX_SIZE for varying in sizes.values() for size in varying.values()}
    return Example(module, inputs, sizes, max_sizes, type(model).__name__)


def _known(model: nn.Module, context: int | None) -> Example:
    """Return the call of a model of transformers or diffusers."""
    main, name, generates = getattr(model, "main_input_name", None), type(model).__name__, getattr(model, "can_generate", lambda: False)
    if main not in ("input_ids", "pixel_values") and name not in ("UNet2DModel", "UNet2DConditionModel"):
        raise _unknown(name)
    config, batch, device, dtype = attrgetter("config")(model), {0: "batch"}, _device(model), getattr(model, "dtype", torch.float32)
    if main == "input_ids" and not getattr(config, "is_encoder_decoder", False):
        most = int(getattr(config, "max_position_embeddings", _MAX_SIZE))
        ids = torch.arange(_BATCH * _TOKENS, device=device).reshape(_BATCH, _TOKENS) % config.vocab_size
        if context is not None and generates():
            from halfbyte.deploy.decoder_step import decoder_step

            step, inputs = decoder_step(model, ids[:1], min(context or _CONTEXT, most))
            return Example(_Plain(step, tuple(inputs)), inputs, {"input_ids": {1: "tokens"}}, {"tokens": step.context})
        sizes = {0: "batch", 1: "tokens"}
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        module = _Plain(model, tuple(inputs), **({"use_cache": False} if generates() else {}))
        return Example(module, inputs, dict.fromkeys(inputs, sizes), {"batch": _MAX_SIZE, "tokens": most})
    if main == "pixel_values":
        side, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
        height, width = side if isinstance(side, list | tuple) else (side, side)
        inputs = {"pixel_values": torch.zeros(_BATCH, channels, height, width, device=device, dtype=dtype)}
        return Example(_Plain(model, tuple(inputs)), inputs, {"pixel_values": batch}, {"batch": _MAX_SIZE})
    if main is not None:  # an encoder and a decoder
        raise _unknown(name)
    side = config.sample_size
    height, width = side if isinstance(side, list | tuple) else (side, side)
    inputs = {
        "sample": torch.zeros(1, config.in_channels, height, width, device=device, dtype=dtype),
        "timestep": torch.zeros(1, device=device, dtype=torch.int64),
    }
    if hasattr(config, "cross_attention_dim"):
        inputs["encoder_hidden_states"] = torch.zeros(1, 77, config.cross_attention_dim, device=device, dtype=dtype)
    return Example(_Plain(model, tuple(inputs)), inputs, {}, {})  # diffusers does something else for 64 images


def _unknown(name: str) -> ArgumentError:
    known = "text models, image classifiers and UNets"
    return ArgumentError(f"what {name} takes is not known here, only what {known} do: pass inputs= to export_program or export_onnx")


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
