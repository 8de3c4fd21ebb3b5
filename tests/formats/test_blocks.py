"""The byte blocks of ggml and InferLLM, bit for bit: against the gguf package, and against their C code written out in numpy."""

import numpy as np
import pytest
import torch
from ggml_blocks import from_blocks, row_bytes, to_blocks
from gguf import GGMLQuantizationType, quants
from hypothesis import example, given
from hypothesis import strategies as st
from samples import random_codes

from halfbyte.errors import FormatError
from halfbyte.formats import PRESETS, Codes, as_format
from halfbyte.quantizers import absmax

GGUF = ("q4_0", "q4_1", "q8_0")
# The largest float16 times what every format's scale is divided by at least: no scale or offset overflows.
LIMIT = 65504.0


def weights(low: int, high: int) -> st.SearchStrategy[np.ndarray]:
    """float32 [2, 64] of random bit patterns, exponent fields from `low` to `high` inclusive: of all bits, or with a few mantissa bits
    only, so that ties occur; some elements as hypothesis likes them."""

    def build(seed: int, mantissa_mask: int, chosen: list[tuple[int, int]]) -> np.ndarray:
        rng = np.random.default_rng(seed)
        exponent = rng.integers(low, high, 128, endpoint=True, dtype=np.uint32)
        mantissa = rng.integers(0, 1 << 23, 128, dtype=np.uint32) & mantissa_mask
        bits = rng.integers(0, 2, 128, dtype=np.uint32) << 31 | exponent << 23 | mantissa
        for place, bit_pattern in chosen:
            bits[place] = bits[place] & 0xFF800000 | bit_pattern
        return bits.view(np.float32).reshape(2, 64)

    masks = st.sampled_from([0x7FFFFF, 0x780000, 0x600000, 0x40, 0])
    chosen = st.lists(st.tuples(st.integers(0, 127), st.integers(0, (1 << 23) - 1)), max_size=4)
    return st.builds(build, st.integers(0, 2**32), masks, chosen)


any_weights = st.one_of(
    weights(0, 142 - 1),  # below 2^15, whose quotients float16 holds
    weights(0, 0),  # subnormal
    weights(0, 8),  # scales whose reciprocal overflows, and those just above
    weights(90, 112),  # scales that are subnormal or zero in float16
    weights(126, 128),
)


def random_weight(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def special_weight() -> np.ndarray:
    w = random_weight((16, 64))
    w[0] = 0
    w[1], w[2] = 3.1, -3.1
    w[3, 5], w[3, 6] = 9, -9
    w[4, 5], w[4, 6] = -9, 9
    w[5] *= LIMIT / 8
    w[6], w[7] = w[6] * 1e-40, w[7] * 1e-44
    w[8] = np.round(w[8] * 4) / 4
    w[9] = -0.0
    w[10] = np.abs(w[10]) + 5
    w[11] *= 1e-7
    w[12, :32] = 0
    w[13] = np.float32(2**-149)
    w[14] = np.where(np.arange(64) % 2, LIMIT, -LIMIT)
    w[15, 0] = np.float32(2**-126)
    return w


def assert_as_gguf(w: np.ndarray, name: str) -> None:
    kind = GGMLQuantizationType[name.upper()]
    with np.errstate(all="ignore"):
        expected = quants.quantize(w, kind)
    if name == "q4_1":  # whether a zero minimum is -0 hangs on the order of numpy's comparisons: make it +0
        expected.reshape(-1, 20)[w.reshape(-1, 32).min(axis=1) == 0, 2:4] = 0
    codes = absmax(torch.from_numpy(w), as_format(name))
    blocks = to_blocks(codes)
    assert np.array_equal(blocks.numpy(), expected)
    back = from_blocks(codes.format, codes.shape, torch.from_numpy(expected))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(tensors(back), tensors(codes), strict=True))
    assert np.array_equal(codes.dequantize().numpy().view(np.uint32), quants.dequantize(expected, kind).view(np.uint32))


def tensors(codes: Codes) -> list[torch.Tensor]:
    return list(codes.tensors().values())


@pytest.mark.parametrize("name", GGUF)
@given(w=any_weights)
def test_ggml_blocks_are_bit_exact(name: str, w: np.ndarray) -> None:
    assert_as_gguf(w, name)


@pytest.mark.parametrize("name", GGUF)
@pytest.mark.parametrize("w", [special_weight(), random_weight((33, 160)), random_weight((2, 3, 32)), random_weight((64,))])
def test_ggml_blocks_of_special_weights_are_bit_exact(name: str, w: np.ndarray) -> None:
    assert_as_gguf(w, name)


def np_roundf(x: np.ndarray) -> np.ndarray:
    """C's roundf: half away from zero, of float32."""
    return np.where(np.isfinite(x), np.copysign(np.floor(np.abs(x.astype(np.float64)) + 0.5), x), 0)


