"""Text of installed documentation and Python sources -> tokenizer, token files and the held-out text.

    python prepare.py WORK

downloads the packages of `DEBIAN` and `PYPI` with apt-get and pip into WORK (480 MB; packages that are there
already are used as they are), and writes WORK/tokenizer.json, WORK/train.u16.xz, WORK/heldout.u16.xz (little-endian
uint16 token ids, xz-compressed), WORK/heldout.txt, WORK/calibration.txt (the same kind of text, from the
training files) and WORK/sources.tsv (what each package gave).

A file is held out when the SHA-256 of "package/path" is 0 modulo 64. A training file that shares a fifth of its long
lines with a held-out file is left out, so that the held-out loss does not reward copies.
"""

from __future__ import annotations

import argparse
import hashlib
import html.parser
import lzma
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 8192
END = "<|endoftext|>"
HELD_OUT_ONE_IN = 64
HELD_OUT_TEXT_BYTES = 250_000
CALIBRATION_TEXT_BYTES = 250_000
# The texts for tests come from these alone, so that one licence covers them.
TEXT_PACKAGES = ("python3.11-doc", "libpython3.11-stdlib")


@dataclass(frozen=True)
class Source:
    """One package: its pinned version, its licence, and which of its files to read."""

    name: str
    version: str
    licence: str
    globs: tuple[str, ...]


SPHINX = ("*/_sources/*.txt",)
PYTHON = ("*.py",)
HTML = ("*.html",)
BOOKS = ("book", "reference", "nomicon", "rust-by-example", "cargo", "rustc", "rustdoc", "edition-guide")
RUST = tuple(f"*/html/{book}/*.html" for book in BOOKS)

DEBIAN = [
    Source("python3.11-doc", "3.11.2-6+deb12u9", "PSF-2.0", SPHINX),
    Source("libpython3.11-stdlib", "3.11.2-6+deb12u9", "PSF-2.0", PYTHON),
    Source("libpython3.11-minimal", "3.11.2-6+deb12u9", "PSF-2.0", PYTHON),
    Source("apache2-doc", "2.4.71-1~deb12u1", "Apache-2.0", ("*/manual/en/*.html",)),
    Source("cmake-doc", "3.25.1-1", "BSD-3-Clause", SPHINX),
    Source("llvm-16-doc", "1:16.0.6-15~deb12u1", "Apache-2.0 WITH LLVM-exception", SPHINX),
    Source("nodejs-doc", "18.20.4+dfsg-1~deb12u3", "MIT", HTML),
    Source("postgresql-doc-15", "15.20-0+deb12u1", "PostgreSQL", HTML),
    Source("python-astropy-doc", "5.2.1-2+deb12u1", "BSD-3-Clause", SPHINX),
    Source("python-cherrypy3-doc", "18.8.0-2", "BSD-3-Clause", SPHINX),
    Source("python-dask-doc", "2022.12.1+dfsg-2", "BSD-3-Clause", SPHINX),
    Source("python-distributed-doc", "2022.12.1+ds.1-3", "BSD-3-Clause", SPHINX),
    Source("python-django-doc", "3:3.2.25-0+deb12u7", "BSD-3-Clause", HTML),
    Source("python-djangorestframework-doc", "3.14.0-2+deb12u1", "BSD-3-Clause", HTML),
    Source("python-nipype-doc", "1.8.5-3", "Apache-2.0", SPHINX),
    Source("python-openstackclient-doc", "6.0.0-4", "Apache-2.0", SPHINX),
    Source("python-openstacksdk-doc", "0.101.0-2", "Apache-2.0", SPHINX),
    Source("python-pandas-doc", "1.5.3+dfsg-2", "BSD-3-Clause", SPHINX),
    Source("python-pil-doc", "9.4.0-1.1+deb12u1", "HPND", SPHINX),
    Source("python-pytest-doc", "7.2.1-2", "MIT", SPHINX),
    Source("python-scrapy-doc", "2.8.0-2", "BSD-3-Clause", HTML),
    Source("python-sklearn-doc", "1.2.1+dfsg-1", "BSD-3-Clause", SPHINX),
    Source("python-sqlalchemy-doc", "1.4.46+ds1-1", "MIT", HTML),
    Source("python-sympy-doc", "1.11.1-1", "BSD-3-Clause", SPHINX),
    Source("python-tables-doc", "3.7.0-5", "BSD-3-Clause", SPHINX),
    Source("python-tornado-doc", "6.2.0-3+deb12u4", "Apache-2.0", SPHINX),
    Source("python-xarray-doc", "2023.01.0-1.1", "Apache-2.0", SPHINX),
    Source("rust-doc", "1.63.0+dfsg1-2", "MIT OR Apache-2.0", RUST),
    Source("sphinx-doc", "5.3.0-4", "BSD-2-Clause", SPHINX),
    Source("sqlite3-doc", "3.40.1-2+deb12u2", "public domain", HTML),
]

