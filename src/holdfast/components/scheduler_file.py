"""A scheduler's state in a file of its own: JSON with its class, or a state dict as torch.save writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from holdfast.components.content import SCHEDULER, ComponentContent
from holdfast.components.destination import ComponentStaging, Destination
from holdfast.components.files import FileSet
from holdfast.conversion.torch_target import as_saved_tensor
from holdfast.engine.comm.call_check import CallDescription, vote_same_call
from holdfast.engine.comm.session import Session
from holdfast.errors import (
    CorruptCheckpointError,
    FormatError,
    InvalidArgumentError,
    MismatchError,
    NoCheckpointError,
)
from holdfast.formats.torch_file import TorchFileReader, is_torch_file
from holdfast.ondisk import values
from holdfast.ondisk.blocks import crc64
from holdfast.state import scheduler as schedulers
from holdfast.state.arrays import ArrayDecoder, ArrayEncoder
from holdfast.storage import posix

_FORMAT = "holdfast scheduler"


class _File(msgspec.Struct):
    """What a file of ours holds: encoded values, and the CRC of their JSON."""

    format: str
    scheduler: msgspec.Raw
    crc64nvme: str


def write_scheduler(scheduler: Any, path: Path, session: Session, *, as_torch: bool) -> None:
    """Rank 0 writes; all ranks raise what goes wrong.

    Raises ``UnsupportedValueError`` naming every value that cannot be stored, ``InvalidArgumentError`` for what is no
    scheduler, or a path that is a folder.
    """
    place = Destination(path, folder=False)
    asked = CallDescription("save of a scheduler", {"the path": repr(str(path))})

    def work() -> bytes:
        place.check()
        return b""

    def decide(_: list[bytes]) -> bytes:
        told = _one(scheduler)
        encoded = _encoded(told)
        data = as_saved_tensor(told["state"]) if as_torch else encoded
        draft = ComponentStaging(place, FileSet(ComponentContent(SCHEDULER, {}, {}), [], {path.name: data}))
        try:
            draft.finish(lambda _: [])
        except BaseException:
            draft.discard()
            raise
        return b""

    vote_same_call(session, "saving the scheduler", asked, work, decide)


def read_scheduler(scheduler: Any, path: Path, session: Session) -> None:
    """Every rank reads; nothing is changed before all have found that it fits.

    Raises ``NoCheckpointError``, ``CorruptCheckpointError``, ``FormatError``, or ``MismatchError`` for a scheduler of another
    class.
    """

    def work() -> Any:
        saved = _read(path)
        differences = list(schedulers.compare_schedulers([scheduler], saved))
        if differences:
            raise MismatchError(f"{path} does not fit; nothing was changed: {'; '.join(differences)}")
        return saved

    saved = session.all("reading the scheduler's state", work)
    session.all("putting it in place", lambda: schedulers.load_scheduler([scheduler], saved))


def _one(scheduler: Any) -> dict[str, Any]:
    found = schedulers.scheduler_values([scheduler])
    if isinstance(found, list):
        raise InvalidArgumentError("one scheduler is saved at a time")
    return found


def _encoded(told: dict[str, Any]) -> bytes:
    raw = values.to_json(values.encode_value(told, ArrayEncoder(inline=("",))))
    file = msgspec.json.encode(_File(_FORMAT, msgspec.Raw(raw), f"{crc64(raw):016x}")) + b"\n"
    if len(file) > values.VALUES_LIMIT:
        raise values.too_large_error(raw, "the file of the scheduler", len(file), values.VALUES_LIMIT)
    return file


def _read(path: Path) -> Any:
    if not posix.path_exists(path):
        raise NoCheckpointError(f"there is no {path}")
    if posix.is_directory(path):
        raise InvalidArgumentError(f"{path} is a folder; a scheduler's state is one file")
    if is_torch_file(path):
        return {"class": None, "state": _state_of(path)}
    try:
        found = msgspec.json.decode(posix.read_small(path, values.VALUES_LIMIT), type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is no file of a scheduler's state: {error}") from error
    if found.format != _FORMAT:
        raise FormatError(f"{path} is no file of a scheduler's state")
    raw = bytes(found.scheduler)
    if f"{crc64(raw):016x}" != found.crc64nvme:
        raise CorruptCheckpointError(f"{path} does not match its own CRC: it is damaged")
    return values.load_values(raw, ArrayDecoder({}), str(path))


def _state_of(path: Path) -> Any:
    """The state dict in a file of torch.save, without running its pickle."""
    reader = TorchFileReader(path, {})
    if reader.groups:
        raise FormatError(f"{path} holds {' and '.join(reader.groups)}, and no scheduler's state")
    shared = reader.values(0, ArrayDecoder({}), ArrayDecoder({})).shared
    if "scheduler" in shared:
        return shared["scheduler"]["state"]
    return shared["user_content"]
