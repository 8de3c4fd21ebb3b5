"""What the report says of the submodules that `fuse_` computes together, and of those that it does not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from halfbyte.nn.report import REMARK, add_remark, drop_remarks

WATCHED = "hooks, a forward of its own or a bias to train"  # why other code may rely on calls of a module
_TOGETHER = "computed together: "
_ALONE = "are not all computed together: "


def note_together(parent: nn.Module, names: Sequence[str]) -> None:
    """Note for the report that children of a module are computed together, which may not have been so before."""
    joined = "+".join(names)
    drop_remarks(parent, rf"^{re.escape(joined)} {_ALONE}")
    before = getattr(parent, REMARK, "")
    if before.rpartition("; ")[2].startswith(_TOGETHER):
        setattr(parent, REMARK, f"{before}, {joined}")
    else:
        add_remark(parent, _TOGETHER + joined)


def note_alone(parent: nn.Module, names: Sequence[str], reason: str) -> None:
    """Note for the report why children of a module are not all computed together, unless it says so of more of them."""
    noted = [text.partition(f" {_ALONE}") for text in getattr(parent, REMARK, "").split("; ")]
    if not any(mark and {*names} < {*subject.split("+")} for subject, mark, _ in noted):
        add_remark(parent, f"{'+'.join(names)} {_ALONE}{reason}")
