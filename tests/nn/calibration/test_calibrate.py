"""Calibration: what each layer learns from, that nothing is lost on the way, and what it is worth."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import halfbyte
from halfbyte.checkpoint.materialize import Materializer
from halfbyte.cli import main
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.formats import Codes, as_format
from halfbyte.nn.calibration.calibrate import Calibration, calibrate, calibration_tokens
from halfbyte.nn.calibration.runs import Runs, decoder_layers
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.report import report
from halfbyte.quantizers.gptq import GPTQ

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": False, "head_dim": 8, "sliding_window": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# gemma3 hands its layers masks and rotations by their kind, qwen3_moe has routers and stacked experts, bert is not a decoder.
KINDS = ("llama", "gemma3_text", "qwen3_moe", "bert")


def language_model(kind: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    extra = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gemma3_text" else {}
    if kind == "qwen3_moe":
        extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = AutoConfig.for_model(kind, **SIZES | extra | changes)
    model = halfbyte_bert(config) if kind == "bert" else AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)  # so that layers do more than pass on their inputs
    return model.eval()


def halfbyte_bert(config: Any) -> Any:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(config)


def tokens(n: int = 6, t: int = 16) -> Tensor:
    return torch.randint(3, 128, (n, t), generator=torch.Generator().manual_seed(1))


def formats(model: nn.Module, fmt: str = "int4_g16") -> dict[str, Any]:
    owners = [id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    return {n: as_format(fmt) for n, m in model.named_modules() if isinstance(m, nn.Linear) and owners.count(id(m.weight)) == 1}


def dequantized(model: Any, results: Any) -> Any:
    twin = copy.deepcopy(model)
    values = {r.name: r.value.dequantize() if isinstance(r.value, Codes) else r.value for r in results}
    twin.load_state_dict(values, strict=False)
    return twin


# What each layer learns from


@pytest.mark.parametrize("kind", KINDS)
def test_layers_one_by_one_compute_what_the_model_computes(kind: str) -> None:
    model = language_model(kind)
    _, layers = decoder_layers(model)
    with torch.no_grad():
        runs = Runs(model, tokens(), batch=4)
        seen: list[Tensor] = []
        hook = layers[-1].register_forward_hook(
            lambda module, args, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
        model(tokens(), use_cache=False)
        hook.remove()
        for i, layer in enumerate(layers):
            runs.advance(i, layer)
    assert [len(h) for h in runs.hidden] == [4, 2]
    # The same float32 operations; batches of another size may sum in another order.
    assert torch.allclose(torch.cat(runs.hidden), seen[0], rtol=1e-4, atol=1e-5)
    assert all("forward" not in vars(layer) for layer in layers)


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_sees_the_inputs_that_quantized_layers_before_it_give(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments that each weight was quantized with are those of its inputs in a model whose earlier layers are quantized."""
    model = language_model(kind)
    from halfbyte.nn.calibration import calibrate as module

    seen: dict[str, Tensor] = {}
    quantize = module.gptq

    def watched(weight: Tensor, fmt: Any, moments: Tensor, options: Any, name: str) -> Codes:
        seen[name] = moments.clone()
        return quantize(weight, fmt, moments, options, name)

    monkeypatch.setattr(module, "gptq", watched)
    wanted = formats(model)
    results = list(calibrate(model, wanted, "gptq", Calibration(tokens(), batch=4)))
    assert {r.name for r in results} == {f"{name}.weight" for name in wanted}
    prefix, layers = decoder_layers(model)
    for i in (*range(len(layers)), len(layers)):  # then those outside
        earlier = [r for r in results if r.name.startswith(f"{prefix}.") and int(r.name[len(prefix) + 1 :].split(".")[0]) < i]
        twin = dequantized(model, earlier)
        for name in wanted:
            inside = name.startswith(f"{prefix}.")
            if not (name.startswith(f"{prefix}.{i}.") if inside else i == len(layers)):
                continue
            moments = torch.zeros(0)

            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                nonlocal moments
                rows = args[0].reshape(-1, args[0].shape[-1])
                moments = rows.T @ rows
                moments.diagonal().add_(rows.shape[1] / len(rows) * moments.diagonal().mean())  # drawn towards the identity

            handle = twin.get_submodule(name).register_forward_pre_hook(hook)
            with torch.no_grad():
                twin(tokens())
            handle.remove()
            assert float((seen[f"{name}.weight"] - moments).norm()) <= 1e-4 * float(moments.norm()), name


