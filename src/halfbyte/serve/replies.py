"""Responses: JSON, errors in the shape of OpenAI's API, and streams of server-sent events.

Used by `app.py`, `completions.py` and `vectors.py`. The engine computes for a request as long as its client is connected: `watching` and
`EventStream` tell when it has disconnected, so that the request can be cancelled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # json.dumps makes one for each call


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP's status code.
        message: One sentence: what is wrong, what was received, what is allowed, what to do.
        code: A word for programs, such as "model_not_found".
        param: The parameter that is wrong.
        headers: Of the response.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers

    def document(self) -> dict[str, object]:
        """Return the error as OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def reply(self) -> Response:
        """Return the response."""
        return json_reply(self.document(), self.status, self.headers)


def shutting_down() -> ApiError:
    """Return the error of requests for which the server has no more time."""
    return ApiError(503, "the server is shutting down: ask another one, or later", "shutting_down", headers={"Retry-After": "5"})


def dumps(document: object) -> bytes:
    """Return compact JSON in ASCII: text with any characters is valid in it."""
    return _ENCODER.encode(document).encode("ascii")


def json_reply(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(dumps(document), status, headers, media_type="application/json")


def event(document: object) -> bytes:
    """Return a server-sent event."""
    return b"data: " + dumps(document) + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected. The body of its request must have been read, as that comes by `receive`, too."""
    while (await receive())["type"] != "http.disconnect":
        pass


class watching:
    """An asynchronous context in which `on_disconnect` is called once if the client disconnects."""

    def __init__(self, receive: Receive, on_disconnect: Callable[[], object]) -> None:
        self._receive, self._on_disconnect = receive, on_disconnect

    async def _watch(self) -> None:
        await disconnected(self._receive)
        self._on_disconnect()

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


class EventStream(Response):
    """A stream of server-sent events.

    It ends after the last event, when the client disconnects, and when the client reads so slowly that the time is over. `on_close` is
    called in each case, at least once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None], seconds: float, headers: dict[str, str]) -> None:
        """Create a stream, which is sent when Starlette calls it.

        Args:
            events: The events, as bytes.
            on_close: Called when the stream has ended; a disconnection calls it earlier, and it is called again then.
            seconds: Time after which a stream that is still being sent is cut.
            headers: Of the response.
        """
        super().__init__(None, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]  # 0, of the missing body
        self._events, self._on_close, self._seconds = events, on_close, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds), watching(receive, self._on_close):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for chunk in self._events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (TimeoutError, OSError):  # the client reads too slowly, or has gone away: the connection is of no more use
            pass
        finally:
            self._on_close()
