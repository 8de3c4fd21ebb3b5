"""Whether the output of one submodule feeds only another one, read from the source of their parent's methods: for fused.py."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType, FunctionType
from typing import TypeGuard

from torch import nn

_DATA = frozenset({"weight", "bias", "in_features", "out_features"})  # reading these of a submodule computes nothing with it


def feeds_only(parent: type[nn.Module], name: str, function: str) -> bool:
    """Return whether the methods of a class pass the output of the submodule `name` to the submodule `function`, and to nothing else.

    Each call of either must be part of `self.function(self.name(x))`, or of an assignment `y = self.name(x)` and a call `self.function(y)`
    in the next statement, after which nothing can read that y. For a class without source the answer is no.

    Example:
        >>> class Mlp(nn.Module):
        ...     def forward(self, x):
        ...         y = self.fc1(x)
        ...         return self.fc2(self.act(y))
        >>> feeds_only(Mlp, "fc1", "act"), feeds_only(Mlp, "act", "fc2")
        (True, True)
    """
    methods = [method for method in _methods(parent) if not {name, function}.isdisjoint(_names(method.__code__))]
    return bool(methods) and all(_method_feeds_only(method, name, function) for method in methods)


def _methods(parent: type) -> Iterator[FunctionType]:
    """Yield the functions of a class and its bases, also those behind decorators and properties, but for constructors."""
    for cls in parent.__mro__:
        for key, value in vars(cls).items():
            if isinstance(value, property):
                value = value.fget
            elif isinstance(value, staticmethod | classmethod):
                value = value.__func__
            method = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else None
            if key != "__init__" and isinstance(method, FunctionType):
                yield method


def _names(code: CodeType) -> set[str]:
    """Return the names of attributes and globals that a function and the functions within it read."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _method_feeds_only(method: FunctionType, name: str, function: str) -> bool:
    """Compute `feeds_only` of one method."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):  # there is no source, or it is part of an expression, as that of a lambda
        return False
    itself = method.__code__.co_varnames[:1]
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in {name, function}]
    data = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _DATA]
    paired = [*_nested_uses(tree, name, function), *_consecutive_uses(tree, name, function)]
    if not all(isinstance(use.value, ast.Name) and (use.value.id,) == itself for use in uses):
        return False
    return all(any(use is known for known in [*paired, *data]) for use in uses)


def _nested_uses(tree: ast.AST, name: str, function: str) -> Iterator[ast.expr]:
    """Yield the two submodules of each `self.function(self.name(…))`."""
    for outer in ast.walk(tree):
        if _calls(outer, function) and len(outer.args) == 1 and _calls(inner := outer.args[0], name):
            yield from (outer.func, inner.func)


def _consecutive_uses(tree: ast.AST, name: str, function: str) -> Iterator[ast.expr]:
    """Yield the two submodules of each `y = self.name(…)` before a statement with `self.function(y)`, the only one that reads that y."""
    loads = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    for first, second in _statement_pairs(tree):
        match first:
            case ast.Assign(targets=[ast.Name(id=variable)], value=inner) if _calls(inner, name):
                readers = [node for node in ast.walk(second) if isinstance(node, ast.Name) and node.id == variable]
                outer = next((node for node in ast.walk(second) if _calls(node, function) and node.args[0] in readers), None)
                is_alone = sum(isinstance(reader.ctx, ast.Load) for reader in readers) == 1
                if outer is not None and is_alone and (_ends(second, variable) or loads.count(variable) == 1):
                    yield from (inner.func, outer.func)


def _statement_pairs(tree: ast.AST) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    """Yield each two consecutive statements of a block of which the second has no blocks itself."""
    for node in ast.walk(tree):
        for _, block in ast.iter_fields(node):
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield from ((a, b) for a, b in pairwise(block) if isinstance(b, ast.Assign | ast.Return | ast.Expr))


def _ends(statement: ast.stmt, variable: str) -> bool:
    """Return whether nothing can read the value of a variable after a statement: it assigns the variable, or leaves the function."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=assigned)]):
            return assigned == variable
    return isinstance(statement, ast.Return)


def _calls(node: ast.AST, submodule: str) -> TypeGuard[ast.Call]:
    """Return whether an expression is `self.submodule(…)` with an argument; for `self`, see `_method_feeds_only`."""
    match node:
        case ast.Call(func=ast.Attribute(attr=attribute), args=[_, *_]):
            return attribute == submodule
    return False
