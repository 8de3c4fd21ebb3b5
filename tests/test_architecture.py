"""The rules of the architecture, checked on the source: which package may import which, and how large files, folders and signatures may be.

`check` takes a module's name and text, so that each rule is shown to fail on a text that breaks it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import halfbyte
from halfbyte.checkpoint.gguf import tokenizer as gguf_tokenizer
from halfbyte.decoder.families import FAMILIES, OTHERS
from halfbyte.decoder.family import Family
from halfbyte.language.tokenizer_folder import GENERIC_TYPES

SRC = Path(halfbyte.__file__).parent

# Imports go from a higher rank to a lower one. The files of rank 0 stand in an order of their own.
RANKS = {
    "errors": 0.0,
    "env": 0.1,
    "machine": 0.2,
    "timing": 0.3,
    "memory": 0.4,
    "plot": 0.5,
    "bounded": 0.6,
    "locks": 0.65,
    "versions": 0.7,
    "formats": 1,
    "quantizers": 2,
    "layouts": 2,
    "kernels": 3,
    "io": 3,
    "dispatch": 4,
    "ops": 5,
    "decoder": 6,
    "nn": 6,
    "bench": 7,
    "checkpoint": 7,
    "integrations": 8,
    "evaluate": 8,
    "language": 8,
    "deploy": 9,
    "serve": 9,
    "cli": 10,
}
# Packages that `import halfbyte` must not need, and the one part that may import each at module level.
HEAVY = {
    "llvmlite": "halfbyte.kernels.cpu",
    "triton": "halfbyte.kernels.gpu",
    "transformers": "halfbyte.integrations",
    "peft": "halfbyte.integrations",
    "vllm": "halfbyte.integrations.vllm",
    "rich": "halfbyte.cli",
    "starlette": "halfbyte.serve",
    "uvicorn": "halfbyte.serve",
    "pydantic": "halfbyte.serve",
    "prometheus_client": "halfbyte.serve",
    "llguidance": None,
    "gguf": None,
    "sentence_transformers": None,
    "onnx": None,
    "onnxscript": None,
    "onnxruntime": None,
    "openvino": None,
}
# torch's functions that make tensors of the default dtype, or all of the default device, which are not halfbyte's to choose.
OF_DEFAULT_DTYPE = {"empty", "zeros", "ones", "rand", "randn", "linspace", "eye", "empty_strided"}
OF_DEFAULT_DEVICE = OF_DEFAULT_DTYPE | {"full", "tensor", "as_tensor", "scalar_tensor", "arange", "randint", "randperm"}
MAY_USE_DEFAULTS = ("bench", "cli")
MAX_LINES = 600
MAX_FILES = 15  # Python files of a folder
# Packages that know no family of models by its name, which is in the table, `decoder/families`; tokenizers may be called the same.
WITHOUT_FAMILIES = ("checkpoint", "language", "evaluate", "cli")
TOKENIZERS = {
    "halfbyte.checkpoint.gguf.tokenizer": {*gguf_tokenizer._KINDS, *gguf_tokenizer.CUTS},
    "halfbyte.checkpoint.gguf.vocabulary": {*gguf_tokenizer._KINDS},
    "halfbyte.language.tokenizer_folder": GENERIC_TYPES,
}
OTHER_FOLDERS = ("tests", "benchmarks", "examples")
MAX_PARAMETERS = 12
MAX_STORES = 15


def check(module: str, text: str, *, is_package: bool = False) -> list[str]:
    """What is wrong with a module called `module`, one sentence each."""
    tree = ast.parse(text)
    found = [*_wrong_imports(module, tree), *_heavy_imports(module, tree), *_too_many_parameters(tree), *_left_to_defaults(module, tree)]
    found += [*_kept_bounds(tree), *_families(module, tree), *_open_matches(tree)]
    if is_package:
        found += _logic(module, tree)
    if (lines := len(text.splitlines())) > MAX_LINES:
        found.append(f"{lines} lines, over {MAX_LINES}")
    return [f"{module}: {sentence}" for sentence in found]


@functools.lru_cache(maxsize=2)
def _nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a file, which each rule goes through."""
    return list(ast.walk(tree))


