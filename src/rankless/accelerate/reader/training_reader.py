"""A reader of the folders of Accelerate's ``save_state``, and of checkpoints of transformers' ``Trainer``.

Each object is in a file of its own; models and optimizers under FSDP are folders of ``torch.distributed.checkpoint``.
Optimizers of one process identify parameters by number, as ``Optimizer.state_dict()`` does. ``training_args.bin`` is
not read: it is a pickled object that no load needs.

:mod:`rankless.accelerate.reader.open_folder` makes one on each rank of a load or conversion.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankless.accelerate.reader.folder_parts import (
    CUSTOM,
    GENERATORS,
    LOCAL,
    SCALER,
    SCHEDULER,
    TRAINER_STATE,
    VALUE,
    Parts,
    count_writers,
)
from rankless.accelerate.reader.part_reader import PartReader
from rankless.accelerate.reader.rank_values import CONTENT, build_rank_values
from rankless.deepspeed.reader.deepspeed_reader import DeepSpeedReader
from rankless.errors import CorruptCheckpointError
from rankless.formats.reader import CheckpointValues, UnreadTensorNote
from rankless.formats.recorded_steps import describe_mixed_steps
from rankless.formats.sharded.model_files import MODEL, OPTIMIZER
from rankless.formats.stored_tensor import UnreadTensor
from rankless.formats.tree.tree_contents import from_components
from rankless.formats.tree.tree_reader import TreeReader
from rankless.ondisk.values import ArrayCodec, decode_value

#: The group of the tensors in the values of single ranks, and the key of objects with a state of their own.
_RANKS, _STATEFUL = "ranks", "stateful"

#: Accelerate's automatic name of a folder.
_AUTOMATIC = re.compile(r"checkpoint_(\d{1,9})")

#: Keys of the states of schedulers, such as ``ReduceLROnPlateau``, that take a step at each evaluation.
_COUNTS_EVALUATIONS = {"num_bad_epochs"}


class TrainingReader(TreeReader):
    """A reader of the parts of a folder, without parts of the kinds that are ``elsewhere``: in another reader.

    ``writers`` is how many ranks at least have saved the folder, ``optimizer`` the reader of DeepSpeed's, if that is
    elsewhere. See :class:`rankless.formats.reader.Reader`.
    """

    def __init__(
        self,
        path: Path,
        parts: Parts,
        elsewhere: Collection[str] = (),
        writers: int = 1,
        optimizer: DeepSpeedReader | None = None,
    ) -> None:
        kinds = [kind for kind in (MODEL, OPTIMIZER, SCHEDULER) if kind not in elsewhere]
        notes = list(_note_local_shards(parts, kinds))
        self._parts = PartReader(path)
        slots = self._read_slots({kind: parts[kind] for kind in kinds if kind in parts})
        unsafe = {slot: tree for slot, tree in slots.items() if isinstance(tree, UnreadTensor)}
        trees = {rank: self._parts.read_file(file) for rank, file in parts.get(GENERATORS, {}).items()}
        rank_values = build_rank_values(parts.get(GENERATORS, {}), trees, max(writers, count_writers(parts)))
        opened, values = self._parts.opened, self._read_values(path, parts, trees)
        components = {slot: tree for slot, tree in slots.items() if slot not in unsafe}
        contents = from_components(components, values, opened.budget, str(path))
        notes += [
            UnreadTensorNote(slot, slot, tree.why, is_value=slot.startswith(SCHEDULER), error=tree.error)
            for slot, tree in unsafe.items()
        ]
        contents.unread += notes + rank_values.unread
        if rank_values.tensors:
            contents.groups[_RANKS] = dict(rank_values.tensors)
        self._ranks = rank_values.ranks
        self._recorded_steps = _find_recorded_steps(parts, slots, values) if TRAINER_STATE in parts else {}
        self._optimizer, self._may_skip = optimizer, SCALER in parts
        kind = "trainer" if TRAINER_STATE in parts else "accelerate"
        super().__init__(path, kind, opened.paths, opened.fingerprint, contents)

    def _read_slots(self, parts: Parts) -> dict[str, Any]:
        """Return models, optimizers and schedulers by slot: ``model``, or ``model/0`` if there are several."""
        return {
            kind if len(parts[kind]) == 1 else f"{kind}/{number}": self._parts.read_object(kind, file)
            for kind in parts
            for number, file in sorted(parts[kind].items())
        }

    def _read_values(self, path: Path, parts: Parts, generators: Mapping[int, Any]) -> dict[str, Any]:
        """Return the values in the form that rankless's own ``Accelerator`` and ``Trainer`` save."""
        read_file = self._parts.read_file
        stateful = {f"custom_{number}": read_file(file) for number, file in sorted(parts.get(CUSTOM, {}).items())}
        if SCALER in parts:
            stateful[SCALER] = read_file(parts[SCALER][0])
        content = {file.stem: read_file(file) for file in parts.get(VALUE, {}).values()}
        if TRAINER_STATE in parts:
            content[TRAINER_STATE] = self._read_trainer_state(parts[TRAINER_STATE][0])
        first = generators.get(0)
        if isinstance(first, dict) and type(step := first.get("step")) is int:
            name = _AUTOMATIC.fullmatch(path.name)
            content["accelerate"] = {"step": step, **({"iteration": int(name[1])} if name else {})}
        return {key: table for key, table in ((_STATEFUL, stateful), (CONTENT, content)) if table}

    def _read_trainer_state(self, file: Path) -> dict[str, Any]:
        state = self._parts.read_json(file)
        if not isinstance(state, dict):
            raise CorruptCheckpointError(f"{file} must contain the state of the Trainer, not a {type(state).__name__}")
        return state

    def describe_doubts(self) -> Sequence[str]:
        """Return whether the optimizer is of another step than the scheduler and the ``Trainer``.

        Schedulers of Accelerate count the steps of all processes, or epochs, so nothing follows from theirs.
        """
        if self._optimizer is not None:
            return self._optimizer.compare_steps(self._recorded_steps)
        groups = sorted(group for group in self.groups if group.partition("/")[0] == OPTIMIZER) or [OPTIMIZER]
        recorded = self._recorded_steps if len(groups) == 1 else {}
        doubts = (describe_mixed_steps(self, group, recorded, may_skip=self._may_skip) for group in groups)
        return [doubt for of_group in doubts for doubt in of_group]

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """Return the values of all ranks, and the states of the generators of ``rank``."""
        shared = super().read_values(rank, shared_codec, rank_codec).shared
        is_there = rank < len(self._ranks)
        rank_values = decode_value(self._ranks[rank], rank_codec, str(self.path)) if is_there else None
        return CheckpointValues(shared, rank_values, len(self._ranks), self._ranks)


def _find_recorded_steps(parts: Parts, slots: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, int]:
    """Return the steps that the ``Trainer`` and its scheduler have counted, by the names of their files."""
    steps = {}
    scheduler = slots.get(SCHEDULER)
    if isinstance(scheduler, dict) and not scheduler.keys() & _COUNTS_EVALUATIONS:
        steps[parts[SCHEDULER][0].name] = scheduler.get("last_epoch")
    steps[parts[TRAINER_STATE][0].name] = values[CONTENT][TRAINER_STATE].get("global_step")
    return {name: step for name, step in steps.items() if type(step) is int}


def _note_local_shards(parts: Parts, kinds: Collection[str]) -> Iterator[UnreadTensorNote]:
    """Yield notes about a model and an optimizer that are only in files of single ranks."""
    if LOCAL in parts:
        why = (
            f"is in files of single ranks such as {parts[LOCAL][0].name}, which do not say where their shards belong: "
            "save with the state dict type SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
        missing = [kind for kind in kinds if kind not in {*parts, SCHEDULER}]
        yield from (UnreadTensorNote(kind, kind, why) for kind in missing)
