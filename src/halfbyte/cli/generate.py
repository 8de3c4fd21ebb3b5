"""`halfbyte generate`: text from a language model, with its speed."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.cli.shared.device import OFFLOAD, add_device, add_offload, asked_dtype, offloads, placed, settle_device, waking
from halfbyte.cli.shared.output import Commands, add_command, path_argument, print_json, settling
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError, not_there
from halfbyte.io.files import is_file, is_there
from halfbyte.memory import peak_memory, size_text

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedTokenizerBase

    from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache
    from halfbyte.integrations.transformers.modules import Part
    from halfbyte.integrations.transformers.text import Generated
    from halfbyte.language.generate import Generation
    from halfbyte.language.model import LanguageModel
    from halfbyte.language.sampling.sampler import Sampling

_LEAST, _MOST = 1e-5, 1e5  # of what logits are divided by: less makes them infinite in float32, more makes them equal


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "generate",
        run,
        "generate text with a language model",
        "Print the generated text as it comes, then to stderr the speed, the size of the weights and the peak memory.",
    )
    add_model(parser)
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="text to continue; - reads it from stdin")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments of the model and of sampling."""
    parser.add_argument("model", metavar="MODEL", type=path_argument, help="Hugging Face folder, halfbyte folder or .gguf file")
    parser.add_argument("--format", help="quantize a float model as it loads: q4_0, q8_0, int4_g128, ...")
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=int,
        help="maximum number of tokens to generate (default: 128, or what fits the model)",
    )
    add_device(parser)
    add_offload(parser)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy, above 0: sampling (default: %(default)s)")
    parser.add_argument("--top-k", metavar="K", type=int, help="sample from the K most likely tokens (default: the model's own, or 50)")
    parser.add_argument("--top-p", metavar="P", type=float, help="sample from the most likely tokens with the total probability P")
    parser.add_argument("--repetition-penalty", metavar="X", type=float, help="above 1: tokens that have occurred become less likely")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--cache", choices=("int8",), help="keys and values in 8 bits (default: as activations)")
    parser.add_argument("--draft", metavar="MODEL", type=path_argument, help="smaller model of the same vocabulary that guesses tokens")
    parser.add_argument(
        "--speculate",
        metavar="N",
        type=int,
        help="guess up to N tokens at a time, by --draft or from the text so far (default: 8 with --draft)",
    )
    parser.add_argument("--sparse", action=argparse.BooleanOptionalAction, help="leave zeros of 2:4 sparse weights out (default: on a CPU)")
    parser.add_argument("--compile", action="store_true", help="compile the decoding step by torch.compile first: slow to start")


