"""The field's words: identifiers, comments, docstrings and messages do not use words that CONTRIBUTING.md's glossary replaces.

`identifiers` and `phrases` take a text, so that each rule is shown to fail on a text that breaks it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "benchmarks", "examples", "scripts")
# Words that may not be a part of an identifier, and what to write instead.
WORDS = {
    "turned": "rotated, transposed, flipped, negated",
    "turns": "rope_cache, tile_count",
    "made": "the name of what was built or computed",
    "alike": "same_kind, same_shapes",
    "beside": "the name of the tensor, file or cache",
    "held": "stored, cached",
    "untaken": "next_tile",
    "marks": "ready_counts",
    "learn": "receive",
    "boundless": "non_finite",
    "apart": "separate, offset, stride",
    "behind": "end, after, next",
    "chain": "sequence, replay",
    "chains": "sequences",
    "own": "custom, direct, native, per_layer_input",
    "mine": "actual, or the name of the value",
    "theirs": "expected, reference",
    "lend": "provide",
    "lends": "provides",
    "lender": "kv_source",
    "borrow": "reuse",
    "borrows": "reuses",
    "trouble": "reason, problem, why_not_...",
    "centred": "layer_norm",
    "tight": "packed_bits",
    "watcher": "observer",
    "lifts": "rounding_terms",
}
# Words that may not be a whole identifier; in compounds they are the field's: return, away_from_zero.
NAMES = {
    "turn": "rope, apply_rope, round_index, tile_index",
    "tell": "announce, publish, warn",
    "nothing": "placeholder, empty, pad_codes",
    "away": "the direction of rounding",
    "lift": "rounding_term",
    "plus_one": "unit_offset",
    "made_from": "calibration_record",
    "Around": "CausalLMSpec",
    "restricted": "has_limited_codes",
}
# A term of the field that contains one of the words: held-out data.
TERMS = re.compile(r"held_?out|^connection_made$", re.IGNORECASE)  # the latter is what asyncio calls
# What may not stand in comments, docstrings and messages, and what to write instead.
PHRASES = {
    r"\bnot there\b": "out of bounds, masked, missing",
    r"\bby its like\b": "of the same shape and dtype",
    r"\band its like\b": "name one, `and others`",
    r"\btakes? one call\b|\btake .{1,20} in one call\b": "one native call computes",
    r"\bmade (again|anew)\b": "replayed, rebuilt, repeated",
    r"\bPython's share\b": "host overhead",
    r"\bgo(es)? the way of\b|\btakes? the long way\b": "fall through to super(), fallback",
    r"\buntaken\b": "next",
    r"\bboundless\b": "not finite",
    r"\bown business\b": "say what it does",
    r"\bfor ever\b(?! [a-z]+ (in|of)\b)(?! [jk]\b)": "never invalidated, permanently",
    r"\bwhoever\b|\bnobody\b": "the caller, no other thread, no reader",
    r"\bsees? to it\b": "must",
    r"\bsums meet\b": "sums are reduced",
    r"\bturned\b(?! (on|off|out)\b)": "rotated, transposed, flipped",
    r"\balike\b": "equal, the same",
    r"\bbeside\b": "next to, in addition to, compared with",
}
# A comment or docstring that begins so has lost its noun.
BEGINNINGS = re.compile(r"(Of|As|By|That) ")


# Strings, comments and names of tests, without which few files have one of the words: parsing the others would take most of the time.
_TEXT = re.compile(r'''"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*|def test_\w+''')
_NAMED = re.compile(
    rf"(?<![a-zA-Z])(?:{'|'.join([*WORDS, *NAMES, *map(str.upper, [*WORDS, *NAMES])])})(?![a-z])"
    rf"|(?:{'|'.join(word.title() for word in [*WORDS, *NAMES])})(?![a-z])"
)
_BEGUN = re.compile(rf'(?:"""|# ){BEGINNINGS.pattern}')
_PHRASED = re.compile("|".join(PHRASES))


