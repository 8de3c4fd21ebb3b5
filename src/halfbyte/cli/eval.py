"""`halfbyte eval`: measures the quality of a quantized model on a text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from halfbyte.cli.generate import writes_text
from halfbyte.cli.shared.device import OFFLOAD, add_device, add_offload, offloads, refuse_offload, settle_device
from halfbyte.cli.shared.eval_models import Opened, open_model
from halfbyte.cli.shared.output import (
    Advance,
    Commands,
    add_command,
    check_written,
    path_argument,
    print_json,
    print_table,
    progress,
    read_text,
    write_page,
)
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError
from halfbyte.io.files import check_regular

if TYPE_CHECKING:
    from torch import nn

    from halfbyte.bench.pages.quality import ModelQuality, QualityDocument
    from halfbyte.evaluate import EmbeddingQuality, LanguageQuality, OutputQuality


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "eval",
        run,
        "measure the quality of a quantized model",
        "For a language model: perplexity, and with --format or --against the divergence (Kullback-Leibler, in nats) of its predictions "
        "from the original's and how often both predict the same most likely token. The text is read in windows of --context tokens that "
        "start every --stride; each token is scored once. For other models, with --against: compares the sentence embeddings (mean of the "
        "last hidden states) of each line, or the outputs for it.",
    )
    parser.add_argument("model", metavar="MODEL", type=path_argument, help="Hugging Face folder, halfbyte folder or .gguf file")
    parser.add_argument("--against", metavar="SRC", type=path_argument, help="the original model, with its tokenizer")
    parser.add_argument("--format", nargs="+", default=[], help="quantize MODEL to each of these formats, and compare with MODEL")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", metavar="FILE", type=path_argument, help="UTF-8 text; for other than language models, one passage per line")
    text.add_argument(
        "--lambada-like",
        metavar="FILE",
        type=path_argument,
        help="one passage per line: the fraction of lines whose last word the model predicts",
    )
    parser.add_argument("--context", type=int, default=512, help="tokens of a window (default: %(default)s, or the model's maximum)")
    parser.add_argument("--stride", type=int, help="tokens from window to window (default: the context; less is slower and more realistic)")
    parser.add_argument("--cache", choices=("int8",), help="evaluate each model with keys and values in 8 bits, too")
    parser.add_argument("--html", metavar="FILE", type=path_argument, help="write a page of size against quality, of a language model")
    parser.add_argument("--plot", metavar="FILE", type=path_argument, help="write a plot of perplexity against size, as SVG")
    add_device(parser)
    add_offload(parser, has_context=True)
    parser.add_argument("--batch", type=int, default=32, help="lines at a time, for other than language models (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=256, help="maximum tokens of a line, for those (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    for name in ("batch", "max_length", "context"):
        if getattr(args, name) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')} is 1 or more, got {getattr(args, name)}")
    if args.html:
        check_written("--html", args.html, ".html")
    if args.plot:
        _check_plot(args)
    _check_stride(args, args.context)
    source = args.model if args.against is None else args.against
    text = read_text(args.lambada_like or args.text)
    if writes_text(source):
        return _language(args, text)
    if args.against is None or args.format or args.lambada_like or args.plot or args.html or args.cache:
        raise ArgumentError(f"{source} is not a language model: compare a quantized one, eval QUANTIZED --against {source} --text FILE")
    refuse_offload(args, str(source))
    return _lines(args, text)


def _passages(text: str, path: Path, least: int) -> list[str]:
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if len(lines) < least:
        raise ArgumentError(f"{path} has {len(lines)} lines of text, {least} or more are needed")
    return lines


def _check_plot(args: argparse.Namespace) -> None:
    """Raise ArgumentError, before any work, for a plot that could not be written."""
    if args.lambada_like or args.plot.suffix != ".svg":
        raise ArgumentError(f"--plot draws the perplexity of --text as an .svg file, got {args.plot}")
    check_written("--plot", args.plot, ".svg")


def _check_stride(args: argparse.Namespace, context: int) -> None:
    if args.stride is not None and not 1 <= args.stride <= context:
        raise ArgumentError(f"--stride is 1 or more and at most the context, which is {context} tokens here, got {args.stride}")


# Language models


def _language(args: argparse.Namespace, text: str) -> int:
    settle_device(args)
    if args.format and args.against:
        raise ArgumentError("--format quantizes MODEL, --against compares it unchanged: give one of the two")
    if offloads(args) and (args.format or args.against):
        raise ArgumentError(f"{OFFLOAD} place one model, got --format or --against for others: evaluate one after the other, without these")
    label = "original" if args.against is not None or args.format else args.model.name
    opened = {label: open_model(args, args.against or args.model, label)}
    if args.against is not None:
        opened[args.model.name] = open_model(args, args.model, args.model.name)
    opened |= {name: open_model(args, args.model, name, name) for name in args.format}
    named = {name: each.model for name, each in opened.items()}
    sizes = {name: each.weight_bytes for name, each in opened.items()}
    if args.cache:
        named |= {f"{name}, {args.cache} cache": each.int8_cached for name, each in opened.items()}
        sizes |= {f"{name}, {args.cache} cache": each.weight_bytes for name, each in opened.items()}
    reference, candidates = opened[label], {name: model for name, model in named.items() if name != label}
    rows: list[ModelQuality] = [{"model": name, "weight_bytes": sizes[name]} for name in named]
    from halfbyte.evaluate import last_word_accuracy

    with progress(args, "evaluating") as advance:
        if args.lambada_like:
            passages = _passages(text, args.lambada_like, 1)
            for i, (row, model) in enumerate(zip(rows, named.values(), strict=True)):
                row["last_word_accuracy"] = last_word_accuracy(model, reference.tokenizer, passages)
                advance(i + 1, len(rows))
        else:
            for row, quality in zip(rows, _qualities(args, reference, candidates, text, advance), strict=True):
                row |= cast("ModelQuality", quality.to_json())
    document: QualityDocument = {"kind": "language", "text": (args.lambada_like or args.text).name, "models": rows}
    if args.json:
        print_json({**document, "text": str(args.lambada_like or args.text)})
    elif args.lambada_like:
        print_table(("model", "MB", "last word"), [(r["model"], _mb(r), f"{r['last_word_accuracy']:.2%}") for r in rows])
    else:
        columns = ("model", "MB", "tokens", "perplexity", "± error", "increase", "divergence", "same top token")
        print_table(columns, [_row(row, rows[0]["perplexity"]) for row in rows])
    if args.plot:  # last: should it fail, the figures are there
        _plot(args, rows)
    if args.html:
        _write_page(args, document)
    return 0


def _write_page(args: argparse.Namespace, document: QualityDocument) -> None:
    from halfbyte.bench.pages.quality import quality_page

    settings = f"windows of {args.context} tokens" if args.text else "the last word of each line"
    write_page(args, quality_page(document, [f"{args.model.name} · {settings} · halfbyte on {args.device}"]))


def _qualities(
    args: argparse.Namespace, reference: Opened, candidates: dict[str, object], text: str, advance: Advance
) -> list[LanguageQuality]:
    import torch

    from halfbyte.evaluate import evaluate_language

    ids = torch.tensor(reference.tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    if len(ids) < 2:
        raise ArgumentError(f"{args.text} has {len(ids)} tokens, of which the first is not scored: use a longer text")
    context = min(args.context, reference.max_positions or args.context)
    _check_stride(args, context)
    if context < args.context and not args.quiet:
        print(f"windows have {context} tokens, the most that the model takes, in place of {args.context}", file=sys.stderr)
    reference_quality, candidate_qualities = evaluate_language(
        reference.model, candidates, ids, context=context, stride=args.stride, progress=advance
    )
    return [reference_quality, *candidate_qualities.values()]


def _row(row: ModelQuality, original: float) -> tuple[str, ...]:
    shown = (row["model"], _mb(row), str(row["tokens"]), f"{row['perplexity']:.4f}", f"{row['perplexity_error']:.4f}")
    if row["divergence"] is None:
        return (*shown, "", "", "")
    return (*shown, f"{row['perplexity'] / original - 1:+.3%}", f"{row['divergence']:.6f}", f"{row['top1']:.2%}")


def _mb(row: ModelQuality) -> str:
    return f"{row['weight_bytes'] / 1e6:.1f}"


def _plot(args: argparse.Namespace, rows: list[ModelQuality]) -> None:
    from halfbyte.checkpoint.native.folder import replacing_file
    from halfbyte.plot import line_plot

    points = {row["model"]: [(row["weight_bytes"] / 1e6, row["perplexity"])] for row in rows}
    with replacing_file(args.plot) as path:
        text = line_plot(points, title="perplexity against size", x_label="weights, MB", y_label="perplexity")
        path.write_text(text, encoding="utf-8")


# Other models


def _lines(args: argparse.Namespace, text: str) -> int:
    lines = _passages(text, args.text, 2)
    original, tokenizer, is_encoder = _load_original(args.against)

    from halfbyte.checkpoint import load

    quantized = load(args.model).eval()
    compare = _compare_embeddings if is_encoder else _compare_outputs
    with progress(args, "evaluating") as advance:
        quality = compare(original, quantized, tokenizer, lines, args, advance)
    what = "embeddings" if is_encoder else "outputs"
    if args.json:
        print_json({"model": str(args.model), "against": str(args.against), "lines": len(lines), "kind": what, **quality.to_json()})
        return 0
    print_table(
        (what, "value", "meaning"),
        [(name, f"{value:.6f}" if isinstance(value, float) else str(value), MEANING[name]) for name, value in quality.to_json().items()],
        left=3,
    )
    return 0


MEANING = {
    "n": "rows compared: lines of an encoder, else tokens",
    "queries": "searches made: each line against all others",
    "mean_cosine": "cosine between the two models' rows, 1 is the same direction",
    "min_cosine": "the smallest of them",
    "top1": "searches that find the same nearest line",
    "top10": "of the original's ten nearest lines, those that the quantized model also has among its ten",
    "max_relative": "largest difference, over the original's largest value",
    "same_argmax": "rows whose largest entry is the same: for logits, the same next token",
}


def _load_original(folder: Path) -> tuple[nn.Module, object, bool]:
    """(model, tokenizer, whether it is an encoder that gives embeddings) of a Hugging Face folder."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    check_regular(folder)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        name = (config.architectures or [""])[0]
        kind = getattr(transformers, name, transformers.AutoModel)
        # Only safetensors: other files may be pickles, which can run code.
        model: nn.Module = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} cannot be loaded by transformers: {error}") from error
    if config.is_encoder_decoder:
        raise UnsupportedError(f"{folder} holds an encoder and a decoder ({name}); eval compares models of one stack")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return model.eval(), tokenizer, name.endswith("Model") and config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _compare_embeddings(
    original: nn.Module, quantized: nn.Module, tokenizer: object, lines: list[str], args: argparse.Namespace, step: Advance
) -> EmbeddingQuality:
    from halfbyte.evaluate import compare_embeddings, embed

    n = len(lines)
    sizes = {"batch_size": args.batch, "max_length": args.max_length}
    reference = embed(original, tokenizer, lines, **sizes, progress=lambda done: step(done, 2 * n))
    candidate = embed(quantized, tokenizer, lines, **sizes, progress=lambda done: step(n + done, 2 * n))
    return compare_embeddings(reference, candidate)


def _compare_outputs(
    original: nn.Module, quantized: nn.Module, tokenizer: object, lines: list[str], args: argparse.Namespace, step: Advance
) -> OutputQuality:
    import torch

    from halfbyte.evaluate import batches_by_length, compare_outputs, merge_outputs

    done, parts = 0, []
    for indices, inputs in batches_by_length(tokenizer, lines, args.batch, args.max_length):
        with torch.inference_mode():
            answers = [model(**inputs) for model in (original, quantized)]
        rows = [answer.logits if hasattr(answer, "logits") else answer.last_hidden_state for answer in answers]
        parts.append(compare_outputs(*(row[inputs["attention_mask"].bool()] for row in rows)))
        step(done := done + len(indices), len(lines))
    return merge_outputs(parts)
