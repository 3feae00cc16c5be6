"""`octavo train`, also `python -m octavo.train`: a run of the trainer with a report at its end.

Exit status 0: done, or saved on SIGTERM; 130: saved on Ctrl-C; 1: stopped by an error; 2: the configuration is wrong.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.train.config import Config
    from octavo.train.outcome import Outcome
    from octavo.train.sources import Sources

FAILED, USAGE, INTERRUPTED = 1, 2, 130
_TRAINING = {"yaml": "pyyaml", "pydantic": "pydantic", "flax": "flax", "optax": "optax", "orbax": "orbax-checkpoint"}


def run(argv: Sequence[str]) -> int:
    """Train as the arguments say, and return the exit status."""
    try:
        return _run(argv)
    except ModuleNotFoundError as error:
        package = _TRAINING.get((error.name or "").partition(".")[0])
        if package is None and "pip install" not in str(error):
            raise
        return _fail(
            f"the package {package} is missing: pip install 'octavo[training]'" if package else str(error), FAILED
        )
    except KeyboardInterrupt:
        return _fail("interrupted; the same run_name goes on from the last checkpoint", INTERRUPTED)


def _run(argv: Sequence[str]) -> int:
    from octavo.train.config import ConfigError
    from octavo.train.help import help_text
    from octavo.train.sources import load

    if any(word in ("-h", "--help", "help") for word in argv):
        print(help_text())
        return 0
    try:
        config, sources = load(list(argv))
    except (ConfigError, OSError) as error:
        return _fail(str(error), USAGE)
    from octavo.train import distributed
    from octavo.train.mesh import batch_rows, make_mesh
    from octavo.train.quantization import schedule_of

    try:
        # Before any device is touched; the mesh then is of the devices of all processes.
        distributed.start(config)
        config = distributed.agreed(config)
        batch_rows(config, make_mesh(config).size)
        schedule_of(config)
    except distributed.LostError as error:
        return _fail(str(error), FAILED)
    except ValueError as error:  # rules or a mesh that cannot be made of these settings
        return _fail(str(error), USAGE)
    return _train(config, sources)


def _train(config: "Config", sources: "Sources") -> int:
    # After the configuration is known to be right: these take a second to import.
    from octavo.checkpoint import CheckpointError
    from octavo.report import write_report
    from octavo.train import distributed, loop
    from octavo.train.config import ConfigError
    from octavo.train.halt import HaltedError
    from octavo.train.help import print_config

    if first := distributed.is_first():
        print(print_config(config, sources), flush=True)
    try:
        outcome = loop.train(config)
        report = write_report(config.run_directory) if first else None
    except HaltedError as error:
        return _fail(f"{error}. Report: {write_report(config.run_directory)}", FAILED) if first else FAILED
    except ConfigError as error:  # sizes that do not fit the mesh; known once the vocabulary is
        return _fail(str(error), USAGE)
    except (CheckpointError, OSError, ValueError, distributed.LostError) as error:
        return _leave(_fail(str(error), FAILED))
    except Exception:
        if not distributed.several():
            raise
        traceback.print_exc()
        return _leave(FAILED)
    if not first:
        return INTERRUPTED if outcome.reason == loop.INTERRUPTED else 0
    print(f"{_ended(outcome, config)}; report: {report}")
    if outcome.complete:
        print(f"Next: octavo compare quantization={config.quantization or 'int8'} model_name={config.model_name}")
    return INTERRUPTED if outcome.reason == loop.INTERRUPTED else 0


def _leave(status: int) -> int:
    """End at once where there are other processes: they wait for this one, and it would wait for them."""
    from octavo.train import distributed

    if distributed.several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _ended(outcome: "Outcome", config: "Config") -> str:
    how = {"target": "reached target_eval_loss", "terminated": "stopped by SIGTERM", "interrupted": "stopped by Ctrl-C"}
    parts = [f"{how.get(outcome.reason, outcome.reason)} after {outcome.step} steps"]
    if not outcome.complete:
        saved = "saved; the same command goes on from there"
        parts.append(saved if config.enable_checkpointing else "not saved, because of enable_checkpointing=false")
    for name, loss in (("loss", outcome.loss), ("eval loss", outcome.eval_loss)):
        if loss is not None:
            parts.append(f"{name} {loss:.4f}")
    return ", ".join(parts)


def _fail(message: str, status: int) -> int:
    print(f"octavo train: {message}", file=sys.stderr)
    return status
