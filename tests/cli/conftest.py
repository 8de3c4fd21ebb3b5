"""The commands, called in this process."""

from __future__ import annotations

import pytest
from commands import Answer, Run

from halfbyte.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> Answer:
        capsys.readouterr()
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return run
