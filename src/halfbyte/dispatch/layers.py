"""Which kernels compute the other parts of a transformer's layers than plain products: norms, attention, mixtures of experts, and linear
layers with a norm before them and gates among their outputs.

`choose` (choose.py) takes a kernel from the lists GPU_ATTENTION, CPU_ATTENTION, GPU_EXPERTS, CPU_EXPERTS and GPU_NORMED. Norms and routers
have one kernel each, or none: `why_not_norm` and `why_not_router`. Where there is no kernel, torch's operations compute it: the Choice has
nothing taken. A program on a CPU does not import `gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from halfbyte.dispatch.candidate import Candidate, Choice, Option, decide
from halfbyte.kernels.problem import AttentionKind, AttentionProblem, ExpertsProblem, NormedProblem, Problem
from halfbyte.layouts import cpu_tiles
from halfbyte.machine import Gpu

if TYPE_CHECKING:
    from halfbyte.dispatch.gpu import GpuCandidate
    from halfbyte.kernels.cpu.codegen.isa import ISA
    from halfbyte.kernels.gpu.experts import grouped

SOFTCAP = "the kernels have no soft cap of scores"
# Pairs of a token and one of its experts: up to so many, all threads share each expert's product; of more, each thread has its own experts.
MAX_ROUTED_ROWS = 64
_START = 1.5e-6  # seconds that an additional kernel takes in a chain of kernels that start early
_BANDWIDTH = 1e12  # bytes per second, assumed for a GPU that does not report it


def why_no_early_start(gpu: Gpu) -> str | None:
    """Return why a GPU cannot run the kernels of layers, which start while the kernel before them is running; None if it can."""
    from halfbyte.dispatch.gpu import why_no_triton

    if (reason := why_no_triton()) is not None:
        return reason
    return None if gpu.backend == "cuda" else f"the kernels start early on NVIDIA GPUs only, not on {gpu.name}"


def why_not_norm(k: int, gpu: Gpu) -> str | None:
    """Return why norms of K columns are computed by torch's operations on a GPU; None if by `kernels/gpu/transformer/norm.py`."""
    if (reason := why_no_early_start(gpu)) is not None:
        return reason
    most: int = import_module("halfbyte.kernels.gpu.transformer.norm").MOST
    return f"a norm of {k} columns is more than the {most} that a block's registers hold" if k > most else None


def why_not_router(experts: int, k: int, gpu: Gpu) -> str | None:
    """Return why the router [E, K] of a mixture, its gates and the weighted sum are computed by torch's operations on a GPU; None if by
    `kernels/gpu/experts/routing.py`."""
    if (reason := why_not_norm(k, gpu)) is not None:
        return reason
    most: int = import_module("halfbyte.kernels.gpu.experts.routing").MOST_EXPERTS
    return None if experts <= most else f"{experts} experts are more than the {most} whose logits a warp's registers hold"


def _choose_product(product: Problem, gpu: Gpu) -> Choice[Problem, GpuCandidate]:
    """Choose the kernel of a product on a GPU, as `choose` does, but without keeping the choice: what depends on it is kept there."""
    from halfbyte.dispatch.gpu import choose_product

    return choose_product(product, gpu)


# Attention


@dataclass(frozen=True)
class AttentionCandidate(Candidate[AttentionProblem, "Gpu | ISA"]):
    """Attention by a kernel.

    Attributes:
        home: The kernel's module in `kernels`.
    """

    home: str = field(kw_only=True)

    def launch(self, problem: AttentionProblem, config: object, *operands: object) -> Any:
        """Run it: operands of the module's `launch`."""
        return import_module(f"halfbyte.kernels.{self.home}").launch(*operands)


def _why_not_on_gpu(problem: AttentionProblem, gpu: Gpu, *, kind: AttentionKind, purpose: str, module: str) -> str | None:
    """Return why a kernel does not compute a problem on a GPU; None if it does.

    Args:
        problem: The problem.
        gpu: The GPU.
        kind: The kind of attention that the kernel is for.
        purpose: The same in words, the reason for other kinds.
        module: The kernel's module in `kernels/gpu/transformer`.
    """
    if problem.kind != kind:
        return purpose
    if problem.softcap:
        return SOFTCAP
    if (reason := why_no_early_start(gpu)) is not None:
        return reason
    kernel: Any = import_module(f"halfbyte.kernels.gpu.transformer.{module}")
    codes = {"codes": True} if kind == "decode" and problem.cache == "int8" else {}  # a prefill reads them dequantized
    reason = kernel.supports(problem.heads, problem.kv_heads, problem.head_dim, problem.dtype, **codes)
    return reason or (None if problem.norm_width is None else why_not_norm(problem.norm_width, gpu))


def _why_not_attend(problem: AttentionProblem, isa: ISA) -> str | None:
    from halfbyte.kernels.cpu.transformer import attend

    if problem.kind == "encode":
        return "it reads a cache"
    if (reason := _why_not_dtype(problem)) is not None:
        return reason
    return attend.supports(problem.heads, problem.kv_heads, problem.head_dim, problem.rotary_dim)


