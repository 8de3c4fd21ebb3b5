"""Builds the specification of a model from its config and the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from halfbyte.decoder.build_layer import build_layer, joined
from halfbyte.decoder.config import TextConfig
from halfbyte.decoder.family import PER_LAYER_INPUTS, PER_LAYER_SIZE, SHARED_KV_LAYERS, SLIDING, Family, MoEFamily
from halfbyte.decoder.rope import Rope, make_rope
from halfbyte.decoder.spec import DecoderSpec, LayerSpec, Logits
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.kernels.layer_kinds import GateFunction, Projections
from halfbyte.ops.transformer.experts import Clamped
from halfbyte.ops.transformer.sublayers import Heads, Norm
from halfbyte.ops.transformer.weights import Weight
from halfbyte.ops.transformer.whole_model_decode import PerLayerInputs

_EMBEDDING, _HEAD, _HEAD_BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"
_MOST_PER_LAYER = 1 << 16  # elements of a per-layer input


class Tensors(Protocol):
    """The tensors of a checkpoint by their names in transformers, packed for a device."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are one, or have the same values."""

    def weight(self, names: Sequence[str], bias: Sequence[str] = (), *, floats: bool = False) -> Weight | None:
        """Read weights and join them along N, with their biases.

        Args:
            names: The weights.
            bias: Their biases.
            floats: Read weights that are not quantized, or are in formats that differ, in floating point, exactly (`Format.of_floats`);
                not in a checkpoint without any quantized weight.

        Returns:
            None for weights that are not quantized, or are in formats that differ, unless they are read in floating point.
        """

    def tensor(self, name: str) -> Tensor:
        """Read a tensor in floating point."""

    def table(self, name: str) -> Weight | Tensor:
        """Read an embedding, quantized or in floating point in the type of activations, with the compute of an output embedding that is
        tied to it."""

    def each(self, reads: Sequence[Callable[[], object]]) -> list[Any]:
        """Call functions that read tensors, on several threads where that takes less time."""


def build_spec(values: dict[str, object], tensors: Tensors) -> DecoderSpec:
    """Build the specification of a model.

    Args:
        values: Its config.json.
        tensors: Its tensors.

    Raises:
        UnsupportedError: Its architecture is in no family, or its layers compute something else. transformers may run it.
        CheckpointError: A value of the config or a tensor is missing or damaged, or they contradict each other.
    """
    config = TextConfig(values)
    family = config.family
    _check_supported(family, config)
    types = config.layer_types
    max_positions = config.max_positions
    if family.query_scale_from is not None:  # beyond, queries would have a factor
        limit = config.rope_parameters().get(family.query_scale_from)
        if type(limit) is not int or limit < 1:
            raise UnsupportedError(f"its rope_parameters have no {family.query_scale_from}")
        max_positions = limit if max_positions is None else min(limit, max_positions)
    ropes, rope_of = _ropes(family, config)
    windows, sources = _windows(family, config, types), _kv_sources(family, config)

    def layer(index: int) -> LayerSpec:
        source = _StoredLayer(config, tensors, index, ropes[rope_of[index]], sources[index])
        spec = build_layer(source, rope_of[index], windows[index], sources[index])
        source.check(spec)
        return spec

    tied = _is_tied(config, tensors)
    reads: list[Callable[[], object]] = [partial(tensors.table, _EMBEDDING)]  # the largest first
    reads.append(partial(_per_layer_inputs, family, config, tensors))
    reads.append((lambda: None) if tied else partial(_head, tensors))
    reads += [partial(layer, index) for index in range(config.num_hidden_layers)]
    table, inputs, head, *layers = tensors.each(reads)
    head, head_bias = (table, None) if tied else head
    factor = 1.0 if family.embedding_multiplier is None else config.number(family.embedding_multiplier)
    if family.sqrt_embedding:
        factor *= config.hidden_size**0.5
    spec = DecoderSpec(
        table.packed if isinstance(table, Weight) else table,
        factor,
        tuple(layers),
        norm(family, config, tensors, f"model.{family.final_norm}", config.hidden_size),
        head,
        _logits(family, config),
        ropes,
        max_positions,
        head_bias,
        inputs,
    )
    _check_shapes(spec, config, tensors)
    return spec


def _is_tied(config: TextConfig, tensors: Tensors) -> bool:
    """Whether the output embedding is the input embedding; where the files have both and they differ, it is not, as in transformers."""
    if not config.tied or (tensors.has(_HEAD) and tensors.has(_EMBEDDING) and not tensors.same(_HEAD, _EMBEDDING)):
        return False
    if tensors.has(_HEAD_BIAS):
        raise UnsupportedError("its output embedding is tied to the input embedding and has a bias")
    return True


