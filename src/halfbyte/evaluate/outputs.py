"""How close a quantized model's outputs are to the original's, for the same inputs.

Embeddings are compared by direction (cosine) and by search results (top-1 and top-10 agreement); hidden states and logits by direction
and by their largest difference, logits also by their argmax. The error of the weights themselves is in the report of `halfbyte.nn`.
Everything here is computed in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.errors import ArgumentError

_QUERIES_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class EmbeddingQuality:
    """The result of `compare_embeddings`.

    n            embeddings compared
    queries      searches made
    mean_cosine  mean over the rows of the cosine between the reference's embedding and the candidate's
    min_cosine   the smallest of them
    top1         fraction of the queries for which both find the same nearest row
    top10        mean over the queries of |R & C| / |R|, where R and C are the 10 rows that the reference and the candidate find nearest
    """

    n: int
    queries: int
    mean_cosine: float
    min_cosine: float
    top1: float
    top10: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class OutputQuality:
    """The result of `compare_outputs`.

    n                    rows (positions) compared
    mean_cosine          mean over the rows of the cosine between the two
    min_cosine           the smallest of them
    max_relative         largest over the rows of max |candidate - reference| / max |reference|
    same_argmax          fraction of the rows whose largest entry is the same (for logits: the same next token)
    """

    n: int
    mean_cosine: float
    min_cosine: float
    max_relative: float
    same_argmax: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def compare_embeddings(reference: Tensor, candidate: Tensor, queries: tuple[Tensor, Tensor] | None = None) -> EmbeddingQuality:
    """Compare the embeddings of the same n texts by two models.

    reference, candidate   [n, d], float; n >= 1, without `queries` n >= 2
    queries                the embeddings of q queries by the reference and by the candidate, both [q, d]. Each model searches its own
                           corpus with its own queries. Without them every row is a query against all other rows.

    A search ranks rows by cosine, equal ones by index. With fewer than 10 rows to find, "top-10" is all of them.
    A row of zeros has the cosine 0 with everything. Raises ArgumentError on shapes that do not match and on NaN or Inf.
    """
    ref, cand = _unit_rows(reference, candidate, "embeddings")
    n = len(ref)
    if queries is not None:
        ref_q, cand_q = _unit_rows(*queries, "queries")
        if ref_q.shape[1] != ref.shape[1]:
            raise ArgumentError(f"queries have the width of the embeddings, {ref.shape[1]}, got {ref_q.shape[1]}")
    elif n < 2:
        raise ArgumentError("to compare embeddings without queries takes at least 2 of them, got 1; pass queries=(reference, candidate)")
    else:
        ref_q, cand_q = ref, cand
    k = min(10, n if queries is not None else n - 1)
    top1 = top10 = 0.0
    for start in range(0, len(ref_q), _QUERIES_AT_ONCE):
        rows = slice(start, start + _QUERIES_AT_ONCE)
        found_ref = _nearest(ref_q[rows], ref, k, start if queries is None else None)
        found_cand = _nearest(cand_q[rows], cand, k, start if queries is None else None)
        top1 += float((found_ref[:, 0] == found_cand[:, 0]).sum())
        top10 += float((found_ref[:, :, None] == found_cand[:, None, :]).any(-1).double().mean(-1).sum())
    cosine = (ref * cand).sum(-1).clamp(-1, 1)
    return EmbeddingQuality(n, len(ref_q), float(cosine.mean()), float(cosine.min()), top1 / len(ref_q), top10 / len(ref_q))


def compare_outputs(reference: Tensor, candidate: Tensor) -> OutputQuality:
    """Compare hidden states or logits [..., d] of the same input by two models; each row of d is one position.

    Raises ArgumentError on shapes that do not match, on NaN or Inf, and where there is nothing to compare.
    """
    if reference.shape != candidate.shape or reference.dim() < 1:
        raise ArgumentError(f"outputs of the same shape can be compared, got {list(reference.shape)} and {list(candidate.shape)}")
    flat_ref, flat_cand = (t.reshape(-1, t.shape[-1]).double().cpu() for t in (reference, candidate))
    ref, cand = _unit_rows(flat_ref, flat_cand, "outputs")
    cosine = (ref * cand).sum(-1).clamp(-1, 1)
    difference, largest = (flat_cand - flat_ref).abs().amax(-1), flat_ref.abs().amax(-1)
    # For a row of zeros any difference counts as 1.
    relative = torch.where(largest > 0, difference / largest.clamp_min(torch.finfo(torch.float64).tiny), (difference > 0).double())
    same = (flat_ref.argmax(-1) == flat_cand.argmax(-1)).double().mean()
    return OutputQuality(len(ref), float(cosine.mean()), float(cosine.min()), float(relative.max()), float(same))


def merge_outputs(parts: Sequence[OutputQuality]) -> OutputQuality:
    """Combine the results of `compare_outputs` for parts of the rows into that for all rows."""
    if not parts:
        raise ArgumentError("there are no outputs to merge")
    n = sum(part.n for part in parts)
    return OutputQuality(
        n=n,
        mean_cosine=sum(part.mean_cosine * part.n for part in parts) / n,
        min_cosine=min(part.min_cosine for part in parts),
        max_relative=max(part.max_relative for part in parts),
        same_argmax=sum(part.same_argmax * part.n for part in parts) / n,
    )


def batches_by_length(tokenizer: Any, texts: Sequence[str], batch_size: int, max_length: int) -> list[tuple[list[int], dict[str, Tensor]]]:
    """Tokenized batches of texts of similar length, to minimise padding: (indices into texts, inputs [b, t])."""
    ids = tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]
    order = sorted(range(len(texts)), key=lambda i: len(ids[i]))
    groups = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [
        (group, dict(tokenizer([texts[i] for i in group], truncation=True, max_length=max_length, padding=True, return_tensors="pt")))
        for group in groups
    ]


def pool(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The normalized mean of the hidden states [b, t, d] over the tokens of the mask [b, t]: float32 [b, d] of length 1."""
    mask = attention_mask.unsqueeze(-1).float()
    mean = (hidden.float() * mask).sum(1) / mask.sum(1).clamp_min(1)
    return nn.functional.normalize(mean, dim=-1)


