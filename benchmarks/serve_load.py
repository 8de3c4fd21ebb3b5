"""`halfbyte serve` under load and in faults: right status codes, no request disturbed, and memory that stays flat.

Memory is compared between moments at which the server is idle: `short` and `mixed` send their load in rounds and wait after each. The
first third of the rounds fills caches; from the second third to the last one memory may grow by 1 %. Before, prompts of all lengths and
batches of all sizes fill the cache of kernels' plans, which is bounded (17 kB for each layer and size) and looks like a leak until then.

    python benchmarks/serve_load.py MODEL.gguf short --requests 10000        # short requests
    python benchmarks/serve_load.py MODEL.gguf mixed --clients 64 --minutes 10
    python benchmarks/serve_load.py MODEL.gguf killed full-disk port         # kill -9 and restart; a full disk; two servers on a port

Starts the server as a process of its own, prints a line now and then, and ends with exit code 1 and a sentence at the first fault. `mixed`
has clients that stream, vanish in mid-stream, read slowly, want JSON by a schema, and send what is refused; the answer to one question is
checked. Memory, file descriptors and threads are those of the server's process, from /proc: Linux only. `full-disk` mounts a
small tmpfs, which takes root; without, files may not grow (RLIMIT_FSIZE). Needs httpx2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import httpx2

# Of one token, which depends on nothing else that runs: prompts are read one by one.
ASKED = {"prompt": "Question: What is the capital of France?\nAnswer: The capital of France is", "max_tokens": 1, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}}, "required": ["name"]}
EXPLODING: list[dict[str, Any]] = [
    {"type": "string", "pattern": "((((a{1,99}){1,99}){1,99}){1,99})"},
    {"type": "string", "pattern": "(a|aa)*" * 50 + "(.*a.{200}){20}"},
    {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    {"allOf": [{"anyOf": [{"const": [i, j]} for i in range(8)]} for j in range(12)]},
]
WORDS = ["river", "stone", "lamp", "garden", "window", "paper", "cloud", "letter", "wheel", "forest", "mirror", "salt", "copper"]
POOLS = 2 + min(32, (os.cpu_count() or 1) + 4)  # threads that tokenize, and of asyncio
IDLE = 12.0  # seconds after which an idle server has freed memory: serve/engine.py's _IDLE and a little more
MOST_PLANNED, MOST_PARALLEL = 256, 16  # tokens of a prompt that are computed at a time, and sequences that are decoded together
ROUNDS = 12  # of `short` and `mixed`
MOST_GROWTH = 0.01  # of memory, from the second third of the rounds to the last one


class Sample(NamedTuple):
    """What the server's process has."""

    rss: int
    descriptors: int
    threads: int


class Server:
    """`halfbyte serve` as a process.

    Attributes:
        process: The process.
        url: Where it answers.
    """

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def sample(self) -> Sample:
        """Memory, file descriptors and threads now."""
        folder = Path(f"/proc/{self.process.pid}")
        pages = int((folder / "statm").read_text("utf-8").split()[1])
        return Sample(pages * resource.getpagesize(), len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")))

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        """Wait until no sequence runs or waits, and connections of clients that have gone are closed."""
        end = time.monotonic() + seconds
        while "halfbyte_unfinished_sequences 0.0" not in httpx2.get(f"{self.url}/metrics").text:
            check(time.monotonic() < end, "sequences of clients that have gone still run")
            time.sleep(0.1)
        time.sleep(1.0)


def check(holds: bool, what: str) -> None:
    """End the program with a sentence where something does not hold."""
    if not holds:
        raise SystemExit(f"FAULT: {what}")


@contextmanager
def serving(
    args: argparse.Namespace, *options: str, errors: IO[str] | None = None, prefix: Sequence[str] = (), **environment: str
) -> Iterator[Server]:
    """Start a server and wait until it answers."""
    command = [*prefix, sys.executable, "-m", "halfbyte", "serve", str(args.model), "--port", "0", "--device", "cpu", "--json", *options]
    command += ["--format", args.format] if args.format else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **environment})
    try:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline()
            check(bool(line), f"the server did not start: {text}")
            text += line
        yield Server(process, json.loads(text)["url"])
    finally:
        process.kill()
        process.communicate()


