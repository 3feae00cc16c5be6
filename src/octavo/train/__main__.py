"""`octavo train`, also `python -m octavo.train`: a run with a report at its end.

Exit status 0: done, or saved on SIGTERM; 130: saved on Ctrl-C; 1: stopped by an error; 2: the configuration is wrong.
"""

import dataclasses
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.train.config import Config, Sources
    from octavo.train.run import Outcome

FAILED, USAGE, INTERRUPTED = 1, 2, 130
_PACKAGES = {"yaml": "pyyaml", "flax": "flax", "optax": "optax", "orbax": "orbax-checkpoint"}


def main(argv: Sequence[str]) -> int:
    """Train as the arguments say, and return the exit status."""
    try:
        return _load_and_train(argv)
    except ModuleNotFoundError as error:
        package = _PACKAGES.get((error.name or "").partition(".")[0])
        if package is None and "pip install" not in str(error):
            raise
        return _fail(
            f"the package {package} is missing: pip install 'octavo[training]'" if package else str(error), FAILED
        )
    except KeyboardInterrupt:
        return _fail("interrupted; the same run_name resumes from the last checkpoint", INTERRUPTED)


def _load_and_train(argv: Sequence[str]) -> int:
    from octavo.train.config import ConfigError, load
    from octavo.train.config.text import help_text

    if any(word in ("-h", "--help", "help") for word in argv):
        print(help_text())
        return 0
    try:
        config, sources = load(list(argv))
    except (ConfigError, OSError) as error:
        return _fail(str(error), USAGE)
    from octavo.train import distributed
    from octavo.train.mesh import global_batch_size, make_mesh
    from octavo.train.quantization import training_schedule

    try:
        # Before any device is used, so that the mesh has the devices of all processes.
        distributed.initialize(config)
        config = distributed.agree_on_config(config)
        mesh = make_mesh(config)
        global_batch_size(config, mesh.size)
        schedule = training_schedule(config)
    except distributed.ConnectionLostError as error:
        return _fail(str(error), FAILED)
    except ValueError as error:  # settings from which no mesh or rules can be made
        return _fail(str(error), USAGE)
    return _train(config, sources, {"mesh": mesh, "schedule": schedule})


def _train(config: "Config", sources: "Sources", made: dict[str, Any]) -> int:
    # Imported after the configuration is validated: these imports take a second.
    from octavo.checkpoint import CheckpointError
    from octavo.train import distributed, run
    from octavo.train.config import ConfigError
    from octavo.train.config.text import format_config
    from octavo.train.halt import HaltedError

    if first := distributed.is_main_process():
        print(format_config(config, sources), flush=True)
    try:
        outcome = run.train(config, **made)
        report = _write_report(config) if first else None
    except HaltedError as error:
        return _fail(f"{error}. Report: {_write_report(config)}", FAILED) if first else FAILED
    except ConfigError as error:  # sizes that the mesh does not divide; known once the vocabulary is
        return _fail(str(error), USAGE)
    except (CheckpointError, OSError, ValueError, distributed.ConnectionLostError) as error:
        return _exit_process(_fail(str(error), FAILED))
    except Exception:
        if not distributed.is_multiprocess():
            raise
        traceback.print_exc()
        return _exit_process(FAILED)
    if first:
        print(f"{_outcome_line(outcome, config)}; report: {report}")
        if outcome.complete:
            words = [f"quantization={config.quantization or 'int8'}", f"model_name={config.model_name}", *_data(config)]
            print(f"Next: octavo compare {shlex.join(words)}")
    return INTERRUPTED if outcome.reason == run.INTERRUPTED else 0


def _data(config: "Config") -> list[str]:
    """The arguments that name the data of a run, where they are not the defaults."""
    fields = [f for f in dataclasses.fields(config) if f.metadata["key"].group in ("data", "evaluation")]
    given = {f.name: getattr(config, f.name) for f in fields if isinstance(f.default, str)}
    return [f"{f.name}={given[f.name]}" for f in fields if given.get(f.name, f.default) != f.default]


def _write_report(config: "Config") -> Any:
    from octavo import _remote

    # `report` imports `train`, so the report is written by this command and not by the trainer.
    page = importlib.import_module("octavo.report").write_report(config.run_directory)
    _remote.push(config.run_path)
    return f"{config.run_path}/{page.name}" if _remote.is_remote(config.run_path) else page


def _exit_process(status: int) -> int:
    """Exit at once if there are other processes: a normal exit would wait for them while they wait for this one."""
    from octavo.train import distributed

    if distributed.is_multiprocess():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _outcome_line(outcome: "Outcome", config: "Config") -> str:
    reasons = {
        "target": "reached target_eval_loss",
        "terminated": "stopped by SIGTERM",
        "interrupted": "stopped by Ctrl-C",
    }
    parts = [f"{reasons.get(outcome.reason, outcome.reason)} after {outcome.step} steps"]
    if not outcome.complete:
        saved = f"saved; the same command with run_name={config.run_name} resumes"
        parts.append(saved if config.enable_checkpointing else "not saved, because of enable_checkpointing=false")
    for name, loss in (("loss", outcome.loss), ("eval loss", outcome.eval_loss)):
        if loss is not None:
            parts.append(f"{name} {loss:.4f}")
    return ", ".join(parts)


def _fail(message: str, status: int) -> int:
    print(f"octavo train: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
