"""The check that `optimize_` makes the first time that it meets an architecture: the optimized model against the plain one.

`optimize_` replaces forwards of transformers' models, which change with its versions. So a prefill of a few tokens and two decode steps
(of encoders, one call) are computed before and after; where the outputs differ by more than rounding explains, the model is restored and
one warning tells the versions and the difference. The verdict is written to the cache folder, under a digest of the versions and of all
that selects kernels and code paths, and is read from there the next time. HALFBYTE_CHECK=0 turns the check off.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from halfbyte import __version__, env, ops
from halfbyte.decoder.cache import Cache
from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.integrations.transformers.attention import NAME as ATTENTION
from halfbyte.integrations.transformers.generate.gpu_text import lowered
from halfbyte.integrations.transformers.optimize.calls import KV_CACHE
from halfbyte.integrations.transformers.optimize.replaced import ReplacedForward, restore_class
from halfbyte.io.files import write_whole
from halfbyte.nn.fused import FusedLinear, GeluLinear
from halfbyte.nn.modules.experts import MixtureOfExperts, QuantExperts
from halfbyte.nn.modules.quantized import DerivedLinear, QuantLinear, QuantModule
from halfbyte.nn.parallel.parallelize import is_parallel
from halfbyte.nn.report import REMARK, add_notes

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

    from halfbyte.integrations.transformers.modules import Config, Part

_PREFILL, _STEPS = 5, 2  # tokens
_ANY_SIZE, _COLORS = 224, 3  # of images, where a model takes them of all sizes (SegFormer, RegNet)
_PACKAGES = ("torch", "transformers", "triton")
_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Error of activations quantized to int8: uniform of a scale's width, with the largest of a block at 3.5 standard deviations.
_INT8_ERROR = 3.5 / 127 / math.sqrt(12)
_LARGEST = 0.5  # a relative difference that no rounding explains


@dataclass
class SelfCheck:
    """The plain outputs of the models of transformers within a model, and its modules as they were.

    Attributes:
        verdict: what is wrong, as an earlier run has found it; None if nothing is known.
    """

    key: str
    models: list[PreTrainedModel]
    verdict: str | None
    plain: list[list[Tensor]]
    modules: list[tuple[nn.Module, str, nn.Module]]
    remarks: list[tuple[nn.Module, str | None]]
    attention: list[tuple[PreTrainedModel, str]]

    @classmethod
    def start(cls, model: nn.Module) -> SelfCheck | None:
        """Compute what the plain model gives; None if the check is off, was passed before, or cannot call the model."""
        models = [one for one in _outermost(model) if _is_callable(one)] if env.check() else []
        if not models:
            return None
        key = _digest(models)
        known = _read(key)
        if known == "":
            return None
        plain = list[list[Tensor]]()
        if known is None:
            try:
                plain = [_outputs(one) for one in models]
            except Exception as error:  # a model that takes other inputs
                add_notes(model, [f"not compared with the plain model, which cannot be called as the check does ({type(error).__name__})"])
                return None
        modules = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent._modules.items()
            if child is not None and not isinstance(child, QuantModule)
        ]
        remarks = [(module, vars(module).get(REMARK)) for module in model.modules()]
        inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        return cls(key, models, known, plain, modules, remarks, [(one, one.config._attn_implementation) for one in inner])

    def finish(self, model: nn.Module) -> None:
        """Compare the optimized model's outputs with the plain ones, and restore it, with a warning, where they differ."""
        failure = self._compare()
        _write(self.key, failure)
        if failure:
            self._restore(model)
            warn(model, failure)

    def _compare(self) -> str:
        for one, plain in zip(self.models, self.plain, strict=True):
            name = type(one).__name__
            try:
                found = _outputs(one, optimized=True)
            except Exception as error:  # whatever code that has changed may raise
                return f"an optimized {name} raises {type(error).__name__}: {error}"
            bound = tolerance(one)
            difference = max(map(relative_difference, found, plain))
            if not difference <= bound:
                return f"an optimized {name} differs by {difference:.2g} from the plain model, where rounding explains {bound:.2g}"
        return ""

    def _restore(self, model: nn.Module) -> None:
        for module in list(model.modules()):
            if isinstance(module, ReplacedForward):
                restore_class(module)
            if isinstance(module, MixtureOfExperts):
                module.fuses = False
            for name, child in list(module._modules.items()):
                if isinstance(child, (FusedLinear, GeluLinear)):
                    setattr(module, name, _separate(child))
        for parent, name, child in self.modules:
            if parent._modules.get(name) is not child:
                setattr(parent, name, child)
        for module, remark in self.remarks:
            module.__dict__.pop(REMARK, None)
            if remark is not None:
                setattr(module, REMARK, remark)
        for one, implementation in self.attention:
            if one.config._attn_implementation == ATTENTION != implementation:
                one.set_attn_implementation(implementation)