def body(request: int, **settings: Any) -> dict[str, Any]:
    """A short greedy request with a prompt of its own."""
    chosen = random.Random(request)
    prompt = " ".join(chosen.choices(WORDS, k=chosen.randint(2, 12)))
    return {"prompt": f"{request} {prompt}", "max_tokens": chosen.randint(1, 4), "temperature": 0, "ignore_eos": True, **settings}


# Flatness


class Watch:
    """Samples of a server over a run, printed; those that are taken while it is idle must not grow."""

    def __init__(self, server: Server) -> None:
        self._server, self._idle, self._started = server, list[Sample](), time.monotonic()

    def take(self, what: str) -> Sample:
        """Take a sample and print it with `what`."""
        seconds, found = time.monotonic() - self._started, self._server.sample()
        print(f"{seconds:7.0f} s {found.rss / 1e6:8.1f} MB {found.descriptors:4} descriptors {found.threads:3} threads  {what}", flush=True)
        return found

    def take_idle(self, what: str) -> None:
        """Wait until the server is idle and has freed what only requests need, and take a sample that counts."""
        self._server.wait_until_idle()
        time.sleep(IDLE)
        self._idle.append(self.take(f"idle after {what}"))

    def check_flat(self) -> None:
        """Compare the memory of the last third of the rounds with that of the second one, by their medians, and all else with the first."""
        before, after = (statistics.median(sample.rss for sample in part) for part in thirds(self._idle)[1:])
        growth = after / before - 1
        print(f"idle memory {before / 1e6:.1f} MB in the second third, {after / 1e6:.1f} MB in the last: {growth:+.2%}")
        check(growth <= MOST_GROWTH, f"memory grows by {growth:.2%}, {MOST_GROWTH:.0%} at most")
        check_returned(self._idle[0], self._idle[-1])


