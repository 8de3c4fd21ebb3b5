"""A jinja2 environment for templates from elsewhere: sandboxed, and limited in work, memory and time.

Used by chat_template.py. jinja2's sandbox keeps a template from files and from Python's internals, not from running forever or from making
strings of gigabytes. Here a template may do so many steps and make so many characters, and whatever can take long or make something large
is counted before or as it happens:

- each pass of a loop, each call of a macro, method, filter or test is a step (`visit_For` … of `_Counted`, `call`, filters, tests);
- each string, list or dict that an operator, a slice, a call or a filter makes counts by its length, before it is made where it can be much
  longer than what it is made of;
- what is compared, printed or concatenated counts by its elements, nested ones as often as they occur.

All of that is in Python's own thread, so nothing has to be interrupted. The clock is a last resort.

Source: jinja2, sandbox.py
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from inspect import isgenerator
from string import Formatter
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from halfbyte.errors import CheckpointError

_CLOCK_STEPS = 1 << 10  # steps between two looks at the clock
_CHARACTERS_A_STEP = 64  # of a string that is compared or searched
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d*)(?:\.(?:\*|\d*))?")
_WIDE = re.compile(r"\d{5}")
_MOST_DIGITS = 10_000  # of an integer
_WIDEST_INDENT = 100
# Filters whose result is as long as the product of a number or text among their arguments and their input.
_PRODUCTS = {"batch", "center", "indent", "round", "slice", "wordwrap"}
# Filters that neither compare nor print elements: these may be many, and are not counted one by one.
_SHALLOW = {"batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr", "reverse"}
_SHALLOW |= {"select", "selectattr", "slice", "attr"}
_REMOVED_FILTERS, _REMOVED_GLOBALS = ("urlize",), ("lipsum",)  # can take long or make any amount of text; no template has use for them
_TYPES_WITH_LENGTH = (str, bytes, list, tuple, dict, set, frozenset)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a template may use.

    Attributes:
        steps: Passes of loops, calls, and elements that are compared or printed.
        characters: Characters and elements of all strings and lists that it makes, its output included.
        seconds: Time.
    """

    steps: int = 5_000_000
    characters: int = 32_000_000
    seconds: float = 30.0


class TemplateLimitError(CheckpointError):
    """A template has used more than its limits allow."""


@dataclass(slots=True)
class _Budget:
    """What a template has used of its limits so far.

    Attributes:
        limits: The limits.
        steps, characters: Used so far.
        next_look: Steps at which the clock is looked at again.
        end: Time of `time.monotonic` at which it is stopped.
    """

    limits: Limits
    steps: int = 0
    characters: int = 0
    next_look: int = _CLOCK_STEPS
    end: float = field(default=0.0)

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.limits.seconds

    def use(self, steps: int, characters: int = 0) -> None:
        """Count work, and raise TemplateLimitError where it is too much."""
        self.steps += steps
        self.characters += characters
        if self.steps > self.limits.steps:
            raise TemplateLimitError(f"it takes more than {self.limits.steps} steps")
        if self.characters > self.limits.characters:
            raise TemplateLimitError(f"it makes more than {self.limits.characters} characters")
        if self.steps >= self.next_look:
            self.next_look = self.steps + _CLOCK_STEPS
            if time.monotonic() > self.end:
                raise TemplateLimitError(f"it takes more than {self.limits.seconds:g} seconds")

    def use_value(self, value: object) -> None:
        """Count a value by its elements, nested ones as often as they occur, as when it is compared or becomes text."""
        if isinstance(value, str):
            self.use(1 + len(value) // _CHARACTERS_A_STEP)
            return
        if not isinstance(value, _TYPES_WITH_LENGTH):
            self.use(1)
            return
        stack: list[Any] = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
                self.use(1 + len(item))
            elif isinstance(item, list | tuple | set | frozenset):
                stack.extend(item)
                self.use(1 + len(item))
            elif isinstance(item, str | bytes):
                self.use(0, len(item))

    def use_result(self, value: object) -> object:
        """Count what an operation has made, and return it."""
        self.use(0, len(value) if isinstance(value, _TYPES_WITH_LENGTH) else 0)
        return value


_BUDGET: ContextVar[_Budget | None] = ContextVar("budget", default=None)


@contextmanager
def limited(limits: Limits) -> Iterator[None]:
    """Run templates of a LimitedEnvironment, which cannot run without, within limits."""
    token = _BUDGET.set(_Budget(limits))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def _budget() -> _Budget:
    budget = _BUDGET.get()
    if budget is None:
        raise RuntimeError("a template of a LimitedEnvironment runs within `limited` only")
    return budget


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox for templates that are run within `limited`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **settings: object) -> None:
        # Not optimized: constant expressions would be computed as the template is compiled.
        super().__init__(optimized=False, finalize=_finalize, extensions=["jinja2.ext.loopcontrols"], **settings)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name in _REMOVED_GLOBALS:
            del self.globals[name]
        self.filters.update({name: _counted_filter(name, function) for name, function in self.filters.items()})
        tests: Mapping[str, Any] = self.tests
        self.tests.update({name: _counted_test(function) for name, function in tests.items()})

    def add_filter(self, name: str, function: Callable[..., object]) -> None:
        """Add a filter, whose work is counted."""
        self.filters[name] = _counted_filter(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Counted().visit(tree)
        return tree.set_environment(self)  # type: ignore[return-value]  # returns the node itself

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Compute an operator that may make something large."""
        budget = _budget()
        budget.use(1, _length_of_binop(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a function or a method of a value."""
        budget = _budget()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", None)
        if isinstance(owner, LimitedEnvironment):  # counts for itself
            return __obj(*args)
        budget.use(1)
        stated = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}  # without jinja2's own
        if name in ("format", "format_map") and isinstance(method := getattr(__obj, "__wrapped__", None), BuiltinMethodType):
            _check_format(method.__self__, (*args, *stated.values()))  # type: ignore[arg-type]  # of a str
        elif isinstance(__obj, BuiltinMethodType) and owner is not None:
            _check_method(budget, __obj.__name__, owner, args, stated)
        elif name in ("changed", "fromkeys", "__call__") or isinstance(owner, dict):
            budget.use_value(args)
        return budget.use_result(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: object, argument: object) -> object:
        """Return an element or attribute; a tuple is hashed element by element."""
        if isinstance(argument, tuple):
            _budget().use_value(argument)
        return super().getitem(obj, argument)

    def count_pass(self, characters: int) -> bool:
        """Count a pass of a loop or a call of a macro, whose literal text has so many characters."""
        _budget().use(1, characters)
        return True

    def count_value(self, value: object) -> object:
        """Count a value that is compared or concatenated."""
        _budget().use_value(value)
        return value

    def count_result(self, value: object) -> object:
        """Count a value that has been made."""
        return _budget().use_result(value)

    def concatenate(self, *values: object) -> str:
        """Compute the operator ~."""
        budget = _budget()
        texts = []
        for value in values:
            budget.use_value(value)
            text = str(value)
            budget.use(0, len(text))
            texts.append(text)
        return "".join(texts)


