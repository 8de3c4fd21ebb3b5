"""The command line on tiny models: what a user sees, in words, JSON and exit codes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from commands import Run

import halfbyte
from halfbyte import ops
from halfbyte.cli import explain, main
from halfbyte.cli.shared.output import print_table
from halfbyte.versions import TESTED, VersionRange, why_untested

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEXT = "a bug is an unwanted property of code that makes it fail while the hacker who wrote it sleeps and dreams"
SOURCE = Path(halfbyte.__file__).parents[1]
ALL_COMMANDS = """
import ast, sys
from halfbyte.cli import main
for line in sys.argv[1:]:
    print(main(ast.literal_eval(line)), file=sys.stderr)
"""
INSTALL = "pip install 'halfbyte[transformers]'"
LINES = [" ".join(TEXT.split()[i : i + 3 + i % 5]) for i in range(14)]


def _save(model: Any, folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(SPECIAL + TEXT.split()))}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder in float32."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return _save(BertModel(BertConfig(vocab_size=40, max_position_embeddings=64, **sizes)), tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder in bfloat16 with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=True, **sizes))
    return _save(model.bfloat16(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def quantized(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "bert"
    assert main(["quantize", str(bert), str(folder), "--format", "q8_0", "--quiet"]) == 0
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("\n\n".join(LINES) + "\n")
    return path


def _python(*argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True, env={**os.environ, **environment}, check=False)


# The command itself


def test_help_does_not_load_torch() -> None:
    script = "import sys\nfrom halfbyte.cli import main\ntry: main(['--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    answer = _python("-c", script)
    assert answer.returncode == 0, answer.stderr
    for command in ("quantize", "inspect", "eval", "generate", "chat", "bench", "explain", "doctor"):
        assert f"\n    {command}" in answer.stdout


def test_without_arguments_it_helps(run: Run) -> None:
    assert run() == run("--help")


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"halfbyte {halfbyte.__version__}\n", "")


def test_the_package_runs_as_the_command_does() -> None:
    answer = subprocess.run([sys.executable, "-m", "halfbyte", "fly"], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("usage: halfbyte [-h]")


@pytest.mark.parametrize("line", ["fly", "quantize a", "quantize a b", "explain --m x", "inspect a --jso"])
def test_arguments_that_do_not_parse(run: Run, line: str) -> None:
    answer = run(*line.split())
    assert (answer.code, answer.out) == (2, "")
    assert "error:" in answer.err


def test_a_reader_that_goes_away_is_no_error(quantized: Path) -> None:
    command = [sys.executable, "-m", "halfbyte", "inspect", str(quantized)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("line", "unbuffered"), [("--help", ""), ("explain --no-measure --json", ""), ("explain --no-measure", "1")])
def test_what_cannot_be_written_is_one_line(line: str, unbuffered: str) -> None:
    command = [sys.executable, "-m", "halfbyte", *line.split()]
    with open("/dev/full", "w") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        answer = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    stream = "" if unbuffered else "stdout: "
    assert (answer.returncode, answer.stderr) == (2, f"halfbyte: error: {stream}{os.strerror(errno.ENOSPC)}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_a_message_that_cannot_be_written_is_dropped(stderr: str, tmp_path: Path) -> None:
    """A full log neither ends a command that warns nor changes its exit code, and a closed one sends no message to stdout."""
    text = """
import sys, warnings
from halfbyte.cli import main, inspect
def run(args):
    warnings.warn("a warning")
    print("a note", file=sys.stderr)
    print("a result")
    return 0
