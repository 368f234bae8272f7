"""The contents of a tag's folder: the model, the optimizer, the scheduler and other values of whole parameters.

:class:`~rankless.deepspeed.reader.deepspeed_reader.DeepSpeedReader` calls it on each rank that opens a checkpoint.
Files of two saves must not be mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankless.deepspeed.reader.autotp_join import RankJoiner
from rankless.deepspeed.reader.autotp_shard_map import UNIVERSAL_INFO, parse_shard_maps
from rankless.deepspeed.reader.deepspeed_file_names import OFFLOADED, UNIVERSAL, list_tag_files
from rankless.deepspeed.reader.file_access import FileAccess
from rankless.deepspeed.reader.joined_optimizer import JoinedOptimizer
from rankless.deepspeed.reader.master_weight_proof import Evidence
from rankless.deepspeed.reader.model_file import DeepSpeedModelFile
from rankless.deepspeed.reader.numbered_optimizers import name_stages
from rankless.deepspeed.reader.pickled_classes import plain_attributes
from rankless.deepspeed.reader.pipeline_layers import Layers, find_shared_names, name_layers, read_layers
from rankless.deepspeed.reader.pipeline_stages import StageFiles, join_stage_optimizer, read_stage
from rankless.deepspeed.reader.universal import read_universal
from rankless.deepspeed.reader.whole_model import WholeModel, join_divided_model, join_model
from rankless.deepspeed.reader.wrapped_optimizers import is_wrapped, name_wrapped
from rankless.errors import CorruptCheckpointError, FormatError, InvalidArgumentError
from rankless.storage.store import store_of

#: The key of the scheduler in the files, and the state of DeepSpeed's own schedulers, which torch's cannot load.
_SCHEDULER, _COUNTER = "lr_scheduler", frozenset({"last_batch_iteration"})

#: The key of the list of schedulers that Lightning puts into the client state.
_LIGHTNING_SCHEDULERS = "lr_schedulers"

#: The key of the number of tensor-parallel ranks.
MODEL_PARALLEL = "mp_world_size"


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
        other_files: Files of the checkpoint that were not read, because the first rank's has all that they have.
        is_proven: Whether the files have weights of the model that prove where the master weights belong.
    """

    components: dict[str, Any]
    user_content: dict[str, Any]
    evidence: Evidence = field(default_factory=Evidence)
    other_files: list[Path] = field(default_factory=list)
    is_proven: bool = True


def read_contents(folder: Path, access: FileAccess, options: ReadOptions) -> FolderContents:
    """Read the files in a tag's folder. Tensors are read when they are needed.

    Raises ``FormatError`` if the folder has a form that rankless does not read, ``CorruptCheckpointError`` naming a
    file that is missing or does not fit the others.
    """
    return _FolderReader(folder, access, options).read()


