"""Whole language models with synthetic weights: tokens per second of halfbyte and of its peers.

    python benchmarks/llm.py                       CPU: a Llama of 0.63 billion weights beside llama.cpp (pip install xllamacpp)
    python benchmarks/llm.py --contenders halfbyte halfbyte-2:4 --format int4_g128        CPU: beside 2:4 sparse linear layers
    python benchmarks/llm.py --contenders halfbyte halfbyte-int8-cache --prompt 2048      CPU: beside keys and values in 8 bits
    python benchmarks/llm.py --contenders halfbyte llama-bench --gguf model.gguf          CPU: a file of llama.cpp's as it is
    python benchmarks/llm.py --family gemma3 --contenders halfbyte llama-bench --gguf gemma3.gguf    CPU: another family; makes the file
    python benchmarks/llm.py --device cuda --size 8b --contenders halfbyte halfbyte-compiled
    python benchmarks/llm.py --device cuda --size 8b --contenders halfbyte llama-bench --gguf model.gguf
    python benchmarks/llm.py --device cuda --family qwen3-moe --size 30b --cpu-experts 48 --contenders halfbyte-model llama-bench
    python benchmarks/llm.py --device cuda --size 8b --batch 128 --contenders halfbyte halfbyte-int8-cache    a step of many sequences
    python benchmarks/llm.py --device cuda --family gemma3 --size 4b --contenders halfbyte halfbyte-fused     what replaced forwards gain

"llama.cpp" is xllamacpp, whose wheel is compiled for AVX2; "llama-bench" is llama.cpp's own program, compiled with `-DGGML_NATIVE=ON`
for this CPU (--llama-bench names it); "llama-bench-no-mmap" reads the file into memory from which a GPU copies, 2048 tokens at a time.
"halfbyte-model" is halfbyte's own decoder, without transformers (`hb.LanguageModel`); of a batch on a GPU "step" is one of a loop of
steps, with all that the host does, and "graph" one of replays alone.
"halfbyte-fused" has transformers' layers, with the products of `fuse_` and the loop that writes.
Each contender runs in a process of its own; they take turns, round after round, and each round reads a prompt of random tokens and writes
after it, as a user's calls do. Of compiled contenders on a GPU, and of all with a `--batch`, only the "step" is told: one decoding step of
so many sequences after the prompt, as a CUDA graph.
"reading" is the time that a bare read of the weights of a step takes (all but the embedding, of which a step reads one row), and
"of roofline" is that time over the step's.

With --where a round tells, on a CPU, where the time of a step and of a prompt goes, in ms: all, halfbyte's kernels (and their calls), what
else its ops take under torch.compile, and torch's attention (sdpa), these two from a profiler; the rest is torch's and transformers'.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from llm_models import FAMILIES, Q4_K_M, SIZES, make_config, make_file, make_model, make_tokenizer

CONTENDERS = (
    *(
        "halfbyte",
        "halfbyte-model",
        "halfbyte-model-int8-cache",
        "halfbyte-compiled",
        "halfbyte-fused",
        "halfbyte-2:4",
        "halfbyte-int8-cache",
    ),
    *("torch", "torch-compiled", "torch-int4-compiled", "llama.cpp", "llama-bench", "llama-bench-no-mmap"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--family", choices=FAMILIES, default="llama", help="of the synthetic model (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="0.6b", help="8b and 70b are Llamas, 4b the other families (default: %(default)s)")
    parser.add_argument("--format", default="q4_0")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompt", type=int, default=512, help="tokens to read (default: %(default)s)")
    parser.add_argument("--new", type=int, default=64, help="tokens to write (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step on a GPU (default: %(default)s)")
    parser.add_argument("--cpu-experts", type=int, metavar="N", help="of the first N layers, for halfbyte-model and llama-bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["halfbyte", "halfbyte-compiled", "llama.cpp"])
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that has xllamacpp (default: this one)")
    parser.add_argument("--llama-bench", default="llama-bench", help="llama.cpp's program (default: %(default)s)")
    parser.add_argument("--gguf", type=Path, help="a file that halfbyte and llama.cpp run; where there is none it is made of the model")
    parser.add_argument("--folder", type=Path, help="where the model is kept from run to run (default: nowhere)")
    parser.add_argument("--where", action="store_true", help="where the time goes, in place of tokens per second (not llama.cpp)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", metavar="CONTENDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.size not in (sizes := FAMILIES[args.family].sizes):
        parser.error(f"{args.family} has no size {args.size}: choose one of {', '.join(sizes)}")
    if args.worker:
        return work(args)
    if args.format == Q4_K_M and args.gguf is None:
        if args.folder is None:
            parser.error(f"{Q4_K_M} is a file that every contender opens: say where by --gguf or --folder")
        args.gguf = args.folder / "model.gguf"
    if args.folder is not None:
        return compare(args)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        return compare(args)


def compare(args: argparse.Namespace) -> int:
    if ({*_PEERS} & {*args.contenders} or args.gguf) and not gguf(args).exists():
        make_file(config(args), gguf(args), args.folder / "halfbyte", args.device, args.format)
    workers = {name: start(args, name) for name in args.contenders}
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    facts = {}

    def answer(name: str) -> dict[str, Any]:
        """What a contender says next; one that failed is out of the comparison."""
        said = read(workers[name])
        if "failed" in said:
            print(f"{name}: {said['failed']}", file=sys.stderr)
            end(workers.pop(name))
        return said

    for name in list(workers):
        facts[name] = answer(name)
    for _ in range(1 if args.where else args.rounds):
        for name in list(workers):
            ask(workers[name])
            if "failed" in (said := answer(name)):
                facts[name] |= said
            else:
                answers[name].append(said)
    for worker in workers.values():
        end(worker)
    medians = {name: {key: statistics.median(a[key] for a in rounds) for key in rounds[0]} for name, rounds in answers.items() if rounds}
    if args.json:
        print(
            json.dumps(
                {"arguments": {k: str(v) for k, v in vars(args).items()}, "facts": facts, "rounds": answers, "medians": medians}, indent=1
            )
        )
        return 0
    keys = sorted({key for row in medians.values() for key in row})
    print(f"{'':20}" + "".join(f"{key:>16}" for key in (*keys, "opened, s", "weights, MB")))
    for name, row in medians.items():
        cells = "".join(f"{row[key]:16.2f}" if key in row else " " * 16 for key in keys)
        opened = f"{facts[name]['open_seconds']:16.1f}" if "open_seconds" in facts[name] else " " * 16
        print(f"{name:20}{cells}{opened}{facts[name].get('weight_bytes', 0) / 1e6:16.1f}")
    return 0


def start(args: argparse.Namespace, name: str) -> Any:
    forwarded = ["--device", args.device, "--family", args.family, "--size", args.size, "--format", args.format, "--threads", args.threads]
    forwarded += ["--prompt", args.prompt, "--new", args.new, "--batch", args.batch, "--folder", args.folder]
    forwarded += ["--llama-bench", args.llama_bench, *([] if args.gguf is None else ["--gguf", args.gguf])]
    forwarded += [] if args.cpu_experts is None else ["--cpu-experts", args.cpu_experts]
    forwarded += ["--rounds", args.rounds, *(["--where"] if args.where else [])]
    python = args.llama_python if name == "llama.cpp" else sys.executable
    command = [python, __file__, "--worker", name, *map(str, forwarded)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(worker: Any) -> None:
    """Asks for a round; a worker that is dead says so when its answer is read."""
    with suppress(BrokenPipeError):
        print("go", file=worker.stdin, flush=True)


def read(worker: Any) -> dict[str, Any]:
    line = worker.stdout.readline()
    return json.loads(line) if line else {"failed": f"the process ended with code {worker.wait()}"}


def end(worker: Any) -> None:
    with suppress(BrokenPipeError):  # what was asked of a dead worker is still to be written
        worker.stdin.close()
    worker.wait()


# In the worker


def work(args: argparse.Namespace) -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print as they like
    try:
        custom = Model if args.worker.startswith("halfbyte-model") else Torch
        contender: Any = _PEERS.get(args.worker, custom)(args)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else error.filename
        print(json.dumps({"failed": f"{missing} is not installed"}), file=answers, flush=True)
        return 0
    except Failed as error:
        print(json.dumps({"failed": str(error)}), file=answers, flush=True)
        return 0
    print(json.dumps(contender.facts), file=answers, flush=True)
    for _ in sys.stdin:
        try:
            said = contender.round()
        except Exception as error:  # whatever it is, the others go on
            traceback.print_exc()
            said = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)
    return 0


def random_prompt(args: argparse.Namespace, seed: int) -> list[int]:
    import random

    return random.Random(seed).choices(range(300, vocabulary(args)), k=args.prompt)


def vocabulary(args: argparse.Namespace) -> int:
    """Without transformers, which a Python for llama.cpp need not have."""
    found: int = FAMILIES[args.family].sizes[args.size]["vocab_size"]
    return found


def config(args: argparse.Namespace) -> Any:
    return make_config(args.family, args.size, args.prompt + args.new)


def gguf(args: argparse.Namespace) -> Path:
    return Path(args.gguf or args.folder / "model.gguf")


class LlamaCpp:
    def __init__(self, args: argparse.Namespace) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(gguf(args))
        parameters.n_ctx, parameters.n_parallel = args.prompt + args.new + 8, 1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = args.threads
        parameters.n_gpu_layers = 999 if args.device == "cuda" else 0
        self.args, self.seed, self.server = args, 0, xllamacpp.Server(parameters)
        self.facts = {"weight_bytes": gguf(args).stat().st_size, "system": xllamacpp.get_system_info()}
        self.round()

    def round(self) -> dict[str, float]:
        self.seed += 1
        request = {"prompt": random_prompt(self.args, self.seed), "n_predict": self.args.new, "temperature": 0, "ignore_eos": True}
        timings = self.server.handle_completions({**request, "cache_prompt": False})["timings"]
        return {"prompt tok/s": timings["prompt_per_second"], "decode tok/s": timings["predicted_per_second"]}


class LlamaBench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.facts = args, {"weight_bytes": gguf(args).stat().st_size}
        output_of([args.llama_bench, "--help"])

    def round(self) -> dict[str, float]:
        args = self.args
        tests = {"prompt": ["-p", args.prompt, "-n", 0], "decode": ["-p", 0, "-n", args.new, "-d", args.prompt]}
        rates = {}
        for name, test in tests.items():
            command = [args.llama_bench, "-m", gguf(args), "-t", args.threads, "-r", 1, "-o", "json", *test]
            command += ["-ngl", 0 if args.device == "cpu" else 99]
            command += [] if args.cpu_experts is None else ["-ncmoe", args.cpu_experts]
            command += ["-mmp", 0, "-ub", 2048] if args.worker.endswith("no-mmap") else []
            rates[f"{name} tok/s"] = json.loads(output_of([*map(str, command)]))[0]["avg_ts"]
        return rates


class Failed(Exception):
    """Why a contender gives no times."""


def output_of(command: list[str]) -> str:
    """What a program prints; raises Failed with the end of its errors."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        last = " / ".join(done.stderr.strip().splitlines()[-5:])
        raise Failed(f"{command[0]} ended with code {done.returncode}: {last[-1000:]}")
    return done.stdout


