"""Packed weights in the cache folder: opened again, a model has the same bits, and nothing of other weights, settings or damaged files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from language_model import make_decoder, make_language_model
from safetensors.torch import load_file, save_file

from halfbyte.checkpoint import convert, export
from halfbyte.cli import main
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.language import packed_cache, packed_files
from halfbyte.language.checkpoint_tensors import PackedTensors
from halfbyte.language.model import open_spec

IDS = [5, 17, 33, 2, 90, 60]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_language_model(root / "float", tied=False)
    for name, fmt in (("zeros", "int4_g32_zp"), ("channel", "int8_channel"), ("five_bits", "int5_g32"), ("q4", "q4_0")):
        convert(root / "float", root / name, fmt)
    export(root / "zeros", root / "awq", "awq")
    export(root / "q4", root / "q4.gguf", "gguf")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    make_decoder("Qwen3Moe", **sizes, head_dim=16, num_experts=4, num_experts_per_tok=2).save_pretrained(root / "experts")
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of packed weights, which takes small models, at once."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "LEAST", 1)
    monkeypatch.setattr(packed_cache, "_SETTLED", -(10**18))
    packed_cache._warn.cache_clear()
    monkeypatch.setattr(packed_cache, "_RESERVE", 0)
    yield tmp_path / "cache" / "packed"
    packed_cache.wait()


def logits(path: Path, **settings: Any) -> Tensor:
    """Those of a model, which is then stored."""
    spec = open_spec(path, **settings).spec
    model = CpuModel(spec)
    found = model.prefill(IDS, Cache(model.spec), every=True)
    packed_cache.wait()
    return found


class Packing:
    """Counts the weights that are packed."""

    count = 0


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Packing:
    pack, counted = PackedTensors._packed, Packing()

    def packed(self: PackedTensors, *args: Any, **settings: Any) -> Any:
        counted.count += 1
        return pack(self, *args, **settings)

    monkeypatch.setattr(PackedTensors, "_packed", packed)
    return counted


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob(f"*/*{packed_files.SUFFIX}"))


@pytest.mark.parametrize(
    ("name", "format"),
    [("zeros", None), ("channel", None), ("five_bits", None), ("awq", None), ("q4.gguf", None), ("float", "q4_0"), ("experts", "q8_0")],
)
def test_a_model_opened_again_has_the_same_logits_and_packs_nothing(
    models: Path, cache: Path, packing: Packing, name: str, format: str | None
) -> None:
    expected = logits(models / name, format=format)
    assert packing.count
    assert files(cache)
    packing.count = 0
    spec = open_spec(models / name, format=format).spec
    assert all(layer.attention.o_proj.packed.data.data_ptr() % 4096 == 0 for layer in spec.layers)
    assert torch.equal(logits(models / name, format=format), expected)
    assert packing.count == 0


def test_tables_in_floating_point_are_stored(models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_spec(models / "awq").spec
    assert isinstance(first.embedding, Tensor)
    packed_cache.wait()
    again = open_spec(models / "awq").spec
    assert isinstance(again.embedding, Tensor)
    assert torch.equal(again.embedding, first.embedding)
    assert again.embedding.data_ptr() % 4096 == 0
    with torch.inference_mode():
        assert torch.equal(again.embedding + 1, first.embedding + 1)


def copied(models: Path, tmp_path: Path, name: str) -> Path:
    source = models / name
    target = tmp_path / name
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return target


def changed(path: Path) -> None:
    """Give other weights to a folder, or a GGUF file, of the same size and with the same times of change."""
    file = path if path.is_file() else path / "model.safetensors"
    info = file.stat()
    if path.is_file():
        content = bytearray(file.read_bytes())
        content[-4096:-1024] = bytes(3072)
        file.write_bytes(content)
    else:
        tensors = load_file(file)
        name = "model.layers.1.mlp.down_proj.weight"
        save_file({**tensors, name: tensors[name].flip(0)}, file, {"format": "pt"})
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (info.st_size, info.st_mtime_ns)


@pytest.mark.parametrize(("name", "format"), [("q4.gguf", None), ("float", "q8_0")])
@pytest.mark.parametrize("replaced", [False, True])
def test_other_weights_of_the_same_size_and_time_are_noticed(
    models: Path, tmp_path: Path, packing: Packing, name: str, format: str | None, replaced: bool
) -> None:
    path = copied(models, tmp_path, name)
    before = logits(path, format=format)
    if replaced:
        (tmp_path / "other").mkdir()
        other = copied(models, tmp_path / "other", name)
        changed(other)
        for file in [other] if other.is_file() else list(other.iterdir()):
            os.replace(file, path if path.is_file() else path / file.name)
    else:
        changed(path)
    packing.count = 0
    after = logits(path, format=format)
    assert packing.count
    assert not torch.equal(after, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFBYTE_PACKED_GB", "0")
        assert torch.equal(after, logits(path, format=format))


def test_samples_notice_other_weights_where_times_and_inode_do_not(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without them."""
    path = copied(models, tmp_path, "q4.gguf")
    monkeypatch.setattr(packed_cache, "_state", lambda path: packed_cache._FileState(path.stat().st_size, 0, 0, 0))
    before = logits(path)
    changed(path)
    assert not torch.equal(logits(path), before)


