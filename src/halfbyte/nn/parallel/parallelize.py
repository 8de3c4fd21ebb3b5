"""Tensor parallelism: the weights of a model are distributed over processes, which compute each layer together (torch.distributed).

    mesh = torch.distributed.init_device_mesh("cuda", (2,))
    halfbyte.parallelize_(model, mesh)

Every process runs the same program. A layer cut along its rows gives a part of its outputs, one cut along its columns a sum over a part of
its inputs; `plan.py` decides which. Kernels return these partial sums in the dtype of the activations. Two of them are added in
that dtype, which rounds once; more are added in float32 and rounded once. With p_r the partial sum of process r and u the unit roundoff of
the activations (2^-8 of bfloat16, 2^-11 of float16, 2^-24 of float32, where the sums round too), the additional error compared with one
device is at most

    u (|y| + sum of |p_r|)         + (n - 1) 2^-24 (sum of |p_r|)    for n processes

All processes get the same bits, so that they choose the same tokens and experts. Gathered outputs and rows of embeddings are exact. The
collectives are torch's (all_reduce.py), which torch.compile supports and CUDA graphs record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfbyte import ops
from halfbyte.errors import ArgumentError, UnsupportedError, check_type, unreachable
from halfbyte.formats.sharding import Ranges, narrowed, take
from halfbyte.memory import size_text
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules.quantized import PART, QuantEmbedding, QuantLinear, QuantModule
from halfbyte.nn.modules.weight_view import pack_like
from halfbyte.nn.parallel.all_reduce import all_reduce, prepare
from halfbyte.nn.parallel.plan import Cut, Plan, holders, make_plan, without_numbers
from halfbyte.nn.report import table
from halfbyte.ops.modes import differentiated

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PARTS_ONLY = "each process has only a part of the model, which cannot be saved: load it without a mesh and save that"
_REPORT = "_halfbyte_parallel_report"
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that share a model.

    group  the name of their process group in torch
    """

    group: str
    rank: int
    count: int
    device: str

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Processes:
        """Those of a mesh with one dimension, or of its dimension "tp". Raises ArgumentError for any other mesh."""
        from torch.distributed.device_mesh import DeviceMesh

        check_type(mesh, DeviceMesh, "a mesh is a torch.distributed DeviceMesh", 'pass init_device_mesh("cuda", (processes,))')
        if mesh.ndim != 1:
            if "tp" not in (mesh.mesh_dim_names or ()):
                raise ArgumentError(
                    f'a model is distributed over a mesh of one dimension, or over the one called "tp", got {mesh.ndim} dimensions '
                    f"{mesh.mesh_dim_names}: pass mesh[name]"
                )
            mesh = mesh["tp"]
        return cls(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size(), mesh.device_type)


@dataclass(frozen=True, slots=True)
class Part:
    """A module's part of a distributed weight.

    size   of the whole weight along the dimension that is cut
    bias   whether the whole module has a bias; with columns cut, only the first process adds it
    """

    cut: Cut
    processes: Processes
    size: int
    bias: bool = False

    @property
    def rank_slices(self) -> Ranges:
        return self.cut.parts[self.processes.rank]


def part_of(module: nn.Module) -> Part | None:
    """A module's part of its weight; None if it has all of it."""
    found = getattr(module, PART, None)
    return found if isinstance(found, Part) else None


def whole_rows(module: nn.Module) -> int:
    """The total rows of a module's weight (an embedding's vocabulary) in all processes."""
    part, weight = part_of(module), module.weight
    assert isinstance(weight, Tensor)
    return part.size if part is not None and part.cut.along == "outputs" else weight.shape[0]


def is_parallel(model: nn.Module) -> bool:
    return any(part_of(module) is not None for module in model.modules())


