"""vLLM serves vision-language models of halfbyte folders, vision tower included: the tokens after an image are those of transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from vllm_models import SIZES, float_compute
from vllm_worker import NEW, SETTINGS

import halfbyte as hb

pytest.importorskip("vllm", reason="vLLM is not installed: `make compat-vllm` tests the plugin")
pytest.importorskip("torchvision", reason="vLLM prepares images with torchvision")
Image = pytest.importorskip("PIL.Image")

SIDE = 56  # pixels
BEFORE, IMAGE, AFTER = [20, 21, 3], 5, [4, 22, 23, 24]
NAMES = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]  # tokens 3 to 6
TEXT = {**SIZES, "tie_word_embeddings": False}


class Family(NamedTuple):
    """A model with random weights, what prepares its prompts, from a tokenizer, and which layers are not quantized: the tower, or what vLLM
    has in floating point."""

    model: Any
    processor: Callable[[Any], Any]
    tower: tuple[str, ...]
    floats: tuple[str, ...]


def qwen2_vl() -> Family:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": SIZES["hidden_size"], "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    ids = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": IMAGE, "video_token_id": 6}
    text = {**TEXT, "rope_parameters": rope}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    images: Any = transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=SIDE * SIDE)
    videos: Any = transformers.Qwen2VLVideoProcessor()
    return Family(
        transformers.Qwen2VLForConditionalGeneration(config),
        lambda tokenizer: transformers.Qwen2VLProcessor(images, tokenizer, videos),
        ("*visual*",),
        ("*patch_embed*",),
    )


def llava(tower: str) -> Family:
    """LLaVA with a tower whose layers have other names in transformers than in vLLM."""
    vision = {"model_type": tower, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision |= {"image_size": SIDE, "patch_size": 14, **({"projection_dim": 64} if tower == "clip_vision_model" else {})}
    strategy, classes = ("default", 1) if tower == "clip_vision_model" else ("full", 0)  # SigLIP has no class token
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config=vision,
        image_token_id=IMAGE,
        vision_feature_select_strategy=strategy,
        image_seq_length=(SIDE // 14) ** 2,
        tie_word_embeddings=False,
    )
    images: Any = transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    how: Any = {"patch_size": 14, "vision_feature_select_strategy": strategy, "num_additional_image_tokens": classes}
    model: Any = transformers.LlavaForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.linear_2.weight, 0, 1)  # the image counts
    return Family(
        model,
        lambda tokenizer: transformers.LlavaProcessor(images, tokenizer, image_token=NAMES[2], **how),
        ("*vision_tower*",),
        ("*patch_embedding", "*position_embedding"),
    )


def make_folder(folder: Path, family: Family, skip: tuple[str, ...]) -> None:
    """Save the model with random weights and a head of its own, quantized, a tokenizer of words, and the processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    for name, parameter in family.model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    hb.save(hb.quantize_(family.model.eval(), float_compute("q4_0", skip=skip)), folder)
    words = ["<pad>", "<s>", "</s>", *NAMES]
    words += [f"w{i}" for i in range(SIZES["vocab_size"] - len(words))]
    backend: Any = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=NAMES
    )
    family.processor(tokenizer).save_pretrained(folder)


def expected_tokens(folder: Path, image: Any) -> list[int]:
    """The most likely tokens by transformers."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    found: Any = transformers.AutoProcessor.from_pretrained(folder).image_processor(images=[image], return_tensors="pt")
    grid = found.get("image_grid_thw")
    count = (SIDE // 14) ** 2 if grid is None else int(grid.prod()) // 4  # four patches of Qwen2-VL are a token
    ids = torch.tensor([[*BEFORE, *[IMAGE] * count, *AFTER]])
    prompt = ids.shape[1]
    for _ in range(NEW):
        types = {} if grid is None else {"mm_token_type_ids": (ids == IMAGE).int()}
        with torch.inference_mode():
            logits = model(input_ids=ids, **types, **found).logits[:, -1:].clone()
            logits[..., IMAGE] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1)], -1)
    return [int(token) for token in ids[0, prompt:]]


FAMILIES: dict[str, Callable[[], Family]] = {
    "Qwen2-VL": qwen2_vl,
    "LLaVA, CLIP": lambda: llava("clip_vision_model"),
    "LLaVA, SigLIP": lambda: llava("siglip_vision_model"),
}


@pytest.mark.parametrize("tower", ["float", "quantized"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_after_an_image(name: str, tower: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]()
    make_folder(tmp_path / "model", family, family.tower if tower == "float" else family.floats)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    settings = {name: value for name, value in SETTINGS.items() if name != "skip_tokenizer_init"}
    model = LLM(str(tmp_path / "model"), limit_mm_per_prompt={"image": 1}, **settings)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logit_bias={IMAGE: -1e9})
    answers = []
    for seed in range(2):
        image = Image.fromarray(np.random.RandomState(seed).randint(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))
        prompt = {"prompt_token_ids": [*BEFORE, IMAGE, *AFTER], "multi_modal_data": {"image": image}}
        (output,) = model.generate([prompt], sampling, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
        assert answers[-1] == expected_tokens(tmp_path / "model", image)
    assert answers[0] != answers[1], "the image counts"
