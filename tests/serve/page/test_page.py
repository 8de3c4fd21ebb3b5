"""The chat page in a real browser: streaming, Markdown that is safe, stop, errors, light and dark, a phone's width."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from browser import Browser, chromium, needs_chromium
from serving import Server, make_model, serve

from halfbyte.language.generate import Batch, Generation
from halfbyte.serve.page import page


def test_the_page_fetches_nothing_else() -> None:
    text = page.html().decode()
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`]*", text)) - {"http://www.w3.org/2000/svg"}
    assert addresses == set()
    assert re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:)", text) == []
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", text)
    rules = page.headers()["Content-Security-Policy"]
    assert "default-src 'none'" in rules
    assert "unsafe" not in rules


pytestmark = needs_chromium


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(make_model(tmp_path_factory.mktemp("model") / "tiny"), new_tokens=3000) as running:
        yield running


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser, server: Server) -> Browser:
    window.resize(1100, 800)
    window.prefer("light")
    window.open(server.url)
    window.run("localStorage.clear(); paint()")
    window.wait("document.getElementById('model').textContent === 'tiny'")
    return window


def ask(browser: Browser, text: str, tokens: int) -> None:
    browser.run("document.getElementById('max-tokens').value = arguments[0]", tokens)
    browser.type("#input", text + "\ue007")  # Enter


def test_a_conversation(browser: Browser, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Batch.step
    monkeypatch.setattr(Batch, "step", lambda self: (time.sleep(0.005), step(self))[1])  # text of one event has no tokens/s
    ask(browser, "the quick <b>fox</b>", 20)
    browser.wait("!running && messages.length === 2")
    assert browser.run("return document.querySelector('.user').textContent") == "the quick <b>fox</b>"
    assert browser.run("return document.querySelector('.user b')") is None
    speed = browser.run("return document.querySelector('.speed').textContent")
    assert re.fullmatch(r"\d+ tokens? · [\d.]+ tokens/s · first after \d+ ms( · cut at the most tokens)?", speed), speed
    ask(browser, "and then?", 5)
    browser.wait("!running && messages.length === 4")
    assert browser.run("return document.querySelectorAll('.again').length") == 1
    browser.click(".again")
    browser.wait("!running && messages.length === 4")
    browser.click("#new")
    assert browser.run("return [messages.length, Boolean(document.getElementById('welcome'))]") == [0, True]
    assert browser.log() == []


def test_text_streams_and_stops(browser: Browser, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    step, submit = Batch.step, Batch.submit
    monkeypatch.setattr(Batch, "step", lambda self: (time.sleep(0.01), step(self))[1])

    def endless(self: Batch, ids: Any, sampling: Any, *more: Any, **settings: Any) -> Generation:
        return submit(self, ids, replace(sampling, ignore_eos=True), *more, **settings)

    monkeypatch.setattr(Batch, "submit", endless)
    browser.run("document.getElementById('temperature').value = 2")
    ask(browser, "the quick brown fox", 3000)
    browser.wait("running && document.querySelector('.body').textContent.length > 5")
    assert browser.run("return document.getElementById('send').getAttribute('aria-label')") == "Stop"
    browser.click("#send")
    browser.wait("!running")
    assert browser.run("return document.querySelector('.speed').textContent").endswith("stopped")
    server.wait_until_idle(5)
    assert browser.log() == []


def test_a_new_conversation_has_nothing_of_the_one_that_it_ends(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Batch.step
    monkeypatch.setattr(Batch, "step", lambda self: (time.sleep(0.01), step(self))[1])
    browser.run("document.getElementById('temperature').value = 2")
    ask(browser, "the quick brown fox", 3000)
    browser.wait("running && document.querySelector('.body').textContent.length > 5")
    browser.click("#new")
    browser.wait("!running")
    assert browser.run("return messages.length") == 0
    ask(browser, "and then?", 2)
    browser.wait("!running && messages.length === 2")
    assert browser.run("return [messages[0].role, Boolean(document.getElementById('welcome'))]") == ["user", False]


def test_an_error_is_shown(browser: Browser) -> None:
    ask(browser, "oak " * 20, 5000)
    browser.wait("document.querySelector('.error')")
    assert "max_tokens is 3000 at most" in browser.run("return document.querySelector('.error').textContent")
    assert all("400" in entry for entry in browser.log())


MARKDOWN = [
    ("a **b** *c* `d*e*` ~~f~~", "<p>a <strong>b</strong> <em>c</em> <code>d*e*</code> <del>f</del></p>"),
    ("2*3*4 snake_case_name __x__", "<p>2*3*4 snake_case_name <strong>x</strong></p>"),
    ("# A\n## B ##\ntext", "<h1>A</h1><h2>B</h2><p>text</p>"),
    ("- a\n- b\n  - c\n\n1. x\n2. y", '<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol start="1"><li>x</li><li>y</li></ol>'),
    ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
    ("---", "<hr>"),
    ("<script>alert(1)</script>", "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
    ("[x](javascript:alert(1))", "<p><span>x</span></p>"),
    ("[x](JaVaScRiPt:alert)", "<p><span>x</span></p>"),
    ("[x](data:text/html,a)", "<p><span>x</span></p>"),
    ("![x](https://a.org/b.png)", '<p><a href="https://a.org/b.png" target="_blank" rel="noopener noreferrer nofollow">x</a></p>'),
    ('"><img src=x onerror=alert(1)>', '<p>"&gt;&lt;img src=x onerror=alert(1)&gt;</p>'),
    (
        "https://a.org/b?c=d.",
        '<p><a href="https://a.org/b?c=d" target="_blank" rel="noopener noreferrer nofollow">https://a.org/b?c=d</a>.</p>',
    ),
    ("| a | b |\n|---|---|\n| 1 | <i> |", None),
    ("```js\n<b>**x**\n```\nend", None),
    ("```\nnot closed", None),
]


def test_markdown_is_rendered_and_never_html(browser: Browser) -> None:
    script = "const box = el('div', '', ...markdown(arguments[0])); return box.innerHTML"
    for text, expected in MARKDOWN:
        found = browser.run(script, text)
        assert expected is None or found == expected
    assert "<td>&lt;i&gt;</td>" in browser.run(script, MARKDOWN[-3][0])
    assert "<code>&lt;b&gt;**x**</code>" in browser.run(script, MARKDOWN[-2][0])
    assert "<code>not closed</code>" in browser.run(script, MARKDOWN[-1][0])
    long = ["*" * 3000, "[" * 3000, "> " * 3000, "`" * 3000, "- " * 2000, "|" * 3000 + "\n|-|", "_a" * 3000, "**a" * 2000]
    took = browser.run("const start = performance.now(); arguments[0].forEach(markdown); return performance.now() - start", long)
    assert took < 5000, "no text takes the page for long"
    assert browser.log() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1100, 800), (360, 640)])
def test_it_fits_the_window_and_can_be_read(browser: Browser, scheme: str, width: int, height: int) -> None:
    browser.prefer(scheme)
    browser.resize(width, height)
    browser.run(
        "chat.replaceChildren(el('div', 'user', 'x'.repeat(300)), el('div', 'assistant', el('div', 'body', ...markdown(arguments[0]))))",
        "`" + "y" * 300 + "`\n\n```\n" + "z" * 300 + "\n```\n|a|b|\n|-|-|\n|" + "w " * 100 + "|c|",
    )
    assert browser.run("return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]") == [width, height]
    assert browser.run("return scroller.scrollWidth <= scroller.clientWidth"), "only code and tables scroll sideways"
    assert browser.run("return document.documentElement.dataset.theme") == scheme
    for selector in ("#send", "#theme", "#open-settings", "#input"):
        x, y, right, bottom = browser.run(
            "const r = document.querySelector(arguments[0]).getBoundingClientRect(); return [r.x, r.y, r.right, r.bottom]", selector
        )
        assert 0 <= x < right <= width
        assert 0 <= y < bottom <= height
    for selector in (".user", ".body", "#model"):
        assert contrast(browser, selector) >= 4.5, "WCAG's level AA"
    assert browser.screenshot().startswith(b"\x89PNG")
    browser.click("#theme")
    assert browser.run("return document.documentElement.dataset.theme") == {"light": "dark", "dark": "light"}[scheme]


def contrast(browser: Browser, selector: str) -> float:
    """The ratio of luminances of an element's text and what is behind it."""
    script = """
    let node = document.querySelector(arguments[0]); const color = getComputedStyle(node).color; let back = 'rgba(0, 0, 0, 0)';
    for (; node && back === 'rgba(0, 0, 0, 0)'; node = node.parentElement) back = getComputedStyle(node).backgroundColor;
    return [color, back]"""
    luminances = []
    for color in browser.run(script, selector):
        channels = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)
