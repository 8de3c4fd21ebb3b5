"""The model card that a saved model gets: its front matter and table, and that nobody's README.md is replaced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from language_model import make_language_model
from torch import nn
from transformers import AutoModelForCausalLM

from halfbyte.checkpoint import convert, export, load, save
from halfbyte.checkpoint.native.model_card import CardWeight, model_card
from halfbyte.errors import CheckpointError
from halfbyte.formats.spec import as_format
from halfbyte.integrations.transformers.quantizer import HalfbyteConfig
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_


def network(format: str = "q8_0") -> nn.Module:
    torch.manual_seed(0)
    return quantize_(nn.Sequential(nn.Linear(32, 4), nn.LayerNorm(4), nn.Linear(64, 8)), Config(format, overrides={"2": "q4_0"}))


def front_matter(text: str) -> dict[str, Any]:
    _, block, _ = text.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(block)
    return found


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")][2:]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("source") / "model")


def test_the_table_counts_what_the_files_hold(tmp_path: Path) -> None:
    save(network(), tmp_path / "small")
    text = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    eight, four, rest, total = rows(text)
    assert eight[:5] == ["`q8_0`", "1 Linear", "128", "8.50", "136 B"]
    assert four[:5] == ["`q4_0`", "1 Linear", "512", "4.50", "288 B"]
    assert 0 < float(eight[5]) < float(four[5]) < 0.2
    assert rest[0] == "not quantized"
    assert front_matter(text) == {"library_name": "halfbyte", "tags": ["halfbyte", "quantized", "q8_0", "q4_0"]}
    assert 'hb.load("small", model=model)' in text
    weights = sum(path.stat().st_size for path in (tmp_path / "small").glob("*.safetensors"))
    assert int(total[4].strip("* B")) <= weights  # without the header of the file


def test_a_card_is_renewed_and_a_readme_is_not(tmp_path: Path) -> None:
    save(network(), tmp_path / "small")
    card = tmp_path / "small" / "README.md"
    first = card.read_text(encoding="utf-8")
    save(network("int4_g16"), tmp_path / "small")
    renewed = card.read_text(encoding="utf-8")
    assert "int4_g16" in renewed
    assert renewed != first
    for text in (renewed.replace("## Use", "## How to use it"), renewed + "\nMore.\n", "", "Mine.\n"):
        card.write_text(text, encoding="utf-8")
        save(network(), tmp_path / "small")
        assert card.read_text(encoding="utf-8") == text


def test_a_full_disk_is_an_error_about_the_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, _: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("halfbyte.checkpoint.native.model_card.write_whole", fails)
    with pytest.raises(CheckpointError, match=f"cannot write {tmp_path / 'small'}: No space left on device"):
        save(network(), tmp_path / "small")
    assert not any(tmp_path.iterdir())


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "README.md").symlink_to(tmp_path / "elsewhere")
    save(network(), tmp_path / "small")
    assert not (tmp_path / "elsewhere").exists()


def test_convert_keeps_the_readme_of_the_source(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "small", "q4_0")
    text = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert front_matter(text)["pipeline_tag"] == "text-generation"
    assert 'LanguageModel.open("small")' in text
    (tmp_path / "small" / "README.md").write_text("Mine.\n", encoding="utf-8")
    export(tmp_path / "small", tmp_path / "copy", to="halfbyte")
    assert (tmp_path / "copy" / "README.md").read_text(encoding="utf-8") == "Mine.\n"


def test_what_a_file_says_stays_a_name() -> None:
    """A title, class or base model that is no name can't add lines to the front matter or markup to the text."""
    weight = CardWeight("Linear", as_format("q4_0"), 32, 18, None)
    evil = 'x"\n---\nlicense: mit <script>alert(1)</script> `$(reboot)`'
    text = model_card(evil, [weight], total_bytes=18, config={"architectures": [evil]}, base_model=evil, tags=[evil])
    assert front_matter(text) == {"library_name": "halfbyte", "tags": ["halfbyte", "quantized", "q4_0"]}
    assert not set('<>`"$') & set(next(line for line in text.splitlines() if line.startswith("# ")))


@pytest.mark.parametrize(("name", "known"), [("meta/small-1", True), ("/home/me/model", False), ("model", False), ("../a", False)])
def test_the_base_model_is_one_on_the_hub(name: str, known: bool, source: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source)
    model.config._name_or_path = name
    save(quantize_(model, "q4_0"), tmp_path / "small")
    text = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert front_matter(text).get("base_model") == (name if known else None)
    assert (name in text) == known or name == "model"


def test_a_folder_is_no_base_model(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    save(quantize_(AutoModelForCausalLM.from_pretrained("models/mine"), "q4_0"), "small")
    assert "base_model" not in front_matter((tmp_path / "small" / "README.md").read_text(encoding="utf-8"))


def test_save_pretrained(source: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=HalfbyteConfig("q4_0"))
    model.save_pretrained(tmp_path / "small")
    card = tmp_path / "small" / "README.md"
    text = card.read_text(encoding="utf-8")
    assert front_matter(text)["library_name"] == "transformers"
    by_save = tmp_path / "again" / "small"
    save(load(tmp_path / "small"), by_save)
    assert [row[:4] for row in rows((by_save / "README.md").read_text(encoding="utf-8"))[:-2]] == [row[:4] for row in rows(text)[:-2]]
    card.write_text("Mine.\n", encoding="utf-8")
    model.save_pretrained(tmp_path / "small")
    assert card.read_text(encoding="utf-8") == "Mine.\n"
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "float")
    assert not (tmp_path / "float" / "README.md").exists()


@pytest.mark.parametrize("there", [None, "---\ntags: [mine]\n---\nMine.\n"])
def test_push_to_hub(there: str | None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be uploaded: a card of the quantized model, or the one that the place on the Hub has."""
    from huggingface_hub import ModelCard
    from huggingface_hub.errors import EntryNotFoundError
    from transformers.utils import hub

    sent: dict[str, str] = {}
    read = ModelCard.load

    def card(repo: str | Path, **_: Any) -> ModelCard:
        if isinstance(repo, Path):
            return read(repo)
        if there is None:
            raise EntryNotFoundError("no card")
        return ModelCard(there)

    def commit(operations: list[Any], **_: Any) -> str:
        sent.update({one.path_in_repo: Path(one.path_or_fileobj).read_bytes().decode("utf-8", "replace") for one in operations})
        return "done"

    api = SimpleNamespace(create_repo=lambda repo, **_: SimpleNamespace(repo_id=repo), create_commit=commit)
    monkeypatch.setattr(hub, "hf_api", lambda: api)
    monkeypatch.setattr(hub.ModelCard, "load", card)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=HalfbyteConfig("q4_0"))
    assert model.push_to_hub("me/small-q4", tags=["tiny"]) == "done"
    assert {"README.md", "config.json", "model.safetensors"} <= sent.keys()
    if there is None:
        assert front_matter(sent["README.md"])["tags"] == ["halfbyte", "quantized", "q8_0", "q4_0", "tiny"]
        assert 'from_pretrained("me/small-q4")' in sent["README.md"]
    else:
        assert sent["README.md"].endswith("Mine.\n")
