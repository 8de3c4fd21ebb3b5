"""Which weight of a model is cut how, so that several processes compute it together.

A plan gives modules styles by patterns of their names. The models of transformers bring theirs, and its names for styles are used here:

    colwise                  rows of W (outputs) are cut, and the result stays in parts
    rowwise                  the input comes in parts: columns of W are cut, and the partial sums are added
    colwise_gather_output    rows are cut, and the parts of the result are put together
    rowwise_split_input      as rowwise, of an input that comes whole
    packed_colwise           as colwise, of two matrices below each other: each is cut by itself
    embedding_rowwise        an embedding, cut by its vocabulary
    moe_tp_experts           a module of experts, each of which is cut like a gated layer

Modules of one parent that hand parts to each other are cut at the same places: attention between heads, layers with a gate where the
columns of the rowwise weight may be cut, which is between its blocks. Where the columns of a rowwise weight cannot be cut so, its rows
are: the parts of its input are put together first, and the parts of its result after. That changes no number either.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.formats.sharding import Ranges, spread
from halfbyte.formats.spec import Format
from halfbyte.nn.experts import MixtureOfExperts, QuantExperts, StackedExperts
from halfbyte.nn.modules import QuantEmbedding, QuantLinear
from halfbyte.nn.permuted import PermutedLinear

_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT = ("rowwise_split_input", "rowwise_rep")
_EMBEDDING = ("embedding_rowwise", "embedding_colwise")
# What means nothing to a model that is not trained and whose parameters are plain tensors.
_NOTHING = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params")
STYLES = ("colwise", "rowwise", *_GATHERED, *_SPLIT, "packed_colwise", *_EMBEDDING, "moe_tp_experts", *_NOTHING)
_TILE = 64  # rows or columns: parts of fewer would leave tiles of the kernels half empty
_NOT_NAMED = "the plan does not name it"


@dataclass(frozen=True, slots=True)
class Holder:
    """A module with a weight that can be cut.

    shape   [N, K], or [E, N, K] of experts
    format  None in floating point
    weight  equal for modules that share one
    """

    name: str
    kind: Literal["Linear", "Embedding", "Experts"]
    shape: tuple[int, ...]
    weight: Hashable
    format: Format | None = None
    compute: str = "float"
    activation: str = "block"
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """What each process has of a weight, and what goes between processes when it is used.

    along   which dimension of the weight: its outputs N (an embedding's vocabulary) or its inputs K
    parts   of each process: its runs along that dimension
    before  "gather": the input comes in parts of these `sizes`, and is put together; "split": it comes whole, each process takes its part;
            "look up": ids of rows that others have are left to them
    after   "reduce": partial results are added; "gather": parts of the result are put together
    why     what there is to say about it
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
    """cuts    of modules, by name; those of experts have one for what becomes of their outputs
    kept    why each other module that holds a weight stays whole
    groups  of modules of attention, query heads that share a key head, for each process
    """

    cuts: dict[str, Cut] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)


def holders(model: nn.Module) -> dict[str, Holder]:
    """Everything in a model that can be cut, by name."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantLinear | QuantEmbedding | QuantExperts):
            shape, fmt, weight = module.codes_shape, module.packed.format, id(module.packed_data)
            if isinstance(module, QuantEmbedding):
                found[name] = Holder(name, "Embedding", shape, weight, fmt)
            else:
                kind: Literal["Linear", "Experts"] = "Linear" if isinstance(module, QuantLinear) else "Experts"
                ordered = isinstance(module, PermutedLinear)
                found[name] = Holder(name, kind, shape, weight, fmt, module.compute, module.activation, ordered)
        elif isinstance(module, nn.Linear | nn.Embedding | StackedExperts):
            kind_of = {nn.Linear: "Linear", nn.Embedding: "Embedding", StackedExperts: "Experts"}
            name_of: Any = next(kind for base, kind in kind_of.items() if isinstance(module, base))
            found[name] = Holder(name, name_of, tuple(module.weight.shape), id(module.weight))
    return found


def make_plan(
    model: nn.Module, found: Mapping[str, Holder], patterns: Mapping[str, str] | None, count: int, *, device: str, exact: bool
) -> Plan:
    """How `count` processes, each with a device of this type, share the weights `found` of a model.

    patterns  pattern of module names -> style; None: what the model brings
    exact     no columns are cut

    Raises ArgumentError for a pattern that matches nothing and for a model without a plan, UnsupportedError for a style that is none of
    STYLES.
    """
    if count == 1:
        return Plan(kept=dict.fromkeys(found, "there is one process"))
    planner = _Planner(model, found, _styles(model, patterns), count, device, exact)
    return planner.plan()


def without_numbers(name: str) -> str:
    """A module's name as plans of transformers write it, with `*` for the numbers of layers: "layers.*.mlp"."""
    return ".".join("*" if piece.isdigit() else piece for piece in name.split("."))


