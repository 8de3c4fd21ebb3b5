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
from halfbyte.serve import server as serve_server

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
    monkeypatch.setattr(serve_server, "_HEAD_TIMEOUT", 0.3)
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
    monkeypatch.setattr(serve_server, "_SEND_TIMEOUT", 0.3)
    lost, abort = threading.Event(), serve_server._Connection.abort

    def aborted(self: serve_server._Connection) -> None:
        abort(self)
        lost.set()

    monkeypatch.setattr(serve_server._Connection, "abort", aborted)
    with serve(model) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect((server.client.base_url.host, server.client.base_url.port))
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        assert lost.wait(20)