def rank_and_count() -> tuple[int, int]:
    """(rank, number of processes) under torchrun; (0, 1) otherwise."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _check(args: argparse.Namespace) -> None:
    """Raise ArgumentError for arguments that are out of range."""
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise ArgumentError(f"--max-new-tokens is 1 or more, got {args.max_new_tokens}")
    if args.cache and args.compile:
        raise ArgumentError("--compile decodes with a static cache of floats, and --cache int8 is another one: leave out one of them")
    if not -(1 << 63) <= args.seed < 1 << 64:
        raise ArgumentError(f"--seed has 64 bits, got {args.seed}: use a smaller number")
    _choice_of_tokens(args)


def _check_native(args: argparse.Namespace) -> None:
    """Raise UnsupportedError for arguments that need a model without transformers."""
    if args.speculate or args.draft is not None:
        raise UnsupportedError(f"{args.model} runs with transformers, without speculative decoding: leave out --speculate and --draft")
    if offloads(args):
        how = "in several processes" if rank_and_count()[1] > 1 else "with transformers"
        raise UnsupportedError(f"{args.model} runs {how}, where a GPU and the CPU do not share a model: leave out {OFFLOAD}")


@settling()
def open_native(args: argparse.Namespace) -> tuple[LanguageModel, Sampling] | None:
    """The model and how tokens are chosen, without transformers; None where transformers has to run it, which is told on stderr."""
    _check(args)
    if args.compile or rank_and_count()[1] > 1:
        _check_native(args)
        return None
    with waking(args.device):
        from halfbyte.language.model import LanguageModel
        from halfbyte.language.sampling.defaults import TOP_K, sampling_defaults
        from halfbyte.language.sampling.sampler import Sampling

        if args.format is not None:  # the modules that quantize take long to import
            from halfbyte.nn.config import Config

    try:
        if args.device == "cpu" and args.dtype not in (None, "float32"):
            raise UnsupportedError(f"it computes in float32 on a CPU, not in {args.dtype}")
        settings = {"repetition_penalty": 1.0, "top_k": TOP_K, **sampling_defaults(args.model)}
        settings |= {name: getattr(args, name) for name in ("top_k", "top_p", "repetition_penalty") if getattr(args, name) is not None}
        if not args.temperature:
            settings = {"repetition_penalty": settings["repetition_penalty"]}
        sampling = Sampling(temperature=args.temperature, seed=args.seed, max_new_tokens=args.max_new_tokens, **settings)
        config = None if args.format is None else Config(args.format)
        how = {"cache": args.cache, "sparse": args.sparse, "dtype": asked_dtype(args), **placed(args)}
        model = LanguageModel.open(args.model, format=config, speculate=args.speculate, draft=args.draft, **how)
        for note in () if args.quiet else (*model.notes, *([] if model.plan is None else [model.plan])):
            print(note, file=sys.stderr)
        return model, sampling
    except UnsupportedError as e:
        if offloads(args):
            raise
        _check_native(args)
        if not args.quiet:
            print(f"transformers runs this model, as halfbyte's own decoder does not: {e}", file=sys.stderr)
        return None


@settling()
def open_asked(args: argparse.Namespace, mesh: DeviceMesh | None = None) -> tuple[Part, PreTrainedTokenizerBase, dict[str, Any]]:
    """(model, tokenizer, settings of `generate`) for the arguments; `mesh` of the processes that share the model."""
    _check(args)
    drawn = _choice_of_tokens(args)
    import torch

    with waking(args.device):
        from halfbyte.integrations.transformers.text import open_model
        from halfbyte.nn.config import Config

    config = None if args.format is None else Config(args.format)
    model, tokenizer = open_model(args.model, args.device, config, asked_dtype(args), mesh, sparse=args.sparse)
    if args.compile and not args.quiet:
        print("compiling the decoding step, which takes a minute or more", file=sys.stderr)
    torch.manual_seed(args.seed)
    return model, tokenizer, {"max_new_tokens": args.max_new_tokens, "compiled": args.compile, **drawn}


def new_cache(args: argparse.Namespace, model: Part) -> Int8Cache | None:
    """The cache asked for; None for the model's default."""
    if args.cache is None:
        return None
    from halfbyte.integrations.transformers.cache.int8_cache import Int8Cache

    return Int8Cache(model.config)


def _choice_of_tokens(args: argparse.Namespace) -> dict[str, object]:
    """The sampling settings for transformers' `generate`. Raises ArgumentError."""
    if args.temperature and not _LEAST <= args.temperature <= _MOST:  # NaN, too
        raise ArgumentError(f"--temperature is 0 for greedy decoding, or {_LEAST:g} to {_MOST:g}, got {args.temperature}")
    if args.top_k is not None and args.top_k < 1:
        raise ArgumentError(f"--top-k is 1 or more, got {args.top_k}")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise ArgumentError(f"--top-p is above 0 and at most 1, got {args.top_p}: leave it out to draw from all tokens")
    if args.repetition_penalty is not None and not _LEAST <= args.repetition_penalty <= _MOST:
        raise ArgumentError(f"--repetition-penalty is {_LEAST:g} to {_MOST:g}, got {args.repetition_penalty}")
    if not args.temperature and (args.top_k or args.top_p):
        raise ArgumentError("--top-k and --top-p have no effect without sampling: add --temperature, such as 0.7")
    asked = {name: getattr(args, name) for name in ("top_k", "top_p", "repetition_penalty") if getattr(args, name) is not None}
    return asked | ({"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False})


def writes_text(path: Path) -> bool:
    """Whether a path holds a language model. Raises CheckpointError where it holds no model at all."""
    from halfbyte.io.gguf import is_gguf
    from halfbyte.io.safetensors import load_json

    if not is_there(path):
        raise not_there(path, "a Hugging Face folder, a halfbyte folder or a .gguf file")
    if is_file(path) and is_gguf(path):
        return True
    if not is_file(path / "config.json"):
        raise CheckpointError(f"{path} is not a Hugging Face model folder: it has no config.json")
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in load_json(path / "config.json").get("architectures") or ())


def run(args: argparse.Namespace) -> int:
    """All processes started by torchrun generate the same text; the first prints it."""
    rank, count = rank_and_count()
    args.quiet = args.quiet or rank > 0
    _read_prompt(args, count)
    settle_device(args)
    opened = open_native(args)
    if opened is not None:
        return _run_native(args, *opened)
    with settling():
        from halfbyte.integrations.transformers.tensor_parallel import processes

    with processes(args.device) as (mesh, args.device):
        return _run(args, open_asked(args, mesh), rank, count)


def _run(args: argparse.Namespace, opened: tuple[Part, PreTrainedTokenizerBase, dict[str, Any]], rank: int, count: int) -> int:
    from halfbyte.integrations.transformers.text import check_prompt, generate, room

    model, tokenizer, settings = opened
    prompt = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False)
    check_prompt(model, prompt)  # before anything is shown
    settings["max_new_tokens"] = room(model, prompt["input_ids"].shape[1], args.max_new_tokens)
    shown = rank == 0 and not args.json
    if shown:
        show(args.prompt)
    done = generate(model, tokenizer, prompt, show if shown else (lambda text: None), cache=new_cache(args, model), **settings)
    facts = {**measured(done), **sizes(model, args.device), "processes": count}
    if rank == 0:
        _finish(args, done.text, facts)
    return 0


