"""Lightning's ``ModelCheckpoint``. Its ``dirpath`` may be the URL of a run in an object store.

Lightning calls it on every rank. The name of the class must stay: Lightning stores the state of a callback in
checkpoints under a key that begins with it.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint as LightningModelCheckpoint

from rankless.errors import InvalidArgumentError
from rankless.lightning.run_filesystem import RunFileSystem
from rankless.storage.location import RUN_PREFIX, parse_location
from rankless.storage.store import store_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ModelCheckpoint(LightningModelCheckpoint):
    """Lightning's callback. For a folder it is the same; of a URL it needs no further package of Lightning's.

    Args:
        dirpath: A folder, or a URL: ``s3://bucket/run``, ``gs://…``, ``az://…``. The environment has the settings of
            the store. Of a URL, the attribute ``dirpath`` is ``rankless+s3://…`` and so on.
        args: The other positional arguments of Lightning's callback.
        options: The keyword arguments of Lightning's callback.

    Raises:
        InvalidArgumentError: ``dirpath`` is a path with settings of its own, which Lightning would lose.
    """

    def __init__(self, dirpath: str | PathLike[str] | None = None, *args: Any, **options: Any) -> None:
        if isinstance(dirpath, Path) and store_of(dirpath).is_remote:
            raise InvalidArgumentError(
                f"pass {dirpath} as a text, {str(dirpath)!r}: Lightning keeps the text alone, so the settings of the "
                "store must be those of the environment"
            )
        if isinstance(dirpath, str) and store_of(parse_location(dirpath)).is_remote:
            dirpath = RUN_PREFIX + dirpath.removeprefix(RUN_PREFIX)
        super().__init__(dirpath if dirpath is None else str(dirpath), *args, **options)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Return the URLs of the checkpoints that ``ckpt_path="last"`` chooses from.

        Lightning's connector calls this private method, so its name and arguments must be Lightning's.
        """
        if not isinstance(self._fs, RunFileSystem):
            return super()._find_last_checkpoints(trainer)
        last = re.compile(rf"{re.escape(self.CHECKPOINT_NAME_LAST)}(-\d+)?")
        names = [Path(name) for name in self._fs.ls(str(self.dirpath), detail=False)]
        return {
            f"{self.dirpath}/{name.name}"
            for name in names
            if name.suffix == self.FILE_EXTENSION and last.match(name.stem)
        }