@pass_context
def _finalize(context: Context, value: object) -> object:
    """Count what is printed. Takes the context so that jinja2 does not call it as it compiles."""
    budget = _budget()
    if not isinstance(value, str):
        budget.use_value(value)
        value = str(value)
    budget.use(1, len(value))
    return value


_Body = nodes.Macro | nodes.CallBlock | nodes.Block


class _Counted(NodeTransformer):
    """Inserts calls of the environment's counting methods into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        _count_body(self, node)
        if node.test is not None:
            node.test = nodes.And(_call(node, "count_pass", nodes.Const(0)), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: _Body) -> _Body:
        _count_body(self, node)
        return node

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _valued(node.expr)
        for operand in node.ops:
            operand.expr = _valued(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _valued(node.key)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _call(node, "concatenate", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _call(node, "count_result", node) if isinstance(node.arg, nodes.Slice) else node


def _count_body(visitor: _Counted, node: nodes.For | _Body) -> None:
    visitor.generic_visit(node)
    counts = _call(node, "count_pass", nodes.Const(_literal_characters(node.body)))
    node.body.insert(0, nodes.ExprStmt(counts, lineno=node.lineno))


def _valued(operand: nodes.Expr) -> nodes.Expr:
    return operand if isinstance(operand, nodes.Const) else _call(operand, "count_value", operand)


def _call(where: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Call:
    """Return a call of a method of the environment."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None, lineno=where.lineno)


def _literal_characters(body: Sequence[nodes.Node]) -> int:
    """Return the number of characters of text between tags."""
    inner = [data for node in body for data in node.find_all(nodes.TemplateData)]
    return sum(len(data.data) for data in [*inner, *(node for node in body if isinstance(node, nodes.TemplateData))])


def _length_of_binop(operator: str, left: object, right: object) -> int:
    """Return how long the result of an operator may be.

    Raises:
        TemplateLimitError: It is an absurdly large number, or formats one.
    """
    if operator == "+":
        return sum(len(value) for value in (left, right) if isinstance(value, _TYPES_WITH_LENGTH))
    if operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
                return len(sequence) * max(count, 0)
        return _checked_digits(_digits(left) + _digits(right))
    if operator == "**":
        return _checked_digits(_digits(left) * abs(right) if isinstance(left, int) and isinstance(right, int) else 0)
    if isinstance(left, str | bytes):  # % as of printf
        values = right if isinstance(right, tuple) else tuple(right.values()) if isinstance(right, Mapping) else (right,)
        _check_format(left, values)
        return len(left)
    return 0


def _digits(value: object) -> int:
    """Return roughly the decimal digits of an integer."""
    return 1 + value.bit_length() // 3 if isinstance(value, int) else 0


def _checked_digits(count: int) -> int:
    if count > _MOST_DIGITS:
        raise TemplateLimitError(f"it computes a number of more than {_MOST_DIGITS} digits")
    return count


