"""Computes a decoder specification on a GPU: the kernels of a layer (`gpu_layer.py`) for prompts, and a CUDA graph of the whole model for
one token of each sequence (`gpu_step.py`).

The interface is that of `lower_cpu.py`. Without a GPU the same code runs in torch's operations on a CPU, as tests do.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfbyte import env
from halfbyte.decoder.cache import Cache, LayerCache, OnGpu, Slots
from halfbyte.decoder.gpu_layer import GpuLayer, KeyValues, PackedProjection, decode, packed_layer, prefill, prefill_with
from halfbyte.decoder.gpu_step import Choose, DecodeStep, Group, HostReader, Inputs, State, StepShape, batch_of_step, finite_likeliest
from halfbyte.decoder.kernels_gpu import torch_ops, why_not_layer
from halfbyte.decoder.offload.crossing import AT_ONCE
from halfbyte.decoder.offload.host_experts import HostExperts
from halfbyte.decoder.offload.host_layers import HostLayers, HostStep
from halfbyte.decoder.offload.placement import CHUNK, ON_GPU, Plan
from halfbyte.decoder.rope import Rope
from halfbyte.decoder.spec import DecoderSpec, LayerSpec, Logits
from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.errors import ArgumentError, UnsupportedError, non_finite_logits
from halfbyte.kernels.layer_kinds import logits_in_torch
from halfbyte.layouts.base import Packed, round_up
from halfbyte.layouts.records import from_codes, to_codes
from halfbyte.machine import gpu
from halfbyte.ops.functions import embedding
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
_FEW = 512  # where attention is computed in torch, or all logits are asked for
_LEAST_POSITIONS = 2048  # for which there are cosines and sines at first
_LONG = 1 << 62  # tokens of a sequence
_MOST_STEPS = 32  # whose graphs are cached
_CAST = "router", "gate", "layer_scale"  # tensors, in addition to norms, that are in the type of activations


class GpuModel:
    """A decoder, ready to compute on a GPU. Its weights must not change.

    Attributes:
        spec: What is computed, with the weights.
        device: Where.
        dtype: Of activations: float16, bfloat16 or float32.
        plan: What is computed on the CPU; None: nothing.
        where: `device` and `dtype` for its caches.
        most_decode: Sequences that are decoded at the same time, at most.
        most_verify: Tokens of one sequence that are verified at the same time, at most.
        least_prefill: Tokens of a prompt that are read at a time, at least, where others of it are in the cache.
        most_prompts, prefill_chunk: Prompts, and tokens of prompts, that are read before other sequences are decoded, at most.
        notes: Which ops have no kernel on this device and are computed by torch's operations, and why.
    """

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
        home, self.plan, self.placement = spec.embedding.device, plan, ON_GPU if plan is None else plan.placement
        sequences = MOST_SEQUENCES if plan is None else min(MOST_SEQUENCES, plan.request.sequences)
        self.spec, self.dtype, self.most_decode, self.most_verify, self.least_prefill = spec, dtype, sequences, _MOST_VERIFY, 1
        if home.type != torch.device(device).type or torch.device(device).index not in (None, home.index):
            raise ArgumentError(f"the weights of this model are on {home}, got device={str(device)!r}: pack them for that device")
        self._cpu_layers = self.placement.layers
        self.device, self.where = home, OnGpu(home, dtype, self._cpu_layers)
        for index, layer in enumerate(spec.layers[self._cpu_layers :], self._cpu_layers):
            if (reason := why_not_layer(layer)) is not None:
                raise UnsupportedError(f"layer {index} is not computed on a GPU: {reason}")
        memory = None if plan is None or plan.request.memory is None else plan.request.memory - plan.gpu_bytes + plan.stream_bytes
        self._host = HostExperts(self._host_experts(), home, memory)
        self._first = HostLayers(spec.layers[: self._cpu_layers], spec.ropes, home)
        self.most_prompts = 1 if self._has_host_parts else _MOST_PROMPTS
        if plan is not None:  # whose caches of few tokens fit into that of one sequence, which is planned for
            self.most_prompts = max(1, min(self.most_prompts, plan.request.context // 64))
        if self._first and self.most_decode > MOST_ON_CPU:
            self.most_decode = MOST_ON_CPU
        self._layers = [self._lowered(index, layer) for index, layer in self._on_gpu]
        self._norm = self._cast_norm(spec.norm)
        self._inputs_norm = None if spec.per_layer_inputs is None else self._norm_of_inputs(spec.per_layer_inputs)
        windows = list(dict.fromkeys(layer.sliding_window for _, layer in self._on_gpu))
        self._windows, self._group_of = windows, [windows.index(layer.sliding_window) for _, layer in self._on_gpu]
        self._tables: list[Tensor] = []
        self._steps: dict[tuple[object, ...], DecodeStep] = {}
        self._caches: dict[DecodeStep, weakref.ref[Cache]] = {}  # that steps are for
        self._ahead: tuple[DecodeStep, int, State, tuple[Tensor, Tensor]] | None = None
        self._reader = HostReader()
        in_torch = any(layer.attention.heads.softcap is not None for layer in spec.layers) or dtype == torch.float32
        self._chunk = _FEW if in_torch else CHUNK
        self.prefill_chunk = _FEW if in_torch or (self._has_host_parts and not self.streams_experts) else _READ
        mixed = any(isinstance(layer.mlp, Experts) for layer in spec.layers)
        self._compiles = home.type == "cuda" and not mixed and not self._first and why_no_triton() is None and not env.tune()
        self.notes = (*(torch_ops(spec, dtype, gpu(home.index or 0)) if home.type == "cuda" else ()), *self._host.notes)

    @property
    def _on_gpu(self) -> list[tuple[int, LayerSpec]]:
        """The layers that are on the GPU, with their index."""
        return [*enumerate(self.spec.layers)][self._cpu_layers :]

    @property
    def streams_experts(self) -> bool:
        """Whether experts that are on the CPU cross to the GPU for long prompts."""
        return self._host.has_copy

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
        return packed_layer(*(self._cast(part) for part in (layer.attention, mlp, layer.per_layer_input))).linked()

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
        """A part of a layer with norms, routers and factors of outputs in the type of activations."""
        if isinstance(part, Norm):
            return self._cast_norm(part)
        if type(part) is tuple:
            return tuple(map(self._cast, part))
        if not isinstance(part, tuple):
            return part
        values = part._asdict().items()  # type: ignore[attr-defined]  # of a NamedTuple
        return type(part)(*(one.to(self.dtype) if name in _CAST and isinstance(one, Tensor) else self._cast(one) for name, one in values))

    def _norm_of_inputs(self, inputs: PerLayerInputs) -> tuple[Norm, Tensor]:
        """The norm of projected embeddings, and the factor of per-layer inputs [1]."""
        norm = self._cast_norm(
            inputs.norm._replace(eps=inputs.norm.eps / inputs.projection_multiplier**2)
        )  # norm(c * y) is that of y with eps / c²
        return norm, torch.tensor([inputs.scale], dtype=self.dtype, device=self.device)

    def _cast_norm(self, norm: Norm) -> Norm:
        shift = None if norm.bias is None else norm.bias.to(self.dtype)
        return norm._replace(weight=norm.weight.to(self.dtype), bias=shift)

    # Decoding

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], cache: Cache, positions: Sequence[int] | None = None) -> Tensor:
        """Compute the logits [B, N], float32 on the GPU, after one new token of each sequence, which enters the cache.

        Args:
            ids: A token for each sequence.
            cache: Of the tokens before.
            positions: Of the tokens; None: those that follow in the cache.
        """
        with self._on:
            step, state = self._prepared(ids, cache, positions)
            logits, _ = self._result(step, state, cache)
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
            logits, chosen = self._result(step, state, cache)
            self._ahead = None
            cache.append(1)
            if choose is not None and not captured:
                chosen = choose(self._scaled(logits))
                step.put_ids(chosen)
            self._reader.ask(chosen)
            launches_ahead = (
                launch_ahead and step.is_captured and not self._has_host_parts
            )  # a step with functions of the host waits for them
            launched = step.again(len(ids)) if launches_ahead and self._has_room(cache, state) else None
            tokens: list[int] = self._reader.answer().tolist()
            if choose is None and min(tokens) < 0:
                raise non_finite_logits(is_float16=self.dtype == torch.float16)
            if launched is not None:
                self._ahead = step, cache.version, state.after(tokens), launched
            else:
                step.has_advanced(state.after(tokens))
            return tokens

    def _result(self, step: DecodeStep, state: State, cache: Cache) -> tuple[Tensor, Tensor]:
        """Logits and the likeliest tokens of a step, which may have been launched already."""
        if self._ahead is not None and self._ahead[0] is step and self._ahead[1:3] == (cache.version, state):
            return self._ahead[3]
        found = step(state, partial(self._compute, cache))
        if step.refused is not None and step.refused not in self.notes:
            self.notes = (*self.notes, step.refused)
            warnings.warn(f"tokens are decoded launch by launch, not by a CUDA graph, as {step.refused}", stacklevel=4)
        return found

    def close_steps_of(self, cache: Cache | None) -> None:
        """Free what decode steps of a cache hold; None: of caches that are gone."""
        self._ahead = self._first.step = None
        for key in [key for key, step in self._steps.items() if self._caches[step]() is cache]:
            self._close_step(key)

    def _prepared(
        self, ids: Sequence[int], cache: Cache, positions: Sequence[int] | None, choose: Choose | None = None
    ) -> tuple[DecodeStep, State]:
        """The step for new tokens of a cache, with room for them, and its numbers. choose: Chooses tokens, in the step."""
        if len(ids) != cache.batch or len(ids) > self.most_decode:
            raise ArgumentError(
                f"one token is decoded for each of the cache's {cache.batch} sequences, {self.most_decode} at most, got {len(ids)}"
            )
        self._check_ids(ids)
        positions = cache.positions() if positions is None else list(positions)
        cache.reserve(1)
        self._compute_positions(max(positions) + 1)
        starts = tuple(cache.starts) if isinstance(cache, Slots) else (0,) * len(ids)
        groups = self._groups(cache)
        switch, count = self.spec.rope_switch, self._positions
        rows = tuple(position if switch is None or position < switch else position + count for position in positions)
        state = State(tuple((layer.length, layer.first) for layer in groups), rows, tuple(ids), starts)
        if self._first:
            self._first.step = HostStep(cache, positions, starts=starts)
        batch = len(ids)
        if isinstance(cache, Slots) and not self._has_host_parts:  # rows without a sequence would cost the CPU as much as others
            batch = min(batch_of_step(batch), cache.capacity)
        padded = any(starts) or batch > len(ids)
        key = batch, padded, count, tuple(cache.by_layer[index].buffer_id for index, _ in self._on_gpu), choose
        step = self._steps.pop(key, None)
        if step is None:
            self._close_steps()
            sizes = [Group(window, layer.size) for window, layer in zip(self._windows, groups, strict=True)]
            chooses = finite_likeliest if choose is None else partial(_chosen, choose, self.spec.logits)
            step = DecodeStep(StepShape(sizes, self._tables, batch, padded), self.device, chooses)
            self._caches[step] = weakref.ref(cache)
        self._steps[key] = step  # the last one used is the last one
        return step, state

    def _close_steps(self) -> None:
        """Close steps of caches that are gone, and the oldest ones where there are too many: a graph keeps scratch memory."""
        gone = [key for key, step in self._steps.items() if self._caches[step]() is None]
        oldest = [key for key in self._steps if key not in gone][: max(0, len(self._steps) - len(gone) - _MOST_STEPS + 1)]
        for key in (*gone, *oldest):
            self._close_step(key)

    def _close_step(self, key: tuple[object, ...]) -> None:
        step = self._steps.pop(key)
        del self._caches[step]
        step.close()

    def _groups(self, cache: Cache) -> list[LayerCache]:
        """The first layer of each group: its buffers have the same tokens as those of the others."""
        return [cache.by_layer[self._cpu_layers + self._group_of.index(group)] for group in range(len(self._windows))]

    def _has_room(self, cache: Cache, state: State) -> bool:
        """Whether the step after the one with these numbers, which are in the cache, needs no other buffers and tables."""
        last = max(row % self._positions for row in state.rows) + 1
        return last < self._positions and all(layer.has_room(1) for layer in self._groups(cache))

    def _compute(self, cache: Cache, inputs: Inputs) -> Tensor:
        """Logits [B, N] in the type of activations; the tokens enter the cache."""
        x = self._embedded(inputs.ids).unsqueeze(1)
        of_layers = self._per_layer_inputs(inputs.ids[:, None], x)
        reuses = any(spec.kv_source is not None for spec in self.spec.layers)
        after = [length + 1 for length in inputs.lengths] if reuses else []  # lengths of caches that have the new token already
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
        """Read tokens of one sequence, which enter the cache.

        Args:
            ids: The tokens, at least one.
            cache: Of the tokens before, of one sequence.
            every: Compute the logits of every token, not of the last one.
            total: Length of the whole sequence, which decides between short and long frequencies ("longrope"); None: with these tokens.

        Returns:
            The logits after the last token [N], float32 on the GPU; or after every token [t, N].
        """
        if cache.batch != 1 or not ids:
            raise ArgumentError(f"a prompt of at least one token is read into the cache of one sequence, got {len(ids)} and {cache.batch}")
        self._check_ids(ids)
        logits, total = [], cache.length + len(ids) if total is None else total
        chunk = _FEW if every else self._chunk
        with self._on:
            self._ahead = None
            self._compile_kernels(ids[:chunk], cache, total)
            for start in range(0, len(ids), chunk):
                x = self._read([ids[start : start + chunk]], cache, total)
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
            x = self._read(prompts, cache, max(map(len, prompts)))
            last = torch.tensor([len(ids) - 1 for ids in prompts], dtype=torch.int64, device="cpu").to(self.device)
            return self._scaled(self._head(normed(x[torch.arange(len(prompts), device=self.device), last], self._norm)))

    def verify(self, ids: Sequence[int], cache: Cache) -> Tensor:
        """Read tokens of which the first is known and the others are guesses; the logits after each, as `decode` would give them up to the
        rounding of sums, which kernels of several rows choose otherwise."""
        return self.prefill(ids, cache, every=True)

    def _compile_kernels(self, ids: Sequence[int], cache: Cache, total: int) -> None:
        """Compile the kernels of the first prefill and of a decode step after it side by side, without launching them.

        As their results are undefined, models that find addresses in them, which are mixtures of experts, are left out.
        """
        if not self._compiles:
            return
        self._compiles = False
        from halfbyte.kernels.gpu.runtime import launch, tape

        tape.why_not_replayed(self.device)
        scratch_cache = cache.empty()
        with launch.compiling(self.device):
            self._head(normed(self._read([ids], scratch_cache, total)[0, -1:], self._norm))
            step, state = self._prepared(ids[-1:], scratch_cache, None)
            step(state, partial(self._compute, scratch_cache))
        self._steps.clear()
        self._caches.clear()

    def _read(self, prompts: Sequence[Sequence[int]], cache: Cache, total: int) -> Tensor:
        """The hidden states [B, t, K] of tokens of each sequence after the last layer, t of the longest. total: length of the sequences.

        Rows behind the tokens are computed, too, so that there are recorded launches for few numbers of tokens. What these rows write
        lies behind the sequence in the cache.
        """
        longest, before = max(map(len, prompts)), cache.length
        tokens, rows = longest, _rows_of_prompt(longest)
        on_gpu = not self._first and (not self._host or self._host.streamed_share(rows) > 0)
        if on_gpu and (cache.most is None or before + rows <= cache.most):
            tokens = rows
        cache.reserve(tokens)
        self._compute_positions(before + tokens)
        switch = self.spec.rope_switch
        row = before if switch is None or total <= switch else before + self._positions
        rotary = [(table[0, None, row : row + tokens], table[1, None, row : row + tokens]) for table in self._tables]
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
            if len(entry.buffers) == 2:
                x = prefill(layer, x, tables, KeyValues(entry.keys, entry.values, length), mask, per_layer_input)
            elif spec.kv_source is not None:
                states = self._decoded(entry, entry.length + tokens)
                x = prefill(
                    layer, x, tables, KeyValues(*states, length), None if mask is None else mask[..., : states[0].shape[2]], per_layer_input
                )
            else:
                x, _ = prefill_with(layer, x, tables, partial(self._encoded, entry), mask, per_layer_input, length)
            if index in self._host:
                x = add_experts(index, x)
        cache.append(longest)
        read: Tensor = x[:, :longest]
        return read

    def _per_layer_inputs(self, ids: Tensor, x: Tensor) -> Tensor | None:
        """The layers' own inputs [B, t, layers, P] of tokens ids [B, t] that are embedded as x; None where they have none."""
        inputs = self.spec.per_layer_inputs
        if inputs is None:
            return None
        assert self._inputs_norm is not None
        norm, scale = self._inputs_norm
        parts = len(self._layers), len(norm.weight)
        rows = self._rows(ids.flatten(), inputs.table).view(*ids.shape, *parts) * inputs.table_multiplier
        projected = PackedProjection(inputs.projection)(x).view(*ids.shape, *parts)
        return add_normed(projected, rows, norm, None, scale)[0]

    def _encoded(self, entry: LayerCache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, Hkv, t, D] in 8 bits; all that there are, dequantized."""
        end = entry.length + keys.shape[2]
        for new, (codes, scales) in zip((keys, values), _codes_and_scales(entry), strict=True):
            codes[:, :, entry.length : end], scales[:, :, entry.length : end] = to_codes(new)
        return self._decoded(entry, end)

    def _decoded(self, entry: LayerCache, end: int) -> tuple[Tensor, Tensor]:
        """The first `end` keys and values of a cache in 8 bits, dequantized."""
        both = [from_codes(codes[:, :, :end], scales[:, :, :end], self.dtype) for codes, scales in _codes_and_scales(entry)]
        return both[0], both[1]

    def _window_mask(self, window: int | None, tokens: int, layer: LayerCache) -> Tensor | None:
        """bool [1, t, T]: which tokens of a buffer each new one may attend to; None: all before it."""
        if window is None or layer.length + tokens <= window:
            return None
        columns = torch.arange(layer.size, device=self.device)
        rows = torch.arange(layer.length, layer.length + tokens, device=self.device)[:, None]
        return ((columns > rows - window) & (columns <= rows))[None]

    # Both

    def _check_ids(self, ids: Sequence[int]) -> None:
        if min(ids) < 0 or max(ids) >= self.spec.vocabulary:
            raise ArgumentError(f"token ids lie in 0 … {self.spec.vocabulary - 1}, got {min(ids)} … {max(ids)}")

    @property
    def _positions(self) -> int:
        """Positions that tables of rope have."""
        return 0 if not self._tables else self._tables[0].shape[1] // (1 if self.spec.rope_switch is None else 2)

    def _compute_positions(self, count: int) -> None:
        """Make tables of rope for at least so many positions; those of longer sequences ("longrope") lie behind."""
        if count > self._positions:
            count = max(_LEAST_POSITIONS, 1 << (count - 1).bit_length())
            lengths = [1] if self.spec.rope_switch is None else [1, _LONG]
            self._tables = [_table(rope, count, lengths).to(self.device) for rope in self.spec.ropes]

    def _embedded(self, ids: Tensor) -> Tensor:
        """Hidden states [t, K] of ids [t]."""
        x = self._rows(ids, self.spec.embedding)
        return x if self.spec.embedding_multiplier == 1.0 else x * self.spec.embedding_multiplier

    def _rows(self, ids: Tensor, table: Packed | Tensor) -> Tensor:
        """Rows [t, K] of an embedding."""
        if isinstance(table, Packed):
            return embedding(ids, table, dtype=self.dtype)
        return table.index_select(0, ids.clamp(min=0)).to(self.dtype)

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
    """The tokens that are chosen after the output y of the head."""
    return choose(_logits(function, y))


def _rows_of_prompt(tokens: int) -> int:
    """How many rows are computed for so many tokens of a prompt: at most an eighth more, but 16 or a power of 2 of few tokens."""
    power = 1 << (tokens - 1).bit_length()
    return power if tokens <= 8 else round_up(tokens, max(16, power // 16))


def _table(rope: Rope, count: int, lengths: Sequence[int]) -> Tensor:
    """Cosines and sines of `count` positions of sequences of each of the lengths, [2, lengths * count, R / 2]."""
    return torch.cat([torch.cat(rope.tables(0, count, length)) for length in lengths], 1)


def _codes_and_scales(entry: LayerCache) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales, of keys and of values."""
    keys, values, key_scales, value_scales = entry.buffers
    return [(keys, key_scales), (values, value_scales)]


def _key_values(entry: LayerCache, batch: int, length: Tensor) -> KeyValues:
    keys, values, *scales = (buffer[:batch] for buffer in entry.buffers)
    return KeyValues(keys, values, length, (scales[0], scales[1]) if scales else None)
