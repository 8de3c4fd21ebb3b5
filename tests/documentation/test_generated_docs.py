"""The pages of docs/ that scripts/generate_docs.py writes are current, and its traces find the bit that a layout moves."""

from __future__ import annotations

import generate_docs
import layout_diagrams
import pytest
import torch
from torch import Tensor

from halfbyte.formats import Codes, as_format


@pytest.mark.parametrize("name", ["cli.md", "layouts.md"])
def test_generated_pages_are_current(name: str) -> None:
    text = (generate_docs.DOCS / name).read_text(encoding="utf-8")
    assert text == generate_docs.text_of(name), "run python scripts/generate_docs.py, and commit what it writes"


def test_every_command_and_option_is_on_the_page() -> None:
    page = generate_docs.cli_page()
    assert "## explain\n" in page
    for needed in ("halfbyte quantize SRC DST (--format FORMAT | --bits BITS) [OPTIONS]", "| `--top-k` `K` |", "'\\*.mlp.\\*'"):
        assert needed in page


def test_a_trace_follows_the_bits() -> None:
    def swapped(codes: Codes) -> Tensor:
        """The canonical bytes with nibbles exchanged, and one byte of padding before."""
        data = codes.data.flatten()
        return torch.nn.functional.pad(data << 4 | data >> 4, (1, 0))

    trace = layout_diagrams.Trace(swapped, as_format("q4_0"), 2, 32)
    assert trace.bits[:8] == [None] * 8
    assert [field.kind for field in trace.fields] == ["padding", *["codes"] * 32]
    assert layout_diagrams._nibbles(trace, [1, 2, 17], rows=True) == [
        "byte       1   2  17",
        "bits 7-4  k0  k2  k0",
        "bits 3-0  k1  k3  k1",
        "row       n0  n0  n1",
    ]
