"""Programs that runs of one file share."""

import pytest

from octavo.train.trainer import Trainer

# The keys of a run that its programs do not depend on.
APART = (
    *("run_name", "base_output_directory", "metrics_file", "enable_checkpointing", "checkpoint_period"),
    *("max_num_checkpoints_to_keep", "eval_interval", "eval_steps", "target_eval_loss", "load_parameters_path"),
)


@pytest.fixture(scope="module")
def programs():
    """The programs of a file, by configuration."""
    return {}


@pytest.fixture
def shared_programs(programs, monkeypatch):
    """Trainers of one configuration trace and compile their steps once; each draws or restores a state of its own."""

    def share(name):
        method = getattr(Trainer, name)

        def call(self, *args):
            config = {key: value for key, value in vars(self.config).items() if key not in APART}
            if self.config.learning_rate_schedule_steps > 0:
                del config["steps"]
            stage = (args[0], self.schedule.stage(args[1])) if args else ()
            key = (name, *stage, repr(config))
            if key not in programs:
                programs[key] = method(self, *args)
            return programs[key]

        monkeypatch.setattr(Trainer, name, call)

    for name in ("compiled", "verify", "plan"):
        share(name)