PYPI = [
    Source(name, version, licence, PYTHON)
    for name, version, licence in [
        ("aiohttp", "3.14.5", "Apache-2.0 AND MIT"),
        ("astropy", "8.0.2", "BSD-3-Clause"),
        ("babel", "2.18.0", "BSD-3-Clause"),
        ("biopython", "1.88", "Biopython License Agreement (HPND-like)"),
        ("black", "26.10.1", "MIT"),
        ("bokeh", "3.10.2", "BSD-3-Clause"),
        ("celery", "5.7.0", "BSD-3-Clause"),
        ("cryptography", "50.0.2", "Apache-2.0 OR BSD-3-Clause"),
        ("dask", "2026.8.0", "BSD-3-Clause"),
        ("distributed", "2026.8.0", "BSD-3-Clause"),
        ("django", "6.1.3", "BSD-3-Clause"),
        ("djangorestframework", "3.18.3", "BSD-3-Clause"),
        ("fastapi", "0.165.0", "MIT"),
        ("flask", "3.1.3", "BSD-3-Clause"),
        ("flax", "0.12.12", "Apache-2.0"),
        ("fonttools", "4.68.0", "MIT"),
        ("httpx", "0.28.1", "BSD-3-Clause"),
        ("ipython", "9.18.1", "BSD-3-Clause"),
        ("jax", "0.12.0.1", "Apache-2.0"),
        ("jedi", "0.20.1", "MIT"),
        ("jinja2", "3.1.6", "BSD-3-Clause"),
        ("keras", "3.15.1", "Apache-2.0"),
        ("kombu", "5.7.0", "BSD-3-Clause"),
        ("matplotlib", "3.11.2", "Matplotlib (PSF-like)"),
        ("mypy", "2.4.1", "MIT"),
        ("networkx", "3.7", "BSD-3-Clause"),
        ("nibabel", "5.4.2", "MIT"),
        ("nltk", "3.10.4", "Apache-2.0"),
        ("numpy", "2.5.5", "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"),
        ("optax", "0.2.8", "Apache-2.0"),
        ("pandas", "3.1.1", "BSD-3-Clause"),
        ("parso", "0.8.7", "MIT"),
        ("pillow", "13.0.0", "MIT-CMU"),
        ("pydantic", "2.14.3", "MIT"),
        ("pygments", "2.21.0", "BSD-2-Clause"),
        ("pytest", "9.2.0", "MIT"),
        ("requests", "2.34.2", "Apache-2.0"),
        ("rich", "15.0.0", "MIT"),
        ("scikit-image", "0.26.0", "BSD-3-Clause"),
        ("scikit-learn", "1.9.1", "BSD-3-Clause"),
        ("scipy", "1.18.1", "BSD-3-Clause"),
        ("scrapy", "2.19.0", "BSD-3-Clause"),
        ("setuptools", "84.2.1", "MIT"),
        ("sphinx", "9.1.1", "BSD-2-Clause"),
        ("sqlalchemy", "2.1.9", "MIT"),
        ("sqlglot", "30.30.0", "MIT"),
        ("starlette", "1.10.0", "BSD-3-Clause"),
        ("statsmodels", "0.15.0", "BSD-3-Clause"),
        ("sympy", "1.14.0", "BSD-3-Clause"),
        ("textual", "8.2.8", "MIT"),
        ("tornado", "6.6.1", "Apache-2.0"),
        ("transformers", "5.17.0", "Apache-2.0"),
        ("twisted", "26.10.0", "MIT"),
        ("wagtail", "8.0.1", "BSD-3-Clause"),
        ("werkzeug", "3.1.9", "BSD-3-Clause"),
        ("xarray", "2026.9.0", "Apache-2.0"),
    ]
]