def test_the_batch_does_not_matter() -> None:
    model = language_model()
    one, all_ = (list(calibrate(model, formats(model), "gptq", Calibration(tokens(), batch=b))) for b in (1, 6))
    # Sums in another order: a weight near a tie may round the other way, and what comes after it follows.
    for a, b in zip(one, all_, strict=True):
        assert isinstance(a.value, Codes)
        assert isinstance(b.value, Codes)
        assert float((a.value.values() == b.value.values()).float().mean()) > 0.98


@pytest.mark.parametrize("method", ["gptq", "awq", "mse"])
def test_outputs_are_closer_than_without_calibration(method: str) -> None:
    """On a model whose inputs have a strong common direction; random weights do not reward more than that."""
    model = language_model()
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(torch.randn(32))
    wanted, x = formats(model), tokens(64)
    plain, found = copy.deepcopy(model), dequantized(model, calibrate(model, wanted, method, Calibration(x)))
    for name, fmt in wanted.items():
        linear = plain.get_submodule(name)
        linear.weight.data = halfbyte.quantize(linear.weight, fmt).dequantize()
    with torch.no_grad():
        y, a, b = (m(x).logits for m in (model, plain, found))
    assert float((b - y).norm()) < {"gptq": 0.8, "awq": 0.95, "mse": 0.95}[method] * float((a - y).norm())


# quantize_


def test_quantize_swaps_modules_and_folds_norms() -> None:
    model = language_model()
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] = 20  # a channel that matters
    model = model.bfloat16()
    before = copy.deepcopy(model.state_dict())
    told: list[tuple[int, int, str]] = []
    config = Config("int4_g16", method="awq", skip=["lm_head"])
    assert quantize_(model, config, tokens(), lambda *args: told.append(args)) is model
    assert told == [(1, 2, "model.layers.0"), (2, 2, "model.layers.1")]
    rows = report(model)
    assert len(rows.quantized) == 15
    assert all(row.error is not None and 0 < row.error < 0.2 for row in rows.quantized)
    assert not rows.notes
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantLinear)
    norm = model.model.layers[0].input_layernorm.weight
    assert norm.dtype == torch.bfloat16
    assert not torch.equal(norm, before["model.layers.0.input_layernorm.weight"])
    assert torch.equal(model.model.norm.weight, before["model.norm.weight"])


def test_a_tied_head_is_quantized_as_the_embedding_that_it_is() -> None:
    model = language_model(tie_word_embeddings=True)
    expected = halfbyte.quantize(model.lm_head.weight, "q8_0", "mse")
    quantize_(model, Config("int4_g16", method="gptq"), tokens())
    assert model.lm_head.packed is model.model.embed_tokens.packed
    assert torch.equal(model.lm_head.codes().data, expected.data)


class Reluctant(nn.Sequential):
    """Calls all of its modules but the last."""

    def forward(self, x: Tensor) -> Tensor:
        for module in list(self)[:-1]:
            x = module(x)
        return x


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 16), nn.Linear(16, 128)
        self.blocks = nn.ModuleList(Reluctant(nn.Linear(16, 16), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_what_no_token_reaches_is_said() -> None:
    model = Blocks()
    expected = halfbyte.quantize(model.blocks[1][2].weight, "int4_g4", "mse")
    quantize_(model, Config("int4_g4", method="gptq"), tokens())
    assert report(model).notes == tuple(f"no calibration token reaches blocks.{i}.2: mse without calibration is used" for i in range(2))
    assert torch.equal(model.blocks[1][2].codes().data, expected.data)


def test_nothing_has_changed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ArgumentError, match=r"model\.layers\.1\.\S+ .*NaN"):
        quantize_(model, Config("int4_g16", method="awq"), tokens())
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(a.nan_to_num(7), before[name].nan_to_num(7)) for name, a in model.state_dict().items())


def test_each_module_keeps_its_mode() -> None:
    model = language_model().train()
    frozen = model.model.layers[1].eval()
    config = Config.auto(model, 5.5, tokens(1, 32), formats=["int4_g16", "q8_0"], method="gptq")
    quantize_(model, config, tokens(1, 32))
    assert [module for module in model.modules() if not module.training] == list(frozen.modules())


