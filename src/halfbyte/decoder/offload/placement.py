"""Which parts of a model are computed on the CPU, so that the others fit into a GPU's memory.

The first layers' routed experts go first: they are most of a mixture's bytes, and a token reads few of them. Where that is not enough, or a
model has no experts, the first layers go as a whole, with their KV cache. Embeddings and the head stay on the GPU.

Called by `language/model.py` before weights are read, and by `decoder/explain.py`. Bytes are those of the GPU's layouts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.decoder.cache import OnGpu, most_bytes
from halfbyte.decoder.spec import DecoderSpec, LayerSpec, parts_of
from halfbyte.dispatch.packed import packed_format
from halfbyte.errors import ArgumentError
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.memory import size_text
from halfbyte.ops.transformer.experts import Experts

CHUNK = 4096  # tokens of a prompt that a GPU reads at a time
DEFAULT_CONTEXT = 8192
_SCRATCH = 320 << 20  # bytes of locks, workspaces and double buffers of kernels (`kernels/gpu/runtime/scratch.py`)
_FEW = 512  # rows for which logits are computed at a time
_MEMORY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
# Buffers of experts that cross (`streamed_experts.py`): one in the CPU's layout, which may take 1/64 more, and one in the GPU's; and bytes
# by which their two stacks are aligned.
_STREAM_BUFFERS, _LARGER, _ALIGNED = 2, 64, 512


class Placement(NamedTuple):
    """What is on the CPU: the rest is on the GPU.

    Attributes:
        experts: The first layers whose routed experts are on the CPU.
        layers: The first layers that are on the CPU as a whole.
    """

    experts: int = 0
    layers: int = 0

    def on_cpu(self, layer: int, *, experts: bool = False) -> bool:
        """Whether a layer, or its routed experts, are on the CPU."""
        return layer < (max(self.experts, self.layers) if experts else self.layers)


ON_GPU = Placement()


class Request(NamedTuple):
    """What a user asks for.

    Attributes:
        memory: Bytes of GPU memory; None: no bound.
        context: Tokens of a sequence, at most.
        experts: The first layers whose routed experts are on the CPU, -1: all; None: as few as the memory asks for.
        gpu_layers: The last layers that are on the GPU, the others are on the CPU; None: as many as fit the memory.
        sequences: That are decoded at the same time.
        int8_cache: Whether keys and values are in 8 bits.
        prefix_bytes: Of KV caches of earlier sequences that stay for prompts with the same beginning.
    """

    memory: int | None
    context: int = DEFAULT_CONTEXT
    experts: int | None = None
    gpu_layers: int | None = None
    sequences: int = 1
    int8_cache: bool = False
    prefix_bytes: int = 0


class LayerSize(NamedTuple):
    """Bytes of a layer.

    Attributes:
        rest: Attention, norms, router, shared expert, or the MLP.
        experts: Routed experts.
        cache: Keys and values.
        active: Fraction of the routed experts that a token reads.
        rest_weights: Number of weights in `rest`.
        expert_weights: Number of weights of the routed experts.
        biases: Biases of the routed experts, a part of `experts`.
    """

    rest: int
    experts: int = 0
    cache: int = 0
    active: float = 1.0
    rest_weights: int = 0
    expert_weights: int = 0
    biases: int = 0


class Parts(NamedTuple):
    """Bytes on a device.

    Attributes:
        weights: Of the model.
        cache: Keys and values of the sequences that run.
        workspace: Activations, logits, scratch buffers, and buffers of experts that are streamed.
        prefix: KV caches of earlier sequences.
    """

    weights: int
    cache: int
    workspace: int = 0
    prefix: int = 0


class Sizes(NamedTuple):
    """Bytes of a model.

    Attributes:
        layers: Of each layer.
        outside: Embeddings, the last norm and the head.
        workspace: Activations, logits and scratch buffers.
        head: The head alone, which a token reads.
        why_whole: Why layers stay on the GPU but for their experts; None: they may go.
        prefix: KV caches of earlier sequences.
    """

    layers: tuple[LayerSize, ...]
    outside: int
    workspace: int
    head: int = 0
    why_whole: str | None = None
    prefix: int = 0

    def parts(self, placement: Placement, *, cpu: bool) -> Parts:
        """Bytes that a placement takes on the CPU, or on the GPU without buffers for experts that are streamed."""
        weights = cache = 0
        for index, layer in enumerate(self.layers):
            weights += layer.rest if placement.on_cpu(index) == cpu else 0
            weights += layer.experts if placement.on_cpu(index, experts=True) == cpu else 0
            cache += layer.cache if placement.on_cpu(index) == cpu else 0
        return Parts(weights, cache) if cpu else Parts(self.outside + weights, cache, self.workspace, self.prefix)

    def on_gpu(self, placement: Placement) -> int:
        """Bytes of GPU memory that a placement takes, without buffers for experts that are streamed."""
        return sum(self.parts(placement, cpu=False))

    def stream_buffers(self, placement: Placement) -> int:
        """Bytes of GPU memory through which experts on the CPU cross for prompts that are multiplied on the GPU, and of their biases."""
        crossing = self.crossing(placement)
        largest = max((layer.experts - layer.biases for layer in crossing), default=0)
        buffers = _STREAM_BUFFERS * (largest + _ALIGNED) + largest // _LARGER if crossing else 0
        return buffers + sum(layer.biases for layer in crossing)

    def crossing(self, placement: Placement) -> list[LayerSize]:
        """The layers on the GPU whose experts are on the CPU."""
        return [layer for layer in self.layers[placement.layers : placement.experts] if layer.experts]

    def placements(self) -> Iterator[Placement]:
        """Yield the placements that the memory given is compared with, from all on the GPU on; each takes no more memory than the last."""
        count = len(self.layers)
        last = max((index + 1 for index, layer in enumerate(self.layers) if layer.experts), default=0)
        for experts in range(last + 1):
            yield Placement(experts)
        if self.why_whole is None:
            for layers in range(1, count + 1):
                yield Placement(last, layers)


@dataclass(frozen=True)
class Plan:
    """A placement and what it takes.

    Attributes:
        request: What was asked for.
        placement: What is on the CPU.
        sizes: Bytes of the model.
        streams: Whether GPU memory is left for buffers through which experts on the CPU cross, so that the GPU multiplies long prompts.
    """

    request: Request
    placement: Placement
    sizes: Sizes
    streams: bool = False

    @property
    def gpu(self) -> Parts:
        """Bytes of GPU memory."""
        parts = self.sizes.parts(self.placement, cpu=False)
        return parts._replace(workspace=parts.workspace + self.stream_bytes)

    @property
    def cpu(self) -> Parts:
        """Bytes of main memory."""
        return self.sizes.parts(self.placement, cpu=True)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of GPU memory, all together."""
        return sum(self.gpu)

    @property
    def cpu_bytes(self) -> int:
        """Bytes of main memory, all together."""
        return sum(self.cpu)

    @property
    def stream_bytes(self) -> int:
        """Bytes of GPU memory, a part of its workspaces, through which experts on the CPU cross."""
        return self.sizes.stream_buffers(self.placement) if self.streams else 0

    def to_json(self) -> dict[str, object]:
        """Return what is said as a document of JSON."""
        about = {"experts_on_cpu": self.placement.experts, "layers_on_cpu": self.placement.layers, "context": self.request.context}
        devices = {"gpu_bytes": self.gpu_bytes, "cpu_bytes": self.cpu_bytes, "gpu": self.gpu._asdict(), "cpu": self.cpu._asdict()}
        return {**about, "memory": self.request.memory, **devices, "stream_bytes": self.stream_bytes}

    def __str__(self) -> str:
        experts, layers = self.placement
        cpu = [_layers(0, layers)] if layers else []
        cpu += [f"the routed experts of {_layers(layers, experts)}"] if experts > layers else []
        given = "" if self.request.memory is None else f" of {size_text(self.request.memory)} given"
        tokens = f"{self.request.context} tokens" + (f" of {self.request.sequences} sequences" if self.request.sequences > 1 else "")
        on_cpu = f"{' and '.join(cpu)}, {size_text(self.cpu_bytes)} ({_listed(self.cpu, tokens)})" if cpu else "nothing"
        return f"on the GPU: {size_text(self.gpu_bytes)}{given} ({_listed(self.gpu, tokens)}); on the CPU: {on_cpu}"


