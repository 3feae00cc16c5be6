"""The directory of a run's checkpoints: a folder per step, and what an interrupted save may leave beside them.

`100` is a checkpoint. `100.saving` is one being written; once it has a manifest it is whole, and only lacks its name.
`100.replaced` made room for a new `100`, `100.removed` is being deleted: under other names, so that a checkpoint that
is half gone is never taken for a damaged one.
"""

import dataclasses
import os
import re
import shutil
from pathlib import Path

from octavo.checkpoint import manifest
from octavo.checkpoint.errors import DamagedError


@dataclasses.dataclass(frozen=True)
class Folder:
    """The checkpoints in a directory."""

    directory: Path

    def of(self, step: int, state: str = "") -> Path:
        """The folder of a step, in one of the states `saving`, `replaced`, `removed`, or done."""
        return self.directory / (f"{step}.{state}" if state else str(step))

    def all(self, state: str = "") -> list[int]:
        """The steps that have a folder, in order."""
        pattern = re.compile(rf"(0|[1-9]\d*){re.escape('.' + state) if state else ''}")
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))

    def whole(self) -> list[int]:
        """The steps whose files are all there and of the right size."""
        return [step for step in self.all() if self.is_whole(step)]

    def is_whole(self, step: int, state: str = "", *, contents: bool = False) -> bool:
        """Whether a step's files agree with its manifest, in size or also in what is in them."""
        try:
            return manifest.check(self.of(step, state), contents=(lambda _: True) if contents else None) == step
        except DamagedError:
            return False

    def commit(self, step: int) -> None:
        """Give a step that is saved its name."""
        if self.of(step).exists():
            os.rename(self.of(step), self.of(step, "replaced"))
        os.rename(self.of(step, "saving"), self.of(step))
        manifest.sync_directory(self.directory)
        self._delete(step, "replaced")

    def tidy(self) -> None:
        """Finish what a process that was killed had begun, and delete what cannot be finished."""
        for step in self.all("saving"):
            if self.is_whole(step, "saving", contents=True):
                self._delete(step, "replaced")
                self.commit(step)
            else:
                self._delete(step, "saving")
        for step in self.all("replaced"):
            if not self.of(step).exists():
                os.rename(self.of(step, "replaced"), self.of(step))
            self._delete(step, "replaced")
        for step in self.all("removed"):
            self._delete(step, "removed")

    def thin(self, *, keep: int | None, period: int, latest: int) -> None:
        """Delete the checkpoints that are neither among the newest, nor kept for good, nor the latest written."""
        if keep is None:
            return
        kept = {latest, *self.whole()[-keep:]}
        # What is damaged goes when its time comes, and does not count as kept.
        for step in self.all():
            if step < max(kept) and step not in kept and not (period and step % period == 0):
                os.rename(self.of(step), self.of(step, "removed"))
                self._delete(step, "removed")

    def _delete(self, step: int, state: str) -> None:
        shutil.rmtree(self.of(step, state), ignore_errors=True)
