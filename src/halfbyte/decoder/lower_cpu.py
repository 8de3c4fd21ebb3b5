"""Computes a decoder specification on a CPU: `CpuModel`, with the interface `DecoderModel` that it shares with `GpuModel`.

prefill          one native call for each layer, `ops.transformer.decoder.run_layers`; of few tokens for several layers
decode, verify   one native call for the whole model, `ops.transformer.whole_model_decode`
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.decoder.cache import Cache, OnGpu
from halfbyte.decoder.offload.placement import Plan
from halfbyte.decoder.program import ALL_HEADS, TORCH, Lowered, Op, Program, readers_of
from halfbyte.decoder.spec import DecoderSpec, LayerSpec
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.kernels.layer_kinds import logits_in_torch
from halfbyte.kernels.problem import Problem, check_compute
from halfbyte.layouts.base import Packed
from halfbyte.ops.functions import embedding, linear
from halfbyte.ops.transformer.decoder import MOST_SEQUENCES, DecoderLayer, run_layers, why_not
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.norms import wide_norm
from halfbyte.ops.transformer.weights import Weight, why_not_packed
from halfbyte.ops.transformer.whole_model_decode import MOST_CONSECUTIVE, WholeModelDecode

_FEW = 32  # tokens of a prompt up to which several layers are one native call, which has memory for the results of each
STEP = "decode step"  # the native call
_NORMS = "rms_norm", "layer_norm"
# The kernels of ops with a step of their own, linear layers excepted.
_STEPS = {"embedding": "dequantize", "attention": "attend", "router": "router", "residual": "scale", "qk_norm": "norm"}
_STEPS |= {"rms_norm": "norm", "layer_norm": "norm", "softcap": "each", "logit_scale": "each"}
_ROPE_BLOCK = 256  # positions whose cosines and sines are computed at a time
_CHUNK = 512  # tokens of a prompt at a time: masks of sliding windows and intermediate results stay small
# Kernels of a few rows sum in another order than those of more, whose results do not depend on the number of rows. So a prompt has the same
# logits, bit by bit, in whatever parts it is read, if each has at least so many tokens; not where experts get rows of their own.
LEAST_PREFILL = MOST_CONSECUTIVE + 1


class DecoderModel(ABC):
    """A decoder that is ready to compute on a device: `CpuModel`, or `GpuModel` (lower_gpu.py). Its weights must not change.

    Attributes:
        spec: The specification, with the weights.
        where: What `Cache` needs to know of the GPU; None: the model computes on a CPU.
        dtype: Of activations.
        plan: Which layers and experts are on the CPU, where the model computes on a GPU; None: none.
        notes: Which ops torch computes, as the device has no kernel for them, and why.
        most_decode: Maximum number of sequences of `decode`.
        most_verify: Maximum number of tokens of `verify`.
        least_prefill: Minimum number of tokens of `prefill` where the cache has others of the sequence: with fewer the logits of a prompt
            would depend on the parts that it is read in.
        most_prompts: Maximum number of prompts that are prefilled as one batch.
        prefill_chunk: Tokens of prompts after which `Batch` decodes other sequences again.
        streams_experts: Whether experts that are on the CPU are copied to the GPU for long prompts.
    """

    spec: DecoderSpec
    where: OnGpu | None = None
    dtype: torch.dtype = torch.float32
    plan: Plan | None = None
    notes: tuple[str, ...] = ()
    most_decode: int
    most_verify: int
    least_prefill: int
    most_prompts: int
    prefill_chunk: int

    @property
    def streams_experts(self) -> bool:
        return False

    @abstractmethod
    def decode(self, ids: Sequence[int], cache: Cache, positions: Sequence[int] | None = None) -> Tensor:
        """Compute the logits [B, N], float32 on the model's device, after one new token of each sequence, which enters the cache.

        Args:
            ids: A token for each sequence.
            cache: Of the tokens before.
            positions: Of the tokens; None: those that follow in the cache.
        """

    @abstractmethod
    def prefill(self, ids: Sequence[int], cache: Cache, *, every: bool = False, total: int | None = None) -> Tensor:
        """Read tokens of one sequence, which enter the cache.

        Args:
            ids: The tokens, at least one.
            cache: Of the tokens before, of one sequence.
            every: Compute the logits of every token, not of the last one.
            total: Length of the whole sequence, which decides between short and long frequencies ("longrope"); None: with these tokens.

        Returns:
            The logits after the last token [N], float32 on the model's device; or after every token [t, N].
        """

    @abstractmethod
    def verify(self, ids: Sequence[int], cache: Cache) -> Tensor:
        """Compute the logits [t, N] after every one of several tokens of one sequence, which enter the cache.

        On a CPU they are those of as many calls of `decode`, bit by bit; on a GPU kernels of several rows round sums otherwise.

        Args:
            ids: The tokens, `most_verify` at most: the newest one and guesses of those that follow.
            cache: Of the tokens before, of one sequence.
        """

    def _check_decode(self, ids: Sequence[int], cache: Cache) -> None:
        if len(ids) != cache.batch or len(ids) > self.most_decode:
            raise ArgumentError(
                f"one token is decoded for each of the cache's {cache.batch} sequences, {self.most_decode} at most, got {len(ids)}"
            )

    def _check_prompt(self, ids: Sequence[int], cache: Cache) -> None:
        if cache.batch != 1 or not ids:
            raise ArgumentError(f"a prompt of at least one token is read into the cache of one sequence, got {len(ids)} and {cache.batch}")
        self._check_ids(ids)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if min(ids) < 0 or max(ids) >= self.spec.vocabulary:
            raise ArgumentError(f"token ids lie in 0 … {self.spec.vocabulary - 1}, got {min(ids)} … {max(ids)}")

    def _embedded(self, ids: Tensor) -> Tensor:
        """Hidden states [..., K] of ids."""
        x = self._table_rows(ids, self.spec.embedding)
        return x if self.spec.embedding_multiplier == 1.0 else x * self.spec.embedding_multiplier

    def _table_rows(self, ids: Tensor, table: Packed | Tensor) -> Tensor:
        """Rows [..., K] of an embedding."""
        if isinstance(table, Packed):
            return embedding(ids, table, dtype=self.dtype)
        return functional.embedding(ids.clamp(min=0), table).to(self.dtype)


class CpuModel(DecoderModel):
    """A decoder on a CPU.

    Attributes:
        step: The native call of a decode step, up to the logits, or to normed hidden states where the output embedding is not packed.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        """Lower a specification.

        Raises:
            UnsupportedError: A part of it has no kernel on a CPU.
            ArgumentError: Its tensors do not fit together.
        """
        self.spec = spec
        check_supported(spec)
        head = spec.lm_head if isinstance(spec.lm_head, Weight) else None
        self._layers = lowered_layers(spec.layers)
        self.step = WholeModelDecode(
            self._layers,
            spec.embedding,
            spec.norm,
            head,
            [layer.sliding_window for layer in spec.layers],
            [layer.rope for layer in spec.layers],
            factor=spec.embedding_multiplier,
            logits=None if head is None else spec.logits,
            per_layer_inputs=spec.per_layer_inputs,
        )
        # Layers from here on add no keys and values: only tokens whose outputs are wanted take them.
        self._first_reusing = first_reusing(spec)
        self._rotary_dim = max((layer.rotary for layer in self._layers), default=0)
        self._rope_blocks: dict[tuple[int, bool], Tensor] = {}  # by their number, and whether frequencies are those of long sequences
        self.most_decode = most_decode(spec)
        self.most_verify = min(MOST_CONSECUTIVE, self.most_decode)
        self.least_prefill, self.most_prompts, self.prefill_chunk = LEAST_PREFILL, 1, _CHUNK

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], cache: Cache, positions: Sequence[int] | None = None) -> Tensor:
        self._check_decode(ids, cache)
        cache.reserve(1)
        return self._stepped(ids, cache.positions() if positions is None else positions, cache, cache.mask())

    def _stepped(self, ids: Sequence[int], where: Sequence[int], cache: Cache, mask: Tensor | None, *, consecutive: bool = False) -> Tensor:
        """The logits [M, N] after tokens at these positions, one of each sequence, or `consecutive` tokens of one."""
        rows = [self.rope_row(position, position + 1) for position in where]
        y = self.step(
            ids, [address for _, address in rows], cache.buffer_version, cache.entries, cache.length, mask, consecutive=consecutive
        )
        cache.append(len(ids) if consecutive else 1)
        if isinstance(self.spec.lm_head, Weight):
            return y[:, 0]
        if not consecutive:
            return self._head(y[:, 0])
        return torch.cat([self._head(row) for row in y])  # torch sums several rows in another order

    def rope_row(self, position: int, length: int) -> tuple[Tensor, int]:
        """The table that has a position's cosines and sines of all ropes in sequences of a length, [block, ropes, 2, R], and the address of
        the position in it."""
        number, row = divmod(position, _ROPE_BLOCK)
        key = number, any(rope.switch is not None and length > rope.switch for rope in self.spec.ropes)
        table = self._rope_blocks.get(key)
        if table is None:
            with torch.inference_mode(False), torch.no_grad():
                table = torch.zeros(_ROPE_BLOCK, len(self.spec.ropes), 2, self._rotary_dim, dtype=torch.float32, device="cpu")
                for index, rope in enumerate(self.spec.ropes):
                    both = torch.stack(rope.tables(number * _ROPE_BLOCK, (number + 1) * _ROPE_BLOCK, length), 2)[0]
                    width = min(self._rotary_dim, both.shape[2])
                    table[:, index, :, :width] = both[..., :width]
            self._rope_blocks[key] = table
        return table, table.data_ptr() + row * table.stride(0) * 4

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], cache: Cache, *, every: bool = False, total: int | None = None) -> Tensor:
        self._check_prompt(ids, cache)
        logits = []
        total = cache.length + len(ids) if total is None else total
        for start, end in _chunks(len(ids)):
            some, is_last = ids[start:end], end == len(ids)
            x = self._prefill_layers(some, cache, total, len(some) if every else int(is_last))
            if every:
                logits.append(self._head(self._normed(x[0])))
        return torch.cat(logits) if every else self._head(self._normed(x[0, -1:]))[0]

    @torch.inference_mode()
    def verify(self, ids: Sequence[int], cache: Cache) -> Tensor:
        # Bit by bit those of `decode`: the kernels of a few rows sum each in the order of a single one.
        if cache.batch != 1 or not 0 < len(ids) <= self.most_verify:
            raise ArgumentError(f"1 to {self.most_verify} tokens of one sequence are verified, got {len(ids)} of {cache.batch}")
        cache.reserve(len(ids))
        return self._stepped(ids, range(cache.length, cache.length + len(ids)), cache, None, consecutive=True)

    def _prefill_layers(self, ids: Sequence[int], cache: Cache, total: int, wanted: int) -> Tensor:
        """Compute the hidden states [1, t, K] after the last layer, and append the tokens to the cache.

        Args:
            ids, cache: As for `prefill`.
            total: Length of the whole sequence.
            wanted: For how many of the last tokens hidden states are needed: layers that reuse keys and values compute no others.
        """
        tokens, before = len(ids), cache.length
        cache.reserve(tokens)
        given = torch.tensor([list(ids)], dtype=torch.int64, device="cpu")
        x = self._embedded(given)
        inputs = self._per_layer_inputs(given, x)
        rotary = [rope.tables(before, before + tokens, total) for rope in self.spec.ropes]
        for first, last in self._runs(tokens, cache):
            if first == self._first_reusing:
                x, tokens = x[:, tokens - wanted :], wanted
                rotary = [(cos[:, -wanted:], sin[:, -wanted:]) for cos, sin in rotary]
            if tokens == 0:
                break
            spec, skipped = self.spec.layers[first], len(ids) - tokens
            entries = [(keys, values, length + skipped) for keys, values, length in cache.entries()[first:last]]
            mask = window_mask(spec.sliding_window, tokens, entries[0][2])
            per_layer_input = None if inputs is None else inputs[:, skipped:, first]
            x = run_layers(self._layers[first:last], x, rotary[spec.rope], entries, mask, per_layer_input)
        cache.append(len(ids))
        return x

    def _runs(self, tokens: int, cache: Cache) -> Iterator[tuple[int, int]]:
        """Yield ranges (first, last + 1) of layers for one native call each: of few tokens, neighbors with the same rope and mask."""
        first, layers, lengths = 0, self.spec.layers, [entry.length for entry in cache.by_layer]
        for last in range(1, len(layers) + 1):
            if (
                last < len(layers)
                and tokens <= _FEW
                and last != self._first_reusing
                and self.spec.per_layer_inputs is None  # a layer with one is computed alone
                and self._layers[first].fits(tokens)
                and self._layers[last].fits(tokens)
                and layers[first].rope == layers[last].rope
                and window_mask(layers[first].sliding_window, tokens, lengths[first])
                is window_mask(layers[last].sliding_window, tokens, lengths[last])
            ):
                continue
            yield first, last
            first = last

    def _per_layer_inputs(self, ids: Tensor, x: Tensor) -> Tensor | None:
        """The layers' own inputs [1, t, layers, P] of tokens ids [1, t] that are embedded as x; None where they have none."""
        inputs = self.spec.per_layer_inputs
        if inputs is None:
            return None
        parts = len(self._layers), inputs.norm.weight.shape[0]
        projected = _linear(x, inputs.projection).unflatten(-1, parts) * inputs.projection_multiplier
        rows = self._table_rows(ids, inputs.table).unflatten(-1, parts)
        of_layers: Tensor = (wide_norm(projected, inputs.norm) + rows * inputs.table_multiplier) * inputs.scale
        return of_layers

    def _normed(self, x: Tensor) -> Tensor:
        return wide_norm(x, self.spec.norm)

    def _head(self, x: Tensor) -> Tensor:
        """Logits [M, N] of normed rows [M, K]."""
        head = self.spec.lm_head
        if isinstance(head, Weight):
            y = _linear(x, head)
        else:
            y = x @ head.float().T
            y = y if self.spec.lm_head_bias is None else y + self.spec.lm_head_bias
        return logits_in_torch(y, self.spec.logits)


