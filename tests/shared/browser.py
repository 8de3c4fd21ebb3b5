"""A headless Chromium, driven through chromedriver by the W3C's WebDriver protocol; tests that ask for it are skipped without it."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None,
    reason="Chromium is not installed: apt-get install chromium chromium-driver",
)
_FLAGS: tuple[str, ...] = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking")
_FLAGS += ("disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars")


class Browser:
    """One window."""

    def __init__(self, client: httpx2.Client, session: str) -> None:
        self._client, self._session = client, session

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        found = self._client.request(method, f"/session/{self._session}{path}", json={} if method == "POST" and body is None else body)
        value = found.json()["value"]
        assert found.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} has not become true"
            time.sleep(0.02)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """Set the size of the page; as on a phone, whose pages are as wide as their viewport says."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": size})

    def prefer(self, scheme: str) -> None:
        """Let the system prefer "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}})

    def type(self, selector: str, text: str) -> None:
        (element,) = self._call("POST", "/element", {"using": "css selector", "value": selector}).values()
        self._call("POST", f"/element/{element}/value", {"text": text})

    def click(self, selector: str) -> None:
        (element,) = self._call("POST", "/element", {"using": "css selector", "value": selector}).values()
        self._call("POST", f"/element/{element}/click")

    def log(self) -> list[str]:
        """Errors and warnings of the console since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"}) if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self) -> bytes:
        """A PNG file."""
        return base64.b64decode(self._call("GET", "/screenshot"))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            end = time.monotonic() + 20
            while True:
                try:
                    client.get("/status")
                    break
                except httpx2.ConnectError:
                    assert time.monotonic() < end
                    time.sleep(0.05)
            options = {"args": [*(f"--{flag}" for flag in _FLAGS), f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            try:
                yield Browser(client, session["sessionId"])
            finally:
                client.delete(f"/session/{session['sessionId']}")
    finally:
        driver.terminate()
        driver.wait(20)
