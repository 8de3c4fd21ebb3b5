"""`halfbyte serve` as a process: curl, signals, a port that is taken, what is missing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("pydantic")
pytest.importorskip("prometheus_client")
pytest.importorskip("llguidance")
pytest.importorskip("transformers")

from language_model import make_language_model

import halfbyte
from halfbyte.cli import main
from halfbyte.serve import server

CURL = shutil.which("curl") or ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that runs, and its URL."""
    command = [sys.executable, "-m", "halfbyte", "serve", str(folder), "--format", "q8_0", "--port", "0", "--device", "cpu", "--json"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(halfbyte.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HALFBYTE_API_KEY": "secret",
    }
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert running.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = running.stdout.readline()
            assert line, running.stderr.read() if running.stderr else ""
            text += line
        document = json.loads(text)
        assert document["models"] == ["tiny"]
        yield running, document["url"]
    finally:
        running.kill()
        running.communicate()


def curl(*arguments: str) -> str:
    return subprocess.run([CURL, "-sS", "--max-time", "20", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not CURL, reason="curl is not installed")
def test_curl_and_the_signal_that_ends_it(
    process: tuple[subprocess.Popen[str], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running, url = process
    key, kind = ("-H", "Authorization: Bearer secret"), ("-H", "Content-Type: application/json")
    assert json.loads(curl(f"{url}/health")) == {"status": "ok"}
    assert "API key" in json.loads(curl(f"{url}/v1/models"))["error"]["message"]
    body: dict[str, Any] = {"model": "tiny", "prompt": "the quick", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    found = json.loads(curl(f"{url}/v1/completions", *key, *kind, "-d", json.dumps(body)))
    assert found["usage"]["completion_tokens"] == 5
    streamed = curl("-N", f"{url}/v1/completions", *key, *kind, "-d", json.dumps({**body, "stream": True}))
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n")[:-2]]
    assert "".join(event["choices"][0]["text"] for event in events) == found["choices"][0]["text"]
    assert streamed.endswith("data: [DONE]\n\n")
    metrics = curl(f"{url}/metrics", *key)
    assert 'halfbyte_requests_total{endpoint="/v1/completions",status="200"} 2.0' in metrics
    assert "halfbyte_generated_tokens_total 10.0" in metrics
    assert "<title>halfbyte</title>" in curl(url)

    port = url.rpartition(":")[2]
    assert main(["serve", str(folder), "--port", port]) == 2, "two servers on a port"
    second = capsys.readouterr().err
    assert second.count("\n") == 1
    assert f"port {port} (Address already in use): choose another --port" in second
    assert json.loads(curl(f"{url}/health")) == {"status": "ok"}
    started = time.monotonic()
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=20)
    assert (running.returncode, errors) == (0, "")
    assert time.monotonic() - started < 10


def test_a_port_is_free_at_once_after_a_server_has_been_killed() -> None:
    """The system keeps the connections that the killed server had for a minute."""
    sock = server.listen("127.0.0.1", 0)
    address = sock.getsockname()
    with socket.create_connection(address) as client:
        connection, _ = sock.accept()
        connection.close()  # by the server's side, as when its process is killed
        sock.close()
        server.listen(*address).close()
        assert client.recv(1) == b""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "a port is 0 to 65535"),
        (["--host", "256.1.1.1"], "no address of this machine"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--parallel", "0"], "parallel is 1 or more"),
        (["--timeout", "0"], "above 0 seconds"),
        (["--api-key", ""], "an API key is"),
        (["--api-key", "a b"], "an API key is"),
        (["--format", "q9"], "q9"),
        (["--speculate", "1000"], "speculate=1000"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_what_is_refused(folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), "--port", "0", "--device", "cpu", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_models_that_cannot_be_served(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), str(folder)]) == 2
    assert "one language model and one encoder at most" in capsys.readouterr().err
    assert main(["serve", str(folder), "--port", "0", "--device", "cpu"]) == 2
    assert "--format q8_0" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "none")]) == 2
    assert "there is no" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert main(["serve", str(folder)]) == 2
    assert "pip install 'halfbyte[serve]'" in capsys.readouterr().err


def test_who_listens_further_without_a_key_is_warned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "run", lambda *_: None)
    for arguments, warned in ((["--host", "0.0.0.0"], True), (["--host", "0.0.0.0", "--api-key", "a"], False), ([], False)):
        assert main(["serve", str(folder), "--format", "q8_0", "--port", "0", "--device", "cpu", *arguments]) == 0
        assert ("--api-key" in capsys.readouterr().err) == warned