def _imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in the tree, inside functions and under TYPE_CHECKING too."""
    for node in _nodes(tree) if isinstance(tree, ast.Module) else ast.walk(tree):
        match node:
            case ast.Import():
                # A plain `import halfbyte` is judged by what is taken from it.
                yield from (alias.name for alias in node.names if (alias.name, alias.asname) != ("halfbyte", None))
            case ast.Attribute(value=ast.Name(id="halfbyte"), attr=name):
                yield f"halfbyte.{name}"
            case ast.ImportFrom(level=0, module="halfbyte"):
                yield from (f"halfbyte.{alias.name}" for alias in node.names)
            case ast.ImportFrom():
                yield "." * node.level + (node.module or "")
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if ast.unparse(node.func).endswith("import_module"):
                yield name


def _wrong_imports(module: str, tree: ast.AST) -> Iterator[str]:
    if module in ("halfbyte", "halfbyte.__main__"):  # the public API, and the command
        return
    package = module.split(".")[1]
    if package not in RANKS:
        yield f"the package {package} has no rank"
        return
    for name in _imported(tree):
        top, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if top == "":
            yield f"relative import of {name}"
        elif top != "halfbyte" or other == package or other.startswith("__"):
            continue
        elif other not in RANKS:
            if RANKS[package] == max(RANKS.values()):  # above all packages, the public API is as good as any
                continue
            yield f"imports {name}: name the module that it lives in"
        elif RANKS[other] == RANKS[package]:
            yield f"imports {name}, a package of the same rank"
        elif RANKS[other] > RANKS[package]:
            yield f"imports {name}, which is of a higher rank"


def _heavy_imports(module: str, tree: ast.Module) -> Iterator[str]:
    for statement in _run_at_import(tree.body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for name in _imported(statement):
                package = name.split(".")[0]
                home = HEAVY.get(package)
                if package in HEAVY and (home is None or not f"{module}.".startswith(f"{home}.")):
                    yield f"imports {package} at module level"


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported, those inside if, try, with and class included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        blocks = ["body", "orelse", "finalbody"]
        if isinstance(statement, ast.If) and ast.unparse(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            blocks.remove("body")
        for block in blocks:
            yield from _run_at_import(getattr(statement, block, []))
        for handler in getattr(statement, "handlers", []):
            yield from _run_at_import(handler.body)


def _too_many_parameters(tree: ast.AST) -> Iterator[str]:
    for node in _nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not _compiled_by_triton(node):
            a = node.args
            names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if count > MAX_PARAMETERS:
                yield f"{getattr(node, 'name', 'lambda')} has {count} parameters, over {MAX_PARAMETERS}: group them"


def _left_to_defaults(module: str, tree: ast.AST) -> Iterator[str]:
    """Kernels are told addresses: memory of another size or device than they expect is read or written beside its ends."""
    if module.split(".")[1:2] in ([package] for package in MAY_USE_DEFAULTS):
        return
    for node in _nodes(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in OF_DEFAULT_DEVICE:
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if "device" not in given:
                    yield f"line {node.lineno}: torch.{name} leaves the device to torch's default"
                if name in OF_DEFAULT_DTYPE and "dtype" not in given and given.get("device") != "'meta'":
                    yield f"line {node.lineno}: torch.{name} leaves the dtype to torch's default"


def _compiled_by_triton(node: ast.AST) -> bool:
    """A kernel takes its addresses and sizes one by one."""
    return any(ast.unparse(mark).startswith(("triton.jit", "gluon.jit")) for mark in getattr(node, "decorator_list", []))


def _kept_bounds(tree: ast.AST) -> Iterator[str]:
    """Variables that bound a `for` inside of another one, which then changes them: unless they have another use, Triton 3.6 takes them for
    dead and keeps what they were at first (triton-lang/triton#9036). In `while` it does not."""
    for function in _nodes(tree):
        if not _compiled_by_triton(function):
            continue
        for outer in (node for node in ast.walk(function) if isinstance(node, ast.For)):
            changed: dict[str, list[int]] = {}
            for node in ast.walk(outer):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    changed.setdefault(node.id, []).append(node.lineno)
            for inner in (node for statement in outer.body for node in ast.walk(statement) if isinstance(node, ast.For)):
                for name in {node.id for node in ast.walk(inner.iter) if isinstance(node, ast.Name)} & set(changed):
                    if min(changed[name]) > inner.lineno:
                        yield f"line {inner.lineno}: {name} bounds a loop and changes in the loop around it: make that `while`"


def _names(package: str, family: Family) -> Iterator[str]:
    yield from (package, family.layer_class, family.model_class or package)
    yield from (gguf.architecture for gguf in (family.gguf, *family.other_gguf) if gguf is not None)


FAMILY_NAMES = {name for package, family in (FAMILIES | OTHERS).items() for name in _names(package, family)}


def _families(module: str, tree: ast.AST) -> Iterator[str]:
    if module.split(".")[1:2] not in ([package] for package in WITHOUT_FAMILIES):
        return
    names = FAMILY_NAMES - TOKENIZERS.get(module, set())
    for node in _nodes(tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if " " not in text and (name := text.partition(".")[0]) in names:
            yield f"line {node.lineno}: {name} is a family of models: what is special about it belongs into decoder/families"


def _open_matches(tree: ast.AST) -> Iterator[str]:
    """A `match` over names, of activations, dtypes, formats, …, raises for those that it does not name."""
    for node in (node for node in _nodes(tree) if isinstance(node, ast.Match)):
        alternatives = [getattr(case.pattern, "patterns", [case.pattern]) for case in node.cases]
        names = [part for parts in alternatives for part in parts if isinstance(part, ast.MatchValue)]
        if any(isinstance(part.value, ast.Constant) and isinstance(part.value.value, str) for part in names):
            match node.cases[-1]:
                case ast.match_case(pattern=ast.MatchAs(pattern=None), guard=None, body=[*_, ast.Raise()]):
                    continue
            yield f"line {node.lineno}: a match over names has no last case that raises: end it with `raise unreachable(…)`"


# Classes of bounded.py and others whose instances store results, and methods by which a container is changed.
_CACHES = {"Bounded", "ByTensor", "PlanCache", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakTensorKeyDictionary"}
_CACHES |= {"defaultdict", "deque", "OrderedDict", "Counter"}
_CHANGES = {"add", "append", "clear", "extend", "insert", "pop", "popitem", "put", "remove", "setdefault", "update"}


def stores(text: str) -> list[str]:
    """The names of a module that functions change: containers and caches at module level, instances of classes that change themselves, and
    variables that are rebound by `global`. An empty container at module level is always one: some other module fills it.

    Memoized functions are none (`functools.cache`, `bounded.by_tensor`, `by_object`), nor are locks, counters and context variables.
    """
    tree = ast.parse(text)
    values: dict[str, ast.expr] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=parts)):
                values |= {name.id: part for name, part in zip(names, parts, strict=False) if isinstance(name, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                values[name] = value
    found = {name for node in _nodes(tree) if isinstance(node, ast.Global) for name in node.names}
    caches = _CACHES | {node.name for node in tree.body if isinstance(node, ast.ClassDef) and _has_state(node)}
    found |= {name for name, value in values.items() if isinstance(value, ast.Call) and _class_of(value) in caches}
    found |= {name for name, value in values.items() if isinstance(value, ast.Dict | ast.List) and not _items(value)}
    contexts = {name for name, value in values.items() if isinstance(value, ast.Call) and _class_of(value) == "ContextVar"}
    functions = [node for node in _nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    for node in {node for function in functions for node in ast.walk(function)}:  # those of inner functions once
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                found.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _CHANGES:
                found.add(name)
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name)), ctx=ast.Store() | ast.Del()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id=name), ctx=ast.Store()) if isinstance(values.get(name), ast.Call):
                found.add(name)
    return sorted(found & values.keys() - contexts)


