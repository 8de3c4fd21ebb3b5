"""The device and dtype that a command runs language models with."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypedDict

from halfbyte.cli.shared.output import settling
from halfbyte.errors import ArgumentError

if TYPE_CHECKING:
    import torch

OFFLOAD = "--gpu-memory, --cpu-experts, --gpu-layers and --gpu-context"
DTYPES = ("float32", "bfloat16", "float16")


def add_device(parser: argparse.ArgumentParser) -> None:
    """The arguments of the device and dtype of the computation."""
    parser.add_argument("--device", help="cpu or cuda (default: a GPU that the kernels are for, else the CPU)")
    parser.add_argument("--dtype", choices=DTYPES, help="of activations (default: float32 on a CPU, else the model's own)")


class Placed(TypedDict, total=False):
    """Arguments of `LanguageModel.open`."""

    device: str | dict[str, object]
    memory: str | None
    context: int | None
    sequences: int
    prefix_bytes: int


def add_offload(parser: argparse.ArgumentParser, *, has_context: bool = False) -> None:
    """The arguments of what a GPU has no memory for; `has_context`: the parser has an argument --context of its own."""
    group = parser.add_argument_group("a model larger than the GPU's memory")
    group.add_argument("--gpu-memory", metavar="SIZE", help="12GB, or auto: all that is free; the rest is on the CPU")
    group.add_argument("--cpu-experts", metavar="N", type=int, help="layers whose routed experts are on the CPU; -1: all")
    group.add_argument("--gpu-layers", metavar="N", type=int, help="only the last N layers on the GPU")
    if has_context:
        parser.set_defaults(gpu_context=None)
    else:
        group.add_argument("--gpu-context", metavar="N", type=int, help="tokens of a sequence to plan for (default: 8192)")


def offloads(args: argparse.Namespace) -> bool:
    """Whether a part of the model may be on the CPU."""
    return any(value is not None for value in (args.gpu_memory, args.cpu_experts, args.gpu_layers, args.gpu_context))


def refuse_offload(args: argparse.Namespace, got: str) -> None:
    """Raise ArgumentError where a part on the CPU was asked for of what is no language model."""
    if offloads(args):
        raise ArgumentError(f"{OFFLOAD} are for a language model, got {got}: leave them out")


def placed(args: argparse.Namespace, sequences: int = 1, context: int | None = None, prefix_bytes: int = 0) -> Placed:
    """The arguments of `LanguageModel.open` that say where the model is. Raises ArgumentError for a part on the CPU without a GPU.

    Args:
        args: Of the command.
        sequences, prefix_bytes: As for `LanguageModel.open`.
        context: Likewise, where --gpu-context was not given.
    """
    if not offloads(args):
        return {"device": args.device}
    if args.device == "cpu":
        raise ArgumentError(f"{OFFLOAD} are for a GPU, got --device cpu: leave them out")
    counts: dict[str, object] = {"gpu_layers": args.gpu_layers}
    counts |= {"experts": "cpu"} if args.cpu_experts == -1 else {"cpu_experts": args.cpu_experts}
    device = {"gpu": args.device} | {name: value for name, value in counts.items() if value is not None}
    tokens = context if args.gpu_context is None else args.gpu_context
    return {"device": device, "memory": args.gpu_memory, "context": tokens, "sequences": sequences, "prefix_bytes": prefix_bytes}


def asked_dtype(args: argparse.Namespace) -> torch.dtype | None:
    """The requested torch.dtype, or None."""
    import torch

    return None if args.dtype is None else getattr(torch, args.dtype)


@settling()
def settle_device(args: argparse.Namespace) -> None:
    """Check `args.device`, or set it where it was not given. Where there is a choice it says to stderr which device runs. Raises
    ArgumentError for a device that is not here."""
    import torch

    why = ""
    if args.device is None:
        args.device, why = _default()
    try:
        kind = torch.device(args.device).type
    except RuntimeError:
        kind = ""
    if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
        if torch.cuda.is_available():
            raise ArgumentError(f"--device is cpu or cuda, got {args.device!r}")
        why = "this torch is made for CPUs alone: install one for CUDA" if torch.version.cuda is None else "torch sees no GPU: use the CPU"
        raise ArgumentError(f"--device is cpu, got {args.device!r}; {why}, or leave --device out")
    if kind == "cpu":
        args.device = kind  # which "cpu:0" is, too
    if torch.cuda.is_available() and not args.quiet:
        name = "" if kind == "cpu" else f", {torch.cuda.get_device_name(torch.device(args.device))}"
        print(f"device: {args.device}{name}{why}", file=sys.stderr)


@contextmanager
def waking(device: str) -> Iterator[None]:
    """A context in which another thread prepares the GPU for its first kernel: it starts CUDA and Triton, and finds out whether kernels can
    be launched without Python's overhead. The block itself may import, but must not launch kernels."""
    import torch

    if torch.device(device).type != "cuda":
        yield
        return
    from halfbyte.dispatch.gpu import why_no_triton

    def wake() -> None:
        from halfbyte.kernels.gpu.runtime import tape

        with torch.cuda.device(device):
            tape.why_not_replayed(torch.device(device))

    if why_no_triton() is not None:
        yield
        return
    with ThreadPoolExecutor(1) as other:
        woken = other.submit(wake)
        yield
        woken.result()


def _default() -> tuple[str, str]:
    """The default device, and, if there is a GPU that is not used, the reason."""
    import torch

    from halfbyte.language.device import best_device

    device, why = best_device()
    count, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device != "cpu" and processes > count:
        device, why = "cpu", f"torch sees {count} GPU{'s' * (count > 1)} for {processes} processes"
    return device, f" ({why})" if why else ""
