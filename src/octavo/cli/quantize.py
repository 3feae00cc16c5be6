"""`octavo quantize`: convert a model to low precision and write it, parameter by parameter."""

import argparse
import functools
import shlex
from pathlib import Path
from typing import Any

from octavo.cli.options import MODEL, add_adapter, fail, open_source, progress_line


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser(
        "quantize",
        help="convert a model to low precision, parameter by parameter",
        description="Read a model one parameter at a time, quantize each by the recipe, and write the result with a "
        "model card. Unless the recipe calibrates on data, the model is not run, and peak memory is little more than "
        "the size of the result. " + MODEL,
        epilog="Examples: octavo quantize model.gguf int4 small; octavo quantize runs/mine trained served; "
        "octavo quantize model.gguf int4:gptq small --data book.txt --distill 300; "
        "octavo quantize hf-folder int8 out.gguf --format gguf. Exit status 2: the model, the recipe or the output "
        "path is invalid.",
    )
    parser.add_argument("model", metavar="MODEL", help="the model to convert")
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a number format for the weights (int8, int4, int4:g64, int4:g32:mse, int3, int2, nf4, fp8, mxfp4, nvfp4, "
        "...), calibrated on the text of --data by int4:gptq, int4:gptaq, int4:search, int3:autoround or int4:awq; or "
        "recipe:NAME, activations included; or a .json or .yml file of rules; or trained: the rules that the model was "
        "trained with",
    )
    parser.add_argument("out", metavar="OUT", help="the output: a directory, or a file for gguf")
    parser.add_argument(
        "--head",
        metavar="FORMAT",
        default="",
        help="the format of the embedding table and the logits; float keeps them (default: int8 where the weights have "
        "fewer bits, else that of the weights)",
    )
    parser.add_argument(
        "--format",
        metavar="FORM",
        default="octavo",
        help="octavo (default), or for other programs: safetensors, compressed-tensors, gptq, awq, gguf",
    )
    parser.add_argument(
        "--scales",
        metavar="DTYPE",
        choices=("", "float32", "bfloat16", "float16"),
        default="",
        help="the dtype of scales (default: bfloat16, for other programs float16, and with trained rules float32)",
    )
    parser.add_argument("--data", metavar="FILE", help="the text of a recipe such as int4:gptq, and of --distill")
    parser.add_argument(
        "--data-tokens", type=int, metavar="N", help="tokens of the calibration text (default: all, up to 32768)"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="keep the statistics of the calibration in DIR: if it is interrupted, the same command resumes; another "
        "method or format uses them again",
    )
    parser.add_argument(
        "--imatrix",
        type=Path,
        metavar="FILE",
        help="an importance matrix for q4_k, q5_k, q6_k and --format gguf: read, or with --data written",
    )
    parser.add_argument(
        "--bits",
        type=float,
        metavar="N",
        help="bits per weight of the layers, for the recipe mixed:gptq or several formats such as int3,int4,int8:gptq: "
        "each weight gets the format that costs least of the KL divergence",
    )
    parser.add_argument("--mebibytes", type=float, metavar="N", help="instead of --bits, the size of all parameters")
    parser.add_argument(
        "--distill",
        type=int,
        metavar="STEPS",
        default=0,
        help="then train scales, norms and biases on the text of --data for the outputs of the float model; codes stay",
    )
    parser.add_argument(
        "--rotate",
        action="store_true",
        help="first rotate hidden states and values, as QuaRot does: weights without outliers, and the same logits",
    )
    parser.add_argument(
        "--hadamard",
        metavar="WHAT",
        default="",
        help="rotations while the model runs, separated by commas: a block size such as 32 (the inputs of all matmuls, "
        "for mxfp4), mlp (of the second matmul of MLPs), keys (queries and keys, for low-bit KV caches)",
    )
    add_adapter(parser)
    parser.add_argument("--force", action="store_true", help="replace what is at OUT")
    parser.add_argument("--quiet", action="store_true", help="do not print a line for each parameter")
    return parser