def thirds(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """The samples of `ROUNDS` in three parts."""
    return [samples[i * ROUNDS // 3 : (i + 1) * ROUNDS // 3] for i in range(3)]


def check_returned(before: Sample, after: Sample) -> None:
    """Check that no more descriptors and threads are left than there were, but for pools of threads, which start when they are needed."""
    check(after.descriptors <= before.descriptors, f"{after.descriptors} file descriptors are open, {before.descriptors} were")
    check(after.threads <= before.threads + POOLS, f"{after.threads} threads run, {before.threads} did")


async def ask_short(server: Server, args: argparse.Namespace, first: int, count: int) -> None:
    """Send `count` short requests from `args.clients` clients, every fourth as a stream."""
    numbers = iter(range(first, first + count))

    async def run(client: httpx2.AsyncClient) -> None:
        for number in numbers:
            found = await client.post("/v1/completions", json=body(number, stream=number % 4 == 0))
            check(found.status_code == 200, f"request {number}: {found.status_code} {found.text[:200]}")
            if number % 4:
                check(found.json()["usage"]["completion_tokens"] == body(number)["max_tokens"], f"request {number} has other tokens")
            else:
                check(found.text.endswith("data: [DONE]\n\n"), f"request {number} has no end: {found.text[-200:]}")

    async with httpx2.AsyncClient(base_url=server.url, timeout=7200, limits=httpx2.Limits(max_connections=args.clients)) as client:
        await asyncio.gather(*(run(client) for _ in range(args.clients)))


def fill_plans(server: Server) -> None:
    """Send prompts of each length for which there are plans, none of which begins like another one, and decode 1 to `MOST_PARALLEL`
    sequences together, of the same length and of different ones."""
    prompts: list[Any] = [{"prompt": [tokens] * tokens, "max_tokens": 1} for tokens in range(1, MOST_PLANNED + 1)]
    for count in range(1, MOST_PARALLEL + 1):
        prompts.append({"prompt": [count] * 20, "n": count, "max_tokens": 8, "ignore_eos": True})
        prompts.append({"prompt": [[300 + i] * (20 + i) for i in range(count)], "max_tokens": 8, "ignore_eos": True})
    with httpx2.Client(base_url=server.url, timeout=7200) as client:
        for asked in prompts:
            found = client.post("/v1/completions", json=asked)
            check(found.status_code == 200, f"{str(asked)[:100]}: {found.status_code} {found.text[:200]}")


def short(args: argparse.Namespace) -> None:
    """Short requests, without a leak."""
    with serving(args, "--prefix-cache", str(args.prefix_cache)) as server:
        fill_plans(server)
        watch, each = Watch(server), -(-args.requests // ROUNDS)
        for number in range(ROUNDS):
            asyncio.run(ask_short(server, args, 1_000_000 + number * each, each))
            watch.take_idle(f"{(number + 1) * each} requests")
        watch.check_flat()


# Clients of all kinds


class Mixed:
    """Clients that behave in turn in each of the ways of `KINDS`."""

    def __init__(self, server: Server, seconds: float, first: int) -> None:
        """Begin. seconds: for which they ask; first: the number of the first client, which decides what it asks."""
        self.done: Counter[str] = Counter()
        self._server, self._end, self._first, self._said = server, time.monotonic() + seconds, first, answer(server.url)
        path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        self._chats = httpx2.post(server.url + path, json=asked, timeout=7200).status_code == 200

    def _asked(self, text: str) -> tuple[str, dict[str, Any]]:
        """The path and the prompt of a chat; of a completion where the model has no chat template."""
        if self._chats:
            return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}
        return "/v1/completions", {"prompt": text}

    async def run(self, index: int) -> None:
        """Ask until the time is over."""
        index += self._first
        chosen, number = random.Random(index), 0
        async with httpx2.AsyncClient(base_url=self._server.url, timeout=7200) as client:
            while time.monotonic() < self._end:
                kind, number = chosen.choice(KINDS), number + 1
                await kind(self, client, 1000 * index + number)
                self.done[kind.__name__] += 1

    async def plain(self, client: httpx2.AsyncClient, number: int) -> None:
        found = await client.post("/v1/completions", json=body(number, max_tokens=16, n=1 + number % 2, temperature=0.8, logprobs=2))
        check(found.status_code == 200 and len(found.json()["choices"]) == 1 + number % 2, f"plain: {found.status_code} {found.text[:200]}")

    async def question(self, client: httpx2.AsyncClient, number: int) -> None:
        found = await client.post("/v1/completions", json=ASKED)
        check(found.status_code == 200, f"question: {found.status_code} {found.text[:200]}")
        check(found.json()["choices"][0]["text"] == self._said, f"the answer to a fixed question is another one: {found.text}")

    async def stream(self, client: httpx2.AsyncClient, number: int) -> None:
        path, asked = self._asked(f"Tell me about a {WORDS[number % len(WORDS)]}.")
        asked |= {"max_tokens": 48, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", path, json=asked) as response:
            text = (await response.aread()).decode()
        check(response.status_code == 200, f"stream: {response.status_code} {text[:200]}")
        check(text.endswith("data: [DONE]\n\n") and '"error"' not in text, f"a stream has ended with {text[-300:]}")

    async def vanish(self, client: httpx2.AsyncClient, number: int) -> None:
        async with client.stream("POST", "/v1/completions", json=body(number, max_tokens=400, stream=True)) as response:
            check(response.status_code == 200, f"vanish: {response.status_code}")
            async for _ in response.aiter_bytes():
                break

    async def slow(self, client: httpx2.AsyncClient, number: int) -> None:
        async with client.stream("POST", "/v1/completions", json=body(number, max_tokens=24, stream=True, logprobs=20)) as response:
            check(response.status_code == 200, f"slow: {response.status_code}")
            text = b""
            async for chunk in response.aiter_raw(4096):
                text += chunk
                await asyncio.sleep(0.2)
        check(text.endswith(b"data: [DONE]\n\n"), f"a slow reader's stream has ended with {text[-300:]!r}")

    async def schema(self, client: httpx2.AsyncClient, number: int) -> None:
        format = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        path, asked = self._asked(f"Name person {number}.")
        found = await client.post(path, json={**asked, "response_format": format, "max_tokens": 64})
        check(found.status_code == 200, f"schema: {found.status_code} {found.text[:200]}")
        choice = found.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            text = choice["message"]["content"] if self._chats else choice["text"]
            check("name" in json.loads(text), f"an answer does not follow its schema: {choice}")

    async def refused(self, client: httpx2.AsyncClient, number: int) -> None:
        wrong = (
            ({"temperature": -1}, 400),
            ({"max_tokens": 10**6}, 400),
            ({"prompt": [5] * 200_000}, 400),
            ({"prompt": "a " * 1_000_000}, 400),
            ({"model": "none"}, 404),
            ({"prompt": "a" * 5_000_000}, 413),
        )
        settings, status = wrong[number % len(wrong)]
        found = await client.post("/v1/completions", json=body(number, **settings))
        check(found.status_code == status and "message" in found.json()["error"], f"refused: {found.status_code} {found.text[:200]}")

    async def explode(self, client: httpx2.AsyncClient, number: int) -> None:
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": EXPLODING[number % len(EXPLODING)]}}
        found = await client.post("/v1/completions", json=body(number, response_format=format))
        check(found.status_code in (200, 400), f"explode: {found.status_code} {found.text[:200]}")
        check(found.status_code == 200 or "schema" in found.json()["error"]["message"], f"explode: {found.text[:200]}")


KINDS = (
    Mixed.explode,
    Mixed.plain,
    Mixed.plain,
    Mixed.question,
    Mixed.stream,
    Mixed.stream,
    Mixed.vanish,
    Mixed.slow,
    Mixed.schema,
    Mixed.refused,
)


def mixed(args: argparse.Namespace) -> None:
    """Clients of all kinds for some minutes."""
    with serving(args, "--prefix-cache", str(args.prefix_cache), "--timeout", "7200") as server:
        fill_plans(server)
        watch, done = Watch(server), Counter[str]()
        for number in range(ROUNDS):
            clients = Mixed(server, 60 * args.minutes / ROUNDS, number * args.clients)
            asyncio.run(everyone(clients, args.clients, watch))
            done += clients.done
            watch.take_idle(f"{done.total()} requests: {dict(done)}")
        watch.check_flat()


async def everyone(clients: Mixed, count: int, watch: Watch) -> None:
    """Run `count` clients, and print samples meanwhile."""

    async def look() -> None:
        while True:
            await asyncio.sleep(20.0)
            watch.take(f"{clients.done.total()} requests of this round")

    watching = asyncio.create_task(look())
    await asyncio.gather(*(clients.run(index) for index in range(count)))
    watching.cancel()


# Faults of the machine


def answer(url: str) -> str:
    """Ask the fixed question."""
    found = httpx2.post(f"{url}/v1/completions", json=ASKED, timeout=7200)
    check(found.status_code == 200, f"{found.status_code} {found.text[:200]}")
    return str(found.json()["choices"][0]["text"])


def killed(args: argparse.Namespace) -> None:
    """`kill -9` in mid-stream, and a restart on the same port at once."""
    said, port = None, "0"
    for _ in range(args.times):
        with serving(args, "--port", port) as server:
            said, port = said or answer(server.url), server.url.rpartition(":")[2]
            check(answer(server.url) == said, "the server that was started again answers otherwise")
            with httpx2.stream("POST", f"{server.url}/v1/completions", json=body(0, max_tokens=400, stream=True), timeout=60) as response:
                chunks = response.iter_bytes()
                next(chunks)
                server.process.send_signal(signal.SIGKILL)
                try:
                    text = b"".join(chunks)
                except httpx2.HTTPError as e:
                    print(f"killed: the client sees {type(e).__name__}: {e}", flush=True)
                else:
                    check(False, f"a stream of a killed server has ended in order: {text[-100:]!r}")
    with serving(args, "--port", port) as server:
        check(answer(server.url) == said, "the server that was started again answers otherwise")
        end_in_order(server)
    print(f"killed {args.times} times and started again on port {port}", flush=True)


def end_in_order(server: Server) -> None:
    """End a server by SIGTERM."""
    server.process.send_signal(signal.SIGTERM)
    check(server.process.wait(60) == 0, f"exit code {server.process.returncode} after SIGTERM")


def full_disk(args: argparse.Namespace) -> None:
    """Neither compiled kernels nor the log can be written."""
    with full_folder() as folder:
        limit = [] if folder is not None else ["sh", "-c", 'ulimit -f 0; exec "$0" "$@"']
        with tempfile.TemporaryDirectory() as other:
            cache = (folder or Path(other)) / "cache"
            with (folder or Path(other)).joinpath("log").open("w", encoding="utf-8") as log:
                said = None
                for options in ((), ("--host", "0.0.0.0")):  # which warns
                    with serving(args, *options, errors=log, prefix=limit, HALFBYTE_CACHE=str(cache)) as server:
                        said = said or answer(server.url)
                        check(answer(server.url) == said, "the server that was started again answers otherwise")
                        asyncio.run(ask_short(server, args, 0, 4 * args.clients))
                        server.wait_until_idle()
                        end_in_order(server)
            check(not any(path.stat().st_size for path in cache.rglob("*") if path.is_file()), "the disk was not full")
    print("full disk: all requests are answered, and the server has ended in order", flush=True)


@contextmanager
def full_folder() -> Iterator[Path | None]:
    """A folder on a file system without a free byte; None where none can be mounted."""
    with tempfile.TemporaryDirectory() as name:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", name], capture_output=True, check=False).returncode:
            print("full disk: no file system can be mounted, files may not grow instead", flush=True)
            yield None
            return
        try:
            folder = Path(name)
            (folder / "log").touch()
            with (folder / "fill").open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1 << 12))
                except OSError as e:
                    print(f"full disk: {e}", flush=True)
            yield folder
        finally:
            subprocess.run(["umount", name], check=True)


def taken_port(args: argparse.Namespace) -> None:
    """A second server on a port says so in one sentence."""
    with serving(args) as server:
        port = server.url.rpartition(":")[2]
        command = [sys.executable, "-m", "halfbyte", "serve", str(args.model), "--port", port, "--device", "cpu"]
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body(0, max_tokens=200, stream=True), timeout=7200) as response:
            second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            text = response.read()
        check(second.returncode == 2, f"exit code {second.returncode} on a port that is taken")
        check(second.stderr.count("\n") == 1 and port in second.stderr, f"it says: {second.stderr}")
        check(text.endswith(b"data: [DONE]\n\n"), "a stream of the first server has ended")
    print(f"taken port: {second.stderr.strip()}", flush=True)


SCENARIOS = {"short": short, "mixed": mixed, "killed": killed, "full-disk": full_disk, "port": taken_port}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS)
    parser.add_argument("--format", help="of a model in floating point")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=10_000, help="of `short` (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10, help="of `mixed` (default: %(default)s)")
    parser.add_argument("--times", type=int, default=3, help="of `killed` (default: %(default)s)")
    parser.add_argument("--prefix-cache", type=float, default=64, help="megabytes, which are full soon (default: %(default)s)")
    args = parser.parse_args()
    for scenario in args.scenarios:
        SCENARIOS[scenario](args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
