"""Prometheus metrics of a server, at /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from halfbyte.language.generate import Batch, Generation

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """Counts requests and tokens. Each server has a registry of its own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter("halfbyte_requests", "Requests by endpoint and status code", ("endpoint", "status"), registry=registry)
        self._request_seconds = Histogram(
            "halfbyte_request_seconds", "Time of a request", ("endpoint",), registry=registry, buckets=_SECONDS
        )
        self._prefill_seconds = Histogram(
            "halfbyte_prefill_seconds", "Time from when a prompt leaves the queue to its first token", registry=registry, buckets=_SECONDS
        )
        self._seconds_per_token = Histogram(
            "halfbyte_seconds_per_token", "Mean time from token to token of a sequence", registry=registry, buckets=_PER_TOKEN
        )
        self._prompt = Counter("halfbyte_prompt_tokens", "Tokens of prompts", registry=registry)
        self._cached = Counter("halfbyte_cached_prompt_tokens", "Tokens of prompts that were in the KV cache", registry=registry)
        self._new = Counter("halfbyte_generated_tokens", "Tokens that were generated", registry=registry)
        self._guessed = Gauge("halfbyte_guessed_tokens", "Tokens that speculative decoding has guessed", registry=registry)
        self._accepted = Gauge("halfbyte_accepted_tokens", "Guessed tokens that were right", registry=registry)
        self._running = Gauge("halfbyte_unfinished_sequences", "Sequences that run or wait", registry=registry)
        self._embedded = Counter("halfbyte_embedded_tokens", "Tokens of texts that were embedded", registry=registry)

    def request(self, endpoint: str, status: int, started: float) -> None:
        """Count a request.

        Args:
            endpoint: Its route.
            status: Of its response.
            started: Time of `time.perf_counter`.
        """
        self._requests.labels(endpoint, str(status)).inc()
        self._request_seconds.labels(endpoint).observe(time.perf_counter() - started)

    def first_token(self, generation: Generation) -> None:
        """Count the prompt of a sequence that has its first token."""
        self._prompt.inc(len(generation.prompt_ids))
        self._cached.inc(generation.cached_tokens)
        self._prefill_seconds.observe(generation.first_token - generation.started)

    def finished(self, generation: Generation) -> None:
        """Count a sequence that has ended."""
        if len(generation.ids) > 1:
            self._seconds_per_token.observe(1 / generation.decode_rate)

    def watch(self, batch: Batch, sequences: Callable[[], float]) -> None:
        """Read gauges whenever the metrics are asked for.

        Args:
            batch: Counts guessed and accepted tokens.
            sequences: Returns the number of sequences that run or wait.
        """
        self._running.set_function(sequences)
        self._guessed.set_function(lambda: batch.guessed)
        self._accepted.set_function(lambda: batch.accepted)

    def generated(self, tokens: int) -> None:
        """Count tokens of a step."""
        self._new.inc(tokens)

    def embedded(self, tokens: int) -> None:
        """Count texts that were embedded."""
        self._embedded.inc(tokens)

    def page(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self._registry)
