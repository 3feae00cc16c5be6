"""The directory of a run's checkpoints: one folder per step, and temporary folders of interrupted operations.

`100` is a checkpoint. `100.saving` is being written; once it has a manifest it is complete and only has to be renamed.
`100.replaced` is the old version of a step that is being overwritten, `100.removed` is being deleted. Both are renamed
first, so that a partly deleted checkpoint is never taken for a damaged one.
"""

import dataclasses
import os
import re
import shutil
from pathlib import Path

from octavo._io import sync_directory
from octavo.checkpoint import manifest
from octavo.checkpoint.errors import DamagedError


@dataclasses.dataclass(frozen=True)
class StepDirectory:
    """The checkpoints in a directory."""

    root: Path

    def path(self, step: int, status: str = "") -> Path:
        """The folder of a step; `status` is `saving`, `replaced`, `removed`, or empty for a committed checkpoint."""
        return self.root / (f"{step}.{status}" if status else str(step))

    def all(self, status: str = "") -> list[int]:
        """The steps that have a folder, in order."""
        pattern = re.compile(rf"(0|[1-9]\d*){re.escape('.' + status) if status else ''}")
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))

    def intact(self) -> list[int]:
        """The steps whose files all exist and have the right size."""
        return [step for step in self.all() if self.is_intact(step)]

    def is_intact(self, step: int, status: str = "", *, contents: bool = False) -> bool:
        """Whether a step's files agree with its manifest in size, and with `contents` in their checksums."""
        try:
            manifest.verify(self.path(step, status), step, contents=manifest.EVERY_FILE if contents else None)
        except DamagedError:
            return False
        return True

    def commit(self, step: int) -> None:
        """Rename the complete `saving` folder of a step to its final name."""
        if self.path(step).exists():
            os.rename(self.path(step), self.path(step, "replaced"))
        os.rename(self.path(step, "saving"), self.path(step))
        sync_directory(self.root)
        self._delete(step, "replaced")

    def recover(self) -> None:
        """Finish the interrupted operations of a killed process where possible, and delete what remains of others."""
        for step in self.all("saving"):
            if self.is_intact(step, "saving", contents=True):
                self._delete(step, "replaced")
                self.commit(step)
            else:
                self._delete(step, "saving")
        for step in self.all("replaced"):
            if not self.path(step).exists():
                os.rename(self.path(step, "replaced"), self.path(step))
            self._delete(step, "replaced")
        for step in self.all("removed"):
            self._delete(step, "removed")

    def prune(self, *, max_to_keep: int | None, keep_period: int, latest: int) -> None:
        """Delete old checkpoints, but not the `max_to_keep` newest intact ones, nor those of `keep_period`.

        Damaged checkpoints do not count as kept; `latest` is the step just written, which may not be the highest.
        """
        if max_to_keep is None:
            return
        kept = {latest, *self.intact()[-max_to_keep:]}
        for step in self.all():
            if step < max(kept) and step not in kept and not (keep_period and step % keep_period == 0):
                os.rename(self.path(step), self.path(step, "removed"))
                self._delete(step, "removed")

    def _delete(self, step: int, status: str) -> None:
        shutil.rmtree(self.path(step, status), ignore_errors=True)
