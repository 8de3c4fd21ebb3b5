"""Whole decoder layers of language models in one call on a CPU: RMS norms, attention with rotary positions, gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.kernels.layer_kinds import GATES, MADE, GateFunction, Projections, RopePairs, key_value_heads
from halfbyte.layouts.records import record_bytes
from halfbyte.ops.checks import place
from halfbyte.ops.layers import Addresses, Weight, exactly, given, why_not_packed

if TYPE_CHECKING:
    from halfbyte.kernels.cpu import attention_half, feed_forward, halves, per_layer

MOST_SEQUENCES = 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NORMED_SUM = "it has norms of sums with the residual, which are for encoders"


class Norm(NamedTuple):
    """An RMS norm: its weight [K], what is added to the mean of squares, and whether 1 + weight is multiplied by (Gemma). `centred`: a
    layer norm, with a shift [K] or none."""

    weight: Tensor
    eps: float
    plus_one: bool = False
    centred: bool = False
    shift: Tensor | None = None


class Heads(NamedTuple):
    """The heads of attention: H query heads, Hkv key-value heads, D elements each.

    scale   the factor of scores
    norms   of queries and keys, of one kind, if any: weights [D]
    rows    whether these are of all heads of a token together: weights [H * D] and [Hkv * D]
    turned_first  whether norms, of heads, are of what has its positions already (Hunyuan)
    made    what the layer makes: "qkv"; "qk": values are what keys are made of, before norm and positions; "q": queries alone, keys and
            values of the same tokens are another layer's (Gemma 4)
    values_normed  whether values have a norm, too, which has no weight and the eps of those of queries (Gemma 4)
    turned  elements of a head that have positions, R, the first: None: all; 0: none
    pairs   "": element i is turned with i + R / 2; "once", "twice": 2 i with 2 i + 1, by tables of R / 2 elements, or of R, each twice
    cap     scores are cap * tanh(score / cap), where it is not None
    sinks   [H], where not None: scores of what each head sees beside tokens, which adds nothing but to the sum of exponentials (gpt-oss)
    """

    query: int
    key: int
    dim: int
    scale: float
    norms: tuple[Norm, Norm] | None = None
    rows: bool = False
    turned: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None
    pairs: RopePairs = ""
    turned_first: bool = False
    made: Projections = "qkv"
    values_normed: bool = False

    @property
    def outputs(self) -> int:
        """Elements that are made for a token."""
        return (self.query + key_value_heads(self.made) * self.key) * self.dim

    @property
    def width(self) -> int:
        """R"""
        return self.dim if self.turned is None else self.turned

    def turns_by(self, width: int) -> bool:
        """Whether a token's row of cosines, and of sines, may have so many elements."""
        return self.width in (0, width) or (width == self.width // 2 and self.pairs != "twice")


class Attention(NamedTuple):
    """h = x + factor * norm(o(attention(qkv(norm(x)))))

    qkv            [(H + 2 Hkv) * D, K]: queries, keys and values, one head after the other, as far as `heads` say that they are made; or
                   their rows in up to three weights
    o              [K, H * D]
    before, after  the norms of x and of what o gives, if any
    factor         1 where there is a norm after
    residual_norm  the norm of h, if any (BERT): encoders alone have one
    """

    qkv: tuple[Weight, ...]
    o: Weight
    before: Norm | None
    heads: Heads
    after: Norm | None = None
    factor: float = 1.0
    residual_norm: Norm | None = None

    def why_not(self) -> str | None:
        """Why `DecoderLayer` does not support these weights; None if it does."""
        from halfbyte.kernels.cpu import attend

        heads, reason = self.heads, why_not_packed([weight.packed for weight in (*self.qkv, self.o)])
        if self.residual_norm is not None:
            return _NORMED_SUM
        if heads.norms is not None and heads.norms[0].centred:
            return "the norms of its heads are layer norms"
        if heads.rows and heads.turned_first:
            return "norms of all its heads together come after positions"
        if heads.values_normed and (heads.norms is None or heads.rows):
            return "its values have a norm, its queries have none, or one of all heads together"
        return reason or attend.supports(heads.query, heads.key, heads.dim, heads.turned) or _why_not_added(self.after, self.factor)

    def check(self) -> None:
        """Raises ArgumentError for tensors that do not fit together."""
        heads, k = self.heads, self.qkv[0].packed.shape[1]
        weights = [*self.qkv, self.o]
        both = heads.outputs
        shapes = [tuple(weight.packed.shape) for weight in weights]
        expected = [(both, k), (k, heads.query * heads.dim)]
        joined = [(sum(n for n, _ in shapes[:-1]), k), shapes[-1]] if {c for _, c in shapes[:-1]} == {k} else shapes
        widths = (heads.query * heads.dim, heads.key * heads.dim) if heads.rows else (heads.dim, heads.dim)
        of_heads = [(norm.weight, width) for norm, width in zip(heads.norms or (), widths, strict=False)]
        sinks = [] if heads.sinks is None else [(heads.sinks, heads.query)]
        small = [*_norms(k, self.before, self.after), *of_heads, *sinks, *_biases(weights)]
        _check(joined == expected and heads.made in MADE, "attention", shapes, expected, small, self.o.packed.device)

    def inner(self, tensors: Addresses) -> attention_half.Attention:
        from halfbyte.kernels.cpu import attention_half

        heads = self.heads
        norms = None if heads.norms is None else (norm_of(tensors, heads.norms[0]), norm_of(tensors, heads.norms[1]))
        turned = heads.dim if heads.turned is None else heads.turned
        sinks = 0 if heads.sinks is None else tensors.of(heads.sinks)
        changed = {"norms": norms, "turned": turned, "sinks": sinks}  # the other fields are the same
        of_heads = attention_half.Heads(**heads._asdict() | changed)
        before, after = (None if norm is None else norm_of(tensors, norm) for norm in (self.before, self.after))
        qkv = tuple(map(tensors.product, self.qkv))
        return attention_half.Attention(qkv, tensors.product(self.o), before, after, self.factor, of_heads)


class FeedForward(Protocol):
    """The second half of a layer, from h to y, both with `k` elements a row."""

    @property
    def k(self) -> int: ...

    @property
    def most_rows(self) -> int | None:
        """That are better computed in one call than otherwise; None: there may be any number of them."""

    def why_not(self) -> str | None:
        """Why `DecoderLayer` does not support these weights; None if it does."""

    def check(self) -> None:
        """Raises ArgumentError for tensors that do not fit together."""

    def inner(self, tensors: Addresses) -> halves.FeedForward:
        """The same by the addresses of tensors, which these keep alive."""


class Dense(NamedTuple):
    """y = h + factor * norm(down(f(gate) * up)),  gate, up = gate_up(norm(h)); or norm(down(f(gate_up(norm(h)))))

    gate_up        [2 I, K]: gate, then up; [I, K] where there are no gates
    down           [K, I]
    before, after  the norms of h and of what down gives, if any
    factor         1 where there is a norm after
    gates          f, as in `layer_kinds.py`; "gelu", the exact one, in encoders
    gated          whether there are gates
    parallel       x, which the attention half reads, is read in the place of h: y = h + … norm(x) …
    scale          [1]: y is multiplied by it, where there is a norm after (Gemma 4); None: by nothing
    residual_norm  the norm of y, if any (BERT): encoders alone have one
    """

    gate_up: Weight
    down: Weight
    before: Norm | None
    after: Norm | None = None
    factor: float = 1.0
    gates: GateFunction | Literal["gelu"] = "silu"
    gated: bool = True
    parallel: bool = False
    scale: Tensor | None = None
    residual_norm: Norm | None = None

    @property
    def inner_width(self) -> int:
        """I"""
        return self.gate_up.packed.shape[0] // (2 if self.gated else 1)

    @property
    def gate_function(self) -> GateFunction:
        """f in a decoder's layer. Raises ArgumentError for that of encoders."""
        if self.gates == "gelu":
            raise ArgumentError(f"the activation of a decoder layer is one of {', '.join(GATES)}, got gelu")
        return self.gates

    @property
    def k(self) -> int:
        return self.down.packed.shape[0]

    @property
    def most_rows(self) -> None:
        return None

    def why_not(self) -> str | None:
        from halfbyte.kernels.cpu import chain
        from halfbyte.layouts.cpu_tiles import PANEL

        if (reason := why_not_packed([self.gate_up.packed, self.down.packed])) is not None:
            return reason
        if self.inner_width % PANEL:
            return f"{self.inner_width} gates are not whole panels of {PANEL}"
        if self.gates not in chain.GATES:
            return f"its activation is {self.gates}, not {' or '.join(chain.GATES)}"
        if self.residual_norm is not None:
            return _NORMED_SUM
        if self.scale is not None and self.after is None:
            return "what it gives is multiplied by a number without a norm before"
        return _why_not_added(self.after, self.factor)

    def check(self) -> None:
        """Raises ArgumentError for tensors that do not fit together."""
        weights, k = [self.gate_up, self.down], self.gate_up.packed.shape[1]
        shapes = [tuple(weight.packed.shape) for weight in weights]
        expected = [(self.inner_width * (2 if self.gated else 1), k), (k, self.inner_width)]
        small = [*_norms(k, self.before, self.after), *_biases(weights), *_scales(self.scale)]
        _check(shapes == expected, "feed-forward", shapes, expected, small, self.down.packed.device)

    def inner(self, tensors: Addresses) -> feed_forward.Dense:
        from halfbyte.kernels.cpu import feed_forward

        before, after = (None if norm is None else norm_of(tensors, norm) for norm in (self.before, self.after))
        how = self.factor, self.gate_function, self.gated, self.parallel, 0 if self.scale is None else tensors.of(self.scale)
        return feed_forward.Dense(tensors.product(self.gate_up), tensors.product(self.down), before, after, *how)


class PerLayer(NamedTuple):
    """y = scale * (h + norm(projection(f(gate(h)) * e))): what a layer with an input e of its own does last (Gemma 4's per-layer inputs)

    gate        [P, K], P the elements of e
    projection  [K, P]
    after       the norm
    function    f, as in `layer_kinds.py`
    scale       [1], or None: 1
    """

    gate: Weight
    projection: Weight
    after: Norm
    function: GateFunction = "gelu_tanh"
    scale: Tensor | None = None

    @property
    def width(self) -> int:
        """P"""
        return self.gate.packed.shape[0]

    def why_not(self) -> str | None:
        """Why `DecoderLayer` does not support these weights; None if it does."""
        from halfbyte.kernels.cpu import chain
        from halfbyte.layouts.cpu_tiles import PANEL

        if (reason := why_not_packed([self.gate.packed, self.projection.packed])) is not None:
            return reason
        if self.width % PANEL:
            return f"a layer's own input of {self.width} elements is not whole panels of {PANEL}"
        if self.function not in chain.GATES:
            return f"its activation is {self.function}, not {' or '.join(chain.GATES)}"
        return _why_not_added(self.after, 1.0)

    def check(self, k: int) -> None:
        """Raises ArgumentError for tensors that do not fit together, or not to a layer of that width."""
        weights = [self.gate, self.projection]
        shapes = [tuple(weight.packed.shape) for weight in weights]
        expected = [(self.width, k), (k, self.width)]
        small = [*_norms(k, self.after), *_biases(weights), *_scales(self.scale)]
        _check(shapes == expected, "last", shapes, expected, small, self.gate.packed.device)

    def inner(self, tensors: Addresses) -> per_layer.PerLayer:
        from halfbyte.kernels.cpu import per_layer

        products = tensors.product(self.gate), tensors.product(self.projection)
        scale = 0 if self.scale is None else tensors.of(self.scale)
        return per_layer.PerLayer(*products, norm_of(tensors, self.after), self.function, scale)


class DecoderLayer:
    """y = feed_forward(attention(x)), or attention(x) alone; or per_layer(feed_forward(attention(x)), e) with an input e of its own

    Everything between the products is float32. Raises ArgumentError for weights that do not fit together or that `why_not` refuses.
    """

    def __init__(self, attention: Attention, feed_forward: FeedForward | None, per_layer: PerLayer | None = None) -> None:
        from halfbyte.kernels.cpu import decoder

        second = feed_forward
        attention.check()
        self.heads, self.k, self.most_rows = attention.heads, attention.o.packed.shape[0], None if second is None else second.most_rows
        if second is not None:
            second.check()
            if second.k != self.k:
                raise ArgumentError(f"the halves of a decoder layer have one width, got {self.k} and {second.k}")
        if per_layer is not None:
            per_layer.check(self.k)
            if second is None:
                raise ArgumentError("a layer with an input of its own has a feed-forward half, got none: pass it")
        if (reason := why_not(attention, second, per_layer)) is not None:
            raise ArgumentError(f"this layer is not computed in one call: {reason}")
        self.tensors = Addresses()
        of_second = None if second is None else second.inner(self.tensors)
        self.beside = None if per_layer is None else per_layer.width
        of_third = None if per_layer is None else per_layer.inner(self.tensors)
        self.inner = decoder.Layer(attention.inner(self.tensors), of_second, of_third)

    @property
    def rotary(self) -> int:
        """R, the elements of a head that have positions."""
        return self.inner.rotary

    def turns_by(self, width: int) -> bool:
        """Whether a token's row of cosines, and of sines, may have so many elements."""
        return self.heads.turns_by(width)

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        length: int,
        mask: Tensor | None = None,
        beside: Tensor | None = None,
    ) -> Tensor:
        """Tokens x [B, t, K], appended to the cache at `length` -> y [B, t, K]; B is at most MOST_SEQUENCES. No gradients.

        rotary        cosines and sines of the positions, each [B or 1, t, R / 2], R the elements of a head that have positions; or of R
                      elements, the first half once more behind it, or each twice where `Heads` say so; of any number where R is 0
        keys, values  [B, Hkv, T, D] of one type, T >= length + t; those of the tokens are written, or, where the layer makes none, are
                      there; int8 ones hold the records of `layouts/records.py` in the place of D elements
        mask          bool [B or 1, 1, t or 1, T or more]: which tokens of the cache may be seen, in addition to the causal mask
        beside        [B, t, P]: the layer's own input, if it has one
        """
        return run_layers((self,), x, rotary, [(keys, values, length)], mask, beside)[0]

    def check(self, x: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, length: int, mask: Tensor | None) -> None:
        """Raises ArgumentError for what a call does not take."""
        heads = self.heads
        fits = x.dim() == 3 and keys.dim() == 4 and keys.shape == values.shape and keys.dtype == values.dtype
        fits = fits and keys.dtype in (*_DTYPES, torch.int8)
        if fits:
            b, t, k = x.shape
            size, width = keys.shape[2], heads.dim if keys.dtype != torch.int8 else record_bytes(heads.dim)
            fits = k == self.k and 0 < b <= MOST_SEQUENCES and t > 0
            fits = fits and keys.shape == (b, heads.key, size, width) and 0 <= length <= size - t
            fits = fits and keys.stride(3) == 1 and values.stride(3) == 1 and x.dtype in _DTYPES
            fits = fits and all(r.dim() == 3 and r.shape[0] in (1, b) and r.shape[1] == t for r in rotary)
            fits = fits and self.turns_by(rotary[0].shape[2])
            fits = fits and rotary[0].shape == rotary[1].shape and x.is_cpu and keys.is_cpu and values.is_cpu
        if fits and mask is not None:
            fits = mask.dtype == torch.bool and mask.is_cpu and mask.dim() == 4 and mask.shape[0] in (1, b) and mask.shape[1] == 1
            fits = fits and mask.shape[2] in (1, t) and mask.shape[3] >= length + t
        if not fits:
            got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (x, *rotary, keys, values, *(() if mask is None else (mask,))))
            raise ArgumentError(
                f"this layer takes on the CPU x [B, t, {self.k}] with B in 1 … {MOST_SEQUENCES} and t > 0, cosines and sines "
                f"[B, t, {self.rotary}], a cache [B, {heads.key}, T, {heads.dim}] with room for t tokens from {length} on and a mask bool "
                f"[B, 1, t, T], got {got}"
            )


