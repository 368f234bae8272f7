"""``open_weights``: a model's tensors in a form that any ``load_weights`` takes. Each rank reads only its own part.

The loaders of vLLM and SGLang, and callers with another engine, enter the block on every rank, in the thread of the
caller. It holds the votes "finding the weights", "reading the headers" and "counting hosts" at its begin, and "reading
the weights" at its end: there all bytes that any rank has used are verified.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from os import PathLike
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Literal, Self

import torch

from rankless.engine.comm.call_check import CallDescription, vote_same_call
from rankless.engine.comm.process_group_argument import ProcessGroupArgument
from rankless.engine.comm.session import RankGroup, Session, require_equal
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.block_verification import ChecksumVerifier
from rankless.engine.io.fragments import decode_fragments, encode_fragments
from rankless.engine.io.requests import Fragments
from rankless.errors import FormatError, InvalidArgumentError, StateError
from rankless.formats.detect import open_reader
from rankless.formats.native import MODEL
from rankless.formats.reader import Reader, check_current, check_read, detect_replacement
from rankless.inference.copies_first import copies_first
from rankless.inference.hub_checksums import check_hub_files
from rankless.inference.lazy_tensor import LazyTensor
from rankless.inference.stored_slice import StoredSlice
from rankless.inference.weights_loader import WeightsLoader
from rankless.inference.weights_report import WeightsReport
from rankless.observe.events import Event, OnEvent, Progress, ProgressCounter
from rankless.observe.reporter import notify_listener
from rankless.run.lookup import open_latest
from rankless.run.tag_arguments import TagArgument, check_tag_argument
from rankless.storage.location import parse_location
from rankless.storage.posix import host_id
from rankless.storage.store import store_of

_log = logging.getLogger("rankless")

#: Compare files with the checksums of the Hugging Face Hub.
SHA256: Literal["sha256"] = "sha256"

#: How bytes are verified: against the CRCs of the files, against the checksums of the Hub, or not.
Verify = bool | Literal["sha256"]


def check_verify(verify: Any) -> Verify:
    """Return an argument that is valid. Raises ``InvalidArgumentError``."""
    if isinstance(verify, bool) or verify == SHA256:
        valid: Verify = verify
        return valid
    raise InvalidArgumentError(f'verify must be true, false or "sha256"; got {verify!r:.80}')


class ModelWeights:
    """The tensors of a stored model, inside a ``with`` block. Made by :func:`open_weights`.

    Iterating yields ``(name, tensor)`` pairs, as often as you like. The tensors stand for their bytes. They can be cut,
    permuted, copied into parameters, and computed with, as those that a loader has read.
    """

    def __init__(
        self, path: Path, tag: TagArgument, group: RankGroup, timeout: float, on_event: OnEvent, *, verify: Verify
    ) -> None:
        self._path, self._tag, self._group, self._timeout = path, check_tag_argument(tag), group, timeout
        self._on_event, self._verify = on_event, check_verify(verify)
        self._stack = ExitStack()
        self._began = 0.0
        self._session: Session | None = None
        self._loader: WeightsLoader | None = None
        self._reader: Reader | None = None
        self._report: WeightsReport | None = None

    @property
    def report(self) -> WeightsReport:
        """The report of this rank's reads, when the block has ended. Raises ``StateError`` before."""
        if self._report is None:
            raise StateError("the weights are not loaded yet: the report is there when the block has ended")
        return self._report

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        with ExitStack() as stack:
            self._session = session = self._group.open_session(self._timeout)
            stack.callback(session.leave)
            self._reader = reader = self._open_reader(session)
            counter = ProgressCounter(sum(info.nbytes for info in reader.groups[MODEL].values()), self._report_progress)
            exchange = self._must_exchange(session)
            verify = self._verify is True
            loader = WeightsLoader(reader, self._group, session, counter.add, exchange=exchange, verify=verify)
            self._loader = stack.enter_context(loader)
            stack.enter_context(copies_first(self._loader))
            self._stack = stack.pop_all()
        return self

    def _must_exchange(self, session: Session) -> bool:
        """Return whether ranks must send each other bytes that several need: whether no page cache shares them."""
        phase = "counting hosts"
        _, raw = session.vote(phase, host_id, str.encode, lambda posted: str(len(set(posted))).encode())
        return store_of(self._path).is_remote or int(raw) > 1

    def _report_progress(self, done: int, total: int) -> None:
        notify_listener(self._on_event, Progress("load", self._path, done, total), self._path)

    def _open_reader(self, session: Session) -> Reader:
        """Open the checkpoint that rank 0 selects, on all ranks."""
        selected: list[Reader] = []

        def select() -> bytes:
            if session.rank == COORDINATOR_RANK:
                selected.append(open_latest(self._path, None, self._tag))
                return self._relate(selected[0].path)
            return b""

        def open_selected() -> Reader:
            reader = selected[0] if selected else open_reader(location)
            if MODEL not in reader.groups:
                raise FormatError(f"{reader.path} holds {' and '.join(reader.groups) or 'no tensors'}, and no model")
            check_read(reader, lambda note: note.group == MODEL and not note.is_value)
            if self._verify:
                reader.check_files()
            if self._verify == SHA256:  # each rank reads some of the files
                check_hub_files(reader.files[session.rank :: session.size])
            return reader

        def describe() -> CallDescription:
            arguments = {"the path": repr(str(self._path)), "the tag": repr(self._tag), "verify": repr(self._verify)}
            return CallDescription("open_weights", arguments)

        raw = vote_same_call(session, "finding the weights", describe, select, lambda posted: posted[0])
        location = self._locate(raw)
        return session.vote(
            "reading the headers",
            open_selected,
            lambda reader: reader.fingerprint.encode(),
            lambda posted: require_equal(f"the contents of {location}", [raw.decode() for raw in posted]).encode(),
        )[0]

    def _relate(self, path: Path) -> bytes:
        """Encode the place of a checkpoint: at the path that was passed, in it, or next to it."""
        if path == self._path:
            return b""
        if path.is_relative_to(self._path):
            return b"/" + str(PurePosixPath(*path.parts[len(self._path.parts) :])).encode()
        return b"." + path.name.encode()

    def _locate(self, place: bytes) -> Path:
        """Return the path for a result of :meth:`_relate`, in the same store."""
        kind, name = place[:1], place[1:].decode()
        return self._path / name if kind == b"/" else self._path.with_name(name) if kind else self._path

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._opened("iterate").iterate()

    def _opened(self, what: str) -> WeightsLoader:
        if self._loader is None:
            raise StateError(f"the weights are not open: {what} inside of `with open_weights(...) as weights`")
        return self._loader

    @property
    def path(self) -> Path:
        """The path that was passed."""
        return self._path

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors; tied ones have several. Raises ``StateError`` before the block."""
        return self._opened("ask for names").keys

    @property
    def used_names(self) -> frozenset[str]:
        """The names of the tensors that this rank has read something of, once it was read."""
        return self._opened("ask for names").used_keys

    def count_written(self, tensor: torch.Tensor) -> int:
        """Return how many bytes were written into the memory of a tensor inside the block, in any way."""
        return 0 if self._loader is None else self._loader.count_written(tensor)

    def read_held(self) -> None:
        """Read the tensors that the caller still has, so that they can be used after the block. Plugins call it."""
        if self._loader is not None:
            self._loader.read_held()

    def slices(self) -> dict[str, StoredSlice]:
        """Return the tensors as objects to read parts from, for loaders that cut tensors themselves.

        :func:`transformers.PreTrainedModel.from_pretrained` takes them as ``state_dict=``. Parts that are read are
        plain tensors: each rank reads its own. For example, ``slices()["lm_head.weight"][:1000]`` reads 1000 rows.

        Returns:
            A :class:`~rankless.inference.stored_slice.StoredSlice` for each name.

        Raises:
            StateError: The block has not begun.
        """
        return self._opened("call slices()").slices()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if self._session is not None and self._loader is not None and self._reader is not None:
                self._finish(self._session, self._loader, self._reader, error)

    def _finish(self, session: Session, loader: WeightsLoader, reader: Reader, error: BaseException | None) -> None:
        """Read all pending copies, and verify all ranks' reads. All ranks succeed, or all raise an error."""
        if isinstance(error, GeneratorExit):  # the block is in a generator that is not used to its end
            error = None
        names = [(MODEL, name) for name in loader.names]
        verifier = ChecksumVerifier(reader, names) if self._verify is True else None

        def read_pending() -> bytes:
            if error is not None:
                raise error
            loader.flush()
            if loader.contents:  # the search takes a tenth of a second
                _check_modules()
            loader.end_reads()  # later reads of a thread would not be verified
            with detect_replacement(reader):
                return encode_fragments(_verify_local(verifier, reader, loader.fragments))

        def verify(posted: list[bytes]) -> bytes:
            if verifier is not None:
                with detect_replacement(reader):
                    verifier.verify_across_ranks(decode_fragments(posted))
            return b""

        loader.take_part() if error is None else loader.wait()
        if loader.is_session_over:  # all ranks have the error of a round
            if error is None:
                loader.flush()
            return
        # The block raises its own error. The vote passes it to the other ranks.
        with nullcontext() if error is None else suppress(Exception):
            session.vote("reading the weights", read_pending, lambda fragments: fragments, verify)
        if error is None:
            has_crcs = verifier is not None and verifier.has_all_crcs(names[number] for number in loader.used)
            is_verified = has_crcs or self._verify == SHA256
            self._report = loader.make_report(verified=is_verified, seconds=time.perf_counter() - self._began)
            level = logging.INFO if session.rank == COORDINATOR_RANK else logging.DEBUG
            _log.log(level, "loaded the weights of %s: %s", reader.path, self._report)


