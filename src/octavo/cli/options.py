"""Options that several commands share."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = """MODEL is an output of `octavo quantize`, a run of `octavo train` or one of its checkpoints, a Hugging Face
directory (config.json and safetensors), or a GGUF file."""

TARGET = """TARGET is module:function, or module:attribute for a Flax Linen, Flax NNX or Equinox model, or for a class
or function that makes one without arguments. Modules are looked for in the current directory too."""

_INPUTS = """shapes, one for each argument, such as 'f32[8,128]' 'i32[8,16]'; or module:callable, which returns the
tuple of arguments as arrays or jax.ShapeDtypeStructs (nested parameters need this form); by default example_inputs in
the target's module, such a callable or the tuple itself"""


def fail(command: str, error: Exception, *, status: int = 2) -> int:
    """Print an error of a command, and return the exit status."""
    print(f"octavo {command}: {error}", file=sys.stderr)
    return status


def progress_line() -> Callable[[str], None] | None:
    """A function that shows progress in a line of its own, which it overwrites; None if stderr is no terminal."""
    if not sys.stderr.isatty():
        return None
    return lambda text: print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the target of `octavo plan`, `octavo verify` and `octavo compile`, its rules and its inputs."""
    # `--rules list` needs no target, so its absence is an error of the command and not of the parser.
    parser.add_argument("target", metavar="TARGET", nargs="?", help="module:function or module:attribute")
    parser.add_argument(
        "--rules",
        metavar="RULES",
        help=f"a recipe's name or a .json or .yml file; `{parser.prog} --rules list` prints the recipes",
    )
    parser.add_argument("--inputs", metavar="INPUT", nargs="+", help=_INPUTS)
    parser.add_argument(
        "--weights",
        metavar="NAME",
        help="the argument of a function that holds the weights, by its name or number; by default one called params, "
        "variables, model or the like, and for gradients otherwise the first",
    )


def add_grad(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the option that includes the backward pass."""
    parser.add_argument(
        "--grad",
        action="store_true",
        help=f"{verb} the backward pass too: the gradient of the mean of the squares of all float outputs with respect "
        "to the weights",
    )


def read_texts(given: list[str] | None, path: str | None, option: str) -> list[str]:
    """The texts of a repeatable option and those on the lines of a file, or of standard input if `path` is "-"."""
    texts = list(given or ())
    if path is not None:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
        texts += [line for line in text.splitlines() if line.strip()]
    if not texts:
        raise ValueError(f"there is no {option[2:]}: give {option} TEXT, or {option}-file FILE with one on each line")
    return texts


def add_adapter(parser: argparse.ArgumentParser) -> None:
    """Add the LoRA adapter of a model."""
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter of PEFT, which is merged into the weights")


def open_source(args: argparse.Namespace) -> Any:
    """The model of a command, with its adapter merged if there is one."""
    from octavo.pretrained import open_model, read_adapter, with_adapter

    source = open_model(args.model)
    return with_adapter(source, read_adapter(args.adapter, source.config)) if args.adapter else source


def add_kv_cache(parser: argparse.ArgumentParser, *, is_served: bool = False) -> None:
    """Add the formats of the KV cache."""
    parser.add_argument(
        "--kv",
        metavar="FORMAT",
        help="keys and values in int8, int4 or fp8, or float; by default as the run was configured, or else "
        + ("in int8 where CPU kernels decode" if is_served else "float"),
    )
    parser.add_argument("--kv-values", metavar="FORMAT", help="the format of values, where it is another")
    parser.add_argument("--kv-axis", metavar="AXIS", default="dkv", help="dkv (the default), heads_and_dkv or kivi")
    parser.add_argument(
        "--kv-latent", action="store_true", help="of latent attention (DeepSeek): store the latent, not keys and values"
    )


def add_prefill(parser: argparse.ArgumentParser) -> None:
    """Add the precision of prefill."""
    parser.add_argument(
        "--prefill",
        metavar="DTYPE",
        default="auto",
        help="activations while a prompt is read: float, int8, or auto (the default): int8 where CPUs multiply codes",
    )


def kv_config(args: argparse.Namespace) -> Any:
    """The `KVConfig` of those options; None for that of the model."""
    from octavo.serve import KVConfig

    if args.kv_values and not args.kv:
        raise ValueError("--kv-values needs --kv, the format of the keys")
    if args.kv in (None, "float"):
        return None if args.kv is None and not args.kv_latent else KVConfig(latent=args.kv_latent)
    return KVConfig(keys=args.kv, values=args.kv_values or args.kv, axis=args.kv_axis, latent=args.kv_latent)


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Add the draft of speculative decoding."""
    parser.add_argument(
        "--draft",
        metavar="FORMAT|MODEL",
        help="speculative decoding: the model's own weights in a number format such as int4 or int8, or a smaller "
        "model of the same tokenizer, propose tokens, and the model generates those that are its own",
    )
    parser.add_argument(
        "--draft-tokens", type=int, metavar="K", help="how many tokens the draft proposes at a time (default 4)"
    )


def draft_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Engine` of those options."""
    from octavo.pretrained import open_model

    if args.draft is None:
        if args.draft_tokens is not None:
            raise ValueError("--draft-tokens needs --draft, a number format such as int4 or a model")
        return {}
    is_model = Path(args.draft).exists() or "/" in args.draft or args.draft.endswith(".gguf")
    tokens = {} if args.draft_tokens is None else {"draft_tokens": args.draft_tokens}
    return {"draft": open_model(args.draft) if is_model else args.draft, **tokens}


def warm_up(command: str, engine: Any) -> None:
    """Load the programs of an engine, or say that they are compiled and how long that takes."""
    from octavo.pretrained.memory import release_memory

    release_memory()
    if engine.programs.is_stored:
        engine.programs.prepare()
        release_memory()
        return
    begin = time.perf_counter()
    print(f"octavo {command}: compiling for this model and these sizes, once ...", file=sys.stderr, flush=True)
    engine.warm_up()
    release_memory()
    print(f"octavo {command}: compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
