"""Writers that fail, are interrupted or killed: the old checkpoint or the new one, whole, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.checkpoint import convert, load_tensors, save
from halfbyte.checkpoint.native import checkpoint_model
from halfbyte.checkpoint.native import folder as folder_module
from halfbyte.checkpoint.native.folder import complete, replacing, replacing_file
from halfbyte.checkpoint.native.manifest import Manifest, read_manifest
from halfbyte.errors import ArgumentError, CheckpointError


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Embedding(3, 6), nn.LayerNorm(4), nn.Linear(8, 2))


def contents(folder: Path) -> dict[str, list[Any]]:
    """Everything in a checkpoint, comparable."""
    return {name: (v if isinstance(v, Tensor) else v.dequantize()).tolist() for name, v in load_tensors(folder).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that a second one is going to replace, with a file of the user's in it."""
    safetensors.torch.save_file({"a.weight": torch.ones(40, 33), "b": torch.ones(3)}, tmp_path / "old.safetensors")
    convert(tmp_path / "old.safetensors", tmp_path / "m", "q4_0")
    (tmp_path / "m" / "notes.txt").write_text("mine")
    return tmp_path / "m"


def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        other = tmp_path / name.replace(".", "_")
        other.mkdir()
        (other / name).write_bytes(b"weights of a year's work")
        with pytest.raises(CheckpointError, match=f"holds another model's {name}"):
            save(network(), other)
        assert [path.name for path in other.iterdir()] == [name]
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 9}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "float")
    before = sorted(path.name for path in (tmp_path / "float").iterdir())
    with pytest.raises(CheckpointError, match="holds no halfbyte checkpoint"):
        convert(tmp_path / "float", tmp_path / "float", "q4_0")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        save(network(), tmp_path / "file" / "m")
    assert sorted(path.name for path in (tmp_path / "float").iterdir()) == before


def test_a_folder_keeps_what_is_not_the_checkpoints(folder: Path) -> None:
    for _ in range(3):
        save(network(), folder)
        names = sorted(path.name for path in folder.iterdir())
        known = ["README.md", "config.json", "model.safetensors.index.json", "notes.txt"]
        assert [name for name in names if not name.startswith("model-")] == known
        assert len(names) == 5


def test_a_file_of_the_users_under_an_old_name_is_kept(folder: Path) -> None:
    assert (folder / "model.safetensors").exists()
    save(network(), folder)
    assert not (folder / "model.safetensors").exists()
    (folder / "model.safetensors").write_text("mine")
    save(network(), folder)
    assert (folder / "model.safetensors").read_text() == "mine"


