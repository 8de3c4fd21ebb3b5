"""Triton's interpreter, mended, and that of 3.6 made faster: it spends its time on the types of values, and these hardly ever change."""

import functools
from typing import Any

import numpy as np
import triton
from triton.language import core
from triton.runtime import interpreter


def mend() -> None:
    """Lets loops run over bounds that are known at run time only: for NumPy 2.4 an array of one element is no index any more. Lets masks
    be combined with one scalar: since 3.8 loads refuse integers as masks, and a comparison's result was broadcast to these."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    splat = interpreter.InterpreterBuilder.create_splat

    def splat_bools(builder: Any, ret_ty: Any, arg: Any) -> Any:
        result = splat(builder, ret_ty, arg)
        if arg.data.dtype == np.bool_:
            result.data = result.data.astype(np.bool_)
        return result

    interpreter.InterpreterBuilder.create_splat = splat_bools
    interpreter._patch_lang_tensor = patched
    if triton.__version__.startswith("3.6."):
        _hurry()


def _hurry() -> None:
    """Takes out half of the time: what is found again and again is kept, and what nobody asks for is not made."""
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_scalar(interpreter._get_np_dtype)
    core.block_type.__init__ = _by_shape(core.block_type.__init__)
    _when_asked_for(core.block_type, "name", lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tuple.__init__ = _tuple
    _when_asked_for(core.tuple, "type", lambda self: core._type_for_tuple_values(self.values))


def _once_a_launch(patch_lang: Any) -> Any:
    """Each call of a function within a kernel looks for what its launch has replaced already."""

    def patched(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is triton.language or value is core]
        if languages and not any(core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()
        return patch_lang(fn)

    return patched


def _by_scalar(np_dtype: Any) -> Any:
    """The dtype of a block is that of its elements."""
    known: dict[str, np.dtype[Any]] = {}

    def found(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in known:
            known[name] = np_dtype(dtype)
        return known[name]

    return found


def _by_shape(init: Any) -> Any:
    """There are few shapes: each is looked at once."""
    known: dict[tuple[int, ...], tuple[Any, int]] = {}

    def found(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if sizes not in known:
            init(self, element_ty, shape)
            known[sizes] = self.shape, self.numel
            del self.name
        self.element_ty = element_ty
        self.shape, self.numel = known[sizes]

    return found


def _tuple(self: Any, args: Any, type: Any = None) -> None:
    """`core.tuple.__init__`, but for the type of what is in it."""
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)


def _when_asked_for(owner: Any, name: str, value: Any) -> None:
    """An attribute that is made when it is read."""
    attribute = functools.cached_property(value)
    attribute.__set_name__(owner, name)
    setattr(owner, name, attribute)