def parallelize_(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str] | None = None, *, exact: bool = False) -> nn.Module:
    """Shard the weights of a model over the processes of a mesh, in place: each keeps its part.

    Every process of `mesh` calls it with the same model, and then computes with the same inputs. Weights may be quantized or in floating
    point; `load(folder, mesh=mesh)` does the same without a whole model in memory.

    `parallel_report(model)` tells how each module was cut. The model is frozen: gradients do not cross processes.

    Args:
        model: The same model in every process.
        mesh: torch's DeviceMesh of one dimension, or with one called "tp".
        plan: pattern of module names -> style, such as {"*.up_proj": "colwise", "*.down_proj": "rowwise"}; see `nn/parallel/plan.py`. By
            default the model's own, which transformers' models have.
        exact: Cut only rows: no sums across processes, each output is computed as on one device, and more data is sent.

    Returns:
        `model`.

    Raises:
        ArgumentError: The mesh or the plan does not fit. Nothing has changed then.
        UnsupportedError: A style is unknown. Nothing has changed then.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> model = hb.parallelize_(nn.Sequential(nn.Linear(64, 64)), mesh, {"0": "colwise"})
    """
    processes = Processes.of(mesh)
    if any(isinstance(module, FusedLinear) for module in model.modules()):
        raise ArgumentError("the model computes some layers together: call parallelize_ first, then fuse_")
    if is_parallel(model):
        raise ArgumentError("the model is distributed over processes already: load it again")
    sharding = make_plan(model, holders(model), plan, processes.count, device=processes.device, exact=exact)
    modules = dict(model.named_modules(remove_duplicate=False))
    before = bytes_of_holders(model)
    parts = parts_of_plan(modules, sharding, processes)
    shrink_all_({name: modules[name] for name in sharding.cuts if name in before}, parts)
    attach_(model, sharding, parts, before)
    return model


def parts_of_plan(modules: Mapping[str, object], plan: Plan, processes: Processes) -> dict[str, Part]:
    """The Part of each module that `plan` cuts; to be called before the modules are shrunk."""
    parts = {}
    for name, cut in plan.cuts.items():
        weight = getattr(modules[name], "weight", None)
        size = 0 if weight is None else int(weight.shape[cut.dim])
        parts[name] = Part(cut, processes, size, getattr(modules[name], "bias", None) is not None)
    return parts


def shrink_all_(modules: Mapping[str, nn.Module], parts: Mapping[str, Part]) -> None:
    """Call `shrink_` for each module; for one with several names once."""
    moved: dict[int, object] = {}
    for module, part in {id(module): (module, parts[name]) for name, module in modules.items()}.values():
        shrink_(module, part, moved)


def shrink_(module: nn.Module, part: Part, moved: dict[int, Any]) -> None:
    """Reduces a module's weight and bias to this process's part.

    moved  weights that have been cut, by the id of the originals: modules that share a weight also share its part
    """
    cut, rank_slices = part.cut, part.rank_slices
    any_module: Any = module
    weight: Any = module.packed.data if isinstance(module, QuantModule) else any_module.weight
    if isinstance(module, QuantModule):
        if id(weight) not in moved:
            moved[id(weight)] = pack_like(module.packed, take(module.codes(), cut.dim, rank_slices), module.packed.device)
        module._set_packed(moved[id(weight)])
    else:
        if id(weight) not in moved:
            moved[id(weight)] = nn.Parameter(narrowed(weight, cut.dim, rank_slices), requires_grad=False)
        any_module.weight = moved[id(weight)]
    if part.bias:
        if cut.along == "outputs":
            any_module.bias = nn.Parameter(narrowed(any_module.bias, 0, rank_slices), requires_grad=False)
        elif part.processes.rank > 0:
            any_module.bias = None
    n, k = any_module.weight.shape[-2:]
    if isinstance(module, nn.Linear | QuantLinear):
        module.out_features, module.in_features = n, k
    elif isinstance(module, nn.Embedding | QuantEmbedding):
        module.num_embeddings = n
    if isinstance(module, QuantModule):
        module.refresh()