def _run_native(args: argparse.Namespace, model: LanguageModel, sampling: Sampling) -> int:
    """`run` of a model that is computed without transformers."""
    generation = model.submit(args.prompt, sampling)  # what it refuses is refused before anything is shown
    if not args.json:
        show(args.prompt)
    for piece in model.stream_of(generation):
        if not args.json:
            show(piece)
    sizes = {"weight_bytes": model.spec.nbytes, "peak_memory_bytes": _peak(args.device)}
    facts: dict[str, object] = {**native_measured(generation), **sizes, "processes": 1}
    facts |= {} if model.plan is None else {"plan": model.plan.to_json()}
    _finish(args, generation.text, facts)
    return 0


def _finish(args: argparse.Namespace, text: str, facts: Mapping[str, Any]) -> None:
    """Print what was measured, and as JSON the text with it, which otherwise has been shown."""
    if args.json:
        print_json({"model": str(args.model), "prompt": args.prompt, "text": text, **facts})
        return
    print()
    if not args.quiet:
        print(f"\n{in_words(facts)}", file=sys.stderr)


def _read_prompt(args: argparse.Namespace, processes: int) -> None:
    """Read a prompt of stdin into `args`, and check it."""
    if args.prompt == "-":
        if processes > 1:
            raise UnsupportedError("only the first process can read a prompt from stdin: pass the text with --prompt")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")
        args.prompt = sys.stdin.read().removesuffix("\n")
    if any("\ud800" <= character <= "\udfff" for character in args.prompt):  # how Python represents bytes that it cannot decode
        encoding = sys.getfilesystemencoding()
        remedy = "convert it" if encoding == "utf-8" else "set PYTHONUTF8=1 for text in UTF-8"
        raise ArgumentError(f"a prompt is text in this system's encoding, {encoding}, got {args.prompt!a}: {remedy}")


def show(text: str) -> None:
    print(text, end="", flush=True)


def measured(done: Generated) -> dict[str, float]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "prompt_tokens_per_second": done.prompt_rate,
        "new_tokens": done.new_tokens,
        "decode_tokens_per_second": done.decode_rate,
    }


def native_measured(generation: Generation) -> dict[str, float]:
    """`measured` of a text that was generated without transformers."""
    return {
        "prompt_tokens": len(generation.prompt_ids) - generation.cached_tokens,
        "prompt_tokens_per_second": generation.prompt_rate,
        "new_tokens": len(generation.ids),
        "decode_tokens_per_second": generation.decode_rate,
    }


def sizes(model: nn.Module, device: str) -> dict[str, int | None]:
    from halfbyte.integrations.transformers.text import weight_bytes

    return {"weight_bytes": weight_bytes(model), "peak_memory_bytes": _peak(device)}


def _peak(device: str) -> int | None:
    """Peak memory of the process, or of the GPU."""
    if device == "cpu":
        return peak_memory()
    import torch

    return int(torch.cuda.max_memory_allocated(device))


def in_words(facts: Mapping[str, Any]) -> str:
    """One human-readable line."""
    parts = [
        f"prompt {facts['prompt_tokens']} tokens, {facts['prompt_tokens_per_second']:.1f}/s",
        f"{facts['new_tokens']} new, {facts['decode_tokens_per_second']:.1f}/s",
    ]
    if "weight_bytes" in facts:
        each = f" in each of {facts['processes']} processes" if facts.get("processes", 1) > 1 else ""
        parts.append(f"weights {size_text(facts['weight_bytes'])}{each}")
        parts += [f"peak memory {size_text(peak)}"] if (peak := facts["peak_memory_bytes"]) is not None else []
    return "; ".join(parts)