def _styles(model: nn.Module, patterns: Mapping[str, str] | None) -> dict[str, str]:
    """The style of each module and parameter that a plan names."""
    own = patterns is None
    given: Any = getattr(model, "tp_plan", None) if patterns is None else patterns
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
    if not own:
        for pattern in given:
            if not any(fnmatchcase(name, pattern) or without_numbers(name) == pattern for name in names):
                close = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or ["none"]
                raise ArgumentError(f"the plan's pattern {pattern!r} matches no module: the closest names are {', '.join(close)}")
    return styles


class _Planner:
    """One model, shared by `count` processes."""

    def __init__(
        self, model: nn.Module, found: Mapping[str, Holder], styles: Mapping[str, str], count: int, device: str, exact: bool
    ) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.found, self.styles, self.count, self.device, self.exact = found, styles, count, device, exact
        self.made = Plan()

    def plan(self) -> Plan:
        families: dict[str, list[Holder]] = defaultdict(list)
        for name, holder in self.found.items():
            style, parent = self.styles.get(name, ""), self.modules.get(name.rpartition(".")[0])
            if isinstance(parent, MixtureOfExperts) and parent.biased:
                self.made.kept[name] = "its experts have biases"
            elif style in ("colwise", "packed_colwise", "rowwise"):
                families[name.rpartition(".")[0]].append(holder)
            elif style in (*_GATHERED, *_EMBEDDING):
                self._rows(holder)
            elif style in _SPLIT:
                self._split(holder)
            else:
                self.made.kept[name] = "the plan keeps it whole" if style else _NOT_NAMED
        for whole, family in families.items():
            self._family(whole, family)
        self._tie()
        return self.made

    # Modules that hand parts to each other

    def _family(self, parent: str, family: Sequence[Holder]) -> None:
        producers = [holder for holder in family if self.styles[holder.name] != "rowwise"]
        takers = [holder for holder in family if self.styles[holder.name] == "rowwise"]
        heads = _heads(self.modules[parent]) if any(_leaf(holder).startswith("q") for holder in producers) else None
        if not producers or not takers:
            reason: str | None = "what it is connected to is in another module"
        elif own := [name for name, _ in self.modules[parent].named_parameters(recurse=False) if f"{parent}.{name}" in self.styles]:
            reason = f"{parent}.{own[0]} would have to be cut like it"
        else:
            reason = self._attention(parent, producers, takers, *heads) if heads else self._gated(parent, producers, takers)
        if reason is not None:
            for holder in producers:
                self._rows(holder, reason)
            for holder in takers:
                self._split(holder, reason)

    def _attention(self, parent: str, producers: Sequence[Holder], takers: Sequence[Holder], heads: int, kv_heads: int) -> str | None:
        """Cuts between heads; says why not."""
        grouped = {h.name: kv_heads if kv_heads != heads and _leaf(h)[0] in "kv" else heads for h in producers}
        grouped |= {holder.name: heads for holder in takers}
        sizes = {holder.name: holder.shape[-1] if holder in takers else holder.shape[-2] for holder in (*producers, *takers)}
        packed = any(self.styles[holder.name] == "packed_colwise" for holder in producers)
        if heads < self.count:
            return f"{heads} heads are fewer than {self.count} processes"
        if packed or heads % kv_heads or any(size % grouped[name] for name, size in sizes.items()):
            return f"its outputs are not those of {heads} heads"
        mine, keys = _spread_heads(heads, kv_heads, self.count)
        for holder in producers:
            of = grouped[holder.name]
            self._cut(holder, Cut("outputs", _scaled(mine if of == heads else keys, sizes[holder.name] // of)))
        for holder in takers:
            self._take(holder, _scaled(mine, sizes[holder.name] // heads), "blocks reach from one head into the next")
        self.made.groups[parent] = tuple((b - a) // (d - c) for (a, b), (c, d) in zip(mine, keys, strict=True))
        return None

    def _gated(self, parent: str, producers: Sequence[Holder], takers: Sequence[Holder]) -> str | None:
        """Cuts outputs that are multiplied or added element by element; says why not."""
        inner = takers[0].shape[-1]
        halves = {h.name: 2 if self.styles[h.name] == "packed_colwise" else 1 for h in producers}
        if any(h.shape[-2] != inner * halves[h.name] for h in producers) or any(h.shape[-1] != inner for h in takers):
            return "its outputs are not the inputs of what follows, one for one"
        if inner < self.count:
            return f"{inner} outputs are fewer than {self.count} processes"
        tile = _tile(inner, self.count)
        unit = math.lcm(*(_input_unit(h, self.count) if self._whole(h) is None else 1 for h in takers))
        runs = spread(inner, self.count, unit if unit > 1 and -(-inner // unit) >= self.count else tile)
        for holder in producers:
            self._cut(
                holder, Cut("outputs", tuple(tuple((inner * i + a, inner * i + b) for i in range(halves[holder.name])) for a, b in runs))
            )
        for holder in takers:
            self._take(holder, tuple((run,) for run in runs), f"there are not enough blocks for {self.count} processes")
        return None

    def _take(self, holder: Holder, parts: tuple[Ranges, ...], else_: str) -> None:
        """Cuts a weight whose input comes in `parts`: along them if the weight may be cut there."""
        unit, k = _input_unit(holder, 0), holder.shape[-1]
        reason = self._whole(holder)
        if reason is None and any(stop % unit and stop != k for part in parts for _, stop in part):
            reason = else_
        parent = holder.name.rpartition(".")[0]
        experts = isinstance(self.modules[parent], MixtureOfExperts)  # they weigh and add what their layers give, and then it is whole
        if reason is None:
            self._cut(holder, Cut("inputs", parts, after="" if experts else "reduce"))
            if experts:
                self.made.cuts[parent] = Cut("outputs", (), after="reduce")
            return
        sizes = tuple(sum(stop - start for start, stop in part) for part in parts)
        rows = self._even(holder)
        whole = rows is None
        rows = rows or (((0, holder.shape[-2]),),) * self.count
        cut = Cut("outputs", rows, "gather", "" if experts or whole else "gather", sizes, reason)
        self._cut(holder, cut)
        if experts and not whole:
            self.made.cuts[parent] = Cut("outputs", rows, after="gather")

    # Modules on their own

    def _rows(self, holder: Holder, why: str = "") -> None:
        """Cuts rows, of a result that is put together."""
        rows = self._even(holder)
        if rows is None or holder.kind == "Experts":
            short = f"{holder.shape[-2]} outputs are fewer than {self.count} processes"
            self.made.kept[holder.name] = why or short
        elif holder.kind == "Embedding":
            self._cut(holder, Cut("outputs", rows, "look up", "reduce"))
        else:
            self._cut(holder, Cut("outputs", rows, after="gather", why=why))

    def _split(self, holder: Holder, why: str = "") -> None:
        """Cuts a weight whose input comes whole."""
        unit = _input_unit(holder, self.count)
        if holder.kind == "Linear" and self._whole(holder) is None and -(-holder.shape[-1] // unit) >= self.count:
            parts = tuple((run,) for run in spread(holder.shape[-1], self.count, unit))
            self._cut(holder, Cut("inputs", parts, "split", "reduce", why=why))
        else:
            self._rows(holder, why or self._whole(holder) or "")

    def _even(self, holder: Holder) -> tuple[Ranges, ...] | None:
        """Rows for each process, or None where there are not enough."""
        n = holder.shape[-2]
        return None if n < self.count else tuple((run,) for run in spread(n, self.count, _tile(n, self.count)))

    def _cut(self, holder: Holder, cut: Cut) -> None:
        self.made.cuts[holder.name] = cut
        self.made.kept.pop(holder.name, None)

    def _whole(self, holder: Holder) -> str | None:
        """Why a part of the inputs, with the same part of the columns, would not give a part of the same sum; None if it would."""
        fmt = holder.format
        if self.exact:
            return "sums are to be those of one device"
        if holder.ordered:
            return "its columns are in an order of their own"
        if fmt is None or holder.compute == "float" or (holder.compute == "auto" and self.device != "cpu"):
            return None
        if not isinstance(fmt.block, int) or not holder.activation.startswith("block"):
            return "activations are quantized with one scale for all inputs"
        return None

    def _tie(self) -> None:
        """Modules that share a weight have the same part of it: rows, if any of them has."""
        sharing: dict[Hashable, list[Holder]] = defaultdict(list)
        for holder in self.found.values():
            sharing[holder.weight].append(holder)
        for family in sharing.values():
            cuts = [self.made.cuts.get(holder.name) for holder in family]
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
    config: Any = getattr(attention, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    groups = getattr(attention, "num_key_value_groups", None)
    kv_heads = heads // groups if isinstance(groups, int) and groups > 0 else getattr(config, "num_key_value_heads", None)
    return heads, kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads


def _spread_heads(heads: int, kv_heads: int, count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(query heads, key heads) of each process, so that all of a process's groups are of one size.

    With fewer key heads than processes, those that share one each have it.
    """
    group = heads // kv_heads
    if kv_heads >= count:
        keys = spread(kv_heads, count)
        return [(a * group, b * group) for a, b in keys], keys
    mine, shared = [], []
    for key, (first, last) in enumerate(spread(count, kv_heads)):
        for start, stop in spread(group, last - first):
            mine.append((key * group + start, key * group + stop))
            shared.append((key, key + 1))
    return mine, shared


def _scaled(runs: Sequence[tuple[int, int]], size: int) -> tuple[Ranges, ...]:
    return tuple(((a * size, b * size),) for a, b in runs)


def _input_unit(holder: Holder, count: int) -> int:
    """Columns that stay together: a block, in whole bytes; or a tile, if there are enough of them for `count` processes."""
    if holder.format is not None and isinstance(holder.format.block, int):
        block = holder.format.block
        return 2 * block if block % 2 and holder.format.bits == 4 else block
    tile = _tile(holder.shape[-1], count) if count else 1
    return math.lcm(tile, 2) if holder.format is not None and holder.format.bits == 4 else tile


def _tile(size: int, count: int) -> int:
    return _TILE if size >= _TILE * count else 1


def _leaf(holder: Holder) -> str:
    return holder.name.rpartition(".")[2]
