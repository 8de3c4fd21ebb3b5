"""Neural networks in 4 and 8 bits, fast on the CPU or GPU at hand.

    model = halfbyte.quantize_(model, "q4_0")       # in place; Config says more: skip, overrides, method, …
    print(halfbyte.report(model))
    halfbyte.save(model, "small"); model = halfbyte.optimize_(halfbyte.load("small", device="cuda"))

Models        quantize_, Config, report; optimize_, fuse_; fold_batch_norms_; for transformers HalfbyteConfig,
              Int8Cache
Text          LanguageModel, Sampling: text without transformers
Files         save, load, load_tensors, load_gguf; convert and export, file to file
Calibration   Calibration, calibration_tokens, GPTQ, AWQ; prepare_qat_, convert_qat_; prune_, drop_zeros_
Tensors       quantize -> Codes, pack -> Packed, linear, qlinear, grouped_linear, embedding, dequantize, unpack
              quantize_conv, pack_conv -> PackedConv, conv1d, conv2d, qconv2d; Format, as_format
Processes     parallelize_, parallel_report; shard, unshard
The machine   explain, keep_freed_memory

All errors are HalfbyteErrors.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from halfbyte.integrations.on_import import register as _register_with_transformers

__version__ = "0.1.0"

if TYPE_CHECKING:
    from halfbyte.checkpoint import convert as convert
    from halfbyte.checkpoint import export as export
    from halfbyte.checkpoint import load as load
    from halfbyte.checkpoint import load_tensors as load_tensors
    from halfbyte.checkpoint import save as save
    from halfbyte.deploy.onnx_model import export_onnx as export_onnx
    from halfbyte.deploy.program import Program as Program
    from halfbyte.deploy.program import export_program as export_program
    from halfbyte.deploy.program import load_program as load_program
    from halfbyte.dispatch.explain import explain as explain
    from halfbyte.dispatch.explain_shapes import AttentionShape as AttentionShape
    from halfbyte.dispatch.explain_shapes import ConvShape as ConvShape
    from halfbyte.dispatch.explain_shapes import ExpertsShape as ExpertsShape
    from halfbyte.errors import HalfbyteError as HalfbyteError
    from halfbyte.formats.codes import Codes as Codes
    from halfbyte.formats.sharding import shard as shard
    from halfbyte.formats.sharding import unshard as unshard
    from halfbyte.formats.spec import Format as Format
    from halfbyte.formats.spec import as_format as as_format
    from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache as Int8Cache
    from halfbyte.integrations.transformers.gguf import load_gguf as load_gguf
    from halfbyte.integrations.transformers.optimize.optimizing import optimize_ as optimize_
    from halfbyte.integrations.transformers.quantizer import HalfbyteConfig as HalfbyteConfig
    from halfbyte.language.model import LanguageModel as LanguageModel
    from halfbyte.language.sampling.sampler import Sampling as Sampling
    from halfbyte.layouts.base import Packed as Packed
    from halfbyte.layouts.convolution import PackedConv as PackedConv
    from halfbyte.memory import keep_freed_memory as keep_freed_memory
    from halfbyte.nn.calibration.calibrate import Calibration as Calibration
    from halfbyte.nn.calibration.calibrate import calibration_tokens as calibration_tokens
    from halfbyte.nn.config import Config as Config
    from halfbyte.nn.convert import quantize_ as quantize_
    from halfbyte.nn.fused import fuse_ as fuse_
    from halfbyte.nn.modules.conv import QuantConv1d as QuantConv1d
    from halfbyte.nn.modules.conv import QuantConv2d as QuantConv2d
    from halfbyte.nn.modules.conv import QuantConv3d as QuantConv3d
    from halfbyte.nn.modules.conv import QuantConvTranspose1d as QuantConvTranspose1d
    from halfbyte.nn.modules.conv import QuantConvTranspose2d as QuantConvTranspose2d
    from halfbyte.nn.modules.conv import QuantConvTranspose3d as QuantConvTranspose3d
    from halfbyte.nn.modules.experts import QuantExperts as QuantExperts
    from halfbyte.nn.modules.quantized import QuantEmbedding as QuantEmbedding
    from halfbyte.nn.modules.quantized import QuantEmbeddingBag as QuantEmbeddingBag
    from halfbyte.nn.modules.quantized import QuantLinear as QuantLinear
    from halfbyte.nn.modules.quantized import QuantModule as QuantModule
    from halfbyte.nn.parallel.parallelize import parallel_report as parallel_report
    from halfbyte.nn.parallel.parallelize import parallelize_ as parallelize_
    from halfbyte.nn.report import report as report
    from halfbyte.nn.static.batchnorm import fold_batch_norms_ as fold_batch_norms_
    from halfbyte.nn.training.qat import convert_qat_ as convert_qat_
    from halfbyte.nn.training.qat import prepare_qat_ as prepare_qat_
    from halfbyte.nn.training.sparsity import drop_zeros_ as drop_zeros_
    from halfbyte.nn.training.sparsity import prune_ as prune_
    from halfbyte.ops import dequantize as dequantize
    from halfbyte.ops import embedding as embedding
    from halfbyte.ops import grouped_linear as grouped_linear
    from halfbyte.ops import linear as linear
    from halfbyte.ops import pack as pack
    from halfbyte.ops import qlinear as qlinear
    from halfbyte.ops import quantize as quantize
    from halfbyte.ops import unpack as unpack
    from halfbyte.ops.conv.functions import conv1d as conv1d
    from halfbyte.ops.conv.functions import conv2d as conv2d
    from halfbyte.ops.conv.functions import pack_conv as pack_conv
    from halfbyte.ops.conv.functions import qconv2d as qconv2d
    from halfbyte.ops.conv.functions import quantize_conv as quantize_conv
    from halfbyte.quantizers.awq import AWQ as AWQ
    from halfbyte.quantizers.gptq import GPTQ as GPTQ

# Where each public name lives. Names are imported when they are first used, so that `import halfbyte` stays light.
_HOMES = {
    "halfbyte.errors": ("HalfbyteError",),
    "halfbyte.formats.spec": ("Format", "as_format"),
    "halfbyte.formats.codes": ("Codes",),
    "halfbyte.formats.sharding": ("shard", "unshard"),
    "halfbyte.layouts.base": ("Packed",),
    "halfbyte.ops": ("quantize", "pack", "unpack", "linear", "qlinear", "grouped_linear", "embedding", "dequantize"),
    "halfbyte.quantizers.gptq": ("GPTQ",),
    "halfbyte.quantizers.awq": ("AWQ",),
    "halfbyte.nn.calibration.calibrate": ("Calibration", "calibration_tokens"),
    "halfbyte.ops.conv.functions": ("conv2d", "conv1d", "qconv2d", "quantize_conv", "pack_conv"),
    "halfbyte.layouts.convolution": ("PackedConv",),
    "halfbyte.nn.static.batchnorm": ("fold_batch_norms_",),
    "halfbyte.nn.config": ("Config",),
    "halfbyte.nn.convert": ("quantize_",),
    "halfbyte.nn.report": ("report",),
    "halfbyte.nn.modules.quantized": ("QuantModule", "QuantLinear", "QuantEmbedding", "QuantEmbeddingBag"),
    "halfbyte.nn.modules.conv": (
        *("QuantConv1d", "QuantConv2d", "QuantConv3d"),
        *("QuantConvTranspose1d", "QuantConvTranspose2d", "QuantConvTranspose3d"),
    ),
    "halfbyte.nn.modules.experts": ("QuantExperts",),
    "halfbyte.nn.fused": ("fuse_",),
    "halfbyte.nn.parallel.parallelize": ("parallelize_", "parallel_report"),
    "halfbyte.nn.training.qat": ("prepare_qat_", "convert_qat_"),
    "halfbyte.nn.training.sparsity": ("prune_", "drop_zeros_"),
    "halfbyte.checkpoint": ("save", "load", "load_tensors", "convert", "export"),
    "halfbyte.deploy.onnx_model": ("export_onnx",),
    "halfbyte.deploy.program": ("Program", "export_program", "load_program"),
    "halfbyte.dispatch.explain": ("explain",),
    "halfbyte.dispatch.explain_shapes": ("ConvShape", "AttentionShape", "ExpertsShape"),
    "halfbyte.integrations.transformers.gguf": ("load_gguf",),
    "halfbyte.integrations.transformers.cache.int8_cache": ("Int8Cache",),
    "halfbyte.integrations.transformers.optimize.optimizing": ("optimize_",),
    "halfbyte.language.model": ("LanguageModel",),
    "halfbyte.language.sampling.sampler": ("Sampling",),
    "halfbyte.memory": ("keep_freed_memory",),
    "halfbyte.integrations.transformers.quantizer": ("HalfbyteConfig",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_REGISTERED = _register_with_transformers()
__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'halfbyte' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    try:
        value = getattr(import_module(_HOME_OF[name]), name)
    except ImportError as error:  # there is none, or one that is too old
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise ImportError(f"halfbyte.{name} needs transformers ({error}): pip install 'halfbyte[transformers]'", name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