class _FolderReader:
    def __init__(self, folder: Path, access: FileAccess, options: ReadOptions) -> None:
        self._files, self._access, self._options = list_tag_files(folder), access, options
        self._optimizer = JoinedOptimizer()
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
        self._check_number(stages)
        if len(stages) > 1 and not self._layers:
            module = self._join_ranks(stages)
        else:
            module = name_layers(self._layers) if self._layers else {**stages[0].first.module, **experts}
            for stage in stages:
                self._optimizer.merge_stage(self._read_optimizer(stage, module), str(stage.first.path))
        model = self._join_model(stages[0], self._name_shared(stages, module))
        evidence = Evidence(replicas=self._optimizer.replicas)
        evidence.add_masters(self._optimizer.masters, model.copies)
        content = _user_content_of(stages[0].first, self._optimizer.values)
        if len(stages) > 1:
            content.pop(UNIVERSAL_INFO, None)  # it describes the parts of ranks
        others = [path for stage in stages for path in stage.others]
        is_proven = bool(evidence.masters) or not self._optimizer.masters
        return FolderContents(self._list_components(stages, model), content, evidence, others, is_proven)

    def _check_layout(self) -> None:
        files, folder = self._files, self._files.folder
        if store_of(folder).is_directory(folder / OFFLOADED) and self._options.with_optimizer:
            raise FormatError(
                f"{folder / OFFLOADED} has the swap files of an optimizer that was offloaded to NVMe, which rankless "
                "does not read: save without offload_optimizer to nvme"
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
        alone = next((path for rank, path in files.optimizers.items() if rank.mp not in ranks), None)
        if alone is not None:
            raise CorruptCheckpointError(
                f"{alone} has the optimizer of a model-parallel rank without a file of its model: the save did not "
                "finish, or files were removed"
            )
        if files.expert_optimizers and not files.optimizers and self._options.with_optimizer:
            raise FormatError(
                f"{files.expert_optimizers[0]} has the optimizer of experts without ZeRO, which rankless does not "
                "read: save with ZeRO-1, or read the model with --key optimizer=skip (keys={'optimizer': 'skip'})"
            )

    def _check_number(self, stages: list[StageFiles]) -> None:
        """Check that no model-parallel rank is missing. The size that is stored may leave out stages of a pipeline."""
        size, ranks = stages[0].first.values.get(MODEL_PARALLEL), len(stages)
        if type(size) is int and (size > ranks or (size < ranks and not self._layers)):
            raise CorruptCheckpointError(
                f"{self._files.folder} has the files of {ranks} of {size} model-parallel ranks: the save did not "
                "finish, or files were removed or left from an earlier save"
            )

    def _join_ranks(self, stages: list[StageFiles]) -> dict[str, Any]:
        """Join the parts of tensor-parallel ranks. Return the model's state dict."""
        files, folder = [stage.first for stage in stages], self._files.folder
        if not any(file.module for file in files):
            raise CorruptCheckpointError(
                f"{folder} has the files of {len(stages)} stages of a pipeline, and none of their layers: copy "
                "layer_*-model_states.pt from the original checkpoint, which ds_to_universal does not"
            )
        if self._files.experts or stages[0].is_divided or store_of(folder).is_directory(folder / UNIVERSAL):
            raise FormatError(
                f"{folder} is divided among {len(stages)} tensor-parallel ranks, which rankless does not read with "
                "ZeRO-3, experts or in universal checkpoints: open the checkpoint of ZeRO-1 or 2 from which a "
                "universal one was converted, or save with tensor parallelism 1"
            )
        info = files[0].values.get(UNIVERSAL_INFO)
        maps = parse_shard_maps(info, files[0].module, len(files), files[0].path, self._access.budget)
        joiner = RankJoiner(maps, [file.path for file in files], self._access.budget)
        module = joiner.join_module([file.module for file in files], files[0].buffers)
        optimizers = [self._read_optimizer(stage, stage.first.module) for stage in stages]
        if self._numbered:
            raise FormatError(
                f"{files[0].path} has an optimizer without names of tensor-parallel ranks, which rankless does not "
                "read: save with ZeRO-1, or read the model with --key optimizer=skip (keys={'optimizer': 'skip'})"
            )
        self._optimizer = joiner.join_optimizers(optimizers)
        return module

    def _read_experts(self) -> dict[str, Any]:
        """Return the tensors in the files of experts."""
        experts: dict[str, Any] = {}
        for path in self._files.experts.values():
            experts |= self._access.read_dict(path)
        return experts

    def _name_shared(self, stages: list[StageFiles], module: Mapping[str, Any]) -> Mapping[str, Any]:
        """Name the parameters of layers that several stages share by their layers. The model has both names."""
        shapes = [shapes for stage in stages for shapes in stage.shapes]
        names = find_shared_names(self._layers, shapes, str(self._files.folder)) if self._layers else {}
        self._optimizer.rename_parameters(names)
        return {**module, **{name: module[layer_name] for name, layer_name in names.items()}}

    def _join_model(self, first: StageFiles, module: Mapping[str, Any]) -> WholeModel:
        masters, options = self._optimizer.masters, self._options
        is_divided = first.is_divided or self._has_only_masters(module)
        if not is_divided:
            return join_model(module, first.first, masters, use_masters=options.use_masters)
        if not options.use_masters or not options.with_optimizer:
            raise InvalidArgumentError(
                f"keys: {first.first.path} has the weights as master weights only (ZeRO-3, universal checkpoints): "
                "leave out weights and optimizer, and cast the model (cast_dtype=True, or --dtype of rankless convert)"
            )
        return join_divided_model(first.models, masters, self._access.budget)

    def _has_only_masters(self, module: Mapping[str, Any]) -> bool:
        """Return whether this is a universal checkpoint without second copies of the weights, as rankless writes it."""
        folder = self._files.folder
        is_universal = not self._files.optimizers and store_of(folder).is_directory(folder / UNIVERSAL)
        return is_universal and self._optimizer.masters.keys().isdisjoint(module)

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

    def _list_components(self, stages: list[StageFiles], model: WholeModel) -> dict[str, Any]:
        """Return the components that the files have."""
        components: dict[str, Any] = {"model": model.tensors}
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
        """Return the optimizer without ZeRO. Only optimizers of the stages of a pipeline can get names."""
        if not self._layers:
            return self._numbered[0]
        buffers = {name for stage in stages for name in stage.first.buffers}
        joined = name_stages(self._numbered, self._layers, buffers, str(self._files.folder))
        return {"state": joined.states, "param_groups": joined.groups}


def _scheduler_of(file: DeepSpeedModelFile) -> Any:
    """Return the state of the scheduler, or ``None`` if there is none, or if it is one of DeepSpeed's own."""
    if file.scheduler is None:
        return file.values.get(_LIGHTNING_SCHEDULERS) or None
    return None if _is_counter(file.scheduler) else file.scheduler


def _user_content_of(file: DeepSpeedModelFile, optimizer_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters of DeepSpeed, the loss scaler and the client state.

    The client state has priority, as in DeepSpeed. A scheduler that is one of DeepSpeed's own is there, too.
    """
    values = {key: plain_attributes(value) for key, value in optimizer_values.items()}
    if _is_counter(file.scheduler):
        values[_SCHEDULER] = file.scheduler
    has_lightning = file.scheduler is None and bool(file.values.get(_LIGHTNING_SCHEDULERS))
    client = {key: value for key, value in file.values.items() if not (has_lightning and key == _LIGHTNING_SCHEDULERS)}
    return {**values, **client}


def _is_counter(scheduler: Any) -> bool:
    return isinstance(scheduler, dict) and scheduler.keys() == _COUNTER
