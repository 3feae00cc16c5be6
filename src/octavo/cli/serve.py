"""`octavo serve`: serve a model over HTTP, compatible with clients of OpenAI's API."""

import argparse
import json
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from octavo.cli.compiled import use_compiled_programs
from octavo.cli.options import (
    MODEL,
    add_adapter,
    add_draft,
    add_kv_cache,
    add_prefill,
    draft_options,
    fail,
    kv_config,
    open_source,
    warm_up,
)

_DEFAULT_LENGTH = 2048


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, compatible with OpenAI's API",
        description="Answer /v1/completions and /v1/chat/completions, streaming or not, for many clients at a time; "
        "of an encoder, /v1/embeddings. "
        "Stops in good order at SIGINT and SIGTERM. " + MODEL,
        epilog="Example: octavo serve small --slots 8 --kv int8. Exit status 2: the model or an option is wrong, or "
        "the port is taken.",
    )
    parser.add_argument("model", metavar="MODEL", help="the model to serve")
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default 127.0.0.1: this machine)"
    )
    parser.add_argument("--port", type=int, default=8000, help="the port (default 8000); 0 takes a free one")
    parser.add_argument("--name", help="the name of the model in requests (default: the name of the file)")
    parser.add_argument("--slots", type=int, metavar="N", default=8, help="texts generated at a time (default 8)")
    parser.add_argument("--queue", type=int, metavar="N", default=64, help="texts that may wait (default 64)")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of a text (default: the model's, up to 2048)"
    )
    add_adapter(parser)
    add_kv_cache(parser, is_served=True)
    add_prefill(parser)
    add_draft(parser)
    parser.add_argument(
        "--timeout", type=float, metavar="S", default=600.0, help="seconds for a response (default 600)"
    )
    parser.add_argument(
        "--grace", type=float, metavar="S", default=10.0, help="seconds to finish responses when stopped (default 10)"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="require this key; prefer OCTAVO_API_KEY, since other users may see a command's arguments",
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="require one of the keys in a file, one in each line; # starts a comment"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, and return the exit status."""
    try:
        from octavo.serve.http import Limits, bind

        limits = Limits(queue=args.queue, grace=args.grace, timeout=args.timeout)
        if not 0 <= args.port <= 65535:
            raise ValueError(f"--port is from 0 to 65535, got {args.port}")
        keys = _api_keys(args)
        # Before the model is loaded, which may take long.
        sock = bind(args.host, args.port)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return fail("serve", error)
    with sock:
        return _serve(args, sock, limits, keys)


def _api_keys(args: argparse.Namespace) -> list[str]:
    """The keys of the options, or else of the environment."""
    given = os.environ.get("OCTAVO_API_KEY") if args.api_key is None and args.api_key_file is None else args.api_key
    keys = [] if given is None else [given]
    if args.api_key_file is not None:
        lines = Path(args.api_key_file).read_text(encoding="utf-8", errors="replace").splitlines()
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file: {args.api_key_file} has no key")
        keys += found
    if not all(key and key.isascii() and key.isprintable() for key in keys):
        raise ValueError("a key of --api-key, --api-key-file or OCTAVO_API_KEY is printable ASCII, and not empty")
    return keys


def _serve(args: argparse.Namespace, sock: socket.socket, limits: Any, keys: list[str]) -> int:
    from octavo.serve.http import serve, url_of

    try:
        engine, name = _engine(args)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return fail("serve", error)
    except KeyboardInterrupt:  # while the model was loaded: there is nothing to finish
        return 130

    def ready() -> None:
        url = url_of(sock)
        path, fields = "completions", {"prompt": "Once upon a time", "max_tokens": 32}
        if hasattr(engine, "embed"):
            path, fields = "embeddings", {"input": "Once upon a time"}
        ask = ["curl", f"{url}/v1/{path}", "-H", "Content-Type: application/json"]
        # The key itself is not printed.
        auth = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if keys else ""
        body = shlex.quote(json.dumps({"model": name, **fields}))
        print(f"octavo serve: {name} at {url}; try: {shlex.join(ask)}{auth} -d {body}", flush=True)

    if not keys and not _is_loopback(sock):
        print("octavo serve: others can reach this address, and no --api-key is set", file=sys.stderr)
    serve(engine, sock, name=name, limits=limits, api_key=keys, ready=ready)
    return 0


def _engine(args: argparse.Namespace) -> tuple[Any, str]:
    from octavo.pretrained.encoder import is_encoder, open_encoder
    from octavo.serve import Engine

    directory = use_compiled_programs()
    name = args.name or Path(args.model).resolve().name
    if is_encoder(args.model):
        if args.adapter or args.kv or args.kv_latent or args.draft:
            raise ValueError(
                f"{args.model} is an encoder: --adapter, --kv and --draft are for models that generate text"
            )
        return open_encoder(args.model, max_length=args.max_length), name
    kv, source = kv_config(args) or "auto", open_source(args)
    if source.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer: it cannot read a prompt")
    # The cache of every slot has room for it, and the context of some models is very long.
    longest = min(_DEFAULT_LENGTH, int(source.origin.get("max_length") or _DEFAULT_LENGTH))
    length = longest if args.max_length is None else args.max_length
    sizes = {"slots": args.slots, "max_length": length, "cache_dir": directory}
    engine = Engine(source, **sizes, kv=kv, prefill=args.prefill, **draft_options(args))
    warm_up("serve", engine)  # so that the first request does not wait
    return engine, name


def _is_loopback(sock: socket.socket) -> bool:
    host = sock.getsockname()[0]
    return host == "::1" or host.startswith("127.")
