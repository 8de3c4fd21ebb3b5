"""A server in a thread of the test's process, on a real socket, with a tiny model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("pydantic")
pytest.importorskip("prometheus_client")
pytest.importorskip("llguidance")
pytest.importorskip("transformers")

from language_model import make_language_model

from halfbyte.language.model import LanguageModel
from halfbyte.serve import server
from halfbyte.serve.settings import Settings

POSITIONS = 4096


def make_model(folder: Path) -> LanguageModel:
    """A model of random weights with a chat template and 4096 positions."""
    make_language_model(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}), "utf-8")
    return LanguageModel.open(folder, format="q8_0")


class Server:
    """A server that runs.

    Attributes:
        url: Where it is.
        serving: Its parts.
        client: Of httpx.
    """

    def __init__(self, url: str, serving: server.Serving, key: str | None) -> None:
        self.url, self.serving = url, serving
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.client = httpx2.Client(base_url=url, timeout=30.0, headers=headers)

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.client.post(path, json=body)

    def complete(self, prompt: str | list[int] = "the quick", **settings: Any) -> httpx2.Response:
        return self.post("/v1/completions", prompt=prompt, **{"temperature": 0, "max_tokens": 8, **settings})

    def chat(self, content: str = "the quick", **settings: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", **{"messages": messages, "temperature": 0, "max_tokens": 8, **settings})

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        """Wait until no sequence runs or waits."""
        engine, end = self.serving._engine, time.monotonic() + seconds
        assert engine is not None
        while engine.unfinished:
            assert time.monotonic() < end, f"{engine.unfinished} sequences still run"
            time.sleep(0.005)


@contextmanager
def serve(
    model: LanguageModel | None = None,
    sentences: server.Sentences | None = None,
    *,
    defaults: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Serve a model, called "tiny", and an encoder, with settings of `Settings`; at the end the server must close in order."""
    sock, limits, ready = server.listen("127.0.0.1", 0), Settings(**{"grace": 0.2, **settings}), threading.Event()
    language = None if model is None else server.Language("tiny", model, defaults or {})
    serving = server.Serving(limits, language, sentences)
    ends: list[Any] = []

    async def main() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        serving.start()
        running = server.make_server(serving, limits)
        task = asyncio.create_task(running.serve(sockets=[sock]))
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        while not running.started:
            await asyncio.sleep(0.005)
        ready.set()
        await stop.wait()
        running.should_exit = True
        await task

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(20)
    found = Server(server.address_of(sock), serving, limits.keys[0] if limits.keys else None)
    try:
        yield found
    finally:
        found.client.close()
        ends[0]()
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"
