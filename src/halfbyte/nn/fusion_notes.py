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
    """Add to the report that submodules are computed together, and drop the reason why they were not before."""
    joined = "+".join(names)
    drop_remarks(parent, rf"^{re.escape(joined)} {_ALONE}")
    before = getattr(parent, REMARK, "")
    if before.rpartition("; ")[2].startswith(_TOGETHER):
        setattr(parent, REMARK, f"{before}, {joined}")
    else:
        add_remark(parent, _TOGETHER + joined)


def note_alone(parent: nn.Module, names: Sequence[str], reason: str) -> None:
    """Add to the report why submodules are not all computed together, unless it has a reason for a larger group that contains them."""
    for remark in getattr(parent, REMARK, "").split("; "):
        group, separator, _ = remark.partition(f" {_ALONE}")
        if separator and {*names} < {*group.split("+")}:
            return
    add_remark(parent, f"{'+'.join(names)} {_ALONE}{reason}")