@torch.inference_mode()
def embed(
    model: nn.Module,
    tokenizer: object,
    texts: Sequence[str],
    *,
    batch_size: int = 32,
    max_length: int = 256,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Embeddings of texts by an encoder, float32 [n, d] of length 1: the mean of its last hidden states (sentence-transformers' pooling).

    model      called with the tokenizer's output, returns `last_hidden_state`, like transformers' encoders
    tokenizer  a transformers tokenizer
    progress   called with the number of texts done, after each batch
    """
    if not texts:
        raise ArgumentError("there are no texts to embed")
    order: list[int] = []
    rows: list[Tensor] = []
    for indices, inputs in batches_by_length(tokenizer, texts, batch_size, max_length):
        rows.append(pool(model(**inputs).last_hidden_state, inputs["attention_mask"]))
        order += indices
        if progress is not None:
            progress(len(order))
    return torch.cat(rows)[torch.tensor(order, device="cpu").argsort()]


def _unit_rows(reference: Tensor, candidate: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Both, validated, as float64 [n, d] on the CPU with rows of length 1 (zeros stay zeros)."""
    if reference.dim() != 2 or reference.shape != candidate.shape or not reference.numel():
        raise ArgumentError(
            f"{name} are two tensors of the same shape [n, d] with n and d at least 1, "
            f"got {list(reference.shape)} and {list(candidate.shape)}"
        )
    unit = []
    for side, tensor in (("reference", reference), ("candidate", candidate)):
        rows = tensor.detach().double().cpu()
        bad = (~rows.isfinite()).any(-1).nonzero()
        if len(bad):
            raise ArgumentError(
                f"the {name} of the {side} are not finite: {len(bad)} of {len(rows)} rows hold NaN or Inf, the first is row {int(bad[0])}"
            )
        # Scaled by the largest element first, so that no square overflows or underflows.
        rows = rows / rows.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        unit.append(rows / rows.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny))
    return unit[0], unit[1]


def _nearest(queries: Tensor, corpus: Tensor, k: int, excluded: int | None) -> Tensor:
    """Indices [q, k] of the corpus rows with the largest cosines for each query; with `excluded`, query i excludes row own + i."""
    similarity = queries @ corpus.T
    if excluded is not None:
        rows = torch.arange(len(queries), device="cpu")
        similarity[rows, rows + excluded] = -torch.inf
    return similarity.argsort(dim=-1, descending=True, stable=True)[:, :k]
