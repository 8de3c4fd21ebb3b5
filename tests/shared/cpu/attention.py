"""Calls of the attention of new tokens to a cache, on this CPU or an emulated one, and how they are checked against float64."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from support import pairwise
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.transformer.attend import ATTEND, AttendSpec, build
from halfbyte.layouts.records import from_records, record_bytes, to_records

KINDS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "int8": torch.int8}
CASES = pairwise(
    *((8, 24, 64), (1, 3, 7), tuple(KINDS), (False, True), (False, True), (0, 31, 32, 77), (1, 2, 5)),
    *((False, True), ("", "half", "repeated"), (("qkv", False), ("qkv", True), ("qk", False), ("qk", True), ("q", False))),
)
# Runs the kernel of a spec with these arguments; the bytes from the address that an argument is.
Launch = Callable[[AttendSpec, dict[str, int | tuple[float, float]], dict[str, int]], None]


def native(isa: ISA, threads: int) -> Launch:
    def launch(spec: AttendSpec, fields: dict[str, int | tuple[float, float]], _: dict[str, int]) -> None:
        block = arguments(ATTEND, compiled(build, spec, isa), fields)
        runtime.runner()(ctypes.addressof(block), threads)

    return launch


def _nbytes(tensor: Tensor) -> int:
    """From its first element to its last."""
    return (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.element_size()


def attended(
    launch: Launch,
    spec: AttendSpec,
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    length: int,
    mask: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """qkv [B, t, (G + 2) * Hkv * D] or less, rotary [B, t, D or D / 2], cache [B, Hkv, T, D], mask [B, t, T] -> [B, t, G * Hkv * D]."""
    b, t, width = qkv.shape
    kv_heads, dim = cache[0].shape[1], spec.dim
    out = torch.empty(b, t, spec.group * kv_heads * dim).fill_(torch.nan)
    fields: dict[str, int | tuple[float, float]] = {
        **{name: rope.data_ptr() for name, rope in zip(("cos", "sin"), rotary, strict=True)},
        "rotary_batch": 4 * rotary[0].stride(0),
        "rotary_token": 4 * rotary[0].stride(1),
        "length": length,
        "qkv": qkv.data_ptr(),
        "qkv_stride": 4 * width,
        "out": out.data_ptr(),
        "out_stride": 4 * out.shape[2],
        "batch": b,
        "tokens": t,
        "kv_heads": kv_heads,
        "scale_eps": (dim**-0.5, 1e-5),
    }
    for name, tensor in zip(("key", "value"), cache, strict=True):
        strides = [s * tensor.element_size() for s in tensor.stride()]
        fields |= {f"{name}s": tensor.data_ptr(), f"{name}_batch": strides[0], f"{name}_head": strides[1], f"{name}_token": strides[2]}
    if mask is not None:
        fields |= {"mask": mask.data_ptr(), "mask_batch": mask.stride(0), "mask_token": mask.stride(1)}
    if norms is not None:
        fields |= {"q_norm": norms[0].data_ptr(), "k_norm": norms[1].data_ptr()}
    if sinks is not None:
        fields["sinks"] = sinks.data_ptr()
    sizes = {"qkv": qkv, "out": out, "cos": rotary[0], "sin": rotary[1], "keys": cache[0], "values": cache[1], "mask": mask, "sinks": sinks}
    sizes |= dict(zip(("q_norm", "k_norm"), norms or (), strict=False))
    launch(spec, fields, {name: _nbytes(tensor) for name, tensor in sizes.items() if tensor is not None})
    return out


def entered(x: Tensor, dtype: torch.dtype) -> Tensor:
    return to_records(x) if dtype == torch.int8 else x.to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, rope_interleaved: bool) -> Tensor:
    """cos, sin: of half as many elements."""
    first, second = (x[..., ::2], x[..., 1::2]) if rope_interleaved else x.chunk(2, -1)
    parts = first * cos - second * sin, second * cos + first * sin
    return torch.stack(parts, -1).flatten(-2) if rope_interleaved else torch.cat(parts, -1)


def _check_entered(spec: AttendSpec, kept: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Keys and values of new tokens [B, Hkv, t, D] as a cache has them, beside what they are made of."""
    # k is rounded to the cache's type, after the norm (2^-21 of its size covers mean, root and two products) and two products; so is v
    # after a norm.
    unit = {"f32": 0.0, "bf16": 2.0**-8, "f16": 2.0**-11, "int8": 0.0}[spec.kind]
    for part, exact, plain in zip(kept, wanted, (False, not spec.v_norm), strict=True):
        if plain:
            assert torch.equal(part, entered(exact.float(), part.dtype)), spec
            continue
        error = (unit + 2.0**-20) * exact.abs() + 2.0**-21 * (exact.abs().amax(-1, keepdim=True)) + 2.0**-24
        if spec.kind == "int8":  # half a scale, which is rounded to 8 bits; 2^-16: of a quotient of up to 127
            largest = torch.nn.functional.pad(exact.abs(), (0, -spec.dim % 32)).unflatten(-1, (-1, 32)).amax(-1)
            error = error + (largest / 254 * (1 + 2.0**-8 + 2.0**-16)).repeat_interleave(32, -1)[..., : spec.dim]
            part = from_records(part, spec.dim, torch.float64)
        assert bool(((part.double() - exact).abs() <= error).all()), spec


