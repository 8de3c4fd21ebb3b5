"""Damaged files by the thousand: `python tests/shared/fuzzing.py --count 100000`. tests/checkpoint/any_kind/test_fuzz.py runs some of it.

Each case changes a sound file somewhere and reads it whole: GGUF files by themselves and as models with their tokenizer, one of them a
mixture of experts, one in two parts; folders of AWQ, GPTQ, compressed-tensors, bitsandbytes, HQQ, torchao and halfbyte, of 8- and 4-bit
floats, and float ones in several files; tokenizer.json. It passes if the file is read or refused with one line; if that takes no more
than a few seconds of the processor; and if no more than four times its size is allocated, besides room to work: 256 MB of address space
in every case, and one megabyte in every fiftieth, where each allocation is seen.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from language_model import make_tokenizer
from safetensors.torch import save_file
from samples import random_codes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfbyte.checkpoint import convert, export
from halfbyte.checkpoint.foreign.folders import read_folder
from halfbyte.checkpoint.gguf import tokenizer as gguf_tokenizer
from halfbyte.checkpoint.loading import open_model
from halfbyte.checkpoint.native.manifest import CONFIG, INDEX
from halfbyte.errors import HalfbyteError
from halfbyte.formats import as_format, ggml
from halfbyte.integrations.transformers.text import open_tokenizer
from halfbyte.io import gguf
from halfbyte.io.safetensors import Reader, TensorSpec, Writer, load_json
from halfbyte.io.weights import awq, compressed_tensors, gptq
from halfbyte.nn.config import Config

ROOM = 1 << 20  # bytes beside four times the file
ADDRESS_ROOM = 256 << 20
CLOSELY = 50  # one case in so many is looked at closely
SECONDS = 5.0
_SIZES = (0, 1, 2, 31, 32, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 33, (1 << 62) - 1, 1 << 63, (1 << 64) - 1)


class _Largest(TorchDispatchMode):
    """Inside, sees every tensor that is made, and what Python allocates. `taken`: the larger of the largest tensor and of the latter."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def __enter__(self) -> _Largest:
        tracemalloc.start()
        super().__enter__()
        return self

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)
        self.taken = max(self.taken, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.taken = max(self.taken, leaf.untyped_storage().nbytes())
        return out


@dataclass(frozen=True)
class Kind:
    """What is damaged: `files` of a folder are changed, `read` reads the folder."""

    name: str
    files: tuple[str, ...]
    make: Callable[[Path], None]
    read: Callable[[Path], object]


@dataclass
class Outcome:
    messages: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    largest: float = 0.0  # allocation, in parts of what is allowed


def make_gguf(folder: Path) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.context_length": 32,
        "llama.rope.freq_base": 1e4,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(40)],
        "tokenizer.ggml.scores": [float(-i) for i in range(40)],
        "tokenizer.ggml.token_type": [1] * 40,
        "flags": [True, False],
        "empty": [],
    }
    tensors = {f"blk.0.{kind.name}.weight": (number, (2, kind.weights)) for number, kind in ggml.TYPES.items()}
    tensors |= {"norm": (0, (8,)), "half": (30, (2, 8)), "scalar": (0, ())}
    (folder / "m.gguf").unlink(missing_ok=True)
    writer = gguf.Writer(folder / "m.gguf", metadata, tensors)
    rng = torch.Generator().manual_seed(0)
    for name, (number, shape) in tensors.items():
        if number in ggml.TYPES:
            size = (shape[0], ggml.TYPES[number].row_bytes(shape[1]))
            # Small bytes: numbers in float16 that are finite.
            writer.write(name, torch.randint(0, 60, size, generator=rng, dtype=torch.uint8))
        else:
            writer.write(name, torch.zeros(shape, dtype=torch.bfloat16 if number == 30 else torch.float32))
    writer.finish()


def read_gguf(folder: Path) -> object:
    file = gguf.read_header(folder / "m.gguf")
    strings = [list(value) for value in file.metadata.values() if isinstance(value, gguf.Strings)]
    return strings, [gguf.read(entry) for entry in file.entries.values()]


