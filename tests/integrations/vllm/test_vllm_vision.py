"""vLLM serves a vision-language model of a halfbyte folder, vision tower included: the tokens after an image are those of transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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

SPECIAL = ["<pad>", "<s>", "</s>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
BEFORE, IMAGE, AFTER = [20, 21, 3], 5, [4, 22, 23, 24]


def make_model(folder: Path, skip: tuple[str, ...]) -> None:
    """Qwen2-VL with random weights and a head of its own, a tokenizer of words, and processors of images of at most 56 x 56."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    words = [*SPECIAL, *(f"w{i}" for i in range(SIZES["vocab_size"] - len(SPECIAL)))]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": SIZES["hidden_size"], "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    ids = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": IMAGE, "video_token_id": 6}
    config = transformers.Qwen2VLConfig(
        text_config={**SIZES, "rope_parameters": rope, "tie_word_embeddings": False}, vision_config=vision, tie_word_embeddings=False, **ids
    )
    model: Any = transformers.Qwen2VLForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    hb.save(hb.quantize_(model, float_compute("q4_0", skip=skip)), folder)
    backend: Any = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=SPECIAL[3:]
    )
    images: Any = transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    transformers.Qwen2VLProcessor(images, tokenizer, transformers.Qwen2VLVideoProcessor()).save_pretrained(folder)


def expected_tokens(folder: Path, image: Any) -> list[int]:
    """The most likely tokens by transformers."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    found: Any = transformers.AutoProcessor.from_pretrained(folder).image_processor(images=[image], return_tensors="pt")
    count = int(found["image_grid_thw"].prod()) // 4  # four patches are a token
    ids = torch.tensor([[*BEFORE, *[IMAGE] * count, *AFTER]])
    prompt = ids.shape[1]
    for _ in range(NEW):
        with torch.inference_mode():
            logits = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **found).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], -1)
    return [int(token) for token in ids[0, prompt:]]


@pytest.mark.parametrize("skip", [("*visual*",), ("*patch_embed*",)], ids=["float tower", "quantized tower"])
def test_tokens_after_an_image(skip: tuple[str, ...], tmp_path: Path) -> None:
    make_model(tmp_path / "model", skip)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    settings = {name: value for name, value in SETTINGS.items() if name != "skip_tokenizer_init"}
    model = LLM(str(tmp_path / "model"), limit_mm_per_prompt={"image": 1, "video": 0}, **settings)
    sampling, answers = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False), []
    for seed in range(2):
        image = Image.fromarray(np.random.RandomState(seed).randint(0, 255, (56, 56, 3), dtype=np.uint8))
        prompt = {"prompt_token_ids": [*BEFORE, IMAGE, *AFTER], "multi_modal_data": {"image": image}}
        (output,) = model.generate([prompt], sampling, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
        assert answers[-1] == expected_tokens(tmp_path / "model", image)
    assert answers[0] != answers[1], "the image counts"
