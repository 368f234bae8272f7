"""The common parts of the loaders of rankless: the check of their arguments, and the begin of their workers.

Both loaders call it on each rank; :func:`init_worker` runs in the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankless.data.worker_signals import shield_worker
from rankless.engine.comm.process_group_argument import ProcessGroupArgument
from rankless.engine.comm.session import RankGroup
from rankless.errors import InvalidArgumentError

#: Options of ``DataLoader`` that decide the order of samples.
_ORDER_OPTIONS = frozenset({"batch_sampler", "sampler"})


def describe_members(ranks: RankGroup, given: ProcessGroupArgument) -> str:
    """Return the ranks that share the data as text: ranks of one group have the same text."""
    if given is None:
        return "all ranks"
    return f"ranks {', '.join(map(str, ranks.global_ranks()))}" if ranks.size > 1 else ""


def init_worker(user_init: Callable[[int], object] | None, worker: int) -> None:
    """Prepare a worker: protect it from signals, then call the user's ``worker_init_fn``."""
    shield_worker()
    if user_init is not None:
        user_init(worker)


def check_arguments(loader: str, batch_size: object, seed: object, options: dict[str, Any]) -> None:
    """Raise ``InvalidArgumentError`` if an argument of a loader is invalid, or if an option decides the order."""
    refused = _ORDER_OPTIONS & options.keys()
    if refused:
        raise InvalidArgumentError(f"{min(refused)}: a {loader} decides the order of samples itself; leave it out")
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InvalidArgumentError(f"batch_size must be a number of samples, at least 1; got {batch_size!r}")
    if not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidArgumentError(f"seed must be an integer from 0 to 2**64 - 1; got {seed!r}")
