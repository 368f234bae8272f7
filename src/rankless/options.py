"""The options of saves and loads that few jobs need: as dataclasses, and as the keyword arguments of the same names.

The dataclasses are the one list of options: :func:`rankless.save_checkpoint`, :class:`rankless.RunDirectory` and
:class:`rankless.Checkpointer` take :class:`SaveOptions`, and a request to save has them; every load takes
:class:`LoadOptions`. The two ``TypedDict`` classes repeat the names and types for type checkers and editors.

All ranks pass the same options, but each may have its own listener: a save or load compares those that its votes depend
on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from os import PathLike
from typing import Any, TypedDict, TypeVar

from rankless.errors import InvalidArgumentError
from rankless.observe.events import OnEvent
from rankless.ondisk.data_files import SHARD_SIZE, parse_size
from rankless.ondisk.validation import check_choice, check_keys

#: When the state is copied: before the call returns, or, if only optimizer steps change it, before the next step.
STAGING = ("eager", "overlapped")

#: How much of the deferred copies is checked for changes made while they were copied.
STAGING_CHECK = ("sampled", "full")

#: Which files hold frozen parameters: the same as other tensors, or files of their own.
FROZEN = ("together", "apart")

#: How much of the replicas on several ranks is compared in each save.
REPLICA_CHECK = ("sampled", "full")


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save that few jobs need.

    Pass an object as ``options=`` of :func:`rankless.save_checkpoint`, :class:`rankless.RunDirectory` or
    :class:`rankless.Checkpointer`, or single options as keyword arguments of these, which have precedence. The save
    checks all of them: an invalid one raises ``InvalidArgumentError`` on all ranks. Unless it says otherwise, an option
    must be the same on all ranks, or ``RankMismatchError`` is raised.

    Attributes:
        max_shard_size: The maximum size of the tensors in one file, as a number of bytes or as text such as
            ``"500MB"``. ``"1GB"`` by default.
        staging: When an asynchronous save copies the state. ``"eager"``, the default: everything is copied before the
            call returns. ``"overlapped"``: the parameters and states of the ``torch.optim`` optimizers passed are
            copied during the next forward and backward pass, and the next step of any optimizer waits for these copies;
            everything else is copied before the call returns. Do not use ``"overlapped"`` if parameters change
            outside of optimizer steps: through ``.data``, raw kernels, or a CUDA graph of the step.
        staging_check: How much of an overlapped copy is checked for changes made while it was copied.
            ``"sampled"``, the default: hashes of 12 chunks of 4 MiB, different ones in each save. ``"full"``: hashes of
            everything, which takes as long as an eager copy. A difference fails that save with ``TornSnapshotError``.
        replica_check: How much of the tensors that several ranks hold is checked to be equal before anything is
            written. ``"sampled"``, the default: hashes of 4 KiB of every tensor and of 64 MiB in addition, different
            ones in each save, and of everything in the first save. ``"full"``: hashes of everything in each save. The
            check takes part of the time that the call blocks; :class:`rankless.Saved` reports how long. A difference
            raises ``ReplicaMismatchError``.
        incremental: Do not write bytes that the checkpoint saved or loaded before has already; ``True`` by default, in
            checkpoints of 64 KiB or more if that is a thousandth of the bytes. A file without changes becomes a hard
            link of the earlier one, which is made read-only. On file systems that can share parts of files (XFS,
            Btrfs), unchanged parts of other files are shared, too. The checkpoint is complete by itself and has the
            same bytes as one that was written in full. Every byte that is not written was hashed for this save. With
            ``staging="overlapped"`` frozen parameters are hashed after the call has returned; if one has changed
            meanwhile, the save fails with ``TornSnapshotError``. An object store copies the files that have only frozen
            parameters, without a byte sent; all others are sent.
        keep_full_every: Of this many checkpoints of a run directory, one is written in full; 32 by default.
        frozen: ``"apart"`` puts parameters with ``requires_grad=False`` into files of their own, so that these do not
            change while others are trained. All ranks must agree about which parameters are frozen. By default
            ``"together"``.
        rng: Whether to save the states of the random number generators of each rank; ``True`` by default.
        state_dict_hooks: Store tensors under the names that the model's ``state_dict`` hooks give them, also if a hook
            splits a parameter into several tensors; optimizer states are stored likewise. If ``False``, parameters,
            buffers and extra state are stored under the names that the modules have for them, without anything that
            hooks add. Checkpoints of both kinds can be loaded. ``True`` by default; hooks that add tensors of their own
            raise ``StateError``.
        adapter_only: Of a model with PEFT adapters save only the adapters, not the base model. They are in the folder
            ``adapter``, as PEFT stores them. By default the checkpoint has this folder in addition to ``model``, which
            contains all weights. ``InvalidArgumentError`` is raised if the model has no adapters, ``StateError`` if
            PEFT computes the tensors that it stores from shards.
        files: Small files to store in the checkpoint's directory, such as a tokenizer's: bytes by name, at most 64 MiB
            each. Rank 0 writes them; all ranks pass the same names. None by default.
        stats: After the commit, let rank 0 compute the statistics of all tensors in the background and keep them with
            the checkpoint: :func:`rankless.read_statistics` returns them. It reads the checkpoint once for this, and
            pauses while a save is in progress. :func:`rankless.finalize` waits for it; the end of the process, for 5
            seconds. A failure is a warning. ``False`` by default.
        on_event: A function that is called with each event: :class:`rankless.Progress`, :class:`rankless.Saved` or
            :class:`rankless.SaveFailed`, and with a local tier :class:`rankless.SavedLocally` or
            :class:`rankless.DrainFailed`. Each rank may pass another one.
    """

    max_shard_size: int | str = SHARD_SIZE
    staging: str = "eager"
    staging_check: str = "sampled"
    replica_check: str = "sampled"
    incremental: bool = True
    keep_full_every: int = 32
    frozen: str = "together"
    rng: bool = True
    state_dict_hooks: bool = True
    adapter_only: bool = False
    files: Mapping[str, bytes] | None = None
    stats: bool = False
    on_event: OnEvent | None = None

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` if the value of an option is invalid by itself."""
        parse_size(self.max_shard_size)
        check_choice("staging", self.staging, STAGING)
        check_choice("staging_check", self.staging_check, STAGING_CHECK)
        check_choice("replica_check", self.replica_check, REPLICA_CHECK)
        check_choice("frozen", self.frozen, FROZEN)
        _check_types(self, "incremental", "rng", "state_dict_hooks", "adapter_only", "stats")
        number: object = self.keep_full_every
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
            raise InvalidArgumentError(f"keep_full_every must be a whole number above 0; got {number!r:.80}")


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load that few jobs need.

    Pass an object as ``options=`` of :func:`rankless.load_checkpoint`, :func:`rankless.restore` and the like, or single
    options as keyword arguments of these, which have precedence. The load checks all of them: an invalid one raises
    ``InvalidArgumentError``. Unless it says otherwise, an option must be the same on all ranks, or
    ``RankMismatchError`` is raised.

    Attributes:
        strict: Whether names must match; ``True`` by default, and a difference raises ``MismatchError``. If ``False``,
            matching names are loaded, and all others are left unchanged and reported. An optimizer's parameters are
            matched by name; those without a saved state get no state. A dict such as ``{"model": False}`` is for single
            components; all others are strict.
        allow_missing: The components that may be missing although ``strict`` is set: ``"dataloader"``, ``"rng"``,
            ``"scheduler"``, ``"stateful"``, ``"model"``, ``"optimizer"``, or one of several, such as
            ``"stateful/scaler"`` or ``"model/generator"``. None by default. ``per_rank_content`` may always be missing,
            with a warning if training is resumed.
        verify: Whether to check every byte that is read against its CRC; ``True`` by default. A difference raises
            ``CorruptCheckpointError``.
        on_corruption: The reaction if the newest checkpoint is corrupt and no tag was given. ``"fall_back"``, the
            default: load the newest intact checkpoint, with a warning. ``"raise"``: raise ``CorruptCheckpointError``.
        share_reads: How to read bytes that several ranks need. ``"always"``: one rank reads them and sends them to the
            others. ``"never"``: each rank reads them. ``"auto"``, the default: ``"always"`` if the ranks are on several
            hosts, else ``"never"``, because ranks of one host share a page cache.
        rng: Whether to restore the states of the random number generators. By default they are restored if an
            optimizer is loaded, and may then be missing in the checkpoint. Each rank gets its own states back; if the
            number of ranks has changed, each rank derives new states from the saved ones, different on each rank.
        resume: Whether the training goes on from the loaded state. With a local tier the load then takes over its
            folder: an older job that is still alive saves nothing into it any more, and a checkpoint that only the tier
            has is written into the run directory. Otherwise the load changes nothing there, for an evaluation next to
            the training, and the first save takes over. By default, whether an optimizer or a data loader is passed.
        again: Whether to load the checkpoint that is named although the run went back to it already. If ``False``,
            which is the default of :meth:`rankless.Checkpointer.resume`, the latest is loaded then.
        cast_dtype: Whether to cast between floating point dtypes; ``False`` by default, and a difference raises
            ``MismatchError``. No other dtypes are cast, for example complex to real or floating point to integer.
        keys: The keys at which a checkpoint of another system has its components, if rankless does not find them by
            their names: ``{"model": "app.net", "optimizer": "app.opt"}``. None by default.
        edit: How the checkpoint is changed while it is loaded, with its optimizer states: verbs such as
            ``["resize-vocab 50304"]``, or the path of a recipe, as :func:`rankless.edit` takes them. Checkpoints that
            are saved afterwards name the edit, and a load with the same edit does not change them again. None by
            default.
        on_event: A function that is called with each event: :class:`rankless.Progress` and :class:`rankless.Loaded`.
            Each rank may pass another one.
    """

    strict: bool | Mapping[str, bool] = True
    allow_missing: Collection[str] = ()
    verify: bool = True
    on_corruption: str = "fall_back"
    share_reads: str = "auto"
    rng: bool | None = None
    resume: bool | None = None
    again: bool | None = None
    cast_dtype: bool = False
    keys: Mapping[str, str] | None = None
    edit: str | PathLike[str] | Sequence[str | Mapping[str, Any]] | None = None
    on_event: OnEvent | None = None

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` if a flag, the keys or the listener are invalid by themselves."""
        _check_types(self, "verify", "cast_dtype", "rng", "resume", "again")
        check_keys(self.keys)


class SaveKeywords(TypedDict, total=False):
    """The fields of :class:`SaveOptions` as keyword arguments."""

    max_shard_size: int | str
    staging: str
    staging_check: str
    replica_check: str
    incremental: bool
    keep_full_every: int
    frozen: str
    rng: bool
    state_dict_hooks: bool
    adapter_only: bool
    files: Mapping[str, bytes] | None
    stats: bool
    on_event: OnEvent | None


class LoadKeywords(TypedDict, total=False):
    """The fields of :class:`LoadOptions` as keyword arguments."""

    strict: bool | Mapping[str, bool]
    allow_missing: Collection[str]
    verify: bool
    on_corruption: str
    share_reads: str
    rng: bool | None
    resume: bool | None
    again: bool | None
    cast_dtype: bool
    keys: Mapping[str, str] | None
    edit: str | PathLike[str] | Sequence[str | Mapping[str, Any]] | None
    on_event: OnEvent | None


_Options = TypeVar("_Options", SaveOptions, LoadOptions)


def _check_types(options: SaveOptions | LoadOptions, *flags: str) -> None:
    """Raise ``InvalidArgumentError`` for a flag that is neither Python's nor ``None`` by default, or a wrong listener.

    A flag of NumPy is refused: it is not the ``True`` or ``False`` that some options are compared with.
    """
    for name in flags:
        value = getattr(options, name)
        if not isinstance(value, bool) and (value is not None or getattr(type(options), name) is not None):
            raise InvalidArgumentError(f"{name} must be True or False; got {value!r:.80}: pass bool({name})")
    if options.on_event is not None and not callable(options.on_event):
        raise InvalidArgumentError(f"on_event must be a function that takes an event; got {options.on_event!r:.80}")


def with_keywords(
    default: _Options, options: _Options | None, keywords: Mapping[str, Any], call: Callable[..., Any]
) -> _Options:
    """Return the options of a call: ``options``, or else ``default``, with those that it got as keyword arguments.

    ``call`` is the public function or class that was called, for the message. Raises ``InvalidArgumentError`` for a
    keyword that is no option, and for ``options`` of another type.
    """
    chosen = default if options is None else options
    if not isinstance(chosen, type(default)):
        raise InvalidArgumentError(f"options must be {type(default).__name__}(…); got {chosen!r:.80}")
    names = {field.name for field in fields(default)}
    for name in keywords:
        if name not in names:
            raise InvalidArgumentError(_describe_unknown(name, names, call))
    return replace(chosen, **keywords)


def _describe_unknown(name: str, options: set[str], call: Callable[..., Any]) -> str:
    """Return the message for an argument that ``call`` does not have, with the nearest one that it has."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake needs it
    from inspect import Parameter, signature  # noqa: PLC0415 - as above

    parameters = signature(call).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD} - {"self"}
    nearest = get_close_matches(name, sorted(known | options), n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(sorted(known | options))}"
    if name in {field.name for field in fields(LoadOptions)}:
        hint = "it is an option of a load, such as resume() or restore()"
    elif name in {field.name for field in fields(SaveOptions)}:
        hint = "it is an option of a save, such as Checkpointer() or save_checkpoint()"
    return f"{call.__qualname__} has no argument {name!r}: {hint}"