def _listed(parts: Parts, tokens: str) -> str:
    names = "weights", f"KV cache of {tokens}", "workspaces", "prefix cache"
    return ", ".join(f"{name} {size_text(count)}" for name, count in zip(names, parts, strict=True) if count)


def _layers(first: int, stop: int) -> str:
    return f"layer {first}" if stop == first + 1 else f"layers {first}-{stop - 1}"


def plan_of(spec: DecoderSpec, request: Request, dtype: torch.dtype) -> Plan:
    """Choose what of a model is on the CPU; its weights may be absent. Raises ArgumentError as `plan_for` does."""
    request = request._replace(context=min(request.context, spec.max_positions or request.context))
    return plan_for(sizes_of(spec, request, dtype), request)


def plan_for(sizes: Sizes, request: Request) -> Plan:
    """Choose what is on the CPU: as little as the memory allows, with buffers for experts that are streamed as long as only experts are
    on the CPU; or what was asked for.

    Raises:
        ArgumentError: Nothing fits the memory, or what was asked for does not, or is missing.
    """
    count, (memory, _, experts, gpu_layers, *_) = len(sizes.layers), request
    experts = count if experts == -1 else experts
    for name, value in (("cpu_experts", experts), ("gpu_layers", gpu_layers)):
        if value is not None and not 0 <= value <= count:
            raise ArgumentError(f"{name} is 0 to {count}, the layers of this model, got {value}")
    if experts and not any(layer.experts for layer in sizes.layers):
        raise ArgumentError("this model has no experts that could be on the CPU: leave cpu_experts out")
    layers = None if gpu_layers is None else count - gpu_layers
    if layers and sizes.why_whole is not None:
        raise ArgumentError(f"{layers} of {count} layers cannot be on the CPU, as {sizes.why_whole}: leave gpu_layers out")
    if experts is not None or layers is not None:
        placements = [Placement(experts or 0, layers or 0)]
    else:
        placements = [*sizes.placements()]
    with_buffers = [(one, sizes.stream_buffers(one)) for one in placements if len(placements) == 1 or not one.layers]
    for placement, buffers in (*with_buffers, *((one, 0) for one in placements)):
        if memory is None or sizes.on_gpu(placement) + buffers <= memory:
            return Plan(request, placement, sizes, streams=buffers > 0)
    least = sizes.on_gpu(placements[-1])
    asked = "" if experts is None and layers is None else " with what is to be on the CPU"
    raise ArgumentError(
        f"the model needs at least {_up(least)} of GPU memory{asked} for {request.context} tokens, got {size_text(memory or 0)}: give "
        "it more, a smaller context, cache='int8', or device='cpu'"
    )


