"""A scheduler's state in a file of its own: JSON with its class, or a state dict as torch.save writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from holdfast.conversion.torchfile import saved
from holdfast.engine.asked import Asked, first_vote
from holdfast.engine.ranks import Session
from holdfast.errors import DamagedError, FormatError, InvalidArgumentError, MismatchError, NoCheckpointError
from holdfast.formats.torchfile.reader import TorchFileReader, is_torch_file
from holdfast.layout import values
from holdfast.layout.blocks import crc64
from holdfast.parts.content import SCHEDULER, Content
from holdfast.parts.files import Shelf
from holdfast.parts.place import Draft, Place
from holdfast.state import scheduler as schedulers
from holdfast.state.arrays import ArraysIn, ArraysOut
from holdfast.storage import local

_FORMAT = "holdfast scheduler"


class _File(msgspec.Struct):
    """What a file of ours holds: encoded values, and the CRC of their JSON."""

    format: str
    scheduler: msgspec.Raw
    crc64nvme: str


def save(scheduler: Any, path: Path, session: Session, *, as_torch: bool) -> None:
    """Rank 0 writes; all ranks raise what goes wrong.

    Raises ``UnstorableError`` naming every value that cannot be stored, ``InvalidArgumentError`` for what is no
    scheduler, or a path that is a folder.
    """
    place = Place(path, folder=False)
    asked = Asked("save of a scheduler", {"the path": repr(str(path))})

    def work() -> bytes:
        place.check()
        return b""

    def decide(_: list[bytes]) -> bytes:
        told = _one(scheduler)
        encoded = _encoded(told)
        data = saved(told["state"]) if as_torch else encoded
        draft = Draft(place, Shelf(Content(SCHEDULER, {}, {}), [], {path.name: data}))
        try:
            draft.finish(lambda _: [])
        except BaseException:
            draft.discard()
            raise
        return b""

    first_vote(session, "saving the scheduler", asked, work, decide)


def load(scheduler: Any, path: Path, session: Session) -> None:
    """Every rank reads; nothing is changed before all have found that it fits.

    Raises ``NoCheckpointError``, ``DamagedError``, ``FormatError``, or ``MismatchError`` for a scheduler of another
    class.
    """

    def work() -> Any:
        saved = _read(path)
        differences = list(schedulers.differences([scheduler], saved))
        if differences:
            raise MismatchError(f"{path} does not fit; nothing was changed: {'; '.join(differences)}")
        return saved

    saved = session.all("reading the scheduler's state", work)
    session.all("putting it in place", lambda: schedulers.load([scheduler], saved))


def _one(scheduler: Any) -> dict[str, Any]:
    found = schedulers.values([scheduler])
    if isinstance(found, list):
        raise InvalidArgumentError("one scheduler is saved at a time")
    return found


def _encoded(told: dict[str, Any]) -> bytes:
    raw = values.to_json(values.encode(told, ArraysOut(inline=("",))))
    file = msgspec.json.encode(_File(_FORMAT, msgspec.Raw(raw), f"{crc64(raw):016x}")) + b"\n"
    if len(file) > values.LIMIT:
        raise values.too_large(raw, "the file of the scheduler", len(file), values.LIMIT)
    return file


def _read(path: Path) -> Any:
    if not local.exists(path):
        raise NoCheckpointError(f"there is no {path}")
    if local.is_folder(path):
        raise InvalidArgumentError(f"{path} is a folder; a scheduler's state is one file")
    if is_torch_file(path):
        return {"class": None, "state": _state_of(path)}
    try:
        found = msgspec.json.decode(local.read_small(path, values.LIMIT), type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is no file of a scheduler's state: {error}") from error
    if found.format != _FORMAT:
        raise FormatError(f"{path} is no file of a scheduler's state")
    raw = bytes(found.scheduler)
    if f"{crc64(raw):016x}" != found.crc64nvme:
        raise DamagedError(f"{path} does not match its own CRC: it is damaged")
    return values.loads(raw, ArraysIn({}), str(path))


def _state_of(path: Path) -> Any:
    """The state dict in a file of torch.save, without running its pickle."""
    reader = TorchFileReader(path, {})
    if reader.groups:
        raise FormatError(f"{path} holds {' and '.join(reader.groups)}, and no scheduler's state")
    shared = reader.values(0, ArraysIn({}), ArraysIn({})).shared
    if "scheduler" in shared:
        return shared["scheduler"]["state"]
    return shared["user_content"]
