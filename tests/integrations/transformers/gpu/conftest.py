"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

from gpu_fixtures import device, gpu, interpreted

__all__ = ["device", "gpu", "interpreted"]
