"""Compile kernels for GPUs that are not here, in processes of their own: this one may have Triton's interpreter switched on.

A job names a function that launches kernels (through `halfbyte.kernels.gpu.runtime.launch.run`) on tensors of the meta device; each launch
is compiled for the job's architecture as the just-in-time compiler would do it there.

    linear_job("halfbyte.kernels.gpu.linear.skinny", "sm_90", m=1, n=4096, k=4096, format="int4_g128")     every config, or configs=[0, 2]
    Job("tests/kernels/gpu/quantize/test_quantize.py:launch_on_meta", "sm_80", {"block": 32})                    called with (gpu, **kwargs)

    [binaries] = compile_all([job]);  binaries[0].registers
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from kernel_cache import remembered

from halfbyte.dispatch.choose import choose
from halfbyte.formats.spec import as_format
from halfbyte.kernels.layer_kinds import GateFunction
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu

ROOT = Path(__file__).resolve().parents[3]
PROCESSES = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2  # where tests run side by side, so do their compilers


@dataclass(frozen=True)
class Job:
    """Call `function` ("module:name" or "file.py:name") with the Gpu of `arch` and `kwargs`, and compile what it launches.

    wanted   what a Binary tells: "assembly": all; "resources": all but the assembly, which takes NVIDIA's tools about a second (it is
             there all the same for a kernel that uses the stack); "product": assembly of the last launch alone, resources of those before
             it; "shared": `shared` alone, known before most of the compiler's work
    only     which launches are compiled, by their place in the order; none: all
    """

    function: str
    arch: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    wanted: str = "assembly"
    only: Sequence[int] = ()


@dataclass(frozen=True)
class Binary:
    """One compiled kernel. `assembly` is SASS or GCN; spills and stack in bytes (AMD: spills in registers)."""

    kernel: str
    arch: str
    options: str
    ptx: str
    assembly: str
    registers: int
    spills: int
    stack: int
    shared: int


def linear_job(module: str | None, arch: str, *, configs: Sequence[int] | None = None, wanted: str = "assembly", **problem: Any) -> Job:
    """A linear kernel's file, or what dispatch takes where `module` is None, on one problem: m, n, k, format, and perhaps dtype
    ("bfloat16"), compute, activation, bias, residual, sparse, paired, low_rank: how many branches."""
    return Job("aot:launch_linear", arch, {"module": module, "configs": configs, **problem}, wanted)


def launch_linear(
    gpu: Gpu,
    module: str | None,
    m: int,
    n: int,
    k: int,
    format: str,
    configs: Sequence[int] | None = None,
    dtype: str = "float16",
    compute: str = "float",
    activation: str = "block",
    bias: bool = False,
    residual: bool = False,
    sparse: bool = False,
    paired: bool = False,
    low_rank: int = 0,
) -> None:
    from halfbyte.kernels.problem import Epilogue

    kind = as_format(format), getattr(torch, dtype), compute, activation
    problem = Problem("linear", m, n, k, *kind, sparse=sparse, paired=paired)  # type: ignore[arg-type]
    if module is None:
        taken = choose(problem, gpu).taken
        assert taken is not None, f"nothing is taken for {problem} on {gpu.arch}"
        file, found = taken.candidate.module, (taken.config,)
    else:
        file = importlib.import_module(module)
        reason = file.supports(problem, gpu)
        assert reason is None, f"{module} refuses {problem} on {gpu.arch}: {reason}"
        found = file.configs(problem, gpu)
    geo = gpu_tiles.geometry(problem.format, (n, k), sparse=sparse, paired=paired)
    views = gpu_tiles.views(torch.empty(geo.nbytes, dtype=torch.uint8, device="meta"), geo)
    x, out = torch.empty(m, k, dtype=problem.dtype, device="meta"), torch.empty(m, n, dtype=problem.dtype, device="meta")
    epilogue = Epilogue(torch.empty(n, device="meta") if bias else None, torch.empty_like(out) if residual else None)
    if low_rank:
        epilogue = replace(epilogue, low_rank=(out.new_empty(m, 32 * low_rank), out.new_empty(n, 32)))
    for config in found if configs is None else (found[i] for i in configs if i < len(found)):
        file.launch(problem, config, x, views, out, epilogue)


def grouped_job(arch: str, rows: int, experts: int, n: int, k: int, format: str, dtype: str = "bfloat16") -> Job:
    """The best guess for linear layers of experts."""
    return Job(
        "aot:launch_grouped",
        arch,
        {"rows": rows, "experts": experts, "n": n, "k": k, "format": format, "dtype": dtype},
        "product",
    )


def launch_grouped(gpu: Gpu, rows: int, experts: int, n: int, k: int, format: str, dtype: str) -> None:
    from halfbyte.kernels.gpu.experts import grouped

    problem = Problem("grouped_linear", rows, n, k, as_format(format), getattr(torch, dtype), experts=experts)
    nbytes = experts * gpu_tiles.geometry(problem.format, (n, k)).nbytes
    weight, ids = torch.empty(nbytes, dtype=torch.uint8, device="meta"), torch.empty(rows, dtype=torch.int64, device="meta")
    x, out = (torch.empty(rows, size, dtype=problem.dtype, device="meta") for size in (k, n))
    grouped.launch(problem, grouped.configs(problem, gpu)[0], x, weight, ids, out, torch.empty(experts, n, device="meta"))


def layer_job(arch: str, hidden: int, inner: int, heads: int, kv_heads: int, size: int, *, rows: int = 1, head_norms: bool = False) -> Job:
    """The kernels of a layer of Llama (`head_norms`: of Qwen3) for one token of each of `rows` sequences and a cache of `size`, in their
    order."""
    sizes = {"hidden": hidden, "inner": inner, "heads": heads, "kv_heads": kv_heads, "size": size, "rows": rows, "head_norms": head_norms}
    return Job("aot:launch_layer", arch, sizes, "resources")


def launch_layer(gpu: Gpu, hidden: int, inner: int, heads: int, kv_heads: int, size: int, rows: int, head_norms: bool) -> None:
    from halfbyte.kernels.gpu.transformer import attend, gates, norm
    from halfbyte.kernels.problem import Epilogue, NormedProblem

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def views(n: int, k: int) -> gpu_tiles.Views:
        geo = gpu_tiles.geometry(as_format("int4_g128"), (n, k))
        return gpu_tiles.views(empty(geo.nbytes, dtype=torch.uint8), geo)

    def added(n: int, k: int) -> None:
        problem = Problem("linear", rows, n, k, as_format("int4_g128"), torch.bfloat16)
        option = choose(problem, gpu).taken
        assert option is not None
        module, config = option.candidate.module, option.config
        module.launch(problem, config, empty(rows, k), views(n, k), empty(rows, n), Epilogue(None, empty(rows, n)))

    def normed(n: int, k: int, *, function: GateFunction | Literal[""] = "") -> None:
        product = Problem("linear", rows, n, k, as_format("int4_g128"), torch.bfloat16)
        choice = choose(NormedProblem(product, gated=bool(function)), gpu)
        candidate, config = choice.options[0].candidate, choice.options[0].config
        before, inside = (empty(k), 1e-5, False), candidate.takes_norm(choice.problem, config)
        if not inside:
            norm.launch(gpu, empty(rows, k), before, empty(rows, k))
        epilogue, out = Epilogue(gates=function), empty(rows, n // 2 if function else n)
        if candidate.home:
            candidate.launch(choice.problem, config, empty(rows, k), views(n, k), out, epilogue, *([before] if inside else []))
        elif function:
            gates.launch(gpu, empty(rows, n), out, function)

    dim = hidden // heads
    width = (heads + 2 * kv_heads) * dim
    normed(width, hidden)
    cache = (empty(rows, kv_heads, size, dim), empty(rows, kv_heads, size, dim))
    rotary, mask, length = (empty(rows, dim), empty(rows, dim)), empty(rows, size, dtype=torch.bool), empty(1, dtype=torch.int64)
    norms = ((empty(dim), 1e-6, False), (empty(dim), 1e-6, False)) if head_norms else None
    attend.launch(gpu, empty(rows, width), rotary, cache, length, mask, empty(rows, hidden), dim**-0.5, norms=norms)
    added(hidden, hidden)
    normed(2 * inner, hidden, function="silu")
    added(hidden, inner)


def launch_families(gpu: Gpu) -> None:
    """What layers of Mixtral, Gemma 3, OLMo 2, GLM-4 with experts, Command R, StableLM and Nemotron have beside Llama's, for one token."""
    from halfbyte.kernels.gpu.experts import routing
    from halfbyte.kernels.gpu.transformer import attend, gates, norm

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    k, experts, chosen, heads, kv_heads, dim = 4096, 128, 8, 32, 8, 128
    x, before = empty(1, k), (empty(k), 1e-5, True)
    logits, weights = empty(1, experts, dtype=torch.float32), empty(1, chosen, dtype=torch.float32)
    routing.launch_logits(gpu, x, before, routing.Router(empty(experts, k), empty(experts)), empty(1, k), logits)
    routing.launch_choice(gpu, logits, empty(1, chosen, dtype=torch.int32), weights, routing.Choice(normalized=True))
    routing.launch_sum(gpu, empty(chosen, k), weights, x, empty(1, k))
    gates.launch_clamped(gpu, empty(chosen, 2 * k), empty(chosen, k), 1.702, 7.0)
    gates.launch(gpu, empty(1, 3 * k), empty(1, 3 * k), "relu2", gated=False)
    gates.launch(gpu, empty(1, 3 * k), empty(1, 3 * k), "gelu_tanh", gated=False, multiplier=empty(1, 3 * k))
    norm.launch(gpu, x, before, empty(1, k), layer_norm=True, bias=empty(k))
    norm.launch_added(gpu, x, before, empty(1, k), empty(1, k), (before, empty(1, k)))
    norm.launch_added(gpu, x, before, empty(1, k), empty(1, k), None, empty(1))
    qkv = empty(1, (heads + 2 * kv_heads) * dim)
    of_rows = (empty(heads * dim), 1e-5, False), (empty(kv_heads * dim), 1e-5, False)
    norm.launch_sections(gpu, qkv, of_rows, torch.empty_like(qkv))
    cache, rotary = (empty(1, kv_heads, 512, dim), empty(1, kv_heads, 512, dim)), (empty(1, dim), empty(1, dim))
    for tables in (rotary, None):  # without rope: layers of Cohere 2 and SmolLM3
        attend.launch(gpu, qkv, tables, cache, empty(1, dtype=torch.int64), None, x, dim**-0.5)
    of_heads = (empty(dim), 1e-5, False), (empty(dim), 1e-5, False)
    for rope_interleaved in ("half", "repeated"):
        attend.launch(
            gpu, qkv, rotary, cache, empty(1, dtype=torch.int64), None, x, dim**-0.5, how=attend.How(rope_interleaved=rope_interleaved)
        )
    how = attend.How(norm_after_rope=True)
    attend.launch(gpu, qkv, rotary, cache, empty(1, dtype=torch.int64), None, x, dim**-0.5, norms=of_heads, how=how)
    for others in (1, 0):
        how, row = attend.How(others=others, v_norm=others == 1), empty(1, (heads + others * kv_heads) * dim)
        attend.launch(gpu, row, rotary, cache, empty(1, dtype=torch.int64), None, x, dim**-0.5, norms=of_heads, how=how)
    for size in (512, 65536):  # the latter's tiles are streamed
        cache, how = (empty(1, kv_heads, size, dim), empty(1, kv_heads, size, dim)), attend.How(rotary_dim=dim, sinks=empty(heads))
        rotary = empty(1, dim // 2), empty(1, dim // 2)
        attend.launch(gpu, qkv, rotary, cache, empty(1, dtype=torch.int64), empty(1, size), x, dim**-0.5, how=how)
    shared_gate = empty(k), empty(1, dtype=torch.float32)
    routing.launch_logits(gpu, x, before, routing.Router(empty(experts, k), None, shared_gate), empty(1, k), logits)
    routing.launch_sum(gpu, empty(chosen, k), weights, x, empty(1, k), (shared_gate[1], empty(1, k)))
    for scores in ("sigmoid", "softmax"):
        choice = routing.Choice(True, scores, empty(experts, dtype=torch.float32), 1.5)
        routing.launch_choice(gpu, logits, empty(1, chosen, dtype=torch.int32), weights, choice)
    routing.launch_sum(gpu, empty(chosen, k), weights, x, empty(1, k), (None, empty(1, k)))
    of_many = routing.Router(empty(experts, k), empty(experts), (shared_gate[0], empty(512, dtype=torch.float32)))
    routing.launch_logits(gpu, empty(512, k), before, of_many, empty(512, k), empty(512, experts, dtype=torch.float32))


def launch_codes(gpu: Gpu, rows: int, dim: int) -> None:
    """Attention of one token to a cache of codes."""
    from halfbyte.kernels.gpu.transformer import attend

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    heads, kv_heads, size = 32, 8, 576
    codes, scales = empty(rows, kv_heads, size, dim, dtype=torch.int8), empty(rows, kv_heads, size, -(-dim // 32))
    cache, rotary, length = (codes, codes, scales, scales), (empty(rows, dim), empty(rows, dim)), empty(1, dtype=torch.int64)
    qkv, out = empty(rows, (heads + 2 * kv_heads) * dim), empty(rows, heads * dim)
    attend.launch(gpu, qkv, rotary, cache, length, empty(rows, size, dtype=torch.bool), out, dim**-0.5)


def launch_prompt(gpu: Gpu, dim: int, tokens: int, masked: bool) -> None:
    """What lies between the products of so many tokens; `masked`: also with norms of heads and sinks."""
    from halfbyte.kernels.gpu.transformer import attend_many, rope

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    heads, kv_heads, size = 32, 8, tokens + 1024
    cache, queries = (empty(1, kv_heads, size, dim), empty(1, kv_heads, size, dim)), empty(1, tokens, heads, dim)
    length, norms = empty(1, dtype=torch.int64), ((empty(dim), 1e-6, False), (empty(dim), 1e-6, False))
    rotary = (empty(1, tokens, dim), empty(1, tokens, dim))
    rope.launch(gpu, empty(tokens, (heads + 2 * kv_heads) * dim), rotary, queries, cache, length, norms if masked else None, dim)
    if masked:
        rope.launch(gpu, empty(tokens, (heads + 2 * kv_heads) * dim), rotary, queries, cache, length, norms, dim, norm_after_rope=True)
    mask = empty(1, tokens, size, dtype=torch.bool) if masked else None
    attend_many.launch(gpu, queries, *cache, length, mask, empty(1, tokens, heads * dim), dim**-0.5, 1.0, empty(heads) if masked else None)


def compile_all(jobs: Sequence[Job]) -> list[list[Binary]]:
    """For each job the binaries of what it launched, in order. Raises AssertionError with the compiler's words where one fails."""
    found: list[list[Binary]] = [[] for _ in jobs]
    for i, worker in enumerate(_workers()):
        assert worker.stdin is not None
        worker.stdin.write(json.dumps([asdict(job) for job in jobs[i::PROCESSES]]) + "\n")
        worker.stdin.flush()
    answers = [json.loads(worker.stdout.readline() or '"a compiler ended"') for worker in _workers() if worker.stdout is not None]
    for i, answer in enumerate(answers):
        assert not isinstance(answer, str), answer
        for j, binaries in enumerate(answer):
            found[i + j * PROCESSES] = [Binary(**binary) for binary in binaries]
    return found


@functools.cache
def _workers() -> list[subprocess.Popen[str]]:
    """Processes that compile, for as long as this one lives: to import torch and Triton takes as long as some kernels do."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = [str(ROOT / folder) for folder in ("src", "tests/shared", "tests/shared/gpu")]
    env["PYTHONPATH"] = os.pathsep.join([*folders, env.get("PYTHONPATH", "")])
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([sys.executable, __file__], env=env, cwd=ROOT, **pipes) for _ in range(PROCESSES)]

    def end() -> None:
        for worker in workers:
            worker.communicate()  # at the end of its input a worker ends

    atexit.register(end)
    return workers


# In the process that compiles


def _main() -> None:
    """Jobs in, binaries or what went wrong out: a line of JSON each. What a compiler prints goes elsewhere."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            answer: Any = [[asdict(binary) for binary in _compile(Job(**job))] for job in json.loads(line)]
        except Exception:
            answer = traceback.format_exc()[-4000:]
        print(json.dumps(answer), file=answers, flush=True)


def _compile(job: Job) -> list[Binary]:
    from halfbyte.kernels.gpu.runtime import launch

    gpu = GPUS[job.arch]
    with launch.recording(dry=True) as recording:
        _function(job.function)(gpu, **job.kwargs)
    assert recording.launches, f"{job} launched nothing"
    launches = [call for call in recording.launches if hasattr(call.kernel, "signature")]  # the rest are torch's own
    launches = [launches[i] for i in job.only] if job.only else launches
    before = "resources" if job.wanted == "product" else job.wanted
    return [_binary(call, gpu, job.wanted if call is launches[-1] else before) for call in launches]


def _function(name: str) -> Any:
    place, _, attribute = name.partition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), attribute)
    spec = importlib.util.spec_from_file_location(Path(place).stem, ROOT / place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, attribute)


def _binary(call: Any, gpu: Gpu, wanted: str) -> Binary:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    arch = int(gpu.arch.removeprefix("sm_")) if gpu.backend == "cuda" else gpu.arch
    target = GPUTarget(gpu.backend, arch, 32 if gpu.backend == "cuda" else 64)
    backend, kernel = make_backend(target), call.kernel
    options = {"debug": False, "instrumentation_mode": "", **call.options}
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(*call.args, **options)
    parsed, signature, constexprs, attrs = kernel._pack_args(backend, options, bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
    words = ", ".join(f"{name}={value}" for name, value in bound.items() if name in {kernel.arg_names[path[0]] for path in constexprs})
    common: dict[str, Any] = {"arch": gpu.arch, "options": words}
    if wanted == "shared":
        shared = _shared(source, backend, parsed, target)
        return Binary(**common, kernel=source.name, shared=shared, ptx="", assembly="", registers=0, spills=0, stack=0)
    compiled = triton.compile(source, target=target, options=parsed.__dict__)
    common |= {"kernel": compiled.name, "shared": compiled.metadata.shared}
    if gpu.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spills = (int(re.findall(rf"\.{name}:\s*(\d+)", text)[-1]) for name in ("vgpr_count", "vgpr_spill_count"))
        return Binary(**common, ptx="", assembly=text, registers=registers, spills=spills, stack=0)
    cubin = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def dump(what: str) -> str:
            command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
            key = f"{what} {triton.__version__} {hashlib.sha256(cubin).hexdigest()}"
            return remembered("dumps", key, lambda: subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout).decode()

        numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump("--dump-resource-usage"))}
        # What is spilled lies on the stack.
        sass = dump("--dump-sass") if wanted in ("assembly", "product") or numbers["STACK"] or numbers["LOCAL"] else ""
    spills = 4 * len(re.findall(r"\bSTL\b", sass)) + 8 * len(re.findall(r"\bSTL\.64", sass)) + 16 * len(re.findall(r"\bSTL\.128", sass))
    return Binary(**common, ptx=compiled.asm["ptx"], assembly=sass, registers=numbers["REG"], spills=spills, stack=numbers["STACK"])


def _shared(source: Any, backend: Any, options: Any, target: Any) -> int:
    """Bytes of shared memory on an NVIDIA GPU: Triton's steps up to the one that finds them, the first of those that make LLVM IR."""
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.nvidia.compiler import get_ptx_version_from_options

    context, stages = ir.context(), dict[str, Any]()
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    module = source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    names = list(stages)
    for name in names[names.index(source.ext) : names.index("llir")]:
        module = stages[name](module, {})
    steps = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(steps)
    passes.ttgpuir.add_allocate_warp_groups(steps)
    passes.convert.add_scf_to_cf(steps)
    passes.gluon.add_inliner(steps)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(steps, target.arch, get_ptx_version_from_options(options, target.arch))
    steps.run(module, "shared memory")
    return int(module.get_int_attr("ttg.shared"))


if __name__ == "__main__":
    _main()
