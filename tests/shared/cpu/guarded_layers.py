"""As `guarded.py`: what surrounds products, and whole layers and models in one call."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from emulated.amx import EmulatedAMX
from encoder_parts import encoder_layer
from guarded_memory import ENDS, guarded, guarded_allocations, placed, same, scratch, some
from samples import random_codes
from support import AVAILABLE
from torch import Tensor

from halfbyte import ops
from halfbyte.formats import as_format, ggml
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.conv import elementwise
from halfbyte.kernels.cpu.linear import grouped, linear
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.plan_cache import PLANS, GrowingMemory, Memory
from halfbyte.kernels.cpu.quantize import extract, pack
from halfbyte.kernels.cpu.transformer import decoder, encoder, sublayers
from halfbyte.kernels.problem import Combination
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.records import record_bytes
from halfbyte.ops.transformer.decoder import DecoderLayer
from halfbyte.ops.transformer.embed import NormedEmbeddings
from halfbyte.ops.transformer.experts import Clamped, Experts, SharedExpert, many_rows
from halfbyte.ops.transformer.sublayers import MLP, Attention, Heads, Norm
from halfbyte.ops.transformer.weights import Weight
from halfbyte.ops.transformer.whole_model_decode import WholeModelDecode

Announce = Callable[[str], None]
Place = Callable[[Tensor], Tensor]


def at(flush: str | None) -> Place:
    """A copy of a tensor, of any shape, that lies so; or the tensor itself."""
    return (lambda t: t) if flush is None else lambda t: placed(t.flatten(), flush).view(t.shape)


def codes_in_other_orders(announce: Announce) -> None:
    """Canonical codes into those of the kernels, and out of ggml's blocks."""
    names = "q4_0", "int4_g64_zp_bf16", "int8_g24_offset", "int8_channel", "int6_g16", "int5_g32_offset_f32", "int6_g264"
    for name, (n, k) in itertools.product(some(names), ((33, 264), (1, 8), (31, 120))):
        fmt = as_format(name)
        codes = random_codes(fmt, (n, k))
        if pack.supports(codes) is not None:
            continue
        wanted = cpu_tiles.pack(codes).data
        for flush in ENDS:
            announce(f"pack {name} n={n} k={k} flush with {flush}")
            parts = {part: at(flush)(tensor) for part, tensor in codes.tensors().items()}
            there = type(codes)(fmt, codes.shape, *(parts.get(part) for part in ("data", "scale", "zero")))  # type: ignore[arg-type]
            same(_packed(there, flush), wanted)
    for kind in some(kind for kind in ggml.TYPES.values() if kind.fields):
        for blocks in (1, 5):
            data = torch.randint(0, 256, (blocks, kind.nbytes), dtype=torch.uint8)
            wanted = ggml.extract(kind, data)
            for flush in ENDS:
                announce(f"codes out of {blocks} blocks of {kind.name} flush with {flush}")
                with guarded_allocations(flush):
                    same(extract.extract(kind, at(flush)(data)), wanted)


def _packed(codes: Any, flush: str) -> Tensor:
    allocate = cpu_tiles.allocate
    cpu_tiles.allocate = lambda nbytes: guarded((nbytes,), torch.uint8, flush).zero_()
    try:
        return pack.pack(codes).data
    finally:
        cpu_tiles.allocate = allocate


def floats_to_codes(announce: Announce) -> None:
    how = Combination(torch.int8, 20.0, 0.0, 0.0, -127, 127)
    for count, dtype in itertools.product((1, 15, 33, 70), (torch.float32, torch.bfloat16, torch.float16)):
        x = torch.randn(count).to(dtype)
        wanted = elementwise.combine(x, how)
        for flush in ENDS:
            announce(f"{count} {dtype} to codes flush with {flush}")
            with guarded_allocations(flush):
                same(elementwise.combine(placed(x, flush), how), wanted)