def _items(container: ast.Dict | ast.List) -> list[ast.expr]:
    return container.values if isinstance(container, ast.Dict) else container.elts


_CONTAINERS = ("dict", "list", "set", "threading.local")


def _has_state(cls: ast.ClassDef) -> bool:
    """Whether instances are containers or differ between threads, or methods change their attributes."""
    if any(ast.unparse(base).partition("[")[0] in _CONTAINERS for base in cls.bases):
        return True
    methods = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name not in ("__init__", "__post_init__")]
    for node in (node for method in methods for node in ast.walk(method)):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                return True
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="self")), ctx=ast.Store() | ast.Del()):
                return True
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="self")), attr=method)) if method in _CHANGES:
                return True
    return False


def _class_of(call: ast.Call) -> str:
    built = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    return ast.unparse(built).rpartition(".")[2]


_LAZY = ("halfbyte", "halfbyte.checkpoint")


def _logic(module: str, tree: ast.Module) -> Iterator[str]:
    """A package's __init__ holds a docstring, imports and tables. Those of `_LAZY` look their names up lazily besides."""
    root, lazy = module == "halfbyte", module in _LAZY
    imports = (ast.Import, ast.ImportFrom)
    for statement in tree.body:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body, orelse=[]) if all(isinstance(s, imports) for s in body):
                continue
            case ast.Assign() | ast.AnnAssign() if root or statement.value is None or _is_table(statement.value):
                continue
            case ast.FunctionDef(name="__getattr__" | "__dir__") if lazy:
                continue
        yield f"line {statement.lineno} is logic, which a package's __init__ has none of"


