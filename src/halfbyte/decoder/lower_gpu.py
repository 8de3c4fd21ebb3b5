"""Computes a decoder specification on a GPU, with the interface of `lower_cpu.py`: `GpuModel`.

    prefill     embedding, then `gpu_layer.prefill` of each layer, then norm and output embedding
    decode      the same with `gpu_layer.decode`; a `DecodeStep` (gpu_step.py) makes a CUDA graph of it, which chooses the next token, too

Layers and experts that a plan leaves on the CPU are computed by `HostLayers` and `HostExperts` (offload/). On a CPU the same code runs in
torch's operations: the tests do that.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import env
from halfbyte.decoder.cache import Cache, LayerCache, OnGpu, Slots
from halfbyte.decoder.gpu_layer import GpuLayer, KeyValues, PackedProjection, decode, packed_layer, prefill, prefill_with
from halfbyte.decoder.gpu_step import (
    Choose,
    DecodeStep,
    DecodeSteps,
    Group,
    HostReader,
    Inputs,
    State,
    StepShape,
    batch_of_step,
    finite_likeliest,
)
from halfbyte.decoder.kernels_gpu import torch_ops, why_not_layer
from halfbyte.decoder.lower_cpu import DecoderModel
from halfbyte.decoder.offload.crossing import AT_ONCE
from halfbyte.decoder.offload.host_experts import HostExperts
from halfbyte.decoder.offload.host_layers import HostLayers, HostStep
from halfbyte.decoder.offload.placement import CHUNK, ON_GPU, Plan
from halfbyte.decoder.rope import RopeTables
from halfbyte.decoder.spec import DecoderSpec, LayerSpec, Logits
from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.errors import ArgumentError, UnsupportedError, non_finite_logits
from halfbyte.kernels.layer_kinds import logits_in_torch
from halfbyte.layouts.base import round_up
from halfbyte.layouts.records import from_codes, to_codes
from halfbyte.machine import gpu
from halfbyte.ops.transformer.decoder import MOST_SEQUENCES as MOST_ON_CPU
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.norms import add_normed, normed
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import Weight
from halfbyte.ops.transformer.whole_model_decode import PerLayerInputs

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_SEQUENCES = 256  # that are decoded at the same time
_MOST_VERIFY = 65  # tokens
_MOST_PROMPTS, _READ = 32, 2048  # prompts, and tokens of them, between decode steps: some 60 ms of a model of 8 billion weights
_FEW = 512  # tokens of a prompt at a time where torch computes attention, or the logits of all tokens are returned
_CAST = "router", "gate", "layer_scale"  # fields whose tensors kernels read in the dtype of activations, as those of norms


class _Ahead(NamedTuple):
    """A decode step that was launched before the host knew the tokens that it decodes.

    Attributes:
        step: The step.
        version: `Cache.version` when it was launched.
        state: What the step has decoded, as the host knows by now.
        results: Logits, and the tokens that the step has chosen.
    """

    step: DecodeStep
    version: int
    state: State
    results: tuple[Tensor, Tensor]


class GpuModel(DecoderModel):
    """A decoder on a GPU, or with a plan on a GPU and the CPU.

    Attributes:
        device: The GPU.
        dtype: Of activations: float16, bfloat16 or float32.
    """

    where: OnGpu

    def __init__(
        self,
        spec: DecoderSpec,
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.float16,
        plan: Plan | None = None,
    ) -> None:
        """Lower a specification, whose weights are packed for the device, or for the CPU where the plan says so.

        Raises:
            UnsupportedError: A part of it is not computed on a GPU.
            ArgumentError: Its tensors do not fit together, or lie elsewhere.
        """
        if dtype not in DTYPES:
            raise ArgumentError(f"activations on a GPU are {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}, got {dtype}")
        home = spec.embedding.device
        if home.type != torch.device(device).type or torch.device(device).index not in (None, home.index):
            raise ArgumentError(f"the weights of this model are on {home}, got device={str(device)!r}: pack them for that device")
        self.spec, self.device, self.dtype, self.plan = spec, home, dtype, plan
        self.placement = ON_GPU if plan is None else plan.placement
        self._cpu_layers = self.placement.layers
        self.where = OnGpu(home, dtype, self._cpu_layers)
        for index, layer in self._on_gpu:
            if (reason := why_not_layer(layer)) is not None:
                raise UnsupportedError(f"layer {index} is not computed on a GPU: {reason}")
        # What is on the CPU
        memory = None if plan is None or plan.request.memory is None else plan.request.memory - plan.gpu_bytes + plan.stream_bytes
        self._host = HostExperts(self._host_experts(), home, memory)
        self._first = HostLayers(spec.layers[: self._cpu_layers], spec.ropes, home)
        # What is on the GPU
        self._layers = [self._lowered(index, layer) for index, layer in self._on_gpu]
        self._norm = self._cast_norm(spec.norm)
        self._inputs_norm = None if spec.per_layer_inputs is None else self._norm_of_inputs(spec.per_layer_inputs)
        # Layers with the same sliding window are a group: their buffers have the same tokens, and they share a mask.
        windows = list(dict.fromkeys(layer.sliding_window for _, layer in self._on_gpu))
        self._windows, self._group_of = windows, [windows.index(layer.sliding_window) for _, layer in self._on_gpu]
        self._ropes = RopeTables(spec.ropes, home)
        self._steps = DecodeSteps()
        self._ahead: _Ahead | None = None
        self._reader = HostReader()
        # Limits
        self.most_verify, self.least_prefill = _MOST_VERIFY, 1
        self.most_decode = MOST_SEQUENCES if plan is None else min(MOST_SEQUENCES, plan.request.sequences)
        if self._first:
            self.most_decode = min(self.most_decode, MOST_ON_CPU)
        self.most_prompts = 1 if self._has_host_parts else _MOST_PROMPTS
        if plan is not None:  # the caches of several short prompts fit into that of one sequence, which is planned for
            self.most_prompts = max(1, min(self.most_prompts, plan.request.context // 64))
        in_torch = any(layer.attention.heads.softcap is not None for layer in spec.layers) or dtype == torch.float32
        self._chunk = _FEW if in_torch else CHUNK
        self.prefill_chunk = _FEW if in_torch or (self._has_host_parts and not self.streams_experts) else _READ
        has_experts = any(isinstance(layer.mlp, Experts) for layer in spec.layers)
        self._compiles = home.type == "cuda" and not has_experts and not self._first and why_no_triton() is None and not env.tune()
        self.notes = (*(torch_ops(spec.layers, dtype, gpu(home.index or 0)) if home.type == "cuda" else ()), *self._host.notes)

    @property
    def _on_gpu(self) -> list[tuple[int, LayerSpec]]:
        """The layers that are on the GPU, with their indices in the model."""
        return [*enumerate(self.spec.layers)][self._cpu_layers :]

    @property
    def streams_experts(self) -> bool:
        return self._host.can_stream

    @property
    def _has_host_parts(self) -> bool:
        """Whether the CPU computes layers or experts."""
        return bool(self._host or self._first)

    @property
    def _on(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    # Lowering

    def _lowered(self, index: int, layer: LayerSpec) -> GpuLayer:
        layer.check()
        mlp = None if index in self._host else layer.mlp
        return packed_layer(self._cast(layer.attention), self._cast(mlp), self._cast(layer.per_layer_input)).replayable()

    def _host_experts(self) -> dict[int, Experts]:
        """The mixtures whose routed experts are on the CPU, by the index of their layer."""
        mixtures = {index: layer.mlp for index, layer in enumerate(self.spec.layers) if isinstance(layer.mlp, Experts)}
        for index, mixture in mixtures.items():
            wanted = torch.device("cpu") if self.placement.on_cpu(index, experts=True) else self.device
            if (found := mixture.gate_up.packed.device) != wanted:
                raise ArgumentError(
                    f"the experts of layer {index} are on {found}, and {self.placement} needs them on {wanted}: pack them there"
                )
        on_cpu = range(self.placement.layers, self.placement.experts)
        return {index: self._cast(mixture) for index, mixture in mixtures.items() if index in on_cpu}

    def _cast(self, part: Any) -> Any:
        """Return a part of a layer with its norms and the fields of `_CAST`, at any depth, in the dtype of activations."""
        if isinstance(part, Norm):
            return self._cast_norm(part)
        if type(part) is tuple:
            return tuple(map(self._cast, part))
        if not isinstance(part, tuple):
            return part
        values = part._asdict().items()  # type: ignore[attr-defined]  # of a NamedTuple
        return type(part)(*(one.to(self.dtype) if name in _CAST and isinstance(one, Tensor) else self._cast(one) for name, one in values))

    def _norm_of_inputs(self, inputs: PerLayerInputs) -> tuple[Norm, Tensor]:
        """Return the norm of projected embeddings, with their multiplier c in it, and the scale of per-layer inputs, [1]."""
        # norm(c * y) with eps is norm(y) with eps / c².
        norm = self._cast_norm(inputs.norm._replace(eps=inputs.norm.eps / inputs.projection_multiplier**2))
        return norm, torch.tensor([inputs.scale], dtype=self.dtype, device=self.device)

    def _cast_norm(self, norm: Norm) -> Norm:
        shift = None if norm.bias is None else norm.bias.to(self.dtype)
        return norm._replace(weight=norm.weight.to(self.dtype), bias=shift)

    # Decoding

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], cache: Cache, positions: Sequence[int] | None = None) -> Tensor:
        with self._on:
            step, state = self._prepared(ids, cache, positions)
            logits, _ = self._run(step, state, cache)
            self._ahead = None
            cache.append(1)
            return self._scaled(logits)

    @torch.inference_mode()
    def decode_tokens(
        self,
        ids: Sequence[int],
        cache: Cache,
        positions: Sequence[int] | None = None,
        *,
        choose: Choose | None = None,
        captured: bool = False,
        launch_ahead: bool = False,
    ) -> list[int]:
        """Choose the token after one new token of each sequence, which enters the cache.

        Args:
            ids, cache, positions: As for `decode`.
            choose: Logits [B, N], float32, which it may keep, to tokens int64 [B] on the same device, negative where it could not choose;
                None: the likeliest tokens.
            captured: Whether `choose` depends on the logits alone, so that it becomes a part of the step, and of its CUDA graph.
            launch_ahead: Launch the step of the tokens that this call returns before the host has read them, as the next call is likely to
                be for these. What it computes is dropped if the next call is another one.

        Raises:
            CheckpointError: Without `choose`, the logits are NaN or infinite.
        """
        with self._on:
            step, state = self._prepared(ids, cache, positions, choose if captured else None)
            logits, chosen = self._run(step, state, cache)
            self._ahead = None
            cache.append(1)
            if choose is not None and not captured:
                chosen = choose(self._scaled(logits))
                step.put_ids(chosen)
            self._reader.ask(chosen)
            # A step that waits for the CPU's part of the model would make this call wait, too.
            may_launch = launch_ahead and step.is_captured and not self._has_host_parts and self._has_room(cache, state)
            launched = step.again(len(ids)) if may_launch else None
            tokens: list[int] = self._reader.answer().tolist()
            if choose is None and min(tokens) < 0:
                raise non_finite_logits(is_float16=self.dtype == torch.float16)
            if launched is not None:
                self._ahead = _Ahead(step, cache.version, state.after(tokens), launched)
            else:
                step.has_advanced(state.after(tokens))
            return tokens

    def _run(self, step: DecodeStep, state: State, cache: Cache) -> tuple[Tensor, Tensor]:
        """Run a step, unless it was launched ahead with the same numbers; return logits and the tokens that the step chooses."""
        ahead = self._ahead
        if ahead is not None and ahead.step is step and (ahead.version, ahead.state) == (cache.version, state):
            return ahead.results
        results = step(state, partial(self._decode_layers, cache))
        if step.refused is not None and step.refused not in self.notes:
            self.notes = (*self.notes, step.refused)
            warnings.warn(f"tokens are decoded launch by launch, not by a CUDA graph, as {step.refused}", stacklevel=4)
        return results

    def close_steps_of(self, cache: Cache | None) -> None:
        """Free the memory of decode steps of a cache; None: of caches that are gone."""
        self._ahead = self._first.step = None
        self._steps.close_of(cache)

    def _prepared(
        self, ids: Sequence[int], cache: Cache, positions: Sequence[int] | None, choose: Choose | None = None
    ) -> tuple[DecodeStep, State]:
        """Return the step for new tokens of a cache, for which there is room then, and the step's numbers.

        Args:
            ids, cache, positions: As for `decode`.
            choose: Chooses tokens within the step; None: the likeliest ones.
        """
        self._check_decode(ids, cache)
        self._check_ids(ids)
        positions = cache.positions() if positions is None else list(positions)
        cache.reserve(1)
        self._ropes.reserve(max(positions) + 1)
        starts = tuple(cache.starts) if isinstance(cache, Slots) else (0,) * len(ids)
        groups = self._groups(cache)
        rows = tuple(self._ropes.row(position, position + 1) for position in positions)
        state = State(tuple((layer.length, layer.first) for layer in groups), rows, tuple(ids), starts)
        if self._first:
            self._first.step = HostStep(cache, positions, starts=starts)
        batch = len(ids)
        if isinstance(cache, Slots) and not self._has_host_parts:  # rows without a sequence would cost the CPU as much as others
            batch = min(batch_of_step(batch), cache.capacity)
        padded = any(starts) or batch > len(ids)

        def new_step() -> DecodeStep:
            sizes = [Group(window, layer.size) for window, layer in zip(self._windows, groups, strict=True)]
            chooses = finite_likeliest if choose is None else partial(_chosen, choose, self.spec.logits)
            return DecodeStep(StepShape(sizes, self._ropes.tables, batch, padded), self.device, chooses)

        buffers = tuple(cache.by_layer[index].buffer_id for index, _ in self._on_gpu)
        return self._steps.find((batch, padded, self._ropes.count, buffers, choose), cache, new_step), state

    def _groups(self, cache: Cache) -> list[LayerCache]:
        """Return the cache of the first layer of each group, whose numbers of tokens are those of the whole group."""
        return [cache.by_layer[self._cpu_layers + self._group_of.index(group)] for group in range(len(self._windows))]

    def _has_room(self, cache: Cache, state: State) -> bool:
        """Whether the step after the one with these numbers, whose tokens are in the cache, fits the same buffers and rope tables."""
        furthest = max(row % self._ropes.count for row in state.rows) + 1
        return furthest < self._ropes.count and all(layer.has_room(1) for layer in self._groups(cache))

    def _decode_layers(self, cache: Cache, inputs: Inputs) -> Tensor:
        """Launch a decode step: compute the logits [B, N], in the dtype of activations, and append the tokens to the cache."""
        x = self._embedded(inputs.ids).unsqueeze(1)
        of_layers = self._per_layer_inputs(inputs.ids[:, None], x)
        reuses = any(spec.kv_source is not None for spec in self.spec.layers)
        after = [length + 1 for length in inputs.lengths] if reuses else []  # what a layer with a `kv_source` finds in the cache
        x = self._first(x, inputs.host) if self._first else x
        for layer, (index, spec), group in zip(self._layers, self._on_gpu, self._group_of, strict=True):
            rotary, entry = inputs.rotary[spec.rope] if layer.attention.heads.rotary_width else None, cache.by_layer[index]
            per_layer_input = None if of_layers is None else of_layers[:, :, index]
            length = (inputs.lengths if spec.kv_source is None else after)[group]
            x = decode(layer, x, rotary, _key_values(entry, len(inputs.ids), length), inputs.masks[group], per_layer_input)
            if index in self._host:
                x = self._host.add(index, x, inputs.host)
        return self._head(normed(x[:, 0], self._norm))

    # Prompts

    @torch.inference_mode()
    def prefill(
        self,
        ids: Sequence[int],
        cache: Cache,
        *,
        every: bool = False,
        total: int | None = None,
    ) -> Tensor:
        self._check_prompt(ids, cache)
        logits, total = [], cache.length + len(ids) if total is None else total
        chunk = _FEW if every else self._chunk
        with self._on:
            self._ahead = None
            self._compile_kernels(ids[:chunk], cache, total)
            for start in range(0, len(ids), chunk):
                x = self._prefill_layers([ids[start : start + chunk]], cache, total)
                if every:
                    logits.append(self._scaled(self._head(normed(x[0], self._norm))))
            return torch.cat(logits) if every else self._scaled(self._head(normed(x[0, -1:], self._norm)))[0]

    @torch.inference_mode()
    def prefill_together(self, prompts: Sequence[Sequence[int]], cache: Cache) -> Tensor:
        """Read several prompts side by side, each in as many rows as the longest has.

        Args:
            prompts: The tokens of each sequence, at least one; `most_prompts` sequences at most. All are at most as long as the spec's
                `rope_switch`.
            cache: Empty, of as many sequences, whose tokens begin at index 0. What is in it behind the tokens of a sequence is undefined.

        Returns:
            The logits after the last token of each prompt [B, N], float32 on the GPU.
        """
        if cache.batch != len(prompts) or cache.length or not all(prompts):
            raise ArgumentError(
                "prompts of at least one token are read into an empty cache of as many sequences, got"
                f" {len(prompts)} prompts and a cache of {cache.batch} sequences with {cache.length} tokens"
            )
        for ids in prompts:
            self._check_ids(ids)
        with self._on:
            self._ahead = None
            x = self._prefill_layers(prompts, cache, max(map(len, prompts)))
            last = torch.tensor([len(ids) - 1 for ids in prompts], dtype=torch.int64, device="cpu").to(self.device)
            return self._scaled(self._head(normed(x[torch.arange(len(prompts), device=self.device), last], self._norm)))

    def verify(self, ids: Sequence[int], cache: Cache) -> Tensor:
        return self.prefill(ids, cache, every=True)

    def _compile_kernels(self, ids: Sequence[int], cache: Cache, total: int) -> None:
        """Compile the kernels of the first prefill, and of a decode step after it, in parallel and without launching them.

        Results are undefined then. Mixtures of experts, which compute addresses from results, are excluded (`_compiles`).
        """
        if not self._compiles:
            return
        self._compiles = False
        from halfbyte.kernels.gpu.runtime import launch, tape

        tape.why_not_replayed(self.device)
        scratch_cache = cache.empty()
        with launch.compiling(self.device):
            self._head(normed(self._prefill_layers([ids], scratch_cache, total)[0, -1:], self._norm))
            step, state = self._prepared(ids[-1:], scratch_cache, None)
            step(state, partial(self._decode_layers, scratch_cache))
        self._steps.forget()

    def _prefill_layers(self, prompts: Sequence[Sequence[int]], cache: Cache, total: int) -> Tensor:
        """Compute the hidden states [B, t, K] after the last layer, t tokens of the longest prompt, and append them to the cache.

        Prompts are padded to a number of rows that few lengths differ in, so that recorded launches serve many lengths. What padded rows
        write lies behind the sequence in the cache, and is overwritten.

        Args:
            prompts: The tokens of each sequence.
            cache: Of as many sequences.
            total: Length of the sequences, which decides between short and long frequencies ("longrope").
        """
        longest, before = max(map(len, prompts)), cache.length
        tokens, rows = longest, _rows_of_prompt(longest)
        on_gpu = not self._first and (not self._host or self._host.streams(rows))
        if on_gpu and (cache.most is None or before + rows <= cache.most):
            tokens = rows
        cache.reserve(tokens)
        self._ropes.reserve(before + tokens)
        row = self._ropes.row(before, total)
        rotary = [(table[0, None, row : row + tokens], table[1, None, row : row + tokens]) for table in self._ropes.tables]
        groups = self._groups(cache)
        lengths = [torch.full((1,), layer.length, dtype=torch.int64, device=self.device) for layer in groups]
        masks = [self._window_mask(window, tokens, layer) for window, layer in zip(self._windows, groups, strict=True)]
        padded = [[*ids, *[0] * (tokens - len(ids))] for ids in prompts]
        given = torch.tensor(padded, dtype=torch.int64, device="cpu").to(self.device)
        x = self._embedded(given.flatten()).unflatten(0, given.shape)
        of_layers = self._per_layer_inputs(given, x)
        add_experts = self._host.begin(given.numel())
        if self._first:
            self._first.step = HostStep(cache, range(before, before + tokens), total)
            x = self._first(x, AT_ONCE)
        for layer, (index, spec), group in zip(self._layers, self._on_gpu, self._group_of, strict=True):
            entry = cache.by_layer[index]
            tables, mask, length = rotary[spec.rope] if layer.attention.heads.rotary_width else None, masks[group], lengths[group]
            per_layer_input = None if of_layers is None else of_layers[:, :, index]
            if len(entry.buffers) == 2:  # in floating point
                x = prefill(layer, x, tables, KeyValues(entry.keys, entry.values, length), mask, per_layer_input)
            elif spec.kv_source is not None:
                keys, values = self._dequantized(entry, entry.length + tokens)
                mask = None if mask is None else mask[..., : keys.shape[2]]
                x = prefill(layer, x, tables, KeyValues(keys, values, length), mask, per_layer_input)
            else:
                x, _ = prefill_with(layer, x, tables, partial(self._append_codes, entry), mask, per_layer_input, length)
            if index in self._host:
                x = add_experts(index, x)
        cache.append(longest)
        hidden: Tensor = x[:, :longest]
        return hidden

    def _per_layer_inputs(self, ids: Tensor, x: Tensor) -> Tensor | None:
        """Compute the per-layer inputs [B, t, layers, P] of tokens [B, t], embedded as x [B, t, K]; None where layers have none."""
        inputs = self.spec.per_layer_inputs
        if inputs is None:
            return None
        assert self._inputs_norm is not None
        norm, scale = self._inputs_norm
        parts = len(self._layers), len(norm.weight)
        rows = self._table_rows(ids.flatten(), inputs.table).view(*ids.shape, *parts) * inputs.table_multiplier
        projected = PackedProjection(inputs.projection)(x).view(*ids.shape, *parts)
        return add_normed(projected, rows, norm, None, scale)[0]

    def _append_codes(self, entry: LayerCache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, Hkv, t, D] to an int8 cache; return those of all tokens, dequantized."""
        end = entry.length + keys.shape[2]
        for new, (codes, scales) in zip((keys, values), _codes_and_scales(entry), strict=True):
            codes[:, :, entry.length : end], scales[:, :, entry.length : end] = to_codes(new)
        return self._dequantized(entry, end)

    def _dequantized(self, entry: LayerCache, end: int) -> tuple[Tensor, Tensor]:
        """Return the first `end` keys and values of an int8 cache, dequantized, [B, Hkv, end, D]."""
        both = [from_codes(codes[:, :, :end], scales[:, :, :end], self.dtype) for codes, scales in _codes_and_scales(entry)]
        return both[0], both[1]

    def _window_mask(self, window: int | None, tokens: int, layer: LayerCache) -> Tensor | None:
        """Return which tokens of a layer's buffer each new one attends to, bool [1, t, T]; None: all up to itself."""
        if window is None or layer.length + tokens <= window:
            return None
        columns = torch.arange(layer.size, device=self.device)
        rows = torch.arange(layer.length, layer.length + tokens, device=self.device)[:, None]
        return ((columns > rows - window) & (columns <= rows))[None]

    # Both

    def _head(self, x: Tensor) -> Tensor:
        """Logits [M, N] of normed rows [M, K], in the type of activations, before `spec.logits`."""
        head = self.spec.lm_head
        if isinstance(head, Weight):
            return PackedProjection(head)(x)
        bias = self.spec.lm_head_bias
        return torch.nn.functional.linear(x, head.to(self.dtype), None if bias is None else bias.to(self.dtype))

    def _scaled(self, y: Tensor) -> Tensor:
        """The model's logits, float32, in memory of their own."""
        return _logits(self.spec.logits, y)


