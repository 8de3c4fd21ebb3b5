"""A whole model as an ONNX file: torch's exporter writes what torch computes, `onnx_graph.py` and `onnx_static.py` what halfbyte does."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.onnx import ONNXProgram

from halfbyte.checkpoint.native.folder import replacing_file
from halfbyte.deploy.example import Example, Inputs, Sizes, example_of, first_line
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError, model_path
from halfbyte.io.onnx import FILE_LIMIT, import_onnx
from halfbyte.nn.modules.quantized import QuantModule

OPSET = 22  # the newest that torch 2.8 to 2.13 write


def export_onnx(
    model: nn.Module, path: str | os.PathLike[str], inputs: Inputs | None = None, sizes: Mapping[str, Sizes] | None = None
) -> list[str]:
    """Write a quantized model as one ONNX file, with the same codes and scales.

    Linear layers become MatMulNBits of com.microsoft, which ONNX Runtime has; with `compute="float"` it computes in float32, else it rounds
    activations to int8 by block, as halfbyte does. Weight-only convolutions read int8 codes by DequantizeLinear. A network on int8 codes is
    written as QDQ. What ONNX cannot hold is stored in floating point. A result by the name of an input, such as `sample`, is `out_sample`.

    Args:
        model: In evaluation mode, float32 or float16, on a CPU.
        path: The file, which may exist.
        inputs: Tensors by name, or in the order of the arguments of its forward; may be left out for models of transformers and for UNets.
        sizes: Names of the sizes that may vary, by input and dimension: {"x": {0: "batch"}}; all others are fixed.

    Returns:
        A sentence for each weight that is stored in floating point, and for each size with a limit, such as "batch up to 63": the forward
        takes another branch for 64 images. Runtimes do not check limits, and compute wrong results beyond them.

    Raises:
        ArgumentError: The inputs are not known, or the model is in bfloat16.
        UnsupportedError: The model has an operation that ONNX has no form for, or takes more than 2 GB.
        CheckpointError: onnx or onnxscript is not installed, or the file cannot be written; what was there is unchanged then.

    Example:
        >>> model = hb.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "q8_0").eval()
        >>> hb.export_onnx(model, folder / "model.onnx", [torch.randn(2, 32)], {"input": {0: "batch"}})  # doctest: +SKIP
        []
    """
    from halfbyte.deploy.onnx_graph import replace_ops
    from halfbyte.deploy.onnx_static import with_qdq

    target = model_path(path)
    if target.suffix != ".onnx":
        raise ArgumentError(f"an ONNX file is known by its suffix, which {target.name} lacks: write {target.name}.onnx")
    import_onnx()
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise CheckpointError("torch writes ONNX with the package onnxscript: pip install 'halfbyte[onnx]'") from error
    call = example_of(model, inputs, sizes)
    _check_dtypes(model, call)
    traced, example = call.of(with_qdq(call.module)).trace()
    graph = traced.module()
    notes = replace_ops(graph)
    traced, example = example.of(graph).trace()
    program = _translate(example, traced)
    content = program.model_proto.SerializeToString()
    if len(content) > FILE_LIMIT:
        raise UnsupportedError(f"the model takes {len(content)} bytes as ONNX, and a file holds {FILE_LIMIT}: quantize more, to fewer bits")
    with replacing_file(target) as temporary:
        temporary.write_bytes(content)
    return [*example.limits(call), *notes]


def _check_dtypes(model: nn.Module, example: Example) -> None:
    """Raise ArgumentError for a model in bfloat16, which ONNX Runtime does not load on CPUs."""
    dtypes = {tensor.dtype for tensor in (*example.inputs.values(), *model.parameters(), *model.buffers())}
    dtypes |= {module.dtype for module in model.modules() if isinstance(module, QuantModule)}
    if torch.bfloat16 in dtypes:
        got = f"got a {example.model} in bfloat16"
        raise ArgumentError(f"an ONNX file is for float32 or float16, {got}: call model.float(), and pass such inputs")


def _missing_forms() -> dict[Callable[..., object], Callable[..., object]]:
    """Return the ONNX forms of torch's operations for which torch has none or a wrong one, as for a squeeze of a size other than 1."""
    from onnxscript import opset18  # torch's own forms are of this version, and are converted to OPSET

    squeeze_of: Callable[..., object] = opset18.Squeeze
    identity: Callable[..., object] = opset18.Identity

    def squeeze(x: Tensor, dim: int) -> object:
        return squeeze_of(x, [dim]) if x.shape and x.shape[dim] == 1 else identity(x)

    def view_of(x: Tensor) -> object:
        return identity(x)

    return {torch.ops.aten.squeeze.dim: squeeze, torch.ops.prims.view_of.default: view_of}


def _translate(example: Example, traced: ExportedProgram) -> ONNXProgram:
    """Return torch's ONNX program."""
    outputs, names = traced.call_spec.out_spec, None
    if outputs.type is dict:
        names = [f"out_{name}" if name in example.inputs else name for name in outputs.context]
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                traced,
                input_names=list(example.inputs),
                output_names=names,
                opset_version=OPSET,
                dynamo=True,
                optimize=True,
                verbose=False,
                custom_translation_table=_missing_forms(),
            )
        assert program is not None  # with dynamo=True
        return program
    except Exception as error:  # torch's exporter raises many classes
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        raise UnsupportedError(f"torch has no ONNX form of an operation of this model ({first_line(error)}): use export_program") from error
    finally:
        logger.setLevel(level)