def attach_(model: nn.Module, plan: Plan, parts: Mapping[str, Part], before: Mapping[str, int]) -> None:
    """Add the communication with other processes to modules that have been shrunk.

    before  bytes of each whole module that holds a weight
    """
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    for name, part in parts.items():
        module = modules[name]
        setattr(module, PART, part)
        if part.cut.before or part.cut.after:
            module.forward = partial(_forward, module)
    rank = next((part.processes.rank for part in parts.values()), 0)
    for name, groups in plan.groups.items():
        if hasattr(modules[name], "num_key_value_groups"):
            modules[name].num_key_value_groups = groups[rank]
    if hasattr(any_model := modules[""], "_get_static_cache_init_shape"):
        any_model._get_static_cache_init_shape = _as_they_come
    model.requires_grad_(False)
    processes = next((part.processes for part in parts.values()), None)
    sums = "" if processes is None else prepare(processes.group, processes.device)
    setattr(model, _REPORT, _report(model, plan, parts, before, sums))


def _as_they_come() -> None:
    """Replace the method by which transformers asks for the heads of a static cache: it returns nothing, so that the cache is allocated at
    the first call, for the heads of this process."""


# What happens when such a module is called


def _forward(module: nn.Module, x: Tensor, *others: object) -> Tensor:
    """The module's own forward, with the communication that its cut requires before and after."""
    part = part_of(module)
    assert part is not None
    cut, processes = part.cut, part.processes
    match cut.before:
        case "look up":
            return _look_up(module, part, x)
        case "gather":
            x = _gather(x, cut.sizes, processes)
        case "split":
            x = (
                torch.cat([x[..., a:b] for a, b in part.rank_slices], -1)
                if len(part.rank_slices) > 1
                else x[..., part.rank_slices[0][0] : part.rank_slices[0][1]]
            )
        case "":
            pass
        case _:
            raise unreachable(cut.before, "the communication before a product,")
    y: Tensor = type(module).forward(module, x, *others)
    match cut.after:
        case "reduce":
            return _reduce(y, processes)
        case "gather":
            return _gather(y, [sum(stop - start for start, stop in runs) for runs in cut.parts], processes)
        case "":
            return y
        case _:
            raise unreachable(cut.after, "the communication after a product,")


def linear_added(linear: QuantLinear, x: Tensor, residual: Tensor) -> Tensor:
    """residual + linear(x), x [..., K], residual and result [..., N], added within the product; `linear` may be a part.

    Where partial sums are added, the first process adds the residual to its own.
    """
    part = part_of(linear)
    summed = part is not None and (part.cut.before, part.cut.after) == ("", "reduce")
    if part is not None and not summed:
        return residual + _forward(linear, x)
    first = residual if part is None or part.processes.rank == 0 else None
    y = ops.linear(x, linear.packed, linear.bias, residual=first, compute=linear.compute, activation=linear.activation)
    return y if part is None else _reduce(y, part.processes)


def _look_up(module: nn.Module, part: Part, ids: Tensor) -> Tensor:
    """Rows of a distributed embedding: each process gives those that it has, and zeros for the others."""
    ((start, stop),) = part.rank_slices
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
        least, most = (int(bound) for bound in torch.aminmax(ids))
        if least < 0 or most >= part.size:  # raised in every process, so that none waits for another
            raise ArgumentError(f"embedding ids lie in 0 … {part.size - 1}, got {least} … {most}")
    in_range = (ids >= start) & (ids < stop)
    rows: Tensor = type(module).forward(module, (ids - start).clamp(0, stop - start - 1))
    rows = rows.masked_fill(~in_range.unsqueeze(-1), 0.0)
    return _reduce(rows.masked_fill(((ids < 0) | (ids >= part.size)).unsqueeze(-1), torch.nan), part.processes)


def _reduce(x: Tensor, processes: Processes) -> Tensor:
    """The sum of all processes' x, the same bits in each."""
    _check_frozen(x)
    wide = processes.count > 2 and x.dtype in _HALVES
    return all_reduce(x.float() if wide else x, processes.group).to(x.dtype)


def _gather(x: Tensor, sizes: Sequence[int], processes: Processes) -> Tensor:
    """All processes' x [..., sizes[rank]], concatenated: [..., sum of sizes]."""
    _check_frozen(x)
    most = max(sizes)
    padded = (x if x.shape[-1] == most else functional.pad(x, (0, most - x.shape[-1]))).contiguous()
    together: Tensor = torch.ops._c10d_functional.all_gather_into_tensor.default(padded, processes.count, processes.group)
    together = torch.ops._c10d_functional.wait_tensor.default(together)
    parts = together.view(processes.count, *padded.shape)
    return torch.cat([parts[rank][..., :size] for rank, size in enumerate(sizes)], -1)


