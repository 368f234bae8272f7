"""The names of DeepSpeed's files, and the ranks in them.

In these names ``pp_rank`` is the data-parallel rank, and ``mp_rank`` the rank of a pipeline stage or of tensor
parallelism. Numbers have no leading zeros in some names, and two digits in others.

The reader asks it on each rank that opens a checkpoint, and so does Accelerate's
(:mod:`rankless.accelerate.reader.open_folder`); the writer uses the names, which are DeepSpeed's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rankless.errors import CorruptCheckpointError
from rankless.storage.store import store_of

#: The files that name the tag of the newest checkpoint, which DeepSpeed or its conversion to universal ones writes.
LATEST = ("latest", "latest_universal")

#: The folder of the parameters in a universal checkpoint, and the folder of an optimizer that was offloaded to NVMe.
UNIVERSAL, OFFLOADED = "zero", "offloaded_tensors"

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d{1,6})_)?mp_rank_(?P<mp>\d{2,6})_model_states\.pt", re.ASCII)
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<mp>\d{2,6})_?optim_states\.pt", re.ASCII
)
_LAYER = re.compile(r"layer_(?P<layer>\d{2,6})(?:-model_(?P<tp>\d{2,6}))?-model_states\.pt", re.ASCII)
_EXPERT = re.compile(
    r"(?:layer_(?P<layer>\d{1,6})_)?expert_(?P<expert>\d{1,6})_mp_rank_(?P<mp>\d{2,6})_model_states\.pt", re.ASCII
)
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_\d{1,6}_mp_rank_\d{2,6}_optim_states\.pt", re.ASCII)

_Key = TypeVar("_Key", bound=tuple[Any, ...])


class Rank(NamedTuple):
    """The model-parallel rank and the data-parallel rank of a file. Files are in the order of these fields."""

    mp: int
    dp: int


class Expert(NamedTuple):
    """A file of an expert: its model-parallel rank, the number of its layer and its own number among all.

    For example, ``layer_1_expert_3_mp_rank_00_model_states.pt`` is expert 3 of layer 1.
    """

    mp: int
    layer: int
    expert: int


class Layer(NamedTuple):
    """A file of a layer of a pipeline: the number of the layer and the tensor-parallel rank.

    For example, ``layer_02-model_00-model_states.pt`` is layer 2 of tensor-parallel rank 0.
    """

    layer: int
    tp: int


@dataclass(frozen=True)
class TagFiles:
    """The files in a tag's folder. ``models`` and ``optimizers`` are in the order of their ranks."""

    folder: Path
    models: Mapping[Rank, Path] = field(default_factory=dict)
    optimizers: Mapping[Rank, Path] = field(default_factory=dict)
    layers: Mapping[Layer, Path] = field(default_factory=dict)
    experts: Mapping[Expert, Path] = field(default_factory=dict)
    expert_optimizers: tuple[Path, ...] = ()

    @property
    def mp_ranks(self) -> list[int]:
        """The model-parallel ranks that have a file."""
        return sorted({rank.mp for rank in self.models})


def is_rank_file(path: Path) -> bool:
    """Return whether a file's name belongs to one rank of a checkpoint that is divided among ranks.

    For example, ``zero_pp_rank_0_mp_rank_00_optim_states.pt`` does, and ``mp_rank_00_model_states.pt`` does not.
    """
    model = _MODEL.fullmatch(path.name)
    return bool(model and model["dp"]) or bool(_OPTIMIZER.fullmatch(path.name))


def has_rank_files(names: Iterable[str]) -> bool:
    """Return whether one of the names in a folder belongs to a model's or an optimizer's file."""
    return any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in names)


def list_tag_files(folder: Path) -> TagFiles:
    """Return the files in a tag's folder. Raises ``CorruptCheckpointError`` if two are of the same rank.

    A universal checkpoint may have the model's file twice, for ZeRO-1 and 2 and for ZeRO-3: then it is the first one.
    """
    files = [file for file in store_of(folder).list_files(folder) if file.suffix == ".pt"]
    if store_of(folder).is_directory(folder / UNIVERSAL):
        whole = {match["mp"] for match in map(_match_model, files) if match and match["dp"] is None}
        files = [file for file in files if not _is_second(_match_model(file), whole)]
    return TagFiles(
        folder,
        _index_files(files, _MODEL, lambda match: Rank(int(match["mp"]), int(match["dp"] or 0))),
        _index_files(files, _OPTIMIZER, lambda match: Rank(int(match["mp"]), int(match["dp"]))),
        _index_files(files, _LAYER, lambda match: Layer(int(match["layer"]), int(match["tp"] or 0))),
        _index_files(
            files, _EXPERT, lambda match: Expert(int(match["mp"]), int(match["layer"] or 0), int(match["expert"]))
        ),
        tuple(file for file in files if _EXPERT_OPTIMIZER.fullmatch(file.name)),
    )


def _match_model(file: Path) -> re.Match[str] | None:
    return _MODEL.fullmatch(file.name)


def _is_second(match: re.Match[str] | None, whole: set[str]) -> bool:
    """Return whether a file is a model's file for ZeRO-3, of a model-parallel rank that has a whole model's file."""
    return match is not None and match["dp"] is not None and match["mp"] in whole


def _index_files(
    files: Iterable[Path], pattern: re.Pattern[str], parse: Callable[[re.Match[str]], _Key]
) -> dict[_Key, Path]:
    """Return the files with matching names, in the order of their keys."""
    indexed: dict[_Key, Path] = {}
    for file in files:
        match = pattern.fullmatch(file.name)
        if match is None:
            continue
        key = parse(match)
        if key in indexed:
            raise CorruptCheckpointError(
                f"{indexed[key]} and {file} are files of the same rank: they are from two saves; remove the older one"
            )
        indexed[key] = file
    return dict(sorted(indexed.items()))