def run(args: argparse.Namespace) -> int:
    """Convert as the arguments say, and return the exit status."""
    from octavo import _remote
    from octavo.pretrained import CalibrationData, Request, export_model, hadamard, rotated

    if args.bits is not None and args.mebibytes is not None:
        return fail("quantize", ValueError("--bits and --mebibytes are two budgets: leave one of them out"))
    if args.distill < 0:
        return fail("quantize --distill", ValueError(f"the number of steps, at least 1: got {args.distill}"))
    try:
        _remote.check(args.out)
    except ValueError as error:
        return fail("quantize", error)
    out = _remote.local(args.out)
    command = shlex.join(["octavo", "quantize", Path(args.model).name, args.recipe, out.name, *_options(args)])
    try:
        text = Path(args.data).read_text(encoding="utf-8", errors="replace") if args.data else None
    except OSError as error:
        return fail("quantize --data", error)
    request = Request(
        args.recipe,
        head=args.head,
        scale_dtype=args.scales,
        command=command,
        replace=args.force,
        log=None if args.quiet else functools.partial(print, flush=True),
        progress=None if args.quiet else progress_line(),
        data=None if text is None else CalibrationData(text, tokens=args.data_tokens),
        imatrix=args.imatrix,
        bits=args.bits,
        mebibytes=args.mebibytes,
        checkpoint=args.checkpoint,
        distill=args.distill,
    )
    try:
        source = open_source(args)
        if args.rotate:
            source = rotated(source)
        if args.hadamard:
            source = hadamard(source, **_blocks(source.config, args.hadamard))
        print(source.describe(), flush=True)
        done = export_model(args.format, source, out, request)
        page = _report(source, done, out, request)
        _remote.push(args.out)
    except (ValueError, OSError) as error:
        return fail("quantize", error)
    print(done.summary)
    print(f"written to {args.out}; report: {page if out == Path(args.out) else f'{args.out}/{page.name}'}")
    print(
        f"next: octavo generate {args.out} --prompt '...'   octavo eval {args.out} --against {args.model} --text FILE"
    )
    return 0


def _blocks(config: Any, text: str) -> dict[str, int]:
    """The block sizes of `--hadamard`: the largest power of two, where none is given."""
    found = {}
    for word in text.split(","):
        if word not in ("mlp", "keys") and not word.isdigit():
            raise ValueError(f"--hadamard {word}: a block size such as 32, mlp or keys")
        size = {"mlp": config.mlp_dim, "keys": config.head_dim}.get(word, 0)
        found[word if size else "inputs"] = size & -size or int(word)
    return found


def _report(source: Any, done: Any, out: Path, request: Any) -> Path:
    """Write the report page: into the output directory, or next to the output file."""
    from octavo.report import record_conversion, render

    record = out / "conversion.json" if out.is_dir() else out.with_name(f"{out.name}.conversion.json")
    texts = {"recipe": request.recipe, "command": request.command, "costs": done.costs}
    return render(record_conversion(source, done.params, done.summary, record, **texts))


def _options(args: argparse.Namespace) -> list[str]:
    given = [("--head", args.head, ""), ("--format", args.format, "octavo"), ("--scales", args.scales, "")]
    given += [("--hadamard", args.hadamard, "")]
    given += [("--data", Path(args.data).name, "")] if args.data else []
    given += [("--adapter", Path(args.adapter).name, "")] if args.adapter else []
    given += [("--imatrix", args.imatrix.name, "")] if args.imatrix else []
    given += [("--distill", str(args.distill), "0")]
    given += [(f"--{name}", f"{value:g}", "") for name in ("bits", "mebibytes") if (value := getattr(args, name))]
    flags = ["--rotate"] if args.rotate else []
    return flags + [word for name, value, default in given if value != default for word in (name, value)]
