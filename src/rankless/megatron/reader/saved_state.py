"""The state of a training in a checkpoint of Megatron, whatever its format: whole tensors of each layer, and values.

The readers of the formats return one, and :class:`~rankless.megatron.reader.megatron_reader.MegatronReader` makes
tensors and values of it, on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankless.formats.chunked_tensor_slices import JoinedTensor
from rankless.formats.stored_tensor import StoredTensor
from rankless.megatron.reader.model_args import ModelArgs
from rankless.ondisk.read_budget import ReadBudget

#: The name of the master weights among the states of a parameter.
MASTER = "master"


@dataclass
class SavedState:
    """The contents of one iteration.

    Attributes:
        path: The folder.
        files: Its files.
        fingerprint: A digest of its metadata.
        budget: The budget that reading it is charged to.
        args: The arguments of the training.
        weights: The tensors of the model, by name.
        states: The states of each parameter by name: ``master``, ``exp_avg`` and so on.
        groups: The settings of the optimizer's groups, as each rank has them.
        group_numbers: The number of each parameter's group in the only list of ``groups``, if the files say it.
        steps: The number of steps of each parameter, if it is not in the groups.
        common_step: The number of steps, if it is not in the groups.
        values: All other values.
        proofs: Parameters that must have their rounded masters as weights, because masters were assigned by content.
        copies: Tensors that several ranks have copies of, by name.
    """

    path: Path
    files: Sequence[Path]
    fingerprint: str
    budget: ReadBudget
    args: ModelArgs
    weights: dict[str, JoinedTensor] = field(default_factory=dict)
    states: dict[str, dict[str, JoinedTensor]] = field(default_factory=dict)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    group_numbers: dict[str, int] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)
    common_step: Any = None
    values: dict[str, Any] = field(default_factory=dict)
    proofs: list[tuple[str, StoredTensor, StoredTensor]] = field(default_factory=list)
    copies: list[tuple[str, Sequence[StoredTensor]]] = field(default_factory=list)

    def add_states(self, states: Mapping[str, Mapping[str, JoinedTensor]]) -> None:
        """Add states of parameters. A parameter may get its states in several calls."""
        for name, by_state in states.items():
            self.states.setdefault(name, {}).update(by_state)
