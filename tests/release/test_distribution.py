"""The wheel and the source distribution: what is in them, their metadata, and that the installed wheel works without the repository."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from language_model import TEXT, make_language_model

from halfbyte import __version__
from halfbyte.cli.main import _parser

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "halfbyte"
COMMANDS = tuple(command for action in _parser()._actions if isinstance(action, argparse._SubParsersAction) for command in action.choices)

# Hosts that anybody can reach and that belong to other projects: standards and what the pages of the project link to.
PUBLIC = ("keepachangelog.com", "semver.org", "www.apache.org", "www.python.org", "docs.python.org")

# Each command once, on tiny inputs, in a process that has the wheel and not the repository. `chat` reads its messages from stdin.
USES = {
    "doctor": ["--json"],
    "quantize": ["model", "quantized", "--format", "q4_0"],
    "inspect": ["quantized"],
    "convert": ["quantized", "model.gguf"],
    "export": ["quantized", "program", "--context", "64"],
    "eval": ["model", "--format", "q4_0", "--text", "text.txt", "--context", "32"],
    "generate": ["quantized", "--prompt", "the quick", "--max-new-tokens", "4"],
    "chat": ["quantized", "--max-new-tokens", "4"],
    "explain": ["--m", "1", "--n", "64", "--k", "64", "--device", "cpu"],
    "bench": ["--m", "1", "--n", "64", "--k", "64", "--rounds", "1", "--threads", "1"],
    "tune": ["--n", "64", "--k", "64", "--m", "1"],
}
RUN_ALL = """
import ast, io, sys
import halfbyte
from halfbyte.cli import main
print("from", halfbyte.__file__)
for line in sys.argv[1:]:
    sys.stdin = io.StringIO("the quick\\n")
    words = ast.literal_eval(line)
    try:
        code = main(words)
    except SystemExit as exit:
        code = exit.code or 0
    print("\\nexit", words[0], code, flush=True)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the two distributions, built as a release builds them: the wheel from the source distribution."""
    for module in ("build", "hatchling", "twine"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install '.[dev]' brings it")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_without_paths())
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"halfbyte-{__version__}.dist-info/METADATA").decode())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the scripts of an environment with the wheel, in which torch and others are those of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    paths = {name: Path(path) for name, path in sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)}).items()}
    # A line of a .pth file adds a folder and reads no .pth file in it: the editable install of the repository is not found through it.
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (paths["purelib"] / "others.pth").write_text("\n".join(others) + "\n", encoding="utf-8")
    python = paths["scripts"] / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--force-reinstall", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_without_paths())
    assert done.returncode == 0, done.stdout + done.stderr
    return paths["scripts"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder away from the repository, with a model and a text."""
    folder = tmp_path_factory.mktemp("work")
    make_language_model(folder / "model")
    (folder / "text.txt").write_text(TEXT[:800], encoding="utf-8")
    return folder


