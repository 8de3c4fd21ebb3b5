"""Triton 3.6's interpreter and NumPy 2.4: an array of one element is no index any more."""

from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Lets loops run over bounds that are known at run time only."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