def reference_q8(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """d float32 [..., 1] and q of quantize_row_q8_0_ref, quantize_row_q8_1_ref and InferLLM's quantize_row_q8_0_reference."""
    d = np.abs(w).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(all="ignore"):
        inverse = np.where(d != 0, np.float32(1) / d, np.float32(0)).astype(np.float32)
        return d, np_roundf(w * inverse).astype(np.int8)


@given(any_weights)
@example(special_weight())
def test_q8_1_is_ggmls_quantize_row(w: np.ndarray) -> None:
    fmt = as_format("q8_1")
    d, q = reference_q8(w.reshape(len(w), 2, 32))
    stored = d.astype(np.float16)
    sums = q.astype(np.int32).sum(axis=-1, keepdims=True).astype(np.float32)
    with np.errstate(over="ignore"):
        s = (sums * stored.astype(np.float32)).astype(np.float16)
    codes = absmax(torch.from_numpy(w), fmt)
    if not np.isfinite(s).all():
        with pytest.raises(FormatError, match="q8_0"):
            to_blocks(codes)
        return
    blocks = to_blocks(codes).numpy().reshape(len(w), 2, 36)
    assert np.array_equal(blocks[..., 0:2].view(np.uint16), stored.view(np.uint16))
    assert np.array_equal(blocks[..., 2:4].view(np.uint16), s.view(np.uint16))
    assert np.array_equal(blocks[..., 4:].view(np.int8), q)
    # ggml's own s takes d before it is rounded: half a unit of float16 apart in d, and rounded once more.
    error = np.abs(s.astype(np.float64) - sums * d.astype(np.float64))
    assert (error <= np.abs(sums * d) * (2**-11 + 2**-11 + 2**-20) + 2**-25 * (np.abs(sums) + 2)).all()
    back = from_blocks(fmt, codes.shape, torch.from_numpy(blocks.reshape(len(w), 72)))
    assert torch.equal(back.data, codes.data)
    assert torch.equal(back.scale, codes.scale)


@given(st.one_of(any_weights, weights(0, 254)))
@example(special_weight())
def test_inferllm_is_its_quantize_row(w: np.ndarray) -> None:
    blocks = w.reshape(len(w), 2, 32)
    d, q = reference_q8(blocks)
    codes = absmax(torch.from_numpy(w), as_format("inferllm_q8_0"))
    expected = np.concatenate((d.view(np.uint8), q.view(np.uint8)), axis=-1).reshape(len(w), 72)
    assert np.array_equal(to_blocks(codes).numpy(), expected)

    d = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(7)
    with np.errstate(all="ignore"):
        nibbles = (np_roundf(blocks * np.where(d != 0, np.float32(1) / d, np.float32(0))).astype(np.int8) + 8).astype(np.uint8)
    codes = absmax(torch.from_numpy(w), as_format("inferllm_q4_0"))
    expected = np.concatenate((d.view(np.uint8), nibbles[..., 0::2] | nibbles[..., 1::2] << 4), axis=-1).reshape(len(w), 40)
    assert np.array_equal(to_blocks(codes).numpy(), expected)
    assert np.array_equal(from_blocks(codes.format, codes.shape, torch.from_numpy(expected)).data.numpy(), codes.data.numpy())


@pytest.mark.parametrize("name", PRESETS)
@given(shape=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3).map(lambda n: 32 * n)), seed=st.integers(0, 99))
def test_codes_and_blocks_are_inverse(name: str, shape: tuple[int, ...], seed: int) -> None:
    fmt = as_format(name)
    codes = random_codes(fmt, shape, seed)
    blocks = to_blocks(codes)
    assert blocks.shape == (*shape[:-1], row_bytes(fmt, shape[-1]))
    back = from_blocks(fmt, shape, blocks)
    assert all(torch.equal(a, b) for a, b in zip(tensors(back), tensors(codes), strict=True))
    assert torch.equal(to_blocks(back), blocks)


def test_from_blocks_reads_a_slice_of_a_larger_buffer() -> None:
    codes = absmax(torch.from_numpy(random_weight((4, 64))), as_format("q4_1"))
    buffer = torch.zeros(5, 47, dtype=torch.uint8)
    buffer[1:, 7:] = to_blocks(codes)
    assert torch.equal(from_blocks(codes.format, codes.shape, buffer[1:, 7:]).dequantize(), codes.dequantize())


SIZES = [("q4_0", 18), ("q4_1", 20), ("q8_0", 34), ("q8_1", 36), ("inferllm_q4_0", 20), ("inferllm_q8_0", 36)]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_row_bytes(name: str, size: int) -> None:
    assert row_bytes(as_format(name), 96) == 3 * size
    with pytest.raises(FormatError, match="multiple of 32"):
        row_bytes(as_format(name), 100)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    codes = absmax(torch.ones(2, 40), as_format("q4_0"))
    with pytest.raises(FormatError, match="multiple of 32 weights, got 40"):
        to_blocks(codes)
    with pytest.raises(FormatError, match="multiple of 32 weights, got 40"):
        from_blocks(codes.format, (2, 40), torch.zeros(2, 36, dtype=torch.uint8))


def test_formats_without_blocks_are_refused() -> None:
    with pytest.raises(FormatError, match="int4_g32 has no block encoding"):
        to_blocks(absmax(torch.ones(2, 64), as_format("int4_g32")))


@pytest.mark.parametrize(("size", "dtype"), [((2, 35), torch.uint8), ((2, 36), torch.int8), ((72,), torch.uint8)])
def test_blocks_of_a_wrong_size_are_refused(size: tuple[int, ...], dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match=r"uint8 \[2, 36\]"):
        from_blocks(as_format("q4_0"), (2, 64), torch.zeros(size, dtype=dtype))
