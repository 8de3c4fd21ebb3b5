"""Connections that send or read nothing, or too slowly, or are too many: they take no place from others."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from serving import Server, make_model, serve

from halfbyte.language.generate import Batch
from halfbyte.language.model import LanguageModel
from halfbyte.serve import app, connection
from halfbyte.serve import server as serve_server
from halfbyte.serve.connection import Connection
from halfbyte.versions import TESTED, VersionRange, why_untested

PROMPT = "the quick brown fox"
LONG = {"max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def connect(server: Server) -> socket.socket:
    sock = socket.create_connection((server.client.base_url.host, server.client.base_url.port or 80))
    sock.settimeout(10)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed a connection on which it sent nothing."""
    sock.settimeout(0.01)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.fixture
def few_connections(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of six connections."""
    monkeypatch.setattr(serve_server, "_SPARE_CONNECTIONS", 0)
    with serve(model, parallel=3, queue=3) as running:
        yield running


_UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: ", _UNFINISHED], ids=["nothing", "head", "body"])
def test_silent_connections_take_no_place(few_connections: Server, sent: bytes) -> None:
    server = few_connections
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(100)]
        for sock in silent:
            with suppress(ConnectionError):
                sock.sendall(sent)
        assert server.complete(PROMPT).status_code == 200
        assert sum(map(is_closed, silent)) >= 94
        with server.client.stream("POST", "/v1/completions", json={"prompt": PROMPT, **LONG, "max_tokens": 200}) as response:
            for _ in range(100):
                stack.enter_context(connect(server))
            assert "[DONE]" in response.read().decode(), "a running request is not disturbed"


def test_too_many_running_requests_are_refused(few_connections: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Batch.step

    def slow_step(self: Batch) -> Any:
        time.sleep(0.05)
        return step(self)

    monkeypatch.setattr(Batch, "step", slow_step)
    server = few_connections
    running = [connect(server) for _ in range(6)]
    body = json.dumps({"prompt": PROMPT, **LONG, "max_tokens": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for sock in running:
        sock.sendall(head.encode() + body)
    started = running[0].recv(12)
    assert started == b"HTTP/1.1 200"
    assert server.client.get("/health").status_code == 503
    for sock in running:
        received = b""
        while b"[DONE]" not in received:
            more = sock.recv(1 << 16)
            assert more
            received += more
        sock.close()
    assert server.client.get("/health").status_code == 200


def test_a_request_that_never_ends(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_HEAD_TIMEOUT", 0.3)
    with serve(model) as server, connect(server) as quiet, connect(server) as again, connect(server) as drop:
        again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert again.recv(1 << 12).startswith(b"HTTP/1.1 200")
        waiting, end = {quiet, again, drop}, time.monotonic() + 10
        while waiting and time.monotonic() < end:
            for sock in waiting - {quiet}:
                with suppress(ConnectionError):
                    sock.sendall(b"G")
            waiting = {sock for sock in waiting if not is_closed(sock)}
            time.sleep(0.05)
        assert not waiting


def test_a_reader_that_never_reads(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_SEND_TIMEOUT", 0.3)
    lost, abort = threading.Event(), Connection.abort

    def aborted(self: Connection) -> None:
        abort(self)
        lost.set()

    monkeypatch.setattr(Connection, "abort", aborted)
    with serve(model) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect((server.client.base_url.host, server.client.base_url.port))
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        assert lost.wait(20)


def test_bodies_that_arrive_slowly_take_bounded_memory(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones are refused while others fill what all may take; small ones are not."""
    monkeypatch.setattr(app, "_MOST_AT_ONCE", 2)
    size = 100_000
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode()
    fitting = 2 * size // (size - 1 - app._MOST_PARSED_HERE)
    with serve(model, body_bytes=size) as server, ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(fitting)]
        for client in clients:
            client.sendall(head + b" " * (size - 1))
        large = {"prompt": PROMPT, "max_tokens": 1, "user": "x" * (size - 1000)}
        deadline = time.monotonic() + 20
        while (found := server.client.post("/v1/completions", json=large)).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found.status_code == 503
        assert found.headers["Retry-After"] == "1"
        assert "the bodies of requests take too much memory at the moment: ask again later" in found.text
        assert server.complete(PROMPT, max_tokens=1).status_code == 200
        for client in clients:
            client.close()
        while (found := server.client.post("/v1/completions", json=large)).status_code == 503 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found.status_code == 200


def test_a_uvicorn_that_was_not_tested(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own protocol serves, without the limits that need private parts of it, and a warning says so."""
    monkeypatch.setitem(TESTED, "uvicorn", VersionRange("0.1", "0.2", "connections have no limits of time"))
    monkeypatch.setattr(Connection, "connection_made", lambda *_: pytest.fail("the private protocol is used"))
    why_untested.cache_clear()
    try:
        with pytest.warns(
            RuntimeWarning, match=r"uvicorn .* is newer than 0.2, .*: connections have no limits of time; install uvicorn 0.1"
        ):
            assert serve_server._protocol() == "h11"
        with serve(model) as server:
            assert server.complete(PROMPT, max_tokens=2).status_code == 200
    finally:
        why_untested.cache_clear()
