"""ggml's matrix product, from the libraries that llama-cpp-python brings: blocks of 32, activations quantized to q8_0 on the fly.

One graph holds a product for each copy of the weight. Weights lie in the buffers in which llama.cpp puts them: repacked for the CPU, where
ggml can do that with their type, or as they are.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import torch
from torch import Tensor

from halfbyte.bench.workload import Built, Workload
from halfbyte.errors import UnsupportedError
from halfbyte.formats.ggml import NUMBERS, TYPES
from halfbyte.formats.ggml_encoding import encode

_FLOAT32 = 0  # of enum ggml_type
_CPU = 0  # of enum ggml_backend_dev_type
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_log_set": (None, (c_void_p, c_void_p)),
    "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_graph_overhead_custom": (c_size_t, (c_size_t, c_bool)),
    "ggml_free": (None, (c_void_p,)),
    "ggml_new_tensor_2d": (c_void_p, (c_void_p, c_int, c_int64, c_int64)),
    "ggml_mul_mat": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    "ggml_new_graph_custom": (c_void_p, (c_void_p, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (c_void_p, c_void_p)),
    "ggml_get_data": (c_void_p, (c_void_p,)),
    "ggml_backend_init_by_type": (c_void_p, (c_int, c_char_p)),
    "ggml_backend_get_device": (c_void_p, (c_void_p,)),
    "ggml_backend_dev_backend_reg": (c_void_p, (c_void_p,)),
    "ggml_backend_dev_supports_op": (c_bool, (c_void_p, c_void_p)),
    "ggml_backend_reg_get_proc_address": (c_void_p, (c_void_p, c_char_p)),
    "ggml_backend_get_default_buffer_type": (c_void_p, (c_void_p,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, (c_void_p, c_void_p)),
    "ggml_backend_buffer_free": (None, (c_void_p,)),
    "ggml_backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_graph_compute": (c_int, (c_void_p, c_void_p)),
}


_silent = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda *_: None)  # each weight that is repacked would be a line


class _Parameters(ctypes.Structure):
    """ggml_init_params: a context holds the descriptions of tensors, their data lie in buffers."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _GGML:
    """The library's functions by their names, and its CPU."""

    def __init__(self, threads: int) -> None:
        from llama_cpp._ggml import libggml

        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(libggml, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self._init = libggml.ggml_init
        self._init.restype, self._init.argtypes = c_void_p, (_Parameters,)
        self.log_set(_silent, None)
        self.backend = self.backend_init_by_type(_CPU, None)
        self.device = self.backend_get_device(self.backend)
        self._registry = self.backend_dev_backend_reg(self.device)
        ctypes.CFUNCTYPE(None, c_void_p, c_int)(self._address(b"ggml_backend_set_n_threads"))(self.backend, threads)

    def __getattr__(self, name: str) -> Any:  # those of _SIGNATURES
        raise AttributeError(f"ggml_{name} is not among the functions that are used here")

    def _address(self, name: bytes) -> int:
        return int(self.backend_reg_get_proc_address(self._registry, name))

    def context(self, tensors: int, graph: bool = False) -> int:
        size = tensors * self.tensor_overhead() + (self.graph_overhead_custom(tensors, False) if graph else 0)
        return int(self._init(_Parameters(size + 1024, None, True)))

    def buffer_types(self) -> Iterator[int]:
        """Those of the CPU's own forms of weights, then the plain one."""
        custom = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(self._address(b"ggml_backend_dev_get_extra_bufts"))(self.device)
        for i in range(16):
            if custom[i] is None:
                break
            yield custom[i]
        yield self.backend_get_default_buffer_type(self.backend)

    def takes(self, buffer_type: int, type: int, k: int, n: int) -> bool:
        """Whether it multiplies a weight [n, k] in such a buffer."""
        context = self.context(3)
        weight = self.new_tensor_2d(context, type, k, n)
        buffer = self.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        product = self.mul_mat(context, weight, self.new_tensor_2d(context, _FLOAT32, k, 1))
        taken = bool(buffer) and bool(self.backend_dev_supports_op(self.device, product))
        self.backend_buffer_free(buffer)
        self.free(context)
        return taken


def mul_mat(work: Workload, format: str) -> Built:
    """Products with weights of a type of ggml's that has the name of a format."""
    slab = work.codes(format)
    if work.k % 32:
        raise UnsupportedError(f"ggml's blocks of 32 must divide K, got K={work.k}")
    ggml, type = _GGML(work.threads), NUMBERS[format]
    nbytes = work.n * TYPES[type].row_bytes(work.k)
    copies = work.copies(nbytes)
    context = ggml.context(copies)
    weights = [ggml.new_tensor_2d(context, type, work.k, work.n) for _ in range(copies)]
    buffer_type = next(one for one in ggml.buffer_types() if ggml.takes(one, type, work.k, work.n))
    buffer = ggml.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
    for copy, weight in enumerate(weights):
        blocks = encode(TYPES[type], work.take(slab, copy))
        ggml.backend_tensor_set(weight, blocks.data_ptr(), 0, blocks.nbytes)

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        return _Pass(ggml, weights, work.n, x)

    built = Built(slab.dequantize(torch.float64), nbytes, copies, bind)
    weakref.finalize(bind, lambda: (ggml.backend_buffer_free(buffer), ggml.free(context)))
    return built


class _Pass:
    """Activations, results and the graph between them."""

    def __init__(self, ggml: _GGML, weights: list[int], n: int, x: Tensor) -> None:
        m, k = x.shape
        self._ggml, self._shape = ggml, (m, n)
        context = ggml.context(2 * len(weights) + 1, graph=True)
        rows = ggml.new_tensor_2d(context, _FLOAT32, k, m)
        self._graph = ggml.new_graph_custom(context, 2 * len(weights) + 1, False)
        self._products = [ggml.mul_mat(context, weight, rows) for weight in weights]
        buffer = ggml.backend_alloc_ctx_tensors_from_buft(context, ggml.backend_get_default_buffer_type(ggml.backend))
        for product in self._products:
            ggml.build_forward_expand(self._graph, product)
        ggml.backend_tensor_set(rows, x.contiguous().data_ptr(), 0, 4 * m * k)
        weakref.finalize(self, lambda: (ggml.backend_buffer_free(buffer), ggml.free(context)))

    def __call__(self) -> Iterator[Tensor]:
        if status := self._ggml.backend_graph_compute(self._ggml.backend, self._graph):
            raise UnsupportedError(f"ggml_backend_graph_compute failed with status {status}")
        return (self._result(product) for product in self._products)

    def _result(self, product: int) -> Tensor:
        m, n = self._shape
        return torch.frombuffer((ctypes.c_float * (m * n)).from_address(self._ggml.get_data(product)), dtype=torch.float32).view(m, n)
