"""A client's connection: uvicorn's protocol for HTTP/1.1, with limits of time and number.

Its methods are those of `asyncio.Protocol`; `handle_events`, `on_response_complete`, `cycle`, `connections` and `limit_concurrency` are
private to uvicorn. `server.py` takes this protocol in the versions that `halfbyte.versions` lists as tested.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

_HEAD_TIMEOUT = 60.0  # seconds that a client has for the head of a request, from the connection or the last response on
_SEND_TIMEOUT = 60.0  # seconds that a client may read nothing of a response


class Connection(H11Protocol):
    """A connection with limits of time and number.

    Where there are too many, the one whose client has been silent for the longest time is closed, as nginx does with its idle connections:
    idle ones first, then those whose request has not arrived. So clients that open connections and send nothing, or a byte now and then,
    take no place from others. Where all wait for responses, uvicorn answers 503 by its `limit_concurrency`. h11 limits heads to 64 KiB.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _silent_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            others = [one for one in self.connections if one is not self and isinstance(one, Connection)]
            victims = [one for one in others if one._is_idle] or [one for one in others if one.cycle.more_body]
            if victims:
                min(victims, key=lambda one: one._silent_since).abort()

    def handle_events(self) -> None:
        super().handle_events()
        if not self._is_idle and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer, self._silent_since = None, self.loop.time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_idle:  # not where the client had sent another request already
            self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.loop.call_later(_SEND_TIMEOUT, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._send_timer):
            if timer is not None:
                timer.cancel()

    def abort(self) -> None:
        """Close the connection without waiting for the client to read what was sent, which it might never do."""
        self.connections.discard(self)  # at once, not when the loop gets to it: this connection is not to be chosen again
        self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._silent_since = self.loop.time()
        self._head_timer = self.loop.call_later(_HEAD_TIMEOUT, self.abort)
