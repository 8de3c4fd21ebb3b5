"""The ASGI application: routes, and the gate that every request passes."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halfbyte.serve import metrics as prometheus
from halfbyte.serve.completions import TextService
from halfbyte.serve.metrics import Metrics
from halfbyte.serve.page import page
from halfbyte.serve.protocol import ApiRequest, ChatRequest, CompletionRequest, EmbeddingRequest, LoadRequest, RerankRequest, parse
from halfbyte.serve.replies import ApiError, event, json_reply
from halfbyte.serve.settings import Settings
from halfbyte.serve.vectors import VectorService

_log = logging.getLogger("halfbyte.serve")
_PUBLIC_PATHS = ("/", "/health")  # need no key
_BODY_TIMEOUT = 60.0  # seconds that a client has to send its body
_MOST_PARSED_HERE = 1 << 16  # bytes of a body that is parsed on the event loop; a larger one would delay other requests
_MOST_DRAINED = 16  # times the limit: as much is read of a body that is too large, so that its client sees the response
_MOST_AT_ONCE = 16  # times the limit: what all bodies that are read at the same time may take
R = TypeVar("R", bound=ApiRequest)
S = TypeVar("S", TextService, VectorService)


@dataclass(frozen=True, slots=True)
class Services:
    """What a server serves: a language model, an encoder, or both.

    Attributes:
        text: The language model.
        vectors: The encoder.
        metrics: Of both.
    """

    text: TextService | None
    vectors: VectorService | None
    metrics: Metrics


def build(services: Services, settings: Settings) -> ASGIApp:
    """Build the application.

    Args:
        services: What answers requests.
        settings: Limits and keys.

    Returns:
        An ASGI application, the routes behind the `Gate`.
    """
    handlers = _Handlers(services, settings)
    routes = [
        Route("/", handlers.page),
        Route("/health", handlers.health),
        Route("/metrics", handlers.metrics),
        Route("/v1/models", handlers.models),
        Route("/v1/models/{name:path}", handlers.model),
        Route("/v1/completions", handlers.complete, methods=["POST"]),
        Route("/v1/chat/completions", handlers.chat, methods=["POST"]),
        Route("/load_model", handlers.load, methods=["POST"]),
        Route("/v1/embeddings", handlers.embed, methods=["POST"]),
        *(Route(path, handlers.rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),  # for Cohere's clients, too
    ]
    error_handlers = {HTTPException: _routing_error, ApiError: _api_error, Exception: _internal_error}
    paths = frozenset(route.path for route in routes)
    return Gate(Starlette(routes=routes, exception_handlers=error_handlers), settings, services.metrics, paths)


# Errors as responses in OpenAI's shape, called by Starlette


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked, headers = f"{request.method} {request.url.path[:200]}", dict(error.headers or {})
    if error.status_code == 405:
        message = f"{asked}: this path has another method; use {Headers(headers)['allow']}"
        return ApiError(405, message, "method_not_allowed", headers=headers).reply()
    if request.url.path.startswith("/v1/responses"):
        message = f"{asked}: this server does not have the Responses API; use /v1/chat/completions"
    else:
        paths = "/v1/chat/completions, /v1/completions, /v1/embeddings, /v1/rerank or /v1/models"
        message = f"{asked}: this path is none of this server's; use {paths}"
    return ApiError(error.status_code, message, "not_found", headers=headers).reply()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.reply()


async def _internal_error(request: Request, error: Exception) -> Response:
    return ApiError(500, "this is a fault of the server, which its log describes: report it").reply()


class Gate:
    """Checks the key and the host of a request, counts it, and answers errors in OpenAI's shape."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics, paths: frozenset[str]) -> None:
        """Wrap an application.

        Args:
            app: Gets the requests that pass.
            settings: Has the keys, and the host name that requests may ask.
            metrics: Counts requests.
            paths: Routes that metrics distinguish; all other paths are counted together, so that clients cannot add labels.
        """
        self._app, self._settings, self._metrics, self._paths = app, settings, metrics, paths
        self._keys = [key.encode() for key in settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started, status = time.perf_counter(), 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._check(scope)
                await self._app(scope, receive, counted)
            except ApiError as e:
                await e.reply()(scope, receive, counted)
            except ClientDisconnect:  # while it sent its body
                status = 499
            except Exception:  # `_internal_error` has answered it
                _log.exception("a request has failed")
        finally:
            path = scope["path"]
            self._metrics.request(path if path in self._paths else "other", status, started)

    def _check(self, scope: Scope) -> None:
        """Check the key of a request, or the host that it asks where no key is needed.

        Raises:
            ApiError: The key is missing or wrong, or a web page of another site may have sent the request.
        """
        headers = dict(scope["headers"])
        if self._keys:
            if scope["path"] not in _PUBLIC_PATHS and not self._has_key(headers):
                what = "the API key is wrong" if b"authorization" in headers else "an API key is needed"
                raise ApiError(
                    401, f"{what}: send the header Authorization: Bearer KEY", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
            return
        name = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if not (name in ("", "localhost", self._settings.host.lower()) or _is_address(name)):
            # A web page of another site may have had its name resolve to this server, to read what it answers (DNS rebinding).
            raise ApiError(403, f"this server has no API key, and is not asked by the host name {name[:100]!r}: start it with --api-key")

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def _host_name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Handlers:
    """The endpoints: each parses its request and calls the service that answers it."""

    def __init__(self, services: Services, settings: Settings) -> None:
        self._text, self._vectors, self._metrics = services.text, services.vectors, services.metrics
        self._bodies = _Bodies(settings.body_bytes)
        self._created = int(time.time())

    async def page(self, request: Request) -> Response:
        return Response(page.html(), media_type="text/html", headers=page.headers())

    async def health(self, request: Request) -> Response:
        if self._text is not None and not self._text.engine.is_ready:
            raise ApiError(503, "the server is shutting down, or its model has failed: start it again", "not_ready")
        return json_reply({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.page(), headers={"Content-Type": prometheus.CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        return json_reply({"object": "list", "data": self._models()})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for model in self._models():
            if model["id"] == name:
                return json_reply(model)
        raise self._unknown(name)

    async def load(self, request: Request) -> Response:
        """Say that a model is loaded: `transformers chat` asks before its first message."""
        asked = await self._read(LoadRequest, request)
        names = [model["id"] for model in self._models()]
        if asked.model not in (None, *names):
            raise self._unknown(str(asked.model))
        return Response(event({"status": "ready", "model": asked.model or names[0], "cached": True}), media_type="text/event-stream")

    def _models(self) -> list[dict[str, object]]:
        head = {"object": "model", "created": self._created, "owned_by": "halfbyte"}
        models: list[dict[str, object]] = []
        if self._text is not None:
            models.append({"id": self._text.name, **head, "max_model_len": self._text.positions, "chat": self._text.has_chat})
        if self._vectors is not None:
            encoder = self._vectors.encoder
            models.append({"id": self._vectors.name, **head, "max_model_len": encoder.most_tokens, "dimensions": encoder.dimensions})
        return models

    def _unknown(self, name: str) -> ApiError:
        names = ", ".join(str(model["id"]) for model in self._models())
        return ApiError(404, f"there is no model {name[:200]!r} here: ask for {names}", "model_not_found", "model")

    async def complete(self, request: Request) -> Response:
        service, body = self._service(self._text, await self._read(CompletionRequest, request), "write text")
        return await service.complete(body, request.receive)

    async def chat(self, request: Request) -> Response:
        service, body = self._service(self._text, await self._read(ChatRequest, request), "write text")
        return await service.chat(body, request.receive)

    async def embed(self, request: Request) -> Response:
        service, body = self._service(self._vectors, await self._read(EmbeddingRequest, request), "embed texts")
        return await service.embed(body, request.receive)

    async def rerank(self, request: Request) -> Response:
        service, body = self._service(self._vectors, await self._read(RerankRequest, request), "embed texts")
        return await service.rerank(body, request.receive)

    def _service(self, service: S | None, body: R, what: str) -> tuple[S, R]:
        """Return the service that answers a request, and the request.

        Args:
            service: The service of this endpoint; None: the server has no such model.
            body: The request, which may name a model.
            what: What the service does, for the error.

        Raises:
            ApiError: The server has no such model, or the model that the request names does something else.
        """
        if service is not None and body.model in (None, service.name):
            return service, body
        if body.model is not None and body.model not in [model["id"] for model in self._models()]:
            raise self._unknown(body.model)
        raise ApiError(
            404, f"{body.model or 'this server'} does not {what}: start halfbyte serve with a model that does", "model_not_found", "model"
        )

    async def _read(self, kind: type[R], request: Request) -> R:
        """Read and check the body of a request.

        Raises:
            ApiError: It is too large or too slow, no JSON, or not a request of this kind.
        """
        content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content != "application/json" and not content.endswith("+json"):
            # Web pages of other sites can send bodies of some other types without being asked by the browser for permission.
            raise ApiError(400, f"the body is JSON, got Content-Type {content[:100]!r}: send the header Content-Type: application/json")
        async with self._bodies.read(request) as body:
            return parse(kind, body) if len(body) < _MOST_PARSED_HERE else await asyncio.to_thread(parse, kind, body)


class _Bodies:
    """Reads the bodies of requests, with limits for each and for all that are read and parsed at the same time.

    The first _MOST_PARSED_HERE bytes of each are not counted in the sum: large bodies that arrive slowly do not keep small ones out.
    """

    def __init__(self, most: int) -> None:
        """most: bytes of one body; all together take _MOST_AT_ONCE times as many."""
        self._most, self._left = most, _MOST_AT_ONCE * most

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read a body, which is counted until the block ends.

        Raises:
            ApiError: It is larger than one may be, it and others are larger than all may be, or it has not arrived in time.
        """
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(_BODY_TIMEOUT):
                    await self._receive(request, body)
            except TimeoutError as e:
                raise ApiError(408, f"the body did not arrive within {_BODY_TIMEOUT:g} seconds: send it faster", "timeout") from e
            yield bytes(body)
        finally:
            self._left += _counted(len(body))

    async def _receive(self, request: Request, body: bytearray) -> None:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= self._most:
                more = _counted(size) - _counted(len(body))
                if more > self._left:
                    raise ApiError(
                        503, "the bodies of requests take too much memory at the moment: ask again later", "overloaded",
                        headers={"Retry-After": "1", "Connection": "close"},
                    )  # fmt: skip
                self._left -= more
                body += chunk
            elif size > _MOST_DRAINED * self._most:
                break
        if size > self._most:
            text = f"a body has {self._most} bytes at most, got {size} or more: send less"
            raise ApiError(413, text, "body_too_large", headers={"Connection": "close"})


def _counted(size: int) -> int:
    """The bytes of a body that count in the sum of all."""
    return max(0, size - _MOST_PARSED_HERE)