def _up(count: int) -> str:
    """Bytes, rounded up, so that as much as the text says is enough."""
    step = 10 ** max(0, len(str(count)) - 2)
    return size_text(-(-count // step) * step)


def bytes_of(memory: int | str) -> int:
    """Parse an amount of memory: bytes, or a text such as "12 GB", "800MB" or "8 GiB".

    Raises:
        ArgumentError: It is none, or not positive.
    """
    found = _MEMORY.fullmatch(memory) if isinstance(memory, str) else None
    if found is not None:
        number, unit, binary = found.groups()
        count = float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " ")
    else:
        count = memory if isinstance(memory, int) and not isinstance(memory, bool) else 0
    if not 1 <= count < 1 << 60:
        raise ArgumentError(f"GPU memory is a number of bytes above 0 or a text such as '12 GB', got {memory!r:.99}")
    return int(count)


def request_of(device: Mapping[str, object]) -> tuple[str, int | None, int | None]:
    """The GPU, and `experts` and `gpu_layers`, of a mapping of devices; -1 for all layers.

    Raises:
        ArgumentError: It has other keys or values.
    """
    allowed = "experts: 'cpu', cpu_experts: a number of layers, gpu_layers: a number of layers, gpu: 'cuda', 'cuda:1', …"
    gpu, all_experts, experts, layers = (device.get(key) for key in ("gpu", "experts", "cpu_experts", "gpu_layers"))
    counts_fit = all(value is None or (type(value) is int and value >= 0) for value in (experts, layers))
    names_fit = (gpu is None or (isinstance(gpu, str) and not gpu.startswith("cpu"))) and all_experts in (None, "cpu")
    if set(device) - {"gpu", "experts", "cpu_experts", "gpu_layers"} or not counts_fit or not names_fit:
        raise ArgumentError(f"a mapping of devices has {allowed}, got {dict(device)!r:.200}")
    if all_experts is not None and experts is not None:
        raise ArgumentError(f"experts and cpu_experts say the same, got both in {dict(device)!r:.200}: leave out one of them")
    count = -1 if all_experts is not None else experts
    return str(gpu or "cuda"), count, layers  # type: ignore[return-value]


def make_request(
    device: torch.device | str | Mapping[str, object],
    memory: int | str | None,
    context: int | None,
    sequences: int,
    *,
    int8: bool = False,
    prefix_bytes: int = 0,
) -> tuple[torch.device | str, Request]:
    """Check what a user asks for, and return the GPU and the request, without a bound for memory="auto".

    Raises:
        ArgumentError: A value is out of its range.
    """
    gpu, experts, layers = request_of(device) if isinstance(device, Mapping) else (device, None, None)
    for name, value in (("context", context), ("sequences", sequences)):
        if value is not None and (type(value) is not int or value < 1):
            raise ArgumentError(f"{name} is a number of at least 1, got {value!r:.99}")
    if type(prefix_bytes) is not int or prefix_bytes < 0:
        raise ArgumentError(f"prefix_bytes is a number of bytes, 0 for none, got {prefix_bytes!r:.99}")
    given = None if memory in (None, "auto") else bytes_of(memory)
    return gpu, Request(given, context or DEFAULT_CONTEXT, experts, layers, sequences, int8, prefix_bytes)


# Sizes


def sizes_of(spec: DecoderSpec, request: Request, dtype: torch.dtype) -> Sizes:
    """Compute the bytes of a model on a GPU, with activations of `dtype`; its weights may be packed for any device, or absent."""
    where = OnGpu(torch.device("cpu"), dtype)
    tokens = min(request.context, spec.max_positions or request.context)
    owners = [layer for layer in spec.layers if layer.kv_source is None]
    most = partial(most_bytes, tokens=tokens, chunk=CHUNK, int8=request.int8_cache, where=where)
    # One sequence may be read while another one, which runs alone or is copied for others, has a cache of its own, too.
    slots = request.sequences if request.sequences > 1 else 0
    singles = 2 if slots or request.prefix_bytes else 1
    caches = [0 if layer.kv_source is not None else most(layer, slots=slots, singles=singles) for layer in spec.layers]
    # The newest sequence stays even if it is larger.
    prefix = max(request.prefix_bytes, sum(map(most, owners))) if request.prefix_bytes else 0
    layers = tuple(_layer_size(layer, cache, dtype) for layer, cache in zip(spec.layers, caches, strict=True))
    seen: dict[int, int] = {}
    for part in (spec.embedding, spec.norm, spec.lm_head, spec.lm_head_bias, spec.per_layer_inputs):
        for one in parts_of(part):
            if isinstance(one, Packed | Tensor):
                seen[id(one)] = bytes_on_gpu(one, dtype)
    head = sum(bytes_on_gpu(one, dtype) for one in parts_of(spec.lm_head) if isinstance(one, Packed | Tensor))
    workspace = _workspace(spec, tokens, dtype) + max(caches, default=0)
    return Sizes(layers, sum(seen.values()), workspace, head, why_whole(spec), prefix)


def why_whole(spec: DecoderSpec) -> str | None:
    """Why no layer is computed on the CPU while others are on a GPU; None if it may be."""
    if spec.per_layer_inputs is not None:
        return "its layers have per-layer inputs"
    if any(layer.kv_source is not None for layer in spec.layers):
        return "its layers reuse keys and values of others"
    return None


def _layer_size(layer: LayerSpec, cache: int, dtype: torch.dtype) -> LayerSize:
    whole, weights = _sums(layer, dtype)
    if not isinstance(layer.mlp, Experts):
        return LayerSize(whole, cache=cache, rest_weights=weights)
    experts, expert_weights = _sums((layer.mlp.gate_up, layer.mlp.down_proj), dtype)
    active = layer.mlp.top_k / len(layer.mlp.router)
    biases, _ = _sums((layer.mlp.gate_up.bias, layer.mlp.down_proj.bias), dtype)
    return LayerSize(whole - experts, experts, cache, active, weights - expert_weights, expert_weights, biases)


def _sums(part: object, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes on a GPU and number of the weights of a part of a layer."""
    found = [one for one in parts_of(part) if isinstance(one, Packed | Tensor)]
    return sum(bytes_on_gpu(one, dtype) for one in found), sum(math.prod(one.shape) for one in found)


def bytes_on_gpu(part: Packed | Tensor, dtype: torch.dtype) -> int:
    """Bytes of a weight on a GPU, at most."""
    if isinstance(part, Tensor):
        return part.numel() * max(dtype.itemsize, part.element_size())
    fmt, (*stack, n, k) = packed_format(part.codes_format, on_cpu=False), part.shape
    return math.prod(stack) * gpu_tiles.geometry(fmt, (n, k), paired=fmt.bits == 8).nbytes


def _workspace(spec: DecoderSpec, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of activations of a prompt's chunk, of logits, and of kernels' scratch buffers."""
    rows, widest = min(tokens, CHUNK), 0
    for layer in spec.layers:
        heads, mlp = layer.attention.heads, layer.mlp
        inner = mlp.down_proj.packed.shape[-1]
        if isinstance(mlp, Experts):
            shared = 0 if mlp.shared_expert is None else 3 * mlp.shared_expert.down_proj.packed.shape[-1]
            inner = mlp.top_k * (3 * inner + 2 * mlp.k) + shared + 4 * len(mlp.router)
        widest = max(widest, 3 * inner + 2 * (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    activations = rows * (8 * spec.hidden_size + widest) * dtype.itemsize
    return _SCRATCH + activations + min(rows, _FEW) * spec.vocabulary * (4 + 2 * dtype.itemsize)
