"""Checkpoints of NxD, as whole tensors by the names of parameters, whatever ranks wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.compat.nxd.format import optimizer_states, sharding_rules, step_dirs
from holdfast.compat.nxd.format.consistency import ReplicaEvidence
from holdfast.compat.nxd.format.file_names import MODEL
from holdfast.compat.nxd.format.folder import NxdCheckpoint, read_folder
from holdfast.compat.nxd.format.rank_file import RankShard
from holdfast.compat.nxd.format.sharding_spec import ShardingRule, ShardingSpec
from holdfast.compat.nxd.format.unshard import Unsharder
from holdfast.compat.nxd.format.zero import BASE, have_equal_values
from holdfast.errors import CorruptCheckpointError, HoldfastError, InvalidArgumentError
from holdfast.formats.native import is_native
from holdfast.formats.registry import LAYOUT
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.formats.tree.contents import TreeContents, from_components
from holdfast.formats.tree.tree_reader import TreeReader
from holdfast.storage import posix

#: The keys that a reader of this format takes, and what three of them may be.
WEIGHTS, COPIES, OPTIMIZER = "weights", "copies", "optimizer"
_MASTER, _MODEL = "master", "model"
_EQUAL, _FIRST = "equal", "first"
_READ, _SKIP = "read", "skip"
_CHOICES = {WEIGHTS: (_MASTER, _MODEL), COPIES: (_EQUAL, _FIRST), OPTIMIZER: (_READ, _SKIP)}


def is_nxd(path: Path) -> bool:
    """Whether a folder is a checkpoint of NxD's, or has such in it, and none of ours: a run that has moved goes on."""
    if not posix.is_directory(path) or step_dirs.is_tag(path):
        return posix.is_directory(path)
    return not any(is_native(folder) for folder in posix.list_subdirectories(path)) and step_dirs.is_nxd_run(path)


class NxdReader(TreeReader):
    """A checkpoint of NxD's: a tag's folder, or the newest in a folder of them.

    ``keys``: ``layout`` is the name of a layout, the path of a spec file, or its text; ``weights`` says whether the
    model's tensors are the optimizer's master weights where there are any (``master``, as without it), or ``model``,
    those that it calculated with. With ``copies`` as ``first``, tensor-parallel ranks need not have the same of what
    they do not divide, and the first one's is taken; else it is ``equal``, and a difference is damage. With
    ``optimizer`` as ``skip`` its states are left alone; else they are ``read``.
    """

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        _check_keys(keys)
        self._replicas = keys.get(COPIES, _EQUAL) == _EQUAL
        try:
            self._saved = read_folder(path if step_dirs.is_tag(path) else step_dirs.newest_tag(path))
            self._assembly = Unsharder(_spec(self._saved, keys), self._saved.evidence)
            contents = self._arranged(keys)
        except HoldfastError:
            raise
        except (AttributeError, LookupError, TypeError) as error:
            raise CorruptCheckpointError(f"{path} has files that are not as NxD writes them: {error}") from error
        files = [one for file in self._saved.files for one in file.files] + self._saved.others
        super().__init__(self._saved.path, "nxd", files, self._saved.fingerprint, contents)

    def check_files(self) -> None:
        """Every rank's tensors are there, what ranks have alike is equal, and what only fills up is zero."""
        for file in self._saved.files:
            if file.path.parent.name != MODEL or not _is_left_out(file.shards):
                file.check()
        self._saved.evidence.check(replicas=self._replicas)

    def _arranged(self, keys: Mapping[str, str]) -> TreeContents:
        model: dict[str, StoredTensor] = {}
        optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
        for stage in self._saved.stages:
            own = {} if keys.get(OPTIMIZER) == _SKIP else _optimizer(stage, self._assembly, optimizer)
            take = own if keys.get(WEIGHTS, _MASTER) == _MASTER else {}
            for name, stored in _model(stage, self._assembly, take).items():
                if name in model and model[name].info != stored.info:
                    raise CorruptCheckpointError(f"{stage.name} has another {name!r} than a stage before it")
                model.setdefault(name, stored)
        slots: dict[str, Any] = {"model": model} if model else {}
        if optimizer["param_groups"]:
            slots["optimizer"] = optimizer
        values = dict(self._saved.values)
        if "scheduler" in values:
            slots["scheduler"] = values.pop("scheduler")
        return from_components(slots, values, self._saved.budget, str(self._saved.path))