def products_of_experts(announce: Announce) -> None:
    experts = 3
    for name, n, k, dtype in some((("q4_0", 33, 95, torch.float32), ("int6_g16", 47, 64, torch.bfloat16), ("q4_1", 9, 33, torch.float32))):
        fmt = as_format(name)
        if fmt.packed_bits and not current().reads_packed_bits:
            continue
        kernel = LinearKernel(fmt, n, k, dtype, "int8", "block")
        weights = torch.cat([cpu_tiles.pack(random_codes(fmt, (n, k), seed)).data for seed in range(experts)])
        bias = torch.randn(experts, n)
        for ids, shared in (([2, 0], 2), ([2], 1), ([0, 2, 2, 0, 2, 1], 2)):
            x = torch.randn(len(ids) // shared, k).to(dtype)
            wanted = grouped.run(kernel, x, ids, weights, bias)
            for flush in ENDS:
                announce(f"experts {name} {dtype} n={n} k={k} ids={ids} flush with {flush}")
                scratch(flush)
                place = at(flush)
                with guarded_allocations(flush):
                    same(grouped.run(kernel, place(x), ids, place(weights), place(bias)), wanted)


def products_on_matrix_units(announce: Announce) -> None:
    """Where the CPU has some, all products of some rows are; elsewhere they are emulated, once."""
    cases = (
        *(("q4_0", "int8", "block", 17, 33, 95), ("int4_g128_zp", "int8", "row", 9, 31, 130), ("int8_channel", "int8", "block", 33, 5, 41)),
        *(("q4_1", "int8", "block_offset", 16, 32, 64), ("int4_g40_zp", "bf16", "block", 18, 33, 95)),
    )
    unit = EmulatedAMX()
    for name, inner, activation, m, n, k in cases if current() is AVAILABLE[0] and unit.matrix.missing() is None else ():
        fmt, dtype = as_format(name), torch.bfloat16 if inner == "bf16" else torch.float32
        kernel = LinearKernel(fmt, n, k, dtype, inner, activation, isa=unit)  # type: ignore[arg-type]
        x, packed, bias = torch.randn(m, k).to(dtype), cpu_tiles.pack(random_codes(fmt, (n, k))), torch.randn(n)
        wanted = kernel(x, packed.data.data_ptr(), bias, -9.0, 9.0)
        for flush in ENDS:
            announce(f"matrix units {name} {inner} m={m} n={n} k={k} flush with {flush}")
            scratch(flush)
            PLANS.linear.clear()
            place = at(flush)
            data = place(packed.data)
            with guarded_allocations(flush):
                same(kernel(place(x), data.data_ptr(), place(bias), -9.0, 9.0), wanted)


def embeddings(announce: Announce) -> None:
    for names, k in some(((("q8_0",), 33), (("int4_g20_zp", "q4_1"), 64), (("int4_g64_offset_bf16", "int8_channel", "int6_g16"), 80))):
        weights = [ops.pack(random_codes(as_format(name), (40 + i, k), i)) for i, name in enumerate(names)]
        numbers = torch.rand(k) + 0.5, torch.randn(k)
        ids = [torch.randint(0, 40, (2, 5)), torch.randint(0, 40, (1, 5)), torch.randint(0, 40, (2, 5))][: len(names)]
        ids[0][1, 4] = 39  # the last row
        wanted = None
        for flush in (None, *ENDS):
            announce(f"embeddings {names} k={k} flush with {flush}")
            place = at(flush)
            tables = [_like(weight, place) for weight in weights]
            with _allocating(flush):
                embed = NormedEmbeddings(tables, Norm(place(numbers[0]), 1e-5, layer_norm=True, bias=place(numbers[1])))
                y = embed([place(which) for which in ids])
            wanted = y if wanted is None else wanted
            same(y, wanted)


def encoders(announce: Announce) -> None:
    """Two layers; on two threads, each for itself or together."""
    heads, dim, k, inner, tokens = 3, 8, 33, 50, 7
    cases = (("q4_0", False, 2, True, False), ("int8_channel", True, 1, False, True), ("int4_g20_zp", False, 8, True, True))
    for name, before, batch, masked, biased in some(cases):
        shapes = (3 * heads * dim, k), (k, heads * dim), (inner, k), (k, inner)
        weights = [ops.pack(ops.quantize(torch.randn(shape) / 8, name)) for shape in (*shapes, *shapes)]
        biases = [torch.randn(weight.shape[0]) if i != 1 else None for i, weight in enumerate(weights)]
        numbers = [torch.rand(k) + 0.5 for _ in range(8)]
        x = torch.randn(batch, tokens, k)
        mask = torch.rand(batch, 1, tokens, tokens) < 0.7 if masked else None
        added = torch.randn(1, heads, tokens, tokens) if biased else None
        wanted = None
        for flush in (None, *ENDS):
            announce(f"encoder layers {name} {before} {batch} flush with {flush}")
            place = at(flush)
            with _allocating(flush), _two_threads():
                parts = [_weight(*one, place) for one in zip(weights, biases, strict=True)]
                norms = [Norm(place(numbers[2 * i]), 1e-5, layer_norm=True, bias=place(numbers[2 * i + 1])) for i in range(4)]
                layers = [
                    encoder_layer(parts[4 * i : 4 * i + 4], norms[2 * i : 2 * i + 2], before=before, count=heads, scale=0.3)
                    for i in range(2)
                ]
                seen, scores = (None if t is None else place(t) for t in (mask, added))
                y = ops.transformer.encoder.run_layers(layers, place(x), seen, scores)
            wanted = y if wanted is None else wanted
            same(y, wanted)


class _Decoder:
    """The weights of a layer, and how it is made of copies of them."""

    def __init__(
        self, names: Sequence[str], heads: tuple[int, int, int], k: int, inner: int, *, head_norms: bool, formula: str = ""
    ) -> None:
        """formula: "" that of Llama; "all": with every kind of step before, after and within products; "after": norms after them alone;
        "parallel": layer norms, the mlp beside attention and without gates."""
        self.formula = formula
        query, key, dim = self.heads = heads
        cut = (query + key) * dim if len(names) > 1 else (query + 2 * key) * dim
        rows = (cut, (query + 2 * key) * dim - cut) if len(names) > 1 else (cut,)
        shapes = [*((n, k) for n in rows), (k, query * dim), (inner if formula == "parallel" else 2 * inner, k), (k, inner)]
        self.weights = [ops.pack(ops.quantize(torch.randn(s) / 8, names[i % len(names)])) for i, s in enumerate(shapes)]
        self.biases = [torch.randn(n) if i < len(rows) else None for i, (n, _) in enumerate(shapes)]
        self.rotary_dim = dim // 2 & ~7 if formula == "all" else dim
        of_heads = (query * dim, key * dim) if formula == "after" else (dim, dim)
        self.norms = [torch.rand(n) + 0.5 for n in (k, k, *(of_heads if head_norms else ()))]

    def build(self, place: Place) -> DecoderLayer:
        *qkv, o, gate_up, down = [_weight(*one, place) for one in zip(self.weights, self.biases, strict=True)]
        first, second, *of_heads = (Norm(place(weight), 1e-5) for weight in self.norms)
        heads = Heads(*self.heads, 0.3, tuple(of_heads) or None)  # type: ignore[arg-type]
        if self.formula == "all":
            first, second = (norm._replace(unit_offset=True) for norm in (first, second))
            attention = Attention(tuple(qkv), o, first, heads._replace(rotary_dim=self.rotary_dim, softcap=5.0), second)
            return DecoderLayer(attention, MLP(gate_up, down, second, None, 0.3, "gelu_tanh"))
        if self.formula == "parallel":
            first, second = (norm._replace(layer_norm=True, bias=shift) for norm, shift in ((first, place(self.norms[1])), (second, None)))
            feed_forward = MLP(gate_up, down, second, activation="relu2", gated=False, parallel_residual=True)
            return DecoderLayer(Attention(tuple(qkv), o, first, heads._replace(rope_interleaved="half")), feed_forward)
        if self.formula == "after":
            return DecoderLayer(Attention(tuple(qkv), o, None, heads._replace(qk_norm_whole=True), first), MLP(gate_up, down, None, second))
        return DecoderLayer(Attention(tuple(qkv), o, first, heads), self.second(gate_up, down, second, place))

    def second(self, gate_up: Weight, down: Weight, norm: Norm, place: Place) -> MLP | Experts:
        return MLP(gate_up, down, norm)


class _Mixture(_Decoder):
    """With experts, of a width of 32, beside what is dense, which all rows share."""

    def __init__(
        self, names: Sequence[str], heads: tuple[int, int, int], k: int, inner: int, chosen: int, router: torch.dtype, *, clamped: bool
    ) -> None:
        super().__init__(names, heads, k, inner, head_norms=False)
        self.stacks = [ops.pack(ops.quantize(torch.randn(s) / 8, names[0])) for s in ((5, 64, k), (5, k, 32))]
        self.chosen, self.router, self.gate = chosen, torch.randn(5, k).to(router), torch.randn(k).to(router)
        self.of_stacks = [torch.randn(5, 64), torch.randn(5, k), torch.randn(5)] if clamped else [None] * 3

    def second(self, gate_up: Weight, down: Weight, norm: Norm, place: Place) -> MLP | Experts:
        up, last = (_weight(stack, bias, place) for stack, bias in zip(self.stacks, self.of_stacks, strict=False))
        if (bias := self.of_stacks[2]) is not None:
            return Experts(up, last, place(self.router), self.chosen, True, norm, None, place(bias), Clamped(1.7, 2.0))
        return Experts(up, last, place(self.router), self.chosen, self.chosen > 1, norm, SharedExpert(gate_up, down, place(self.gate)))


def decoders(announce: Announce) -> None:
    """Layers for tokens of each number that goes a way of its own, and whole models for one."""
    cases = (
        (("q4_0",), (4, 2, 8), 40, 32, False, torch.float32, ((1, 1), (3, 1), (2, 3))),
        (("q8_0", "int6_g16"), (3, 1, 40), 64, 64, True, torch.int8, ((1, 1), (2, 17))),
        (("int4_g20_zp",), (2, 2, 16), 33, 96, False, torch.bfloat16, ((2, 1), (1, 9))),
        (("q4_0",), (2, 1, 40), 33, 32, True, torch.float32, ((1, 1), (2, 3), (1, 11)), "all"),
        (("q8_0",), (2, 1, 16), 40, 32, True, torch.float32, ((1, 1), (2, 3), (1, 11)), "after"),
        (("q4_0",), (2, 2, 16), 40, 32, False, torch.float32, ((1, 1), (2, 3), (1, 11)), "parallel"),
    )
    for names, heads, k, inner, head_norms, kind, calls, *formula in some(cases):
        both = [_Decoder(names, heads, k, inner, head_norms=head_norms, formula=formula[0] if formula else "") for _ in range(2)]
        for b, t in calls:
            for length, masked in ((0, False), (33, True)):
                _decoded(announce, both, k, kind, (b, t, length), masked=masked)
        table, head = ops.pack(random_codes(as_format(names[-1]), (50, k))), ops.pack(random_codes(as_format(names[0]), (47, k)))
        for b, headed in ((1, True), (2, True), (1, False)):
            _stepped(announce, both, table, head if headed else None, kind, b)


def mixtures(announce: Announce) -> None:
    """Layers with experts, for one row and for several."""
    cases = (
        ("q4_0", (2, 1, 8), 40, 3, torch.float32),
        ("int8_channel", (2, 2, 16), 33, 1, torch.bfloat16),
        ("mxfp4", (2, 1, 8), 72, 2, torch.float32),
    )
    for name, heads, k, chosen, kind in some(cases):
        both = [_Mixture((name,), heads, k, 32, chosen, kind, clamped=name == "mxfp4") for _ in range(2)]
        for b, t in ((1, 1), (2, 3)):
            _decoded(announce, both, k, torch.float32, (b, t, 5), masked=False)


def mixtures_of_many_rows(announce: Announce) -> None:
    """Rows of which each thread computes those of experts of its own."""
    cases = (
        ("q4_0", 70, 21, None),
        ("int8_channel", 33, 5, None),
        ("mxfp4", 40, 24, Clamped(1.7, 2.0)),
        ("int4_g24_zp", 96, 32, None),
    )
    for name, k, inner, clamped in some(cases):
        stacks = [ops.pack(random_codes(as_format(name), shape)) for shape in ((5, 2 * inner, k), (5, k, inner))]
        biases, x, ids, weights = (
            (torch.randn(5, 2 * inner), torch.randn(5, k)),
            torch.randn(41, k),
            torch.randint(5, (41, 2)),
            torch.rand(41, 2),
        )
        wanted = None
        for flush in (None, *ENDS):
            announce(f"experts of many rows {name} k={k} inner={inner} flush with {flush}")
            place = at(flush)
            up, down = (_weight(stack, bias, place) for stack, bias in zip(stacks, biases, strict=True))
            with _allocating(flush), _two_threads():
                y = many_rows(up, down, place(x), place(ids), place(weights), clamped)
            wanted = y if wanted is None else wanted
            same(y, wanted)


def _cache(kind: torch.dtype, heads: tuple[int, int, int], b: int, size: int) -> Tensor:
    """Keys and values."""
    _, kv_heads, dim = heads
    if kind == torch.int8:
        codes = torch.randint(-127, 128, (2, b, kv_heads, size, record_bytes(dim)), dtype=torch.int8)
        codes[..., dim:] = 60  # scales that are numbers
        return codes
    return torch.randn(2, b, kv_heads, size, dim).to(kind)


def _decoded(announce: Announce, both: Sequence[_Decoder], k: int, kind: torch.dtype, size: tuple[int, int, int], *, masked: bool) -> None:
    heads, (b, t, length) = both[0].heads, size
    x, rope = torch.randn(b, t, k), torch.randn(1, t, both[0].rotary_dim)
    caches = [_cache(kind, heads, b, length + t) for _ in both]
    mask = torch.rand(b, 1, t, length + t) < 0.7 if masked else None
    wanted = None
    for flush in (None, *ENDS):
        announce(f"decoder layers, {heads} heads, b={b} t={t} length={length} flush with {flush}")
        place = at(flush)
        with _allocating(flush), _two_threads():
            layers = [one.build(place) for one in both]
            kept = [_writable(cache, flush) for cache in caches]
            entries = [(*one, length) for one in kept]
            rotary = place(rope), place(rope)
            y = ops.transformer.decoder.run_layers(layers, place(x), rotary, entries, None if mask is None else place(mask))
        wanted = (y, *kept) if wanted is None else wanted
        for found, other in zip((y, *kept), wanted, strict=True):
            same(found.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _stepped(announce: Announce, both: Sequence[_Decoder], table: Packed, head: Packed | None, kind: torch.dtype, b: int) -> None:
    heads, size, k = both[0].heads, 3, table.shape[1]
    caches = [_cache(kind, heads, b, size) for _ in both]
    last, bias, rope_cache = torch.rand(k), torch.randn(47), torch.randn(b, 2, 2, both[0].rotary_dim)
    mask = torch.rand(b, size) < 0.7
    wanted = None
    for flush in (None, *ENDS):
        announce(f"a token through a model, {table.format} {b} flush with {flush}")
        place = at(flush)
        with _allocating(flush), _two_threads():
            rows = None if head is None else _weight(head, bias, place)
            logits = None if head is None else ("cap", 3.0)
            stack, norm = [one.build(place) for one in both], Norm(place(last), 1e-5)
            model = WholeModelDecode(stack, _like(table, place), norm, rows, rope_index=(0, 1), factor=1.5, logits=logits)
            kept = [_writable(cache, flush) for cache in caches]
            rotary = [place(rope) for rope in rope_cache]
            outputs = []
            for length, seen in ((0, None), (size - 1, None), (size - 1, place(mask))):
                entries = [(*one, length) for one in kept]
                addresses = [rope.data_ptr() for rope in rotary]
                outputs.append(model([table.shape[0] - 1, 3][:b], addresses, "here", lambda e=entries: e, length, seen))  # type: ignore[misc]
        wanted = outputs if wanted is None else wanted
        for y, other in zip(outputs, wanted, strict=True):
            same(y, other)


def _like(packed: Packed, place: Place) -> Packed:
    return Packed(packed.format, packed.shape, packed.layout, place(packed.data))


def _weight(packed: Packed, bias: Tensor | None, place: Place) -> Weight:
    return Weight(_like(packed, place), None if bias is None else place(bias), "auto", "block")


def _writable(cache: Tensor, flush: str | None) -> Tensor:
    return cache.clone() if flush is None else guarded(tuple(cache.shape), cache.dtype, flush).copy_(cache)


@contextmanager
def _two_threads() -> Iterator[None]:
    """However little there is to do."""
    before = runtime.threads, linear.WORK_A_THREAD, decoder.WORK_A_THREAD, encoder.WORK_A_THREAD
    runtime.threads, linear.WORK_A_THREAD, decoder.WORK_A_THREAD, encoder.WORK_A_THREAD = (lambda: 2), 1, 1, 1
    try:
        yield
    finally:
        runtime.threads, linear.WORK_A_THREAD, decoder.WORK_A_THREAD, encoder.WORK_A_THREAD = before


@contextmanager
def _allocating(flush: str | None) -> Iterator[None]:
    """What lies between the steps of a chain lies flush, too: each part of a decoder's, all of an encoder's together."""
    if flush is None:
        yield
        return
    kept: list[Tensor] = []

    def allocated(sizes: tuple[int, ...]) -> Memory:
        parts = [guarded((max(size, 4),), torch.uint8, flush) for size in sizes]
        kept.extend(parts)
        return Memory(parts[0], tuple(part.data_ptr() for part in parts))

    def of(room: GrowingMemory, size: int) -> int:
        room.block = guarded((size,), torch.uint8, flush)
        room.start = room.block.data_ptr()
        return room.start

    before = sublayers._allocated, GrowingMemory.of
    sublayers._allocated, GrowingMemory.of = allocated, of  # type: ignore[method-assign]
    PLANS.shared.clear()
    try:
        with guarded_allocations(flush):
            yield
    finally:
        sublayers._allocated, GrowingMemory.of = before  # type: ignore[method-assign]
        PLANS.shared.clear()


ALL = (
    codes_in_other_orders,
    floats_to_codes,
    products_of_experts,
    products_on_matrix_units,
    embeddings,
    encoders,
    decoders,
    mixtures,
    mixtures_of_many_rows,
)