# Generated pages, tables of data, and other projects' code inside a package, whose licence may differ.
SKIP = (
    "*/_modules/*", "*/genindex*", "*/py-modindex*", "*/search.html", "*/print.html", "*/all.html", "*/bookindex.html",
    "*/_vendor/*", "*/vendor/*", "*/vendored/*", "*/externals/*", "*/extern/*", "*/third_party/*", "*/_distutils/*",
    "*/locale/*", "*/locale-data/*", "*/migrations/*", "*/lib2to3/tests/*", "*/pydoc_data/*", "*/encodings/*", "*/unicode_data*",
    "*/tests/*", "*/test/*", "*/generated/*", "*/__phello__*", "*/testsuite/*", "*/legal/*", "*/license*", "*/copyright*",
)  # fmt: skip


class _Text(html.parser.HTMLParser):
    """The words of an HTML page: <pre> as it stands, other runs of white space as one space, blocks on lines of their own."""

    BLOCKS = frozenset(("p", "div", "li", "tr", "dt", "dd", "table", "ul", "ol", "dl", "section", "article", "blockquote", "br", "pre"))
    HEADINGS = frozenset(("h1", "h2", "h3", "h4", "h5", "h6", "hr"))
    UNREAD = frozenset(("script", "style", "nav", "head", "header", "footer", "svg", "button", "form", "noscript"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.unread = self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.unread += tag in self.UNREAD
        if tag in self.HEADINGS or tag in ("p", "pre"):
            self.parts.append("\n\n")
        elif tag in self.BLOCKS:
            self.parts.append("\n- " if tag == "li" else "\n")
        self.pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        self.unread -= tag in self.UNREAD and self.unread > 0
        self.pre -= tag == "pre" and self.pre > 0
        if tag in self.BLOCKS or tag in self.HEADINGS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.unread:
            self.parts.append(data if self.pre else " ".join(data.split()).join((" " * data[:1].isspace(), " " * data[-1:].isspace())))

    @classmethod
    def of(cls, page: str) -> str:
        parser = cls()
        parser.feed(page)
        lines: list[str] = []
        for line in "".join(parser.parts).split("\n"):
            line = line.rstrip().replace("¶", "")
            # A bullet whose text is a block of its own is one line again.
            if lines and lines[-1] == "-" and line:
                lines[-1] = f"- {line.strip()}"
            elif line or (lines and lines[-1]):
                lines.append(line)
        return "\n".join(lines)


def download(source: Source, kind: str, work: Path) -> Path:
    """The package file of `source` in WORK/kind, fetched with apt-get or pip unless it is there."""
    folder = work / kind
    folder.mkdir(parents=True, exist_ok=True)
    version = source.version.replace(":", "%3a")
    pattern = f"{source.name}_{version}*.deb" if kind == "deb" else f"{source.name.replace('-', '_')}-{source.version}-*.whl"
    if not list(folder.glob(pattern)):
        if kind == "deb":
            command = ["apt-get", "download", "-q", f"{source.name}={source.version}"]
        else:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--python-version", "3.12"]
            command.append(f"{source.name}=={source.version}")
        subprocess.run(command, cwd=folder, check=True)
    return sorted(folder.glob(pattern))[0]


def members(package: Path, unpacked: Path) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of each regular file of a .deb or .whl, by path."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".py"):
                    yield name, archive.read(name)
        return
    folder = unpacked / package.stem
    if not folder.exists():
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.suffix in (".txt", ".html", ".py"):
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def readable(text: str) -> bool:
    """Prose or code, not a table of numbers, a stub or minified lines."""
    letters = sum(map(str.isalpha, text[:20_000]))
    lines = text.count("\n") + 1
    return 400 <= len(text) <= 250_000 and letters > 0.45 * len(text[:20_000]) and len(text) / lines < 200


def texts(source: Source, package: Path, unpacked: Path) -> Iterator[tuple[str, str]]:
    for path, data in members(package, unpacked):
        slashed = f"/{path.lower()}"
        if not any(fnmatch(slashed, glob) for glob in source.globs) or any(fnmatch(slashed, skip) for skip in SKIP):
            continue
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        text = _Text.of(text) if path.endswith(".html") else text
        text = "\n".join(line.rstrip() for line in text.expandtabs(8).splitlines()).strip() + "\n"
        if readable(text) and text.isascii() | (sum(map(str.isascii, text)) > 0.98 * len(text)):
            yield f"{source.name}/{path}", text


def without_frames(pages: dict[str, str]) -> dict[str, str]:
    """HTML pages less the lines near their tops and ends that a fifth of all pages have there: menus and footers."""
    parts = {name: (page.split("\n")[:150], page.split("\n")[150:-20], page.split("\n")[150:][-20:]) for name, page in pages.items()}
    common = Counter(line for head, _, tail in parts.values() for line in {*head, *tail})
    frame = {line for line, count in common.items() if line and count >= max(10, len(pages) / 5)}
    result = {}
    for name, (head, middle, tail) in parts.items():
        lines = [line for line in head if line not in frame] + middle + [line for line in tail if line not in frame]
        result[name] = re.sub("\n{3,}", "\n\n", "\n".join(line for line in lines if line.strip() != "-")).strip() + "\n"
    return result


def digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def long_lines(text: str) -> set[int]:
    return {hash(line.strip()) for line in text.splitlines() if len(line.strip()) >= 40}


def gather(work: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Training and held-out texts by "package/path", each in an order that the hash of the name gives."""
    everything: dict[str, str] = {}
    seen: set[int] = set()
    for kind, sources in (("deb", DEBIAN), ("whl", PYPI)):
        for source in sources:
            found = dict(texts(source, download(source, kind, work), work / "unpacked"))
            for name, text in (found if source.globs in (SPHINX, PYTHON) else without_frames(found)).items():
                if digest(text) not in seen:
                    seen.add(digest(text))
                    everything[name] = text
    ordered = sorted(everything, key=digest)
    held_out = {name: everything[name] for name in ordered if digest(name) % HELD_OUT_ONE_IN == 0}
    known: set[int] = set().union(*map(long_lines, held_out.values()))
    train: dict[str, str] = {}
    for name in ordered:
        if name not in held_out:
            lines = long_lines(everything[name])
            if len(lines & known) <= 0.2 * len(lines):
                train[name] = everything[name]
    return train, held_out


def train_tokenizer(train: dict[str, str]) -> Tokenizer:
    """Byte-level BPE (as GPT-2) over a third of the training files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((text for name, text in train.items() if digest(name) % 3 == 0), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, parts: dict[str, str]) -> tuple[np.ndarray, dict[str, int]]:
    """All texts as one uint16 stream, each opened by the end-of-text token, and the number of tokens by name."""
    arrays, counts = [], {}
    names = list(parts)
    for start in range(0, len(names), 512):
        batch = names[start : start + 512]
        for name, encoding in zip(batch, tokenizer.encode_batch_fast([parts[name] for name in batch]), strict=True):
            arrays.append(np.array([tokenizer.token_to_id(END), *encoding.ids], dtype="<u2"))
            counts[name] = len(encoding.ids)
    return np.concatenate(arrays), counts


def excerpt(parts: dict[str, str], limit: int) -> str:
    """The texts of TEXT_PACKAGES, in order, that fit into `limit` bytes."""
    text = ""
    for name, body in parts.items():
        if name.startswith(TEXT_PACKAGES) and len((text + body).encode()) <= limit:
            text += body + "\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--xz", type=int, default=6, help="compression level of the token files (default 6)")
    arguments = parser.parse_args()
    work = arguments.work

    train, held_out = gather(work)
    print(f"train {len(train)} files {sum(map(len, train.values())) / 1e6:.1f} MB, held out {len(held_out)} files", flush=True)
    tokenizer = train_tokenizer(train)
    tokenizer.save(str(work / "tokenizer.json"))
    counts: dict[str, int] = {}
    for part, parts in (("train", train), ("heldout", held_out)):
        tokens, part_counts = encode(tokenizer, parts)
        counts |= part_counts
        (work / f"{part}.u16.xz").write_bytes(lzma.compress(tokens.tobytes(), preset=arguments.xz))
        print(f"{part}: {len(tokens) / 1e6:.2f} M tokens", flush=True)

    (work / "heldout.txt").write_text(excerpt(held_out, HELD_OUT_TEXT_BYTES))
    (work / "calibration.txt").write_text(excerpt(train, CALIBRATION_TEXT_BYTES))
    with (work / "sources.tsv").open("w") as table:
        table.write("package\tversion\tlicence\tfrom\tfiles\tkilotokens\n")
        for kind, sources in (("Debian 12", DEBIAN), ("PyPI", PYPI)):
            for source in sources:
                actual = [count for name, count in counts.items() if name.startswith(f"{source.name}/")]
                table.write(f"{source.name}\t{source.version}\t{source.licence}\t{kind}\t{len(actual)}\t{sum(actual) // 1000}\n")


if __name__ == "__main__":
    main()
