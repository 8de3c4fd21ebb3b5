"""Servers of language models: tokens per second, and time to the first token, with several clients at the same time.

    python benchmarks/serve.py SmolLM2-135M-Instruct.Q4_1.gguf --clients 1 4 16
    python benchmarks/serve.py models/tiny-llama --format q4_0 --contenders halfbyte halfbyte-generate
    python benchmarks/serve.py llama-8b --synthetic --device cuda --format int4_g128 --contenders halfbyte halfbyte-generate
    python benchmarks/serve.py SmolLM2-135M-Instruct.Q4_1.gguf --step-ms 7.8 --clients 128 --contenders halfbyte halfbyte-generate

Contenders: `halfbyte serve`; `halfbyte-generate`, the same model without a server, its prompts as one batch; `llama.cpp`, its server from
the package xllamacpp, for .gguf files. Each runs in a process of its own, in turn, and only while it is measured; a ratio is the median
over rounds of the ratio within a round. A client asks for the continuation of a prompt of its own, greedily, as a stream, and asks again as
soon as it has its answer. All answers have the same number of tokens. "CPU s" is the time that the contender's process has computed: where
other programs run, it tells more than tokens per second. With `--step-ms` nothing is computed: the model is one on a GPU whose steps take
so long, and tokens are random, so that the CPU time is that of Python. llama.cpp needs xllamacpp.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTENDERS = ("halfbyte", "llama.cpp", "halfbyte-generate")
WORDS = ["river", "stone", "lamp", "garden", "window", "paper", "cloud", "letter", "wheel", "forest", "mirror", "salt", "copper"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--synthetic", action="store_true", help="MODEL is FAMILY-SIZE of llm.py, with random weights")
    parser.add_argument("--format", help="of a model in floating point")
    parser.add_argument("--device", default="cpu", help="of halfbyte (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, help="of halfbyte: compute nothing, sleep as long as a GPU's decode step would take")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the requests (default: greedy)")
    parser.add_argument("--top-p", type=float, help="of the requests")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=64, help="words of a prompt (default: %(default)s)")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=2, help="of each client (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["halfbyte", "llama.cpp"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of each round")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        WORKERS[args.worker](args)
        return 0
    rows = [
        {"round": number, "contender": contender, **row}
        for number in range(args.rounds)
        for contender in args.contenders
        for row in measured(args, contender)
    ]
    show(args, rows)
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "threads": args.threads, "rows": rows}, indent=1), encoding="utf-8")
    return 0


def show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the medians over rounds, and the ratio of tokens per second to the first contender."""
    print(f"{'clients':>7} {'contender':18} {'tokens/s':>9} {'ratio':>6} {'first token p50':>16} {'p95 ms':>8} {'CPU s':>7}")
    for clients in args.clients:
        of_first = {row["round"]: row["rate"] for row in rows if (row["contender"], row["clients"]) == (args.contenders[0], clients)}
        for contender in args.contenders:
            rounds_of = [row for row in rows if (row["contender"], row["clients"]) == (contender, clients)]
            median = {name: statistics.median(row[name] for row in rounds_of) for name in ("rate", "p50", "p95", "cpu")}
            ratio = statistics.median(of_first[row["round"]] / row["rate"] for row in rounds_of)
            figures = f"{median['rate']:9.1f} {ratio:6.2f} {median['p50']:16.0f} {median['p95']:8.0f} {median['cpu']:7.2f}"
            print(f"{clients:7} {contender:18} {figures}")


