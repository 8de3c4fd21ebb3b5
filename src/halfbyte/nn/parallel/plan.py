"""The plan of tensor parallelism: how each weight of a model is cut among processes.

A plan assigns styles to modules by patterns of their names. transformers' models have plans, and its names of styles are used here:

    colwise                  rows of W (outputs) are cut, and the result stays distributed
    rowwise                  the input is distributed: columns of W are cut, and the partial sums are added
    colwise_gather_output    rows are cut, and the parts of the result are gathered
    rowwise_split_input      as rowwise, but the input is whole
    packed_colwise           as colwise, for two matrices concatenated along their rows: each is cut separately
    embedding_rowwise        an embedding, cut along its vocabulary
    moe_tp_experts           a module of experts, each of which is cut like a gated layer

Modules of one parent that pass distributed tensors to each other are cut at the same places: attention between heads, gated layers where
the columns of the rowwise weight can be cut, which is between its blocks. If the columns of a rowwise weight cannot be cut so, its rows
are: the parts of its input are gathered first, and the parts of its result afterwards. That changes no number either.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.formats.sharding import Ranges, even_ranges
from halfbyte.formats.spec import Format
from halfbyte.nn.modules.experts import MixtureOfExperts, QuantExperts, StackedExperts
from halfbyte.nn.modules.low_rank import LowRankLinear
from halfbyte.nn.modules.permuted import PermutedLinear
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantLinear

_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT = ("rowwise_split_input", "rowwise_rep")
_EMBEDDING = ("embedding_rowwise", "embedding_colwise")
# Styles without effect on a model that is not trained and whose parameters are plain tensors.
_NO_EFFECT = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params")
STYLES = ("colwise", "rowwise", *_GATHERED, *_SPLIT, "packed_colwise", *_EMBEDDING, "moe_tp_experts", *_NO_EFFECT)
_TILE = 64  # rows or columns: parts of fewer would leave tiles of the kernels half empty
_NOT_NAMED = "the plan does not name it"


Kind = Literal["Linear", "Embedding", "Experts"]


@dataclass(frozen=True, slots=True)
class Holder:
    """A module with a weight that can be cut.

    shape   [N, K], or [E, N, K] of experts
    format  None in floating point
    weight  equal for modules that share one
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    weight: Hashable
    format: Format | None = None
    compute: str = "float"
    activation: str = "block"
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a weight that each process has, and the communication when it is used.

    along   the dimension that is cut: the outputs N (an embedding's vocabulary) or the inputs K
    parts   for each process its ranges along that dimension
    before  "gather": the input is distributed in parts of these `sizes`, which are gathered; "split": it is whole, each process takes its
            part; "look up": each process looks up only its own rows
    after   "reduce": partial results are added; "gather": parts of the result are gathered
    why     the reason, or a remark
    """

    along: Literal["outputs", "inputs"]
    parts: tuple[Ranges, ...]
    before: Literal["", "gather", "split", "look up"] = ""
    after: Literal["", "reduce", "gather"] = ""
    sizes: tuple[int, ...] = ()
    why: str = ""

    @property
    def dim(self) -> int:
        return -2 if self.along == "outputs" else -1


@dataclass(frozen=True, slots=True)
class Plan:
    """cuts    of modules, by name; modules of experts also have one for their outputs
    kept    the reason why each other module that holds a weight stays whole
    groups  of modules of attention, query heads that share a key head, for each process
    """

    cuts: dict[str, Cut] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)


def holders(model: nn.Module) -> dict[str, Holder]:
    """Everything in a model that can be cut, by name."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LowRankLinear):
            raise UnsupportedError(f"{name} has a product of low rank, which processes cannot share: quantize without low_rank")
        if isinstance(module, QuantLinear | QuantEmbedding | QuantExperts):
            shape, fmt, weight = module.codes_shape, module.packed.codes_format, id(module.packed_data)
            if isinstance(module, QuantEmbedding):
                found[name] = Holder(name, "Embedding", shape, weight, fmt)
            else:
                kind: Literal["Linear", "Experts"] = "Linear" if isinstance(module, QuantLinear) else "Experts"
                ordered = isinstance(module, PermutedLinear)
                found[name] = Holder(name, kind, shape, weight, fmt, module.compute, module.activation, ordered)
        elif isinstance(module, nn.Linear | nn.Embedding | StackedExperts):
            kind_of: dict[type[nn.Module], Kind] = {nn.Linear: "Linear", nn.Embedding: "Embedding", StackedExperts: "Experts"}
            name_of = next(kind for base, kind in kind_of.items() if isinstance(module, base))
            found[name] = Holder(name, name_of, tuple(module.weight.shape), id(module.weight))
    return found


def make_plan(
    model: nn.Module, found: Mapping[str, Holder], patterns: Mapping[str, str] | None, count: int, *, device: str, exact: bool
) -> Plan:
    """How `count` processes, each with a device of this type, share the weights `found` of a model.

    patterns  pattern of module names -> style; None: the model's own
    exact     cut no columns

    Raises ArgumentError for a pattern that matches nothing and for a model without a plan, UnsupportedError for a style that is not in
    STYLES.
    """
    if count == 1:
        return Plan(kept=dict.fromkeys(found, "there is one process"))
    planner = _Planner(model, found, _styles(model, patterns), count, device, exact)
    return planner.plan()


def without_numbers(name: str) -> str:
    """A module's name as in transformers' plans, with `*` for the numbers of layers: "layers.*.mlp"."""
    return ".".join("*" if piece.isdigit() else piece for piece in name.split("."))


def _styles(model: nn.Module, patterns: Mapping[str, str] | None) -> dict[str, str]:
    """The style of each module and parameter that a plan names."""
    is_default = patterns is None
    given: Mapping[str, str] | None = getattr(model, "tp_plan", None) if patterns is None else patterns
    if not given:
        raise ArgumentError(f'{type(model).__name__} has no tp_plan, which says what is cut: pass plan={{"*.up_proj": "colwise", …}}')
    names = [*dict(model.named_modules(remove_duplicate=False)), *dict(model.named_parameters())]
    styles: dict[str, str] = {}
    for name in filter(None, names):
        style = given.get(without_numbers(name)) or next((style for pattern, style in given.items() if fnmatchcase(name, pattern)), None)
        if style is not None:
            styles[name] = style
    if unknown := next((name for name, style in styles.items() if style not in STYLES), None):
        raise UnsupportedError(f"the plan's style for {unknown} is one of {', '.join(STYLES)}, got {styles[unknown]!r}: pass another plan")
    if not is_default:
        for pattern in given:
            if not any(fnmatchcase(name, pattern) or without_numbers(name) == pattern for name in names):
                close = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or ["none"]
                raise ArgumentError(f"the plan's pattern {pattern!r} matches no module: the closest names are {', '.join(close)}")
    return styles


class _Planner:
    """Makes the plan of one model for `count` processes."""

    def __init__(
        self, model: nn.Module, found: Mapping[str, Holder], styles: Mapping[str, str], count: int, device: str, exact: bool
    ) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.found, self.styles, self.count, self.device, self.exact = found, styles, count, device, exact
        self.result = Plan()

    def plan(self) -> Plan:
        families: dict[str, list[Holder]] = defaultdict(list)
        for name, holder in self.found.items():
            style, parent = self.styles.get(name, ""), self.modules.get(name.rpartition(".")[0])
            if isinstance(parent, MixtureOfExperts) and parent.biased:
                self.result.kept[name] = "its experts have biases"
            elif style in ("colwise", "packed_colwise", "rowwise"):
                families[name.rpartition(".")[0]].append(holder)
            elif style in (*_GATHERED, *_EMBEDDING):
                self._rows(holder)
            elif style in _SPLIT:
                self._split(holder)
            else:
                self.result.kept[name] = "the plan keeps it whole" if style else _NOT_NAMED
        for whole, family in families.items():
            self._family(whole, family)
        self._tie()
        return self.result

    # Modules that hand parts to each other

    def _family(self, parent: str, family: Sequence[Holder]) -> None:
        producers = [holder for holder in family if self.styles[holder.name] != "rowwise"]
        takers = [holder for holder in family if self.styles[holder.name] == "rowwise"]
        heads = _heads(self.modules[parent]) if any(_leaf(holder).startswith("q") for holder in producers) else None
        if not producers or not takers:
            reason: str | None = "what it is connected to is in another module"
        elif direct := [name for name, _ in self.modules[parent].named_parameters(recurse=False) if f"{parent}.{name}" in self.styles]:
            reason = f"{parent}.{direct[0]} would have to be cut like it"
        else:
            reason = self._attention(parent, producers, takers, *heads) if heads else self._gated(parent, producers, takers)
        if reason is not None:
            for holder in producers:
                self._rows(holder, reason)
            for holder in takers:
                self._split(holder, reason)

    def _attention(self, parent: str, producers: Sequence[Holder], takers: Sequence[Holder], heads: int, kv_heads: int) -> str | None:
        """Cut between heads; return the reason if that is impossible."""
        grouped = {h.name: kv_heads if kv_heads != heads and _leaf(h)[0] in "kv" else heads for h in producers}
        grouped |= {holder.name: heads for holder in takers}
        sizes = {holder.name: holder.shape[-1] if holder in takers else holder.shape[-2] for holder in (*producers, *takers)}
        packed = any(self.styles[holder.name] == "packed_colwise" for holder in producers)
        if heads < self.count:
            return f"{heads} heads are fewer than {self.count} processes"
        if packed or heads % kv_heads or any(size % grouped[name] for name, size in sizes.items()):
            return f"its outputs are not those of {heads} heads"
        query_heads, keys = _spread_heads(heads, kv_heads, self.count)
        for holder in producers:
            of = grouped[holder.name]
            self._cut(holder, Cut("outputs", _scaled(query_heads if of == heads else keys, sizes[holder.name] // of)))
        for holder in takers:
            self._take(holder, _scaled(query_heads, sizes[holder.name] // heads), "blocks reach from one head into the next")
        self.result.groups[parent] = tuple((b - a) // (d - c) for (a, b), (c, d) in zip(query_heads, keys, strict=True))
        return None

    def _gated(self, parent: str, producers: Sequence[Holder], takers: Sequence[Holder]) -> str | None:
        """Cut outputs that are combined element by element; return the reason if that is impossible."""
        inner = takers[0].shape[-1]
        halves = {h.name: 2 if self.styles[h.name] == "packed_colwise" else 1 for h in producers}
        if any(h.shape[-2] != inner * halves[h.name] for h in producers) or any(h.shape[-1] != inner for h in takers):
            return "its outputs are not the inputs of what follows, one for one"
        if inner < self.count:
            return f"{inner} outputs are fewer than {self.count} processes"
        tile = _tile(inner, self.count)
        unit = math.lcm(*(_input_unit(h, self.count) if self._whole(h) is None else 1 for h in takers))
        runs = even_ranges(inner, self.count, unit if unit > 1 and -(-inner // unit) >= self.count else tile)
        for holder in producers:
            self._cut(
                holder, Cut("outputs", tuple(tuple((inner * i + a, inner * i + b) for i in range(halves[holder.name])) for a, b in runs))
            )
        for holder in takers:
            self._take(holder, tuple((run,) for run in runs), f"there are not enough blocks for {self.count} processes")
        return None

    def _take(self, holder: Holder, parts: tuple[Ranges, ...], else_: str) -> None:
        """Cut a weight whose input is distributed in `parts`: along these if the weight can be cut there."""
        unit, k = _input_unit(holder, 0), holder.shape[-1]
        reason = self._whole(holder)
        if reason is None and any(stop % unit and stop != k for part in parts for _, stop in part):
            reason = else_
        parent = holder.name.rpartition(".")[0]
        experts = isinstance(self.modules[parent], MixtureOfExperts)  # they sum the weighted outputs, which must be whole
        if reason is None:
            self._cut(holder, Cut("inputs", parts, after="" if experts else "reduce"))
            if experts:
                self.result.cuts[parent] = Cut("outputs", (), after="reduce")
            return
        sizes = tuple(sum(stop - start for start, stop in part) for part in parts)
        rows = self._even(holder)
        whole = rows is None
        rows = rows or (((0, holder.shape[-2]),),) * self.count
        cut = Cut("outputs", rows, "gather", "" if experts or whole else "gather", sizes, reason)
        self._cut(holder, cut)
        if experts and not whole:
            self.result.cuts[parent] = Cut("outputs", rows, after="gather")

    # Modules on their own

    def _rows(self, holder: Holder, why: str = "") -> None:
        """Cut rows; the result is gathered."""
        rows = self._even(holder)
        if rows is None or holder.kind == "Experts":
            short = f"{holder.shape[-2]} outputs are fewer than {self.count} processes"
            self.result.kept[holder.name] = why or short
        elif holder.kind == "Embedding":
            self._cut(holder, Cut("outputs", rows, "look up", "reduce"))
        else:
            self._cut(holder, Cut("outputs", rows, after="gather", why=why))

    def _split(self, holder: Holder, why: str = "") -> None:
        """Cut the columns of a weight whose input is whole."""
        unit = _input_unit(holder, self.count)
        if holder.kind == "Linear" and self._whole(holder) is None and -(-holder.shape[-1] // unit) >= self.count:
            parts = tuple((run,) for run in even_ranges(holder.shape[-1], self.count, unit))
            self._cut(holder, Cut("inputs", parts, "split", "reduce", why=why))
        else:
            self._rows(holder, why or self._whole(holder) or "")

    def _even(self, holder: Holder) -> tuple[Ranges, ...] | None:
        """Rows for each process, or None where there are not enough."""
        n = holder.shape[-2]
        return None if n < self.count else tuple((run,) for run in even_ranges(n, self.count, _tile(n, self.count)))

    def _cut(self, holder: Holder, cut: Cut) -> None:
        self.result.cuts[holder.name] = cut
        self.result.kept.pop(holder.name, None)

    def _whole(self, holder: Holder) -> str | None:
        """The reason why a part of the inputs and columns would not give a partial sum of the same result; None if it would."""
        fmt = holder.format
        if self.exact:
            return "exact sums are required"
        if holder.ordered:
            return "its columns are permuted"
        if fmt is None or holder.compute == "float" or (holder.compute == "auto" and self.device != "cpu"):
            return None
        if not isinstance(fmt.block, int) or holder.activation not in ("block", "block_offset"):
            return "activations are quantized with one scale for all inputs"
        return None

    def _tie(self) -> None:
        """Give modules that share a weight the same part of it: rows, if any of them has rows cut."""
        sharing: dict[Hashable, list[Holder]] = defaultdict(list)
        for holder in self.found.values():
            sharing[holder.weight].append(holder)
        for family in sharing.values():
            cuts = [self.result.cuts.get(holder.name) for holder in family]
            if len(family) == 1 or not any(cuts):
                continue
            alone = all(cut is None or (cut.along == "outputs" and cut.after and cut.before in ("", "look up")) for cut in cuts)
            for holder in family:
                if alone:
                    self._rows(holder)
                else:
                    names = ", ".join(other.name for other in family if other is not holder)
                    raise UnsupportedError(f"the plan cuts {holder.name}, which shares its weight with {names}: leave it out of the plan")


def _heads(attention: nn.Module) -> tuple[int, int] | None:
    """(query heads, key heads) of a module of attention, None for another."""
    config: object = getattr(attention, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    groups = getattr(attention, "num_key_value_groups", None)
    kv_heads = heads // groups if isinstance(groups, int) and groups > 0 else getattr(config, "num_key_value_heads", None)
    return heads, kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads


def _spread_heads(heads: int, kv_heads: int, count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(query heads, key heads) of each process, so that all groups of a process have the same size.

    With fewer key heads than processes, a key head is replicated.
    """
    group = heads // kv_heads
    if kv_heads >= count:
        keys = even_ranges(kv_heads, count)
        return [(a * group, b * group) for a, b in keys], keys
    cut_heads, shared = [], []
    for key, (first, last) in enumerate(even_ranges(count, kv_heads)):
        for start, stop in even_ranges(group, last - first):
            cut_heads.append((key * group + start, key * group + stop))
            shared.append((key, key + 1))
    return cut_heads, shared


def _scaled(runs: Sequence[tuple[int, int]], size: int) -> tuple[Ranges, ...]:
    return tuple(((a * size, b * size),) for a, b in runs)


def _input_unit(holder: Holder, count: int) -> int:
    """The number of columns that must stay together: a block, in whole bytes; or a tile, if there are enough for `count` processes."""
    if holder.format is not None and isinstance(holder.format.block, int):
        block = holder.format.block
        return 2 * block if block % 2 and holder.format.bits == 4 else block
    tile = _tile(holder.shape[-1], count) if count else 1
    return math.lcm(tile, 2) if holder.format is not None and holder.format.bits == 4 else tile


def _tile(size: int, count: int) -> int:
    return _TILE if size >= _TILE * count else 1


def _leaf(holder: Holder) -> str:
    return holder.name.rpartition(".")[2]