def _check_keys(keys: Mapping[str, str]) -> None:
    for key, value in keys.items():
        if key not in {LAYOUT, *_CHOICES}:
            known = ", ".join((LAYOUT, *_CHOICES))
            raise InvalidArgumentError(f"keys: for checkpoints of NxD there are {known}, not {key!r}")
        if key in _CHOICES and value not in _CHOICES[key]:
            raise InvalidArgumentError(f"keys: {key} must be one of {', '.join(_CHOICES[key])}; got {value!r}")


def _spec(saved: NxdCheckpoint, keys: Mapping[str, str]) -> ShardingSpec:
    if LAYOUT in keys:
        return sharding_rules.rules_named(keys[LAYOUT])
    if saved.degrees.tp > 1 or saved.degrees.ep > 1:
        raise InvalidArgumentError(
            f"{saved.path} is of {saved.degrees.tp} tensor-parallel ranks, and NxD's files do not say how they divide "
            f"each parameter: name a layout ({', '.join(sharding_rules.BUILT_IN)}), or a spec file, as layout (--key layout=…)"
        )
    return ShardingSpec((ShardingRule("*"),))


def _is_left_out(shards: Sequence[RankShard]) -> bool:
    """With avoid_saving_lower_precision_weights a model's file names tensors, and none of them is there."""
    return bool(shards) and not any(shard.exists for shard in shards)


def _model(
    stage: optimizer_states.PipelineStage, assembly: Unsharder, masters: Mapping[str, Mapping[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    """The tensors of a stage: the master weights where there are any, which are all there is with some saves."""
    found: dict[str, StoredTensor] = {}
    names = stage.names if stage.models else []
    shards = [shard for name in names for row in stage.shards(name) for shard in row if isinstance(shard, RankShard)]
    left_out = _is_left_out(shards)
    for name in names:
        if left_out and name not in masters:
            continue
        whole = masters[name] if name in masters else assembly.whole(name, stage.shards(name), name)
        both = next((one for one in whole if one in found), None)
        if both is not None:
            raise InvalidArgumentError(f"{stage.name}: by the layout, {name!r} and another parameter are both {both!r}")
        found |= whole
    if left_out and not found:
        raise CorruptCheckpointError(
            f"{stage.name}: the model's tensors were left out of it, and there are no master weights"
        )
    return found


def _optimizer(
    stage: optimizer_states.PipelineStage, assembly: Unsharder, into: dict[str, Any]
) -> dict[str, Mapping[str, StoredTensor]]:
    """Add the states of a stage, and return its master weights by the names that parameters have in NxD."""
    if not stage.optimizers:
        return {}
    if not stage.models:
        return _by_number(stage, into)
    groups = stage.optimizers[0][0]["param_groups"]
    masters: dict[str, Mapping[str, StoredTensor]] = {}
    for number, known in enumerate(optimizer_states.number_parameters(stage, assembly)):
        _add_group(into, number, optimizer_states.group_settings(groups[number]), stage.name, assembly.evidence)
        for one in known:
            into["param_groups"][number]["params"] += one.whole
            into["state"] |= {
                name: own for name, own in optimizer_states.optimizer_states(stage, one, assembly).items() if own
            }
            own = optimizer_states.master_weights(stage, one, assembly)
            if own:
                masters[one.name] = own
    return masters


def _add_group(
    into: dict[str, Any], number: int, settings: dict[str, Any], where: str, evidence: ReplicaEvidence
) -> None:
    groups = into["param_groups"]
    if number == len(groups):
        groups.append({**settings, "params": []})
        return
    before = {key: value for key, value in groups[number].items() if key != "params"}
    if not have_equal_values(f"group {number} of the optimizer", before, settings, evidence):
        raise CorruptCheckpointError(
            f"{where}: group {number} of the optimizer has other settings than on the first stage"
        )


def _by_number(stage: optimizer_states.PipelineStage, into: dict[str, Any]) -> dict[str, Mapping[str, StoredTensor]]:
    """Without a model nobody knows a name; one rank's state is whole as it is."""
    row = stage.optimizers[0]
    if len(row) > 1 or into["param_groups"]:
        raise InvalidArgumentError(
            f"{stage.name} has no model, and the numbers of the optimizer's parameters mean nothing"
        )
    root = row[0]
    into["param_groups"] = root["param_groups"]
    into["state"] = root.get(BASE) or root.get("state", {})
    return {}
