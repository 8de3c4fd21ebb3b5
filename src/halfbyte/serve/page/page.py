"""The chat page: page.html, one file that fetches nothing but this server's API."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from pathlib import Path

_FILE = Path(__file__).with_name("page.html")


@lru_cache(maxsize=1)
def html() -> bytes:
    """Return the page."""
    return _FILE.read_bytes()


@lru_cache(maxsize=1)
def headers() -> dict[str, str]:
    """Return its headers: the browser runs the page's own script and style alone, and connects to this server alone."""
    text = html().decode("utf-8")
    sources = {tag: [_hash(part) for part in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)] for tag in ("script", "style")}
    rules = {
        "default-src": ["'none'"],
        "connect-src": ["'self'"],
        "img-src": ["data:"],
        "script-src": sources["script"],
        "style-src": sources["style"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {' '.join(values)}" for name, values in rules.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"
