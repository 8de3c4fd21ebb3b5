"""`Encoder`: a sentence encoder, and the thread that owns it.

Texts of requests that arrive while others are encoded are encoded together, as one batch.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.serve.replies import ApiError, shutting_down

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import Tensor

_BATCH = 32  # texts that are encoded at a time


class _Task(NamedTuple):
    """Texts of one request, and where their embeddings go."""

    texts: list[str]
    result: Future[Tensor]


class Encoder:
    """Texts → embeddings.

    Attributes:
        most_tokens: Tokens of a text, at most.
        dimensions: Elements of an embedding.
    """

    def __init__(self, model: SentenceTransformer, *, most_waiting: int) -> None:
        """Wrap a model, whose thread does not run yet.

        Args:
            model: The encoder.
            most_waiting: Texts that wait, at most; more are refused. A single request may have more while none waits.
        """
        self._model, self._most_waiting = model, most_waiting
        # `encode` sets padding and truncation of its tokenizer, which threads that count tokens must not change before it has used them.
        self._counting = copy.deepcopy(model.tokenizer)
        self.most_tokens: int | None = model.max_seq_length
        # Renamed in sentence-transformers 6.
        dimensions = getattr(model, "get_embedding_dimension", None) or model.get_sentence_embedding_dimension
        self.dimensions = cast(int, dimensions())
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._waiting, self._closing = 0, False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="halfbyte-encoder", daemon=True)

    @classmethod
    def open(cls, path: Path, *, format: str | None = None, device: str = "cpu", most_waiting: int = 4096) -> Encoder:
        """Open an encoder.

        Args:
            path: A folder of sentence-transformers.
            format: Quantize it to this format; None: as it is. A quantized encoder is optimized.
            device: Where it computes.
            most_waiting: As for `Encoder`.

        Raises:
            UnsupportedError: The package sentence-transformers is missing.
            CheckpointError: It cannot be loaded.
        """
        from halfbyte.nn.config import Config
        from halfbyte.nn.convert import quantize_
        from halfbyte.nn.modules.quantized import QuantModule

        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as e:
            raise UnsupportedError(
                f"sentence encoders need the package sentence-transformers ({e}): pip install sentence-transformers"
            ) from e
        from halfbyte.integrations.transformers.optimize.optimizing import optimize_

        try:
            model = SentenceTransformer(str(path), device=device, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as e:
            raise CheckpointError(f"{path} cannot be loaded as a sentence encoder: {e}") from e
        if format is not None:
            quantize_(model, Config(format))
        if any(isinstance(module, QuantModule) for module in model.modules()):
            optimize_(model)
        return cls(model, most_waiting=most_waiting)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after the texts that wait; more are refused."""
        with self._lock:
            self._closing = True
            self._queue.put(None)
        self._thread.join(30.0)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text."""
        return [len(ids) for ids in self._counting(list(texts), truncation=False, verbose=False)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids.

        Raises:
            ApiError: There is no such token.
        """
        most = len(self._model.tokenizer) - 1
        if min(ids) < 0 or max(ids) > most:
            raise ApiError(400, f"token ids are 0 to {most}, got {min(ids)} to {max(ids)}: use the model's tokens", param="input")
        return str(self._model.tokenizer.decode(list(ids), skip_special_tokens=True))

    def prompt(self, kind: str) -> str:
        """Return the text that the model was trained to see before a "query" or a "document"; often ""."""
        return str((getattr(self._model, "prompts", None) or {}).get(kind) or "")

    def encode(self, texts: Sequence[str]) -> Future[Tensor]:
        """Encode texts in the encoder's thread.

        Args:
            texts: The texts, truncated to `most_tokens`.

        Returns:
            A future of their embeddings, float32 [texts, dimensions], of length 1.

        Raises:
            ApiError: Too many texts wait, or the server is shutting down.
        """
        task = _Task(list(texts), Future())
        with self._lock:
            if self._closing:
                raise shutting_down()
            if self._waiting and self._waiting + len(texts) > self._most_waiting:
                raise ApiError(
                    429,
                    f"{self._waiting} texts wait, {self._most_waiting} at most: ask again later",
                    "queue_full",
                    headers={"Retry-After": "1"},
                )
            self._waiting += len(texts)
            self._queue.put(task)
        return task.result

    def _run(self) -> None:
        """Encode what waits, requests together, until `close`."""
        while (task := self._queue.get()) is not None:
            tasks, ends = [task], False
            with suppress(queue.Empty):
                while sum(len(one.texts) for one in tasks) < _BATCH:
                    if (more := self._queue.get(block=False)) is None:
                        ends = True
                        break
                    tasks.append(more)
            self._encode([one for one in tasks if one.result.set_running_or_notify_cancel()])
            with self._lock:
                self._waiting -= sum(len(one.texts) for one in tasks)
            if ends:
                return

    def _encode(self, tasks: list[_Task]) -> None:
        texts = [text for task in tasks for text in task.texts]
        if not texts:
            return
        try:
            rows = self._model.encode(
                texts, batch_size=_BATCH, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
            ).float()
        except Exception as e:
            for task in tasks:
                task.result.set_exception(e)
            return
        start = 0
        for task in tasks:
            task.result.set_result(rows[start : start + len(task.texts)].cpu())
            start += len(task.texts)
