"""vLLM on a GPU with the plugin and without: tokens per second and time to the first token of a GPTQ checkpoint, by number of sequences.

    python benchmarks/vllm_gpu.py                                      an 8B-shaped Llama, 1 to 256 sequences, stock vLLM and the plugin
    python benchmarks/vllm_gpu.py --contenders plugin halfbyte         the same weights as a halfbyte folder (int4_g128)
    python benchmarks/vllm_gpu.py --size tiny --sequences 1 2          whether it runs
    python benchmarks/vllm_gpu.py --json results.json --log logs       writes the figures, and what each contender's vLLM printed

In an environment with vLLM for CUDA and halfbyte. "stock" runs vLLM's own kernel for the checkpoint (HALFBYTE_VLLM_KERNELS=0), "plugin"
halfbyte's. The weights are synthetic: random codes of 4 bits in groups of 128, scaled to a standard deviation of 0.02. Contenders run one
after the other, each in a process of its own that has the GPU to itself, with vLLM's defaults: CUDA graphs, torch.compile, the engine in
another process than the caller, asynchronous scheduling. Prefixes are not cached.

All sequences of a round begin at the same time, with prompts of 512 tokens, and write 128. A round measures the time of the first token
alone, then of all of them. "decode" counts the tokens after the first over the difference of both, "whole" all tokens over the second; the
time to the first token is the median and the maximum over the sequences. The medians of rounds are told.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_cpu import ask, installed, read, start_worker

CONTENDERS = ("stock", "plugin", "halfbyte")
GROUP = 128
WEIGHT_STD = 0.02
KERNEL = re.compile(r"Using \w+ for \S+LinearMethod|halfbyte multiplies layers in .*|Using \S+ attention backend|Using FlashAttention.*")
DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8b", choices=("tiny", "8b"), help="of the Llama (default: %(default)s)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["stock", "plugin"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--new", type=int, default=128, help="tokens that each sequence writes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--memory", type=float, default=0.85, help="vLLM's --gpu-memory-utilization (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="for the checkpoints, which are kept and used again (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--log", type=Path, metavar="FOLDER")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    with tempfile.TemporaryDirectory() as scratch:
        return compare(args, args.folder or Path(scratch))


def compare(args: argparse.Namespace, scratch: Path) -> int:
    """Writes the checkpoints, runs the contenders in turn, and prints what they say. Returns 1 where one has failed."""
    source = scratch / f"gptq-{args.size}"
    if not source.exists():
        make_gptq(args.size, source)
    results: dict[str, dict[str, Any]] = {}
    for name in args.contenders:
        try:
            results[name] = run_contender(args, name, as_halfbyte(source, scratch) if name == "halfbyte" else source)
        except SystemExit as error:
            results[name] = {"error": str(error)}
        print_contender(name, results)
        if args.json:
            args.json.write_text(json.dumps({**about(), "size": args.size, "new": args.new, "contenders": results}, indent=1))
    return int(any("error" in found for found in results.values()))


def run_contender(args: argparse.Namespace, name: str, model: Path) -> dict[str, Any]:
    options = [f"--{key}={getattr(args, key)}" for key in ("prompt", "new", "dtype", "memory")]
    options += [f"--worker={model}", "--sequences", *map(str, args.sequences)]
    log: list[str] = []
    try:
        begun = time.perf_counter()
        worker = start_worker(__file__, options, DEFAULTS, {"HALFBYTE_VLLM_KERNELS": str(int(name != "stock"))})
        gpu = read(worker, log)
        opened = time.perf_counter() - begun
        rounds = [{count: json.loads(ask(worker, count, log)) for count in args.sequences} for _ in range(args.rounds)]
        worker.stdin.close()
        worker.wait()
    except SystemExit as error:
        raise SystemExit("\n".join([*log[-40:], str(error)])) from error
    finally:
        if args.log:
            args.log.mkdir(parents=True, exist_ok=True)
            (args.log / f"{name}.log").write_text("\n".join(log))
    medians = {count: {key: statistics.median(each[count][key] for each in rounds) for key in rounds[0][count]} for count in args.sequences}
    kernels = list(dict.fromkeys(found[0] for text in log if (found := KERNEL.search(text))))
    return {"gpu": gpu, "opened_s": round(opened, 1), "kernels": kernels, "by_sequences": medians}


def about() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("vllm", "torch", "triton", "transformers") if installed(name)}


def print_contender(name: str, results: dict[str, dict[str, Any]]) -> None:
    found = results[name]
    if "error" in found:
        print(f"{name} failed:\n{found['error']}", flush=True)
        return
    first = next(iter(results.values())).get("by_sequences", {})
    print(f"{name}: {found['gpu']}, opened in {found['opened_s']} s; {'; '.join(found['kernels'])}")
    print(f"{'sequences':>9} {'decode tokens/s':>16} {'':7} {'whole tokens/s':>15} {'':7} {'first token, ms':>16} {'last of them':>13}")
    for count, row in found["by_sequences"].items():
        ratios = [f"{row[key] / first[count][key]:5.2f} x" if count in first else "" for key in ("decode", "whole")]
        print(
            f"{count:9} {row['decode']:16.1f} {ratios[0]:7} {row['whole']:15.1f} {ratios[1]:7} "
            f"{1e3 * row['first_token_s']:16.1f} {1e3 * row['last_first_token_s']:13.1f}",
            flush=True,
        )


def make_gptq(size: str, target: Path) -> None:
    """Writes a GPTQ checkpoint of the Llama that benchmarks/llm_models.py calls so, one file for each layer."""
    import torch
    from llm_models import make_config
    from safetensors.torch import save_file

    config = make_config("llama", size)
    if size == "tiny":  # what vLLM's kernels take
        config.hidden_size, config.intermediate_size, config.head_dim = 512, 1024, 128
    hidden, heads, kv = config.hidden_size, config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    generator = torch.Generator().manual_seed(0)

    def quantized(name: str, n: int, k: int) -> dict[str, torch.Tensor]:
        words = torch.randint(-(2**31), 2**31, (k // 8, n), dtype=torch.int32, generator=generator)
        scale = torch.empty(k // GROUP, n).uniform_(0.5, 1.5, generator=generator) * (WEIGHT_STD / 4.6)  # the deviation of codes 0 to 15
        zeros = torch.full((k // GROUP, n // 8), 0x77777777, dtype=torch.int32)  # 8, of which files of GPTQ have one less
        return {f"{name}.qweight": words, f"{name}.scales": scale.half(), f"{name}.qzeros": zeros}

    target.mkdir(parents=True)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        tensors = {f"{layer}.{norm}_layernorm.weight": torch.ones(hidden).half() for norm in ("input", "post_attention")}
        for name, n in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
            tensors |= quantized(f"{layer}.self_attn.{name}", n, hidden)
        tensors |= quantized(f"{layer}.self_attn.o_proj", hidden, heads)
        for name in ("gate_proj", "up_proj"):
            tensors |= quantized(f"{layer}.mlp.{name}", config.intermediate_size, hidden)
        tensors |= quantized(f"{layer}.mlp.down_proj", hidden, config.intermediate_size)
        save_file(tensors, target / f"model-{i}.safetensors", {"format": "pt"})
    rows = min(config.vocab_size, 8192)  # of which a larger vocabulary has repeats: random numbers take long
    repeats = -(-config.vocab_size // rows)
    tensors = {"model.norm.weight": torch.ones(hidden).half()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        drawn = torch.randn(rows, hidden, generator=generator).mul_(WEIGHT_STD).half()
        tensors[name] = drawn.repeat(repeats, 1)[: config.vocab_size].contiguous()
    save_file(tensors, target / "model-ends.safetensors", {"format": "pt"})
    names: dict[str, str] = {}
    for path in sorted(target.glob("*.safetensors")):
        names |= dict.fromkeys(tensor_names(path), path.name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    entries = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float16", "quantization_config": quantization}
    (target / "config.json").write_text(json.dumps(entries))


def tensor_names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def as_halfbyte(source: Path, scratch: Path) -> Path:
    """The same codes and scales as a halfbyte folder."""
    import halfbyte as hb

    target = scratch / f"halfbyte-{source.name}"
    if not target.exists():
        hb.export(source, target, "halfbyte")
    return target


def work(args: argparse.Namespace) -> int:
    """Opens the model, then runs as many sequences as each line of stdin says, and prints what was measured."""
    from vllm import LLM, SamplingParams

    settings = {"max_model_len": args.prompt + args.new + 1, "max_num_seqs": max(args.sequences), "gpu_memory_utilization": args.memory}
    model = LLM(
        str(args.worker), dtype=args.dtype, skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=False, **settings
    )

    def run(count: int, new: int, first: int) -> tuple[float, list[float]]:
        """Seconds in all, and to the first token of each sequence."""
        prompts = [{"prompt_token_ids": [(37 * i + 11 * j + first) % 300 + 3 for j in range(args.prompt)]} for i in range(count)]
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        taken = time.perf_counter() - begun
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return taken, [output.metrics.first_token_latency for output in outputs]

    def measure(count: int, first: int) -> dict[str, float]:
        one, _ = run(count, 1, first)
        whole, latencies = run(count, args.new + 1, first + 1)
        rates = {"decode": count * args.new / (whole - one), "whole": count * (args.new + 1) / whole}
        return {**rates, "first_token_s": statistics.median(latencies), "last_first_token_s": max(latencies)}

    for count in args.sequences:  # kernels for these numbers of tokens are compiled
        run(count, 4, 0)
    import torch

    print(f"> {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}", flush=True)
    for number, text in enumerate(sys.stdin):
        print(f"> {json.dumps(measure(int(text), 2 * number))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
