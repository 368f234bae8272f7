"""The steps that the files of a folder record, for readers of folders of several files.

The bytes of a file that was copied from another save are intact: only its step can tell. That is a reason for a warning
and not for an error, because an optimizer may have taken steps before a training, or have begun anew in it.

The readers of DeepSpeed and Accelerate describe doubts with it; rank 0 of a load warns of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rankless.engine.io.tensor_sources import ChunkedSource
from rankless.errors import RanklessError
from rankless.formats.reader import FileExtent, Reader
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of

#: How the bytes of a step are decoded. Other dtypes round large steps.
_DECODERS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}

#: The most parameters with steps that are read, and the most of a folder in an object store, where each is a request.
_MOST, _MOST_REQUESTS = 4096, 16

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
    except RanklessError:  # whoever reads this optimizer raises it
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
    """Return the largest step of the parameters of an optimizer, by the first of its files.

    If the parameters in each file of a rank have one step, return the step of each file. Otherwise some parameters were
    not trained for a while, which explains other steps elsewhere.
    """
    steps: dict[Path, list[float]] = {}
    with ReaderPool() as readers:
        for (file, offset), decoder in dict(_find_steps(reader, group)).items():
            data = bytearray(struct.calcsize(decoder))
            readers.read(file, offset, memoryview(data))
            steps.setdefault(file, []).extend(struct.unpack(decoder, data))
    everything = [step for of_file in steps.values() for step in of_file]
    is_one_each = all(file.suffix == _RANK_FILE and len({*of_file}) == 1 for file, of_file in steps.items())
    if is_one_each and len(everything) >= 2 * len(steps):  # of single parameters nothing follows
        return {file: of_file[0] for file, of_file in steps.items()}
    return {next(iter(steps)): max(everything)}


def _find_steps(reader: Reader, group: str) -> Iterator[tuple[tuple[Path, int], str]]:
    """Yield the files and offsets of steps, and how each is decoded. Several parameters may have one step."""
    tensors = reader.groups.get(group, {})
    names = [name for name, info in tensors.items() if name.endswith("/step") and info.dtype in _DECODERS]
    most = _MOST_REQUESTS if store_of(reader.path).is_remote else _MOST
    for name in names[:: len(names) // most + 1]:
        decoder = _DECODERS[tensors[name].dtype]
        extents = reader.find_extents(group, name, 0, tensors[name].nbytes)
        place = _locate(extents[0]) if len(extents) == 1 else None
        if place is not None and tensors[name].nbytes == struct.calcsize(decoder):
            yield place, decoder


def _locate(extent: FileExtent) -> tuple[Path, int] | None:
    """Return the file and the offset of the bytes of one number; ``None`` if they are not in one file."""
    if isinstance(extent.file, Path):
        return extent.file, extent.offset
    if isinstance(extent.file, ChunkedSource) and len(extent.file.chunks) == 1:
        location = extent.file.chunks[0].location
        return location.file, location.offset
    return None


def _name(file: Path, folder: Path) -> str:
    return str(file.relative_to(folder)) if file.is_relative_to(folder) else file.name
