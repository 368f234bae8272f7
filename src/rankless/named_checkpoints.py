"""The public functions that list the checkpoints of a run and give them further names. They need no torch.

They are called in one process, outside of votes, but for a look into local tiers.
"""

from __future__ import annotations

from os import PathLike

from rankless.run import aliases, catalog
from rankless.run.aliases import delete_alias
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.tag_arguments import TagArgument, check_tag_argument, give_alias
from rankless.storage.location import parse_location
from rankless.tier.tier_options import LocalTier, as_local_tier

#: The seconds that ranks wait for each other when they look for a checkpoint in their local tiers.
_TIMEOUT = 600.0


def has_checkpoint(path: str | PathLike[str], *, local: LocalTier | str | PathLike[str] | None = None) -> bool:
    """Return whether a run directory has a complete checkpoint, or the local tiers of the hosts of the job have one.

    Without ``local`` only the run directory is checked, by this process alone. With it, all ranks must call it if there
    is a process group.

    Args:
        path: The run directory.
        local: The local tier of the job, as in :func:`rankless.load_checkpoint`.

    Returns:
        ``True`` if there is at least one complete checkpoint.

    Raises:
        StorageError: The file system reported an error, so the answer is unknown.
    """
    run, tier = parse_location(path), as_local_tier(local)
    if tier is None:
        return any(info.status == "complete" for info in catalog.list_checkpoints_strictly(run))
    from rankless.engine.comm.session import RankGroup  # noqa: PLC0415 - it needs torch
    from rankless.load.tier_generations import has_checkpoint_in_tier  # noqa: PLC0415 - as above

    return has_checkpoint_in_tier(run, tier, RankGroup(None), _TIMEOUT)


def list_checkpoints(path: str | PathLike[str]) -> list[CheckpointInfo]:
    """Return the checkpoints in a run directory, oldest first.

    Args:
        path: The run directory.

    Returns:
        One entry for each checkpoint. Checkpoints that cannot be read, for example because their manifest is corrupt,
        come before all others.
    """
    return catalog.list_checkpoints(parse_location(path))


def set_alias(path: str | PathLike[str], alias: str, tag: TagArgument = None) -> CheckpointInfo:
    """Give a checkpoint a further name, which loads and opens accept. Call it on one rank.

    Retention does not remove a checkpoint that has an alias. If another process replaces the checkpoint, loads by the
    alias fail until it is set again. A checkpoint that has the alias as its tag is preferred to it.

    Args:
        path: The run directory.
        alias: The name, such as ``"production"``. If it is an alias already, it then means the other checkpoint.
        tag: The checkpoint, as in :func:`restore`; the latest by default.

    Returns:
        The checkpoint.

    Raises:
        NoCheckpointError: There is no such checkpoint.
        TagExistsError: There is a checkpoint that has the alias as its tag.
        InvalidArgumentError: The alias cannot be the name of a checkpoint.
        StorageError: The file system reported an error.
    """
    return give_alias(parse_location(path), alias, check_tag_argument(tag))


def remove_alias(path: str | PathLike[str], alias: str) -> None:
    """Remove an alias. The checkpoint stays. Call it on one rank.

    Args:
        path: The run directory.
        alias: The alias.

    Raises:
        NoCheckpointError: There is no such alias.
    """
    delete_alias(parse_location(path), alias)


def list_aliases(path: str | PathLike[str]) -> dict[str, str]:
    """Return the aliases in a run directory with the tags of their checkpoints, which may have been removed since.

    Args:
        path: The run directory.

    Returns:
        The tags by alias.
    """
    run = parse_location(path)
    return aliases.list_meant(run, catalog.cached_checkpoints(run))
