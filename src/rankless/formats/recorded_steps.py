"""The steps that the files of a folder record, for readers of folders of several files.

The bytes of a file that was copied from another save are intact: only its step can tell. That is a reason for a warning
and not for an error, because an optimizer may have taken steps before a training, or have begun anew in it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.tensor_sources import paths_of
from rankless.errors import CorruptCheckpointError, StorageError
from rankless.formats.reader import FileExtent, Reader

#: How the bytes of a step are decoded. Other dtypes round large steps.
_DECODERS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}

#: The most parameters whose steps are read.
_MOST = 4096

#: The files of ranks in a folder of ``torch.distributed.checkpoint``: each has the steps of some parameters.
_RANK_FILE = ".distcp"


def describe_mixed_steps(
    reader: Reader, group: str, recorded: Mapping[str, int], *, may_skip: bool = False, may_lead: int = 0
) -> Sequence[str]:
    """Return a note if an optimizer is of another step than other files of its folder; otherwise nothing.

    Args:
        reader: The reader of the optimizer.
        group: The group of the optimizer's tensors.
        recorded: The steps that other files record, by their names.
        may_skip: Whether the optimizer can have skipped steps, as with a loss scaler, so that it has counted fewer.
        may_lead: How many steps more the optimizer can have counted.
    """
    try:
        counted = _count_steps(reader, group)
    except (CorruptCheckpointError, StorageError):  # whoever reads this optimizer raises it
        return ()
    if not _are_mixed({*counted.values()}, {*recorded.values()}, may_skip=may_skip, may_lead=may_lead):
        return ()
    steps = {**{_name(file, reader.path): step for file, step in counted.items()}, **recorded}
    listed = ", ".join(f"{name} of step {step:g}" for name, step in steps.items())
    advice = "copy the whole folder again, unless the optimizer is older than this training, or has begun anew in it"
    return [f"{reader.path} seems to have files of different saves: {listed}; {advice}"]


def _are_mixed(counted: set[float], recorded: set[int], *, may_skip: bool, may_lead: int) -> bool:
    """Return whether steps are of different saves: ``counted`` by an optimizer, and ``recorded`` by other files."""
    if not counted:  # such as SGD
        return len(recorded) > 1 and not may_skip
    step = max(counted)
    is_behind = any(step < other for other in recorded) and not may_skip
    return len(counted) > 1 or is_behind or any(step > other + may_lead for other in recorded)


def _count_steps(reader: Reader, group: str) -> dict[Path, float]:
    """Return the largest step of the parameters of an optimizer: of files of ranks for each, of others together."""
    steps: dict[Path, float] = {}
    extents = dict(_find_steps(reader, group))
    with SourceReader([extent.file for extent in extents]) as sources:
        for number, (extent, decoder) in enumerate(extents.items()):
            data = bytearray(struct.calcsize(decoder))
            sources.read(number, extent.offset, memoryview(data))
            file = next(paths_of([extent.file]), reader.path)
            key = file if file.suffix == _RANK_FILE else next(iter(steps), file)
            (step,) = struct.unpack(decoder, data)
            steps[key] = max(step, steps.get(key, step))
    return steps


def _find_steps(reader: Reader, group: str) -> Iterator[tuple[FileExtent, str]]:
    """Yield where the steps of parameters are, and how each is decoded. Several parameters may have one step."""
    tensors = reader.groups.get(group, {})
    names = [name for name, info in tensors.items() if name.endswith("/step") and info.dtype in _DECODERS]
    for name in names[:: len(names) // _MOST + 1]:
        extents = reader.find_extents(group, name, 0, tensors[name].nbytes)
        if len(extents) == 1 and tensors[name].nbytes == struct.calcsize(_DECODERS[tensors[name].dtype]):
            yield extents[0], _DECODERS[tensors[name].dtype]


def _name(file: Path, folder: Path) -> str:
    return str(file.relative_to(folder)) if file.is_relative_to(folder) else file.name
