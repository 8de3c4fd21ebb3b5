"""What tests of CUDA graphs share."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.ops.graph_capture import CapturedGraph


def count_replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each graph captured from now on, how often it is replayed."""
    counts: list[int] = []
    capture, replay = CapturedGraph.capture, CapturedGraph.replay

    def counted(self: Any, run: Any) -> Any:
        found = capture(self, run)
        counts.append(0)
        return found

    def replayed(self: Any) -> None:
        counts[-1] += 1
        replay(self)

    monkeypatch.setattr(CapturedGraph, "capture", counted)
    monkeypatch.setattr(CapturedGraph, "replay", replayed)
    return counts
