"""All that makes a quantized model faster without another format, in one call."""

from __future__ import annotations

import sys

from torch import nn

from halfbyte.errors import check_type
from halfbyte.nn.fused import fuse_


def optimize_(model: nn.Module) -> nn.Module:
    """Lets a quantized model compute in fewer steps, in place, and returns it: the last call before it is used.

    It is `fuse_` and, for models of transformers or with parts of them, `shorten_` and halfbyte's attention in the place of torch's.
    Weights stay as they are, and the model is saved as before; results change by rounding, as these functions describe. The notes of
    `report(model)` name the layers that were left as they are, and why. `parallelize_`, `prune_` and adapters, which replace layers, come
    before. Raises ArgumentError for a model without quantized layers.
    """
    check_type(model, nn.Module, "optimize_ takes a model, a torch.nn.Module", "pass the model that quantize_ or load returned")
    fuse_(model)
    if "transformers" in sys.modules:  # or else no part of the model is of transformers
        from halfbyte.integrations.attention import use_
        from halfbyte.integrations.decoding import shorten_

        use_(model)
        shorten_(model)
    return model
