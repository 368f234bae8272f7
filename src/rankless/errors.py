"""The exceptions that rankless raises; each is also a subclass of the built-in exception that fits it.

Every message names the thing (tensor, file, rank, tag) and says what to do. In a distributed
run all ranks raise the same error: see :mod:`rankless.engine.comm.session`.
"""

from __future__ import annotations


class RanklessError(Exception):
    """Base class of all errors that rankless raises on purpose."""


class InvalidArgumentError(RanklessError, ValueError):
    """An argument is invalid, for example a tag with a slash or a size that cannot be parsed."""


class TorchMissingError(RanklessError, ModuleNotFoundError):
    """PyTorch is not installed, and the called function needs it. Reading checkpoints does not."""


class TorchVersionError(RanklessError, ImportError):
    """The version of PyTorch that is installed is too old."""


class NoCheckpointError(RanklessError, FileNotFoundError):
    """There is no checkpoint at the path, or none with the tag."""


class EmptyRunError(NoCheckpointError):
    """The path has no checkpoint at all, not even one that cannot be read: a training begins there."""


class CheckpointReplacedError(NoCheckpointError):
    """Another process replaced or removed the checkpoint while it was read."""


class TagExistsError(RanklessError, FileExistsError):
    """The tag or path is taken. A checkpoint is only overwritten if the caller asks for it."""


class UnsupportedValueError(RanklessError, TypeError):
    """Values of types that cannot be stored. The message names each by its path in the tree of values."""


class UnsupportedTensorError(RanklessError, TypeError):
    """A tensor with a dtype, layout or placement that cannot be stored."""


class StateError(RanklessError, ValueError):
    """Training objects that contradict each other, for example an optimizer's parameter that no model has."""


class WeightsConflictError(StateError):
    """Another publisher has published into the same weights directory. The next version of this one is an anchor."""


class SupersededError(StateError):
    """Another job has continued the run of this one, which must not save into it any more."""


class MismatchError(RanklessError, ValueError):
    """The checkpoint does not match the objects it is loaded into: names, shapes or dtypes differ."""


class OptimizerMismatchError(MismatchError):
    """The checkpoint's optimizer is of another class, or has other param groups."""


class ReplicaMismatchError(RanklessError, ValueError):
    """Ranks that should hold equal replicas of a tensor hold different values."""


class TornSnapshotError(RanklessError, RuntimeError):
    """A tensor changed while it was copied in the background. That save failed and left nothing behind."""


class DeviceError(RanklessError, RuntimeError):
    """An accelerator reported an error while tensors were copied from or to it."""


class RankMismatchError(RanklessError, ValueError):
    """Ranks were called with different arguments, or see different files."""


class RankFailedError(RanklessError, RuntimeError):
    """One rank failed with an error of its own. Every rank raises this error, which names that rank."""


class PeerFailedError(RankFailedError):
    """A rank stopped because another rank failed. If the other rank's error is known, that one is raised instead."""


class RankTimeoutError(RanklessError, TimeoutError):
    """A rank did not arrive before the deadline."""


class StorageError(RanklessError, OSError):
    """The file system reported an error: no space, no permission, or an I/O error."""


class SpaceShortageError(StorageError):
    """A folder of the local tier has not enough space: it needs ``needed`` more bytes, and ``free`` are free."""

    def __init__(self, *args: object, needed: int = 0, free: int = 0) -> None:
        super().__init__(*args)
        self.needed, self.free = needed, free


class UnstableReadError(StorageError):
    """Bytes that were read do not match their CRC, but a second read of them does: the stored bytes are intact."""


class CorruptCheckpointError(RanklessError, ValueError):
    """Stored bytes differ from the saved ones. The message names the file and, if one is affected, the tensor."""


class ReadBudgetError(CorruptCheckpointError):
    """A file with values that refer to each other so often that a read exceeds the budget for a file of its size."""


class UnsafeNameError(CorruptCheckpointError):
    """A name in a checkpoint that points outside the checkpoint's directory."""


class OutsideLinkError(UnsafeNameError):
    """A file of a checkpoint that is a link to a place outside of it, where it may be intact. It is not read."""


class FormatError(RanklessError, ValueError):
    """The file or directory is not a checkpoint in a supported format, or is in a newer version of one."""


class UnsafePickleError(FormatError):
    """A pickle that refers to something other than tensors and plain values. Nothing in it was executed."""
