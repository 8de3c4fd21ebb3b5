"""The quality of 4-bit weights in blocks of 32 beside that of ONNX Runtime's quantizer, on the demo's model and corpus.

    pip install '.[demo]' onnxruntime
    python examples/minilm/compare_onnxruntime.py        a few minutes

Every linear weight is quantized and dequantized again, and the model runs in float32: what differs is the weights alone. The last
line runs the q4_0 kernels, which also quantize activations. Embeddings stay float.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from demo import CORPUS, MAX_TOKENS, model_folder
from onnxruntime.capi import _pybind_state as onnxruntime
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import halfbyte as hb
from halfbyte.evaluate import compare_embeddings, embed

BLOCK = 32


def onnxruntime_weight(weight: Tensor, symmetric: bool) -> Tensor:
    """`weight` [N, K] as MatMulNBits would multiply it."""
    n, k = weight.shape
    blocks = -(-k // BLOCK)
    packed = np.zeros((n, blocks, BLOCK // 2), np.uint8)
    scales = np.zeros(n * blocks, np.float32)
    points = np.zeros(n * -(-blocks // 2), np.uint8)
    onnxruntime.quantize_matmul_4bits(packed, np.ascontiguousarray(weight.T.numpy()), scales, points, BLOCK, n, k, symmetric)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(n, blocks, BLOCK).astype(np.float32)
    pairs = points.reshape(n, -1)
    zeros = np.full((n, blocks), 8, np.uint8) if symmetric else np.stack([pairs & 15, pairs >> 4], -1).reshape(n, -1)[:, :blocks]
    exact = (codes - zeros[:, :, None].astype(np.float32)) * scales.reshape(n, blocks, 1)
    return torch.from_numpy(exact.reshape(n, -1)[:, :k].copy())


def halfbyte_weight(format: str, method: str = "absmax") -> Callable[[Tensor], Tensor]:
    return lambda weight: hb.quantize(weight, format, method).dequantize()


def replaced(model: nn.Module, scheme: Callable[[Tensor], Tensor]) -> nn.Module:
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = scheme(module.weight.data)
    return model


def main() -> None:
    source = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    model = AutoModel.from_pretrained(source, local_files_only=True, dtype=torch.float32).eval()
    texts = [(CORPUS / name).read_text(encoding="utf-8").splitlines() for name in ("passages.txt", "queries.txt")]

    def show(name: str, candidate: nn.Module) -> None:
        found = [embed(candidate, tokenizer, part, max_length=MAX_TOKENS) for part in texts]
        quality = compare_embeddings(reference[0], found[0], (reference[1], found[1])).to_json()
        print(f"{name:24} top-1 {quality['top1']:.3f}  top-10 {quality['top10']:.3f}  mean cosine {quality['mean_cosine']:.5f}", flush=True)

    reference = [embed(model, tokenizer, part, max_length=MAX_TOKENS) for part in texts]
    schemes = {
        "q4_0": halfbyte_weight("q4_0"),
        "q4_0, mse": halfbyte_weight("q4_0", "mse"),
        "ONNX Runtime symmetric": lambda weight: onnxruntime_weight(weight, True),
        "int4_g32_zp": halfbyte_weight("int4_g32_zp"),
        "ONNX Runtime with zeros": lambda weight: onnxruntime_weight(weight, False),
        "q4_1, mse": halfbyte_weight("q4_1", "mse"),
    }
    for name, scheme in schemes.items():
        show(name, replaced(model, scheme))
    show("q4_0, kernels", hb.quantize_(copy.deepcopy(model), hb.Config("q4_0", skip=["embeddings*"])))


if __name__ == "__main__":
    main()
