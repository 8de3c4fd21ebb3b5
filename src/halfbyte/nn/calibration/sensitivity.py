"""The sensitivity of a language model's predictions to the quantization of single weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.errors import FormatError, UnsupportedError
from halfbyte.formats.spec import Format
from halfbyte.nn.calibration.calibrate import Calibration
from halfbyte.nn.calibration.runs import Progress, in_evaluation, takes_tokens


@torch.no_grad()
def measure_losses(
    model: nn.Module, weights: Mapping[str, Tensor], formats: Sequence[Format], calibration: Calibration, progress: Progress | None = None
) -> list[list[float]]:
    """For each weight and each format the estimated divergence caused by quantizing only that weight.

    weights  parameters [N, K] of `model`, by name; changed while this runs, and restored

    With the format of the largest error the mean of KL(original || quantized) over all tokens is measured, in nats. To leading order
    it grows with the square of the weight's error, so for the other formats it is scaled by that.
    """
    original = [_log_probabilities(model, tokens) for tokens in calibration.tokens.split(calibration.batch)]
    losses = []
    for done, (name, weight) in enumerate(weights.items()):
        kept = weight.detach().clone()
        rounded = [_rounded(kept, fmt, name) for fmt in formats]
        errors = [float((kept.float() - values).square().sum(dtype=torch.float64)) for values in rounded]
        worst = max(range(len(formats)), key=errors.__getitem__)
        try:
            weight.copy_(rounded[worst])
            divergence = _divergence(model, original, calibration)
        finally:
            weight.copy_(kept)
        losses.append([divergence * error / errors[worst] if errors[worst] else 0.0 for error in errors])
        if progress is not None:
            progress(done + 1, len(weights), name)
    return losses


def _rounded(weight: Tensor, fmt: Format, name: str) -> Tensor:
    """The weight in a format, float32; zeros where that cannot hold it."""
    try:
        return ops.quantize(weight, fmt, name=name).dequantize()
    except FormatError:
        return torch.zeros_like(weight, dtype=torch.float32)


def _log_probabilities(model: nn.Module, tokens: Tensor) -> Tensor:
    """Log-probabilities of each next token, float32 [passages, tokens, vocabulary]."""
    with in_evaluation(model), takes_tokens(model):
        answer = model(tokens.to(next(model.parameters()).device))
    logits = answer if isinstance(answer, Tensor) else getattr(answer, "logits", None)
    if not isinstance(logits, Tensor):
        raise UnsupportedError(f"{type(model).__name__} returns no logits, by which sensitivity is measured: name the formats yourself")
    return torch.log_softmax(logits.float(), dim=-1)


def _divergence(model: nn.Module, original: Sequence[Tensor], calibration: Calibration) -> float:
    total = 0.0
    for tokens, before in zip(calibration.tokens.split(calibration.batch), original, strict=True):
        after = _log_probabilities(model, tokens)
        total += float((before.exp() * (before - after)).sum(dtype=torch.float64))
    return max(0.0, total / calibration.tokens.numel())
