"""The contents of a tag's folder: the model, the optimizer, the scheduler and other values of whole parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import CorruptCheckpointError, FormatError, InvalidArgumentError
from holdfast.formats.deepspeed.file_access import FileAccess
from holdfast.formats.deepspeed.file_names import OFFLOADED, UNIVERSAL, TagFiles, list_tag_files
from holdfast.formats.deepspeed.join_optimizer import JoinedOptimizer
from holdfast.formats.deepspeed.model_file import ModelFile
from holdfast.formats.deepspeed.pickled_classes import plain_attributes
from holdfast.formats.deepspeed.pipeline import Layers, name_layers, name_numbered_parameters, read_layers
from holdfast.formats.deepspeed.proof import Evidence
from holdfast.formats.deepspeed.stages import StageFiles, join_stage_optimizer, read_stage
from holdfast.formats.deepspeed.universal import read_universal
from holdfast.formats.deepspeed.whole_model import WholeModel, join_divided_model, join_model
from holdfast.formats.deepspeed.without_zero import is_wrapped, name_wrapped
from holdfast.storage.store import store_of

#: The state of DeepSpeed's own schedulers, which torch's cannot load.
_COUNTER = frozenset({"last_batch_iteration"})

#: The key of the list of schedulers that Lightning puts into the client state.
_LIGHTNING_SCHEDULERS = "lr_schedulers"


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading: whether the model gets the master weights, and whether the optimizer is read."""

    use_masters: bool = True
    with_optimizer: bool = True


@dataclass
class FolderContents:
    """The contents of a folder.

    Attributes:
        components: The components by slot: ``model``, ``optimizer`` and ``scheduler``.
        user_content: The counters of DeepSpeed, the loss scaler and the client state.
        evidence: Tensors that must fit each other.
    """

    components: dict[str, Any]
    user_content: dict[str, Any]
    evidence: Evidence = field(default_factory=Evidence)


def read_contents(folder: Path, access: FileAccess, options: ReadOptions) -> FolderContents:
    """Read the files in a tag's folder. Tensors are read when they are needed.

    Raises ``FormatError`` if the folder has a form that holdfast does not read, ``CorruptCheckpointError`` naming a
    file that is missing or does not fit the others.
    """
    return _FolderReader(folder, access, options).read()


