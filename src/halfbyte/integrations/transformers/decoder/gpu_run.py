"""The layers of a decoder stack of transformers on an NVIDIA GPU: one new token of each sequence with a static cache (`decode_gpu.py`),
and prompts (`prefill_gpu.py`), by the kernels of `decoder/gpu_layer.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from halfbyte.integrations.transformers.decoder import decode_gpu, prefill_gpu
from halfbyte.integrations.transformers.decoder.compiled_layers import Call, Run
from halfbyte.integrations.transformers.decoder.layer_gpu import LoweredLayer

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part


class GpuRun(Run):
    """A call through the layers that kernels of a GPU compute."""

    def __init__(
        self,
        layers: Sequence[LoweredLayer | None],
        stack: Part,
        call: Call,
        changed: Callable[[int], Sequence[LoweredLayer | None] | None] | None = None,
    ) -> None:
        """Prepare a call.

        Args:
            layers: What kernels read of each layer, or None where transformers computes it.
            stack: The module of transformers.
            call: What all layers are called with.
            changed: Function from the index of a layer to None if that layer is as it was when it was lowered, and otherwise to `layers`
                as they are now. It is called just before the layer's launches, while the GPU computes the layer before it. None: no layer
                has changed.
        """
        super().__init__(stack, call)
        self._lowered, self._changed = layers, changed

    def _some(self, x: Tensor, first: int) -> tuple[Tensor, int]:
        if self._changed is not None and (layers := self._changed(first)) is not None:
            self._lowered = layers
        lowered, call, module = self._lowered[first], self._call, self._modules[first]
        y: Tensor | None = None
        if lowered is not None:
            per_layer_input = None if call.per_layer is None else call.per_layer[:, :, first]
            rotary, past = call.rotary[first], call.past
            if past is not None and past.layers:
                y = decode_gpu.token(module, lowered, x, call.masks[first], past.layers, rotary, per_layer_input, call.shared)
            if y is None:
                y = prefill_gpu.tokens(module, lowered, x, call.masks[first], past, rotary, per_layer_input, call.shared)
        return self._by_transformers(x, first) if y is None else y, first + 1
