"""The page of `halfbyte eval`: size against quality of a language model's formats, and everything in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Required, TypedDict

from halfbyte.bench.pages.charts import Bar, Point, Series, bars, chart
from halfbyte.bench.pages.markup import Markup
from halfbyte.bench.pages.page import card, page, rows

_MEANINGS = (
    "Perplexity is exp of the mean of -log p(token), ± its standard error; divergence the mean of KL(original ‖ quantized) over the "
    "tokens, in nats; same top token the fraction of tokens for which both predict the same most likely one."
)


class ModelQuality(TypedDict, total=False):
    """The quality of one model: a row of the document; `LanguageQuality.to_json`, or the last words that it predicts."""

    model: Required[str]
    weight_bytes: Required[int]
    tokens: int
    perplexity: float
    perplexity_error: float
    divergence: float | None
    top1: float
    last_word_accuracy: float


class QualityDocument(TypedDict):
    """The document that `eval --json` prints for a language model: the first of its models is the original."""

    kind: str
    text: str
    models: list[ModelQuality]


def quality_page(document: QualityDocument, about: Sequence[str] = ()) -> str:
    """Return the page of the document that `eval --json` prints for a language model: the first of its models is the original."""
    models: list[ModelQuality] = document["models"]
    if "last_word_accuracy" in models[0]:
        cards = [_last_words(models)]
        columns: tuple[str, ...] = ("model", "MB", "last word")
        cells: list[tuple[str, ...]] = [(one["model"], _mb(one), f"{one['last_word_accuracy']:.2%}") for one in models]
        tiles: dict[str, str] = {}
    else:
        cards = [_perplexities(models), *_divergences(models)]
        columns = ("model", "MB", "perplexity", "± error", "increase", "divergence", "same top token", "tokens")
        cells = [_cells(one, models[0]["perplexity"]) for one in models]
        tiles = _tiles(models)
    cards.append(card("All figures", rows(columns, cells), note=_MEANINGS if len(columns) > 3 else "", wide=True))
    return page("Size against quality", [f"text: {document['text']}", *about], tiles, cards, document)


def _perplexities(models: Sequence[ModelQuality]) -> Markup:
    series = [
        Series(
            one["model"],
            [Point(one["weight_bytes"] / 1e6, one["perplexity"], f"{_mb(one)} MB, perplexity {one['perplexity']:.4f}")],
            is_halfbyte=True,
            label=one["model"],
        )
        for one in models
    ]
    drawn = chart(series, x_label="MB of weights", y_label="perplexity", log_x=True)
    return card("Perplexity against size", drawn, note="Lower and further to the left is better.")


def _divergences(models: Sequence[ModelQuality]) -> list[Markup]:
    compared = [(i, one, found) for i, one in enumerate(models) if (found := one["divergence"]) is not None and found > 0]
    if not compared:
        return []
    series = [
        Series(
            one["model"],
            [
                Point(
                    one["weight_bytes"] / 1e6,
                    divergence,
                    f"{_mb(one)} MB, {divergence:.6f} nats\ntop token {one['top1']:.2%}",
                )
            ],
            is_halfbyte=True,
            label=one["model"],
            colour=i,
        )
        for i, one, divergence in compared
    ]
    drawn = chart(series, x_label="MB of weights", y_label="divergence, nats", log_y=True, log_x=True)
    note = "From the original's predictions; it separates formats of nearly the same perplexity."
    return [card("Divergence against size", drawn, note=note)]


def _last_words(models: Sequence[ModelQuality]) -> Markup:
    lines = [
        Bar(one["model"], one["last_word_accuracy"], f"{one['last_word_accuracy']:.2%}", f"{_mb(one)} MB", colour=i)
        for i, one in enumerate(models)
    ]
    return card("Last word predicted", bars(lines), note="Fraction of the passages. Higher is better.", wide=True)


def _tiles(models: Sequence[ModelQuality]) -> dict[str, str]:
    original, *others = models
    if not others:
        return {f"perplexity of {original['model']}": f"{original['perplexity']:.3f}"}
    smallest = min(others, key=lambda one: one["weight_bytes"])
    closest = min(others, key=lambda one: one["perplexity"])
    return {
        f"perplexity of {original['model']}, {_mb(original)} MB": f"{original['perplexity']:.3f}",
        f"smaller: {smallest['model']}": f"{original['weight_bytes'] / max(1, smallest['weight_bytes']):.2f}×",
        f"perplexity of {smallest['model']}": _increase(smallest, original["perplexity"]),
        f"perplexity of {closest['model']}, {_mb(closest)} MB": _increase(closest, original["perplexity"]),
    }


def _increase(one: ModelQuality, original: float) -> str:
    return f"{one['perplexity'] / original - 1:+.2%}"


def _cells(one: ModelQuality, original: float) -> tuple[str, ...]:
    shown = (one["model"], _mb(one), f"{one['perplexity']:.4f}", f"{one['perplexity_error']:.4f}")
    compared = ("", "", "")
    if one["divergence"] is not None:
        compared = (_increase(one, original), f"{one['divergence']:.6f}", f"{one['top1']:.2%}")
    return (*shown, *compared, str(one["tokens"]))


def _mb(one: ModelQuality) -> str:
    return f"{one['weight_bytes'] / 1e6:.1f}"