inspect.run = run
print(main(["inspect", "a"]), main(["generate", "none", "--prompt", "a"]))
"""
    command = ["sh", "-c", f'exec "$0" "$@" {stderr}', sys.executable, "-c", text]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (0, "a result\n0 2\n")


def test_a_closed_stdout_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    code = main(["explain"])
    monkeypatch.undo()
    assert (code, capsys.readouterr().err.count("\n")) == (2, 1)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_an_encoding_has_no_character_for_is_replaced(quantized: Path, encoding: str) -> None:
    command = [sys.executable, "-m", "halfbyte", "inspect", str(quantized)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    answer = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (answer.returncode, answer.stderr) == (0, b"")
    assert "40×64".encode(encoding, "replace") in answer.stdout


def test_a_table_is_not_cut_to_fit_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("name", "perplexity"), [("model.embed_tokens", "7.3723")])
    assert capsys.readouterr().out == "name                perplexity\nmodel.embed_tokens      7.3723\n"


def test_a_prompt_that_is_no_text(run: Run, llama: Path) -> None:
    run("generate", llama, "--prompt", "a\udcff").refuses("a prompt is text in this system's encoding", "'a\\udcff'")


def test_a_calibrated_method_names_the_option_for_its_text(run: Run, llama: Path, tmp_path: Path) -> None:
    run("quantize", llama, tmp_path / "q", "--format", "q4_0", "--method", "gptq").refuses("--calibration")


@pytest.mark.parametrize("option", [("--damping", 0.1), ("--static-groups",), ("--no-act-order",), ("--device", "cpu")])
def test_what_an_option_would_have_no_effect_on(option: tuple[object, ...], run: Run, llama: Path, tmp_path: Path) -> None:
    run("quantize", llama, tmp_path / "q", "--format", "q4_0", *option).refuses(str(option[0]).removeprefix("--no"))


@pytest.mark.parametrize(
    "line", ["quantize org/model new --format q4_0", "generate org/model --prompt a", "eval org/model --text TEXT", "inspect org/model"]
)
def test_a_name_on_the_hub(line: str, run: Run, text: Path) -> None:
    run(*line.replace("TEXT", str(text)).split()).refuses("there is no org/model: name ", "hf download org/model --local-dir model")


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "check_fits", lambda *_: warnings.warn("mind\n the gap", RuntimeWarning, stacklevel=1))
    assert run("explain", "--no-measure").err == "halfbyte: warning: mind the gap\n"


def test_without_transformers_it_is_said_what_to_install(llama: Path, text: Path, tmp_path: Path) -> None:
    """Each command that needs it, and a public name: one process, in which transformers is gone."""
    commands = ("generate IT --prompt a", "chat IT", "eval IT --text TEXT", "quantize IT new --format q4_0 --method awq --calibration TEXT")
    lines = [line.replace("IT", str(llama)).replace("TEXT", str(text)).split() for line in commands]
    (tmp_path / "transformers.py").write_text("raise ImportError('it is gone', name='transformers.quantizers')")
    answer = _python("-c", f"{ALL_COMMANDS}\nfrom halfbyte import HalfbyteConfig", *lines, PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCE}")
    refused = f"halfbyte: error: this command needs transformers (it is gone): {INSTALL}\n2\n"
    lines = [line for line in answer.stderr.splitlines(keepends=True) if not line.startswith("transformers runs ")]
    assert "".join(lines).startswith(refused * len(commands))
    assert answer.stderr.endswith(f"\nImportError: halfbyte.HalfbyteConfig needs transformers (it is gone): {INSTALL}\n")


def test_an_error_of_the_system_without_a_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(explain, "check_fits", fail)
    run("explain").refuses(os.strerror(errno.ENOMEM))


# quantize


def test_quantize(run: Run, bert: Path, tmp_path: Path) -> None:
    answer = run("quantize", bert, tmp_path / "q", "--format", "q4_0", "--skip", "pooler*", "--override", "*.query=int8_channel")
    assert answer.code == 0
    assert answer.err == ""  # no progress bar without a terminal
    assert "kept as they are" in answer.out
    assert f"written to {tmp_path / 'q'}" in answer.out
    tensors = halfbyte.load_tensors(tmp_path / "q")
    assert str(tensors["embeddings.word_embeddings.weight"].format) == "q8_0"  # type: ignore[union-attr]
    assert str(tensors["encoder.layer.1.attention.self.query.weight"].format) == "int8_channel"  # type: ignore[union-attr]
    assert str(tensors["encoder.layer.1.output.dense.weight"].format) == "q4_0"  # type: ignore[union-attr]
    assert isinstance(tensors["pooler.dense.weight"], torch.Tensor)


def test_quantize_as_json(run: Run, bert: Path, tmp_path: Path) -> None:
    answer = run("quantize", bert, tmp_path / "q", "--format", "q4_0", "--embedding", "int4_g32", "--method", "mse", "--json")
    assert answer.code == 0
    found = answer.json
    assert found["dst"] == str(tmp_path / "q")
    assert found["totals"]["bytes_after"] < found["totals"]["bytes_before"]
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["embeddings.word_embeddings"]["format"] == "int4_g32"
    assert 0 < rows["pooler.dense"]["error"] < 0.2


def test_quantize_a_plain_file(run: Run, tmp_path: Path) -> None:
    safetensors.torch.save_file({"fc.weight": torch.randn(33, 70), "fc.bias": torch.randn(33)}, tmp_path / "net.safetensors")
    assert run("quantize", tmp_path / "net.safetensors", tmp_path / "q", "--format", "int4_g32", "--quiet") == (0, "", "")
    tensors = halfbyte.load_tensors(tmp_path / "q")
    assert isinstance(tensors["fc.weight"], halfbyte.Codes)
    assert tensors["fc.weight"].shape == (33, 70)


def test_quantize_replaces_nothing_unless_told(run: Run, bert: Path, quantized: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in quantized.iterdir()}
    run("quantize", bert, quantized, "--format", "q4_0").refuses("exists", "--force")
    run("quantize", bert, bert, "--format", "q4_0", "--force").refuses("not overwritten")
    assert {path: path.read_bytes() for path in quantized.iterdir()} == before
    (tmp_path / "empty").mkdir()
    assert run("quantize", bert, tmp_path / "empty", "--format", "q4_0").code == 0
    assert run("quantize", bert, tmp_path / "empty", "--format", "q8_0", "--force").code == 0
    weight = halfbyte.load_tensors(tmp_path / "empty")["pooler.dense.weight"]
    assert str(weight.format) == "q8_0"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--format", "q9"), "'q9'"),
        (("--format", "q4_0", "--method", "guess"), "'guess'"),
        (("--format", "q4_0", "--embedding", "none"), "'none'"),
        (("--format", "q4_0", "--skip", "lm_head"), "'lm_head'"),
        (("--format", "q4_0", "--override", "pooler.dense"), "PATTERN=FORMAT"),
        (("--format", "q4_0", "--override", "pooler.*=q9"), "'q9'"),
        (
            ("--format", "q4_0", "--override", "pooler.*=q8_0", "--override", "pooler.*=q4_1"),
            "'pooler.*' two formats, q8_0 and q4_1: leave",
        ),
    ],
)
def test_quantize_refuses(run: Run, bert: Path, tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    run("quantize", bert, tmp_path / "q", *arguments).refuses(word)
    assert list(tmp_path.iterdir()) == []


def test_quantize_without_a_source(run: Run, tmp_path: Path) -> None:
    run("quantize", tmp_path / "nowhere", tmp_path / "q", "--format", "q4_0").refuses("nowhere")
    (tmp_path / "empty").mkdir()
    run("quantize", tmp_path / "empty", tmp_path / "q", "--format", "q4_0").refuses("no *.safetensors files")
    (tmp_path / "cut.safetensors").write_bytes(b"\xff" * 12)
    run("quantize", tmp_path / "cut.safetensors", tmp_path / "q", "--format", "q4_0").refuses("cut.safetensors")
    assert not (tmp_path / "q").exists()


def test_quantize_interrupted_leaves_nothing(run: Run, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    quantize = ops.quantize

    def third_time(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return quantize(*args, **kwargs)

    monkeypatch.setattr(ops, "quantize", third_time)
    answer = run("quantize", bert, tmp_path / "q", "--format", "q4_0")
    assert (answer.code, answer.out, answer.err) == (130, "", "halfbyte: error: interrupted\n")
    assert list(tmp_path.iterdir()) == []


# inspect


def test_inspect_a_checkpoint(run: Run, quantized: Path, bert: Path) -> None:
    found = run("inspect", quantized, "--json").json
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["embeddings.word_embeddings.weight"]["format"] == "q8_0"
    assert rows["embeddings.word_embeddings.weight"]["shape"] == [40, 64]
    assert rows["embeddings.word_embeddings.weight"]["bytes"] == 40 * 64 * 34 // 32
    assert rows["pooler.dense.bias"]["format"] == "float32"
    assert found["totals"]["bytes"] == sum(row["bytes"] for row in found["rows"])
    elements = sum(t.numel() for t in safetensors.torch.load_file(bert / "model.safetensors").values())
    assert found["totals"]["elements"] == elements
    table = run("inspect", quantized).out
    assert "embeddings.word_embeddings.weight" in table
    assert "40×64" in table


def test_inspect_computes_the_error(run: Run, quantized: Path, bert: Path) -> None:
    weight = safetensors.torch.load_file(bert / "model.safetensors")["pooler.dense.weight"].double()
    codes = halfbyte.load_tensors(quantized)["pooler.dense.weight"]
    expected = float((weight - codes.dequantize(torch.float64)).norm() / weight.norm())  # type: ignore[union-attr]
    rows = {row["name"]: row for row in run("inspect", quantized, "--against", bert, "--json").json["rows"]}
    # The difference of two float32 numbers is rounded once, to one part in 2^24 of itself.
    assert rows["pooler.dense.weight"]["error"] == pytest.approx(expected, rel=1e-6)
    assert rows["pooler.dense.bias"]["error"] is None


def test_inspect_computes_the_error_of_convolutions(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 4, 3), torch.nn.Conv3d(16, 4, 3), torch.nn.ConvTranspose2d(16, 4, 4, 2))
    tensors = {f"net.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "float.safetensors")
    halfbyte.save(halfbyte.quantize_(torch.nn.ModuleDict({"net": model}), "int8_channel"), tmp_path / "a")
    rows = {row["name"]: row for row in run("inspect", tmp_path / "a", "--against", tmp_path / "float.safetensors", "--json").json["rows"]}
    for i, module in enumerate(model):
        weight = tensors[f"net.{i}.weight"].double()
        expected = float((weight - module.weight.clone().double()).norm() / weight.norm())
        assert rows[f"net.{i}.weight"]["error"] == pytest.approx(expected, rel=1e-5)


def test_inspect_plain_tensors(run: Run, llama: Path) -> None:
    rows = {row["name"]: row for row in run("inspect", llama, "--json").json["rows"]}
    assert rows["model.norm.weight"] == {
        "name": "model.norm.weight",
        "type": "bfloat16",
        "format": "bfloat16",
        "shape": [64],
        "bytes": 128,
        "held_bytes": 128,
        "error": None,
        "tied_to": None,
    }
    assert run("inspect", llama / "model.safetensors", "--json").json["rows"] == list(rows.values())
    run("inspect", llama, "--against", llama).refuses("not a halfbyte checkpoint")


def test_inspect_shows_ties_once(run: Run, llama: Path, tmp_path: Path) -> None:
    assert run("quantize", llama, tmp_path / "q", "--format", "q4_0", "--quiet").code == 0
    rows = {row["name"]: row for row in run("inspect", tmp_path / "q", "--json").json["rows"]}
    tied = {name: row for name, row in rows.items() if row["tied_to"]}
    assert {row["tied_to"] for row in tied.values()} | tied.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(row["bytes"] == 0 for row in tied.values())
    assert "tied to" in run("inspect", tmp_path / "q").out


def test_inspect_of_an_original_that_is_not_finite(run: Run, tmp_path: Path) -> None:
    weight = torch.randn(8, 64)
    safetensors.torch.save_file({"a.weight": weight}, tmp_path / "float.safetensors")
    assert run("quantize", tmp_path / "float.safetensors", tmp_path / "q", "--format", "q8_0", "--quiet").code == 0
    weight[2, 3] = torch.inf
    safetensors.torch.save_file({"a.weight": weight}, tmp_path / "inf.safetensors")
    found = run("inspect", tmp_path / "q", "--against", tmp_path / "inf.safetensors", "--json").json
    assert found["rows"][0]["error"] is None
    assert any("a.weight: the original has infinities or NaN" in note for note in found["notes"])


def test_inspect_refuses(run: Run, quantized: Path, llama: Path, tmp_path: Path) -> None:
    run("inspect", tmp_path / "nowhere").refuses("nowhere")
    (tmp_path / "files").mkdir()
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / "files" / name).touch()
    run("inspect", tmp_path / "files").refuses("but a.gguf and 1 more: name a GGUF file itself")
    run("inspect", quantized, "--against", llama).refuses("same model")
    run("inspect", quantized, "--against", quantized).refuses("as it was before it was quantized")
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    run("inspect", quantized, "--against", tmp_path / "one.gguf").refuses("is a GGUF file: name one in safetensors")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in quantized.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes()[:-9] if path.suffix == ".safetensors" else path.read_bytes())
    run("inspect", damaged).refuses("model.safetensors")


# eval


def test_eval_an_encoder(run: Run, quantized: Path, bert: Path, text: Path) -> None:
    answer = run("eval", quantized, "--against", bert, "--text", text, "--json", "--batch", 4)
    assert answer.code == 0, answer.err
    found = answer.json
    assert (found["kind"], found["n"], found["queries"]) == ("embeddings", len(LINES), len(LINES))
    # Rounding to 8 bits moves each weight and activation by half a percent at most.
    assert 0.999 < found["min_cosine"] <= found["mean_cosine"] <= 1
    assert 0.8 <= found["top10"] <= 1
    assert "mean_cosine" in run("eval", quantized, "--against", bert, "--text", text).out


def test_eval_refuses(run: Run, quantized: Path, bert: Path, text: Path, tmp_path: Path) -> None:
    run("eval", quantized, "--against", bert, "--text", tmp_path / "nowhere").refuses("nowhere is missing: name a file with UTF-8 text")
    run("eval", quantized, "--against", bert, "--text", tmp_path).refuses(f"{tmp_path} is a folder: name a file with UTF-8 text")
    run("eval", quantized, "--against", tmp_path, "--text", text).refuses("config.json")
    run("eval", tmp_path, "--against", bert, "--text", text).refuses("no *.safetensors files")
    run("eval", tmp_path / "nowhere", "--text", text).refuses("there is no", "nowhere")
    run("eval", quantized, "--against", tmp_path / "nowhere", "--text", text).refuses("there is no", "nowhere")
    run("eval", tmp_path / "nowhere", "--against", bert, "--text", text).refuses("nowhere")
    run("eval", bert, "--text", text, "--stride", 0).refuses("--stride", "got 0")
    run("eval", bert, "--text", text, "--context", 8, "--stride", 9).refuses("--stride", "8 tokens", "got 9")
    for plot in (tmp_path / "none" / "x.svg", tmp_path / "x.png", tmp_path / "folder.svg"):
        (tmp_path / "folder.svg").mkdir(exist_ok=True)
        run("eval", bert, "--text", text, "--plot", plot).refuses("--plot", str(plot))
    run("eval", bert, "--text", text).refuses("is not a language model")
    run("eval", quantized, "--against", bert, "--text", text, "--batch", 0).refuses("--batch")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    run("eval", quantized, "--against", bert, "--text", tmp_path / "latin").refuses("UTF-8")
    (tmp_path / "one").write_text("\none line\n\n")
    run("eval", quantized, "--against", bert, "--text", tmp_path / "one").refuses("1 line")


# bench, explain, doctor


def test_bench(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is measured; that it can be, test_bench.py says."""
    from halfbyte.bench import cpu

    report = cpu.Report("today", {"cpu": "abacus"}, {}, {}, notes=["it was slow"])

    def measured(plan: cpu.Plan, progress: Any) -> cpu.Report:
        progress("counting", 0.5)
        assert {"halfbyte:q4_0", "torch_fp32", "torch_bf16"} <= {one.name for one in plan.check()}
        assert (plan.ms, plan.shapes, plan.threads, plan.rounds) == ((1, 5), ((64, 96),), (2,), 1)
        return report

    monkeypatch.setattr(cpu, "run", measured)
    asked = ("bench", "--m", 1, 5, "--n", 64, "--k", 96, "--rounds", 1, "--threads", 2)
    assert run(*asked, "--json").json == report.to_json()
    assert "it was slow" in run(*asked).out