def warn(model: nn.Module, failure: str) -> None:
    """Tell, in a warning and in the report, that a model was left plain."""
    text = f"{failure} ({', '.join(_versions())}): the model is left plain; please report it, HALFBYTE_CHECK=0 optimizes it all the same"
    add_notes(model, [text])
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def tolerance(model: nn.Module) -> float:
    """Return the relative difference of outputs that rounding explains.

    Two computations that round differently by e in each of n products, which add up at random, differ by sqrt(2 n) e; 4 of these, as
    differences are not the same in all outputs.
    """
    products = [module for module in model.modules() if isinstance(module, (QuantLinear, QuantExperts))]
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.dtype in _ROUNDOFF} | {product.dtype for product in products}
    # Sums of K products in floating point: sqrt(K) roundings.
    longest = max((product.packed.shape[-1] for product in products), default=1)
    error: float = max(_ROUNDOFF[dtype] * (math.sqrt(longest) if dtype == torch.float32 else 1.0) for dtype in dtypes)
    if any(product.compute != "float" for product in products):
        error = max(error, _INT8_ERROR)
    return min(_LARGEST, 4 * math.sqrt(2 * max(1, len(products))) * error)


def relative_difference(found: Tensor, plain: Tensor) -> float:
    """Return ||found - plain|| / ||plain - mean(plain)||, with the mean of each row [..., N]; infinite where shapes or NaNs differ."""
    if found.shape != plain.shape or not torch.equal(found.isfinite(), plain.isfinite()):
        return float("inf")
    found, plain = (x.double().nan_to_num(0, 0, 0) for x in (found, plain))
    scale = (plain - plain.mean(-1, keepdim=True)).norm().clamp_min(torch.finfo(torch.float32).tiny)
    return float((found - plain).norm() / scale)


def _separate(linear: FusedLinear | GeluLinear) -> QuantLinear:
    """A linear layer that was fused, by itself."""
    packed = ops.pack(linear.codes(), linear.packed.device) if isinstance(linear, FusedLinear) else linear.packed
    derived = DerivedLinear(linear, packed)
    derived.__class__ = QuantLinear  # type: ignore[assignment]
    return derived


# What is called


