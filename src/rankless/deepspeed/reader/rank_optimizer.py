"""Parsing the file of a rank's optimizer: its flat tensors, and the settings of its groups.

Source: ``state_dict`` in ``runtime/zero/stage_1_and_2.py`` and ``runtime/bf16_optimizer.py``, ``_rigid_state_dict`` in
``runtime/zero/stage3.py``.

:mod:`rankless.deepspeed.reader.pipeline_stages` calls it on each rank that opens a checkpoint with an optimizer. The
keys are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.stored_tensor import StoredTensor

#: The keys of the fp32 master weights in ZeRO-1 and 2, and in ZeRO-3; and of the state of the inner optimizer in these.
_FLAT, _SUB_GROUPS = "single_partition_of_fp32_groups", "fp32_flat_groups"
_INNER = {_FLAT: "base_optimizer_state", _SUB_GROUPS: "optimizer_state_dict"}

#: The key of the number of steps in elastic checkpoints, and the name of that state.
_ELASTIC_STEP, STEP = "base_optimizer_state_step", "step"

#: Buffers of 1-bit optimizers for the errors of their communication: other ranks cannot use them.
_ERROR_FEEDBACK = frozenset({"worker_error", "server_error"})

#: Keys with values that all ranks share.
_SHARED = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


@dataclass(frozen=True)
class RankOptimizer:
    """The optimizer of a rank.

    It has a flat tensor for each group, or for each sub-group of ZeRO-3.

    Attributes:
        path: The file.
        is_stage3: True for ZeRO-3.
        masters: The master weights of each group or sub-group.
        states: The states of each group or sub-group, by name.
        groups: The settings of each group.
        members: The numbers of the sub-groups of each group. Without ZeRO-3 each has one.
        partition_counts: The number of ranks that share each group or sub-group.
        paddings: The elements of padding after each parameter, by group; empty if there is none.
        tail_paddings: The elements of padding at the end of this rank's part of each group; empty if unknown.
        values: Values that are not per group, such as the loss scaler.
    """

    path: Path
    is_stage3: bool
    masters: Sequence[StoredTensor]
    states: Sequence[Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    members: Sequence[Sequence[int]]
    partition_counts: Sequence[int]
    paddings: Sequence[Sequence[int]]
    tail_paddings: Sequence[int]
    values: Mapping[str, Any]


def parse_optimizer_file(root: Mapping[Any, Any], path: Path) -> RankOptimizer:
    """Parse the tree of a rank's file.

    Raises ``FormatError`` if it has a form that rankless does not read, ``CorruptCheckpointError`` if it is invalid.
    """
    state = root.get("optimizer_state_dict")
    key = next((key for key in _INNER if isinstance(state, dict) and key in state), None)
    if key is None or not isinstance(state, dict):
        raise FormatError(
            f"{path} has neither {_FLAT} nor {_SUB_GROUPS}: it was written by DeepSpeed "
            f"{str(root.get('ds_version'))[:20]} with an optimizer or a checkpoint engine that rankless does not read. "
            "Save with the default engine of DeepSpeed 0.4 or newer"
        )
    return _OptimizerParser(state, key, path).parse()


class _OptimizerParser:
    """A parser of one rank's state. The master weights are in it under ``key``."""

    def __init__(self, state: Mapping[str, Any], key: str, path: Path) -> None:
        self._state, self._key, self._path = state, key, path
        self._masters = self._list_masters()

    def parse(self) -> RankOptimizer:
        if "ds_zero_partition_groups" in self._state:
            raise FormatError(
                f"{self._path} divides experts among other ranks than the rest (AutoEP), which rankless reads neither "
                "here nor in universal checkpoints: train without AutoEP, or save the weights in DeepSpeed"
            )
        inner = self._state.get(_INNER[self._key])
        groups, members, states = self._parse_elastic(inner) if isinstance(inner, list) else self._parse_rigid(inner)
        return RankOptimizer(
            self._path,
            self._key == _SUB_GROUPS,
            self._masters,
            states,
            groups,
            members,
            self._list_partition_counts(),
            self._list_integers("param_alignment_paddings", nested=True),
            self._list_integers("group_paddings"),
            {key: self._state[key] for key in _SHARED if self._state.get(key) is not None},
        )

    def _corrupt(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._path}: {why}")

    def _list_masters(self) -> list[StoredTensor]:
        masters = self._state[self._key]
        if not isinstance(masters, list):
            raise self._corrupt(f"{self._key} must be a list of tensors")
        for number, tensor in enumerate(masters):
            if not isinstance(tensor, StoredTensor):
                raise FormatError(f"{self._path}: {self._key} of group {number} is no tensor that can be read")
            if len(tensor.info.shape) != 1:
                raise self._corrupt(f"{self._key} of group {number} must have one dimension, not {tensor.info.shape}")
        return masters

    def _parse_elastic(self, inner: list[Any]) -> tuple[Any, Any, Any]:
        """Return the groups, their members and the states of an elastic checkpoint, which has no settings of groups."""
        if self._key != _FLAT or len(inner) != len(self._masters):
            raise self._corrupt(f"{_INNER[self._key]} has {len(inner)} entries for {len(self._masters)} groups")
        step = self._state.get(_ELASTIC_STEP)
        states = [self._clean_states(states, step) for states in inner]
        return [{}] * len(inner), [[number] for number in range(len(inner))], states

    def _parse_rigid(self, inner: Any) -> tuple[Any, Any, Any]:
        """Return the groups, their members and the states of the inner optimizer's state dict."""
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        states = inner.get("state") if isinstance(inner, dict) else None
        if not isinstance(groups, list) or not isinstance(states, dict):
            raise self._corrupt(f"{_INNER[self._key]} is not the state of an optimizer")
        if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
            raise self._corrupt("a group of the optimizer does not list its parameters")
        members = [group["params"] for group in groups]
        if [number for numbers in members for number in numbers] != list(range(len(self._masters))):
            raise self._corrupt(f"the groups of the optimizer are not those of its {len(self._masters)} flat tensors")
        parsed: list[Mapping[str, Any]] = []
        for group in groups:
            parsed += [self._clean_states(states.get(number, {}), group.get(STEP)) for number in group["params"]]
        settings = [{key: value for key, value in group.items() if key not in {"params", STEP}} for group in groups]
        return settings, members, parsed

    def _clean_states(self, states: Any, group_step: Any) -> dict[str, Any]:
        """Return the states of one flat tensor. Some optimizers count steps in the group only."""
        if not isinstance(states, dict):
            raise self._corrupt("the states of a flat tensor must be a dict")
        cleaned = {str(name): value for name, value in states.items() if name not in _ERROR_FEEDBACK}
        if len(cleaned) + sum(name in _ERROR_FEEDBACK for name in states) != len(states):
            raise self._corrupt("two states of a flat tensor have the same name")
        if cleaned and STEP not in cleaned and group_step is not None:
            cleaned[STEP] = group_step
        return cleaned

    def _list_partition_counts(self) -> list[int]:
        counts = self._state.get("partition_count")
        if type(counts) is int:
            counts = [counts] * len(self._masters)
        if not isinstance(counts, list) or not all(type(count) is int and count > 0 for count in counts):
            raise self._corrupt("partition_count must say how many ranks share each group")
        if len(counts) != len(self._masters):
            raise self._corrupt(f"partition_count has {len(counts)} entries for {len(self._masters)} groups")
        return counts

    def _list_integers(self, key: str, *, nested: bool = False) -> list[Any]:
        """Return a list of numbers of elements, one for each group; with ``nested`` one for each of its parameters."""
        values = self._state.get(key) or []
        rows = values if nested and isinstance(values, list) else [values]
        if not all(isinstance(row, list) and all(type(n) is int and n >= 0 for n in row) for row in rows):
            raise self._corrupt(f"{key} must be a list of numbers of elements")
        if values and len(values) != len(self._masters):
            raise self._corrupt(f"{key} has {len(values)} entries for {len(self._masters)} groups")
        return list(values)
