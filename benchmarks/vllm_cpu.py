"""vLLM on a CPU with the plugin: tokens per second of a float model and of the same one in a format of halfbyte.

    python benchmarks/vllm_cpu.py                                      a Llama of 0.63 billion synthetic weights, 1 and 16 sequences
    python benchmarks/vllm_cpu.py --model models/tiny-llama            a Hugging Face folder
    python benchmarks/vllm_cpu.py --contenders float32 q4_0 q8_0
    python benchmarks/vllm_cpu.py --contenders bfloat16 q4_0 W4A16 --dtype bfloat16

In an environment with vLLM (vllm-cpu) and halfbyte. Each contender is loaded in a process of its own, and the processes take turns, round
after round: each round writes `--new` tokens after prompts of 16, with 1 sequence and with 16. A rate counts the tokens of all sequences
over the whole time, prompts included. The median of the rounds is told. "W4A16" is a compressed-tensors checkpoint of int4 in blocks of
128, with the head in floating point, on vLLM's own kernels, for which it needs AVX-512. The file is not called vllm.py, which would be
imported for vLLM.
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
from importlib import metadata
from pathlib import Path
from typing import Any

PROMPT = 16
FLOATS = ("float32", "bfloat16")
STOCK = "W4A16"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a float Hugging Face folder (default: the synthetic Llama)")
    parser.add_argument("--contenders", nargs="+", default=["float32", "q4_0"], help="dtypes of the float model, and formats")
    parser.add_argument("--dtype", default="float32", choices=FLOATS, help="of the activations of quantized contenders")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--new", type=int, default=64, help="tokens that each sequence writes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    with tempfile.TemporaryDirectory() as scratch:
        return compare(args, Path(scratch))


def compare(args: argparse.Namespace, scratch: Path) -> int:
    """Writes the models, lets the contenders take turns, and prints what they say."""
    source = args.model or make_synthetic(scratch / "float")
    workers = {name: start(args, name, folder(source, name, scratch)) for name in args.contenders}
    rates: dict[str, dict[int, list[float]]] = {name: {count: [] for count in args.sequences} for name in workers}
    for _ in range(args.rounds):
        for name, worker in workers.items():
            for count in args.sequences:
                rates[name][count].append(float(ask(worker, count)))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    medians = {name: {count: statistics.median(values) for count, values in found.items()} for name, found in rates.items()}
    print_results(args, source, medians)
    return 0


def print_results(args: argparse.Namespace, source: Path, medians: dict[str, dict[int, float]]) -> None:
    from halfbyte.machine import machine

    vllm = next(f"{name} {metadata.version(name)}" for name in ("vllm-cpu", "vllm") if installed(name))
    about = {"cpu": machine().cpu, "cores": machine().cores, "vllm": vllm, "torch": metadata.version("torch")}
    if args.json:
        print(json.dumps({**about, "model": args.model and str(source), "new": args.new, "tokens_per_second": medians}))
        return
    print(", ".join(f"{value} {key}" if key == "cores" else str(value) for key, value in about.items()))
    first = next(iter(medians.values()))
    print(f"{'tokens/s':12}" + "".join(f"{count:>7} sequences" for count in args.sequences))
    for name, found in medians.items():
        print(f"{name:12}" + "".join(f"{rate:9.1f} {rate / first[count]:5.2f} x" for count, rate in found.items()))


def installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def make_synthetic(target: Path) -> Path:
    """A Llama of the shapes that benchmarks/llm.py calls 0.6b, with random weights in bfloat16."""
    import torch
    import transformers
    from llm_models import make_config

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(make_config("llama", "0.6b")).bfloat16().save_pretrained(target)
    return target


def folder(source: Path, contender: str, scratch: Path) -> Path:
    if contender in FLOATS:
        return source
    import halfbyte as hb

    if contender == STOCK:
        hb.convert(source, scratch / "int4", hb.Config("int4_g128", skip=("lm_head", "*embed_tokens")))
        hb.export(scratch / "int4", scratch / contender, "compressed-tensors")
    else:
        hb.convert(source, scratch / contender, contender)
    return scratch / contender


def start(args: argparse.Namespace, name: str, model: Path) -> Any:
    """A contender's process, once its model is loaded."""
    given = ["--worker", str(model), "--dtype", name if name in FLOATS else args.dtype, "--new", str(args.new)]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    worker = start_worker(__file__, given, environment, {"HALFBYTE_VLLM_KERNELS": "0"} if name == STOCK else {})
    read(worker)
    return worker


def start_worker(script: str, options: list[str], defaults: dict[str, str], environment: dict[str, str]) -> Any:
    """Starts a benchmark's script as a worker, with environment variables in addition to this process's, and `defaults` of others."""
    return subprocess.Popen(
        [sys.executable, script, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=defaults | os.environ | environment,
    )


def read(worker: Any, log: list[str] | None = None) -> str:
    """The next word of a worker; what other packages print before is added to `log`."""
    for text in worker.stdout:
        if text.startswith("> "):
            return str(text[2:].strip())
        if log is not None:
            log.append(text.rstrip())
    raise SystemExit(f"a contender ended with status {worker.wait()}")


def ask(worker: Any, sequences: int, log: list[str] | None = None) -> str:
    """A worker's answer, once it has written for so many sequences."""
    worker.stdin.write(f"{sequences}\n")
    worker.stdin.flush()
    return read(worker, log)


def work(args: argparse.Namespace) -> int:
    """Loads the model, then writes for as many sequences as each line of stdin says, and prints the rate."""
    from vllm import LLM, SamplingParams

    settings = {"max_model_len": 512, "skip_tokenizer_init": True, "enable_prefix_caching": False, "distributed_executor_backend": "uni"}
    model = LLM(args.worker, dtype=args.dtype, **settings)
    sampling = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True, detokenize=False)

    def run(sequences: int) -> float:
        prompts = [{"prompt_token_ids": [(37 * i + 11 * j) % 300 + 3 for j in range(PROMPT)]} for i in range(sequences)]
        begun = time.perf_counter()
        model.generate(prompts, sampling, use_tqdm=False)
        return sequences * args.new / (time.perf_counter() - begun)

    run(2)
    print("> ready", flush=True)
    for text in sys.stdin:
        print(f"> {run(int(text))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