def test_an_interrupted_writer_leaves_no_trace(folder: Path, tmp_path: Path) -> None:
    before, names = contents(folder), sorted(tmp_path.rglob("*"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for target in (folder, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "old.safetensors", target, "q8_0", progress=interrupt)
        assert sorted(tmp_path.rglob("*")) == names
    assert contents(folder) == before


def test_a_nan_in_the_middle_leaves_the_old(folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    bad = {"a.weight": torch.ones(4, 4), "b.weight": torch.full((4, 4), float("nan"))}
    safetensors.torch.save_file(bad, tmp_path / "bad.safetensors")
    with pytest.raises(ArgumentError, match=r"b\.weight"):
        convert(tmp_path / "bad.safetensors", folder, "q8_0")
    assert contents(folder) == before


def test_two_writers_at_once(folder: Path) -> None:
    with replacing(folder), pytest.raises(CheckpointError, match="another process is writing to"):
        save(network(), folder)


def test_two_writers_to_a_new_place_at_once(tmp_path: Path) -> None:
    new = tmp_path / "new"
    with replacing(new), pytest.raises(CheckpointError, match=f"another process is writing to {new}: wait"):
        save(network(), new)
    assert list(tmp_path.iterdir()) == []
    with replacing_file(new) as path:
        path.write_text("first")
        with pytest.raises(CheckpointError, match=f"another process is writing to {new}: wait"), replacing_file(new):
            pass
    assert new.read_text() == "first"


def test_a_folder_that_another_writer_has_made_meanwhile_stays(tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "new") as staging:
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "theirs").write_text("whole")
            staging.commit({}, Manifest((), {}, {}, {}))

    with pytest.raises(CheckpointError, match=r"another process has written .*new meanwhile, .* choose another folder"):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "theirs"]


def test_a_temporary_folder_that_another_writer_took_for_a_dead_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and its lock."""
    lock = folder_module._locked

    def removed(path: Path, target: Path | None = None) -> Any:
        monkeypatch.undo()
        shutil.rmtree(path)
        return lock(path, target)

    monkeypatch.setattr(folder_module, "_locked", removed)
    save(network(), tmp_path / "new")
    assert contents(tmp_path / "new").keys() == network().state_dict().keys()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_many_writers_at_once_leave_the_checkpoint_of_one(tmp_path: Path) -> None:
    models = [network() for _ in range(4)]
    states = [{name: tensor.tolist() for name, tensor in model.state_dict().items()} for model in models]
    for round_index in range(10):
        new, together = tmp_path / str(round_index) / "new", Barrier(len(models))

        def write(model: nn.Module, new: Path = new, together: Barrier = together) -> str:
            together.wait()
            try:
                save(model, new)
            except CheckpointError as e:
                return str(e)
            return "written"

        with ThreadPoolExecutor(len(models)) as pool:
            said = list(pool.map(write, models))
        assert "written" in said
        assert all(one == "written" or f"{new}: wait until" in one or f"{new} meanwhile" in one for one in said), said
        assert contents(new) in states
        assert [path.name for path in new.parent.iterdir()] == ["new"]


def test_a_reader_finds_the_new_checkpoint_that_is_written_while_it_opens_the_old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced_meanwhile(*_: object) -> None:
        monkeypatch.undo()
        save(network(), folder)

    monkeypatch.setattr(checkpoint_model, "complete", replaced_meanwhile)
    assert contents(folder).keys() == network().state_dict().keys()
    (weights,) = folder.glob("*.safetensors")
    weights.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        load_tensors(folder)


def test_a_reader_does_not_stumble_over_a_writer_that_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which removes the folder that the reader looks through."""
    manifest, scan = replace(read_manifest(folder)[1], staging=".halfbyte-01234567"), os.scandir
    (folder / ".halfbyte-01234567" / "sub").mkdir(parents=True)

    def removed_meanwhile(path: Any = ".") -> Any:
        if os.path.basename(path) == "sub":
            monkeypatch.undo()
            shutil.rmtree(folder / ".halfbyte-01234567")
        return scan(path)

    monkeypatch.setattr(os, "scandir", removed_meanwhile)
    complete(folder, manifest)
    assert not (folder / ".halfbyte-01234567").exists()


_HELPERS = """
import os, sys, signal, json, shutil, time
import torch
from pathlib import Path
from halfbyte.checkpoint import convert, load_tensors
from halfbyte.errors import CheckpointError

torch.set_num_threads(1)
root = Path(sys.argv[1])

def contents(folder):
    tensors = load_tensors(folder)
    text = (folder / "tokenizer.json").read_text()
    return text, tensors["b"].tolist(), tensors["a.weight"].dequantize().tolist()
"""

_KILLED = (
    _HELPERS
    + """
def forked(act):
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException as e:
            print(repr(e), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]

convert(root / "old", root / "m_old", "q4_0")
convert(root / "new", root / "m_new", "q4_0")
old, new = contents(root / "m_old"), contents(root / "m_new")
assert old != new

def killed_at(moment, target):
    def act():
        left = moment
        def hook(event, args):
            nonlocal left
            if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "fcntl.flock"):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
        sys.addaudithook(hook)
        convert(root / "new", target, "q4_0")
    return forked(act)

counts = {"old": 0, "new": 0, "none": 0}
for fresh in (False, True):
    for moment in range(10_000):
        target = root / f"t{fresh}{moment}"
        if not fresh:
            shutil.copytree(root / "m_old", target)
            (target / "notes.txt").write_text("mine")
        status = killed_at(moment, target)
        try:
            found = contents(target)
        except CheckpointError:
            assert fresh and not target.exists(), (moment, os.listdir(target))
            counts["none"] += 1
        else:
            assert found in (old, new), moment
            counts["old" if found == old else "new"] += 1
            assert fresh or (target / "notes.txt").read_text() == "mine"
        if moment % 3 == 0 or status == 0:  # whatever was left behind, the next writer succeeds and tidies up
            convert(root / "new", target, "q8_0")
            left = {p.name for p in target.iterdir() if not p.name.startswith("model")} - {"notes.txt"}
            assert left == {"README.md", "config.json", "tokenizer.json", "sub"}, left
            assert len(list(target.glob("*.safetensors"))) == 1
            assert not list(root.glob(f".t{fresh}{moment}.*")), moment
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    assert moment > 20
print(json.dumps(counts))
"""
)


def two_sources(root: Path) -> None:
    for name, value in {"old": 1.0, "new": 2.0}.items():
        (root / name / "sub").mkdir(parents=True)
        (root / name / "tokenizer.json").write_text(name)
        (root / name / "sub" / "more.txt").write_text(name)
        tensors = {"a.weight": torch.full((40, 33), value), "b": torch.full((3,), value)}
        safetensors.torch.save_file(tensors, root / name / "model.safetensors")


def run_python(code: str, *arguments: str, **settings: Any) -> str:
    command = [sys.executable, "-c", code, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, **settings)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_the_old_or_the_new_is_there(tmp_path: Path) -> None:
    two_sources(tmp_path)
    counts = json.loads(run_python(_KILLED, str(tmp_path)))
    assert all(count > 3 for count in counts.values()), counts  # every outcome was seen


_INTERRUPTED = (
    _HELPERS
    + """
convert(root / "new", root / "m_new", "q4_0")
convert(root / "old", root / "m", "q4_0")
old, new = contents(root / "m"), contents(root / "m_new")
left = -1
def hook(event, args):
    global left
    if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "fcntl.flock"):
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
sys.addaudithook(hook)
source, counts = "new", [0, 0]
for moment in range(1, 10_000):
    left = -1
    if contents(root / "m") != old:
        convert(root / "old", root / "m", "q4_0")
    left = moment
    try:
        convert(root / "new", root / "m", "q4_0")
    except (KeyboardInterrupt, CheckpointError):
        left = -1
        found = contents(root / "m")
        assert found in (old, new), moment
        counts[found == new] += 1
    else:
        if left > 0:
            break
assert min(counts) > 3, counts
"""
)


def test_interrupted_at_any_moment_the_old_or_the_new_is_there(tmp_path: Path) -> None:
    two_sources(tmp_path)
    run_python(_INTERRUPTED, str(tmp_path))


_CTRL_C = (
    _HELPERS
    + """
from torch import nn
from halfbyte import quantize, quantize_
from halfbyte.checkpoint import export, save
from halfbyte.checkpoint.native.folder import replacing_file
from halfbyte.checkpoint.native.model_card import write_card
from halfbyte.io.onnx import export_linear

left = -1
def hook(event, args):
    global left
    if left > 0 and event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "os.truncate", "fcntl.flock"):
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
sys.addaudithook(hook)

def write_text(path):
    with replacing_file(path) as temporary:
        temporary.write_text("x")

def card(path):
    path.mkdir(exist_ok=True)
    write_card(path, "x")

convert(root / "old", root / "q", "int4_g11")
model, codes = quantize_(nn.Sequential(nn.Linear(32, 32)), "q8_0"), quantize(torch.ones(4, 32), "q8_0")
target, writers = root / "target", {
    "save": lambda: save(model, target),
    "convert": lambda: convert(root / "old", target, "q8_0"),
    "export": lambda: export(root / "q", target, "compressed-tensors"),
    "file": lambda: write_text(target),
    "card": lambda: card(target),
    "onnx": lambda: export_linear(target, codes),
}

def remove():
    if target.is_file():
        target.unlink()
    shutil.rmtree(target, ignore_errors=True)

for name, write in writers.items():
    for exists in (False, True) if name in ("save", "convert") else (False,):
        write()  # what is imported on the way
        whole = {path.name for path in target.rglob("*")}
        for moment in range(1, 10_000):
            remove()
            if exists:
                save(model, target)
            before = {path.name for path in target.rglob("*")}
            left = moment
            try:
                write()
            except (KeyboardInterrupt, CheckpointError):
                pass
            finished, left = left > 0, -1
            if finished:
                break
            names = {path.name for path in root.iterdir()} - {"old", "new", "q", "target"}
            assert not names and not list(root.rglob("*halfbyte-*")), (name, exists, moment, names, list(root.rglob("*halfbyte-*")))
            if (target / "config.json").exists() and name != "card":
                assert len(list(target.glob("*.safetensors"))) == 1, (name, exists, moment)
                load_tensors(target) if name != "export" else None
            else:
                assert target.is_file() or {path.name for path in target.rglob("*")} in (set(), before, whole), (name, moment)
        assert moment > 2
    remove()
"""
)


def test_ctrl_c_at_any_moment_leaves_no_temporary_files(tmp_path: Path) -> None:
    two_sources(tmp_path)
    run_python(_CTRL_C, str(tmp_path))


_DISK_FULL = (
    _HELPERS
    + """
import resource
convert(root / "old", root / "m", "q4_0")
from torch import nn
from halfbyte import quantize, quantize_
from halfbyte.checkpoint import export, save
from halfbyte.checkpoint.native.folder import replacing_file
from halfbyte.checkpoint.native.model_card import write_card
from halfbyte.io.onnx import export_linear

def write_text(path):
    with replacing_file(path) as temporary:
        temporary.write_text("x" * 9999)

convert(root / "old", root / "g", "int8_g11")
model, codes = quantize_(nn.Sequential(nn.Linear(64, 64)), "q8_0"), quantize(torch.ones(64, 64), "q8_0")
writers = [lambda target: convert(root / "new", target, "q8_0"), lambda target: save(model, target)]
fresh_only = [
    lambda target: export(root / "g", target, "compressed-tensors"),
    write_text,
    lambda target: export_linear(target, codes),
    lambda target: write_card(root / "old", "x" * 9999),
]
fresh_only[2](root / "warm.onnx")
(root / "warm.onnx").unlink()
before, names = contents(root / "m"), sorted(root.rglob("*"))
for target, write in ((root / name, write) for name in ("m", "fresh") for write in writers + fresh_only * (name == "fresh")):
    for limit in (0, 10, 100, 500, 1000, 1500):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            write(target)
        except CheckpointError as e:
            assert "cannot write" in str(e) and "free some space" in str(e), e
        else:
            raise AssertionError(limit)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert contents(root / "m") == before
        assert sorted(root.rglob("*")) == names
"""
)


def test_a_full_disk_leaves_the_old(tmp_path: Path) -> None:
    two_sources(tmp_path)
    run_python(_DISK_FULL, str(tmp_path))


_NO_PERMISSION = (
    _HELPERS
    + """
from torch import nn
from halfbyte.checkpoint import save
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
before = contents(root / "m")
for target in (root / "m", root / "fresh"):
    try:
        save(nn.Linear(2, 2), target)
    except CheckpointError as e:
        assert "cannot write" in str(e) and "Permission denied" in str(e) and "can be written to" in str(e), e
    else:
        raise AssertionError(target)
assert contents(root / "m") == before
"""
)


def test_no_permission_to_write(tmp_path: Path) -> None:
    root = Path("/tmp" if os.access("/tmp", os.W_OK) else tmp_path) / f"halfbyte-test-{os.getpid()}"  # where nobody may go, too
    try:
        two_sources(root)
        convert(root / "old", root / "m", "q4_0")
        for path in (root / "m", root):
            path.chmod(0o555)
        run_python(_NO_PERMISSION, str(root))
    finally:
        for path in (root, root / "m"):
            path.chmod(0o755)
        shutil.rmtree(root)


_FORKED_MEANWHILE = (
    _HELPERS
    + """
from halfbyte.checkpoint.native.folder import replacing
convert(root / "old", root / "m", "q4_0")
with replacing(root / "m"):
    child = os.fork()  # as a DataLoader's workers are, in another thread
    if child == 0:
        time.sleep(60)
        os._exit(0)
convert(root / "new", root / "m", "q4_0")
os.kill(child, signal.SIGKILL)
"""
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_while_a_checkpoint_is_written_holds_no_lock(tmp_path: Path) -> None:
    two_sources(tmp_path)
    run_python(_FORKED_MEANWHILE, str(tmp_path))


_FOREVER = (
    _HELPERS
    + """
convert(root / "old", root / "m_old", "q4_0")
convert(root / "new", root / "m_new", "q4_0")
old, new = contents(root / "m_old"), contents(root / "m_new")
for pause in (0.0, 0.003, 0.011):
    convert(root / "old", root / "m", "q4_0")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"go")
        while True:
            convert(root / "new", root / "m", "q4_0")
    os.read(read, 2)
    time.sleep(pause)
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert contents(root / "m") in (old, new)
"""
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_a_random_time(tmp_path: Path) -> None:
    """The moments between two system calls, too, which the test above cannot hit."""
    two_sources(tmp_path)
    run_python(_FOREVER, str(tmp_path))