class _FolderReader:
    def __init__(self, folder: Path, access: FileAccess, options: ReadOptions) -> None:
        self._files, self._access, self._options = list_tag_files(folder), access, options
        self._model, self._optimizer = WholeModel(), JoinedOptimizer()
        self._evidence = Evidence()
        self._numbered: list[Any] = []
        self._layers: Layers = {}

    def read(self) -> FolderContents:
        self._check_layout()
        self._layers = read_layers(self._files, self._access)
        experts = self._read_experts()
        stages = [
            read_stage(mp, self._files, self._access, with_optimizer=self._options.with_optimizer)
            for mp in self._files.mp_ranks
        ]
        for stage in stages:
            self._add_stage(stage, self._module_of(stage, stages, experts))
        self._evidence.replicas += self._optimizer.replicas
        return FolderContents(self._list_components(stages), self._list_values(stages[0].first), self._evidence)

    def _check_layout(self) -> None:
        files, folder = self._files, self._files.folder
        if store_of(folder).is_directory(folder / OFFLOADED) and self._options.with_optimizer:
            raise FormatError(
                f"{folder / OFFLOADED} has the swap files of an optimizer that was offloaded to NVMe, which holdfast does "
                "not read: save without offload_optimizer to nvme"
            )
        if not files.models:
            raise CorruptCheckpointError(
                f"{folder} has files of an optimizer, but no file of a model: the save did not finish"
            )
        ranks = files.mp_ranks
        if ranks != list(range(len(ranks))):
            raise CorruptCheckpointError(
                f"{folder} has the files of the model-parallel ranks {ranks[:8]}: others are missing"
            )
        if len(ranks) > 1 and not files.layers:
            raise FormatError(
                f"{folder} is divided among {len(ranks)} tensor-parallel ranks, which holdfast does not read: convert it "
                "with ds_to_universal, and read its zero folder, or save with tensor parallelism 1"
            )
        if files.expert_optimizers and not files.optimizers and self._options.with_optimizer:
            raise FormatError(
                f"{files.expert_optimizers[0]} has the optimizer of experts without ZeRO, which holdfast does not read: "
                "save with ZeRO-1, or read the model with --key optimizer=skip (keys={'optimizer': 'skip'})"
            )

    def _read_experts(self) -> dict[str, Any]:
        """Return the tensors in the files of experts."""
        experts: dict[str, Any] = {}
        for path in self._files.experts.values():
            experts |= self._access.read_dict(path)
        return experts

    def _module_of(
        self, stage: StageFiles, stages: list[StageFiles], experts: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the state dict of the whole model."""
        if not self._layers:
            return {**stage.first.module, **experts}
        shapes = [shapes for other in stages for shapes in other.shapes]
        return name_layers(self._layers, shapes, str(self._files.folder))

    def _add_stage(self, stage: StageFiles, module: Mapping[str, Any]) -> None:
        optimizer = self._read_optimizer(stage, module)
        if stage.is_divided:
            self._check_master_key(stage)
            model = join_divided_model(stage.models, optimizer.masters, self._access.budget)
        else:
            model = join_model(module, stage.first, optimizer.masters, use_masters=self._options.use_masters)
        self._evidence.add_masters(optimizer.masters, model.copies)
        self._model.merge_stage(model)
        self._optimizer.merge_stage(optimizer, str(stage.first.path))

    def _read_optimizer(self, stage: StageFiles, module: Mapping[str, Any]) -> JoinedOptimizer:
        if not self._options.with_optimizer:
            return JoinedOptimizer()
        folder = self._files.folder
        if stage.optimizers:
            return join_stage_optimizer(stage, self._access)
        if stage.first.shapes is not None:
            if store_of(folder).is_directory(folder / UNIVERSAL):
                return read_universal(folder / UNIVERSAL, stage.shapes, self._access)
            raise CorruptCheckpointError(
                f"{folder} has no files of the optimizer: the save did not finish, or they were removed. To read the "
                "model's weights of ZeRO-1 or 2: --key weights=model --key optimizer=skip"
            )
        if is_wrapped(stage.first.optimizer):
            return name_wrapped(stage.first.optimizer, module, str(stage.first.path))
        if stage.first.optimizer is not None:
            self._numbered.append(stage.first.optimizer)
        return JoinedOptimizer()

    def _check_master_key(self, stage: StageFiles) -> None:
        if not self._options.use_masters or not self._options.with_optimizer:
            raise InvalidArgumentError(
                f"keys: {stage.first.path} is of ZeRO-3, which saves weights as master weights only: leave out weights "
                "and optimizer, and cast the model (cast_dtype=True, or --dtype of holdfast convert)"
            )

    def _list_components(self, stages: list[StageFiles]) -> dict[str, Any]:
        """Return the components that the files have."""
        components: dict[str, Any] = {"model": self._model.tensors}
        if self._optimizer.groups:
            states = {name: states for name, states in self._optimizer.states.items() if states}
            components["optimizer"] = {"state": states, "param_groups": self._optimizer.groups}
        elif self._numbered:
            components["optimizer"] = self._name_numbered(stages)
        scheduler = _scheduler_of(stages[0].first)
        if scheduler:
            components["scheduler"] = scheduler
        return components

    def _name_numbered(self, stages: list[StageFiles]) -> Any:
        """Return the optimizers without ZeRO. Those of the stages of a pipeline are joined by the order of layers."""
        if not self._layers:
            return self._numbered[0]
        source = str(self._files.folder)
        counts = [sum(len(group["params"]) for group in optimizer["param_groups"]) for optimizer in self._numbered]
        buffers = [name for stage in stages for name in stage.first.buffers]
        joined = JoinedOptimizer()
        for optimizer, names in zip(
            self._numbered, name_numbered_parameters(self._layers, counts, buffers, source), strict=True
        ):
            joined.merge_stage(_name_stage(optimizer, names, self._model.tensors, source), source)
        return {"state": joined.states, "param_groups": joined.groups}

    def _list_values(self, file: ModelFile) -> dict[str, Any]:
        """Return the counters of DeepSpeed, the client state, and what the optimizer has besides its tensors."""
        values = {key: plain_attributes(value) for key, value in self._optimizer.values.items()}
        if isinstance(file.scheduler, dict) and file.scheduler.keys() == _COUNTER:
            values["lr_scheduler"] = file.scheduler
        client = dict(file.values)
        if _scheduler_of(file) is client.get(_LIGHTNING_SCHEDULERS):
            client.pop(_LIGHTNING_SCHEDULERS, None)
        return {**values, **client}


def _scheduler_of(file: ModelFile) -> Any:
    """Return the state of the scheduler, unless it is one of DeepSpeed's own."""
    if file.scheduler is None:
        return file.values.get(_LIGHTNING_SCHEDULERS)
    return None if isinstance(file.scheduler, dict) and file.scheduler.keys() == _COUNTER else file.scheduler


def _name_stage(
    optimizer: Mapping[str, Any], names: list[str], tensors: Mapping[str, Any], source: str
) -> JoinedOptimizer:
    """Return the optimizer of a stage by name. Raises ``FormatError`` if the names do not fit its states."""
    if len(optimizer["param_groups"]) != 1:
        raise FormatError(
            f"{source}: the optimizer has several groups without names, so it is unknown which layers are in which: use "
            "--key optimizer=skip (keys={'optimizer': 'skip'}), or save with ZeRO-1"
        )
    (group,) = optimizer["param_groups"]
    joined = JoinedOptimizer(groups=[{**group, "params": names}])
    for name, number in zip(names, group["params"], strict=True):
        states = optimizer["state"].get(number, {})
        shape = tensors[name].info.shape
        if any(getattr(value, "info", None) and value.info.shape not in {shape, ()} for value in states.values()):
            raise FormatError(
                f"{source}: the states of parameter {number} have another shape than {name!r:.100}: the optimizer does "
                "not train all parameters in the order of the layers. Use --key optimizer=skip"
            )
        joined.states[name] = dict(states)
    return joined