def _head(tensors: Tensors) -> tuple[Weight | Tensor, Tensor | None]:
    """Read the output embedding, and its bias where it is in floating point."""
    bias = [_HEAD_BIAS] if tensors.has(_HEAD_BIAS) else []
    head = tensors.weight([_HEAD], bias)
    if head is not None:
        return head, None
    table = tensors.table(_HEAD)
    return table, _vector(tensors, bias[0], table.shape[0]) if bias and isinstance(table, Tensor) else None


def _per_layer_inputs(family: Family, config: TextConfig, tensors: Tensors) -> PerLayerInputs | None:
    """Read what per-layer inputs are computed from; None where layers have none."""
    size, (table_name, projection_name, norm_name) = per_layer_size(family, config), PER_LAYER_INPUTS
    if size == 0:
        return None
    table = tensors.table(f"model.{table_name}.weight")
    projection = tensors.weight([f"model.{projection_name}.weight"], floats=True)
    if projection is None:
        raise UnsupportedError(f"its {projection_name} is not quantized")
    rows = table.packed if isinstance(table, Weight) else table
    wide = size * config.num_hidden_layers
    for name, found, shape in (
        (table_name, tuple(rows.shape), (max(rows.shape[0], config.count("vocab_size")), wide)),
        (projection_name, tuple(projection.packed.shape), (wide, config.hidden_size)),
    ):
        if found != shape:
            raise CheckpointError(f"{name} is {list(found)} in the files, but config.json makes it {list(shape)}: it is of another model")
    of_each = norm(family, config, tensors, f"model.{norm_name}", size)
    return PerLayerInputs(rows, size**0.5, projection, config.hidden_size**-0.5, of_each, 0.5**0.5)


def per_layer_size(family: Family, config: TextConfig) -> int:
    """Return the elements of each layer's own input; 0 where layers have none."""
    return config.count(PER_LAYER_SIZE, _MOST_PER_LAYER) if family.per_layer_input and config.get(PER_LAYER_SIZE) else 0


def norm(family: Family, config: TextConfig, tensors: Tensors, name: str, size: int) -> Norm:
    """Read a norm of a family, of `size` elements."""
    shift = _vector(tensors, f"{name}.bias", size) if family.layer_norm and tensors.has(f"{name}.bias") else None
    return Norm(_vector(tensors, f"{name}.weight", size), config.eps, family.unit_offset, family.layer_norm, shift)


def _vector(tensors: Tensors, name: str, size: int) -> Tensor:
    found = tensors.tensor(name)
    if found.shape != (size,):
        raise CheckpointError(f"{name} is {list(found.shape)} in the files, but config.json makes it {[size]}: it is of another model")
    return found


def _check_supported(family: Family, config: TextConfig) -> None:
    if (setting := family.other_setting(config.get)) is not None:
        raise UnsupportedError(f"its config has {setting}")
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # "vision": tokens of images alone
        raise UnsupportedError(f"its config has use_bidirectional_attention = {config.get('use_bidirectional_attention')!r:.99}")
    if other := set(config.layer_types) - {"full_attention", "attention", SLIDING}:
        raise UnsupportedError(f"it has layers of type {min(other)}")


def _ropes(family: Family, config: TextConfig) -> tuple[tuple[Rope, ...], list[int]]:
    """Compute the rotary embeddings of a model, and which of them each layer has."""
    types = config.layer_types if family.rope_per_type else [""] * config.num_hidden_layers
    kinds = [(kind, sizes.head_dim) for kind, sizes in zip(types, config.layer_sizes, strict=True)]
    distinct = sorted(set(kinds))
    ropes = tuple(
        make_rope(
            config.rope_parameters_of(kind) if kind else config.rope_parameters(),
            head_dim,
            config.max_positions,
            partial=family.partial_rotary,
        )
        for kind, head_dim in distinct
    )
    return ropes, [distinct.index(kind) for kind in kinds]


def _kv_sources(family: Family, config: TextConfig) -> list[int | None]:
    """Find the layer whose keys and values each layer reuses; None: it has its own."""
    types, count = config.layer_types, config.get(SHARED_KV_LAYERS) or 0
    first_shared = len(types) - count if type(count) is int else 0
    if not family.kv_sharing or first_shared == len(types):
        return [None] * len(types)
    if not 0 < first_shared < len(types) or not set(types[first_shared:]) <= set(types[:first_shared]):
        raise CheckpointError(
            f"config.json says {SHARED_KV_LAYERS}: {count!r:.99}, of {len(types)} layers the last ones that reuse keys and values of "
            "earlier layers of their type: the file is damaged, or of a model that is a part of another"
        )
    return [None] * first_shared + [max(i for i in range(first_shared) if types[i] == kind) for kind in types[first_shared:]]


