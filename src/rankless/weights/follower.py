"""``WeightFollower``: keeps a folder, or a model in any layout, at the newest published version.

All ranks of a model call it. On each host one rank puts the version into a folder of the host, where every block is
proven (:mod:`rankless.weights.host_folders`). Then each rank loads its own bytes from there. So nothing of the model
changes before the version is proven.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from rankless.components.component_calls import load_model
from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.process_group_argument import ProcessGroupArgument
from rankless.errors import InvalidArgumentError, MismatchError
from rankless.storage.closing import ClosingMixin
from rankless.storage.location import parse_location
from rankless.weights.host_folders import HostFolders
from rankless.weights.publication import WeightVersion


class WeightFollower(ClosingMixin):
    """Follows the versions that a :class:`rankless.WeightPublisher` publishes.

    ```python
    follower = rankless.WeightFollower("weights", into=model)
    while True:  # on every rank of the model
        version = follower.update()
        if version is None:
            time.sleep(1)
        else:
            evaluate(model, step=version.step)
    ```

    An update takes the cheapest way from the version that it has: over deltas, over a level, which is a delta over
    several versions, or from an anchor. Every block is proven by the CRCs of the version before anything becomes
    visible. A follower never goes back to a lower number.

    Args:
        path: The weights directory, or its URL in an object store. It need not exist yet.
        into: A folder on this host, or a model. A folder gets the link ``current``, which leads to a folder with whole
            files of the newest version; the version before stays for readers that have it open. A model is a module in
            any layout, a state dict, or a list of the modules of one model; floating tensors are cast to its dtypes.
        strict: As in :func:`rankless.load_model`, for a model.
        folder: For a model, the folder of each host for putting versions together. By default it is in memory, in
            ``/dev/shm``, and is removed by :meth:`close`. It takes the size of one model, and of two during an update.
        process_group: The ranks that follow together; ``"self"`` is this process alone.
        timeout: How many seconds ranks wait for each other before all of them fail.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        into: Any,
        *,
        strict: bool = True,
        folder: str | PathLike[str] | None = None,
        process_group: ProcessGroupArgument = None,
        timeout: float = 600.0,
    ) -> None:
        with collective_call(process_group, timeout):
            self._path, self._group, self._timeout = parse_location(path), process_group, timeout
            is_folder = isinstance(into, str | PathLike)
            if into is None:
                raise InvalidArgumentError("into must be a folder or a model; got None")
            self._model, self._strict = None if is_folder else into, strict
            place = into if is_folder else folder
            #: The version that the folder or model has; ``None`` if it has none, or a load has failed on the way.
            self._version: WeightVersion | None = None
            self._folders = HostFolders(
                self._path,
                None if place is None else parse_location(place),
                process_group,
                timeout,
                is_single=is_folder,
            )

    @property
    def version(self) -> WeightVersion | None:
        """The version that this follower has put into the folder or model; ``None`` before the first one."""
        return self._version

    @property
    def folder(self) -> Path | None:
        """The folder of this host for putting versions together, as soon as there is one."""
        return self._folders.place

    @property
    def read_bytes(self) -> int:
        """The bytes of parts or files that the last update has read in this process from the weights directory."""
        return 0 if self._folders.followed is None else self._folders.followed.route.nbytes

    @property
    def verified_bytes(self) -> int:
        """The bytes that the last update has proven in this process: all of the model's files."""
        return 0 if self._folders.followed is None else self._folders.followed.verified_bytes

    def update(self) -> WeightVersion | None:
        """Go to the newest version. Every rank calls it.

        Returns:
            The version, or ``None`` if there is no newer one.

        Raises:
            CorruptCheckpointError: No way leads to the bytes of the version. The folder or model keeps its version.
            NoCheckpointError: Versions that the newest one is based on were removed. The same holds.
            StorageError: The directory or the folder cannot be read or written. The same holds.
            MismatchError: The model has other tensors than the version. Nothing was changed.
            StateError: The follower is closed or of the parent process, another one has the folder, or the weights
                directory was made anew.
            InvalidArgumentError: The folder has something at ``current`` that no follower has made, or has published
                weights; the path is a file, or has checkpoints and no versions.

        Warns:
            UserWarning: There is no version yet. Once, on rank 0.
        """
        with collective_call(self._group, self._timeout):
            folder = self._folders.go_to_newest(0 if self._version is None else self._version.number)
            manifest = self._folders.manifest
            if folder is None or manifest is None:
                return None
            version = WeightVersion.of(self._path, manifest)
            if self._model is not None:
                self._load(folder, version)
            self._version = version
            return version

    def _load(self, folder: Path, version: WeightVersion) -> None:
        """Load a version into the model. If its tensors do not fit, nothing has changed.

        After another error the next update proves the folder again: it may be the reason.
        """
        before, self._version = self._version, None
        try:
            load_model(self._model, folder, strict=self._strict, process_group=self._group, timeout=self._timeout)
        except MismatchError as error:
            self._version = before
            raise MismatchError(f"version {version.number} of {self._path} does not fit the model: {error}") from error
        except BaseException:
            self._folders.doubt()
            raise

    def close(self) -> None:
        """Release the folder: another follower may have it. A folder in memory that this has made is removed."""
        self._folders.close()
