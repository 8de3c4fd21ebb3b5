"""The process of a server: its socket, models, signals and orderly end."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Literal, NamedTuple

import uvicorn

from halfbyte.errors import ArgumentError
from halfbyte.language.model import LanguageModel
from halfbyte.serve.app import Services, build
from halfbyte.serve.completions import TextService
from halfbyte.serve.encoder import Encoder
from halfbyte.serve.engine import Engine
from halfbyte.serve.metrics import Metrics
from halfbyte.serve.settings import Settings
from halfbyte.serve.vectors import VectorService
from halfbyte.versions import why_untested

_BACKLOG = 1024  # connections that the system accepts before the server does
_KEEP_ALIVE = 30  # seconds that a connection may be idle
_SPARE_CONNECTIONS = 256  # beyond those of the sequences that run and wait
_OTHER_FILES = 128  # file descriptors of the process that are no connections
_FLUSH = 2.0  # seconds for the last bytes of responses, after the time of grace
_TEXT_THREADS = 2  # that tokenize, render templates and compile grammars
# Seconds until the event loop lets the engine's thread run, which releases Python's lock in each launch of a step.
_SWITCH_INTERVAL = 1e-4


class Language(NamedTuple):
    """A language model to serve.

    Attributes:
        name: In requests.
        model: The model.
        defaults: Settings of sampling that its folder gives.
    """

    name: str
    model: LanguageModel
    defaults: dict[str, object]


class Sentences(NamedTuple):
    """An encoder to serve, by its name in requests."""

    name: str
    encoder: Encoder


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address, before a model is opened: clients wait until it is.

    Args:
        host: Name or address.
        port: 0: any free one.

    Returns:
        The socket.

    Raises:
        ArgumentError: The address is in use, or is none of this machine's.
    """
    if not 0 <= port <= 65535:
        raise ArgumentError(f"a port is 0 to 65535, 0 for any free one, got {port}")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as e:
        raise ArgumentError(f"{host} is no address of this machine ({getattr(e, 'strerror', None) or e}): use 127.0.0.1") from e
    try:
        if sys.platform != "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as e:
        sock.close()
        raise ArgumentError(f"cannot listen on {host} port {port} ({e.strerror or e}): choose another --port, or end what uses it") from e
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the URL of a socket that listens."""
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Serving:
    """The services of a process, and the threads that they have."""

    def __init__(self, settings: Settings, language: Language | None, sentences: Sentences | None) -> None:
        """Create the services of a language model, an encoder, or both.

        Args:
            settings: Limits of requests.
            language: The language model; None: the server has none.
            sentences: The encoder; None: the server has none.
        """
        metrics = Metrics()
        self._settings = settings
        self._executor = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="halfbyte-text")
        self._engine: Engine | None = None
        self._encoder: Encoder | None = None
        text = vectors = None
        if language is not None:
            name, model, defaults = language
            parallel = min(settings.parallel, model.most_sequences)
            batch = model.batch(parallel, prefix_bytes=settings.prefix_bytes)
            self._engine = Engine(batch, parallel=parallel, most_waiting=settings.queue, metrics=metrics)
            text = TextService(name, model, self._engine, settings, defaults, self._executor)
        if sentences is not None:
            self._encoder = sentences.encoder
            vectors = VectorService(sentences.name, self._encoder, settings, metrics, self._executor)
        self.app = build(Services(text, vectors, metrics), settings)

    def start(self) -> None:
        """Start the threads, for the event loop that runs."""
        if self._engine is not None:
            self._engine.start(asyncio.get_running_loop())
        if self._encoder is not None:
            self._encoder.start()

    def hurry(self) -> None:
        """Let `close` give requests no more time."""
        if self._engine is not None:
            self._engine.hurry()

    async def close(self) -> None:
        """Finish or end all requests, and stop the threads of the models."""
        if self._engine is not None:
            await self._engine.close(self._settings.grace)
        if self._encoder is not None:
            await asyncio.to_thread(self._encoder.close)

    def end(self) -> None:
        """Stop the threads that prepare requests and write responses, after `close` and the last response."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _most_connections(settings: Settings) -> int:
    """Return how many connections a server has at most. Raises the process's limit of file descriptors, as far as the system lets it."""
    wanted = settings.parallel + settings.queue + _SPARE_CONNECTIONS
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _BACKLOG + _OTHER_FILES  # asyncio accepts so many at once
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, (soft - _OTHER_FILES) // 2))


class _Server(uvicorn.Server):
    """A server that ends in order after SIGTERM and SIGINT, with the exit code of a success."""

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self._serving = serving

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Begin to shut down; a second signal ends running requests at once."""
        if self.should_exit:
            self._serving.hurry()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._serving.close())
        await super().shutdown(sockets)
        await closing
        self._serving.end()


def _protocol() -> type[asyncio.Protocol] | Literal["h11"]:
    """What handles a connection: with limits of time in the versions of uvicorn that were tested, its own protocol in others."""
    if why_untested("uvicorn") is not None:
        return "h11"
    from halfbyte.serve.connection import Connection

    return Connection


def make_server(serving: Serving, settings: Settings) -> uvicorn.Server:
    """Make the HTTP server of an application, which does not listen yet."""
    config = uvicorn.Config(
        serving.app,
        loop="asyncio",
        http=_protocol(),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_most_connections(settings) + 1,  # uvicorn refuses requests at this number, not above it
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(settings.grace + _FLUSH),
        backlog=_BACKLOG,
    )
    return _Server(config, serving)


def run(serving: Serving, sock: socket.socket, settings: Settings, ready: Callable[[], None]) -> None:
    """Serve until a signal ends the process.

    Args:
        serving: What to serve.
        sock: Listens.
        settings: Limits.
        ready: Called when requests are answered.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are of what clients did, a line for each request
    sys.setswitchinterval(_SWITCH_INTERVAL)

    async def main() -> None:
        serving.start()
        server = make_server(serving, settings)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            ready()
        await task

    asyncio.run(main())