@pytest.mark.parametrize("line", ["--m 0", "--n -1", "--format q9", "--threads 0", "--threads 100000", "--rounds 0", "--k 1000000000000"])
def test_bench_refuses(run: Run, line: str) -> None:
    run("bench", *line.split()).refuses()


def test_bench_names_the_count_that_is_wrong(run: Run) -> None:
    run("bench", "--m", 1, 0).refuses("m of a benchmark is a whole number from 1 on, got 0: ask for 1 or more")


@pytest.mark.parametrize("device", ["abacus", "cpu", "cuda:x"])
def test_tune_refuses_what_is_no_gpu(run: Run, device: str) -> None:
    run("tune", "--n", 64, "--k", 64, "--device", device).refuses("--device", "cuda", repr(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_tune_needs_a_gpu_and_shapes(run: Run) -> None:
    run("tune", "--n", 64, "--k", 64).refuses("no device cuda:0")


def test_doctor(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.cli.shared import selftest

    monkeypatch.setattr(selftest, "FORMATS", ("q4_0", "int8_channel"))
    monkeypatch.setenv("HALFBYTE_THREAD", "2")
    answer = run("doctor", "--json")
    assert answer.code == 0, answer.out
    found = answer.json
    assert found["faults"] == []
    assert {test["op"] for test in found["tests"]} == {
        *("quantize", "layout", "dequantize", "embedding", "linear", "qlinear", "grouped_linear", "conv2d", "qconv2d")
    }
    assert all(test["passed"] and test["cases"] for test in found["tests"])
    assert found["cache"]["usable"]
    assert found["variables"]["unknown"] == ["HALFBYTE_THREAD"]
    assert found["isa"]["chosen"] not in found["isa"]["others"]
    table = run("doctor").out
    assert "HALFBYTE_THREADS?" in table
    assert "17 of 17 passed" in table


def test_doctor_tells_untested_versions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("doctor", "--no-test", "--json").json["versions"]["untested"] == []
    why_untested.cache_clear()
    monkeypatch.setitem(TESTED, "transformers", VersionRange("5.0", "5.1", ""))
    assert "private fast paths are off: transformers" in run("doctor", "--no-test").out
    why_untested.cache_clear()


def test_doctor_finds_a_wrong_kernel(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.cli.shared import selftest

    dequantize = ops.dequantize
    monkeypatch.setattr(selftest, "FORMATS", ("q4_0",))
    monkeypatch.setattr(ops, "dequantize", lambda *args: dequantize(*args) * 1.001)
    answer = run("doctor", "--json")
    assert answer.code == 1
    assert [test["op"] for test in answer.json["tests"] if not test["passed"]] == ["dequantize"]
    assert "elements are wrong" in answer.json["faults"][0]
    assert "FAIL" in run("doctor").out


def test_doctor_finds_a_variable_that_makes_no_sense(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", "mmx")
    answer = run("doctor", "--json")
    assert answer.code == 1
    assert "'mmx'" in answer.json["faults"][0]
