"""Plans: which tensors are stored under which names, quantized or not, from the names and shapes of files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tiny_decoders import CASES

from halfbyte.checkpoint.entries import Entries, Entry
from halfbyte.checkpoint.mapping.plan import NOT_A_WEIGHT, Choose, Plan, plan_by_rule, plan_model, report
from halfbyte.errors import CheckpointError
from halfbyte.formats import as_format
from halfbyte.formats.spec import Format
from halfbyte.io.tensors import TensorSpec
from halfbyte.nn.config import Decisions
from halfbyte.nn.described import Candidate

FMT = as_format("int8_channel")
EXPERTS = "model.layers.2.mlp.experts"


def files_of(tensors: Mapping[str, Tensor]) -> Entries:
    """Tensors in memory."""
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return Entries({name: Entry(spec, spec.nbytes, tensors[name].to) for name, spec in specs.items()})  # type: ignore[arg-type]


def every_weight(found: Sequence[Candidate], sources: Mapping[str, Sequence[str]]) -> Decisions:
    return {candidate.name: FMT if candidate.reason is None else candidate.reason for candidate in found}


def no_weight(found: Sequence[Candidate], sources: Mapping[str, Sequence[str]]) -> Decisions:
    return {candidate.name: "as it is" for candidate in found}


def mixture(case: str) -> tuple[dict[str, Any], Entries]:
    model = CASES[case]()
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}, files_of(model.state_dict())


def value(plan: Plan, name: str, files: Entries) -> Tensor:
    step, target = plan.step_of()[name]
    return step.run(lambda source: files.read(source, torch.float32))[target]


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize(("choose", "suffix"), [(every_weight, ".weight"), (no_weight, "")])
def test_stacks_of_experts_are_stored_as_weights_of_modules_where_they_are_quantized(
    choose: Choose, suffix: str, inputs_first: bool
) -> None:
    config, files = mixture("GptOssDecoderLayer" if inputs_first else "Qwen3MoeDecoderLayer")
    plan = plan_model(config, files, choose)
    floats = files.read(f"{EXPERTS}.down_proj").float()
    name = f"{EXPERTS}.down_proj{suffix}"
    assert (name in plan.weights) == (choose is every_weight)
    assert (name in plan.plain) == (choose is no_weight)
    assert plan.stored_name(f"{EXPERTS}.down_proj") == name
    # Codes are outputs first.
    assert torch.equal(value(plan, name, files), floats.mT if inputs_first and choose is every_weight else floats)
    if choose is every_weight:
        assert plan.weights[name].transposed == inputs_first
        assert plan.weights[name].kind == "Experts"


def test_tied_tensors_are_stored_once() -> None:
    config, files = mixture("Qwen3MoeDecoderLayer")
    config["tie_word_embeddings"] = True
    copied = files_of({"lm_head.weight": files.read("model.embed_tokens.weight").clone()})
    files = Entries({**files.entries, **copied.entries})
    plan = plan_model(config, files, every_weight)
    assert plan.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert plan.unused == {"lm_head.weight": "equal to model.embed_tokens.weight, to which it is tied"}
    rows = {row.name: row for row in report(plan, files, ()).rows}
    assert rows["lm_head"].tied_to == "model.embed_tokens"
    assert "lm_head.weight" not in {*plan.weights, *plan.plain}


def test_what_is_missing_and_what_has_another_shape() -> None:
    config, files = mixture("Qwen3MoeDecoderLayer")
    norm = "model.norm.weight"
    rest = {name: entry for name, entry in files.entries.items() if name != norm}
    with pytest.raises(CheckpointError, match=r"no file has model\.norm\.weight, which Qwen3MoeForCausalLM needs"):
        plan_model(config, Entries(rest), every_weight)
    shorter = files_of({norm: files.read(norm)[:-1]})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is .*, but config\.json makes it \[48\]"):
        plan_model(config, Entries({**rest, **shorter.entries}), every_weight)


def test_without_an_architecture_matrices_called_weight_are_those_of_linears() -> None:
    files = files_of({"up.weight": torch.ones(4, 8), "table": torch.ones(4, 8), "norm.weight": torch.ones(4)})
    plan = plan_by_rule(files, every_weight)
    assert isinstance(plan.weights["up.weight"].format, Format)
    assert plan.linears == {"up.weight"}
    assert {name: about.reason for name, about in plan.about.items()} == {"table": NOT_A_WEIGHT, "norm.weight": NOT_A_WEIGHT}