def run_layers(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    entries: Sequence[tuple[Tensor, Tensor, int]],
    mask: Tensor | None,
    beside: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of the layers, one after the other; `entries`: keys, values and length for each, the rest as in a call. beside: the own
    input of a layer that is alone."""
    for layer, entry in zip(layers, entries, strict=True):
        layer.check(x, rotary, *entry, mask)
        wanted = None if layer.beside is None else (*x.shape[:2], layer.beside)
        if (None if beside is None else tuple(beside.shape)) != wanted or (beside is not None and (len(layers) > 1 or not beside.is_cpu)):
            got = None if beside is None else list(beside.shape)
            raise ArgumentError(f"a layer with an input of its own takes it on the CPU, and alone: {wanted}, got {got} for {len(layers)}")
    from halfbyte.kernels.cpu import decoder

    cos, sin = (t if t.dtype == torch.float32 and t.is_contiguous() else t.float().contiguous() for t in rotary)
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    for layer in layers:
        layer.tensors.refresh()
    inner, places = [layer.inner for layer in layers], [decoder.Entry(*entry) for entry in entries]
    return given(decoder.run(inner, exactly(x), (cos, sin), places, mask, None if beside is None else in_rows(beside)), x.dtype)


def in_rows(beside: Tensor) -> Tensor:
    """[B, t, P] as float32 whose rows of P elements, contiguous ones, lie equally far apart."""
    wide = beside.float()
    return wide if wide.stride(2) == 1 and wide.stride(0) == wide.stride(1) * wide.shape[1] else wide.contiguous()


def why_not(attention: Attention, feed_forward: FeedForward | None, per_layer: PerLayer | None = None) -> str | None:
    """Why `DecoderLayer` does not support these weights; None if it does."""
    more = (half.why_not() for half in (feed_forward, per_layer) if half is not None)
    return attention.why_not() or next((reason for reason in more if reason is not None), None)


def norm_of(tensors: Addresses, norm: Norm) -> halves.Norm:
    """By the addresses of its tensors."""
    from halfbyte.kernels.cpu import halves

    shift = 0
    if norm.centred:
        shift = tensors.of(torch.zeros(norm.weight.shape, dtype=torch.float32, device="cpu") if norm.shift is None else norm.shift)
    return halves.Norm(tensors.of(norm.weight), norm.eps, norm.plus_one, norm.centred, shift)


def _norms(k: int, *norms: Norm | None) -> list[tuple[Tensor, int]]:
    return [(tensor, k) for norm in norms if norm is not None for tensor in (norm.weight, norm.shift) if tensor is not None]


def _scales(scale: Tensor | None) -> list[tuple[Tensor, int]]:
    return [] if scale is None else [(scale, 1)]


def _why_not_added(after: Norm | None, factor: float) -> str | None:
    if after is not None and after.centred:
        return "the norm of what it adds is a layer norm"
    return f"what it adds has a norm and a factor of {factor}" if after is not None and factor != 1 else None


def _biases(weights: Sequence[Weight]) -> list[tuple[Tensor, int]]:
    """With the elements that they have to have."""
    return [(weight.bias, weight.packed.shape[0]) for weight in weights if weight.bias is not None]


def _check(
    fits: bool,
    what: str,
    shapes: Sequence[tuple[int, ...]],
    expected: Sequence[tuple[int, ...]],
    small: Sequence[tuple[Tensor, int]],
    device: torch.device,
) -> None:
    """small: norms and biases, and of how many elements they are to be."""
    if not fits or any(tensor.shape != (size,) or tensor.device != device for tensor, size in small):
        sizes, got = [size for _, size in small], [list(tensor.shape) for tensor, _ in small]
        raise ArgumentError(
            f"the {what} half of a decoder layer takes weights {list(expected)} and norms and biases of {sizes} elements on "
            f"{place(device.type)}, got {list(shapes)} and {got}"
        )
