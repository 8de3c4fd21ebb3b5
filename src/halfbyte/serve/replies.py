"""Responses: JSON, errors in the shape of OpenAI's API, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
DONE = b"data: [DONE]\n\n"


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


def dumps(document: object) -> bytes:
    """Return compact JSON in ASCII: text with any characters is valid in it."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")


def json_reply(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(dumps(document), status, headers, media_type="application/json")


def event(document: object) -> bytes:
    """Return a server-sent event."""
    return b"data: " + dumps(document) + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone away; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class watching:
    """A context in which `gone` is called if the client goes away."""

    def __init__(self, receive: Receive, gone: Callable[[], object]) -> None:
        self._receive, self._gone = receive, gone

    async def _watch(self) -> None:
        await disconnected(self._receive)
        self._gone()

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


class EventStream(Response):
    """A stream of server-sent events.

    A client that goes away, or reads so slowly that the time is over, ends it: `closed` is called then, and also after the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], closed: Callable[[], None], seconds: float, headers: dict[str, str]) -> None:
        """Make a stream.

        Args:
            events: The events, as bytes.
            closed: Called once when the stream has ended, however it has.
            seconds: Time after which a stream that is still being sent is cut.
            headers: Of the response.
        """
        super().__init__(None, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events, self._closed, self._seconds = events, closed, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds), watching(receive, self._closed):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for chunk in self._events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (TimeoutError, OSError):  # the client reads too slowly, or has gone away: the connection is of no more use
            pass
        finally:
            self._closed()
