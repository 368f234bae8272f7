"""The final path of a component: a file, or a folder. All other files in the folder are kept.

:mod:`rankless.components.component_calls`, :mod:`rankless.components.scheduler_file` and ColossalAI's booster make one
on each rank. Ranks compare its path in the first vote.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankless.errors import InvalidArgumentError
from rankless.run.run_store import run_store_of
from rankless.storage.store import store_of


@dataclass(frozen=True)
class Destination:
    """The final path of a component. If ``folder`` is true, it is a directory, otherwise a file.

    ``keeps_others``: files in the directory that do not belong to the component are kept. All fields must be equal on
    all ranks.
    """

    path: Path
    folder: bool
    keeps_others: bool = True

    @classmethod
    def for_path(cls, path: Path, *, folder: bool) -> Destination:
        """Return the destination for a path. Of a symbolic link to a folder, the folder is replaced, not the link."""
        try:
            return cls(path.resolve() if folder else path, folder)
        except RuntimeError as error:  # Python 3.13 raises nothing, and the path cannot be inspected then
            raise InvalidArgumentError(f"{path} is in a loop of links: choose another path") from error

    def check_replaceable(self) -> None:
        """Raise ``InvalidArgumentError`` if the path exists and is of the other kind, or cannot be replaced.

        Rank 0 calls it in the vote "looking at what to save"; for a scheduler, each rank in the vote "saving the
        scheduler".
        """
        run_store_of(self.path.parent).check_output_name(self.path.name)
        store = store_of(self.path)
        if self.folder and store.is_file(self.path):
            raise InvalidArgumentError(f"{self.path} is a file, but this save writes a folder: choose another path")
        if not self.folder and (store.is_bucket(self.path) or store.is_directory(self.path)):
            raise InvalidArgumentError(
                f"{self.path} is a folder, but shard=False writes one file: pass the path of a file"
            )
        if self.folder and not store.is_remote and Path.cwd().is_relative_to(self.path.resolve()):
            raise InvalidArgumentError(
                f"{self.path} is, or contains, the working directory of this process, which cannot be replaced in one "
                "step: choose another folder"
            )