def _chunks(tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of a prompt that are read one after the other, none of fewer than LEAST_PREFILL tokens but that of a short prompt."""
    start = 0
    while start < tokens:
        end = min(tokens, start + _CHUNK)
        if 0 < tokens - end < LEAST_PREFILL:
            end = tokens - LEAST_PREFILL
        yield start, end
        start = end


def first_reusing(spec: DecoderSpec) -> int | None:
    """Return the index of the first layer from which on all reuse keys and values of earlier ones; None where the last one does not."""
    last_with_cache = max((index for index, layer in enumerate(spec.layers) if layer.kv_source is None), default=-1)
    return last_with_cache + 1 if last_with_cache + 1 < len(spec.layers) else None


def _linear(x: Tensor, weight: Weight) -> Tensor:
    return linear(x, weight.packed, weight.bias, compute=weight.compute, activation=weight.activation)


def check_layers(layers: Sequence[LayerSpec]) -> None:
    """Raise UnsupportedError where one of a model's first layers has no kernel on a CPU."""
    for index, layer in enumerate(layers):
        if (reason := why_not(layer.attention, layer.mlp, layer.per_layer_input)) is not None:
            raise UnsupportedError(f"layer {index} has no kernel on a CPU: {reason}")
        if layer.sliding_window is not None and layer.sliding_window < 2:
            raise UnsupportedError(f"layer {index} has a sliding window of {layer.sliding_window} token: at least 2 are supported")


def lowered_layers(specs: Sequence[LayerSpec]) -> list[DecoderLayer]:
    """Return layers, for which `check_layers` has no reason, ready to compute."""
    return [DecoderLayer(spec.attention, spec.mlp, spec.per_layer_input) for spec in specs]


def check_supported(spec: DecoderSpec) -> None:
    """Raise UnsupportedError where a part of a specification has no kernel on a CPU."""
    check_layers(spec.layers)
    head = spec.lm_head.packed if isinstance(spec.lm_head, Weight) else None
    inputs = () if spec.per_layer_inputs is None else (spec.per_layer_inputs.table, spec.per_layer_inputs.projection.packed)
    packed = [part for part in (spec.embedding, head, *inputs) if isinstance(part, Packed)]
    if (reason := why_not_packed(packed)) is not None:
        raise UnsupportedError(f"its embedding has no kernel on a CPU: {reason}")


def most_decode(spec: DecoderSpec) -> int:
    """Return for how many sequences one native call decodes a token."""
    return min((layer.mlp.most_rows for layer in spec.layers if isinstance(layer.mlp, Experts)), default=MOST_SEQUENCES)


# The kernels of a decode step


def decode_kernels(program: Program) -> list[Lowered]:
    """Say which kernel computes each op of `CpuModel.decode`: one native call, around which torch has tables in floating point.

    Raises:
        UnsupportedError: A part of it has no kernel on a CPU.
    """
    check_supported(program.spec)
    return [lowered for _, ops in program.scopes() for lowered in layer_kernels(ops)]


def layer_kernels(ops: Sequence[Op]) -> Iterator[Lowered]:
    """Yield the kernel of each op of one layer, as `decode_kernels` does."""
    from halfbyte.dispatch.choose import choose
    from halfbyte.kernels.cpu.codegen.isas import current

    readers, by_name = readers_of(ops), {op.name: op for op in ops}
    for op in ops:
        table = next((by_name[name] for name in ("embed_tokens", "lm_head") if name in (op.name, *op.reads)), None)
        home = _fused_into(op, readers[op.name], by_name)
        if table is not None and isinstance(table.part, Tensor):
            yield Lowered(op, TORCH, reason=f"{table.name} is {table.format}, not quantized")
        elif isinstance(op.part, Weight):
            (n, k), compute = op.part.packed.shape[-2:], check_compute(op.part.compute)
            problem = Problem("linear", 1, n, k, op.part.packed.format, torch.float32, compute, op.part.activation)
            yield Lowered(op, choose(problem, current()).options[0].candidate.name, call=STEP)
        else:
            kernel = "" if home is not None else "attend_whole" if op.setting("bidirectional") else _STEPS[op.kind]
            yield Lowered(op, kernel, home, STEP)


def _fused_into(op: Op, readers: Sequence[Op], by_name: Mapping[str, Op]) -> str | None:
    """The op whose step of the native call computes this one, too; None for an op with a step of its own.

    The step of a linear layer has the norm before it, and the gate and the residual connection after it, where that is but a sum; a norm
    after a linear layer has the residual connection, attention has rope and the norms of heads.
    """
    if op.kind in ("rope", "qk_norm"):
        return "attention" if op.setting("over") != ALL_HEADS else None
    if op.kind in ("gate", "activation"):
        return op.reads[0]
    if op.kind == "residual":
        return op.reads[1] if op.setting("multiplier") is None else None
    is_residual = any(reader.kind == "residual" for reader in readers)
    if op.kind not in _NORMS or by_name.get(op.reads[0], op).kind == "linear" or is_residual:
        return None
    return next((reader.name for reader in readers if reader.kind == "router" or isinstance(reader.part, Weight)), None)


@functools.lru_cache(maxsize=8)
def window_mask(window: int | None, tokens: int, before: int) -> Tensor | None:
    """bool [1, 1, t, before + t]: which tokens of a buffer each new one may attend to; None: all before it."""
    if window is None or before + tokens <= window:
        return None
    columns = torch.arange(before + tokens, device="cpu")
    rows = torch.arange(before, before + tokens, device="cpu")[:, None]
    return (columns > rows - window)[None, None]
