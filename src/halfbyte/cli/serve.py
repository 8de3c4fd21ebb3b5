"""`halfbyte serve`: OpenAI's API on this machine."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte import env
from halfbyte.cli.generate import writes_text
from halfbyte.cli.shared.device import add_device, add_offload, asked_dtype, placed, refuse_offload, settle_device, waking
from halfbyte.cli.shared.output import Commands, add_command, path_argument, print_json, settling
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.memory import share_one_heap

if TYPE_CHECKING:
    from halfbyte.nn.config import Config
    from halfbyte.serve.server import Language, Sentences
    from halfbyte.serve.settings import Settings

_PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "serve",
        run,
        "serve a model with OpenAI's API, and a chat page",
        "Serve a language model, a sentence encoder or one of each at http://127.0.0.1:8000: /v1/chat/completions, /v1/completions, "
        "/v1/embeddings, /v1/rerank, /v1/models, /health, /metrics, and a chat page at /. SIGTERM and Ctrl+C end it in order.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="+",
        type=path_argument,
        help="Hugging Face folder, halfbyte folder or .gguf file; with an encoder, two",
    )
    parser.add_argument("--name", help="name of the language model in requests (default: that of its file or folder)")
    parser.add_argument("--format", help="quantize float models as they load: q4_0, q8_0, int4_g128, ...")
    address = parser.add_argument_group("address and access")
    address.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all (default: %(default)s)")
    address.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    address.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="key that requests must have; may be repeated (default: HALFBYTE_API_KEY)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--parallel", metavar="N", type=int, default=16, help="sequences decoded at the same time (default: %(default)s)")
    limits.add_argument("--queue", metavar="N", type=int, default=128, help="sequences that wait; more are refused (default: %(default)s)")
    limits.add_argument("--max-prompt-tokens", metavar="N", type=int, help="of a prompt (default: what the model has positions for)")
    limits.add_argument("--max-new-tokens", metavar="N", type=int, help="of an answer (default: what fits the model)")
    limits.add_argument("--max-body", metavar="MB", type=float, default=4, help="size of a request (default: %(default)s)")
    limits.add_argument("--timeout", metavar="SECONDS", type=float, default=600, help="of a request (default: %(default)s)")
    limits.add_argument(
        "--grace", metavar="SECONDS", type=float, default=10, help="of running requests after SIGTERM (default: %(default)s)"
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--temperature", type=float, default=1.0, help="of requests that give none (default: %(default)s, as in OpenAI's API)"
    )
    model.add_argument("--cache", choices=("int8",), help="keys and values in 8 bits (default: as activations)")
    model.add_argument(
        "--prefix-cache", metavar="MB", type=float, default=512, help="KV caches kept for shared prefixes (default: %(default)s)"
    )
    model.add_argument("--draft", metavar="MODEL", type=path_argument, help="smaller model of the same vocabulary that guesses tokens")
    model.add_argument(
        "--speculate",
        metavar="N",
        type=int,
        help="guess up to N tokens at a time while one sequence runs, by --draft or from the text so far (default: 8 with --draft)",
    )
    model.add_argument("--sparse", action=argparse.BooleanOptionalAction, help="leave zeros of 2:4 sparse weights out (default: on a CPU)")
    add_device(parser)
    add_offload(parser)


def run(args: argparse.Namespace) -> int:
    share_one_heap()  # memory that requests have freed goes back to the system whole, and there is less of it
    settings = _settings(args)
    texts, encoders = _kinds(args.model)
    if not texts:
        refuse_offload(args, str(encoders[0]))
    from halfbyte.serve import server

    sock = server.listen(args.host, args.port)
    try:
        settle_device(args)
        language = _open_language(args, texts[0], settings.prefix_bytes) if texts else None
        sentences = _open_encoder(args, encoders[0]) if encoders else None
        serving = server.Serving(settings, language, sentences)
        if not settings.keys and not _is_loopback(sock.getsockname()[0]):
            print(
                f"halfbyte: warning: everyone who reaches {server.address_of(sock)} can use this server: give it an --api-key",
                file=sys.stderr,
            )

        def ready() -> None:
            names = [each.name for each in (language, sentences) if each is not None]
            if args.json:
                print_json({"url": server.address_of(sock), "models": names})
                sys.stdout.flush()
            elif not args.quiet:
                print(f"{', '.join(names)} at {server.address_of(sock)}", file=sys.stderr, flush=True)

        logging.basicConfig(format="halfbyte: %(levelname)s: %(message)s", stream=sys.stderr)
        server.run(serving, sock, settings, ready)
    finally:
        sock.close()
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    """The limits of the arguments. Raises UnsupportedError where a package is missing."""
    try:
        import llguidance  # noqa: F401

        from halfbyte.serve.server import Serving  # noqa: F401
        from halfbyte.serve.settings import Settings
    except ImportError as e:
        if (e.name or "").partition(".")[0] not in _PACKAGES:
            raise
        raise UnsupportedError(f"serve needs the package {e.name}: pip install 'halfbyte[serve]'") from e
    key = env.api_key()
    asked = {
        "keys": tuple(args.api_key) or (() if key is None else (key,)),
        "host": args.host,
        "parallel": args.parallel,
        "queue": args.queue,
        "prefix_bytes": int(args.prefix_cache * 1e6),
        "body_bytes": int(args.max_body * 1e6),
        "prompt_tokens": args.max_prompt_tokens,
        "new_tokens": args.max_new_tokens,
        "seconds": args.timeout,
        "grace": args.grace,
        "temperature": args.temperature,
    }
    assert asked.keys() <= {field.name for field in fields(Settings)}
    return Settings(**asked)


def _kinds(paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """(language models, encoders). Raises ArgumentError for more than one of a kind."""
    texts = [path for path in paths if writes_text(path)]
    encoders = [path for path in paths if path not in texts]
    if len(texts) > 1 or len(encoders) > 1:
        raise ArgumentError(f"a server has one language model and one encoder at most, got {len(texts)} and {len(encoders)}: start several")
    return texts, encoders


@settling()
def _open_language(args: argparse.Namespace, path: Path, prefix_bytes: int) -> Language:
    from halfbyte.language.model import LanguageModel
    from halfbyte.language.sampling.defaults import sampling_defaults
    from halfbyte.serve.server import Language

    config: Config | None = None
    if args.format is not None:
        from halfbyte.nn.config import Config

        config = Config(args.format)
    how = {"cache": args.cache, "sparse": args.sparse, "dtype": asked_dtype(args), **placed(args, args.parallel, prefix_bytes=prefix_bytes)}
    try:
        with waking(args.device):
            model = LanguageModel.open(path, format=config, speculate=args.speculate, draft=args.draft, **how)
    except UnsupportedError as e:
        remedy = "quantize it, as --format q8_0 does" if config is None else "transformers can run it, as halfbyte generate does"
        raise UnsupportedError(f"{path} cannot be served ({e}): {remedy}") from e
    for note in () if args.quiet else (*model.notes, *([] if model.plan is None else [model.plan])):
        print(note, file=sys.stderr)
    return Language(args.name or _name(path), model, sampling_defaults(path))


@settling()
def _open_encoder(args: argparse.Namespace, path: Path) -> Sentences:
    from halfbyte.serve.encoder import Encoder
    from halfbyte.serve.server import Sentences

    return Sentences(_name(path), Encoder.open(path, format=args.format, device=args.device))


def _name(path: Path) -> str:
    return path.resolve().name.removesuffix(".gguf") or str(path)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
