"""`halfbyte eval`: how close a quantized model stays to its original on the lines of a text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.cli.output import Advance, Commands, add_command, print_json, print_table, progress
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from torch import nn

    from halfbyte.evaluate import EmbeddingQuality, OutputQuality


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "eval",
        run,
        "measure how close a quantized model stays to its original",
        "Run both models on each line of a text. Encoders are compared by their sentence embeddings (mean of the last hidden states): "
        "cosine, and whether a search finds the same lines. Others are compared by their logits or last hidden states.",
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of the quantized model")
    parser.add_argument("--against", metavar="SRC", type=Path, required=True, help="folder of the original model, with its tokenizer")
    parser.add_argument("--text", metavar="FILE", type=Path, required=True, help="UTF-8 text, one passage a line; empty lines are skipped")
    parser.add_argument("--batch", type=int, default=32, help="lines at once (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=256, help="tokens of a line that count (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    for name in ("batch", "max_length"):
        if getattr(args, name) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')} is 1 or more, got {getattr(args, name)}")
    lines = _lines(args.text)
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


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from error
    lines = [line for line in lines if line]
    if len(lines) < 2:
        raise ArgumentError(f"{path} has {len(lines)} lines of text, a comparison takes 2 or more")
    return lines


def _load_original(folder: Path) -> tuple[nn.Module, Any, bool]:
    """(model, tokenizer, whether it is an encoder that gives embeddings) of a Hugging Face folder."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
    except ImportError as error:
        raise UnsupportedError("eval needs transformers: pip install 'halfbyte[transformers]'") from error
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
    original: nn.Module, quantized: nn.Module, tokenizer: Any, lines: list[str], args: argparse.Namespace, step: Advance
) -> EmbeddingQuality:
    from halfbyte.evaluate import compare_embeddings, embed

    n = len(lines)
    sizes = {"batch_size": args.batch, "max_length": args.max_length}
    reference = embed(original, tokenizer, lines, **sizes, progress=lambda done: step(done, 2 * n))
    candidate = embed(quantized, tokenizer, lines, **sizes, progress=lambda done: step(n + done, 2 * n))
    return compare_embeddings(reference, candidate)


def _compare_outputs(
    original: nn.Module, quantized: nn.Module, tokenizer: Any, lines: list[str], args: argparse.Namespace, step: Advance
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
