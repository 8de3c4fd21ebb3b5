"""Where tests are: in the folder of what they test, and those of `make quick` in a list."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import halfbyte

SRC, TESTS = Path(halfbyte.__file__).parent, Path(__file__).parent
QUICK = TESTS / "quick.txt"
# What no test of its own folder imports, as it is reached through other modules or tested in another folder: let it become less.
ELSEWHERE = Path(__file__).with_name("elsewhere.txt")


def modules() -> dict[str, Path]:
    """The package's modules and their files."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = ("halfbyte", *path.relative_to(SRC).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def exported(text: str) -> dict[str, str]:
    """The names that a package's `__init__` takes from other modules, and from which."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


def dotted(text: str) -> Iterator[str]:
    """What a test imports of halfbyte, or takes from what it has imported: `halfbyte.…`, which may end in names of no module. Names in
    strings count: jobs of the ahead-of-time compiler and programs of other processes are given as such."""
    tree = ast.parse(text)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names = {alias.asname or alias.name: alias.name for alias in node.names}
                known |= {name.partition(".")[0] if name == whole else name: whole for name, whole in names.items()}
                known |= {"halfbyte": "halfbyte"} if "halfbyte" in known else {}
                yield from names.values()
            case ast.ImportFrom(module=str(module)):
                known |= (names := {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names})
                yield from names.values()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute():
                first, _, rest = ast.unparse(node).partition(".")
                if first in known:
                    yield f"{known[first]}.{rest}"
            case ast.Constant(value=str(value)):
                yield from re.findall(r"halfbyte(?:\.\w+)+", value)
                for module, names in re.findall(r"from (halfbyte[\w.]*) import ([\w, ]+)", value):
                    yield from (f"{module}.{name.strip().partition(' ')[0]}" for name in names.split(","))


def module_of(name: str, files: dict[str, Path], names: dict[str, dict[str, str]]) -> str | None:
    """The module that `name` is, or is in; a name that a package hands on is in the module that it comes from."""
    for _ in range(9):
        if name in files or not name.startswith("halfbyte."):
            break
        package, _, last = name.rpartition(".")
        name = names.get(package, {}).get(last, package)
    return name if name in files else None


def folders_of_tests() -> dict[str, set[Path]]:
    """The folders below `tests` whose tests import each module."""
    files = modules()
    names = {module: exported(path.read_text("utf-8")) for module, path in files.items() if path.name == "__init__.py"}
    found: dict[str, set[Path]] = {module: set() for module in files}
    for path in TESTS.rglob("test_*.py"):
        for module in {module_of(name, files, names) for name in set(dotted(path.read_text("utf-8")))} - {None}:
            found[str(module)].add(path.parent.relative_to(TESTS))
    return found


def is_mirrored(folder: Path, of_tests: Path) -> bool:
    """Whether tests of a module in `folder` belong there: below it, too, and in the folder of GPUs' tests next to it."""
    return of_tests == folder or (folder.parts and folder in of_tests.parents) or of_tests in (folder.parent / "gpu", folder / "gpu")


def test_each_module_is_tested_in_its_own_folder() -> None:
    files, listed = modules(), set(ELSEWHERE.read_text("utf-8").split())
    missing = {
        module.removeprefix("halfbyte.")
        for module, folders in folders_of_tests().items()
        if files[module].name != "__init__.py" and not any(is_mirrored(files[module].parent.relative_to(SRC), folder) for folder in folders)
    }
    assert missing - listed == set(), "no test of the folder that mirrors src imports these: test them there"
    assert listed - missing == set(), "take these out of elsewhere.txt"


def test_names_are_followed_to_their_modules() -> None:
    files = dict.fromkeys(("halfbyte", "halfbyte.a", "halfbyte.a.b", "halfbyte.c"), SRC)
    names = {"halfbyte": {"load": "halfbyte.a.load"}, "halfbyte.a": exported("if lazy:\n    from halfbyte.a.b import load as load")}

    def of(text: str) -> set[str | None]:
        return {module_of(name, files, names) for name in dotted(text)} - {None, "halfbyte"}

    assert of("import halfbyte as hb\nhb.load('x')") == {"halfbyte.a.b"}
    assert of("from halfbyte import a\na.b.f()") == {"halfbyte.a", "halfbyte.a.b"}
    assert of("from halfbyte import a\na.f()") == {"halfbyte.a"}
    assert of("def f():\n    from halfbyte.c import g") == {"halfbyte.c"}
    assert of("job('halfbyte.c:launch')\nrun('from halfbyte.a.b import x as y, z')") == {"halfbyte.a.b", "halfbyte.c"}
    assert of("import torch\nc = torch.a.b") == set()


def test_which_folder_is_a_modules_own() -> None:
    assert is_mirrored(Path("nn"), Path("nn"))
    assert is_mirrored(Path("nn"), Path("nn/static"))
    assert is_mirrored(Path("ops/conv"), Path("ops/gpu"))
    assert not is_mirrored(Path("nn/static"), Path("nn"))
    assert not is_mirrored(Path("."), Path("nn")), "files of the package itself are tested by files of tests itself"


def test_what_make_quick_runs_is_there() -> None:
    lines = QUICK.read_text("utf-8").split()
    assert len(lines) == len(set(lines)) > 5
    for line in lines:
        place, _, function = line.partition("::")
        path = TESTS.parent / place
        found = [path] if path.is_file() else [*path.rglob("test_*.py")]
        assert any(re.search(rf"^def test_{function.removeprefix('test_')}", file.read_text("utf-8"), re.M) for file in found), line


def test_names_of_test_files_are_unique() -> None:
    """Without packages, pytest imports a test file by its last name: two of one name stop the collection of a whole run."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_what_test_files_import_of_each_other_is_there() -> None:
    """A file of tests that need a GPU skips itself before its imports: elsewhere nothing else tells that a name there is gone."""
    files = {path.stem: path for path in sorted(TESTS.rglob("*.py"))}
    missing = []
    for path in files.values():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in files:
                there = top_level_names(files[node.module].read_text("utf-8"))
                missing += [f"{path.name}: {node.module}.{alias.name}" for alias in node.names if alias.name not in there]
    assert missing == []


def top_level_names(text: str) -> set[str]:
    """The names that a module's own statements define or import."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                found.update(alias.asname or alias.name for alias in aliases)
    return found