def _why_not_attend_whole(problem: AttentionProblem, isa: ISA) -> str | None:
    if problem.kind != "encode":
        return "it is for tokens that all see each other, without a cache"
    if (reason := _why_not_dtype(problem)) is not None:
        return reason
    if problem.kv_heads != problem.heads:
        return f"{problem.heads} query heads share {problem.kv_heads} of keys"
    return f"heads of {problem.head_dim} are not a multiple of 4" if problem.head_dim % 4 else None


def _why_not_dtype(problem: AttentionProblem) -> str | None:
    name = str(problem.dtype).removeprefix("torch.")
    return None if name == "float32" else f"it computes in float32, not {name}"


GPU_ATTENTION = (
    AttentionCandidate(
        "attend", "a block for each head of keys and part of the cache, with norms, positions and the new token's entry",
        home="gpu.transformer.attend",
        why_not=partial(_why_not_on_gpu, kind="decode", purpose="it is for one new token of each sequence", module="attend"),
    ),
    AttentionCandidate(
        "attend_many", "tiles of queries pass over keys and values, with online softmax; norms and positions by a kernel before",
        home="gpu.transformer.attend_many",
        why_not=partial(_why_not_on_gpu, kind="prefill", purpose="it is for tokens of prompts", module="attend_many"),
    ),
)  # fmt: skip
CPU_ATTENTION = (
    AttentionCandidate(
        "attend", "a step of the layer's native call: online softmax over a float32 or int8 cache",
        home="cpu.transformer.attend", why_not=_why_not_attend,
    ),
    AttentionCandidate(
        "attend_whole", "all queries of a head pass over blocks of its keys and values, float32",
        home="cpu.transformer.attend_whole", why_not=_why_not_attend_whole,
    ),
)  # fmt: skip


# Mixtures of experts


@dataclass(frozen=True)
class ExpertsCandidate(Candidate[ExpertsProblem, "Gpu | ISA"]):
    """Kernels for what a mixture computes besides the products of its experts: router, gates and the weighted sum.

    Attributes:
        gated_config: On a GPU, returns the config of the first product that computes silu(gate) * up, too; None: a kernel of its own does.
    """

    gated_config: Callable[[ExpertsProblem, Any], object] = field(kw_only=True, default=lambda problem, machine: None)

    def configs(self, problem: ExpertsProblem, machine: Gpu | ISA) -> Sequence[object]:
        """Return the result of `gated_config`."""
        return (self.gated_config(problem, machine),)


def _why_not_routing(problem: ExpertsProblem, gpu: Gpu) -> str | None:
    if problem.compute != "float":
        return "its experts compute in int8"
    return why_not_router(problem.experts, problem.hidden, gpu)


def _gated_config(problem: ExpertsProblem, gpu: Gpu) -> object:
    return None if problem.clamped or problem.biased else gated_experts(_choose_product(problem.first, gpu))


def gated_experts(choice: Choice[Problem, GpuCandidate]) -> grouped.Config | None:
    """Return the config with which the kernel chosen for gate_up of experts computes silu(gate) * up, too; None: a separate kernel does."""
    from halfbyte.kernels.gpu.experts import grouped

    taken = choice.taken
    return None if taken is None or taken.candidate.home != "experts.grouped" else grouped.gated(choice.problem, taken.config)


def _why_not_one_call(problem: ExpertsProblem, isa: ISA) -> str | None:
    pairs = problem.rows * problem.top_k
    if pairs > MAX_ROUTED_ROWS:
        return f"{pairs} rows of experts are many: from {MAX_ROUTED_ROWS + 1} on threads do not share experts"
    return why_not_panels(problem.inner)


def why_not_panels(gates: int) -> str | None:
    """Return why a CPU does not compute so many gates with the product of experts; None if it does."""
    return f"{gates} gates are not whole panels of {cpu_tiles.PANEL}" if gates % cpu_tiles.PANEL else None


GPU_EXPERTS = (
    ExpertsCandidate(
        "routing", "kernels for the norm with the router's logits, the choice of experts, gates, and the weighted sum with the residual",
        why_not=_why_not_routing, gated_config=_gated_config,
    ),
)  # fmt: skip
CPU_EXPERTS = (
    ExpertsCandidate("one_call", "router, products, gates and the weighted sum in one native call", why_not=_why_not_one_call),
    ExpertsCandidate("items", "products, gates and the weighted sum in one native call, in which each thread has experts of its own"),
)


def choose_experts(problem: ExpertsProblem, gpu: Gpu) -> Choice[ExpertsProblem, ExpertsCandidate]:
    """Choose the kernels of a mixture on a GPU; nothing taken: torch's operations compute all but the products."""
    from halfbyte.dispatch.gpu import compute_of

    return decide(GPU_EXPERTS, replace(problem, compute=compute_of(problem.compute)), gpu)


# Linear layers with a norm before them and gates among their outputs