_PEERS: dict[str, Any] = {"llama.cpp": LlamaCpp, "llama-bench": LlamaBench, "llama-bench-no-mmap": LlamaBench}


class Kernels:
    """Seconds in halfbyte's compiled code on a CPU, and calls of it, from now on; made before the first kernel."""

    def __init__(self) -> None:
        from halfbyte.kernels.cpu.codegen import runtime

        self.seconds, self.calls = 0.0, 0
        run = runtime.runner()

        def timed(address: int, threads: int) -> None:
            begin = time.perf_counter()
            run(address, threads)
            self.seconds += time.perf_counter() - begin
            self.calls += 1

        runtime.runner = lambda: timed  # type: ignore[assignment]


class Torch:
    """halfbyte, or transformers alone: float32 on a CPU, bfloat16 on a GPU, and there torch's own product with 4-bit weights."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        torch.set_num_threads(args.threads)
        self.kernels = Kernels() if args.where else None
        self.args, self.seed = args, 0
        begin = time.perf_counter()
        self.model = opened(args)
        opening = {} if self.model is None else {"open_seconds": time.perf_counter() - begin}
        if self.model is None:
            form = args.format if args.worker.startswith("halfbyte") else None
            how = {"sparse": args.worker.endswith("2:4"), "optimized": not args.worker.endswith("fused")}
            self.model = make_model(config(args), args.device, form, **how)
        if "int4" in args.worker:
            with_int4pack(self.model)
        self.tokenizer = make_tokenizer(vocabulary(args))
        self.compiled, self.int8_cache = args.worker.endswith("compiled"), "int8-cache" in args.worker
        self.facts = {"weight_bytes": weight_bytes(self.model), "torch": torch.__version__, **opening}
        _ = self.generated(self.args.new) if args.where else self.round()

    def round(self) -> dict[str, float]:
        if self.args.device == "cuda" and (self.compiled or self.args.batch > 1):
            return self.step()
        if self.args.where:
            return self.where()
        done = self.generated(self.args.new)
        return {"prompt tok/s": done.prompt_rate, "decode tok/s": done.decode_rate}

    def where(self) -> dict[str, float]:
        few, many = 8, 8 + self.args.new
        rounds = [[self.parts(new) for new in (few, many)] for _ in range(self.args.rounds)]
        # Once torch's profiler has run, torch.compile's code is slower.
        profiled = [self.profiled(new) for new in (few, many)]
        less, more = ({key: statistics.median(r[i][key] for r in rounds) for key in rounds[0][i]} | profiled[i] for i in (0, 1))
        step = {name: (value - less[name]) / self.args.new for name, value in more.items()}
        found = {f"step {name}": value for name, value in step.items()}
        if not self.compiled:  # what compiles reads the prompt more than once, as torch does without
            found |= {f"prompt {name}": value - (few - 1) * step[name] for name, value in less.items()}
        return found

    def parts(self, new: int) -> dict[str, float]:
        """Milliseconds of reading a prompt and writing so many tokens."""
        assert self.kernels is not None
        kernels, calls = self.kernels.seconds, self.kernels.calls
        done = self.generated(new)
        took = {"all": done.prompt_seconds + done.decode_seconds, "kernels": self.kernels.seconds - kernels}
        return {name: value * 1e3 for name, value in took.items()} | {"calls": self.kernels.calls - calls}

    def profiled(self, new: int) -> dict[str, float]:
        from torch.profiler import ProfilerActivity, profile

        assert self.kernels is not None
        kernels = self.kernels.seconds
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.generated(new)
        kernels = self.kernels.seconds - kernels
        times = {event.key: event.cpu_time_total / 1e3 for event in profiler.key_averages()}
        ops, sdpa = (sum(t for key, t in times.items() if key.startswith(name)) for name in ("halfbyte::", "aten::_scaled_dot_product"))
        return {"ops": ops - kernels * 1e3 if self.compiled else 0.0, "sdpa": sdpa}

    def generated(self, new: int) -> Any:
        import torch

        import halfbyte
        from halfbyte.integrations.transformers.text import generate

        self.seed += 1
        prompt = {"input_ids": torch.tensor([random_prompt(self.args, self.seed)])}
        prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
        cache = halfbyte.Int8Cache(self.model.config) if self.int8_cache else None
        settings = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "compiled": self.compiled, "cache": cache}
        return generate(self.model, self.tokenizer, prompt, lambda _: None, **settings)

    def step(self) -> dict[str, float]:
        """Milliseconds of one decoding step, and of reading its weights: in `generate`, or compiled, a CUDA graph with a static cache."""
        import torch

        if not hasattr(self, "reading"):
            read = weight_bytes(self.model) - weight_bytes(self.model.get_input_embeddings())
            self.reading = reading_seconds(read) * 1e3
            self.graph, *self.kept = self.captured() if self.compiled else [None]
        if not self.compiled:
            few, many = (self.texts(new) for new in (8, 8 + self.args.new))
            step = (many - few) / self.args.new * 1e3
            return {"step ms": step, "reading ms": self.reading, "of roofline": self.reading / step}
        times = []
        for _ in range(20):
            with torch.inference_mode():
                for layer in self.kept[-1].layers:
                    layer.cumulative_length.fill_(self.args.prompt)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(5):
                self.graph.replay()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / 5 * 1e3)
        step = statistics.median(times)
        return {"step ms": step, "reading ms": self.reading, "of roofline": self.reading / step}

    def texts(self, new: int) -> float:
        """Seconds of `generate` for so many new tokens of each sequence."""
        import torch

        import halfbyte

        ids = torch.tensor([random_prompt(self.args, self.seed)] * self.args.batch, device="cuda")
        cache = {"past_key_values": halfbyte.Int8Cache(self.model.config)} if self.int8_cache else {}
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, **cache)
        return time.perf_counter() - begin

    def captured(self) -> tuple[Any, ...]:
        """The graph of a compiled step, and what it reads and nothing else keeps: ids, positions and, last, the cache."""
        import torch
        from transformers import StaticCache

        from halfbyte.integrations.transformers.generate.steps import likeliest

        model = self.model

        def forward(**inputs: Any) -> Any:
            return likeliest(model(**inputs).logits)

        with torch.inference_mode():
            cache = StaticCache(config=model.config, max_cache_len=self.args.prompt + max(8, self.args.new))
            ids = torch.full((self.args.batch, 1), 300, device="cuda")
            position = torch.full((1, 1), self.args.prompt, device="cuda")
            step = torch.compile(forward, fullgraph=True, dynamic=False)
            model(input_ids=ids.expand(-1, self.args.prompt), past_key_values=cache, logits_to_keep=1)

            def run() -> Any:
                return step(input_ids=ids, position_ids=position, past_key_values=cache)

            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        return graph, ids, position, cache


class Model:
    """halfbyte's own decoder: float32 on a CPU, 16 bits on a GPU."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        torch.set_num_threads(args.threads)
        self.args, self.seed, self.on_gpu = args, 0, args.device != "cpu"
        begin = time.perf_counter()
        self.plan: Any = None
        spec, dtype = self.opened()
        opening = {} if args.gguf is None else {"open_seconds": time.perf_counter() - begin}
        if self.on_gpu:
            from halfbyte.decoder.lower_gpu import GpuModel

            self.model: Any = GpuModel(spec, "cuda", dtype, self.plan)
        else:
            from halfbyte.decoder.lower_cpu import CpuModel

            self.model = CpuModel(spec)
        placed = {} if self.plan is None else {"plan": str(self.plan), "gpu_bytes": torch.cuda.memory_allocated()}
        self.facts = placed | {"weight_bytes": spec.nbytes, "torch": torch.__version__, "notes": [*self.model.notes], **opening}
        self.round()

    def opened(self) -> Any:
        import torch
        from llm_models import make_spec, make_split_spec

        from halfbyte.decoder.build import build_spec
        from halfbyte.decoder.offload.placement import Request, plan_of
        from halfbyte.language.checkpoint_tensors import open_checkpoint

        args = self.args
        if args.gguf is None:
            if args.cpu_experts is None:
                return make_spec(config(args), args.device, args.format)
            self.plan, *opened = make_split_spec(config(args), args.format, args.cpu_experts, args.prompt + args.new + 1)
            return opened
        offloads = args.cpu_experts is not None
        values, tensors = open_checkpoint(args.gguf, device=torch.device("cuda", 0) if self.on_gpu else None, offloads=offloads)
        if offloads:
            request = Request(None, args.prompt + args.new + 1, args.cpu_experts)
            self.plan = plan_of(build_spec(values, tensors.sized()), request, tensors.dtype)
            tensors.placement = self.plan.placement
        return build_spec(values, tensors), tensors.dtype

    def cache(self) -> Any:
        from halfbyte.decoder.cache import Cache

        return Cache(self.model.spec, int8="int8-cache" in self.args.worker, where=self.model.where)

    def next(self, tokens: list[int], cache: Any) -> list[int]:
        if self.on_gpu:
            found: list[int] = self.model.decode_tokens(tokens, cache, launch_ahead=True)
            return found
        return [int(row.argmax()) for row in self.model.decode(tokens, cache)]

    def round(self) -> dict[str, float]:
        self.seed += 1
        prompt, cache = random_prompt(self.args, self.seed), self.cache()
        if self.on_gpu and self.args.batch > 1:
            return self.step(prompt, cache)
        begin = time.perf_counter()
        tokens = [int(self.model.prefill(prompt, cache).argmax())]
        read = time.perf_counter()
        for _ in range(self.args.new - 1):
            tokens = self.next(tokens, cache)
        wrote = time.perf_counter() - read
        return {"prompt tok/s": len(prompt) / (read - begin), "decode tok/s": (self.args.new - 1) / wrote}

    def step(self, prompt: list[int], cache: Any) -> dict[str, float]:
        """Milliseconds of a decoding step of many sequences, and of reading its weights."""
        import torch

        if not hasattr(self, "slots"):
            from halfbyte.decoder.cache import Slots

            self.model.prefill(prompt, cache)
            self.slots = Slots(self.model.spec, self.args.batch, int8="int8-cache" in self.args.worker, where=self.model.where)
            for _ in range(self.args.batch):
                self.slots.join(cache)
            self.reading = reading_seconds(self.model.spec.nbytes - self.model.spec.embedding.nbytes) * 1e3
        slots, tokens, steps = self.slots, [300] * self.args.batch, []
        for _ in range(20):
            slots.cut(self.args.prompt)
            for _ in range(2):  # of which the second one is captured at first
                tokens = self.next(tokens, slots)
            begin = time.perf_counter()
            for _ in range(5):
                tokens = self.next(tokens, slots)
            steps.append((time.perf_counter() - begin) / 5 * 1e3)
        slots.cut(self.args.prompt)
        self.next(tokens, slots)
        graph, graphs = [*self.model._steps.values()][-1], []
        torch.cuda.synchronize()
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(5):
                graph.again(self.args.batch)
            torch.cuda.synchronize()
            graphs.append((time.perf_counter() - begin) / 5 * 1e3)
        step = statistics.median(steps)
        found = {"step ms": step, "graph ms": statistics.median(graphs)}
        return {**found, "reading ms": self.reading, "of roofline": self.reading / step}