def _without_paths() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _run(*words: object, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = list(map(str, words))
    return subprocess.run(command, cwd=cwd, env=_without_paths(), input=stdin, capture_output=True, text=True, check=False)


# What is in them


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {path.relative_to(ROOT / "src").as_posix() for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    metadata = {
        f"halfbyte-{__version__}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    assert names == package | metadata
    assert {"halfbyte/py.typed", "halfbyte/dispatch/tables/h100.json"} <= names


def test_what_code_reads_from_the_package_is_python_or_known() -> None:
    """A file of a new kind, such as a template, has to be in the wheel, too: hatch takes all that git does not ignore."""
    kinds = {path.suffix for path in PACKAGE.rglob("*") if path.is_file()} - {".pyc"}
    assert kinds <= {".py", ".json", ".typed", ".html", ".css", ".js"}, kinds


def test_the_source_distribution_has_what_tests_need_and_no_models(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [*ROOT.glob("*.md"), *ROOT.glob("constraints*.txt"), ROOT / "LICENSE", ROOT / "CITATION.cff", ROOT / "Makefile"]
    wanted += [ROOT / "mkdocs.yml", ROOT / "pyproject.toml"]
    for folder in ("src", "tests", "docs", "benchmarks", "scripts", "examples"):
        wanted += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT).as_posix() for path in wanted} <= names
    assert not [name for name in names if name.startswith(("models/", ".ci", ".github"))]


# Metadata


def test_the_metadata_is_as_an_index_wants_it(built: Path) -> None:
    """twine renders the description and checks it, as PyPI does."""
    done = _run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *sorted(built.iterdir()), cwd=built)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_classifiers_and_versions(metadata: Message) -> None:
    from trove_classifiers import classifiers

    said = metadata.get_all("Classifier", [])
    assert not [one for one in said if one not in classifiers]
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    pythons = sorted(int(m[1]) for one in said if (m := re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", one)))
    assert metadata["Requires-Python"] == f">=3.{pythons[0]}"


def test_urls_are_public(metadata: Message) -> None:
    """No URL of the metadata or of the project's own pages names a host that only its authors can reach."""
    texts = {"metadata": metadata.as_string()} | {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")}
    texts["CITATION.cff"] = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for name, text in texts.items():
        for host in re.findall(r"https?://([^/\s)\"'>]+)", text):
            loopback = host.startswith(("127.0.0.1", "localhost"))  # where a reader's own server answers
            assert loopback or host in PUBLIC or host.endswith((".pytorch.org", "pypi.org")), f"{name}: {host}"


def test_the_citation_has_the_version() -> None:
    import yaml

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    assert (str(citation["version"]), citation["title"]) == (__version__, "halfbyte")


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\] - (unreleased|\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    assert headings[0][0] == __version__
    sections = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert max(map(len, text.splitlines())) <= 140


# The installed wheel


def test_every_command_is_used() -> None:
    assert {*USES, "serve"} == set(COMMANDS)


def test_the_command_is_installed(installed: Path, tmp_path: Path) -> None:
    done = _run(installed / "halfbyte", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"halfbyte {__version__}\n"), done.stderr


def test_every_command_works_without_the_repository(installed: Path, work: Path) -> None:
    lines = [[name, "--help"] for name in COMMANDS] + [[name, *words] for name, words in USES.items()]
    done = _run(installed / "python", "-c", RUN_ALL, *lines, cwd=work)
    assert done.returncode == 0, done.stderr
    home = re.match(r"from (.*)\n", done.stdout)
    assert home is not None
    assert Path(home[1]).is_relative_to(installed.parent), home[1]
    codes = re.findall(r"^exit (\w+) (\d+)$", done.stdout, re.MULTILINE)
    assert codes[: len(COMMANDS)] == [(name, "0") for name in COMMANDS]
    import torch

    failing = {"tune": "0" if torch.cuda.is_available() else "2"}  # there is no GPU to measure
    assert codes[len(COMMANDS) :] == [(name, failing.get(name, "0")) for name in USES], done.stdout + done.stderr


def test_the_server_answers_and_ends(installed: Path, work: Path) -> None:
    command = [installed / "halfbyte", "serve", work / "model", "--format", "q4_0", "--port", "0", "--device", "cpu", "--json"]
    with subprocess.Popen(command, cwd=work, env=_without_paths(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            text = ""
            while not text.rstrip().endswith("}"):
                line = server.stdout.readline()
                assert line, server.stderr.read()
                text += line
            address = json.loads(text)["url"]
            for path, expected in (("/health", '"ok"'), ("/", "<!doctype html>")):
                with urllib.request.urlopen(address + path, timeout=60) as answer:
                    assert expected in answer.read().decode().lower()
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_the_quick_start_in_python(installed: Path, tmp_path: Path) -> None:
    """The Python code of README.md, in its order, with a tiny model."""
    make_language_model(tmp_path / "model")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE))
    assert code.count("path/to/model") >= 3
    code = code.replace("path/to/model", "model").replace("max_new_tokens=128", "max_new_tokens=16")  # it has 128 positions
    done = _run(installed / "python", "-c", code + "\nprint(hb.__file__)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[-1]).is_relative_to(installed.parent)
    assert (tmp_path / "small" / "README.md").is_file()