def test_files_that_changed_just_now_or_meanwhile_are_not_stored(
    models: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(models, tmp_path, "q4.gguf")
    monkeypatch.setattr(packed_cache, "_SETTLED", 3600 * 10**9)
    logits(path)
    assert not files(cache)
    monkeypatch.setattr(packed_cache, "_SETTLED", -(10**18))
    with pytest.MonkeyPatch.context() as patch:
        store = PackedTensors.store
        patch.setattr(PackedTensors, "store", lambda self: (changed(path), store(self))[1])
        logits(path)
    assert not files(cache)
    logits(path)
    assert files(cache)


def test_settings_have_packed_weights_of_their_own(models: Path, packing: Packing) -> None:
    by_format = {fmt: logits(models / "float", format=fmt) for fmt in ("q4_0", "q8_0")}
    packing.count = 0
    assert all(torch.equal(logits(models / "float", format=fmt), found) for fmt, found in by_format.items())
    assert packing.count == 0
    logits(models / "float", format="q4_0", sparse=False)
    assert packing.count


def opened(models: Path, settings: object) -> packed_cache.PackedCache | None:
    return packed_cache.open_cache([models / "q4.gguf"], settings)


def test_the_instruction_set_and_the_source_code_are_in_the_key(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [opened(models, ())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halfbyte.kernels.cpu.codegen.isas.current", lambda: type("Isa", (), {"name": "another"}))
        folders.append(opened(models, ()))
    monkeypatch.setattr("halfbyte.kernels.cpu.codegen.jit.source_digest", lambda patterns: "another")
    folders.append(opened(models, ()))
    assert len({each._folder for each in folders if each is not None}) == 3


def overwritten(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def data_offset(path: Path) -> int:
    return packed_files.PackedFile(path).weights[0].offset


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 4096),
    "truncated to its header": lambda path: os.truncate(path, 4096),
    "short": lambda path: os.truncate(path, 20),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "another version": lambda path: overwritten(path, 8, b"\x63"),
    "another kind": lambda path: overwritten(path, 0, b"GGUF"),
    "a huge header": lambda path: overwritten(path, 12, b"\xff\xff\xff\xff"),
    "a damaged header": lambda path: overwritten(path, 70, b"\x00"),
    "other data": lambda path: overwritten(path, data_offset(path), b"\x00\x01\x02\x03" * 8),
    "zeros": lambda path: overwritten(path, data_offset(path), bytes(path.stat().st_size - data_offset(path))),
    "writable by others": lambda path: path.chmod(0o666),
    "a link": lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to(path.with_name("elsewhere"))),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
}


def test_one_damaged_weight_of_a_file(models: Path, cache: Path, packing: Packing) -> None:
    """The last of a file: those before it were read when it is found, and are stored again with it."""
    expected = logits(models / "q4.gguf")
    (file,) = files(cache)
    last = packed_files.PackedFile(file).weights[-1]
    overwritten(file, last.offset, bytes([255 - byte for byte in file.read_bytes()[last.offset : last.offset + 64]]))
    for packs in (True, False):
        packing.count = 0
        assert torch.equal(logits(models / "q4.gguf"), expected)
        assert bool(packing.count) == packs
    assert len(files(cache)) == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_packed_again(models: Path, cache: Path, packing: Packing, damage: str) -> None:
    expected = logits(models / "q4.gguf")
    (file,) = files(cache)
    DAMAGES[damage](file)
    packing.count = 0
    assert torch.equal(logits(models / "q4.gguf"), expected)
    assert packing.count
    packing.count = 0
    assert torch.equal(logits(models / "q4.gguf"), expected)
    assert packing.count == 0
    assert not list(cache.glob(f"*/*{packed_files.TEMPORARY}"))


@pytest.mark.parametrize(
    "change",
    [{"offset": 1 << 40}, {"offset": 64}, {"bytes": -1}, {"bytes": 1 << 50}, {"shape": [-1, 64]}, {"shape": 3}, {"sparse": 7}, {"x": 1}],
)
def test_headers_with_impossible_weights_are_refused(models: Path, cache: Path, change: dict[str, Any]) -> None:
    """Whose digest is right: nobody but the user can write them."""
    import hashlib

    expected = logits(models / "q4.gguf")
    (file,) = files(cache)
    content = file.read_bytes()
    length = int.from_bytes(content[12:16], "little")
    header = json.loads(content[48 : 48 + length])
    header["weights"][0] |= change
    text = json.dumps(header).encode().ljust(length)
    assert len(text) == length
    file.write_bytes(content[:16] + hashlib.sha256(text).digest() + text + content[48 + length :])
    with pytest.raises(packed_files.DamagedError):
        packed_files.PackedFile(file)
    assert torch.equal(logits(models / "q4.gguf"), expected)


def test_the_least_recently_used_models_are_removed(models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits(models / "q4.gguf")
    size = sum(file.stat().st_size for file in files(cache))
    logits(models / "zeros")
    first, second = sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    logits(models / "q4.gguf")  # uses the first one again
    monkeypatch.setenv("HALFBYTE_PACKED_GB", f"{2.5 * size / 1e9:.9f}")
    logits(models / "float", format="q4_0")
    assert first.is_dir()
    assert not second.exists()
    monkeypatch.setenv("HALFBYTE_PACKED_GB", f"{0.5 * size / 1e9:.9f}")  # too little for any: nothing is removed for it
    logits(models / "five_bits")
    assert first.is_dir()
    assert len(list(cache.iterdir())) == 2


def test_it_is_turned_off(models: Path, cache: Path, packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_PACKED_GB", "0")
    logits(models / "q4.gguf")
    assert not cache.exists()
    monkeypatch.delenv("HALFBYTE_PACKED_GB")
    monkeypatch.setattr(packed_cache, "LEAST", 1 << 30)  # models are small
    logits(models / "q4.gguf")
    assert not files(cache)


def test_some_of_the_disk_is_left_free(models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "_RESERVE", 10**18)
    usage = type("Usage", (), {"total": 10**12, "used": 0, "free": 10**11})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    logits(models / "q4.gguf")
    assert not list(cache.iterdir())


@pytest.mark.filterwarnings("default")
def test_a_full_disk_leaves_nothing_and_is_warned_of(models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if len(data) > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(RuntimeWarning, match="could not be stored in .*No space left"):
        logits(models / "q4.gguf")
    assert not list(cache.iterdir())


def test_only_one_process_writes_a_model(models: Path, cache: Path) -> None:
    logits(models / "q4.gguf")
    (file,) = files(cache)
    file.unlink()
    with (file.parent / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        logits(models / "q4.gguf")
        assert not files(cache)
    (file.parent / f"left{packed_files.TEMPORARY}").write_bytes(b"by a process that was killed")
    logits(models / "q4.gguf")
    assert files(cache) == [file]
    assert not list(cache.glob(f"*/*{packed_files.TEMPORARY}"))


def test_a_folder_that_others_can_write_is_not_used(models: Path, cache: Path, packing: Packing) -> None:
    logits(models / "q4.gguf")
    cache.chmod(0o755)
    packing.count = 0
    with pytest.warns(RuntimeWarning, match="are not stored in .*mode 755.*until HALFBYTE_CACHE names a usable folder"):
        logits(models / "q4.gguf")
    assert packing.count
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        logits(models / "q4.gguf")


def test_a_read_only_folder_is_read(models: Path, cache: Path, packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    logits(models / "q4.gguf")

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("utime", "unlink", "replace"):  # root may write anywhere
        monkeypatch.setattr(os, name, refused)
    packing.count = 0
    logits(models / "q4.gguf")
    assert packing.count == 0


def test_models_stay_usable_when_their_files_are_removed(models: Path, cache: Path) -> None:
    expected = logits(models / "q4.gguf")
    model = CpuModel(open_spec(models / "q4.gguf").spec)
    shutil.rmtree(cache)
    assert torch.equal(model.prefill(IDS, Cache(model.spec), every=True), expected)


# Opens a model, and ends when the first bytes of its packed weights are written: all of them would take over a second.
ENDING = """
import json, sys, time
from pathlib import Path
from halfbyte.language import packed_cache, packed_files
from halfbyte.language.model import open_spec
packed_cache.LEAST, packed_cache._SETTLED, packed_files._CHUNK = 1, -10**18, 4096
check = packed_cache._check_stopped
packed_cache._check_stopped = lambda: (time.sleep(0.05), check())
open_spec(Path(sys.argv[1]))
while not list(Path(sys.argv[2]).glob("*/*.writing")):
    time.sleep(0.01)
print(json.dumps([module.__file__ for name, module in sys.modules.items() if name.startswith("halfbyte.")]))
"""


def test_a_process_that_ends_leaves_nothing(models: Path, cache: Path) -> None:
    """And the key of what it would have stored has the source code of all modules that it imported, but for those of rank 0."""
    from halfbyte.kernels.cpu.codegen import jit

    command = [sys.executable, "-c", ENDING, str(models / "q4.gguf"), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    assert not list(cache.iterdir())
    root = Path(packed_cache.__file__).parents[1]
    missing = [path.relative_to(root) for path in {*map(Path, json.loads(done.stdout))} - {*jit.sources(packed_cache._PATTERNS)}]
    assert {str(path) for path in missing if len(path.parts) > 1 and path.name != "__init__.py"} <= {"integrations/on_import.py"}


def test_doctor(models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    logits(models / "q4.gguf")
    assert main(["doctor", "--no-test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cache"]["packed"]
    assert (found["models"], found["limit"], found["trouble"]) == (1, 16 * 10**9, None)
    assert found["bytes"] > 10_000
    monkeypatch.setenv("HALFBYTE_PACKED_GB", "0")
    assert main(["doctor", "--no-test"]) == 0
    assert "packed weights of 1 models" in (said := capsys.readouterr().out)
    assert "none are stored: HALFBYTE_PACKED_GB is 0" in said
