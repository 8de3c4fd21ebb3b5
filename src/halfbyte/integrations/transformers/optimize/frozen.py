"""Whether modules of transformers are still what they were when something was compiled from them: `nn/frozen.py` with configurations."""

from __future__ import annotations

from transformers import PreTrainedConfig

from halfbyte.nn import frozen


class Frozen(frozen.Frozen):
    """The state of a module, of all that it consists of, and of its configuration."""

    containers = (*frozen.Frozen.containers, PreTrainedConfig)
