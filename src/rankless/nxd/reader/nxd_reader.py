"""Reader for NxD checkpoints: whole tensors by parameter name, whatever ranks wrote them.

``formats/registry.py`` names it: each rank of a load or conversion opens one, in the vote "reading the metadata".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankless.errors import CorruptCheckpointError, InvalidArgumentError, RanklessError
from rankless.formats.native import is_native
from rankless.formats.registry import LAYOUT
from rankless.formats.stored_tensor import StoredTensor
from rankless.formats.tree.tree_contents import TreeContents, from_components
from rankless.formats.tree.tree_reader import TreeReader
from rankless.nxd.reader import numbered_states, sharding_rules, step_dirs
from rankless.nxd.reader.nxd_checkpoint import NxdCheckpoint, read_folder
from rankless.nxd.reader.nxd_file_names import MODEL
from rankless.nxd.reader.rank_file import RankShard
from rankless.nxd.reader.replica_evidence import ReplicaEvidence
from rankless.nxd.reader.sharding_spec import ShardingRule, ShardingSpec
from rankless.nxd.reader.unshard import Unsharder
from rankless.nxd.reader.zero_states import BASE, have_equal_values
from rankless.storage.store import store_of

#: The keys that a reader of this format accepts, and the values of three of them.
WEIGHTS, COPIES, OPTIMIZER = "weights", "copies", "optimizer"
_MASTER, _MODEL = "master", "model"
_EQUAL, _FIRST = "equal", "first"
_READ, _SKIP = "read", "skip"
_CHOICES = {WEIGHTS: (_MASTER, _MODEL), COPIES: (_EQUAL, _FIRST), OPTIMIZER: (_READ, _SKIP)}


def is_nxd(path: Path) -> bool:
    """Return whether a folder is an NxD checkpoint, or contains NxD checkpoints and no rankless checkpoint.

    A run that has moved from NxD to rankless counts as a rankless run.
    """
    if not store_of(path).is_directory(path) or step_dirs.is_tag(path):
        return store_of(path).is_directory(path)
    subfolders = store_of(path).list_subdirectories(path)
    return not any(map(is_native, subfolders)) and step_dirs.is_nxd_run(path)


class NxdReader(TreeReader):
    """An NxD checkpoint: the folder of a tag, or the newest tag in a folder of them.

    ``keys``: ``layout`` is the name of a layout, the path of a spec file, or its text. ``weights`` says which tensors
    the model gets: ``master`` (the default), the optimizer's master weights if there are any, or ``model``, the weights
    that the model computed with. ``copies``: with ``equal`` (the default), tensor-parallel ranks must have equal copies
    of tensors that they do not divide; with ``first``, the first rank's is used. ``optimizer``: ``read`` (the default)
    or ``skip`` its states.
    """

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        _check_keys(keys)
        self._replicas = keys.get(COPIES, _EQUAL) == _EQUAL
        try:
            self._saved = read_folder(path if step_dirs.is_tag(path) else step_dirs.newest_tag(path))
            self._unsharder = Unsharder(_choose_spec(self._saved, keys), self._saved.evidence)
            contents = self._join_contents(keys)
        except RanklessError:
            raise
        except (AttributeError, LookupError, TypeError) as error:
            raise CorruptCheckpointError(f"{path} has files that NxD does not write: {error}") from error
        files = [rank_path for file in self._saved.files for rank_path in file.files] + self._saved.others
        super().__init__(self._saved.path, "nxd", files, self._saved.fingerprint, contents)

    def check_files(self) -> None:
        """Check that all tensors exist, that copies on ranks are equal, and that the padding is zero."""
        for file in self._saved.files:
            if file.path.parent.name != MODEL or not _were_left_out(file.shards):
                file.check_tensors()
        self._saved.evidence.require_consistent(replicas=self._replicas)

    def _join_contents(self, keys: Mapping[str, str]) -> TreeContents:
        """Return the model, the optimizer and the values by name."""
        model: dict[str, StoredTensor] = {}
        optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
        for stage in self._saved.stages:
            masters = {} if keys.get(OPTIMIZER) == _SKIP else _join_optimizer(stage, self._unsharder, optimizer)
            model_masters = masters if keys.get(WEIGHTS, _MASTER) == _MASTER else {}
            for name, stored in _join_model(stage, self._unsharder, model_masters).items():
                if name in model and model[name].info != stored.info:
                    raise CorruptCheckpointError(f"{stage.name} has a different {name!r} than an earlier stage")
                model.setdefault(name, stored)
        components: dict[str, Any] = {"model": model} if model else {}
        if optimizer["param_groups"]:
            components["optimizer"] = optimizer
        values = dict(self._saved.values)
        if "scheduler" in values:
            components["scheduler"] = values.pop("scheduler")
        return from_components(components, values, self._saved.budget, str(self._saved.path))


def _check_keys(keys: Mapping[str, str]) -> None:
    for key, value in keys.items():
        if key not in {LAYOUT, *_CHOICES}:
            valid = ", ".join((LAYOUT, *_CHOICES))
            raise InvalidArgumentError(f"keys: NxD checkpoints have the keys {valid}; got {key!r}")
        if key in _CHOICES and value not in _CHOICES[key]:
            raise InvalidArgumentError(f"keys: {key} must be one of {', '.join(_CHOICES[key])}; got {value!r}")


def _choose_spec(saved: NxdCheckpoint, keys: Mapping[str, str]) -> ShardingSpec:
    if LAYOUT in keys:
        return sharding_rules.load_spec(keys[LAYOUT])
    if saved.degrees.tp > 1 or saved.degrees.ep > 1:
        raise InvalidArgumentError(
            f"{saved.path} has {saved.degrees.tp} tensor-parallel ranks, and NxD's files do not say how they divide "
            f"each parameter: name a layout ({', '.join(sharding_rules.BUILT_IN)}), or a spec file, as layout "
            "(--key layout=…)"
        )
    return ShardingSpec((ShardingRule("*"),))


def _were_left_out(shards: Sequence[RankShard]) -> bool:
    """Return whether a model's file names tensors and none of them exists: avoid_saving_lower_precision_weights."""
    return bool(shards) and not any(shard.exists for shard in shards)


