"""Which of a module's children gets what another one returns, read from the bytecode of its class: for fused.py."""

from __future__ import annotations

import dis
import inspect
import re
from types import CodeType
from typing import NamedTuple

from torch import nn


class _Event(NamedTuple):
    """One operation of a method.

    Attributes:
        kind: "attribute" that is read, "LOAD" or "STORE" of a variable, "call", or "label", to which other code jumps.
        name: Of the attribute or the variable.
    """

    kind: str
    name: str = ""


def passes_on(parent: type[nn.Module], name: str, function: str) -> bool:
    """Whether the methods of a class pass what the child `name` returns to the child `function`, and to nothing else.

    They call `function(name(x))`; or assign `y = name(x)`, call `function(y)`, and read that y nowhere else.
    """
    methods = [inspect.unwrap(value) for cls in parent.__mro__ for key, value in vars(cls).items() if not key.startswith("__")]
    codes = [code for method in methods if (code := getattr(method, "__code__", None)) and {name, function} <= {*code.co_names}]
    return bool(codes) and all(_passes_on(_events(code), name, function) for code in codes)


def _passes_on(events: list[_Event], name: str, function: str) -> bool:
    """`passes_on` of one method."""
    return all(
        events[at + 1 : at + 2] == [_Event("attribute", name)] or _reads_variable_of(events, at, name)
        for at, event in enumerate(events)
        if event == _Event("attribute", function)
    )


def _reads_variable_of(events: list[_Event], at: int, name: str) -> bool:
    """Whether the function that is read at index `at` gets a variable in which a call of `name` was stored, and alone reads it."""
    read, after = events[at + 1], events[at + 2 :]
    stored = _Event("STORE", read.name)
    if read.kind != "LOAD" or after[:1] != [_Event("call")] or stored not in events[:at]:
        return False
    since = at - 1 - events[:at][::-1].index(stored)
    called = next((event for event in reversed(events[: since - 1]) if event.kind != "LOAD"), None)
    if events[since - 1].kind != "call" or called != _Event("attribute", name) or _Event("label") in events[since:at]:
        return False
    until_stored = after[: after.index(stored)] if stored in after else after
    return read not in (*events[since:at], *until_stored)


def _events(code: CodeType) -> list[_Event]:
    """Return the events of a method in the order of its bytecode, without loads of `self`."""
    events = list[_Event]()
    for step in dis.get_instructions(code):
        if step.is_jump_target:
            events.append(_Event("label"))
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            events.append(_Event("attribute", str(step.argval)))
        elif step.opname in ("CALL", "CALL_KW", "CALL_FUNCTION_EX"):
            events.append(_Event("call"))
        # argval is a tuple where an instruction has two variables, such as LOAD_FAST_LOAD_FAST of Python 3.13.
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        kinds = re.findall("(LOAD|STORE)_FAST", step.opname)
        events += [_Event(kind, name) for kind, name in zip(kinds, names, strict=False) if name != code.co_varnames[0]]
    return events