def test_what_is_refused() -> None:
    model = language_model()
    with pytest.raises(ArgumentError, match=r"gptq needs calibration.*absmax, mse, hqq"):
        quantize_(model, Config("int4_g16", method="gptq"))
    with pytest.raises(ArgumentError, match="hqq has no use for calibration"):
        quantize_(model, Config("int4_g16", method="hqq"), tokens())
    for wrong in (tokens() + 1000, -tokens()):
        with pytest.raises(ArgumentError, match=r"tokens up to -?\d+, a vocabulary of 128: use the model's own tokenizer"):
            quantize_(model, Config("int4_g16", method="gptq"), wrong)
    with pytest.raises(ArgumentError, match=r"do not fit the model.*own tokenizer"):
        quantize_(Blocks(), Config("int4_g4", method="gptq"), tokens() + 1000)
    with pytest.raises(ArgumentError, match="cannot run on device 'nowhere'"):
        Calibration(tokens(), device="nowhere")
    with pytest.raises(UnsupportedError, match=r"Sequential has no nn\.ModuleList"):
        quantize_(nn.Sequential(nn.Linear(4, 4)), Config("int4_g4", method="gptq"), tokens())
    for bad in (
        torch.zeros(0, 4, dtype=torch.int64),
        torch.zeros(2, 16),
        torch.ones(2, 16, dtype=torch.bool),
        torch.zeros(4, dtype=torch.int64),
    ):
        with pytest.raises(ArgumentError, match=r"token ids \[passages, tokens\]"):
            Calibration(bad)
    for few in (tokens(1, 1), tokens(1, 31)):
        with pytest.raises(ArgumentError, match=rf"calibration takes 32 or more tokens, got {few.numel()}, .*: use a few pages of text"):
            quantize_(model, Config("int4_g16", method="gptq"), few)
    with pytest.raises(ArgumentError, match="batch of 0"):
        Calibration(tokens(), batch=0)
    with pytest.raises(ArgumentError, match="method is one of absmax, mse, hqq, gptq, awq"):
        Config("q4_0", method="magic")
    with pytest.raises(ArgumentError, match="needs calibration"):
        halfbyte.convert("nowhere", "nowhere else", Config("q4_0", method="awq"))


def test_passages_are_spread_over_the_text() -> None:
    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    text = "".join(map(chr, range(100)))
    assert calibration_tokens(tokenizer, text, 3, 10).tolist() == [list(range(s, s + 10)) for s in (0, 40, 90)]
    assert calibration_tokens(tokenizer, text, 1000, 7).shape == (14, 7)
    assert calibration_tokens(tokenizer, "abc", 5, 512).tolist() == [[97, 98, 99]]
    with pytest.raises(ArgumentError, match="no tokens"):
        calibration_tokens(tokenizer, "")
    with pytest.raises(ArgumentError, match="1 or more passages"):
        calibration_tokens(tokenizer, text, 0)


# Mixed precision


def test_auto_spends_its_bits_where_they_count() -> None:
    model = language_model()
    with torch.no_grad():
        for linear in (model.model.layers[0].mlp.down_proj, model.model.layers[0].self_attn.o_proj):
            linear.weight.mul_(0.01)  # layer 0 hardly matters
    before = copy.deepcopy(model.state_dict())
    choices = ("int4_g16", "int8_g16")
    config = Config.auto(model, 5.5, tokens(), formats=choices, skip=["lm_head"], method="mse")
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())
    chosen = {name: config.overrides.get(name, config.format) for name in formats(model)}
    assert not any(fmt == "int8_g16" for name, fmt in chosen.items() if ".layers.0." in name)
    assert any(fmt == "int8_g16" for name, fmt in chosen.items() if ".layers.1." in name)
    assert config.skip == ["lm_head"]
    assert config.method == "mse"
    namespace = {"Config": Config}
    assert eval(repr(config), namespace) == config  # noqa: S307  # it prints itself
    quantize_(model, config)
    linears = [row for row in report(model).quantized if row.kind == "Linear"]
    bits = sum(8 * row.bytes_after for row in linears) / sum(math.prod(row.shape) for row in linears)
    assert 5 < bits <= 5.5
    with pytest.raises(ArgumentError, match="allow more bits"):
        Config.auto(language_model(), 4, tokens(), formats=choices, progress=lambda *_: pytest.fail("it is measured in vain"))
    for bad in ({"bits": math.nan}, {"bits": -1}, {"bits": 5, "formats": ()}, {"bits": 5, "overrides": {}}):
        with pytest.raises(ArgumentError, match="auto chooses format"):
            Config.auto(language_model(), calibration=tokens(), **bad)  # type: ignore[arg-type]


