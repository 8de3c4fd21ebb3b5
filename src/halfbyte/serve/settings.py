"""The limits of a server: what one request may ask for, and how many run and wait."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.errors import ArgumentError
from halfbyte.language.sampling.sampler import Sampling


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and access of a server.

    Attributes:
        keys: API keys, one of which requests must have; empty: none is needed.
        host: Name or address that is listened on; without keys, requests must name it, an address or localhost as their host.
        parallel: Sequences that are decoded at the same time.
        queue: Sequences that wait, at most; further requests are refused with 429.
        prefix_bytes: Bytes of KV caches of earlier sequences that stay for prompts with the same beginning.
        body_bytes: Bytes of a request's body.
        prompt_tokens: Tokens of a prompt; None: as many as the model has positions for.
        new_tokens: Tokens of an answer; None: as many as fit the model.
        choices: Sequences of one request (`n`, or several prompts).
        inputs: Texts of one request for embeddings or reranking.
        seconds: Time of a request, in the queue, too; then it is ended with 504.
        grace: Seconds that running requests have after SIGTERM.
        temperature: Of requests that give none.

    Raises:
        ArgumentError: A value is out of its range.
    """

    keys: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    parallel: int = 16
    queue: int = 128
    prefix_bytes: int = 1 << 29
    body_bytes: int = 4 << 20
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    choices: int = 16
    inputs: int = 2048
    seconds: float = 600.0
    grace: float = 10.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("parallel", "body_bytes", "choices", "inputs", "prompt_tokens", "new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{name} is 1 or more, got {value}: allow at least 1")
        for name in ("queue", "prefix_bytes", "grace"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name} is 0 or more, got {getattr(self, name)}: 0 is for none")
        Sampling(temperature=self.temperature)  # raises where it is out of range
        if not self.seconds > 0:
            raise ArgumentError(f"the time of a request is above 0 seconds, got {self.seconds}: allow some seconds")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.keys):
            raise ArgumentError("an API key is printable ASCII without spaces, of one character or more: choose another one")