def _check_format(template: str | bytes, values: Sequence[object]) -> None:
    """Raise TemplateLimitError for a format with a huge width, and count what is formatted."""
    budget = _budget()
    text = template.decode("latin-1") if isinstance(template, bytes) else template
    try:
        specifications = [spec for *_, spec, _ in Formatter().parse(text) if spec]
    except ValueError:  # a format for %, or an invalid one
        specifications = []
    specifications += _PERCENT.findall(text)
    computed = any("{" in spec or "*" in spec for spec in specifications)
    for value in values:
        budget.use_value(value)
        budget.use(0, (1 + text.count("{") + text.count("%")) * (len(value) if isinstance(value, _TYPES_WITH_LENGTH) else 1))
    if any(_WIDE.search(spec) for spec in specifications) or (computed and any(_WIDE.search(str(value)) for value in values)):
        raise TemplateLimitError("it formats a value with a width of 10000 or more")


def _check_method(budget: _Budget, name: str, owner: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Count the result of a builtin method before it is made: one that can be longer than its arguments, and what is compared."""
    numbers = sum(value for value in (*args, *kwargs.values()) if isinstance(value, int) and value > 0)
    length = len(owner) if isinstance(owner, _TYPES_WITH_LENGTH) else 1
    budget.use(length // _CHARACTERS_A_STEP)
    if name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
        budget.use(0, numbers)
    elif name == "expandtabs":
        budget.use(0, length * (numbers or 8))
    elif name == "replace" and len(args) >= 2 and isinstance(owner, str | bytes):
        budget.use(0, length + _replaced(owner, args[0], args[1]))
    elif name == "join" and args and isinstance(owner, str | bytes) and isinstance(args[0], _TYPES_WITH_LENGTH):
        budget.use_value(args[0])
        budget.use(0, len(owner) * len(args[0]))
    elif name == "translate" and args and isinstance(args[0], Mapping):
        budget.use(0, length * max((len(value) for value in args[0].values() if isinstance(value, str)), default=1))
    elif name in ("count", "index", "get"):
        budget.use_value(owner if name != "get" else None)
        for value in args:
            budget.use_value(value)


def _replaced(text: Any, old: object, new: Any) -> int:
    """Return how many characters replacing adds at most."""
    if not isinstance(old, type(text)) or not isinstance(new, type(text)):
        return 0
    return int(text.count(old)) * len(new) if old else (len(text) + 1) * len(new)


def _counted_filter(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Return a filter that counts its input before and its result after it has run."""

    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)  # takes jinja2's mark with it, by which a filter gets the environment or the context
    def counted(*args: object, **kwargs: object) -> object:
        budget = _budget()
        value, rest = args[first], (*args[first + 1 :], *kwargs.values())
        if name in ("join", "sum") and not isinstance(value, _TYPES_WITH_LENGTH) and hasattr(value, "__iter__"):
            value = list(value)
            args = (*args[:first], value, *args[first + 1 :])
        if name in _SHALLOW:
            budget.use(1)
        else:
            budget.use_value(value)
            for other in rest:
                budget.use_value(other)
        _check_filter(budget, name, value, rest)
        result = function(*args, **kwargs)
        return _counted_elements(result) if isgenerator(result) else budget.use_result(result)

    return counted


def _check_filter(budget: _Budget, name: str, value: object, rest: Sequence[object]) -> None:
    """Count the result of a filter that can be much longer than its arguments before it is made."""
    if name == "format":
        _check_format(str(value), rest)
    elif name == "replace" and len(rest) >= 2:
        budget.use(0, _replaced(str(value), str(rest[0]), str(rest[1])))
    elif name == "join" and isinstance(value, _TYPES_WITH_LENGTH):
        budget.use(0, len(value) * sum(len(other) for other in rest if isinstance(other, str)))
    elif name == "tojson" and any(_length(other) > _WIDEST_INDENT for other in rest):
        raise TemplateLimitError(f"it indents JSON by more than {_WIDEST_INDENT}")
    elif name == "sum" and any(isinstance(other, list | tuple) for other in rest):
        raise TemplateLimitError("it adds up lists")
    elif name in _PRODUCTS:
        budget.use(0, (1 + _length(value)) * sum(_length(other) for other in rest))


def _length(value: object) -> int:
    return len(value) if isinstance(value, _TYPES_WITH_LENGTH) else max(value, 1) if isinstance(value, int) else 1


def _counted_elements(elements: Iterator[object]) -> Iterator[object]:
    """Yield the elements of a filter that makes them as they are needed."""
    for element in elements:
        _budget().use(1)
        yield element


def _counted_test(function: Callable[..., object]) -> Callable[..., object]:
    @wraps(function)
    def counted(*args: object, **kwargs: object) -> object:
        budget = _budget()
        budget.use(1)
        if len(args) > 1:  # is compared with something
            for value in args:
                budget.use_value(value)
        return function(*args, **kwargs)

    return counted
