"""A file with the state of a scheduler: JSON with its class, or a state dict as torch.save writes it.

:mod:`rankless.components.component_calls` calls it on every rank; :func:`find_owned_files` is asked before a file is
replaced. The form of the JSON file is stored: files of earlier versions must be read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rankless.components.component_files import FileSet
from rankless.components.destination import Destination
from rankless.components.pending_files import PendingFiles
from rankless.components.stored_component import SCHEDULER, StoredComponent
from rankless.conversion.torch_target import as_saved_bytes
from rankless.engine.comm.call_check import CallDescription, vote_same_call
from rankless.engine.comm.session import Session
from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    InvalidArgumentError,
    MismatchError,
    NoCheckpointError,
)
from rankless.formats.torch_file import TorchFileReader, is_torch_file
from rankless.observe.warning import warn_caller
from rankless.ondisk import values
from rankless.ondisk.block_crcs import crc64
from rankless.process.prepared_types import prepared
from rankless.state import scheduler as schedulers
from rankless.state.array_decoder import ArrayDecoder
from rankless.state.array_encoder import ArrayEncoder
from rankless.storage.store import store_of

_FORMAT = "rankless scheduler"
_START = f'{{"format":"{_FORMAT}"'.encode()


@prepared
class _SchedulerFile(msgspec.Struct):
    """The JSON file of a scheduler: encoded values, and the CRC of their JSON."""

    format: str
    scheduler: msgspec.Raw
    crc64nvme: str


def write_scheduler(scheduler: Any, path: Path, session: Session, *, as_torch: bool) -> None:
    """Write the state of a scheduler on rank 0, and warn if other ranks hold another. All ranks raise the same error.

    Raises ``UnsupportedValueError``, which names all values that cannot be stored, or ``InvalidArgumentError`` if
    the object is not a scheduler, or the path is a folder.

    It is the vote "saving the scheduler".
    """
    destination = Destination(path, folder=False)
    call = CallDescription("save of a scheduler", {"the path": repr(str(path))})

    state: dict[str, Any] = {}

    def encode() -> bytes:
        destination.check_replaceable()
        state.update(_scheduler_state(scheduler))
        return _encode_state(state)

    def write_file(encoded_states: list[bytes]) -> bytes:
        encoded = encoded_states[0]
        if any(other != encoded for other in encoded_states):
            warn_caller("ranks hold different states of the scheduler: rank 0's is saved, and all ranks will load it")
        data = as_saved_bytes(state["state"]) if as_torch else encoded
        if store_of(path).is_remote:
            store_of(path).replace_small(path, data)
            return b""
        files = PendingFiles(destination, FileSet(StoredComponent(SCHEDULER, {}, {}), [], {path.name: data}), [])
        try:
            files.publish(lambda _: b"")  # there are no files with headers
        except BaseException:
            files.discard()
            raise
        return b""

    vote_same_call(session, "saving the scheduler", lambda: call, encode, write_file)


def read_scheduler(scheduler: Any, path: Path, session: Session) -> None:
    """Load the state of a scheduler on every rank. Nothing is changed before all ranks have checked that it fits.

    Raises ``NoCheckpointError``, ``CorruptCheckpointError``, ``FormatError``, or ``MismatchError`` for a scheduler of
    another class.

    It takes two votes.
    """

    def read_and_compare() -> Any:
        saved = _read_file(path)
        differences = list(schedulers.compare_schedulers([scheduler], saved))
        if differences:
            raise MismatchError(f"{path} does not fit; nothing was changed: {'; '.join(differences)}")
        return saved

    saved = session.run_on_all("reading the scheduler's state", read_and_compare)
    session.run_on_all("putting it in place", lambda: schedulers.load_scheduler([scheduler], saved))


def find_owned_files(path: Path) -> frozenset[str] | None:
    """Return the name "" of the path itself if it is a JSON file of a scheduler. See :mod:`rankless.run.ownership`."""
    if not store_of(path).is_file(path):
        return None
    start = bytearray(len(_START))
    with store_of(path).open_reader(path) as reader:
        if reader.size >= len(start):
            reader.read(0, memoryview(start))
    return frozenset({""}) if start == _START else None


def _scheduler_state(scheduler: Any) -> dict[str, Any]:
    state = schedulers.scheduler_values([scheduler])
    if isinstance(state, list):
        raise InvalidArgumentError("pass one scheduler, not several: they are saved one at a time")
    return state


def _encode_state(state: dict[str, Any]) -> bytes:
    raw = values.to_json(values.encode_value(state, ArrayEncoder(inline=("",))))
    file = msgspec.json.encode(_SchedulerFile(_FORMAT, msgspec.Raw(raw), f"{crc64(raw):016x}")) + b"\n"
    if len(file) > values.VALUES_LIMIT:
        raise values.too_large_error(raw, "the file of the scheduler", len(file), values.VALUES_LIMIT)
    return file


def _read_file(path: Path) -> Any:
    store = store_of(path)
    if not store.path_exists(path):
        raise NoCheckpointError(f"{path} does not exist")
    if store.is_directory(path):
        raise InvalidArgumentError(
            f"{path} is a folder, but a scheduler's state is one file: pass the path of the file"
        )
    if is_torch_file(path):
        return {"class": None, "state": _read_torch_file(path)}
    try:
        file = msgspec.json.decode(store.read_small(path, values.VALUES_LIMIT), type=_SchedulerFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not a file with a scheduler's state: {error}") from error
    if file.format != _FORMAT:
        raise FormatError(f"{path} is not a file with a scheduler's state")
    raw = bytes(file.scheduler)
    if f"{crc64(raw):016x}" != file.crc64nvme:
        raise CorruptCheckpointError(f"{path} does not match its own CRC: it is corrupt")
    return values.load_values(raw, ArrayDecoder({}), str(path))


def _read_torch_file(path: Path) -> Any:
    """Return the state dict in a torch.save file, without running its pickle."""
    reader = TorchFileReader(path, {})
    if reader.groups:
        raise FormatError(f"{path} contains {' and '.join(reader.groups)}, but no scheduler's state")
    shared = reader.read_values(0, ArrayDecoder({}), ArrayDecoder({})).shared
    if "scheduler" in shared:
        return shared["scheduler"]["state"]
    return shared["user_content"]