def _verify_local(verifier: ChecksumVerifier | None, reader: Reader, fragments: Fragments) -> Fragments:
    """Verify the blocks that this rank has read as a whole, and return the fragments of the others."""
    if verifier is None or not verifier.has_every_crc:
        check_current(reader)
    return verifier.verify_local(fragments) if verifier else {}


def _check_modules() -> None:
    """Raise ``StateError`` if a module holds a lazy tensor instead of a parameter with memory."""
    # Not isinstance, which asks some objects for their class: one of torch answers with a warning.
    for module in (value for value in gc.get_objects() if issubclass(type(value), torch.nn.Module)):
        for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if isinstance(value, LazyTensor):
                raise StateError(
                    f"{name!r} of a {type(module).__name__} was replaced by {value!r}, which was not read: the model's "
                    "loader must copy into parameters"
                )


def open_weights(
    path: str | PathLike[str],
    tag: TagArgument = None,
    *,
    verify: Verify = True,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
    on_event: OnEvent | None = None,
) -> ModelWeights:
    """Open the weights of a model for an engine's own loader, on all ranks. Each rank reads only its own part.

    ```python
    with rankless.open_weights("s3://models/llama") as weights:
        model.load_weights(weights)
    ```

    The block yields ``(name, tensor)`` pairs. The tensors stand for their bytes: elements that ``load_weights`` copies
    into parameters are read when the block ends, or before anything else uses these parameters. Elements that it
    computes with are read when they are used. So a rank that needs a slice of a tensor reads that slice, in any layout
    of the engine.

    Args:
        path: A folder of safetensors files such as a snapshot of the Hugging Face Hub, one file, a checkpoint of any
            format, or a run directory; also its URL in an object store.
        tag: Of a run directory, the checkpoint to load: its tag or an alias, :func:`rankless.best`, or
            :data:`rankless.LATEST`, which is the default.
        verify: Compare all bytes that are read with the CRCs of the files. Blocks that ranks read parts of are verified
            by all ranks together. Files without CRCs, as other libraries write them, are loaded, and reported as not
            verified. ``"sha256"``: read all files of a download of the Hugging Face Hub first, and compare them with
            its checksums.
        process_group: The ranks of the engine, which all load; by default the default group. ``"self"``: this process
            alone. Of a block that is read in part it reads all, to verify it.
        timeout: For how many seconds ranks wait for each other.
        on_event: Is called with each :class:`rankless.Progress`, from any thread.

    Returns:
        A context manager. After the block, ``report`` says which bytes were read.

    Raises:
        NoCheckpointError: There is no checkpoint.
        CorruptCheckpointError: Bytes differ from the saved ones: at the end of the block, on all ranks. The error names
            the tensor, the file and the range. The model must not be used.
        FormatError: There is no model, or rankless cannot read one of its tensors.
        InvalidArgumentError: ``verify="sha256"`` was passed, and a file has no checksum of the Hub.
        StateError: A module holds one of the tensors itself, or one is used after the block.
        RanklessError: Further ones as in :func:`rankless.restore`.
    """
    group = RankGroup(process_group)
    return ModelWeights(parse_location(path), tag, group, timeout, on_event or _ignore_event, verify=verify)


def _ignore_event(event: Event) -> None:
    """Ignore an event."""
    del event
