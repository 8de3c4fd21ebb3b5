"""Every family of `halfbyte.decoder.families` with the installed versions: quantized, fused and optimized models compute what
transformers computes, with every cache, with padding, in `generate`, and from every loader."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from optimized_models import native_calls
from packaging.version import Version
from tiny_decoders import CASES, vary_
from torch import Tensor
from transformers import DynamicCache, StaticCache

import halfbyte as hb
from halfbyte.decoder.families import FAMILIES
from halfbyte.integrations.transformers.decoder.live_layer import NAMES
from halfbyte.integrations.transformers.decoder.stack import is_compiled_stack
from halfbyte.integrations.transformers.optimize.replaced import name_in_transformers
from halfbyte.nn.modules.experts import MixtureOfExperts
from halfbyte.nn.modules.quantized import QuantModule

NEWEST_FAMILY = Version("5.23")  # the first version of transformers that has all families
TOKENS, PADDING = 24, (0, 7, 3)  # longer than windows of 5, 6, 7 and 9 tokens
STEPS = (7, 1, 1, 4, 1, 1, 9)  # tokens of a call
# By compute: how far logits may be from those of the same weights in transformers' own code, relative to the norm of all. float: float32
# sums in another order in two to four layers. int8: an activation that lies between two codes may get the other one, which moves an
# output by 1/127 of the largest activation of a block times a weight.
TOLERANCES = {"float": 1e-4, "int8": 0.03}
# With keys and values that are off by at most 1/253 of the largest of 32, in each layer; and where that may change the choice of experts.
TOLERANCES_OF_8_BITS = {"dense": 0.08, "experts": 0.5}
# One token takes a call for each layer of these models, and one for the whole of others.


class Models(NamedTuple):
    plain: Any  # quantized, in transformers' own code
    fused: Any
    optimized: Any
    compute: str

    @property
    def argument(self) -> str:
        """The name of the cache's argument, which transformers 5.24 has renamed."""
        return "cache" if "cache" in inspect.signature(type(self.plain).forward).parameters else "past_key_values"

    @property
    def config(self) -> Any:
        return self.plain.config.get_text_config()


CASES_OF_ALL = [*CASES, *(name for name in NAMES if name not in CASES)]


@functools.lru_cache(maxsize=2)
def make_models(case: str, compute: str) -> Models:
    assert case in CASES, f"tests/shared/tiny_decoders.py has no model with a {case}: add one to CASES"
    (package,) = (name for name, family in FAMILIES.items() if family.layer_class == case.partition(",")[0])
    home = f"{package}.modeling_{package}"
    if Version(transformers.__version__) < NEWEST_FAMILY and find_spec(f"transformers.models.{home.partition('.')[0]}") is None:
        pytest.skip(f"transformers {transformers.__version__} has no {home}")
    torch.manual_seed(7)
    plain = CASES[case]().eval()
    vary_(plain)
    hb.quantize_(plain, hb.Config("q4_0", compute=compute))
    return Models(plain, hb.fuse_(copy.deepcopy(plain)), hb.optimize_(copy.deepcopy(plain)), compute)


@pytest.fixture(params=[(case, compute) for case in CASES_OF_ALL for compute in TOLERANCES], ids="-".join, scope="module")
def models(request: pytest.FixtureRequest) -> Models:
    return make_models(*request.param)


@pytest.fixture(params=CASES_OF_ALL, scope="module")
def exact(request: pytest.FixtureRequest) -> Models:
    """Those that do not round activations."""
    return make_models(request.param, "float")


def ids_and_mask(batch: int = 1) -> tuple[Tensor, Tensor]:
    """Random tokens, the first sequence without padding on the left."""
    ids, mask = torch.randint(3, 99, (batch, TOKENS), generator=torch.Generator().manual_seed(1)), torch.ones(batch, TOKENS).long()
    for row, padded in enumerate(PADDING[:batch]):
        ids[row, :padded] = mask[row, :padded] = 0
    return ids, mask


