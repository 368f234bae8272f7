"""Reading the files of one model-parallel rank: a stage of a pipeline, or the whole model.

:mod:`rankless.deepspeed.reader.tag_contents` calls it on each rank that opens a checkpoint. Files of two saves must not
be mixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankless.deepspeed.reader.deepspeed_file_names import Rank, TagFiles, is_rank_file
from rankless.deepspeed.reader.file_access import FileAccess
from rankless.deepspeed.reader.join_optimizer import join_optimizers
from rankless.deepspeed.reader.joined_optimizer import JoinedOptimizer
from rankless.deepspeed.reader.model_file import DeepSpeedModelFile, read_model_file
from rankless.deepspeed.reader.rank_optimizer import RankOptimizer, parse_optimizer_file
from rankless.deepspeed.reader.zero_partitions import Shapes
from rankless.errors import CorruptCheckpointError, FormatError

#: Units of work for a group of parameters on a rank.
_GROUP = 64


@dataclass(frozen=True)
class StageFiles:
    """The files of a stage.

    ``models`` has one file, or the files of all data-parallel ranks if they have parts of frozen parameters. ``others``
    are files that were not read.
    """

    models: Sequence[DeepSpeedModelFile]
    others: Sequence[Path]
    optimizers: Sequence[RankOptimizer]

    @property
    def first(self) -> DeepSpeedModelFile:
        """The file of the model of the first rank."""
        return self.models[0]

    @property
    def shapes(self) -> Sequence[Shapes]:
        """The shapes of the trained parameters, by group."""
        return self.first.shapes or []

    @property
    def is_divided(self) -> bool:
        """True if each rank has parts of all parameters: ZeRO-3."""
        return is_rank_file(self.first.path)


def read_stage(mp: int, files: TagFiles, access: FileAccess, *, with_optimizer: bool) -> StageFiles:
    """Read the files of a model-parallel rank.

    Raises ``CorruptCheckpointError`` naming a file that is missing, or from another save.
    """
    model_paths = _list_ranks(mp, files.models, files.folder)
    models = [read_model_file(model_paths[0], access)]
    if models[0].frozen and len(model_paths) > 1:
        models += [read_model_file(path, access) for path in model_paths[1:]]
        _check_same_shapes(models)
    optimizer_paths = _list_ranks(mp, files.optimizers, files.folder) if with_optimizer else []
    optimizers = []
    for path in optimizer_paths:
        optimizers.append(parse_optimizer_file(access.read_dict(path), path))
        access.budget.spend(_GROUP * len(optimizers[-1].masters))
    stage = StageFiles(models, model_paths[len(models) :], optimizers)
    if optimizers and stage.first.shapes is None:
        raise FormatError(
            f"{stage.first.path} has no param_shapes, which say where each parameter is in the files of the optimizer: "
            "DeepSpeed before 0.3.17 wrote it. Load and save it with a newer version"
        )
    if optimizers and stage.is_divided and len(model_paths) != len(optimizers):
        raise CorruptCheckpointError(
            f"{files.folder} has the models of {len(model_paths)} ranks, and the optimizers of {len(optimizers)}: "
            "files are missing, or left from an earlier save by another number of ranks. Remove those"
        )
    return stage


def join_stage_optimizer(stage: StageFiles, access: FileAccess) -> JoinedOptimizer:
    """Return the optimizer of whole parameters; an empty one if it has no files."""
    if not stage.optimizers:
        return JoinedOptimizer()
    return join_optimizers(stage.optimizers, stage.shapes, access.budget)


def _list_ranks(mp: int, paths: Mapping[Rank, Path], folder: Path) -> list[Path]:
    """Return the files of all data-parallel ranks, in their order.

    Raises ``CorruptCheckpointError`` if one is missing.
    """
    ranks = {rank.dp: path for rank, path in paths.items() if rank.mp == mp}
    missing = next((dp for dp in range(len(ranks)) if dp not in ranks), None)
    if missing is not None:
        example = next(iter(ranks.values())).name
        raise CorruptCheckpointError(
            f"{folder} has {example}, but not the file of data-parallel rank {missing}: the save did not finish, or "
            "files were removed"
        )
    return [ranks[dp] for dp in range(len(ranks))]


def _check_same_shapes(models: Sequence[DeepSpeedModelFile]) -> None:
    for model in models[1:]:
        if model.shapes != models[0].shapes:
            raise CorruptCheckpointError(
                f"{model.path} has other parameters than {models[0].path}: the files are from two saves"
            )
