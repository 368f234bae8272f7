"""One type for each thing that can go wrong; each is also the built-in that fits it.

Every message names the thing (tensor, file, rank, tag) and says what to do. In a distributed
run all ranks raise the same error: see :mod:`holdfast.engine.comm.session`.
"""

from __future__ import annotations


class HoldfastError(Exception):
    """Base of every error that holdfast raises on purpose."""


class InvalidArgumentError(HoldfastError, ValueError):
    """An argument cannot be used: a tag with a slash, a size that is no size."""


class NoCheckpointError(HoldfastError, FileNotFoundError):
    """There is no checkpoint where one was asked for."""


class CheckpointReplacedError(NoCheckpointError):
    """A checkpoint that another process replaced or removed while it was read."""


class TagExistsError(HoldfastError, FileExistsError):
    """The tag is taken; a checkpoint is never overwritten by accident."""


class UnsupportedValueError(HoldfastError, TypeError):
    """Values that have no place in a checkpoint, each named by its path in the tree."""


class UnsupportedTensorError(HoldfastError, TypeError):
    """A tensor whose dtype, layout or placement cannot be stored."""


class StateError(HoldfastError, ValueError):
    """Training objects that contradict each other: a parameter no model holds, a name twice."""


class MismatchError(HoldfastError, ValueError):
    """What was asked for is not what the checkpoint holds: missing, unexpected, shape, dtype."""


class OptimizerMismatchError(MismatchError):
    """The checkpoint's optimizer is of another class, or groups its parameters otherwise."""


class ReplicaMismatchError(HoldfastError, ValueError):
    """Ranks that should hold the same tensor hold different values."""


class TornSnapshotError(HoldfastError, RuntimeError):
    """What was saved changed while it was copied. That save failed; nothing of it is left."""


class RankMismatchError(HoldfastError, ValueError):
    """Ranks called with different arguments, or see different files."""


class RankFailedError(HoldfastError, RuntimeError):
    """One rank failed for a reason of its own; every rank raises this, naming it."""


class PeerFailedError(RankFailedError):
    """A rank stopped because another one failed; where that one's error is known, it is raised instead."""


class RankTimeoutError(HoldfastError, TimeoutError):
    """A rank did not arrive before the deadline."""


class StorageError(HoldfastError, OSError):
    """The file system refused: no space, no permission, an input or output error."""


class CorruptCheckpointError(HoldfastError, ValueError):
    """Bytes that are not what was saved. Names the file and, where it is one, the tensor."""


class ReadBudgetError(CorruptCheckpointError):
    """A file asks for more work than its bytes can: its values name each other again and again."""


class UnsafeNameError(CorruptCheckpointError):
    """A name inside a checkpoint that leads out of its folder."""


class FormatError(HoldfastError, ValueError):
    """Not a checkpoint of a format known here, or of a newer version of it."""


class UnsafePickleError(FormatError):
    """A pickle that names something other than tensors and plain values. Nothing of it was run."""