@torch.no_grad()
def whole(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The logits of whole sequences in one call without a cache; 0 at padding."""
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits if mask is None else logits * mask[..., None]


@torch.no_grad()
def step_by_step(model: Any, argument: str, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same logits from several calls with a cache."""
    assert sum(STEPS) == ids.shape[1]
    found, at = [], 0
    for width in STEPS:
        seen = None if mask is None else mask[:, : at + width]
        found.append(model(input_ids=ids[:, at : at + width], attention_mask=seen, **{argument: cache}).logits)
        at += width
    logits = torch.cat(found, 1)
    return logits if mask is None else logits * mask[..., None]


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    error = float((found - expected).norm() / expected.norm())
    assert error <= tolerance, f"logits are off by {error:.2%}"  # NaN is not <= either


def test_every_family_has_a_case() -> None:
    assert {case.partition(",")[0] for case in CASES} == set(NAMES)


def test_layers_are_replaced(exact: Models, request: pytest.FixtureRequest) -> None:
    case = request.node.callspec.params["exact"]
    (stack,) = [module for module in exact.optimized.modules() if is_compiled_stack(module)]
    layers = exact.config.num_hidden_layers
    assert f"{layers} of {layers} layers take native calls" in str(hb.report(exact.optimized))
    assert {name_in_transformers(layer).rpartition(".")[2] for layer in stack.layers} == {case.partition(",")[0]}


def test_fast_paths_are_taken(exact: Models, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that a new version passes and halfbyte does not know sends calls to transformers' code: right, but slow."""
    calls = native_calls(monkeypatch)
    ids, _ = ids_and_mask()
    step_by_step(exact.optimized, exact.argument, DynamicCache(config=exact.config), ids)
    layers = exact.config.num_hidden_layers
    assert sum(count for *_, count in calls) == layers * len(STEPS)
    assert calls.count((1, 1, layers)) >= STEPS.count(1)


def test_whole_sequences(models: Models) -> None:
    for batch in (1, 3):
        ids, mask = ids_and_mask(batch)
        seen = mask if batch > 1 else None
        expected = whole(models.plain, ids, seen)
        for model in (models.fused, models.optimized):
            assert_near(whole(model, ids, seen), expected, TOLERANCES[models.compute])


CACHES: dict[str, Callable[[Any], Any]] = {
    "growing": lambda config: DynamicCache(config=config),
    "growing, without a config": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=TOKENS + 4),
    "8 bits": hb.Int8Cache,
}


@pytest.mark.parametrize("cache", CACHES)
def test_step_by_step(models: Models, cache: str) -> None:
    """What a sequence gives in pieces with a cache is what it gives as a whole without one."""
    check_steps(models, cache, *ids_and_mask()[:1])


@pytest.mark.parametrize("cache", CACHES)
def test_padding(exact: Models, cache: str) -> None:
    check_steps(exact, cache, *ids_and_mask(3))


def check_steps(models: Models, cache: str, ids: Tensor, mask: Tensor | None = None) -> None:
    if cache == "growing, without a config" and getattr(models.config, "num_kv_shared_layers", 0):
        pytest.skip("layers that share keys need a cache that knows of them")
    expected, tolerance = whole(models.plain, ids, mask), TOLERANCES[models.compute]
    plain, optimized = (
        step_by_step(model, models.argument, CACHES[cache](models.config), ids, mask) for model in (models.plain, models.optimized)
    )
    if cache == "8 bits":
        routed = any(isinstance(module, MixtureOfExperts) for module in models.plain.modules())
        assert_near(plain, expected, TOLERANCES_OF_8_BITS["experts" if routed else "dense"])
        # A code of a key that lies between two may differ by one.
        expected, tolerance = plain, max(tolerance, 0.01)
    else:
        assert_near(plain, expected, tolerance)
    assert_near(optimized, expected, tolerance)


ASKED: dict[str, dict[str, Any]] = {"growing": {}, "static": {"cache_implementation": "static", "disable_compile": True}}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("batch", [1, 3])
def test_generate(models: Models, batch: int, asked: str) -> None:
    ids, mask = ids_and_mask(batch)
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": mask}
    written = models.optimized.generate(ids, **how, **ASKED[asked])
    assert written.shape == (batch, TOKENS + 16)
    if models.compute == "float":
        assert torch.equal(written, models.plain.generate(ids, **how, **ASKED[asked]))
    # Each token is the likeliest one after those before it, up to rounding.
    mask = torch.cat((mask, torch.ones(batch, 16).long()), 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = models.plain(input_ids=written, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, TOKENS - 1 : -1]
    chosen = logits.gather(2, written[:, TOKENS:, None])[..., 0]
    assert float((logits.amax(2) - chosen).max()) <= 4 * TOLERANCES[models.compute] * float(logits.abs().max())


def test_loaders(exact: Models, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """From a saved model, from transformers' save_pretrained, and quantized while they are read from float weights."""
    torch.manual_seed(7)
    model, config = CASES[request.node.callspec.params["exact"]]().eval(), hb.Config("q4_0", compute="float")
    vary_(model)
    model.save_pretrained(tmp_path / "float")
    quantized = hb.quantize_(copy.deepcopy(model), config)
    hb.save(quantized, tmp_path / "saved")
    quantized.save_pretrained(tmp_path / "pretrained")
    hb.convert(tmp_path / "float", tmp_path / "converted", config)
    names = {name for name, module in quantized.named_modules() if isinstance(module, QuantModule)}
    ids, _ = ids_and_mask()
    expected = whole(quantized, ids)
    kind = type(model)
    for place, loaded in {
        "load, saved": hb.load(tmp_path / "saved"),
        "load, converted": hb.load(tmp_path / "converted"),
        "from_pretrained, saved": kind.from_pretrained(tmp_path / "saved"),
        "from_pretrained, pretrained": kind.from_pretrained(tmp_path / "pretrained"),
        "from_pretrained, float": kind.from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig(config)),
    }.items():
        assert {name for name, module in loaded.named_modules() if isinstance(module, QuantModule)} == names, place
        loaded.set_attn_implementation(model.config._attn_implementation)  # files do not tell it, and defaults leave Gemma 2's cap out
        assert_near(whole(loaded.eval(), ids), expected, 1e-6)
