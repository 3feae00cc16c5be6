"""`octavo embed`: the vectors of texts by an encoder."""

import argparse
import json
import sys
import time
from typing import Any

from octavo.cli.compiled import use_compiled_programs
from octavo.cli.options import fail, read_texts


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser(
        "embed",
        help="map texts to vectors with an encoder",
        description="Print a line of JSON with the embedding of each text: a vector of length one, unless the model's "
        "modules.json leaves out the normalization, so that a dot product is the cosine similarity of two texts. MODEL "
        "is the directory of an encoder (BERT, RoBERTa, XLM-RoBERTa, MPNet, DistilBERT, ModernBERT) in the layout of "
        "Hugging Face or sentence-transformers.",
        epilog="Example: octavo embed minilm --text 'A dog runs.' --text 'Rain.' --weights int8. Exit status 2: the "
        "model, a text or an option is wrong.",
    )
    parser.add_argument("model", metavar="MODEL", help="the directory of the encoder")
    parser.add_argument("--text", metavar="TEXT", action="append", help="a text to embed; may be given several times")
    parser.add_argument("--text-file", metavar="FILE", help="a text on each line; - reads standard input")
    parser.add_argument(
        "--weights", metavar="FORMAT", help="quantize the weights: int8, fp8, int4:g32 or recipe:NAME (default: float)"
    )
    parser.add_argument(
        "--activations", metavar="FORMAT", help="quantize the inputs of matmuls too, such as int8; needs --weights"
    )
    parser.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="put this prompt of config_sentence_transformers.json before each text (default: the model's, if any)",
    )
    parser.add_argument("--batch-size", type=int, metavar="N", default=32, help="texts at a time (default 32)")
    parser.add_argument("--max-length", type=int, metavar="N", help="truncate texts to N tokens (default: the model's)")
    parser.add_argument("--out", metavar="FILE", help="write a NumPy array [texts, size] here instead of printing")
    return parser


def run(args: argparse.Namespace) -> int:
    """Embed, and return the exit status."""
    import numpy as np

    from octavo._io import atomic_file

    try:
        texts = read_texts(args.text, args.text_file, "--text")
        if args.activations and not args.weights:
            raise ValueError("--activations needs --weights, the format of the weights")
        encoder = _open(args)
        started = time.perf_counter()
        vectors = encoder.embed(texts, batch_size=args.batch_size, prompt_name=args.prompt_name)
        seconds = time.perf_counter() - started
        if args.out:
            with atomic_file(args.out) as file:
                np.save(file, vectors)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return fail("embed", error)
    if not args.out:
        for text, vector in zip(texts, vectors, strict=True):
            print(json.dumps({"text": text, "embedding": vector.tolist()}, ensure_ascii=False))
    print(
        f"octavo embed: {len(texts)} texts, {vectors.shape[1]} dimensions, {seconds:.1f} seconds with compilation; "
        f"parameters: {encoder.nbytes / 2**20:.1f} MiB",
        file=sys.stderr,
    )
    return 0


def _open(args: argparse.Namespace) -> Any:
    from octavo.pretrained import open_encoder

    use_compiled_programs()
    encoder = open_encoder(args.model, max_length=args.max_length)
    return encoder.quantize(args.weights, activations=args.activations) if args.weights else encoder
