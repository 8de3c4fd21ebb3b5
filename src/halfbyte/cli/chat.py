"""`halfbyte chat`: a conversation with a language model on the terminal.

`run` opens the model as `halfbyte generate` does: natively where halfbyte computes it (`_chat_native`), else by transformers
(`_chat_in_transformers`). In both, tokens that a prompt has in common with the conversation so far stay in the KV cache.
"""

from __future__ import annotations

import argparse
import io
import sys
from typing import TYPE_CHECKING, Any

from halfbyte.cli.generate import add_model, in_words, measured, native_measured, new_cache, open_asked, open_native, rank_and_count, show
from halfbyte.cli.shared.device import settle_device
from halfbyte.cli.shared.output import Commands, add_command
from halfbyte.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from halfbyte.language.model import LanguageModel
    from halfbyte.language.sampling.sampler import Sampling


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(
        commands,
        "chat",
        run,
        "chat with a language model",
        "Read lines from stdin and print the model's answers, using the tokenizer's chat template. An empty line or the end of input ends "
        "the chat.",
    )
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message at the beginning of the chat")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.json:
        raise UnsupportedError("chat has no --json output: use generate --json")
    if rank_and_count()[1] > 1:
        raise UnsupportedError("chat runs in one process, and torchrun started several: use generate")
    settle_device(args)
    native = open_native(args)
    if native is None:
        _chat_in_transformers(args)
    else:
        _chat_native(args, *native)
    return 0


def _chat_in_transformers(args: argparse.Namespace) -> None:
    model, tokenizer, settings = open_asked(args)
    if not tokenizer.chat_template:
        raise UnsupportedError(f"the tokenizer of {args.model} has no chat template: use halfbyte generate")
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        names = ", ".join(tokenizer.chat_template)
        raise UnsupportedError(f"the chat templates of {args.model} are {names}, chat uses the one called default: use halfbyte generate")

    from halfbyte.integrations.transformers.generate import generating
    from halfbyte.integrations.transformers.text import generate, room

    messages = _first_messages(args)
    cache, cached_ids = None, None  # the KV cache, and the tokens that it has
    while line := _next_line():
        messages.append({"role": "user", "content": line})
        prompt = _tokenized(tokenizer, messages, args)
        ids = prompt["input_ids"][0]
        settings["max_new_tokens"] = room(model, len(ids), args.max_new_tokens)
        if cached_ids is None or len(cached_ids) >= len(ids) or not bool((ids[: len(cached_ids)] == cached_ids).all()):
            # A new cache at first, and where the template has changed the earlier text, which is then processed again.
            cache = new_cache(args, model) or generating.new_cache(model)
        if args.compile:  # a longer cache would be compiled again
            settings["max_cache_len"] = max(1024, 1 << (len(ids) + settings["max_new_tokens"] - 1).bit_length())
        answer = generate(model, tokenizer, prompt, show, cache=None if args.compile else cache, **settings)
        cached_ids = answer.tokens[:-1]  # the last token is not in the cache yet
        messages.append({"role": "assistant", "content": answer.text})
        print()
        if not args.quiet:
            print(in_words(measured(answer)), file=sys.stderr)


def _chat_native(args: argparse.Namespace, model: LanguageModel, sampling: Sampling) -> None:
    if "default" not in model.tokenizer.chat_templates:
        names = ", ".join(model.tokenizer.chat_templates)
        if names:
            reason = f"the chat templates of {args.model} are {names}, chat uses the one called default"
        else:
            reason = f"the tokenizer of {args.model} has no chat template"
        raise UnsupportedError(f"{reason}: use halfbyte generate")
    messages = _first_messages(args)
    while line := _next_line():
        messages.append({"role": "user", "content": line})
        try:
            generation = model.submit(messages, sampling)
        except CheckpointError as e:
            raise _refused(args, str(e)) from e
        for piece in model.stream_of(generation):
            show(piece)
        messages.append({"role": "assistant", "content": generation.text})
        print()
        if not args.quiet:
            print(in_words(native_measured(generation)), file=sys.stderr)


def _first_messages(args: argparse.Namespace) -> list[dict[str, str]]:
    """Return the messages before the user's first: that of --system, if any."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid bytes do not end the chat
    return [{"role": "system", "content": args.system}] if args.system else []


def _tokenized(tokenizer: Any, messages: list[dict[str, str]], args: argparse.Namespace) -> Any:
    """Return the token ids of the conversation, written by the chat template.

    Raises:
        CheckpointError: The template refuses the conversation, or is no valid template.
    """
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    except Exception as e:  # a template can raise anything
        raise _refused(args, f"{type(e).__name__}: {' '.join(str(e).split())[:300]}") from e


def _refused(args: argparse.Namespace, reason: str) -> CheckpointError:
    """Return the error for a chat template that does not take the conversation."""
    remedy = "leave --system out, or use halfbyte generate" if args.system else "repair it, or use halfbyte generate"
    return CheckpointError(f"the chat template of {args.model} does not take this conversation ({reason}): {remedy}")


def _next_line() -> str:
    """Read the user's next line; "" at the end of input."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()