def reading_seconds(nbytes: int) -> float:
    """The least time in which a kernel reads so many bytes of memory."""
    import torch

    from halfbyte.kernels.gpu.runtime.clock import graph_times
    from halfbyte.kernels.gpu.runtime.probe import read_launches
    from halfbyte.machine import gpu

    data = torch.empty(nbytes // 4 * 4, dtype=torch.uint8, device="cuda").random_()
    return min(time.median for time in graph_times(read_launches([data], gpu(0)), rounds=5).values())


# The model


def opened(args: argparse.Namespace) -> Any:
    """The model of --gguf; None without."""
    from halfbyte.integrations.transformers.text import open_model

    return None if args.gguf is None else open_model(args.gguf, args.device)[0]


def with_int4pack(model: Any) -> None:
    """Puts torch's `_weight_int4pack_mm` (tinygemm), in blocks of 128 and with random weights, in the place of each linear layer."""
    import torch
    from torch import nn

    class Int4(nn.Module):
        def __init__(self, n: int, k: int) -> None:
            super().__init__()
            packed = torch.randint(-(2**31), 2**31, (n // 8, k // 128, 32, 4), dtype=torch.int32, device="cuda")
            scales = torch.tensor([0.004, 0.0], dtype=torch.bfloat16, device="cuda").repeat(k // 128, n, 1)
            self.packed, self.scales = (nn.Parameter(data, requires_grad=False) for data in (packed, scales))
            self.n = n

        def forward(self, x: Any) -> Any:
            y = torch.ops.aten._weight_int4pack_mm(x.reshape(-1, x.shape[-1]), self.packed, 128, self.scales)
            return y.reshape(*x.shape[:-1], self.n)

    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, Int4(module.out_features, module.in_features))


def weight_bytes(model: Any) -> int:
    from halfbyte.integrations.transformers import text

    return text.weight_bytes(model)


if __name__ == "__main__":
    sys.exit(main())
