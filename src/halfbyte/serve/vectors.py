"""/v1/embeddings and /v1/rerank: texts become embeddings, documents are ordered by their cosine with a query."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive

from halfbyte.serve.encoder import Encoder
from halfbyte.serve.metrics import Metrics
from halfbyte.serve.protocol import EmbeddingRequest, RerankRequest
from halfbyte.serve.replies import ApiError, json_reply, watching
from halfbyte.serve.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


class VectorService:
    """Answers requests for embeddings with one encoder."""

    def __init__(self, name: str, encoder: Encoder, settings: Settings, metrics: Metrics, executor: Executor) -> None:
        """Create a service.

        Args:
            name: The model's name in responses.
            encoder: Encodes texts, in a thread of its own.
            settings: Limits of requests.
            metrics: Counts tokens.
            executor: Counts tokens of texts, and writes responses, which would block the event loop.
        """
        self.name, self.encoder = name, encoder
        self._settings, self._metrics, self._executor = settings, metrics, executor

    async def embed(self, request: EmbeddingRequest, receive: Receive) -> Response:
        """Answer POST /v1/embeddings."""
        if request.dimensions not in (None, self.encoder.dimensions):
            raise ApiError(
                400, f"embeddings have {self.encoder.dimensions} dimensions, got {request.dimensions}: leave it out", param="dimensions"
            )
        given = [request.input] if isinstance(request.input, str) or isinstance(request.input[0], int) else request.input
        field = "input.{}" if given is request.input else "input"
        rows, tokens = await self._embeddings(given, receive, field.format)
        reply = partial(self._reply, rows, tokens, is_base64=request.encoding_format == "base64")
        return await asyncio.get_running_loop().run_in_executor(self._executor, reply)

    def _reply(self, rows: Tensor, tokens: int, *, is_base64: bool) -> Response:
        if is_base64:
            data: list[object] = [base64.b64encode(row.numpy().astype("<f4").tobytes()).decode("ascii") for row in rows]
        else:
            data = rows.tolist()
        items = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(data)]
        return json_reply({"object": "list", "data": items, "model": self.name, "usage": _usage(tokens)})

    async def rerank(self, request: RerankRequest, receive: Receive) -> Response:
        """Answer POST /v1/rerank."""
        documents = [document if isinstance(document, str) else document.text for document in request.documents]
        query, document = self.encoder.prompt("query"), self.encoder.prompt("document")
        texts = [query + request.query, *(document + text for text in documents)]
        rows, tokens = await self._embeddings(texts, receive, lambda index: f"documents.{index - 1}" if index else "query")
        scores = (rows[1:] @ rows[0]).tolist()
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
        results = [
            {
                "index": index,
                "relevance_score": scores[index],
                **({"document": {"text": documents[index]}} if request.return_documents is not False else {}),
            }
            for index in order
        ]
        return json_reply({"id": f"rerank-{uuid.uuid4().hex}", "model": self.name, "results": results, "usage": _usage(tokens)})

    async def _embeddings(self, given: Sequence[str | list[int]], receive: Receive, field: Callable[[int], str]) -> tuple[Tensor, int]:
        """Encode texts, and cancel that if the client disconnects.

        Args:
            given: The texts, or their token ids.
            receive: ASGI's, by which a disconnection is noticed.
            field: Returns the place of a text in the request, by its index.

        Returns:
            Embeddings float32 [texts, dimensions] of length 1, and the number of tokens of all texts.

        Raises:
            ApiError: A text is too long or not Unicode, there are too many, or the time is over.
        """
        if len(given) > self._settings.inputs:
            raise ApiError(400, f"a request has {self._settings.inputs} texts at most, got {len(given)}: ask several times")
        loop = asyncio.get_running_loop()
        texts, counts = await loop.run_in_executor(self._executor, partial(self._read, given, field))
        most = self.encoder.most_tokens
        if most is not None and max(counts) > most:
            at = field(counts.index(max(counts)))
            raise ApiError(400, f"a text has {most} tokens at most, got {max(counts)} in {at}: divide it", "context_length_exceeded", at)
        future = asyncio.wrap_future(self.encoder.encode(texts))
        try:
            async with asyncio.timeout(self._settings.seconds), watching(receive, future.cancel):
                rows = await future
        except TimeoutError as e:
            raise ApiError(504, "the time of this request is over: send fewer texts, or later", "timeout") from e
        except asyncio.CancelledError:
            if future.cancelled():
                raise ApiError(499, "the client has gone away") from None
            raise
        self._metrics.embedded(sum(counts))
        return rows, sum(counts)

    def _read(self, given: Sequence[str | list[int]], field: Callable[[int], str]) -> tuple[list[str], list[int]]:
        """Return texts, those of token ids too, and how many tokens each has."""
        texts = [text if isinstance(text, str) else self.encoder.decode(text) for text in given]
        for index, text in enumerate(texts):
            try:
                text.encode()
            except UnicodeEncodeError as e:
                raise ApiError(400, f"{field(index)} has a lone surrogate at character {e.start}: send UTF-8", param=field(index)) from e
        return texts, self.encoder.count(texts)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