def _folder(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    for old in folder.glob("*"):
        old.unlink()
    writer = Writer(folder, "model", {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()
    (folder / CONFIG).write_text(json.dumps({"dtype": "float16", "quantization_config": settings}))


def make_awq(folder: Path) -> None:
    parts = awq.write(random_codes(as_format("int4_g16_zp"), (16, 32)))
    _folder(
        folder, {f"a.b.{name}": part for name, part in parts.items()} | {"norm": torch.ones(4)}, {"quant_method": "awq", "group_size": 16}
    )


def make_gptq(folder: Path) -> None:
    order = torch.randperm(32).view(2, 16).sort(dim=1).values.flatten().to(torch.int32)
    parts = gptq.write(random_codes(as_format("int4_g16_zp"), (16, 32)), order, 1)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": True}
    _folder(folder, {f"a.b.{name}": part for name, part in parts.items()} | {"norm": torch.ones(4)}, settings)


def make_compressed_tensors(folder: Path) -> None:
    packed = compressed_tensors.write(random_codes(as_format("int4_g16_zp"), (5, 32)), None, packed=True)
    integer = compressed_tensors.write(random_codes(as_format("int8_channel_zp"), (5, 9)), None, packed=False)
    groups = {
        "group_0": {"targets": ["re:a.*"], "weights": {"num_bits": 4, "type": "int"}, "input_activations": None},
        "group_1": {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "symmetric": True}},
    }
    tensors = {f"a.{name}": part for name, part in packed.items()} | {f"b.{name}": part for name, part in integer.items()}
    _folder(folder, tensors, {"quant_method": "compressed-tensors", "config_groups": groups})


def make_small_floats(folder: Path) -> None:
    """8-bit floats with scales of three kinds, and 4-bit floats of two."""
    weight = torch.rand(5, 64).to(torch.float8_e4m3fn)
    data, exponents = torch.randint(0, 256, (5, 32), dtype=torch.uint8), torch.randint(100, 140, (5, 2), dtype=torch.uint8)
    tensors = {
        "a.weight": weight,
        "a.weight_scale": torch.rand(5, 1),
        "b.weight": weight,
        "b.weight_scale_inv": torch.rand(2, 2),
        "c.weight": weight,
        "c.weight_scale": exponents,
        "d.weight_packed": data,
        "d.weight_scale": exponents,
        "e.weight_packed": data,
        "e.weight_scale": torch.rand(5, 4).to(torch.float8_e4m3fn),
        "e.weight_global_scale": torch.rand(1) + 0.5,
        "e.input_global_scale": torch.ones(1),
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "block_structure": [4, 32]}}}
    _folder(folder, tensors, {"quant_method": "compressed-tensors", "config_groups": groups})


def make_mxfp4(folder: Path) -> None:
    blocks, scales = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8), torch.randint(100, 140, (2, 6, 3), dtype=torch.uint8)
    tensors = {"a.gate_up_proj_blocks": blocks, "a.gate_up_proj_scales": scales, "norm": torch.ones(4)}
    _folder(folder, tensors, {"quant_method": "mxfp4"})


def make_bitsandbytes(folder: Path) -> None:
    state = {"quant_type": "nf4", "blocksize": 16, "shape": [6, 30], "nested_blocksize": 4, "nested_offset": 0.5, "dtype": "float16"}
    tensors = {
        "a.weight": torch.randint(0, 256, (90, 1), dtype=torch.uint8),
        "a.weight.absmax": torch.randint(0, 256, (12,), dtype=torch.uint8),
        "a.weight.quant_map": torch.linspace(-1, 1, 16),
        "a.weight.nested_absmax": torch.rand(3),
        "a.weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "a.weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8),
        "b.weight": torch.randint(-127, 128, (4, 9), dtype=torch.int8),
        "b.SCB": torch.rand(4),
        "b.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    _folder(folder, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})