@dataclass(frozen=True)
class NormedCandidate(Candidate[NormedProblem, Gpu]):
    """A product with the norm before it and the gates after it. A config is that of the product's kernel, or None.

    Attributes:
        home: The module of kernels/gpu that computes the norm or the gates with the product; "": separate kernels do.
        fused: Returns the config of the product with them; None: no config with them is faster than separate kernels.
    """

    home: str = ""
    fused: Callable[[NormedProblem, Gpu], object] = field(kw_only=True)

    def supports(self, problem: NormedProblem, machine: Gpu) -> str | None:
        """Return the reason why the product's kernel does not compute the norm or the gates, too, or None."""
        if not self.home or self.fused(problem, machine) is not None:
            return None
        if problem.gated and problem.biased:
            return "the gates of a product with a bias have a kernel of their own"
        return "separate kernels take no longer than the product would with them"

    def configs(self, problem: NormedProblem, machine: Gpu) -> Sequence[object]:
        """Return the config, or None for separate kernels."""
        return (self.fused(problem, machine),)

    def takes_norm(self, problem: NormedProblem, config: object) -> bool:
        """Whether the product's kernel computes the norm, too."""
        return bool(problem.normed and self.home == "linear.skinny" and _skinny().takes_norm(config))

    def launch(self, problem: NormedProblem, config: object, *operands: object) -> None:
        """Run the product: operands of `launch` of the module."""
        import_module(f"halfbyte.kernels.gpu.{self.home}").launch(problem.product, config, *operands)


def _skinny() -> ModuleType:
    return import_module("halfbyte.kernels.gpu.linear.skinny")


class _Fast(NamedTuple):
    """Options for the product alone.

    Attributes:
        taken: The one that is chosen.
        options: Those that take no longer than `taken` and separate kernels for the norm and the gates together.
    """

    taken: Option[GpuCandidate]
    options: list[Option[GpuCandidate]]


def _fast_options(problem: NormedProblem, gpu: Gpu) -> _Fast | None:
    """Return the options that may be fast enough with norm and gates; None where no kernel solves the product."""
    product = problem.product
    choice = _choose_product(product, gpu)
    if choice.taken is None:
        return None
    # The time of separate kernels for what `skinny` includes, the norm of one row and gates: starts, and for gates another read and write.
    kernels = problem.gated + (problem.normed and (product.m == 1 or not problem.gated))
    moved_bytes = problem.gated * 1.5 * product.m * product.n * product.dtype.itemsize
    longest = choice.taken.seconds + kernels * _START + moved_bytes / (gpu.bandwidth or _BANDWIDTH)
    return _Fast(choice.taken, [o for o in choice.options if o.candidate.sparse == product.sparse and o.seconds <= longest])


def _in_skinny(problem: NormedProblem, gpu: Gpu) -> object:
    if (fast := _fast_options(problem, gpu)) is None:
        return None
    options = [o for o in fast.options if o.candidate.home == "linear.skinny"]
    if not problem.gated:
        return next((o.config for o in options if o is fast.taken or _skinny().takes_norm(o.config)), None)
    gates = (_skinny().gated(problem.product, o.config) for o in options)
    # Configs whose warps share K come last: with gates they take a third longer than the product alone (4 and 8 rows, on an H100).
    fitting = sorted((config for config in gates if config is not None), key=lambda config: config.batch > 1)
    return fitting[0] if fitting and not problem.biased else None


def _in_skinny_hopper(problem: NormedProblem, gpu: Gpu) -> object:
    if not problem.gated or problem.biased or (fast := _fast_options(problem, gpu)) is None:
        return None
    if fast.taken.candidate.home != "linear.skinny_hopper":
        return None
    from halfbyte.kernels.gpu.linear import skinny_hopper_config

    configs = (o.config for o in fast.options if o.candidate.home == "linear.skinny_hopper")
    return next((fused for config in configs if (fused := skinny_hopper_config.gated(problem.product, config, gpu))), None)


_FUSED = "it saves launches, and the reads and writes between them"
GPU_NORMED = (
    NormedCandidate(
        "skinny_hopper", "gates among the sums of skinny_hopper", _FUSED, home="linear.skinny_hopper", fused=_in_skinny_hopper
    ),
    NormedCandidate("skinny", "the norm of one row, and gates, in skinny", _FUSED, home="linear.skinny", fused=_in_skinny),
    NormedCandidate(
        "separate", "the kernel of a plain linear layer; the norm and the gates by kernels of their own", fused=lambda *_: None
    ),
)  # fmt: skip


def choose_normed(problem: NormedProblem, gpu: Gpu) -> Choice[NormedProblem, NormedCandidate]:
    """Choose the kernel of a linear layer with its norm and gates on a GPU; nothing taken: torch's compute all but the product."""
    product = problem.product
    reason = why_not_norm(product.k, gpu)
    if reason is None and not (product.n and product.m):
        reason = f"{product.m} rows of {product.n} outputs have no results to compute"
    if reason is None and _choose_product(product, gpu).taken is None:
        reason = "no kernel solves this product"
    if reason is not None:
        return Choice(problem, None, (), tuple((candidate, reason) for candidate in GPU_NORMED))
    return decide(GPU_NORMED, problem, gpu)
