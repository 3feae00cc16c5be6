"""What each command takes, and what its help says."""

import argparse
from typing import Any

_TARGET = """TARGET is module:function, or module:attribute for a Flax Linen, Flax NNX or Equinox model, or for a class
or function that makes one without arguments. Modules are looked for in the current directory too."""

_INPUTS = """shapes, one for each argument, such as 'f32[8,128]' 'i32[8,16]'; or module:callable, which returns the
tuple of arguments as arrays or jax.ShapeDtypeStructs (nested parameters need this form); by default example_inputs in
the target's module, such a callable or the tuple itself"""


_BEGIN = """\
to begin:
  octavo train quantization=int8                       a small language model, trained in int8
  octavo compare quantization=int8,fp8_full seeds=2    the same in float and in two recipes, with a table
  octavo plan module:function --rules int8             what int8 would do to a function or model of yours
  octavo quantize model.gguf int4 small                a pretrained model in four bits
  octavo generate small --prompt "Once upon a time"    text from it
  octavo COMMAND --help                                the rest

Next: octavo doctor"""


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands but those that take key=value words."""
    parser = argparse.ArgumentParser(
        prog="octavo",
        description="Quantized training and inference for JAX.",
        epilog=_BEGIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    _add_doctor(commands)
    _add_plan(commands)
    _add_verify(commands)
    _add_quantize(commands)
    _add_eval(commands)
    _add_serve(commands)
    _add_generate(commands)
    _add_report(commands)
    _add_completion(commands)
    # These take key=value words and print their own help, so `main` passes their words on.
    commands.add_parser("train", add_help=False, help="train a language model in a number format")
    commands.add_parser("compare", add_help=False, help="train in float and in recipes side by side, over seeds")
    return parser


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what this machine has, which number types it multiplies fast, and what is missing",
        description="Print versions, CPU and devices; try a matrix product in each number type on the default backend "
        "and time it against float32; list what is missing with the command that mends it. Takes a few seconds.",
        epilog="Exit status 1 when something Octavo cannot run without is missing. Next: make train",
    )
    doctor.add_argument("--json", action="store_true", help="print the same as JSON")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        usage="octavo plan TARGET --rules RULES [--inputs INPUT ...] [options]",
        help="what rules will do to each multiplication of a function or model",
        description="Print each multiplication of a function or model with the rule that matches it, the number types "
        "of its three products, its scales, and the bytes that it saves. Only shapes are used; nothing is computed. "
        + _TARGET,
        epilog="Example: octavo plan my_model:make --rules int8 --inputs 'f32[8,128]'. Exit status 0: planned; 2: the "
        "target, inputs or rules are wrong, or a rule matches nothing.",
    )
    _add_what(plan)
    plan.add_argument("--allow-unmatched", action="store_true", help="warn of a rule that matches nothing, and go on")
    plan.add_argument(
        "--sent",
        action="store_true",
        help="compile the function in low precision for the devices on which its inputs lie, and tell what each of "
        "them sends; octavo train prints the same for its step",
    )
    form = plan.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan as JSON")
    form.add_argument("--html", metavar="FILE", help="write the plan to an HTML file")


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        usage="octavo verify TARGET [--rules RULES] [--inputs INPUT ...] [options]",
        help="which share of a function's or model's matmul FLOPs is really low precision",
        description="Count the matmul FLOPs of a function or model by the types that are multiplied: as it is, or "
        "quantized by the rules. Only shapes are used; nothing is computed. " + _TARGET,
        epilog="Example: octavo verify my_model:make --rules int8 --inputs 'f32[8,128]' --grad --at-least 0.95. Exit "
        "status 0: verified; 1: the share is below that of --at-least; 2: the target, inputs or rules are wrong.",
    )
    _add_what(verify)
    verify.add_argument(
        "--grad",
        action="store_true",
        help="verify the backward pass too: the gradient of the mean of the squares of all float outputs with respect "
        "to the weights",
    )
    verify.add_argument(
        "--platform",
        choices=("cpu", "cuda", "rocm", "tpu"),
        help="lower the program for this platform too, and report the types in it; no such device is needed",
    )
    verify.add_argument("--json", action="store_true", help="print the result as JSON")
    verify.add_argument(
        "--at-least",
        type=_share,
        metavar="SHARE",
        help="exit with status 1 if the low-precision share of the forward pass, or with --grad of either pass, is "
        "below this, 0 to 1",
    )


_MODEL = """MODEL is an output of `octavo quantize`, a run of `octavo train` or one of its checkpoints, a Hugging Face
directory (config.json and safetensors), or a GGUF file."""


def _add_quantize(commands: Any) -> None:
    quantize = commands.add_parser(
        "quantize",
        help="convert a model to low precision, parameter by parameter",
        description="Read a model one parameter at a time, quantize each by the recipe, and write the result with a "
        "model card. The model is not run, and peak memory is little more than the size of the result. " + _MODEL,
        epilog="Examples: octavo quantize model.gguf int4 small; octavo quantize runs/mine trained served; "
        "octavo quantize hf-folder int8 out.gguf --format gguf. Exit status 2: the model, the recipe or the output "
        "path is invalid.",
    )
    quantize.add_argument("model", metavar="MODEL", help="the model to convert")
    quantize.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a number format for the weights (int8, int4, int4:g64, int4:g32:mse, int3, int2, nf4, fp8, mxfp4, nvfp4, "
        "...); or recipe:NAME, activations included; or a .json or .yml file of rules; or trained: the rules that the "
        "model was trained with",
    )
    quantize.add_argument("out", metavar="OUT", help="the output: a directory, or a file for gguf")
    quantize.add_argument(
        "--head",
        metavar="FORMAT",
        default="",
        help="the format of the embedding table and the logits; float keeps them (default: int8 where the weights have "
        "fewer bits, else that of the weights)",
    )
    quantize.add_argument(
        "--format",
        metavar="FORM",
        default="octavo",
        help="octavo (default), or for other programs: safetensors, compressed-tensors, gptq, awq, gguf",
    )
    quantize.add_argument(
        "--scales",
        metavar="DTYPE",
        choices=("", "float32", "bfloat16", "float16"),
        default="",
        help="the dtype of scales (default: bfloat16, for other programs float16, and with trained rules float32)",
    )
    quantize.add_argument("--force", action="store_true", help="replace what is at OUT")
    quantize.add_argument("--quiet", action="store_true", help="do not print a line for each parameter")


def _add_eval(commands: Any) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="perplexity of a model on a text, and its distance to another",
        description="Measure a model on a text: perplexity with its standard error; against another model of the same "
        "vocabulary also the KL divergence, the RMS change of probabilities, how often both choose the same token, and "
        "the signal to noise ratio of every layer. " + _MODEL,
        epilog="Example: octavo eval small --against model.gguf --text book.txt --max-tokens 20000",
    )
    evaluate.add_argument("model", metavar="MODEL", help="the model to measure")
    evaluate.add_argument("--text", metavar="FILE", required=True, help="a text file")
    evaluate.add_argument("--against", metavar="FLOAT", help="the model to compare with, such as the one in float")
    evaluate.add_argument("--max-tokens", type=int, metavar="N", default=0, help="only the first N tokens of the text")
    evaluate.add_argument("--length", type=int, metavar="N", default=256, help="tokens in a window (default 256)")
    evaluate.add_argument("--kv", metavar="FORMAT", help="keys and values in int8, int4 or fp8")
    evaluate.add_argument("--kv-values", metavar="FORMAT", help="the format of values, where it is another")
    evaluate.add_argument("--kv-axis", metavar="AXIS", default="dkv", help="dkv (the default), heads_and_dkv or kivi")
    evaluate.add_argument(
        "--out", metavar="DIR", help="where the report goes, with the figures as JSON (default: runs/eval-MODEL-TEXT)"
    )
    evaluate.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's clients expect it",
        description="Answer /v1/completions and /v1/chat/completions, streaming or not, for many clients at a time. "
        "Stops in good order at SIGINT and SIGTERM. " + _MODEL,
        epilog="Example: octavo serve small --slots 8 --kv int8. Exit status 2: the model or an option is wrong, or "
        "the port is taken.",
    )
    serve.add_argument("model", metavar="MODEL", help="the model to serve")
    serve.add_argument("--host", default="127.0.0.1", help="the address to listen on (default 127.0.0.1: this machine)")
    serve.add_argument("--port", type=int, default=8000, help="the port (default 8000); 0 takes a free one")
    serve.add_argument("--name", help="what the model is called in requests (default: the name of the file)")
    serve.add_argument("--slots", type=int, metavar="N", default=8, help="texts made at a time (default 8)")
    serve.add_argument("--queue", type=int, metavar="N", default=64, help="texts that may wait (default 64)")
    serve.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of a text (default: the model's, up to 2048)"
    )
    serve.add_argument("--kv", metavar="FORMAT", help="keys and values in int8, int4 or fp8")
    serve.add_argument("--kv-values", metavar="FORMAT", help="the format of values, where it is another")
    serve.add_argument("--kv-axis", metavar="AXIS", default="dkv", help="dkv (the default), heads_and_dkv or kivi")
    serve.add_argument("--timeout", type=float, metavar="S", default=600.0, help="seconds for an answer (default 600)")
    serve.add_argument(
        "--grace", type=float, metavar="S", default=10.0, help="seconds to finish answers when stopped (default 10)"
    )
    serve.add_argument(
        "--api-key",
        metavar="KEY",
        help="refuse requests without this key; better set OCTAVO_API_KEY, since others may see a command's arguments",
    )


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="go on from prompts with a model, token by token",
        description="Print what a model makes of prompts, as it makes it; at the end, on stderr, how fast and in how "
        "much memory. " + _MODEL,
        epilog="Example: octavo generate small --prompt 'Once upon a time' --max-tokens 64 --kv int8. Exit status 1: a "
        "text ended in an error; 2: the model, a prompt or an option is wrong.",
    )
    generate.add_argument("model", metavar="MODEL", help="the model to run")
    generate.add_argument(
        "--prompt", metavar="TEXT", action="append", help="what to go on from; several are done side by side"
    )
    generate.add_argument("--prompt-file", metavar="FILE", help="a prompt on each line; - reads standard input")
    generate.add_argument("--chat", action="store_true", help="prompts are what a user says, in the model's template")
    generate.add_argument("--max-tokens", type=int, metavar="N", default=128, help="tokens at most (default 128)")
    generate.add_argument("--temperature", type=float, metavar="T", default=0.8, help="default 0.8; 0: likeliest token")
    generate.add_argument("--top-k", type=int, metavar="K", default=0, help="only the K likeliest tokens (0: all)")
    generate.add_argument("--top-p", type=float, metavar="P", default=1.0, help="only the likeliest that sum to P")
    generate.add_argument("--min-p", type=float, metavar="P", default=0.0, help="only those with this share of the top")
    generate.add_argument("--repetition-penalty", type=float, metavar="R", default=1.0, help="above 1: fewer repeats")
    generate.add_argument("--seed", type=int, metavar="N", help="the same number gives the same text")
    generate.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text")
    generate.add_argument("--kv", metavar="FORMAT", help="keys and values in int8, int4 or fp8")
    generate.add_argument("--kv-values", metavar="FORMAT", help="the format of values, where it is another")
    generate.add_argument("--kv-axis", metavar="AXIS", default="dkv", help="dkv (the default), heads_and_dkv or kivi")
    generate.add_argument("--slots", type=int, metavar="N", help="prompts done at a time (default: all, up to 8)")
    generate.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of a prompt and its answer (default: fits)"
    )
    generate.add_argument("--json", action="store_true", help="print a line of JSON for each prompt, when it is done")


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="write the page about a run again, or about several runs side by side",
        description="Write one HTML page that needs nothing but a browser. RUN is the directory of a training, of a "
        "comparison, of a converted model or of an evaluation. Of several runs, those of a kind are compared: training "
        "runs against the one in float, or against the first.",
        epilog="Examples: octavo report runs/mine; octavo report runs/float runs/int8 runs/fp8 --out three.html. Exit "
        "status 2: a RUN is none.",
    )
    report.add_argument("runs", metavar="RUN", nargs="+", help="a run's directory, or its JSON file")
    report.add_argument(
        "--out",
        metavar="FILE",
        help="where to write the page (default: where the run's own is; of several runs, report.html here)",
    )


def _add_completion(commands: Any) -> None:
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands, options and keys in a shell",
        description="Print a completion script for a shell. Its first lines say where it goes.",
        epilog="Example: octavo completion bash >> ~/.bash_completion",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell")


def _add_what(command: argparse.ArgumentParser) -> None:
    """What both commands look at: the target, its rules and its inputs."""
    # `--rules list` needs no target, so its absence is an error of the command and not of the parser.
    command.add_argument("target", metavar="TARGET", nargs="?", help="module:function or module:attribute")
    command.add_argument(
        "--rules",
        metavar="RULES",
        help=f"a recipe's name or a .json or .yml file; `octavo {command.prog.split()[-1]} --rules list` prints the "
        "recipes",
    )
    command.add_argument("--inputs", metavar="INPUT", nargs="+", help=_INPUTS)
    command.add_argument(
        "--weights",
        metavar="NAME",
        help="the argument of a function that holds the weights, by its name or number; by default one called params, "
        "variables, model or the like, and for gradients otherwise the first",
    )


def _share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: a number from 0 to 1, such as 0.95")
    return share
