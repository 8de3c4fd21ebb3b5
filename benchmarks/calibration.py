"""What each method of choosing codes is worth on a language model: perplexity, divergence and seconds, format by format.

    python benchmarks/calibration.py                 the tiny Llama of this repository; --device cuda takes a minute or two
    python benchmarks/calibration.py MODEL --text held-out.txt --calibration other.txt
    python benchmarks/calibration.py --experts 4     the same Llama as a mixture of experts

Models compute in float32 and activations are not quantized, so that the figures are those of the weights alone. Embeddings, and a head that
is tied to one, are q8_0 throughout. Seconds are those of quantizing the whole model, calibration included.

The mixture computes what the Llama computes (sparse upcycling, Komatsuzaki et al., arXiv:2212.05055): each expert is a copy of a layer's
MLP, and two of them share a token. So in floating point the router does not matter, and quantized each expert serves the tokens that it
gets. The router parts them by k-means of what the MLP reads of the calibration text.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import halfbyte
from halfbyte.evaluate import evaluate_language
from halfbyte.integrations.transformers.text import weight_bytes

ROOT = Path(__file__).parent.parent
CALIBRATED = ("gptq", "awq")
MEASURED = 8  # passages by which mixed precision judges each layer


def upcycled(model: Any, experts: int, tokens: torch.Tensor) -> Any:
    """A Llama as a Mixtral of so many equal experts, two a token."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    same += ("max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id")
    config = transformers.MixtralConfig(**{key: getattr(model.config, key) for key in same}, num_local_experts=experts)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".mlp." not in name}
    read: list[torch.Tensor] = []
    hooks = [layer.mlp.register_forward_pre_hook(lambda _, args: read.append(args[0].flatten(0, -2))) for layer in model.model.layers]
    with torch.no_grad():
        model.model(tokens.to(model.device))
    for i, (layer, hook, x) in enumerate(zip(model.model.layers, hooks, read, strict=True)):
        hook.remove()
        stacks = {
            "gate_up_proj": torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
            "down_proj": layer.mlp.down_proj.weight,
        }
        state |= {f"model.layers.{i}.mlp.experts.{name}": t.detach().expand(experts, *t.shape) for name, t in stacks.items()}
        state[f"model.layers.{i}.mlp.gate.weight"] = directions(x, experts)
    built = transformers.MixtralForCausalLM(config).to(model.device).eval()
    built.load_state_dict(state)
    return built


def directions(x: torch.Tensor, count: int) -> torch.Tensor:
    """Spherical k-means of the rows of x: unit vectors [count, K]."""
    x = torch.nn.functional.normalize(x, dim=-1)
    found = x[torch.linspace(0, len(x) - 1, count).long()]
    for _ in range(10):
        nearest = (x @ found.T).argmax(dim=-1)
        found = torch.stack([torch.nn.functional.normalize(x[nearest == i].sum(dim=0), dim=0) for i in range(count)])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=ROOT / "models" / "tiny-llama", help="a Hugging Face folder")
    parser.add_argument(
        "--text", type=Path, default=ROOT / "examples" / "tiny-llama" / "heldout.txt", help="what perplexity is measured on"
    )
    parser.add_argument("--bytes", type=int, default=60_000, help="of the text (default: %(default)s)")
    parser.add_argument("--calibration", type=Path, default=ROOT / "examples" / "tiny-llama" / "calibration.txt")
    parser.add_argument("--passages", type=int, default=32, help="of 512 tokens (default: %(default)s)")
    parser.add_argument("--formats", nargs="+", default=["int4_g128", "q4_0", "int4_g128_zp"], help="each with all methods")
    parser.add_argument("--methods", nargs="+", default=["absmax", "mse", "hqq", "awq", "gptq"])
    parser.add_argument("--bits", type=float, default=4.5, help="of mixed precision (default: %(default)s)")
    parser.add_argument("--eight", nargs="*", default=["q8_0", "int8_channel", "int8_g128"], help="formats with absmax alone")
    parser.add_argument("--experts", type=int, help="quantize the model, a Llama, as a mixture of so many experts")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    transformers.utils.logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True).to(args.device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model.eval()
    ids = torch.tensor(tokenizer(args.text.read_bytes()[: args.bytes].decode(errors="ignore"))["input_ids"])
    tokens = halfbyte.calibration_tokens(tokenizer, args.calibration.read_text(encoding="utf-8"), args.passages)
    if args.experts:
        model = upcycled(model, args.experts, tokens[:4])

    def quantized(name: str, make: Any, method: str) -> None:
        built, begin = copy.deepcopy(model), time.perf_counter()
        halfbyte.quantize_(built, make(), tokens if method in CALIBRATED else None)
        if built.device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name], models[name] = time.perf_counter() - begin, built
        print(name, f"{seconds[name]:.1f} s", file=sys.stderr)

    models: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for fmt in args.formats:
        for method in args.methods:
            quantized(f"{fmt}, {method}", lambda f=fmt, m=method: halfbyte.Config(f, method=m, compute="float"), method)
    for method in [method for method in ("absmax", "gptq") if method in args.methods and args.bits]:

        def mixed(method: str = method) -> Any:
            return halfbyte.Config.auto(model, args.bits, tokens[:MEASURED], method=method, compute="float")

        quantized(f"mixed {args.bits:g} bits, {method}", mixed, method)
    for fmt in args.eight:
        quantized(f"{fmt}, absmax", lambda f=fmt: halfbyte.Config(f, compute="float"), "absmax")
    reference, found = evaluate_language(model, models, ids)

    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, halfbyte {halfbyte.__version__}; ", end="")
    print(f"{len(ids)} tokens, {len(tokens)} passages of {tokens.shape[1]}\n")
    print("| format, method | MB | perplexity | increase | divergence | same top token | seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    print(f"| not quantized, float32 | {weight_bytes(model) / 1e6:.1f} | {reference.perplexity:.4f} | | | | |")
    for name, quality in found.items():
        cells = [name, f"{weight_bytes(models[name]) / 1e6:.1f}", f"{quality.perplexity:.4f}"]
        cells += [f"{quality.perplexity / reference.perplexity - 1:+.3%}", f"{quality.divergence:.6f}", f"{quality.top1:.2%}"]
        print(f"| {' | '.join(cells)} | {seconds[name]:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