# From disk


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 model with a tokenizer of bytes, and a text."""
    path = tmp_path_factory.mktemp("model")
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:127])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<unk>": 127}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)
    language_model().bfloat16().save_pretrained(path)
    (path / "text.txt").write_text("Which layers suffer, and how much, only the words can tell. " * 60, encoding="utf-8")
    return path


@pytest.mark.parametrize("method", ["gptq", "awq", "mse"])
def test_from_disk_as_in_memory(folder: Path, tmp_path: Path, method: str) -> None:
    command = ["quantize", str(folder), str(tmp_path / "q"), "--format", "int4_g16", "--method", method, "--quiet"]
    command += ["--calibration", str(folder / "text.txt"), "--length", "32", *(["--no-act-order"] if method == "gptq" else [])]
    assert main(command) == 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = calibration_tokens(tokenizer, (folder / "text.txt").read_text(encoding="utf-8"), 128, 32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantize_(model, Config("int4_g16", method=method), Calibration(ids, gptq=GPTQ(act_order=False)))
    expected, found = model.state_dict(), halfbyte.load(tmp_path / "q").state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_only_what_is_needed_is_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Materializer] = []
    start = Materializer.__init__

    def watched(self: Materializer, *args: Any) -> None:
        start(self, *args)
        built.append(self)

    monkeypatch.setattr(Materializer, "__init__", watched)
    halfbyte.convert(folder, tmp_path / "q", Config("int4_g16", method="gptq"), calibration=Calibration(tokens()))
    stored = {name for name, parameter in built[0].model.named_parameters() if parameter.dim() == 2 and not parameter.is_meta}
    assert stored == {"model.embed_tokens.weight"}


def test_bits_on_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ["--calibration", str(folder / "text.txt"), "--length", "32"]
    assert main(["quantize", str(folder), str(tmp_path / "q"), "--bits", "5.5", "--method", "hqq", *text, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len({row["format"] for row in rows if row["kind"] == "Linear" and row["format"]}) > 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--format", "q4_0", "--method", "gptq"], "name one with --calibration"),
        (["--format", "q4_0", "--calibration", "TEXT"], "absmax has no use for calibration"),
        (["--bits", "4.5"], "--calibration"),
        (["--bits", "4.5", "--calibration", "TEXT", "--override", "lm_head=q8_0"], "--override"),
        (["--format", "q4_0", "--method", "gptq", "--calibration", "nowhere.txt"], "nowhere.txt"),
        (["--format", "q4_0", "--method", "gptq", "--calibration", "TEXT", "--damping", "0"], "damping"),
        (["--format", "q4_0", "--method", "gptq", "--calibration", "TEXT", "--length", "0"], "1 or more passages"),
    ],
)
def test_the_command_refuses(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str) -> None:
    arguments = [str(folder / "text.txt") if a == "TEXT" else a for a in arguments]
    assert main(["quantize", str(folder), str(tmp_path / "q"), *arguments]) == 2
    assert word in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


# What it is worth, on a trained model

TINY = Path(__file__).parents[3] / "models" / "tiny-llama"
HELD_OUT = Path(__file__).parents[3] / "examples" / "tiny-llama" / "heldout.txt"


class Tiny:
    """The tiny Llama, passages of held-out text to calibrate on, and others to measure perplexity on.

    Two of its eight layers and the last product are quantized, in less than half the time; docs/quality.md has the whole model.
    """

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
        passages = calibration_tokens(tokenizer, HELD_OUT.read_text(encoding="utf-8"), 24, 256)
        self.calibration, self.measured = passages[::3], passages[1::3]
        self.original = self.perplexity(self.model)

    def perplexity(self, model: Any) -> float:
        with torch.no_grad():
            logits = model(self.measured).logits[:, :-1]
        return math.exp(float(nn.functional.cross_entropy(logits.flatten(0, 1), self.measured[:, 1:].flatten())))

    def config(self, fmt: str, **settings: Any) -> Config:
        return Config(fmt, compute="float", skip=["model.layers.[1-6].*"], **settings)

    def increase(self, config: Config, calibration: Tensor | None = None) -> float:
        model = copy.deepcopy(self.model)
        quantize_(model, config, calibration)
        return self.perplexity(model) - self.original


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    if not TINY.is_dir():
        pytest.skip("models/tiny-llama is not there")
    return Tiny()


@pytest.fixture(scope="module")
def plain_increase(tiny: Tiny) -> float:
    return tiny.increase(tiny.config("int4_g128"))


@pytest.mark.parametrize(("method", "part"), [("hqq", 0.9), ("gptq", 0.7), ("awq", 0.7)])
def test_perplexity_increases_less_than_with_absmax(tiny: Tiny, plain_increase: float, method: str, part: float) -> None:
    calibration = None if method == "hqq" else tiny.calibration[:2]
    assert tiny.increase(tiny.config("int4_g128", method=method), calibration) <= part * plain_increase


def test_mixed_formats_of_4_5_bits_beat_one_of_4_5_bits(tiny: Tiny) -> None:
    uniform = tiny.config("q4_0")
    config = Config.auto(tiny.model, 4.5, tiny.calibration[:2, :128], compute="float", skip=uniform.skip)
    assert tiny.increase(config) < tiny.increase(uniform)


def test_8_bits_cost_less_than_a_thousandth(tiny: Tiny) -> None:
    assert abs(tiny.increase(Config("q8_0", compute="float"))) <= 0.001 * tiny.original
