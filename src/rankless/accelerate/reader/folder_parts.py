"""The parts of a folder of Accelerate or of transformers' ``Trainer``, by the names of files and folders.

Source: ``accelerate/checkpointing.py``, ``accelerate/utils/fsdp_utils.py`` and ``transformers/trainer.py``. Accelerate
numbers objects in the order of their ``prepare`` calls; the first has no number, except in folders of FSDP.

``formats/registry.py`` names :func:`is_training_folder`, which the detection of formats asks on each rank; the reader
lists parts with it. The other libraries define the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rankless.dcp.reader.dcp_directory import METADATA
from rankless.errors import FormatError
from rankless.formats.sharded.model_files import MODEL, OPTIMIZER, choose_files, parse_file_name
from rankless.storage.store import store_of

SCHEDULER, CUSTOM, SCALER, VALUE = "scheduler", "custom", "scaler", "value"
GENERATORS, TRAINER_STATE, LOCAL = "generators", "trainer_state", "local"

#: The ``Trainer``'s name of the file of its state.
_TRAINER_STATE_FILE = "trainer_state.json"

#: Folders of ``torch.distributed.checkpoint``. They come before files of the same kind.
_FOLDERS = (
    (MODEL, re.compile(r"pytorch_model_fsdp_(?P<number>\d{1,4})")),
    (OPTIMIZER, re.compile(r"optimizer_(?P<number>\d{1,4})")),
)

_FILES = (
    (MODEL, re.compile(r"pytorch_model_fsdp(_(?P<number>\d{1,4}))?\.bin")),
    (MODEL, re.compile(r"model_(?P<number>\d{1,4})\.safetensors")),
    (MODEL, re.compile(r"pytorch_model_(?P<number>\d{1,4})\.bin")),
    (OPTIMIZER, re.compile(r"optimizer(_(?P<number>\d{1,4}))?\.bin|optimizer\.pt")),
    (SCHEDULER, re.compile(r"scheduler(_(?P<number>\d{1,4}))?\.bin|scheduler\.pt")),
    (CUSTOM, re.compile(r"custom_checkpoint_(?P<number>\d{1,4})\.pkl")),
    (GENERATORS, re.compile(r"random_states_(?P<number>\d{1,9})\.pkl|rng_state(_(?P<rank>\d{1,9}))?\.pth")),
    (SCALER, re.compile(r"scaler\.pt")),
    (TRAINER_STATE, re.compile(re.escape(_TRAINER_STATE_FILE))),
)

#: The names of a model under FSDP.
_FSDP = re.compile("pytorch_model_fsdp")

#: Names that only Accelerate uses; and names that mark a checkpoint of the ``Trainer`` if it has the file of its state.
_ACCELERATE = re.compile(
    r"random_states_\d+\.pkl|pytorch_model_fsdp(_\d+)?(\.bin)?|(scheduler|sampler|dl_state_dict)(_\d{1,4})?\.bin"
    r"|custom_checkpoint_\d{1,4}\.pkl"
)
_TRAINER = re.compile(r"rng_state(_\d+)?\.pth|(optimizer|scheduler)\.(bin|pt)")

#: The file of an optimizer, which marks a folder of Accelerate if a model is next to it.
_OPTIMIZER = re.compile(r"optimizer(_\d{1,4})?\.bin")

#: Values that are given to the user as they are, by the names of their files.
_VALUES = re.compile(r"(sampler|dl_state_dict)(_\d{1,4})?\.bin")

#: The files of ranks in folders of ``torch.distributed.checkpoint``.
_RANK_FILE = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp")

#: Files of one rank's shards, which say nothing about their places in whole tensors.
_LOCAL = re.compile(r"(pytorch_model_fsdp|optimizer)(_\d{1,4})?_rank\d{1,9}\.bin")

#: The paths of each kind by number: of a prepared object, a rank or, for values, the position in the folder.
Parts = Mapping[str, Mapping[int, Path]]


def list_parts(folder: Path) -> Parts:
    """Return the parts of a folder. Raises ``FormatError`` if two of them are of the same object or rank.

    Only of a model there may be several: the ``Trainer`` also writes its weights for transformers. Files of generators
    are compared by :mod:`rankless.accelerate.reader.rank_values`.
    """
    names = sorted(store_of(folder).list_names(folder))
    parts: dict[str, dict[int, Path]] = {}
    for kind, number, name in [*_match_names(names, _FOLDERS), *_match_names(names, _FILES)]:
        if not _is_part(folder / name):
            continue
        first = parts.setdefault(kind, {}).setdefault(number, folder / name)
        if first.name != name and kind != GENERATORS and (kind != MODEL or _FSDP.match(name)):
            raise FormatError(
                f"{first} and {name} are of two saves, and either may be the older one: remove that one, and all other "
                "files of its save"
            )
    for kind, pattern in ((VALUE, _VALUES), (LOCAL, _LOCAL)):
        matches = [folder / name for name in names if pattern.fullmatch(name)]
        if matches:
            parts[kind] = dict(enumerate(matches))
    if 0 not in parts.get(MODEL, {}) and (file := choose_files(folder, MODEL)) is not None:
        parts[MODEL] = {0: file.path, **parts.get(MODEL, {})}
    return parts


def count_writers(parts: Parts) -> int:
    """Return how many ranks at least have saved a folder, by the files of models and optimizers under FSDP."""
    folders = [path for kind in (MODEL, OPTIMIZER) for path in parts.get(kind, {}).values() if not path.suffix]
    names = (name for folder in folders for name in store_of(folder).list_names(folder))
    return max((int(match[1]) + 1 for match in map(_RANK_FILE.fullmatch, names) if match), default=1)


def _match_names(names: list[str], patterns: tuple[tuple[str, re.Pattern[str]], ...]) -> Iterator[tuple[str, int, str]]:
    for kind, pattern in patterns:
        for name in names:
            if match := pattern.fullmatch(name):
                yield kind, int(next((text for text in match.groupdict().values() if text), 0)), name


def _is_part(path: Path) -> bool:
    return store_of(path).is_file(path) if path.suffix else store_of(path).is_directory(path)


def is_training_folder(path: Path) -> bool:
    """Return whether a folder has more than a model, as Accelerate or the ``Trainer`` names it.

    A folder with weights and ``trainer_state.json`` only is one of Hugging Face, as they are on its Hub.
    """
    names = sorted(store_of(path).list_names(path))
    has_state = _TRAINER_STATE_FILE in names
    has_model = any((file := parse_file_name(path / name)) is not None and file.kind == MODEL for name in names)
    marks = [name for name in names if _is_mark(name, has_state=has_state, has_model=has_model)]
    return METADATA not in names and any(_is_part(path / name) for name in marks)


def _is_mark(name: str, *, has_state: bool, has_model: bool) -> bool:
    """Return whether a name says that its folder is one of Accelerate or, with a state of it, of the ``Trainer``."""
    return bool(
        _ACCELERATE.fullmatch(name)
        or (has_state and _TRAINER.fullmatch(name))
        or (has_model and _OPTIMIZER.fullmatch(name))
    )
