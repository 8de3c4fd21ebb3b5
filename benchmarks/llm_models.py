"""The language models with synthetic weights that `llm.py` and `several_devices.py` measure: families, sizes, and how one is made.

The Llama has sizes of its own. Of every other family there is a "tiny" one to see that it runs, a "0.6b" of .3 to .7 billion weights for
CPUs, with a vocabulary of 32000, and a "4b", which has the shapes of a published model of 2 to 8 billion; mixtures of experts have a few of
that one's layers. What a config does not say is the default of its class in transformers.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

Sizes = dict[str, Any]


def _sizes(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, **more: Any) -> Sizes:
    found = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return found | {"intermediate_size": intermediate, "vocab_size": vocabulary} | more


class Family(NamedTuple):
    """Of the config that transformers calls so: what each has, and what those of a size have."""

    config: str
    always: Sizes
    sizes: dict[str, Sizes]


_TINY = _sizes(64, 2, 4, 2, 96, 400)
_SMALL, _SMALL_TIED = _sizes(1536, 21, 24, 8, 4096, 32000), _sizes(1536, 20, 24, 8, 4096, 32000)
_GRANITE = {"attention_multiplier": 0.015625, "residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0}


def _family(config: str, small: Sizes, large: Sizes, always: Sizes | None = None, tiny: Sizes | None = None, **whole: Sizes) -> Family:
    """whole: What a whole published model has in place of what is in `large`, by its size."""
    sizes = {"tiny": _TINY | (tiny or {}), "0.6b": small, "4b": large}
    return Family(config, always or {}, sizes | {size.removeprefix("size_"): large | more for size, more in whole.items()})


_HEADS, _WINDOW = {"head_dim": 16}, {"sliding_window": 6}
_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256}
_TINY_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
FAMILIES = {
    "llama": Family(
        "LlamaConfig",
        {"tie_word_embeddings": False},
        {
            "tiny": _TINY,
            "0.6b": _SMALL,
            "8b": _sizes(4096, 32, 32, 8, 14336, 128256),
            "70b": _sizes(8192, 80, 64, 8, 28672, 128256),
        },
    ),
    "mistral": _family(
        "MistralConfig", _SMALL | {"sliding_window": 1024}, _sizes(4096, 32, 32, 8, 14336, 32768, sliding_window=4096), tiny=_WINDOW
    ),
    "ministral3": _family(
        "Ministral3Config",
        _SMALL | {"head_dim": 64},
        _sizes(3072, 26, 32, 8, 9216, 131072, head_dim=128, tie_word_embeddings=True),
        tiny=_HEADS,
    ),
    "qwen2": _family("Qwen2Config", _SMALL, _sizes(3584, 28, 28, 4, 18944, 152064)),
    "qwen3": _family(
        "Qwen3Config",
        _sizes(1024, 28, 16, 8, 3072, 32000, head_dim=128),
        _sizes(2560, 36, 32, 8, 9728, 151936, head_dim=128, tie_word_embeddings=True),
        tiny=_HEADS,
    ),
    "phi3": _family("Phi3Config", _SMALL, _sizes(3072, 32, 32, 32, 8192, 32064)),
    "gemma": _family(
        "GemmaConfig", _sizes(1536, 20, 8, 1, 6144, 32000, head_dim=256), _sizes(2048, 18, 8, 1, 16384, 256000, head_dim=256), tiny=_HEADS
    ),
    "gemma2": _family(
        "Gemma2Config",
        _sizes(1536, 20, 8, 4, 6144, 32000, sliding_window=4096) | _GEMMA,
        _sizes(2304, 26, 8, 4, 9216, 256000, sliding_window=4096) | _GEMMA,
        tiny=_TINY_GEMMA,
    ),
    "gemma3": _family(
        "Gemma3TextConfig",
        _sizes(1152, 26, 4, 1, 6912, 32000, sliding_window=512) | _GEMMA,
        _sizes(2560, 34, 8, 4, 10240, 262208, sliding_window=1024) | _GEMMA,
        tiny=_TINY_GEMMA,
    ),
    "gemma4": _family(
        "Gemma4TextConfig",
        _sizes(1280, 24, 8, 1, 4608, 32000, num_kv_shared_layers=10, vocab_size_per_layer_input=32000),
        _sizes(2560, 42, 8, 2, 10240, 262144, num_kv_shared_layers=18),
        {"final_logit_softcapping": 30.0},
        _WINDOW | {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "vocab_size_per_layer_input": 400},
    ),
    "granite": _family("GraniteConfig", _SMALL, _sizes(2048, 40, 32, 8, 8192, 49155, tie_word_embeddings=True), _GRANITE),
    "smollm3": _family("SmolLM3Config", _SMALL_TIED, _sizes(2048, 36, 16, 4, 11008, 128256)),
    "olmo2": _family("Olmo2Config", _SMALL, _sizes(4096, 32, 32, 32, 11008, 100352)),
    "olmo3": _family(
        "Olmo3Config", _SMALL | {"sliding_window": 1024}, _sizes(4096, 32, 32, 32, 11008, 100278, sliding_window=4096), tiny=_WINDOW
    ),
    "glm4": _family("Glm4Config", _SMALL, _sizes(4096, 40, 32, 2, 13696, 151552, head_dim=128)),
    "ernie4.5": _family("Ernie4_5Config", _SMALL, _sizes(1024, 18, 16, 2, 3072, 103424, head_dim=128)),
    "hunyuan": _family(
        "HunYuanDenseV1Config",
        _SMALL | {"head_dim": 64},
        _sizes(3072, 36, 32, 8, 8192, 120818, head_dim=128, tie_word_embeddings=True),
        tiny=_HEADS,
    ),
    "cohere2": _family(
        "Cohere2Config",
        _SMALL_TIED | {"sliding_window": 1024, "head_dim": 64},
        _sizes(4096, 32, 32, 8, 14336, 256000, sliding_window=4096, head_dim=128),
        tiny=_HEADS | _WINDOW,
    ),
    "starcoder2": _family("Starcoder2Config", _SMALL, _sizes(3072, 30, 24, 2, 12288, 49152, sliding_window=4096)),
    "olmoe": _family(
        "OlmoeConfig",
        _sizes(1024, 16, 16, 16, 512, 32000, num_experts=64, num_experts_per_tok=8),
        _sizes(2048, 8, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8),
        tiny={"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    ),
    "qwen3-moe": _family(
        "Qwen3MoeConfig",
        _sizes(1024, 16, 16, 4, 3072, 32000, head_dim=128, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=384),
        _sizes(2048, 8, 32, 4, 6144, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
        {"norm_topk_prob": True},
        _HEADS | _EXPERTS,
        size_30b={"num_hidden_layers": 48},
    ),
    "mixtral": _family(
        "MixtralConfig",
        _sizes(1024, 12, 16, 4, 2048, 32000, num_local_experts=8, num_experts_per_tok=2),
        _sizes(4096, 3, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        tiny=_LOCAL_EXPERTS,
    ),
    "granite-moe": _family(
        "GraniteMoeConfig",
        _sizes(1024, 12, 16, 8, 512, 32000, num_local_experts=32, num_experts_per_tok=8),
        _sizes(1536, 32, 24, 8, 512, 49155, num_local_experts=40, num_experts_per_tok=8, tie_word_embeddings=True),
        _GRANITE,
        _LOCAL_EXPERTS,
    ),
    "gpt-oss": _family(
        "GptOssConfig",
        _sizes(1024, 12, 16, 4, 1024, 32000, head_dim=64, num_local_experts=16, num_experts_per_tok=4),
        _sizes(2880, 6, 64, 8, 2880, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4),
        tiny=_HEADS | _LOCAL_EXPERTS,
        size_20b={"num_hidden_layers": 24},
    ),
}
MXFP4, Q4_K_M = "mxfp4", "q4_k_m"  # formats that are mixed, as in files of llama.cpp
_Q4_0, _Q4_K, _Q6_K = 2, 12, 14  # ggml's numbers
_MOST_LAYERS = 4  # whose weights differ, in a file of more than twice as many
SIZES = sorted({size for family in FAMILIES.values() for size in family.sizes})


def make_config(family: str, size: str, longest: int = 2048, layers: int | None = None) -> Any:
    """Of a model for texts of so many tokens; with so many layers, in place of all."""
    import transformers

    found = FAMILIES[family]
    sizes = found.always | found.sizes[size] | ({} if layers is None else {"num_hidden_layers": layers})
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    return getattr(transformers, found.config)(**sizes, **tokens, max_position_embeddings=max(2048, longest))


def make_model(
    config: Any, device: str = "cpu", format: str | None = None, *, sparse: bool = False, optimized: bool = True, mesh: Any = None
) -> Any:
    """A causal model with random weights on the device, made layer by layer, the same for every contender.

    format     of the linear layers, and of an embedding that is not tied to the head, else q8_0, as in files of llama.cpp; mxfp4 is of
               experts alone, where there are any, all else is q8_0; None: floats
    sparse     linear layers are pruned first, to 2:4
    optimized  forwards are replaced, as `optimize_` does
    mesh       of processes that share it
    """
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from halfbyte.integrations.transformers.generate.generating import generate_fast
    from halfbyte.integrations.transformers.text import ready
    from halfbyte.nn.config import Config
    from halfbyte.nn.convert import quantize_
    from halfbyte.nn.fused import fuse_
    from halfbyte.nn.parallel.parallelize import parallelize_
    from halfbyte.nn.training.sparsity import prune_

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    tied, embedding, head = config.tie_word_embeddings, "model.embed_tokens", "lm_head"
    mixed = format == MXFP4 and any(hasattr(config, name) for name in ("num_experts", "num_local_experts"))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    layers = [[f"model.layers.{i}"] for i in range(config.num_hidden_layers)]
    known = "embed_tokens", "layers", "rotary_emb"
    others = [[f"model.{name}"] for name, _ in model.model.named_children() if name not in known]  # the last norm, and of Gemma 4 more
    for i, names in enumerate([*([[embedding, head]] if tied else [[embedding], [head]]), *layers, *others]):
        part = model.get_submodule(names[0]).to_empty(device=device)
        if head in names:
            model.lm_head.weight = part.weight
        torch.manual_seed(i)
        part.apply(model._init_weights)
        if names[0] == embedding:  # so large that tokens differ in the last layers, too, and use as many experts as in trained models
            torch.nn.init.normal_(part.weight, std=16.0)
        if format is not None and not names[0].endswith("norm"):  # in which there is nothing to quantize
            holder = nn.ModuleList([model.get_submodule(name) for name in names])
            if sparse:
                prune_(holder, "2:4")
            experts = {"*experts*": format} if mixed and names[0].startswith("model.layers") else {}
            linear = "q8_0" if mixed else format
            quantize_(holder, Config(linear, overrides=experts, embedding="q8_0" if tied else linear))
            for name, built in zip(names, holder, strict=True):
                model.set_submodule(name, built)
    if mesh is not None:
        parallelize_(model, mesh)
    if not optimized:
        generate_fast(fuse_(model))
        return model.eval()
    model = ready(model, device)
    if format is None and model.config._attn_implementation == "halfbyte":
        model.set_attn_implementation("sdpa")  # transformers' own
    return model


class _Synthetic:
    """Random weights by the names of a config's tensors, as `language.checkpoint_tensors.PackedTensors` reads them."""

    def __init__(self, config: Any, format: str, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from halfbyte.decoder.config import family_of_config

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        stacks = ".experts.gate_up_proj", ".experts.down_proj"
        self._shapes = {f"{name}.weight" if name.endswith(stacks) else name: shape for name, shape in shapes.items()}
        self.values = config.to_dict() | {"architectures": [type(model).__name__]}
        self.family = family_of_config(self.values)
        self._tied, self._format, self._device = config.tie_word_embeddings, format, device

    def names(self) -> set[str]:
        return {*self._shapes}

    def form(self, name: str) -> Any:
        from halfbyte.formats.spec import as_format
        from halfbyte.language.checkpoint_tensors import Form

        if len(self._shapes[name]) < 2 or name.endswith("bias") or "router" in name or ".gate.weight" in name:
            return None
        others = (self._tied and "embed_tokens" in name) or (
            self._format == MXFP4 and self.family.moe is not None and ".experts." not in name
        )
        return Form(as_format("q8_0" if others else self._format), "auto", "block")

    def shape(self, name: str) -> tuple[int, ...]:
        *rest, n, k = self._shapes[name]
        swapped = ".experts." in name and self.family.moe is not None and self.family.moe.inputs_first
        return (*rest, k, n) if swapped else (*rest, n, k)

    def codes(self, name: str) -> Any:
        import torch

        from halfbyte import ops

        weight = torch.empty(self.shape(name), device=self._device, dtype=torch.float32).normal_(0, 0.02)
        return ops.quantize(weight, self.form(name).format)

    def floats(self, name: str) -> Any:
        import torch

        if "norm" in name and name.endswith("weight"):
            return torch.full(self._shapes[name], 0.0 if self.family.unit_offset else 1.0)
        return torch.empty(self._shapes[name]).normal_(0, 0.02)


def make_spec(config: Any, device: str, format: str) -> Any:
    """The specification of a model with random weights, packed for the device, and the type of its activations."""
    import torch

    from halfbyte.decoder.build import build_spec
    from halfbyte.decoder.cache import OnGpu

    where = None if device == "cpu" else OnGpu(torch.device("cuda", 0), torch.bfloat16)
    weights = _Synthetic(config, format, device)
    tensors = _in_order(weights, where)
    return build_spec(weights.values, tensors), tensors.dtype


def _in_order(weights: Any, where: Any) -> Any:
    """The weights packed one after the other, as memory for what lies in between is that of one."""
    from halfbyte.language.checkpoint_tensors import PackedTensors

    class InOrder(PackedTensors):
        def each(self, reads: Any) -> list[Any]:
            return [read() for read in reads]

    return InOrder(weights, where=where)


def make_split_spec(config: Any, format: str, experts: int, context: int) -> tuple[Any, Any, Any]:
    """A plan with the routed experts of the first layers on the CPU, and what `make_spec` returns, for the first GPU."""
    import torch

    from halfbyte.decoder.build import build_spec
    from halfbyte.decoder.cache import OnGpu
    from halfbyte.decoder.offload.placement import Request, plan_of

    weights = _Synthetic(config, format, "cuda")
    tensors = _in_order(weights, OnGpu(torch.device("cuda", 0), torch.bfloat16))
    plan = plan_of(build_spec(weights.values, tensors.sized()), Request(None, context, experts=experts), tensors.dtype)
    tensors.placement = plan.placement
    return plan, build_spec(weights.values, tensors), tensors.dtype


def make_tokenizer(size: int) -> Any:
    """Bytes, and words that no text holds, so that there are `size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"word{i}" for i in range(size - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]


def make_file(config: Any, file: Path, folder: Path, device: str = "cpu", format: str = "q4_0") -> None:
    """The model as a GGUF file, for llama.cpp too; `folder`: where it is before that. One of many layers repeats the first ones. As
    "q4_k_m" it has other, random weights."""
    from halfbyte.checkpoint import save
    from halfbyte.checkpoint.export_checkpoint import export

    layers = config.num_hidden_layers
    few = min(layers, _MOST_LAYERS) if layers > 2 * _MOST_LAYERS else layers
    config.num_hidden_layers = few
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:few]
    save(make_model(config, device, "q4_0" if format == Q4_K_M else format), folder)
    make_tokenizer(config.vocab_size).save_pretrained(folder)
    config.num_hidden_layers = layers
    if few == layers and format != Q4_K_M:
        export(folder, file, "gguf")
        return
    export(folder, part := file.with_stem(f"{file.stem}-part"), "gguf")
    _repeat_layers(part, file, few, layers, mixed=format == Q4_K_M)
    part.unlink()


def _k_type(name: str, layers: int) -> int:
    """The type of a matrix in files called Q4_K_M (llama.cpp, src/llama-quant.cpp)."""
    found = re.match(r"blk\.(\d+)\.(?:attn_v|ffn_down)", name)
    layer, eighth = int(found[1]) if found else 0, layers // 8
    more = found and (layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2)
    return _Q6_K if more or name == "output.weight" else _Q4_K


def _random_blocks(kind: int, weights: int, deviation: float) -> Any:
    """So many weights as random blocks of 256: w = d * scale * q - dmin * min (4 bits), d * scale * (q - 32) (6 bits)."""
    import numpy as np

    size, places, factor = (144, (0, 2), 259.0) if kind == _Q4_K else (210, (208,), 1366.0)  # of w / d
    raw = np.random.default_rng(weights).integers(0, 256, (weights // 256, size), dtype=np.uint8)
    for place, multiple in zip(places, (1.0, 7.5), strict=False):
        raw[:, place : place + 2] = np.array([deviation / factor * multiple], np.float16).view(np.uint8)
    return raw


def _repeat_layers(source: Path, target: Path, few: int, layers: int, *, mixed: bool) -> None:
    """Write a GGUF file with the tensors of layer i % few of another one as those of layer i; `mixed`: with other types as Q4_K_M has."""
    import numpy as np
    import torch

    from halfbyte.io.gguf import Writer, read_header

    header, copies = read_header(source), dict[str, Any]()
    for name in header.entries:
        found = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
        places = [name] if found is None else [f"blk.{i}.{found[2]}" for i in range(int(found[1]), layers, few)]
        copies |= dict.fromkeys(places, header.entries[name])
    count = f"{header.metadata['general.architecture']}.block_count"
    kinds = {
        name: _k_type(name, layers) if mixed and one.kind == _Q4_0 and one.shape[-1] % 256 == 0 else one.kind
        for name, one in copies.items()
    }
    writer = Writer(target, {**header.metadata, count: layers}, {name: (kinds[name], one.shape) for name, one in copies.items()})
    for name, one in copies.items():
        where = one.place
        if kinds[name] != one.kind:
            blocks = torch.from_numpy(_random_blocks(kinds[name], math.prod(one.shape), 16.0 if name.startswith("token_embd") else 0.02))
            writer.write(name, blocks.view(*one.shape[:-1], -1))
            continue
        raw = np.fromfile(source, np.uint8, where.spec.nbytes, offset=where.offset)
        writer.write(name, torch.from_numpy(raw).view(where.spec.dtype).view(where.spec.shape))
    writer.finish()