def identifiers(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, identifier, remedy) of each definition whose name is one that the glossary replaces. Test functions are sentences."""
    if _NAMED.search(_TEXT.sub("", text)) is None:
        return
    for line, name in _defined(ast.parse(text)):
        if TERMS.search(name) or name.startswith("test_"):
            continue
        words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
        for word in words:
            if word in WORDS:
                yield line, name, WORDS[word]
        if name.strip("_") in NAMES:
            yield line, name, NAMES[name.strip("_")]


def _defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names of functions, classes, parameters, variables, attributes that are assigned, and aliases of imports."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((node.lineno, alias.asname) for alias in aliases if alias.asname is not None)


def phrases(text: str, *, messages: bool = True) -> Iterator[tuple[int, str, str]]:
    """(line, phrase, remedy) of each phrase that the glossary replaces, in comments, docstrings and, if asked, messages."""
    if _PHRASED.search(text) is None and _BEGUN.search(text) is None:
        return
    for line, prose, begins in _prose(text, messages=messages):
        for phrase, remedy in PHRASES.items():
            for match in re.finditer(phrase, prose):
                yield line + prose.count("\n", 0, match.start()), match[0], remedy
        if begins and (begun := BEGINNINGS.match(prose)) is not None:
            yield line, f"begins with {begun[1]}", "begin with the subject"


def page_phrases(text: str) -> Iterator[tuple[str, str]]:
    """(phrase, remedy) of each phrase of a Markdown page that the glossary replaces, outside of code."""
    prose = " ".join(re.sub(r"^```.*?^```|^ {4}[^\n]*$|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE).split())
    for phrase, remedy in PHRASES.items():
        yield from ((match[0], remedy) for match in re.finditer(phrase, prose))


def _prose(text: str, *, messages: bool) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether a sentence begins there) of docstrings, comments and f-strings or strings with a space in raise statements."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                yield first.lineno, first.value.value, True
        elif (messages and isinstance(node, ast.Raise | ast.Return | ast.Yield)) or _warns(node):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield part.lineno, part.value, False
    previous = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, whole = token.start[0], token.line.lstrip().startswith("#")
            comment = token.string.lstrip("#! ")
            yield line, comment, whole and previous != line - 1
            previous = line if whole else -1


def _warns(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "add_notes", "print")


def _files() -> list[Path]:
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in paths if path != Path(__file__)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_identifiers_are_the_words_of_the_field(folder: str) -> None:
    wrong = []
    for path in _files():
        place = str(path.relative_to(ROOT))
        if place.startswith(f"{folder}/"):
            stem = [word for word in path.stem.split("_") if word in WORDS]
            wrong += [f"{place}: the module's name has {word!r}: {WORDS[word]}" for word in stem]
            wrong += [f"{place}:{line} {name}: {remedy}" for line, name, remedy in identifiers(path.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


def test_prose_is_free_of_the_dialect() -> None:
    wrong = []
    for path in _files():
        place = str(path.relative_to(ROOT))
        if place.startswith("src/"):
            wrong += [f"{place}:{line} {phrase!r}: {remedy}" for line, phrase, remedy in phrases(path.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


def test_pages_are_free_of_the_dialect() -> None:
    wrong = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        wrong += [f"{page.relative_to(ROOT)}: {phrase!r}: {remedy}" for phrase, remedy in page_phrases(page.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


def test_a_phrase_is_found_on_a_page_outside_of_its_code() -> None:
    assert [phrase for phrase, _ in page_phrases("Rows that are\nnot there are read.\n")] == ["not there"]
    assert [phrase for phrase, _ in page_phrases("Measured `x` beside\ntorch.\n")] == ["beside"]
    assert list(page_phrases("```\nbeside\n```\n\n    beside\n\n`beside`\n")) == []


PLANTED = {
    "def turned(x): ...": "turned",
    "class Beside: ...": "Beside",
    "class A:\n    made_of: int = 0": "made_of",
    "def f(own): ...": "own",
    "x.boundless = 1": "boundless",
    "for turn in (1, 2): ...": "turn",
    "match x:\n    case {'a': held}: ...": "held",
    "import numpy as mine": "mine",
    "tell = print": "tell",
}


@pytest.mark.parametrize(("text", "name"), PLANTED.items())
def test_a_planted_identifier_is_found(text: str, name: str) -> None:
    assert [found for _, found, _ in identifiers(text)] == [name]


def test_identifiers_of_the_field_are_not_found() -> None:
    text = "def return_value(turnover, held_out, away_from_zero): ...\nclass Chained: ...\nfrom itertools import chain\nunown = 1"
    assert list(identifiers(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        '"""Rows that are not there."""',
        'def f():\n    """Of the codes the largest."""',
        "# By their names.",
        "x = 1  # what lies beside",
        "def f():\n    raise ValueError(f'{x} is multiplied by its like')",
        'class A:\n    """The model takes one call."""',
        "# launches made again",
        "# launches without Python's share",
        "def f():\n    return f'{x} goes the way of transformers'",
        "# waits for nobody",
        "# stays for ever",
    ],
)
def test_a_planted_phrase_is_found(text: str) -> None:
    assert len(list(phrases(text))) == 1


def test_prose_of_the_field_is_not_found() -> None:
    text = '"""Compute q for every j of a block. It is turned off by HALFBYTE_X."""\n# First a subject.\n# As a continuation.\nx = "beside"'
    assert list(phrases(text)) == []


def test_the_glossary_has_terms_that_the_code_uses() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Glossary")[2], re.M
    )
    assert 60 <= len(rows) <= 100
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    for term, meaning in rows:
        for name in re.findall(r"`(\w+)`", f"{term} {meaning}"):
            assert re.search(rf"\b{name}\b", text), f"{name} is in no file of src"


MAX_ANY = 400  # lines of src with `Any`: a commit that replaces some by Protocols or classes lowers it


def test_any_becomes_no_more() -> None:
    lines = (line for path in sorted((ROOT / "src").rglob("*.py")) for line in path.read_text(encoding="utf-8").splitlines())
    assert sum(re.search(r"\bAny\b", line) is not None for line in lines) <= MAX_ANY