def _is_table(value: ast.expr) -> bool:
    computing = ast.Call | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Await | ast.NamedExpr
    return not any(isinstance(node, computing) for node in ast.walk(value))


def _sources() -> list[tuple[str, Path]]:
    """(module name, file) of the whole package."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        parts = ("halfbyte", *path.relative_to(SRC).with_suffix("").parts)
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


@pytest.mark.parametrize(("module", "path"), _sources(), ids=lambda value: value if isinstance(value, str) else "")
def test_rules(module: str, path: Path) -> None:
    assert not check(module, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py")


def test_the_stores_of_modules_become_no_more() -> None:
    """A result that a function keeps belongs to an object, or to a memoized function. Whoever takes one away lowers MAX_STORES."""
    found = [f"{module}.{name}" for module, path in _sources() for name in stores(path.read_text("utf-8"))]
    assert len(found) <= MAX_STORES, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("_seen = {}\ndef f(x): _seen[x] = 1", ["_seen"]),
        ("_seen: set[int] = set()\ndef f(x): _seen.add(x)", ["_seen"]),
        ("_seen: dict[int, int] = {}\nf = lambda x: _seen.pop(x)", ["_seen"]),
        ("class P(threading.local): ...\nPLANS = P()", ["PLANS"]),
        ("_linked = _Linked()\ndef f(x): _linked.loaded[x] = 1", ["_linked"]),
        ("_count = 0\ndef f():\n  global _count\n  _count += 1", ["_count"]),
        ("_by_device = defaultdict(list)\ndef f(x): return _by_device[x]", ["_by_device"]),
        ("hooks: list[int] = []", ["hooks"]),
        ("class S:\n  def put(self, x): self.x = x\n_s = S()\ndef f(x): _s.put(x)", ["_s"]),
        ("class S:\n  def put(self, x): self.all[x] = 1\n_s = S()", ["_s"]),
        ("class S:\n  def put(self, x): self.all.append(x)\n_s = S()", ["_s"]),
        ("class S(dict[int, int]): ...\n_s = S()", ["_s"]),
        ("class S:\n  def __init__(self, x): self.x = x\n_s = S(1)", []),
        ("_a, _b = ByTensor[int](), bounded.Bounded[int, int](9)", ["_a", "_b"]),
        ("TABLE = {'a': 1}\ndef f(x):\n  y = {}\n  y[x] = TABLE[x]", []),
        ("_how = ContextVar('how')\n_lock = Lock()\n@cache\ndef f(x): return g(x)", []),
    ],
)
def test_stores_are_found(text: str, names: list[str]) -> None:
    assert stores(text) == names


def test_no_files_import_each_other_in_a_circle() -> None:
    """Not inside functions or under TYPE_CHECKING either. A package's `__init__` stands for the files that it hands names on from."""
    texts = {module: path.read_text("utf-8") for module, path in _sources() if path.name != "__init__.py"}
    imports: dict[str, set[str]] = {}
    for module, text in texts.items():
        nodes = [node for node in _nodes(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        named = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names} | {str(node.module) for node in nodes}
        imports[module] = named & texts.keys() - {module}
    while lowest := [module for module, needed in imports.items() if not needed & imports.keys()]:
        for module in lowest:
            del imports[module]
    assert not imports


MAPPED = [
    folder.relative_to(SRC).as_posix()
    for package in ("checkpoint", "integrations", "io", "kernels/cpu", "kernels/gpu", "nn", "ops")
    for folder in sorted({path.parent for path in (SRC / package).rglob("*.py")})
]


@pytest.mark.parametrize("folder", MAPPED)
def test_the_map_of_a_package_names_its_files(folder: str) -> None:
    text = ast.get_docstring(ast.parse((SRC / folder / "__init__.py").read_text("utf-8"))) or ""
    files = {path.name for path in (SRC / folder).glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"(?<!…)\b\w+\.py\b", text)) == files


def test_no_file_beside_the_package_is_longer_than_those_in_it() -> None:
    root = Path(__file__).parents[1]
    lines = {str(path): len(path.read_text("utf-8").splitlines()) for package in OTHER_FOLDERS for path in (root / package).rglob("*.py")}
    assert lines
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


