"""What the report says of fused submodules."""

from torch import nn

from halfbyte.nn.fusion_notes import note_alone, note_together
from halfbyte.nn.report import remarks


def test_reasons_go_when_they_no_longer_hold_and_are_said_of_the_larger_group() -> None:
    module = nn.Identity()
    note_alone(module, ["q", "k", "v"], "v is a Linear")
    note_alone(module, ["q", "k"], "they have hooks")
    note_alone(module, ["gate", "up"], "up is a Linear")
    reasons = "q+k+v are not all computed together: v is a Linear; gate+up are not all computed together: up is a Linear"
    assert remarks(module) == (reasons,)
    note_together(module, ["gate", "up"])
    note_together(module, ["fc1", "act"])
    assert remarks(module) == ("q+k+v are not all computed together: v is a Linear; computed together: gate+up, fc1+act",)
    note_together(module, ["q", "k", "v"])
    assert remarks(module) == ("computed together: gate+up, fc1+act, q+k+v",)
