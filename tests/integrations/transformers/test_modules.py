"""Types of modules and configurations of transformers: what halfbyte declares is what transformers gives."""

import inspect

from torch import nn
from transformers import LlamaConfig, LlamaModel

from halfbyte.integrations.transformers import modules


def test_part_is_for_type_checkers_alone() -> None:
    """torch.compile and isinstance meet transformers' own modules: no class of halfbyte stands between."""
    assert not hasattr(modules, "Part")
    assert "class Part(nn.Module)" in inspect.getsource(modules)


def test_attributes_of_a_family_are_no_tensors_or_modules() -> None:
    """Why torch's type of a module's attributes does not do: halfbyte reads numbers, texts and configurations of them."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 8}
    config = LlamaConfig(num_hidden_layers=1, **sizes)
    attention = LlamaModel(config).layers[0].self_attn
    read = [getattr(attention, name) for name in ("head_dim", "scaling", "layer_idx", "config")]
    assert not any(isinstance(value, nn.Module | nn.Parameter) for value in read)
    assert attention.config.num_key_value_heads == 1