def crowded(paths: Iterable[Path]) -> list[str]:
    """The folders with too many Python files, and how many."""
    counts = Counter(path.parent.as_posix() for path in paths if path.suffix == ".py")
    return [
        f"{folder}: {count} files, over {MAX_FILES}: give those of one kind a folder"
        for folder, count in counts.items()
        if count > MAX_FILES
    ]


def test_no_folder_has_too_many_files() -> None:
    root = Path(__file__).parents[1]
    paths = [path.relative_to(root) for folder in (SRC, Path(__file__).parent) for path in folder.rglob("*.py")]
    assert len(paths) > MAX_FILES
    assert crowded(paths) == []


def test_a_folder_with_too_many_files_is_found() -> None:
    most = [Path("src/a/__init__.py"), *(Path(f"src/a/{i}.py") for i in range(14)), Path("src/a/b/1.py"), Path("src/a/table.json")]
    assert crowded(most) == []
    assert crowded([*most, Path("src/a/one_more.py")]) == ["src/a: 16 files, over 15: give those of one kind a folder"]


def test_the_whole_package_is_read() -> None:
    modules = {module for module, _ in _sources()}
    assert {"halfbyte", "halfbyte.errors", "halfbyte.formats", "halfbyte.formats.spec", "halfbyte.kernels.cpu"} <= modules


A_FAMILY = "line 1: {} is a family of models: what is special about it belongs into decoder/families"


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("halfbyte.formats.spec", "from halfbyte.ops import linear", "imports halfbyte.ops, which is of a higher rank"),
        ("halfbyte.formats.spec", "import halfbyte.cli.main as m", "imports halfbyte.cli.main, which is of a higher rank"),
        ("halfbyte.formats.spec", "from halfbyte import ops", "imports halfbyte.ops, which is of a higher rank"),
        ("halfbyte.formats.spec", "def f():\n    from halfbyte.nn import x", "imports halfbyte.nn, which is of a higher rank"),
        ("halfbyte.formats.spec", "if TYPE_CHECKING:\n    import halfbyte.nn", "imports halfbyte.nn, which is of a higher rank"),
        ("halfbyte.formats.spec", "importlib.import_module('halfbyte.nn')", "imports halfbyte.nn, which is of a higher rank"),
        ("halfbyte.layouts.base", "from halfbyte.quantizers import absmax", "imports halfbyte.quantizers, a package of the same rank"),
        ("halfbyte.io.gguf", "from halfbyte.kernels.problem import P", "imports halfbyte.kernels.problem, a package of the same rank"),
        ("halfbyte.env", "from halfbyte.machine import machine", "imports halfbyte.machine, which is of a higher rank"),
        ("halfbyte.errors", "from halfbyte import env", "imports halfbyte.env, which is of a higher rank"),
        ("halfbyte.nn.modules.quantized", "from halfbyte import Format", "imports halfbyte.Format: name the module that it lives in"),
        ("halfbyte.nn.modules.quantized", "import halfbyte\nhalfbyte.load()", "imports halfbyte.load: name the module that it lives in"),
        ("halfbyte.nn.modules.quantized", "import halfbyte\nhalfbyte.cli.main()", "imports halfbyte.cli, which is of a higher rank"),
        ("halfbyte.nn.modules.quantized", "import halfbyte as hb", "imports halfbyte: name the module that it lives in"),
        ("halfbyte.nn.modules.quantized", "from . import convert", "relative import of ."),
        ("halfbyte.nn.modules.quantized", "from ..ops import linear", "relative import of ..ops"),
        ("halfbyte.attic.old", "", "the package attic has no rank"),
        ("halfbyte.ops", "import llvmlite.binding", "imports llvmlite at module level"),
        ("halfbyte.kernels.cpux", "import llvmlite", "imports llvmlite at module level"),
        ("halfbyte.nn.convert", "try:\n    import transformers\nfinally:\n    pass", "imports transformers at module level"),
        ("halfbyte.nn.convert", "try:\n    pass\nexcept OSError:\n    import rich", "imports rich at module level"),
        ("halfbyte.nn.convert", "class A:\n    from rich import table", "imports rich at module level"),
        ("halfbyte.io.gguf", "from gguf import quants", "imports gguf at module level"),
        ("halfbyte.cli.main", "import transformers", "imports transformers at module level"),
        ("halfbyte.checkpoint.gguf.config", "if name == 'gemma3': pass", A_FAMILY.format("gemma3")),
        ("halfbyte.checkpoint.gguf.config", "A = {'hunyuan-dense': 1}", A_FAMILY.format("hunyuan-dense")),
        ("halfbyte.checkpoint.gguf.tokenizer", "A = 'gpt2', 'qwen3'", A_FAMILY.format("qwen3")),
        ("halfbyte.language.model", "A = ['LlamaForCausalLM']", A_FAMILY.format("LlamaForCausalLM")),
        ("halfbyte.cli.chat", "def f(a='deepseek2.rope'): pass", A_FAMILY.format("deepseek2")),
        (
            "halfbyte.kernels.gpu.a",
            "@gluon.jit\ndef f(n):\n  for i in range(n):\n    for j in range(n, 9): g(j)\n    n -= n",
            "line 4: n bounds a loop and changes in the loop around it: make that `while`",
        ),
        (
            "halfbyte.ops",
            "match x:\n  case 'silu': f()\n  case _: g()",
            "line 1: a match over names has no last case that raises: end it with `raise unreachable(…)`",
        ),
        ("halfbyte.ops", "x = 1\n" * 601, "601 lines, over 600"),
        ("halfbyte.ops", "def f(a, b, c, d, e, f, /, g, h, i, *j, k, l, **m): ...", "f has 13 parameters, over 12: group them"),
        ("halfbyte.ops", "f = lambda a, b, c, d, e, f, g, h, i, j, k, l, m: 0", "lambda has 13 parameters, over 12: group them"),
        ("halfbyte.ops", "torch.zeros(3, device='cpu')", "line 1: torch.zeros leaves the dtype to torch's default"),
        ("halfbyte.ops", "torch.arange(3)", "line 1: torch.arange leaves the device to torch's default"),
    ],
)
def test_a_broken_rule_is_found(module: str, text: str, complaint: str) -> None:
    assert check(module, text) == [f"{module}: {complaint}"]


