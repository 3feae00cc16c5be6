"""`octavo compare`: the same training in float and in recipes, over seeds, with a table and a report."""

import json
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.cli.options import fail

if TYPE_CHECKING:
    from octavo.train.config import Config

_HELP = """usage: octavo compare [CONFIG.yml] quantization=RECIPE[,RECIPE...] [seeds=N] [key=value ...]

Trains the same model from the same seeds on the same batches in float and in each recipe, with interleaved steps, and
prints a table: loss on held-out text, its gap to float with a 95 % interval over the seeds, time and memory of a step
relative to float, and the share of matmul FLOPs in low precision. Writes the results as JSON and a report page with the
curves. Finished runs are kept in the directory and not run again. SIGTERM and Ctrl-C end a comparison after the
current step, with a checkpoint; the same command with the same run_name resumes it.

  quantization=int8,fp8_full   the recipes; `octavo plan --rules list` prints them all
  seeds=3                      number of seeds (default 2; the interval needs two or more)
  eval_points=10               number of evaluations on held-out text
  fresh=true                   run all runs again from their first step
  checkpoint_period=100        steps between two checkpoints of unfinished runs
  key=value                    everything that `octavo train --help` lists: steps=200 model_name=10m ...

Example: octavo compare quantization=int8,fp8_full model_name=1m steps=100 seeds=3
"""


def main(argv: Sequence[str]) -> int:
    """Compare as the arguments say, and return the exit status."""
    if any(word in ("-h", "--help", "help") for word in argv):
        print(_HELP)
        return 0
    from octavo.train.config import load
    from octavo.train.quantization import training_rules

    own = {"quantization": "int8", "seeds": "2", "eval_points": "10", "fresh": "false"}
    rest = []
    for word in argv:
        name, equals, value = word.partition("=")
        if equals and name in own:
            own[name] = value
        else:
            rest.append(word)
    try:
        recipes = [name for name in own["quantization"].strip("[]").split(",") if name and name != "float"]
        loaded = [load([*rest, f"quantization={name}"]) for name in recipes or [""]]
        for config, _ in loaded:
            training_rules(config)
        options: dict[str, Any] = {name: _number(name, own[name]) for name in ("seeds", "eval_points")}
        options["fresh"] = _flag("fresh", own["fresh"])
    except (ValueError, OSError) as error:
        return fail("compare", error)
    for text in dict.fromkeys(note for _, sources in loaded for note in sources.notes):
        _log(f"note: {text}")
    return _compare(loaded[0].config, recipes, options)


def _number(name: str, text: str) -> int:
    from octavo.train.config import ConfigError

    if not text.isdigit() or int(text) < 1:
        raise ConfigError([f"{name}={text}: a whole number, 1 or more"])
    return int(text)


def _flag(name: str, text: str) -> bool:
    from octavo.train.config import ConfigError

    if text.lower() not in ("true", "false"):
        raise ConfigError([f"{name}={text}: true or false"])
    return text.lower() == "true"


def _compare(config: "Config", recipes: list[str], options: dict[str, Any]) -> int:
    from octavo import _remote
    from octavo.checkpoint import CheckpointError
    from octavo.report import compare_report
    from octavo.train.compare import Comparison, StoppedError

    directory = _remote.pull(config.run_path)
    comparison = Comparison(config, recipes, directory=directory, log=_log, **options)
    try:
        comparison.run()
    except StoppedError as error:
        print(error)
        return 130 if error.by == signal.SIGINT else 0
    except (OSError, ValueError, CheckpointError) as error:
        return fail("compare", error, status=1)
    finally:
        _remote.push(config.run_path)
    (directory / "comparison.json").write_text(json.dumps(comparison.to_dict()), encoding="utf8")
    print(comparison)
    report = compare_report(comparison.to_dict(), directory / "report.html")
    _remote.push(config.run_path)
    print(f"report: {f'{config.run_path}/report.html' if _remote.is_remote(config.run_path) else report}")
    return 0


def _log(text: str) -> None:
    print(text, flush=True)
