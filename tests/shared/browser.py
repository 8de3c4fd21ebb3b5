"""A headless Chromium, driven through ChromeDriver by its HTTP interface (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Without these Chromium looks its vendor's hosts up at every start.
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_START_SECONDS = 30.0


class Browser:
    """One window. Its methods raise AssertionError where the browser refuses."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        self._address = address
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = f"/session/{self._ask('/session', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"

    def open(self, path: Path) -> None:
        self._ask(f"{self._session}/url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """What a script returns, in plain types."""
        return self._ask(f"{self._session}/execute/sync", {"script": script, "args": []})

    def console(self) -> list[str]:
        """The messages since the last call, of scripts and of the browser itself."""
        return [entry["message"] for entry in self._ask(f"{self._session}/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._ask(self._session, None)

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, method="DELETE" if body is None else "POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(error.read().decode()) from None


@contextmanager
def browser(profile: Path, *, width: int = 1200, height: int = 900, phone: bool = False, dark: bool = False) -> Iterator[Browser]:
    """A window of this size, with an empty profile. The test is skipped where there is no Chromium.

    phone  with a screen of a phone: pages are as wide as their viewport says
    """
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("there is no Chromium to look at pages with: apt-get install chromium chromium-driver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    options: dict[str, Any] = {"binary": chromium, "args": flags}
    if phone:
        options["mobileEmulation"] = {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 2.0, "touch": True}}
    with subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait(port)
            window = Browser(f"http://127.0.0.1:{port}", options)
            try:
                yield window
            finally:
                window.close()
        finally:
            process.terminate()


def _wait(port: int) -> None:
    end = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
