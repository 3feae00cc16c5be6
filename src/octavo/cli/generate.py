"""`octavo generate`: continue prompts, and print tokens as they are generated.

The answer to one prompt is printed token by token. Several are generated in a batch and printed in order, each as soon
as all before it are done.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
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
    read_texts,
    warm_up,
)

_MOST_SLOTS = 8


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts with a model, token by token",
        description="Print what a model makes of prompts, as it makes it; at the end, on stderr, how fast and in how "
        "much memory. " + MODEL,
        epilog="Example: octavo generate small --prompt 'Once upon a time' --max-tokens 64 --kv int8. Exit status 1: a "
        "text ended in an error; 2: the model, a prompt or an option is wrong.",
    )
    parser.add_argument("model", metavar="MODEL", help="the model to run")
    parser.add_argument("--prompt", metavar="TEXT", action="append", help="the text to continue; several are batched")
    parser.add_argument("--prompt-file", metavar="FILE", help="a prompt on each line; - reads standard input")
    parser.add_argument(
        "--chat", action="store_true", help="prompts are user messages, formatted by the model's chat template"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", default=128, help="the most tokens of an answer (default 128)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", default=0.8, help="default 0.8; 0: greedy")
    parser.add_argument("--top-k", type=int, metavar="K", default=0, help="only the K most probable tokens (0: all)")
    parser.add_argument(
        "--top-p", type=float, metavar="P", default=1.0, help="only the most probable tokens that sum to P"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        default=0.0,
        help="only tokens with this fraction of the highest probability",
    )
    parser.add_argument("--repetition-penalty", type=float, metavar="R", default=1.0, help="above 1: fewer repeats")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end the answer before this text")
    add_adapter(parser)
    add_kv_cache(parser, is_served=True)
    add_prefill(parser)
    add_draft(parser)
    parser.add_argument("--slots", type=int, metavar="N", help="prompts at a time (default: all, up to 8)")
    parser.add_argument("--max-length", type=int, metavar="N", help="tokens of a prompt and its answer (default: fits)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each prompt, in order")
    return parser


def run(args: argparse.Namespace) -> int:
    """Generate, and return the exit status."""
    try:
        prompts = read_texts(args.prompt, args.prompt_file, "--prompt")
        params = _params(args)
        engine, source, ids = _engine(args, prompts)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return fail("generate", error)
    seeded = [params if params.seed is None else params.replace(seed=params.seed + i) for i in range(len(ids))]
    warm_up("generate", engine)  # before the clock starts
    shown = [f"{prompt}\n" for prompt in prompts] if args.chat else prompts
    printer = _Json(prompts, ids) if args.json else _Text(shown, sys.stdout)
    clock = _Clock()
    try:
        for event in engine.generate(ids, seeded):
            clock.tick(event)
            printer.add(event)
    except KeyboardInterrupt:
        printer.close()
        return 130
    printer.close()
    print(f"octavo generate: {clock.summary(ids)}\n{_draft(args, engine)}{_memory(source, engine)}", file=sys.stderr)
    return 1 if clock.failed else 0


def _params(args: argparse.Namespace) -> Any:
    from octavo.serve import SamplingParams

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "stop", "seed")
    return SamplingParams(**{name: getattr(args, name) for name in names})


def _engine(args: argparse.Namespace, prompts: Sequence[str]) -> tuple[Any, Any, list[list[int]]]:
    from octavo.serve import Engine

    directory = use_compiled_programs()
    kv, source = kv_config(args) or "auto", open_source(args)
    tokenizer = source.tokenizer
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer: it cannot read a prompt")
    if args.chat:
        ids = [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    else:
        ids = [list(tokenizer.encode(prompt)) for prompt in prompts]
    ids = [tokens or _bos(tokenizer, prompt) for tokens, prompt in zip(ids, prompts, strict=True)]
    slots = min(len(ids), _MOST_SLOTS) if args.slots is None else args.slots
    needed = max(map(len, ids)) + args.max_tokens
    length = _round_up(needed, source) if args.max_length is None else args.max_length
    options = {"slots": slots, "max_length": length, "kv": kv, "prefill": args.prefill, "cache_dir": directory}
    engine = Engine(source, **options, **draft_options(args))
    for tokens in ids:
        engine.check(tokens)
    return engine, source, ids


def _round_up(length: int, source: Any) -> int:
    """A length that other prompts share, and so the programs that are compiled for it; memory is used as it is filled.

    It is a power of two of at least 512, up to the context of the model where that is enough.
    """
    rounded = max(512, 1 << (length - 1).bit_length())
    return max(length, min(rounded, int(getattr(source, "origin", {}).get("max_length") or rounded)))


def _bos(tokenizer: Any, prompt: str) -> list[int]:
    """The BOS token, for an empty prompt."""
    bos = getattr(tokenizer, "bos_id", None)
    if bos is None:
        raise ValueError(f"the prompt {prompt!r} has no tokens, and the tokenizer has no BOS token")
    return [bos]


class _Text:
    """Prints prompts and answers in order; the first unfinished one as it is generated."""

    def __init__(self, prompts: Sequence[str], out: Any):
        self._prompts, self._out = prompts, out
        self._held: list[list[str]] = [[] for _ in prompts]
        self._done = [False] * len(prompts)
        self._now = 0
        self._write(prompts[0])

    def add(self, event: Any) -> None:
        number = event.request_id
        self._held[number].append(event.text)
        self._done[number] = event.finish is not None
        while self._now < len(self._prompts):
            self._write("".join(self._held[self._now]))
            self._held[self._now] = []
            if not self._done[self._now]:
                return
            self._write("\n")
            self._now += 1
            if self._now < len(self._prompts):
                self._write("\n" + self._prompts[self._now])

    def close(self) -> None:
        if self._now < len(self._prompts):
            self._write("\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class _Json:
    """Prints a line for each finished prompt, in order."""

    def __init__(self, prompts: Sequence[str], ids: Sequence[Sequence[int]]):
        self._prompts, self._ids = prompts, ids
        self._events: list[list[Any]] = [[] for _ in prompts]
        self._now = 0

    def add(self, event: Any) -> None:
        self._events[event.request_id].append(event)
        while self._now < len(self._events) and (events := self._events[self._now]) and events[-1].finish is not None:
            line = {
                "index": self._now,
                "prompt": self._prompts[self._now],
                "text": "".join(e.text for e in events),
                "finish": events[-1].finish,
                "prompt_tokens": len(self._ids[self._now]),
                "tokens": [e.token for e in events],
            }
            print(json.dumps(line), flush=True)
            self._now += 1

    def close(self) -> None:
        pass


class _Clock:
    """Measures the speed of generation."""

    def __init__(self):
        self._start = time.perf_counter()
        self._first = self._last = self._start
        self._tokens = 0
        self.failed = False

    def tick(self, event: Any) -> None:
        self._last = time.perf_counter()
        if not self._tokens:
            self._first = self._last
        self._tokens += event.token >= 0
        self.failed = self.failed or event.finish == "error"

    def summary(self, ids: Sequence[Sequence[int]]) -> str:
        count, seconds = self._tokens, self._last - self._start
        prompt = sum(map(len, ids))
        after = self._last - self._first
        speed = f", {(count - 1) / after:.1f} tokens/s after the first" if count > 1 and after > 0 else ""
        return f"{count} tokens from {prompt} of prompt in {seconds:.2f} s{speed}"


def _draft(args: argparse.Namespace, engine: Any) -> str:
    if args.draft is None:
        return ""
    share = f" ({engine.accepted / engine.proposed:.0%})" if engine.proposed else ""
    return f"  draft {args.draft}: {engine.accepted} of {engine.proposed} proposed tokens accepted{share}\n"


def _memory(source: Any, engine: Any) -> str:
    mib, kv, programs = 2**20, engine.kv, engine.programs
    from octavo.pretrained.memory import peak_memory

    prompts = "; activations of prompts in int8" if programs.prefill_qtype == "int8" else ""
    kept = kv.dtype if kv.keys is None and kv.values is None else f"{kv.keys or kv.dtype}/{kv.values or kv.dtype}"
    return (
        f"  {source.describe()}{prompts}\n"
        f"  parameters {programs.params_nbytes / mib:.1f} MiB; cache {programs.cache_nbytes / mib:.1f} MiB in {kept}, "
        f"{programs.cache_bytes_per_token:.0f} bytes per token; peak memory {peak_memory() / mib:.0f} MiB"
    )