def _outermost(model: nn.Module) -> list[PreTrainedModel]:
    """The models of transformers in a model that are in no other one."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [one for child in model.children() for one in _outermost(child)]


def _is_callable(model: PreTrainedModel) -> bool:
    """Whether the check knows how to call a quantized model that is not optimized yet."""
    parts = list(model.modules())
    tensors = chain(model.parameters(), model.buffers())
    return (
        model.main_input_name in ("input_ids", "pixel_values")
        and any(isinstance(part, QuantModule) for part in parts)
        and not any(isinstance(part, (ReplacedForward, FusedLinear, GeluLinear)) for part in parts)
        and not any(tensor.is_meta for tensor in tensors)
        and not is_parallel(model)
        and not torch.compiler.is_compiling()
    )


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, training in modes:
            module.training = training


def _outputs(model: Any, *, optimized: bool = False) -> list[Tensor]:
    """The first output of each call, of decoders at its last token. optimized: on a GPU decode as `generate` does."""
    device = model.device
    with _in_evaluation(model):
        if model.main_input_name == "pixel_values":
            return [_first(model(pixel_values=_image(model.config, device, model.dtype)))]
        ids = _ids(model, device)
        more = {"decoder_input_ids": ids[:, :_PREFILL]} if model.config.is_encoder_decoder else {}
        decodes = getattr(model.config, "is_decoder", False) or model.can_generate() or getattr(model.config, "use_cache", False)
        if more or not decodes:
            return [_first(model(input_ids=ids[:, :_PREFILL], **more))]
        parts, past = ids.split([_PREFILL, *[1] * _STEPS], 1), None
        if device.type == "cuda" and model.can_generate():
            compile_kernels(model, _PREFILL)
            past = DynamicCache(config=model.config)
            if optimized and not isinstance(found := lowered(model), str):
                cache = Cache(found[0].spec, where=found[0].where)
                found[0].prefill(parts[0][0].tolist(), cache)
                decoded = [found[0].decode(part[0].tolist(), cache).cpu() for part in parts[1:]]
                return [*_continued(model, parts[:1], past), *decoded]
        return _continued(model, parts, past)


def compile_kernels(model: Part, tokens: int) -> None:
    """Compile the GPU kernels of a prefill [1, tokens] and of a decode step side by side: one after the other takes several times as long.

    The model is called, and all of it runs but this package's kernels. As their results are undefined, a model must not find addresses in
    them: mixtures of experts are left out.
    """
    if why_no_triton() is not None or any(isinstance(part, MixtureOfExperts) for part in model.modules()):
        return
    from halfbyte.kernels.gpu.runtime import launch, tape

    ids, past = torch.zeros(1, tokens, dtype=torch.int64, device=model.device), DynamicCache(config=model.config)
    with torch.inference_mode(), torch.cuda.device(model.device):
        tape.why_not_replayed(model.device)
        with launch.compiling(model.device):
            for each in (ids, ids[:, :1]):
                model(input_ids=each, use_cache=True, **{KV_CACHE: past})


def _continued(model: nn.Module, parts: Sequence[Tensor], past: object) -> list[Tensor]:
    """The output at the last token of each part of a text."""
    found = list[Tensor]()
    for part in parts:
        outputs = model(input_ids=part, use_cache=True, **({} if past is None else {KV_CACHE: past}))
        found.append(_first(outputs)[:, -1])  # the first token of a text may have activations of another size, and rounding errors
        if (past := outputs.get(KV_CACHE)) is None:
            break
    return found


def _first(outputs: ModelOutput) -> Tensor:
    found: Tensor = outputs[0]
    return found.detach().float().cpu()


def _ids(model: Part, device: torch.device) -> Tensor:
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    return (torch.arange(1, _PREFILL + _STEPS + 1, device=device)[None] * 7919 + 3) % vocabulary


def _image(config: Config, device: torch.device, dtype: torch.dtype) -> Tensor:
    size, channels = getattr(config, "image_size", _ANY_SIZE), getattr(config, "num_channels", _COLORS)
    height, width = (size, size) if isinstance(size, int) else size
    values = torch.arange(channels * height * width, dtype=torch.float32, device=device)
    return values.mul(0.37).sin().view(1, channels, height, width).to(dtype)


# What is remembered


@cache
def _versions() -> tuple[str, ...]:
    found = [f"halfbyte {__version__}"]
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return tuple(found)


@cache
def _sources() -> str:
    texts = [path.read_bytes() for path in sorted(Path(__file__).parents[2].rglob("*.py"))]
    return hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()


def _digest(models: list[PreTrainedModel]) -> str:
    """Names what was checked: versions, and of each model its class, the settings of its config that are not sizes, devices and formats."""
    about: list[object] = [_versions(), _sources()]
    for one in models:
        config = one.config.get_text_config(decoder=True)
        switches = {name: _switch(value) for name, value in vars(config).items() if name != "_name_or_path"}
        kinds = {
            (type(part).__name__, str(part.packed.codes_format), getattr(part, "compute", ""), getattr(part, "activation", ""))
            for part in one.modules()
            if isinstance(part, QuantModule)
        }
        device = torch.cuda.get_device_name(one.device) if one.device.type == "cuda" else one.device.type
        layers = sorted(set(map(str, getattr(config, "layer_types", None) or ())))
        about.append([type(one).__qualname__, sorted(switches.items()), layers, sorted(kinds), device, str(one.dtype)])
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()


def _switch(value: object) -> object:
    return value if isinstance(value, (bool, str, type(None))) else type(value).__name__


def _path(key: str) -> Path | None:
    root = env.cache()
    return None if root is None else root / "checks" / f"{key}.json"


def _read(key: str) -> str | None:
    """What was found to be wrong, "" for nothing; None if nothing is known."""
    path = _path(key)
    try:
        found = None if path is None else json.loads(path.read_text(encoding="utf-8"))["trouble"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _write(key: str, failure: str) -> None:
    """Write a verdict, all of it or nothing. A full or read-only disk costs the memory of it, nothing else."""
    path = _path(key)
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps({"trouble": failure, "versions": _versions()}).encode())
