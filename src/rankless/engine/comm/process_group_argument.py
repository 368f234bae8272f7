"""The argument ``process_group`` of public functions: which ranks save and load together.

Every public call passes its argument through here, on each rank by itself and before any vote;
:func:`~rankless.engine.comm.collective_call.collective_call` makes the errors common.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rankless.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch.distributed as dist

#: The argument for this process by itself, also if there is a default process group or a launcher with more ranks.
SELF: Literal["self"] = "self"

#: A process group; the default one, or this process if there is none; :data:`SELF`.
ProcessGroupArgument: TypeAlias = "dist.ProcessGroup | Literal['self'] | None"

#: Returns ``torch.distributed``, ``None`` if this process has not loaded it: then it has no process group.
loaded_distributed: Callable[[], Any] = partial(sys.modules.get, "torch.distributed")


def current_process_group(argument: ProcessGroupArgument) -> dist.ProcessGroup | None:
    """Return the given process group, or the default one, or ``None`` for this process by itself."""
    given = check_process_group(argument)
    if given == SELF:
        return None
    return loaded_distributed().group.WORLD if given is None and _has_default_group() else given


def check_process_group(given: Any) -> ProcessGroupArgument:
    """Return an argument that is valid, or the object that torch gives to ranks that are not in a process group.

    Raises ``InvalidArgumentError`` for anything else.
    """
    dist = loaded_distributed()
    is_group = (
        dist is not None
        and dist.is_available()
        and (isinstance(given, dist.ProcessGroup) or given is dist.GroupMember.NON_GROUP_MEMBER)
    )
    if given is None or is_group or (isinstance(given, str) and given == SELF):
        valid: ProcessGroupArgument = given
        return valid
    raise InvalidArgumentError(f'process_group must be a ProcessGroup of torch, "self" or None; got {given!r:.80}')


def check_ranks_are_joined(
    given: ProcessGroupArgument, alone: str = 'pass process_group="self" or unset WORLD_SIZE'
) -> None:
    """Raise ``InvalidArgumentError`` if a launcher started several ranks, and each would save by itself.

    Called at the start of each save that may replace existing files: without a process group all ranks would write the
    same files, and each would replace the files of the others. ``alone`` is advice for messages: how one rank can save
    by itself. A call that only writes new paths claims them instead: see :func:`rankless.run.pending_dir.claim_output`.
    """
    text = describe_unjoined_ranks() if given is None else ""
    if text:
        raise InvalidArgumentError(
            f"{text}: each rank would save by itself over the checkpoints of the others. Call "
            "torch.distributed.init_process_group() before the save; if this process is to save by itself, "
            f"{alone}"
        )


def describe_unjoined_ranks() -> str:
    """Return a text if a launcher started several ranks and this process has no process group; else an empty one."""
    world_size = os.environ.get("WORLD_SIZE", "")
    if _has_default_group() or not world_size.isdecimal() or int(world_size) <= 1:
        return ""
    return f"this process is one of {world_size} ranks (WORLD_SIZE, set by torchrun), and there is no process group"


def _has_default_group() -> bool:
    dist = loaded_distributed()
    return dist is not None and dist.is_available() and dist.is_initialized()