def measured(args: argparse.Namespace, contender: str) -> list[dict[str, Any]]:
    """Start a contender, and measure it with each number of clients."""
    # As the command `halfbyte` sets it: otherwise an idle OpenMP thread takes a core from the server's event loop and the clients.
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    if contender != "llama.cpp" and "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "10000")
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", contender]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if contender == "halfbyte-generate":
                return [json.loads(process.stdout.readline()) for _ in args.clients]
            url = process.stdout.readline().strip()
            if not url:
                raise SystemExit(f"{contender} did not start")
            asyncio.run(load(url, args, 1, requests=1))  # compiles kernels
            asyncio.run(load(url, args, max(args.clients), requests=1))
            rows = []
            for clients in args.clients:
                before = cpu_seconds(process.pid)
                rows.append(asyncio.run(load(url, args, clients, requests=args.requests)))
                rows[-1]["cpu"] = cpu_seconds(process.pid) - before
            return rows
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    """Time that the threads of a process have computed, on Linux; elsewhere not a number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prompt(args: argparse.Namespace, client: int, request: int) -> str:
    """A prompt that has no beginning in common with others."""
    return " ".join(WORDS[(client * 7 + request * 3 + i * (1 + client % 5)) % len(WORDS)] for i in range(args.prompt))


async def load(url: str, args: argparse.Namespace, clients: int, requests: int) -> dict[str, Any]:
    """Ask with so many clients at the same time.

    The clients share the cores with the server, so they do little: bytes are read by the chunks of HTTP, and JSON is parsed up to the first
    text and in the last event.
    """
    firsts: list[float] = []
    tokens = 0
    kind = os.urandom(4).hex()  # no answer is in a cache
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")

    async def ask(index: int) -> None:
        nonlocal tokens
        reader, writer = await asyncio.open_connection(host, int(port))
        for request in range(requests):
            body = {"prompt": f"{kind} {prompt(args, index, request)}", "max_tokens": args.new, "ignore_eos": True}
            body |= sampling(args)
            options = {"stream": True, "stream_options": {"include_usage": True}, "cache_prompt": False}
            content = json.dumps({**body, **options}).encode()
            started, first, used = time.perf_counter(), None, 0
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            try:
                status = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:  # a server may close a connection after an answer
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                status = await reader.readuntil(b"\r\n\r\n")
            assert status.split(maxsplit=2)[1] == b"200", status
            while size := int(await reader.readline(), 16):
                chunk = (await reader.readexactly(size + 2))[:-2]
                if first is None:
                    first = time.perf_counter() if any(has_text(event) for event in events(chunk)) else None
                if b'"usage":{' in chunk:
                    used = max([used, *((event.get("usage") or {}).get("completion_tokens", 0) for event in events(chunk))])
            await reader.readline()
            assert used == args.new, f"{used} tokens instead of {args.new}"
            assert first is not None
            tokens += used
            firsts.append(1000 * (first - started))
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(ask(index) for index in range(clients)))
    seconds = time.perf_counter() - started
    firsts.sort()
    return {"clients": clients, "rate": tokens / seconds, "p50": firsts[len(firsts) // 2], "p95": firsts[math.ceil(0.95 * len(firsts)) - 1]}


def sampling(args: argparse.Namespace) -> dict[str, float]:
    """How the tokens of a request are chosen."""
    return {"temperature": args.temperature, **({} if args.top_p is None else {"top_p": args.top_p})}


def events(chunk: bytes) -> list[dict[str, Any]]:
    """The events of a chunk: servers send whole ones."""
    return [json.loads(line[6:]) for line in chunk.splitlines() if line.startswith(b"data: {")]


def has_text(event: dict[str, Any]) -> bool:
    """Whether an event has new text."""
    return bool(event["choices"] and event["choices"][0]["text"])


# Contenders, each in a process of its own, which prints its URL


def opened(args: argparse.Namespace) -> Any:
    """halfbyte's model."""
    import torch

    from halfbyte.language.model import LanguageModel

    torch.set_num_threads(args.threads)
    if args.step_ms is not None:
        from serve_simulated import simulated

        return simulated(LanguageModel.open(args.model, format=args.format), args.step_ms / 1000)
    if not args.synthetic:
        return LanguageModel.open(args.model, format=args.format, device=args.device)
    from llm_models import make_config, make_spec, make_tokenizer

    from halfbyte.language.tokenizer import Tokenizer

    family, _, size = str(args.model).rpartition("-")
    config = make_config(family, size, 8 * args.prompt + args.new)
    spec, dtype = make_spec(config, args.device, args.format or "q4_0")
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(config.vocab_size).save_pretrained(folder)
        config.save_pretrained(folder)
        tokenizer = Tokenizer.open(Path(folder))
    return LanguageModel(spec, tokenizer, args.model, dtype=dtype)


def serve_halfbyte(args: argparse.Namespace) -> None:
    """`halfbyte serve`."""
    from halfbyte.serve import server
    from halfbyte.serve.settings import Settings

    settings, sock = Settings(parallel=max(args.clients), prefix_bytes=0, grace=0), server.listen("127.0.0.1", 0)
    language = server.Language("model", opened(args), {})
    server.run(server.Serving(settings, language, None), sock, settings, lambda: print(server.address_of(sock), flush=True))


def serve_llama_cpp(args: argparse.Namespace) -> None:
    """llama.cpp's server, with a slot for each client."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_parallel, parameters.port = str(args.model), max(args.clients), 0
    parameters.hostnames, parameters.warmup = ["127.0.0.1"], True
    parameters.n_ctx = max(args.clients) * 2 * (4 * args.prompt + args.new)
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    sys.stdin.read()


def generate_halfbyte(args: argparse.Namespace) -> None:
    """The same work without a server: all prompts at once, in one batch."""
    model = opened(args)
    for number, clients in enumerate((1, max(args.clients), *args.clients)):
        count, before = 0, time.process_time()
        started = time.perf_counter()
        for request in range(args.requests):
            prompts = [f"{os.urandom(4).hex()} {prompt(args, index, request)}" for index in range(clients)]
            found = model.generate(prompts, max_new_tokens=args.new, ignore_eos=True, **sampling(args))
            count += sum(len(one.ids) for one in found)
        seconds = time.perf_counter() - started
        firsts = sorted(1000 * (one.first_token - found[0].started) for one in found)
        row = {
            "clients": clients,
            "rate": count / seconds,
            "p50": firsts[len(firsts) // 2],
            "p95": firsts[math.ceil(0.95 * len(firsts)) - 1],
        }
        row["cpu"] = time.process_time() - before
        if number > 1:  # the first two compile kernels
            print(json.dumps(row), flush=True)


WORKERS = {"halfbyte": serve_halfbyte, "llama.cpp": serve_llama_cpp, "halfbyte-generate": generate_halfbyte}

if __name__ == "__main__":
    raise SystemExit(main())
