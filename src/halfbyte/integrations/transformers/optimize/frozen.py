"""Whether modules of transformers are still what they were when something was compiled from them: `nn/frozen.py` with configurations."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from transformers import PreTrainedConfig

from halfbyte.nn import frozen
from halfbyte.nn.frozen import class_of


class Frozen(frozen.Frozen):
    """The state of a module, of all that it consists of, and of its configuration."""

    containers = (*frozen.Frozen.containers, PreTrainedConfig)


class FrozenLayers:
    """The state of a stack of layers: of each layer, and of everything else.

    A layer can be compared just before it is called, while a GPU computes the one before it.

    Attributes:
        outer: The state of the stack without its layers, with the list of them.
        layers: The state of each layer.
    """

    def __init__(self, stack: nn.Module, layers: Sequence[nn.Module], rewritten: Collection[nn.Module] = ()) -> None:
        """Remember the state of a stack; the arguments are those of `Frozen`."""
        seen = set(map(id, layers))
        self._classes, self._layers = list(map(class_of, layers)), list(layers)
        self.outer = Frozen(stack, rewritten, seen)
        self.layers = [Frozen(layer, rewritten, seen) for layer in layers]

    def is_unchanged(self) -> bool:
        """Whether the whole stack is as it was."""
        return self.is_unchanged_outside() and all(layer.is_unchanged() for layer in self.layers)

    def is_unchanged_outside(self) -> bool:
        """Whether everything is as it was but what the layers consist of."""
        return list(map(class_of, self._layers)) == self._classes and self.outer.is_unchanged()