def _windows(family: Family, config: TextConfig, types: Sequence[str]) -> list[int | None]:
    """Find the sliding window of each layer; None where it has none."""
    if family.sliding_window == "none" or (family.sliding_window == "all" and config.get("sliding_window") is None):
        return [None] * len(types)
    if family.sliding_window == "all":
        if config.get("use_sliding_window") is False:
            return [None] * len(types)
        return [config.count("sliding_window")] * len(types)
    says_which = config.get("layer_types") is not None or config.get("sliding_window_pattern") is not None
    if not says_which and config.get("use_sliding_window") is not False and config.get("sliding_window") is not None:
        raise UnsupportedError("its config has a sliding_window and no layer_types")
    return [config.count("sliding_window") if kind == SLIDING else None for kind in types]


def _logits(family: Family, config: TextConfig) -> Logits:
    for function, name in family.logits:
        if function != "cap" or config.get(name) is not None:
            return function, config.number(name) if function == "times" else config.positive(name)
    return None


def projections(family: Family, config: TextConfig, index: int, kv_source: int | None) -> Projections:
    """Return which of queries, keys and values a layer has projections of, as `Heads.projections`."""
    key = family.values_are_keys
    if kv_source is not None:
        return "q"
    return "qk" if key is not None and config.layer_types[index] != SLIDING and config.truth(key) else "qkv"