def _join_model(
    stage: numbered_states.PipelineStage, unsharder: Unsharder, masters: Mapping[str, Mapping[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    """Return the tensors of a stage: the master weights if there are any, because some saves contain nothing else."""
    tensors: dict[str, StoredTensor] = {}
    names = stage.tensor_names if stage.models else []
    shards = [shard for name in names for row in stage.shards_of(name) for shard in row if isinstance(shard, RankShard)]
    left_out = _were_left_out(shards)
    for name in names:
        if left_out and name not in masters:
            continue
        whole = masters[name] if name in masters else unsharder.join_shards(name, stage.shards_of(name), name)
        duplicate = next((whole_name for whole_name in whole if whole_name in tensors), None)
        if duplicate is not None:
            raise InvalidArgumentError(
                f"{stage.name}: the layout makes both {name!r} and another parameter {duplicate!r}"
            )
        tensors |= whole
    if left_out and not tensors:
        raise CorruptCheckpointError(
            f"{stage.name}: the model's tensors were left out of it, and there are no master weights"
        )
    return tensors


def _join_optimizer(
    stage: numbered_states.PipelineStage, unsharder: Unsharder, optimizer: dict[str, Any]
) -> dict[str, Mapping[str, StoredTensor]]:
    """Add the states of a stage, and return its master weights by the parameter names in NxD."""
    if not stage.optimizers:
        return {}
    if not stage.models:
        return _add_unnamed_optimizer(stage, optimizer)
    groups = stage.optimizers[0][0]["param_groups"]
    masters: dict[str, Mapping[str, StoredTensor]] = {}
    for number, parameters in enumerate(numbered_states.number_parameters(stage, unsharder)):
        _add_group(optimizer, number, numbered_states.group_settings(groups[number]), stage.name, unsharder.evidence)
        for parameter in parameters:
            optimizer["param_groups"][number]["params"] += parameter.whole_names
            optimizer["state"] |= {
                name: states
                for name, states in numbered_states.optimizer_states(stage, parameter, unsharder).items()
                if states
            }
            states = numbered_states.master_weights(stage, parameter, unsharder)
            if states:
                masters[parameter.name] = states
    return masters


def _add_group(
    optimizer: dict[str, Any], number: int, settings: dict[str, Any], stage_name: str, evidence: ReplicaEvidence
) -> None:
    groups = optimizer["param_groups"]
    if number == len(groups):
        groups.append({**settings, "params": []})
        return
    earlier = {key: value for key, value in groups[number].items() if key != "params"}
    if not have_equal_values(f"group {number} of the optimizer", earlier, settings, evidence):
        raise CorruptCheckpointError(
            f"{stage_name}: group {number} of the optimizer has other settings than on the first stage"
        )


def _add_unnamed_optimizer(
    stage: numbered_states.PipelineStage, optimizer: dict[str, Any]
) -> dict[str, Mapping[str, StoredTensor]]:
    """Add the optimizer of a stage without a model. Names are unknown, so only one rank's state can be read."""
    ranks = stage.optimizers[0]
    if len(ranks) > 1 or optimizer["param_groups"]:
        raise InvalidArgumentError(f"{stage.name} has no model, so the names of the optimizer's parameters are unknown")
    root = ranks[0]
    optimizer["param_groups"] = root["param_groups"]
    optimizer["state"] = root.get(BASE) or root.get("state", {})
    return {}
