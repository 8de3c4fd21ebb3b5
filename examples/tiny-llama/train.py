"""Train the tiny Llama on the token files that prepare.py wrote.

    python train.py --data WORK --out models/tiny-llama --minutes 8.3

The learning rate follows the clock (or, with --steps, the step count, which makes a run repeatable to the rounding of
the GPU), so the run ends in time on any machine. Writes model.safetensors (bfloat16), config.json,
generation_config.json, tokenizer.json, tokenizer_config.json and log.tsv (step, seconds, tokens, train loss, held-out
loss) to --out. Losses are in nats per token.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

START = time.monotonic()
VOCAB = 8192
CONTEXT = 1024
# None ends in a space: to the tokenizer a space belongs to the word after it.
PROMPTS = ("The", "This function returns", "import os\nimport sys\n\n", "class Stack:\n    def")


def config(arguments: argparse.Namespace) -> LlamaConfig:
    """Every dimension is a multiple of 128, and those that weights are multiplied along of 256 (K-quants)."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 5 // 2,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=max(1, arguments.hidden // 256),
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=True,
    )


def read_tokens(path: Path) -> Tensor:
    return torch.from_numpy(np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2").astype(np.int32))


def window(tokens: Tensor, starts: Tensor) -> Tensor:
    """int64 [len(starts), CONTEXT + 1] on the device of `tokens`; only the starts are copied there."""
    index = starts.to(tokens.device, non_blocking=True)[:, None] + torch.arange(CONTEXT + 1, device=tokens.device)
    return tokens[index].long()


@dataclass
class Batches:
    """Windows of CONTEXT + 1 tokens: each epoch shifts the grid by a random offset and visits it in a random order."""

    tokens: Tensor
    batch: int
    generator: torch.Generator
    epochs: float = 0.0

    def __post_init__(self) -> None:
        self.starts = torch.empty(0, dtype=torch.int64)

    def __next__(self) -> Tensor:
        if len(self.starts) < self.batch:
            offset = int(torch.randint(CONTEXT, (1,), generator=self.generator))
            grid = torch.arange(offset, len(self.tokens) - CONTEXT - 1, CONTEXT)
            self.starts = grid[torch.randperm(len(grid), generator=self.generator)]
        starts, self.starts = self.starts[: self.batch], self.starts[self.batch :]
        self.epochs += self.batch * CONTEXT / len(self.tokens)
        return window(self.tokens, starts)


def loss_of(model: torch.nn.Module, windows: Tensor) -> Tensor:
    with torch.autocast(windows.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, tokens: Tensor, batch: int, windows: int) -> float:
    """Mean loss of at most `windows` windows that lie evenly over the held-out tokens."""
    starts = torch.linspace(0, len(tokens) - CONTEXT - 2, min(windows, len(tokens) // CONTEXT)).long()
    # Whole batches only: a compiled model then sees one shape.
    starts = starts[: max(1, len(starts) // batch) * batch]
    losses = [loss_of(model, window(tokens, part)) for part in starts.split(batch)]
    return torch.stack(losses).mean().item()


def decay(parameters: list[Tensor], weight_decay: float) -> list[dict[str, object]]:
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def learning_rate(progress: float, peak: float) -> float:
    """Linear over the first 2 %, then a half cosine to 1 % of the peak."""
    if progress < 0.02:
        return peak * max(progress, 1e-4) / 0.02
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (min(progress, 1.0) - 0.02) / 0.98)))


def write(model: LlamaForCausalLM, data: Path, out: Path) -> None:
    """The folder that transformers' from_pretrained reads; the tied head is not stored twice."""
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    tensors.pop("lm_head.weight")
    save_file(tensors, out / "model.safetensors.part", metadata={"format": "pt"})
    (out / "model.safetensors.part").replace(out / "model.safetensors")
    settings = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    for noise in ("_name_or_path", "id2label", "label2id", "problem_type", "output_attentions", "output_hidden_states"):
        settings.pop(noise, None)
    (out / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    shutil.copyfile(data / "tokenizer.json", out / "tokenizer.json")
    end = "<|endoftext|>"
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")


def sample(model: LlamaForCausalLM, data: Path, device: str) -> str:
    """Greedy and sampled continuations of PROMPTS."""
    from tokenizers import Tokenizer as Bpe

    bpe = Bpe.from_file(str(data / "tokenizer.json"))
    torch.manual_seed(0)
    parts = []
    for prompt in PROMPTS:
        ids = torch.tensor([[0, *bpe.encode(prompt).ids]], device=device)
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 40}):
            with torch.no_grad():
                new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=120, pad_token_id=0, **options)
            parts.append(f"=== {options}\n{bpe.decode(new[0].tolist())}\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.u16.xz, heldout.u16.xz, tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.3, help="wall clock from the end of the imports to the last file")
    parser.add_argument("--steps", type=int, help="this many steps, whatever the clock says")
    parser.add_argument("--batch", type=int, default=64, help=f"sequences of {CONTEXT} tokens a step")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--eval-windows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")

    held_out = read_tokens(arguments.data / "heldout.u16.xz").to(device)
    tokens = read_tokens(arguments.data / "train.u16.xz").to(device)
    model = LlamaForCausalLM(config(arguments)).to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    # GPT-2's rule: the two projections that add to the residual start smaller, by the root of their number.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * arguments.layers) ** -0.5)
    print(
        f"{sum(p.numel() for p in parameters) / 1e6:.2f} M parameters, {len(tokens) / 1e6:.1f} M training and "
        f"{len(held_out) / 1e6:.2f} M held-out tokens, {device}, torch {torch.__version__}, ready at {time.monotonic() - START:.0f} s",
        flush=True,
    )
    optimizer = torch.optim.AdamW(decay(parameters, 0.1), lr=arguments.peak, betas=(0.9, 0.95), fused=device == "cuda")
    runner: torch.nn.Module = model if arguments.no_compile else torch.compile(model)  # type: ignore[assignment]
    batches = Batches(tokens, arguments.batch, torch.Generator().manual_seed(arguments.seed))

    # Kept back for the last evaluations, the sample and the files.
    limit = 60 * arguments.minutes - (25 if arguments.minutes > 2 else 5)
    # The first step compiles: the schedule starts after it.
    begin = mark = evaluated = 0.0
    best, step, done = math.inf, 0, False
    running: list[Tensor] = []
    with (out / "log.tsv").open("w") as log:
        log.write("step\tseconds\ttokens\ttrain\theld_out\n")
        while not done:
            elapsed = time.monotonic() - START
            progress = step / arguments.steps if arguments.steps else (elapsed - begin) / max(limit - begin, 1e-9) if step else 0.0
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, arguments.peak)
            loss = loss_of(runner, next(batches))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            running.append(loss.detach())
            step += 1
            if step % 20 and step > 1:
                continue
            # Reading the loss waits for the device, so that the clock below is honest.
            train_loss = torch.stack(running).mean().item()
            now = time.monotonic() - START
            if step == 1:
                begin = mark = evaluated = now
                print(f"first step done at {now:.0f} s", flush=True)
            done = step >= arguments.steps if arguments.steps else now >= limit
            if not (done or now - mark >= 10):
                continue
            speed = len(running) * arguments.batch * CONTEXT / max(now - mark, 1e-9)
            score = ""
            if done or now - evaluated >= 60:
                value = held_out_loss(runner, held_out, arguments.batch, arguments.eval_windows)
                score = f"{value:.4f}"
                if value < best:
                    best = value
                    write(model, arguments.data, out)
                evaluated = time.monotonic() - START
            log.write(f"{step}\t{now:.1f}\t{step * arguments.batch * CONTEXT}\t{train_loss:.4f}\t{score}\n")
            log.flush()
            rate = f"epoch {batches.epochs:5.2f}  {speed / 1e6:.3f} M tokens/s"
            print(f"step {step:6d}  {now:5.0f} s  {rate}  loss {train_loss:.4f}  {score}", flush=True)
            running = []
            mark = time.monotonic() - START

    final = LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16).to(device).eval()
    value = held_out_loss(final, held_out, min(arguments.batch, 16), arguments.eval_windows)
    print(f"written model in bfloat16: held-out loss {value:.4f}, perplexity {math.exp(value):.3f}", flush=True)
    text = sample(final, arguments.data, device)
    (out / "sample.txt").write_text(text)
    memory = f", peak device memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if device == "cuda" else ""
    print(f"done at {time.monotonic() - START:.0f} s, {step} steps, {batches.epochs:.2f} epochs{memory}", flush=True)


if __name__ == "__main__":
    main()