@pytest.mark.parametrize(
    "line",
    [
        "def f(): ...",
        "class A: ...",
        "x = f()",
        "x = [y for y in z]",
        "TABLE = {'a': lambda x: x}",
        "for x in y: ...",
        "print('hello')",
        "if TYPE_CHECKING:\n    x = 1",
        "def __getattr__(name): ...",
    ],
)
def test_logic_in_a_package_is_found(line: str) -> None:
    module = "halfbyte.formats"
    assert check(module, f'"""Words."""\n{line}', is_package=True) == [f"{module}: line 2 is logic, which a package's __init__ has none of"]
    assert not check(module, f'"""Words."""\n{line}')


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("halfbyte.ops", "import torch\nfrom halfbyte import env, machine\nfrom halfbyte.formats.spec import Format"),
        ("halfbyte.ops", "if TYPE_CHECKING:\n    import rich\ndef f():\n    import llvmlite, transformers, gguf"),
        ("halfbyte.kernels.cpu.codegen.jit", "import llvmlite.binding\nfrom halfbyte.kernels.problem import Problem"),
        ("halfbyte.cli", "from rich.table import Table\nfrom halfbyte.cli.main import main as main\nT: dict[str, int] = {'a': main}"),
        ("halfbyte.checkpoint", "from halfbyte import __version__\nimport halfbyte\nprint(halfbyte.__file__)"),
        ("halfbyte.cli.explain", "import halfbyte\nhalfbyte.explain()"),
        ("halfbyte", "from halfbyte.cli import main\nX = {a: b for a, b in T.items()}\ndef __getattr__(name): ...\ndef __dir__(): ..."),
        ("halfbyte.ops", "x = 1\n" * 600),
        ("halfbyte.ops", "match x:\n  case 'silu' | 'relu2': f()\n  case _: raise unreachable(x, 'gate')\nmatch y:\n  case A(b='c'): g()"),
        ("halfbyte.ops", "torch.full((), 1.5, device=d)\ntorch.empty(3, device='meta')\nx.new_empty(3)"),
        ("halfbyte.cli.bench", "torch.empty(3)"),
        ("halfbyte.kernels.gpu.a", "@triton.jit\ndef f(a, b, c, d, e, f, g, h, i, j, k, l, m): ..."),
        ("halfbyte.kernels.gpu.a", "@gluon.jit\ndef f(n):\n  for i in range(n):\n    m = g(i)\n    for j in range(m): m = h(j)"),
        ("halfbyte.ops", "class A:\n    def f(self, a, b, c, d, e, f, g, h, i, j, k, l): ..."),
    ],
)
def test_sound_text_passes(module: str, text: str) -> None:
    assert not check(module, text, is_package=module in ("halfbyte", "halfbyte.cli"))