class _StoredLayer:
    """A layer of a checkpoint, as `build_layer` reads it."""

    def __init__(self, config: TextConfig, tensors: Tensors, index: int, rope: Rope, kv_source: int | None) -> None:
        self.family, self._index, self._prefix = config.family, index, f"model.layers.{index}"
        self._config, self._tensors, self._rope, self._kv_source = config, tensors, rope, kv_source
        name = self.family.residual_multiplier
        self.residual_multiplier = 1.0 if name is None else config.number(name)

    @property
    def activation(self) -> GateFunction:
        return self._config.activation

    @property
    def projections(self) -> Projections:
        return projections(self.family, self._config, self._index, self._kv_source)

    def heads(self, qkv: Sequence[Weight], o_proj: Weight) -> Heads:
        config, family, sizes = self._config, self.family, self._config.layer_sizes[self._index]
        has_cap = family.softcap is not None and config.get(family.softcap) is not None
        return Heads(
            config.num_attention_heads,
            sizes.num_key_value_heads,
            sizes.head_dim,
            config.attention_scale(self._index),
            rotary_dim=self._rope.rotary_dim if config.rotates(self._index) else 0,
            softcap=config.positive(family.softcap) if has_cap and family.softcap is not None else None,
            rope_interleaved="half" if family.rope_interleaved else "",  # tables of `Rope` have rotary_dim / 2 columns
        )

    def router_settings(self, moe: MoEFamily) -> tuple[int, bool, float]:
        config = self._config
        if moe.groups is not None and config.get("n_group", 1) not in (None, 1):
            raise UnsupportedError("its router chooses among groups of experts")
        if moe.groups is not None and config.get("topk_group", 1) not in (None, 1):
            raise CheckpointError(
                f"config.json says topk_group: {config.get('topk_group')!r:.99}, of 1 group 1 is chosen: the file is damaged"
            )
        scaling_factor = 1.0 if moe.scaling_factor is None else config.number(moe.scaling_factor)
        return config.count_of(moe.top_k, self._index), moe.norm_topk is None or config.truth(moe.norm_topk), scaling_factor

    def has_experts(self) -> bool:
        moe, mlp = self.family.moe, f"{self._prefix}.{self.family.mlp}"
        names = [f"{mlp}.experts.gate_up_proj.weight", *([] if moe is None else [f"{mlp}.{moe.router}.{moe.router_weight}"])]
        return any(map(self._tensors.has, names))

    def has_per_layer_input(self) -> bool:
        return per_layer_size(self.family, self._config) > 0

    def has(self, name: str) -> bool:
        return self._tensors.has(f"{self._prefix}.{name}.weight")

    def linear(self, names: Sequence[str]) -> Weight:
        weights, biases = self._tensors_of(names)
        if not biases and any(map(self._tensors.has, self._biases(names))):
            raise UnsupportedError(f"in layer {self._index} some of {joined(names)} have a bias, and some have none")
        found = self._tensors.weight(weights, biases, floats=True)
        if found is None:
            raise self._no_common_format(joined(names))
        return found

    def qkv(self, names: Sequence[str]) -> tuple[Weight, ...]:
        weights, biases = self._tensors_of(names)
        some_biased = not biases and any(map(self._tensors.has, self._biases(names)))
        joined = None if some_biased else self._tensors.weight(weights, biases)
        return (joined,) if joined is not None else tuple(self.linear([name]) for name in names)

    def experts(self, name: str) -> tuple[Weight, Weight, Clamped | None]:
        clamped = None if self.family.moe is None else self.family.moe.clamped
        if clamped is None and self.activation != "silu":
            raise UnsupportedError(f"the activation of its experts is {self.activation}, not silu")
        gate_up, down = (self._expert_stack(f"{self._prefix}.{name}.{part}") for part in ("gate_up_proj", "down_proj"))
        return gate_up, down, None if clamped is None else Clamped(self._config.number(clamped[0]), self._config.positive(clamped[1]))

    def norm(self, name: str, size: int | None = None) -> Norm:
        wanted = self._config.hidden_size if size is None else size
        return norm(self.family, self._config, self._tensors, f"{self._prefix}.{name}", wanted)

    def tensor(self, name: str, size: int | None = None) -> Tensor:
        whole = f"{self._prefix}.{name}"
        return self._tensors.tensor(whole) if size is None else _vector(self._tensors, whole, size)

    def check(self, spec: LayerSpec) -> None:
        """Raise CheckpointError for an MLP of another width than the config says."""
        stated = self._config.get("intermediate_size")
        if self._kv_source is not None and self._config.get("use_double_wide_mlp") is True:
            stated = 2 * self._config.count("intermediate_size")
        inner = spec.mlp.down_proj.packed.shape[-1]
        if self.family.moe is None and self.family.mlp == "mlp" and stated != inner:
            raise CheckpointError(f"{self._prefix}.mlp has {inner} inner elements, but config.json says intermediate_size: {stated!r:.99}")

    def _biases(self, names: Sequence[str]) -> list[str]:
        return [f"{self._prefix}.{name}.bias" for name in names]

    def _tensors_of(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """The names of the weights of linear layers, and of their biases where all have one."""
        biases = self._biases(names)
        return [f"{self._prefix}.{name}.weight" for name in names], biases if all(map(self._tensors.has, biases)) else []

    def _no_common_format(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"in layer {self._index} the weights of {what} are not quantized, or in formats that differ: "
            "open a float model with a format, such as q4_0"
        )

    def _expert_stack(self, name: str) -> Weight:
        bias = [f"{name}_bias"] if self._tensors.has(f"{name}_bias") else []
        found = self._tensors.weight([f"{name}.weight"], bias, floats=True)
        if found is None:
            raise self._no_common_format("the experts")
        return found


def _check_shapes(spec: DecoderSpec, config: TextConfig, tensors: Tensors) -> None:
    """Check that the tensors have the sizes of the config. The shapes within a layer are checked where it is lowered."""
    head = spec.lm_head.packed if isinstance(spec.lm_head, Weight) else spec.lm_head
    shapes = {"embed_tokens": tuple(spec.embedding.shape), "lm_head": tuple(head.shape), "norm": tuple(spec.norm.weight.shape)}
    wrong = next((name for name, shape in shapes.items() if len(shape) != (1 if name == "norm" else 2)), None)
    wrong = wrong or next((name for name, shape in shapes.items() if shape[-1] != config.hidden_size), None)
    rows, stated = shapes["embed_tokens"][0], config.get("vocab_size", shapes["embed_tokens"][0])
    if wrong is None and (rows < 1 or rows != stated or shapes["lm_head"][0] != rows):
        name = "lm_head" if rows == stated else "model.embed_tokens"
        got = shapes[name.removeprefix("model.")]
        raise CheckpointError(f"{name}.weight is {list(got)} in the files, but config.json makes it {[stated, config.hidden_size]}")
    if wrong is not None:
        raise CheckpointError(
            f"{wrong} is {list(shapes[wrong])}, and config.json says hidden_size: {config.hidden_size}: it is of another model"
        )
    surplus = f"model.layers.{config.num_hidden_layers}.self_attn.{config.family.o_proj}.weight"
    if tensors.has(surplus) and not config.get("num_nextn_predict_layers"):  # which are layers that predict further tokens
        raise CheckpointError(f"the files have {surplus}, but config.json only {config.num_hidden_layers} layers: it is of another model")
    for index, layer in enumerate(spec.layers):
        heads, k = layer.attention.heads, config.hidden_size
        rows = sum(weight.packed.shape[0] for weight in layer.attention.qkv)
        if rows != heads.outputs or any(weight.packed.shape[1] != k for weight in layer.attention.qkv):
            raise CheckpointError(
                f"the projections of layer {index} have {rows} rows, {heads.num_heads} + 2 * {heads.num_kv_heads} "
                f"heads of {heads.head_dim} have {heads.outputs}: config.json is of another model"
            )
