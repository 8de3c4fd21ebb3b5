"""The pages of `bench --html` and `eval --html`: their data, that names stay text, and how a real browser shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from browser import Browser, chromium, needs_chromium
from language_model import make_language_model

from halfbyte.bench import cpu, step
from halfbyte.bench.gpu_report import GpuMeasurement, GpuReport
from halfbyte.bench.pages.linear import linear_page
from halfbyte.bench.pages.markup import Markup, element
from halfbyte.bench.pages.quality import quality_page
from halfbyte.bench.pages.step import step_page
from halfbyte.bench.report import Absence, Ceilings, Measurement, Report, Sample
from halfbyte.bench.step import StepOp, StepReport
from halfbyte.cli.main import main
from halfbyte.decoder.explain import Explained
from halfbyte.decoder.program import Lowered, Op
from halfbyte.errors import ArgumentError

EVIL = "</script><script>document.title='evil'</script><img src=x onerror=alert(1)>\"' & é"
VERSIONS = {"python": "3.11", "halfbyte": "0.1.0"}


def sample(seconds: float) -> Sample:
    return Sample(seconds, seconds, seconds, 5, True, Ceilings(20e9, 400e9, 100e9), 400e9)


def measurement(label: str, m: int, seconds: float, *, peer: bool = False, nbytes: int = 1 << 20) -> Measurement:
    sizes = {"n": 1024, "k": 2048, "m": m, "threads": 2, "copy_bytes": nbytes, "copies": 3}
    found = {"error": 1e-3, "allowed": 1e-2, "seconds": seconds, "steady": 1, "operations_per_second": 2 * m * 1024 * 2048 / seconds}
    best = None if peer else 2.0
    settings: dict[str, Any] = {**sizes, **found, "fraction": 0.5, "samples": [sample(seconds)], "best_peer": best}
    return Measurement(contender=label, label=label, weights="q4_0", peer=peer, **settings)


def cpu_report(name: str = "halfbyte q4_0") -> Report:
    """Two contenders on four M; one that failed; a note."""
    found = [measurement(name, m, 5e-5 * max(1, m / 8)) for m in (1, 4, 16, 64)]
    found += [measurement("torch fp32", m, 4e-4 * max(1, m / 8), peer=True, nbytes=1 << 23) for m in (1, 4, 16, 64)]
    absences = [Absence("other", f"other {name}", 1024, 2048, 2, f"no {name}")]
    return Report("2026-11-26", {"cpu": f"abacus {name}"}, VERSIONS, {"rounds": 1}, found, absences, [f"{name} was slow"])


def gpu_report(name: str = "halfbyte") -> GpuReport:
    def point(label: str, m: int, peer: bool) -> GpuMeasurement:
        about = ("int4_g128", "bfloat16", "float", f"skinny {name}")
        contender = "cublas" if peer else "halfbyte"
        return GpuMeasurement(contender, label, peer, 4096, 4096, m, *about, 1e-3, 1e-5 * m**0.5, (0.9, 1.1), 5e-6, None if peer else 1.5)

    found = [point(label, m, peer) for label, peer in ((name, False), ("cuBLAS", True)) for m in (1, 16, 256)]
    ceilings = {"read": 3e12, "half": 8e14, "integer": 1.6e15}
    return GpuReport("2026-11-26", {"name": f"GPU {name}"}, VERSIONS, {}, ceilings, found, [f"{name}: no"])


def step_report(name: str = "small") -> StepReport:
    ops = (
        StepOp((), 1, "embed_tokens", "embedding", (320, 64), "q8_0", "dequantize", (), None, None),
        StepOp((0, 1), 2, f"qkv {name}", "linear", (128, 64), "q4_0", "int8", ("attn_norm",), 1e-5, 6e-6),
        StepOp((), 1, "lm_head", "linear", (320, 64), "q8_0", "int8", ("norm",), 3e-5, 2e-5),
    )
    return StepReport("2026-11-26", name, "the CPU", "float32", VERSIONS, 2e-4, ops)


def quality(name: str = "q4_0") -> dict[str, Any]:
    def row(model: str, megabytes: float, perplexity: float, divergence: float | None) -> dict[str, Any]:
        about = {"model": model, "weight_bytes": int(megabytes * 1e6), "tokens": 99, "perplexity": perplexity, "perplexity_error": 0.1}
        return about | {"divergence": divergence, "top1": None if divergence is None else 0.9}

    models = [row("original", 100.7, 7.98, None), row(name, 16.3, 8.15, 0.03), row("q8_0", 26.8, 7.99, 0.0005)]
    return {"kind": "language", "text": f"text {name}.txt", "models": models}


PAGES: dict[str, Callable[[str], str]] = {
    "cpu": lambda name: linear_page(cpu_report(name)),
    "gpu": lambda name: linear_page(gpu_report(name)),
    "step": lambda name: step_page(step_report(name)),
    "quality": lambda name: quality_page(quality(name)),
}


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def elements(text: str) -> Elements:
    parser = Elements()
    parser.feed(text)
    return parser


def embedded(text: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


# Without a browser


@pytest.mark.parametrize("kind", PAGES)
def test_a_name_from_elsewhere_adds_no_element(kind: str) -> None:
    usual, evil = elements(PAGES[kind]("usual")), elements(PAGES[kind](EVIL))
    assert evil.tags == usual.tags
    assert [name for name, _ in evil.attributes] == [name for name, _ in usual.attributes]
    assert not [name for name, _ in evil.attributes if name.startswith("on")]


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_loads_nothing(kind: str) -> None:
    found = elements(PAGES[kind]("usual"))
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {*found.tags}
    assert not [value for name, value in found.attributes if name in ("src", "href", "action", "xlink:href")]
    assert "url(" not in PAGES[kind]("usual")
    assert "@import" not in PAGES[kind]("usual")


def test_the_data_is_in_the_page() -> None:
    report = cpu_report(EVIL)
    assert embedded(linear_page(report)) == json.loads(json.dumps(report.to_json()))
    assert embedded(quality_page(quality(EVIL))) == quality(EVIL)
    assert embedded(step_page(step_report()))["step_seconds"] == 2e-4


def test_text_is_escaped_unless_it_is_markup() -> None:
    assert element("p", "<b>", Markup("<i>"), 1.50, title='"&') == '<p title="&quot;&amp;">&lt;b&gt;<i>1.5</p>'


def test_a_run_without_measurements_has_no_page() -> None:
    with pytest.raises(ArgumentError, match="measured nothing"):
        linear_page(replace(cpu_report(), measurements=[]))


def test_passages_have_bars() -> None:
    models = [
        {"model": "original", "weight_bytes": 100, "last_word_accuracy": 0.5},
        {"model": "q", "weight_bytes": 9, "last_word_accuracy": 0.4},
    ]
    text = quality_page({"kind": "language", "text": "t", "models": models})
    assert re.findall(r'data-value="([\d.]+)"', text) == ["0.5", "0.4"]


# The commands


def test_bench_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cpu, "run", lambda plan, progress: cpu_report())
    assert main(["bench", "--html", str(tmp_path / "out.html"), "--json"]) == 0
    out = capsys.readouterr()
    assert embedded((tmp_path / "out.html").read_text(encoding="utf-8")) == json.loads(out.out)
    assert f"written to {tmp_path / 'out.html'}" in out.err


def test_bench_times_the_steps_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each linear layer that the program has is timed, those of equal layers once; the parts and the whole are on the page."""
    asked = []

    def timed(m: int, n: int, k: int, format: object, **settings: Any) -> SimpleNamespace:
        asked.append((m, n, k, str(format), settings["compute"], settings["device"]))
        return SimpleNamespace(measured=1e-6 * n, roofline=SimpleNamespace(seconds=5e-7 * n))

    monkeypatch.setattr(step, "explain", timed)
    make_language_model(tmp_path / "model")
    arguments = ["bench", "--model", str(tmp_path / "model"), "--format", "q4_0", "--rounds", "1", "--html", str(tmp_path / "out.html")]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    linear = {op["name"]: op for op in found["ops"] if op["kind"] == "linear"}
    assert linear.keys() == {"qkv", "o_proj", "gate_up", "down_proj", "lm_head"}
    shapes = [(1, *op["shape"], op["format"], "auto", "cpu") for op in linear.values()]
    assert asked == shapes
    assert all(op["seconds"] == 1e-6 * op["shape"][0] and op["least"] == 5e-7 * op["shape"][0] for op in linear.values())
    assert linear["qkv"]["layers"] == [0, 1]
    assert found["step_seconds"] > 0
    bars = re.findall(r'data-value="([^"]+)"', (tmp_path / "out.html").read_text(encoding="utf-8"))
    shown = [op["calls"] * op["seconds"] for op in found["ops"] if op["seconds"] is not None]
    assert [float(value) for value in bars[: len(shown)]] == pytest.approx(shown)


