"""All that makes a quantized model faster without another format, in one call."""

from __future__ import annotations

import sys

from torch import nn

from halfbyte.errors import check_type
from halfbyte.nn.fused import fuse_


def optimize_(model: nn.Module) -> nn.Module:
    """Compile a quantized model into fused native calls, in place: the last call before it is used.

    It is `fuse_` and, for models of transformers or with parts of them, native calls in place of the forwards of decoder and encoder
    stacks, a lean loop of `generate`, and halfbyte's attention in place of torch's. A module that is replaced, changed, hooked or moved
    afterwards is noticed at the next call: its stack is compiled again, and what has no kernel is computed by transformers. Weights stay as
    they are, and the model is saved as before; results change by rounding, as these functions describe. The notes of `report(model)` name
    the layers that were left as they are, and why. `parallelize_`, `prune_` and adapters, which replace layers, come before.

    The first time that an architecture is met with the installed versions, a few tokens are computed with the plain and with the optimized
    model; where they differ by more than rounding, the model is left plain, with a warning (`self_check.py`).

    Args:
        model: A quantized model.

    Returns:
        `model`.

    Raises:
        ArgumentError: The model has no quantized layers.

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0")
        >>> hb.optimize_(model)(torch.randn(1, 32)).shape
        torch.Size([1, 4])
    """
    check_type(model, nn.Module, "optimize_ takes a model, a torch.nn.Module", "pass the model that quantize_ or load returned")
    if "transformers" not in sys.modules:  # then no part of the model is of transformers
        return fuse_(model)
    from halfbyte.integrations.transformers.attention import use_
    from halfbyte.integrations.transformers.optimize.forwards import replace_forwards_
    from halfbyte.integrations.transformers.optimize.self_check import SelfCheck, warn

    check = SelfCheck.start(model)
    if check is not None and check.verdict:
        warn(model, check.verdict)
        return model
    fuse_(model)
    use_(model)
    replace_forwards_(model)
    if check is not None:
        check.finish(model)
    return model