def check(number: int, case: Sequence[object], launch: Launch) -> None:
    """Whether what `launch` computes is the attention of float64."""
    dim, group, kind, normed, masked, length, t, sinking, rope_interleaved, (projections, v_norm) = case
    more = {"sinks": sinking, "rope_interleaved": rope_interleaved, "projections": projections, "v_norm": v_norm}
    spec = AttendSpec(dim, group, kind, normed, masked, **more)  # type: ignore[arg-type]
    torch.manual_seed(number)
    b, kv_heads, size = 1 + number % 3, 1 + number % 2, length + t + number % 4
    qkv = torch.randn(b, t, (group + len(projections) - 1) * kv_heads * dim) * 3
    angles = torch.randn(b, t, dim // 2)
    table = angles.repeat_interleave(2, -1) if rope_interleaved == "repeated" else angles.repeat(1, 1, 1 + number % 2)
    rotary = table.cos(), table.sin()
    sinks = 2 * torch.randn(group * kv_heads) if sinking else None
    norms = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if normed else None
    # Between tokens and heads, and from the tokens' own place on, there may be anything.
    width = record_bytes(dim) if kind == "int8" else dim
    anything = {"dtype": KINDS[kind], "fill_value": -1 if kind == "int8" else torch.nan}  # a scale of bytes 255 is NaN too
    cache = tuple(torch.full((b, kv_heads, size + 3, width + 8), **anything)[:, :, :size, :width] for _ in range(2))  # type: ignore[call-overload]
    for part in cache:
        known = length + t * (projections == "q")
        part[:, :, :known] = entered(torch.randn(b, kv_heads, known, dim), part.dtype)
    before = [part.clone() for part in cache]
    mask = torch.rand(b, t, size) > 0.4 if masked else None
    if mask is not None:
        mask[:, :, length : length + t] |= torch.eye(t, dtype=torch.bool)
    y = attended(launch, spec, qkv, rotary, (cache[0], cache[1]), length, mask, norms, sinks)

    heads = qkv.double().view(b, t, -1, dim)
    q, k, v = heads[:, :, : group * kv_heads], heads[:, :, group * kv_heads :][:, :, :kv_heads], heads[:, :, -kv_heads:]
    if norms is not None:
        q, k = (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double() for x, w in zip((q, k), norms, strict=True))
    if v_norm:
        v = v * (v.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    cos, sin = (rope.double()[:, :, None] for rope in (angles.cos(), angles.sin()))
    q, k = (_rotated(x, cos, sin, rope_interleaved=rope_interleaved != "") for x in (q, k))
    there = slice(length, length + t)
    if projections == "q":
        assert all(torch.equal(now.view(torch.uint8), then.view(torch.uint8)) for now, then in zip(cache, before, strict=True))
    else:
        _check_entered(spec, (cache[0][:, :, there], cache[1][:, :, there]), (k.transpose(1, 2), v.transpose(1, 2)))
    if kind == "int8":
        cache = from_records(cache[0], dim, torch.float64), from_records(cache[1], dim, torch.float64)

    seen = torch.ones(t, length + t, dtype=torch.bool).tril(length)
    seen = seen.expand(b, t, -1) if mask is None else seen & mask[:, :, : length + t]
    keys, values = (part[:, :, : length + t].double().repeat_interleave(group, 1) for part in cache)
    scores = q.transpose(1, 2) @ keys.transpose(2, 3) * dim**-0.5
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(1, -1, 1, 1).expand(b, -1, t, 1)), -1)
    weights = scores.softmax(-1)[..., : length + t]
    exact = (weights @ values).transpose(1, 2).reshape(b, t, -1)
    # A score is a sum of `dim` products of q, which has an error of 2^-20 of its largest as k above: that goes into each weight twice
    # (its own and the sum of all; a sink has none); sums over the tokens and exponentials round in 2^-24 and 2^-22.
    sizes = q.abs().amax(-1).transpose(1, 2)[..., None] * keys.abs().sum(-1)[:, :, None] * dim**-0.5
    relative = 2 * (dim * 2.0**-24 + 2.0**-19) * float(sizes.max()) + (length + t) * 2.0**-23 + 2.0**-20
    assert bool(((y.double() - exact).abs() <= relative * float(values.abs().max())).all()), (spec, length, t)