def test_linear_layers_are_timed_with_their_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that differ only in compute, scales of activations or sparsity are timed each with its own."""
    settings: list[tuple[tuple[str, object], ...]] = [
        (),
        (("compute", "float"),),
        (("activation_scales", "row"),),
        (("sparsity", "2:4"),),
    ]
    asked = []

    def timed(m: int, n: int, k: int, format: object, **settings: Any) -> SimpleNamespace:
        asked.append((settings["compute"], settings["activation"], settings["sparse"]))
        return SimpleNamespace(measured=1e-6 * len(asked), roofline=None)

    monkeypatch.setattr(step, "explain", timed)
    lowered = tuple(Lowered(Op("linear", f"op{i}", 0, ("x",), (64, 64), "q4_0", each), "int8") for i, each in enumerate(settings))
    explanation: Any = SimpleNamespace(groups=[Explained(tuple(lowered), (0,))], rows=1, dtype=torch.float32, machine="the CPU")
    report = step.measure_step(explanation, "cpu", "model", 1e-3)
    assert asked == [("auto", "block", False), ("float", "block", False), ("auto", "row", False), ("auto", "block", True)]
    assert [op.seconds for op in report.ops] == [1e-6, 2e-6, 3e-6, 4e-6]


def test_eval_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_language_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 3, encoding="utf-8")
    words = ["--text", str(tmp_path / "text.txt"), "--format", "q8_0", "--html", str(tmp_path / "out.html"), "--json"]
    assert main(["eval", str(tmp_path / "model"), *words]) == 0
    found, page = json.loads(capsys.readouterr().out), (tmp_path / "out.html").read_text(encoding="utf-8")
    assert embedded(page)["models"] == found["models"]
    assert str(tmp_path) not in page


@pytest.mark.parametrize("command", [["bench"], ["eval", "model", "--text", "text.txt"]])
def test_a_page_that_cannot_be_written(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target, words in ((tmp_path / "a.txt", "name it a.html"), (tmp_path / "no" / "a.html", "make"), (tmp_path, ".html")):
        assert main([*command, "--html", str(target)]) == 2
        err = capsys.readouterr().err
        assert "--html" in err
        assert words in err


def test_a_model_is_timed_in_one_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", "model", "--format", "q4_0", "q8_0"]) == 2
    assert "give one of them" in capsys.readouterr().err


# In a browser


@pytest.fixture(scope="module")
def desktop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("desktop")) as window:
        window.resize(1200, 900)
        yield window


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("phone")) as window:
        window.resize(390, 844, phone=True)
        yield window


@pytest.fixture
def shown(tmp_path: Path) -> Callable[[Browser, str], None]:
    def show(window: Browser, kind: str) -> None:
        (tmp_path / "page.html").write_text(PAGES[kind](EVIL), encoding="utf-8")
        window.open((tmp_path / "page.html").as_uri())

    return show


@needs_chromium
@pytest.mark.parametrize("kind", PAGES)
def test_the_browser_has_nothing_to_complain_of(kind: str, desktop: Browser, shown: Callable[[Browser, str], None]) -> None:
    shown(desktop, kind)
    assert desktop.log() == []
    assert desktop.run("return document.title") != "evil"
    assert desktop.run("return performance.getEntriesByType('resource').length") == 0
    assert desktop.run("return JSON.parse(document.getElementById('data').textContent) !== null")


@needs_chromium
def test_each_point_is_where_its_data_says(desktop: Browser, shown: Callable[[Browser, str], None]) -> None:
    """On logarithmic axes equal ratios are equal distances: the line through the first and last point predicts all between."""
    shown(desktop, "cpu")
    script = """return [...document.querySelectorAll('.chart')].map(chart => [...chart.querySelectorAll('circle')].map(circle => {
        const box = circle.getBoundingClientRect();
        return [Math.log(+circle.dataset.x), Math.log(+circle.dataset.y), box.x + box.width / 2, box.y + box.height / 2];
    }))"""
    charts = desktop.run(script)
    report = cpu_report()
    assert [len(points) for points in charts] == [len(report.measurements)] * 2
    times = sorted((one.m, one.seconds * 1e6) for one in report.measurements)
    assert sorted((2.718281828459045**x, 2.718281828459045**y) for x, y, *_ in charts[1]) == [pytest.approx(pair) for pair in times]
    for points in charts:
        for value, place in ((0, 2), (1, 3)):
            low, high = min(points, key=lambda p: p[value]), max(points, key=lambda p: p[value])
            slope = (high[place] - low[place]) / (high[value] - low[value])
            for point in points:  # coordinates are written with two decimals, of a drawing that is not enlarged more than twice
                assert point[place] == pytest.approx(low[place] + slope * (point[value] - low[value]), abs=0.1)


@needs_chromium
def test_a_legend_hides_and_a_point_tells(desktop: Browser, shown: Callable[[Browser, str], None]) -> None:
    shown(desktop, "cpu")
    count = "return [...document.querySelector('.chart').querySelectorAll('circle')].filter(c => c.getClientRects().length).length"
    before = desktop.run(count)
    desktop.run("document.querySelector('.legend button').click()")
    assert desktop.run(count) == before - 4
    desktop.run("document.querySelector('.legend button').click()")
    assert desktop.run(count) == before
    desktop.run("document.querySelector('circle').focus()")
    assert desktop.run("const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent").startswith(EVIL)


@needs_chromium
def test_light_and_dark(desktop: Browser, shown: Callable[[Browser, str], None], tmp_path: Path) -> None:
    colours = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    shown(desktop, "step")
    light = desktop.run(colours)
    desktop.run("document.querySelector('.theme').click()")
    dark = desktop.run(colours)
    assert light == [*map(_rgb, ("f6f7f9", "1b1f24"))]
    assert dark == [*map(_rgb, ("0f1318", "e6eaef"))]


def _rgb(digits: str) -> str:
    return f"rgb({', '.join(str(int(digits[i : i + 2], 16)) for i in (0, 2, 4))})"


@needs_chromium
@pytest.mark.parametrize("kind", PAGES)
def test_a_phone_shows_it_readably(kind: str, phone: Browser, shown: Callable[[Browser, str], None]) -> None:
    """Nothing is wider than the screen but tables, which scroll by themselves, and no text is smaller than 8 pixels."""
    shown(phone, kind)
    assert phone.run("return document.documentElement.scrollWidth") <= 390
    sizes = phone.run(
        """return [...document.querySelectorAll('.chart text')].map(text => {
        const drawing = text.ownerSVGElement;
        return parseFloat(getComputedStyle(text).fontSize) * drawing.getBoundingClientRect().width / drawing.viewBox.baseVal.width;
    })"""
    )
    assert all(size >= 8 for size in sizes), min(sizes)
    assert phone.log() == []