def _logits(function: Logits, y: Tensor) -> Tensor:
    return logits_in_torch(y.to(torch.float32, copy=True), function)


def _chosen(choose: Choose, function: Logits, y: Tensor) -> Tensor:
    """Choose tokens by the output y [B, N] of the output embedding."""
    return choose(_logits(function, y))


def _rows_of_prompt(tokens: int) -> int:
    """Return the rows that a prompt of so many tokens is padded to: a power of 2 up to 8, then a multiple of 16 that grows with the
    prompt, at most an eighth more."""
    power = 1 << (tokens - 1).bit_length()
    return power if tokens <= 8 else round_up(tokens, max(16, power // 16))


def _codes_and_scales(entry: LayerCache) -> list[tuple[Tensor, Tensor]]:
    """Return codes and scales, of keys and of values, of an int8 cache."""
    keys, values, key_scales, value_scales = entry.buffers
    return [(keys, key_scales), (values, value_scales)]


def _key_values(entry: LayerCache, batch: int, length: Tensor) -> KeyValues:
    """Return the cache of a layer's first `batch` sequences, which have `length` tokens, as `decode` reads it."""
    keys, values, *scales = (buffer[:batch] for buffer in entry.buffers)
    return KeyValues(keys, values, length, (scales[0], scales[1]) if scales else None)