def make_hqq(folder: Path) -> None:
    """Of 8, 4 and 3 bits, with groups along the inputs and along the outputs."""
    tensors = {"norm": torch.ones(4)}
    for name, bits, axis in (("a", 8, 1), ("b", 4, 1), ("c", 4, 0), ("d", 3, 1)):
        rows, columns = (24, 8) if axis == 1 else (8, 24)
        words = torch.randint(0, 1 << 30, (-(-rows // 10), columns), dtype=torch.int32)
        packed = words if bits == 3 else torch.randint(0, 256, (rows * bits // 8, columns), dtype=torch.uint8)
        scales = (rows, 1) if axis == 1 else (1, columns)
        settings = {"nbits": bits, "axis": axis, "group_size": 8, "channel_wise": 1, "quant_scale": 0}
        parts = {"W_q": packed, "scale": torch.rand(scales).half(), "zero": torch.rand(scales).half(), "shape": torch.tensor([6, 32])}
        parts |= {key: torch.tensor(value, dtype=torch.int32) for key, value in settings.items()}
        tensors |= {f"{name}.{key}": value for key, value in parts.items()}
    _folder(folder, tensors, {"quant_method": "hqq"})


def make_torchao(folder: Path) -> None:
    codes, points = torch.randint(-8, 8, (6, 32), dtype=torch.int8), torch.randint(-8, 8, (6, 2), dtype=torch.int8)
    parts = {
        "a": ("Int8Tensor", {}, {"qdata": codes, "scale": torch.rand(6, 1), "zero_point": torch.zeros(6, 1, dtype=torch.int8)}),
        "b": ("IntxUnpackedToInt8Tensor", {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}},
              {"qdata": codes, "scale": torch.rand(6, 2).bfloat16(), "zero_point": points}),
        "c": ("Float8Tensor", {}, {"qdata": torch.rand(6, 32).to(torch.float8_e4m3fn), "scale": torch.rand(6, 1)}),
    }  # fmt: skip
    _folder(folder, {}, {"quant_method": "torchao"})
    tensors = {f"{name}._weight_{part}": tensor.clone() for name, (_, _, found) in parts.items() for part, tensor in found.items()}
    metadata = {f"{name}.weight": json.dumps({"_type": kind, "_data": about}) for name, (kind, about, _) in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt", **metadata})


def make_gguf_parts(folder: Path) -> None:
    for i, name in enumerate(_PARTS):
        counts = {"split.count": 2, "split.no": i, "split.tensors.count": 2}
        (folder / name).unlink(missing_ok=True)
        writer = gguf.Writer(folder / name, counts | {"general.architecture": "llama"}, {f"w{i}": (2, (3, 64))})
        writer.write(f"w{i}", torch.randint(0, 60, (3, 36), dtype=torch.uint8))
        writer.finish()


def read_gguf_parts(folder: Path) -> object:
    return [gguf.read(entry) for entry in gguf.read_header(folder / _PARTS[0]).entries.values()]


def read_quantized(folder: Path) -> object:
    config = load_json(folder / CONFIG)
    if not isinstance(config.get("quantization_config"), dict):
        return None
    entries = read_folder(Reader([folder / "model.safetensors"]), config)
    read = []
    for name, entry in entries.entries.items():
        read.append(entries.read(name))
        if entry.quantized is not None and entry.quantized.order is not None:
            read.append(entry.quantized.order())
    return read


def _language_model(folder: Path, config: Any) -> Path:
    """A float model of transformers in a new folder below `folder`, with a tokenizer, in three files."""
    for old in (*folder.glob("float/*"), *folder.glob("*.*")):
        old.unlink()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "float", max_shard_size=model.num_parameters() * 2)
    tokenizer.save_pretrained(folder / "float")
    return folder / "float"


_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def _llama() -> Any:
    return transformers.LlamaConfig(**_SMALL, intermediate_size=32, max_position_embeddings=32)


def make_gguf_model(folder: Path) -> None:
    source = _language_model(folder, _llama())
    convert(source, folder / "q", Config("q4_0", skip=["lm_head"]))
    export(folder / "q", folder / "m.gguf", "gguf")
    shutil.rmtree(folder / "q")


def make_gguf_experts(folder: Path) -> None:
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(**_SMALL, **experts, intermediate_size=32, max_position_embeddings=32)
    source = _language_model(folder, config)
    convert(source, folder / "q", Config("q8_0", compute="float"))
    export(folder / "q", folder / "m.gguf", "gguf")
    shutil.rmtree(folder / "q")


def make_halfbyte(folder: Path) -> None:
    source = _language_model(folder, _llama())
    convert(source, folder / "q", Config("int4_g16_zp", overrides={"*.o_proj": "q8_0"}))
    for name in _FOLDER:
        (folder / "q" / name).replace(folder / name)
    shutil.rmtree(folder / "q")


def make_floats(folder: Path) -> None:
    for file in _language_model(folder, _llama()).iterdir():
        file.replace(folder / file.name)


def read_model(folder: Path) -> object:
    """Names and shapes as the model needs them, and every number; of a GGUF file the tokenizer too."""
    path = folder / "m.gguf" if (folder / "m.gguf").exists() else folder
    opened = open_model(path, floats=True)
    read = [opened.codes(name) for name in opened.weights], [opened.tensor(name) for name in opened.plain], opened.report()
    return read, gguf_tokenizer.load(path) if path != folder else None


def read_tokenizer(folder: Path) -> object:
    tokenizer = open_tokenizer(folder)
    return tokenizer("the quick brown fox")["input_ids"]


_FOLDER = ("model.safetensors", CONFIG)
_PARTS = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
_SHARDS = tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
KINDS = (
    Kind("gguf", ("m.gguf",), make_gguf, read_gguf),
    Kind("awq", _FOLDER, make_awq, read_quantized),
    Kind("gptq", _FOLDER, make_gptq, read_quantized),
    Kind("compressed-tensors", _FOLDER, make_compressed_tensors, read_quantized),
    Kind("small floats", _FOLDER, make_small_floats, read_quantized),
    Kind("mxfp4", _FOLDER, make_mxfp4, read_quantized),
    Kind("bitsandbytes", _FOLDER, make_bitsandbytes, read_quantized),
    Kind("hqq", _FOLDER, make_hqq, read_quantized),
    Kind("torchao", _FOLDER, make_torchao, read_quantized),
    Kind("gguf parts", _PARTS, make_gguf_parts, read_gguf_parts),
    Kind("gguf model", ("m.gguf",), make_gguf_model, read_model),
    Kind("gguf experts", ("m.gguf",), make_gguf_experts, read_model),
    Kind("halfbyte", _FOLDER, make_halfbyte, read_model),
    Kind("float", (*_SHARDS, INDEX, CONFIG), make_floats, read_model),
    Kind("tokenizer", ("tokenizer.json",), make_floats, read_tokenizer),
)


def mutations(content: bytes, rng: random.Random) -> Iterator[bytes]:
    """Endless changes of `content`: mostly in its first half, where headers are."""
    while True:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at = rng.randrange(max(1, len(changed) // rng.choice((1, 2, 2, 4))))
            match rng.randrange(8):
                case 0 | 1:
                    changed[at] = rng.randrange(256)
                case 2:
                    changed[at] ^= 1 << rng.randrange(8)
                case 3:
                    width = rng.choice((4, 8))
                    changed[at : at + width] = (rng.choice(_SIZES) & (1 << 8 * width) - 1).to_bytes(width, "little")
                case 4:
                    del changed[at:]
                case 5:
                    del changed[at : at + rng.randrange(1, 40)]
                case 6:
                    changed[at:at] = rng.randbytes(rng.randrange(1, 40))
                case 7:  # numbers in JSON, and pieces of the file elsewhere
                    length = rng.randrange(1, 60)
                    other = rng.randrange(len(changed) + 1)
                    changed[at : at + length] = rng.choice((changed[other : other + length], b"9" * rng.randrange(1, 25), b"-1", b"null"))
            if not changed:
                changed = bytearray(b"\0")
        yield bytes(changed)


def run(kind: Kind, count: int, seed: int) -> Outcome:
    """Raises AssertionError at the first case that fails, with the seed and the number by which it comes again."""
    outcome = Outcome()
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind.make(folder)
        with _Largest():
            kind.read(folder)  # imports on the way do not count as a case's memory
        sound = {file: (folder / file).read_bytes() for file in kind.files}
        changes = {file: mutations(content, rng) for file, content in sound.items()}
        with _limited(sum(map(len, sound.values()))):
            for case in range(count):
                file = rng.choice(kind.files)
                (folder / file).write_bytes(next(changes[file]))
                _one(kind, folder, outcome, f"{kind.name}, seed {seed}, case {case}, in {file}", closely=case % CLOSELY == 0)
                (folder / file).write_bytes(sound[file])
    return outcome


def _one(kind: Kind, folder: Path, outcome: Outcome, which: str, *, closely: bool) -> None:
    size = sum((folder / file).stat().st_size for file in kind.files)
    start, largest = time.process_time(), _Largest()  # of the processor: others may be at work too
    try:
        with largest if closely else nullcontext():
            kind.read(folder)
        message = None
    except HalfbyteError as e:
        message = str(e)
        assert message, which
        assert "\n" not in message, which
        assert len(message) < 2000, which
    except Exception as e:
        raise AssertionError(f"{which}: {type(e).__name__}: {e}") from e
    taken = time.process_time() - start
    assert taken < SECONDS, f"{which}: {taken:.1f} s"
    if closely:
        assert largest.taken <= 4 * size + ROOM, f"{which}: {largest.taken} bytes allocated for files of {size}"
        outcome.largest = max(outcome.largest, largest.taken / (4 * size + ROOM))
    outcome.slowest = max(outcome.slowest, taken)
    outcome.messages["refused" if message else "read"] += 1


@contextmanager
def _limited(size: int) -> Iterator[None]:
    """An allocation that is out of all measure fails, and the error is not a HalfbyteError."""
    if sys.platform != "linux":
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * size + ADDRESS_ROOM, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="of cases, over all kinds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS], default=[kind.name for kind in KINDS])
    args = parser.parse_args()
    for kind in [kind for kind in KINDS if kind.name in args.kinds]:
        outcome = run(kind, args.count // len(args.kinds), args.seed)
        slowest = f"slowest {outcome.slowest * 1e3:.0f} ms, most memory {outcome.largest:.0%} of what is allowed"
        sys.stdout.write(f"{kind.name}: {outcome.messages.total()} cases, {dict(outcome.messages)}, {slowest}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
