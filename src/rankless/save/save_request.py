"""The arguments of a save, and their checks.

:class:`~rankless.run_directory.RunDirectory` makes one on each rank; the vote "looking at what to save" compares,
checks and asks it. An argument that the files or the votes depend on must be in :meth:`SaveRequest.describe_call`, or
in :meth:`SaveRequest.packing_key` if the plan depends on it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rankless.engine.comm.call_check import CallDescription
from rankless.errors import InvalidArgumentError, TagExistsError
from rankless.formats.native import is_native
from rankless.observe.events import OnEvent, ignore_event
from rankless.ondisk import manifest
from rankless.ondisk.data_files import parse_size
from rankless.ondisk.validation import check_number, check_tag
from rankless.ondisk.values import RANKS_FILE, SHARED_FILE
from rankless.options import SaveOptions
from rankless.run.catalog import cached_checkpoints
from rankless.run.claims import JobHistory, check_not_superseded
from rankless.run.corruption import CorruptRecord, find_corrupt
from rankless.run.ownership import checkpoint_of
from rankless.run.retention import Retention
from rankless.run.run_store import run_store_of
from rankless.run.stored_history import read_history
from rankless.save.metrics import read_metrics
from rankless.state.training import TrainingObjects
from rankless.storage import posix
from rankless.storage.store import store_of

#: Names of files and folders of a checkpoint, and the most bytes of a file that the caller adds.
_RESERVED_FILES = frozenset({manifest.NAME, SHARED_FILE, RANKS_FILE, "model", "optimizer", "adapter"})
_MAX_FILE_BYTES = 2**26


class SaveRequest(msgspec.Struct, frozen=True):
    """A request to save a training state as the checkpoint ``path/tag``.

    ``options``: as the caller passed them; they are checked together with the other arguments. ``forced``: save even if
    the policy ``keep`` lacks a metric. ``job``: the job's knowledge of the history of the run directory. ``corrupt``:
    checkpoints that the save may take the tags of. ``known_tags``: the names that are taken in the run directory, if
    they are known without reading it. ``local``: the options of the local tier, as text. ``on_event``: the listener of
    this save, which calls the options' listener. ``began``: the start of the call, in ``time.perf_counter`` seconds.
    """

    path: Path
    tag: str
    training: TrainingObjects
    options: SaveOptions
    step: float | None = None
    metrics: Mapping[str, Any] = msgspec.field(default_factory=dict)
    overwrite: bool = False
    keep: Retention | None = None
    async_save: bool = False
    forced: bool = False
    job: JobHistory = msgspec.field(default_factory=JobHistory)
    corrupt: frozenset[CorruptRecord] = frozenset()
    known_tags: frozenset[str] | None = None
    local: str = "none"
    on_event: OnEvent = ignore_event
    began: float = msgspec.field(default_factory=time.perf_counter)

    def describe_call(self) -> CallDescription:
        """Return the arguments that must be equal on all ranks."""
        options = self.options
        background = f"{options.staging}, {options.staging_check} check"
        arguments = {
            "the path": repr(str(self.path)),
            "the tag": repr(self.tag),
            "what is saved": ", ".join(self.training.component_names()) or "nothing",
            "max_shard_size": str(options.max_shard_size),
            "overwrite": str(self.overwrite),
            "rng": str(self.training.rng),
            "state_dict_hooks": str(self.training.state_dict_hooks),
            "what is kept": repr(self.keep),
            "async_save and staging": background if self.async_save else "synchronous",
            "replica_check": repr(options.replica_check),
            "incremental": str(options.incremental),
            "keep_full_every": str(options.keep_full_every),
            "frozen": repr(options.frozen),
            "stats": str(options.stats),
            "the local tier": self.local,
            "files": ", ".join(sorted(map(repr, self.training.files))),
        }
        shared = {"the settings of the data loader": self.training.loader_settings()}
        return CallDescription("save", arguments, shared)

    def check_arguments(self) -> None:
        """Raise ``InvalidArgumentError`` if an argument is invalid.

        Each rank calls it in the vote "looking at what to save".
        """
        check_tag(self.tag)
        self.options.check()
        self.manifest_numbers()
        _check_files(self.training.files)
        if self.keep is not None and not self.forced:
            self.keep.check_requirements(self.step, self.metrics)

    def check_destination(self) -> None:
        """Raise ``TagExistsError`` on rank 0 if the tag is taken, and the save must not replace its checkpoint.

        Raises ``SupersededError`` instead if another job has continued the run.

        Saves, saves into the tier and their drains ask here first. A publication asks again when it takes the tag.
        """
        final = self.path / self.tag
        if not self._is_taken(final) or self.find_corrupt() is not None:
            return
        if not self.overwrite:
            # Another job that has continued the run may have saved this step: another tag would not help.
            check_not_superseded(self.path, read_history(self.path), self.job)
            # In a bucket, or if only the tier has the checkpoint, nothing has this path.
            if not store_of(final).is_remote and posix.path_exists(final) and not is_native(final):
                raise TagExistsError(
                    f"{final} exists already, and is no checkpoint: choose another tag, or move it away"
                )
            raise TagExistsError(
                f"{final} exists already; choose another tag, or pass overwrite=True. If this job has not saved it, "
                "another one uses the same run directory"
            )
        if not store_of(final).is_remote:
            checkpoint_of(self.tag).check(final)
        elif is_native(final):
            raise TagExistsError(f"{final} was copied there, and is not overwritten; choose another tag, or remove it")

    def _is_taken(self, final: Path) -> bool:
        if self.known_tags is not None:  # a save into the tier does not wait for storage, unless the name is taken
            is_taken = self.tag in self.known_tags
        elif store_of(final).is_remote:
            # To overwrite, it must also be known whether the checkpoint was copied there. A whole folder in a run that
            # has no pointer at all gets one before the publication, which refuses the tag then.
            is_taken = self.overwrite or run_store_of(self.path).has_tag(self.tag) or is_native(final)
        else:
            is_taken = posix.path_exists(final)
        return is_taken and not self._is_abandoned(final) and not self._is_interrupted_copy(final)

    def _is_abandoned(self, final: Path) -> bool:
        """Return whether an abandoned checkpoint of this run has the tag: it gets another one when this is saved."""
        if self.overwrite or (self.job.base is None and self.job.claim is None):
            return False
        return any(
            info.status == "complete"
            and info.saved_as == info.tag == final.name
            and self.job.abandons(info, is_current=info.is_current)
            for info in cached_checkpoints(self.path)
        )

    def _is_interrupted_copy(self, final: Path) -> bool:
        """Return whether the publication hides the checkpoint that has the tag."""
        from rankless.run.interrupted_copy import is_interrupted_copy  # noqa: PLC0415 - few saves find their tag taken

        return is_interrupted_copy(final, self.training.files)

    @property
    def replaces(self) -> bool:
        """True on rank 0 if the save may take a tag that is taken: it overwrites, or a load found that one corrupt."""
        return self.overwrite or self.find_corrupt() is not None

    def find_corrupt(self) -> CorruptRecord | None:
        """Return the checkpoint with this tag if it was found corrupt, else ``None``."""
        return find_corrupt(self.corrupt, self.path, self.tag)

    def packing_key(self) -> bytes:
        """Return an encoding of the arguments that determine how tensors are packed into files."""
        return str(parse_size(self.options.max_shard_size)).encode()

    def manifest_numbers(self) -> tuple[int | float | None, dict[str, float | None]]:
        """Return the step and the metrics as the manifest stores them; metrics that are not finite become ``None``.

        Each rank calls it as a check, and rank 0 when it makes the manifest, in the thread of the save.
        """
        step = None if self.step is None else check_number("step", self.step)
        return step, read_metrics(self.metrics)


def _check_files(files: object) -> None:
    """Raise ``InvalidArgumentError`` unless these are small files with names of their own in a checkpoint."""
    if not isinstance(files, Mapping):
        raise InvalidArgumentError(f"files must be a dict of bytes by name; got {type(files).__qualname__}")
    for name, data in files.items():
        check_tag(name)
        if name in _RESERVED_FILES or name.endswith((".safetensors", ".safetensors.index.json")):
            raise InvalidArgumentError(f"files has the name {name!r}, which files of a checkpoint have: choose another")
        if not isinstance(data, bytes) or len(data) > _MAX_FILE_BYTES:
            raise InvalidArgumentError(
                f"files must have at most {_MAX_FILE_BYTES} bytes for each name; {name!r} has "
                f"{len(data) if isinstance(data, bytes) else type(data).__qualname__}"
            )