def _check_frozen(x: Tensor) -> None:
    if differentiated(x, None, None):
        raise UnsupportedError("gradients do not cross processes: call the model under torch.no_grad()")


# What became of a model


@dataclass(frozen=True, slots=True)
class ParallelRow:
    """One module that holds a weight.

    how    this process's part: "outputs 0 … 255 of 512", "inputs …", "whole"
    why    the reason, or a remark
    before, after   bytes of the module, whole and here
    """

    name: str
    how: str
    why: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class ParallelReport:
    """This process's part of each weight. `str()` is a table, one line for all layers with the same sharding.

    sums  how parts of sums are added across processes
    """

    rows: tuple[ParallelRow, ...]
    rank: int
    count: int
    sums: str = ""

    def to_json(self) -> dict[str, object]:
        return {"rank": self.rank, "count": self.count, "sums": self.sums, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        by_form: dict[tuple[str, ...], list[ParallelRow]] = {}
        for row in self.rows:
            by_form.setdefault((without_numbers(row.name), row.how, row.why), []).append(row)
        lines = [("weight", "", "here", "", "whole", "here")]
        for (name, how, why), rows in by_form.items():
            sizes = size_text(sum(row.before for row in rows)), size_text(sum(row.after for row in rows))
            lines.append((name, f"{len(rows)} times" if len(rows) > 1 else "", how, why, *sizes))
        before, after = (size_text(sum(getattr(row, key) for row in self.rows)) for key in ("before", "after"))
        added = f"; sums by {self.sums}" if self.sums else ""
        return "\n".join([*table(lines, left=4), "", f"process {self.rank} of {self.count}: {after} of {before}{added}"])


def parallel_report(model: nn.Module) -> ParallelReport:
    """Return this process's parts of a distributed model.

    Args:
        model: Distributed by `parallelize_` or `load`.

    Returns:
        The report; `str()` is a table.

    Raises:
        ArgumentError: The model is not distributed.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> model = hb.parallelize_(nn.Sequential(nn.Linear(64, 64)), mesh, {"0": "colwise"})
        >>> report = hb.parallel_report(model)
    """
    found = getattr(model, _REPORT, None)
    if not isinstance(found, ParallelReport):
        raise ArgumentError("the model is not distributed over processes: use parallelize_, or load it with mesh=")
    return found


def _report(model: nn.Module, plan: Plan, parts: Mapping[str, Part], before: Mapping[str, int], sums: str) -> ParallelReport:
    rows, seen = [], set()
    rank, count = next(((part.processes.rank, part.processes.count) for part in parts.values()), (0, 1))
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module.packed_data if isinstance(module, QuantModule) else module._parameters.get("weight")
        if name in plan.cuts and name in before:
            cut, size = plan.cuts[name], parts[name].size
            runs = " and ".join(f"{start} … {stop - 1}" for start, stop in cut.parts[rank])
            how, why = f"{cut.along} {runs} of {size}", cut.why
        elif name in plan.kept:
            how, why = "whole", plan.kept[name]
        elif any(True for _ in module.parameters(recurse=False)):
            how, why = "whole", "only Linear, Embedding and quantized experts are cut"
        else:
            continue
        after, whole = _nbytes(module), before.get(name, _nbytes(module))
        tied = weight is not None and id(weight) in seen
        seen.add(id(weight))
        rows.append(ParallelRow(name, how, "shares its weight" if tied else why, 0 if tied else whole, 0 if tied else after))
    return ParallelReport(tuple(rows), rank, count, sums)


def bytes_of_holders(model: nn.Module) -> dict[str, int]:
    """Bytes of each module that holds a weight, by name."""
    return {name: _nbytes(model.get_submodule(name)) for name in holders(model)}


def _nbytes(module: nn.Module) -> int:
    """Bytes of a module's own parameters and packed weight."""
    packed = module.packed.nbytes if isinstance(module, QuantModule) else 0
    return packed + sum(parameter.nbytes for parameter in module.parameters(recurse=False))
