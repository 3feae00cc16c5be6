"""NVFP4 training over many tokens: the order of the published recipes, and what each rounding costs.

    python benchmarks/fp4.py [--directory DIR] [--tokens 50] [--seeds 3] [--ablations] [key=value ...]

The model of one million parameters of `octavo train` sees TOKENS tokens for each parameter, in float and in each
recipe, from the same seeds and on the same batches. Of the published recipes the gap of the loss to float is
NVIDIA's > TetraJet-v2 > Quartet II, but only after tens of tokens for each parameter (Panferov et al., Quartet II,
arXiv:2601.22813, table 2). With --ablations also the rows of that table that quantize one part only: the forward, or
the gradients of weights, activations or both, rounded stochastically or by MS-EDEN.

It takes hours. Ctrl-C and SIGTERM save all runs in DIR, and the same command resumes; finished seeds are kept. Other
words are settings of `octavo train`, such as per_device_batch_size=4.
"""

import argparse
import sys
from pathlib import Path

import jax

from octavo.numerics import Eden
from octavo.ops import Matmul, Operand
from octavo.rules import QtRule
from octavo.rules.compile import EDEN_RANGE
from octavo.rules.registry import Recipe, register_recipe
from octavo.train.compare import Comparison, StoppedError
from octavo.train.config import Config, load
from octavo.train.trainer import Trainer

PUBLISHED = ("te_nvfp4", "tetrajet2", "quartet2")
BLOCK, SQUARE = Operand("nvfp4"), Operand("nvfp4", square=True)
CLOSER = Operand("nvfp4", calibration="four_over_six")
NOISY = Operand("nvfp4", rounding="stochastic")
EDEN = Operand("nvfp4", calibration=EDEN_RANGE, rounding=Eden(32))
FLOAT = Matmul(residual="original")


def ablations() -> dict[str, tuple[Matmul, Matmul, Matmul]]:
    """The forward matmul and both gradients of each row: `dlhs` is that of activations, `drhs` that of weights."""

    def gradient(operand: Operand) -> Matmul:
        return Matmul(operand, operand, residual="original", rotate=32, random_signs=True)

    found = {}
    for rounding, operand in (("eden", EDEN), ("sr", NOISY)):
        low = gradient(operand)
        found[f"weights_{rounding}"] = (Matmul(), FLOAT, low)
        found[f"activations_{rounding}"] = (Matmul(), low, FLOAT)
        found[f"gradients_{rounding}"] = (Matmul(), low, low)
    forwards = {"forward": (BLOCK, BLOCK), "forward_four_over_six": (CLOSER, CLOSER), "forward_square": (BLOCK, SQUARE)}
    found |= {name: (Matmul(*operands), FLOAT, FLOAT) for name, operands in forwards.items()}
    return found | {"forward_hadamard": (Matmul(BLOCK, BLOCK, rotate=16), FLOAT, FLOAT)}


def register() -> list[str]:
    """Register the ablations as recipes; returns their names."""
    types = {"weight_qtype": "nvfp4", "act_qtype": "nvfp4", "bwd_qtype": "nvfp4", "scope": "weights"}
    source = "Panferov et al., Quartet II, arXiv:2601.22813"
    for name, (fwd, dlhs, drhs) in ablations().items():
        rule = QtRule(**types, op_names=("dot_general", "einsum"), fwd=fwd, dlhs=dlhs, drhs=drhs)
        register_recipe(Recipe(name=name, summary="One part in NVFP4.", source=source, rules=(rule,)), replace=True)
    return list(ablations())


def settings(words: list[str], tokens: float, directory: Path) -> tuple[Config, int]:
    """The configuration of all runs, of as many steps as the tokens take."""
    defaults = {"model_name": "1m", "per_device_batch_size": 16, "max_target_length": 128, "eval_steps": 16}
    known = {word.partition("=")[0] for word in words}
    given = [*(f"{name}={value}" for name, value in defaults.items() if name not in known), *words]
    given += [f"base_output_directory={directory}", "run_name=fp4", "quantization_metrics_interval=0"]
    config, _ = load([*given, "steps=1"])
    parameters = sum(x.size for x in jax.tree.leaves(Trainer(config.replace(quantization="")).state.params))
    batch = config.per_device_batch_size * config.max_target_length * jax.device_count()
    return load([*given, f"steps={max(64, round(tokens * parameters / batch))}"])[0], parameters


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="keeps checkpoints and results")
    parser.add_argument("--tokens", type=float, default=50, help="tokens for each parameter")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ablations", action="store_true", help="also the rows that quantize one part")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings of `octavo train`")
    options = parser.parse_args()
    recipes = [*PUBLISHED, *(register() if options.ablations else ())]
    config, parameters = settings(options.words, options.tokens, options.directory)
    print(f"{parameters:,} parameters, {config.steps:,} steps, {options.seeds} seeds: {', '.join(recipes)}", flush=True)
    comparison = Comparison(config, recipes, seeds=options.seeds, eval_points=20, directory=config.run_directory)
    try:
        comparison.run()
    except StoppedError as error:
        print(error)
        return 130
    print(comparison)
    gaps = {row.name: row.batch_gap for row in comparison.table()}
    order = " > ".join(sorted(PUBLISHED, key=lambda name: -gaps[name]))
    print(f"gaps by batch, the largest first: {order}; published: {' > '.join(PUBLISHED)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
