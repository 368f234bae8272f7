"""The names of the modules that a process imports before it forks jobs."""

from __future__ import annotations

MODULES = (
    *("rankless.load.fallback", "rankless.load.tier_load", "rankless.save.folder_tier_save", "rankless.cli.prune"),
    *("rankless.save.folder_drain", "rankless.save.object_save", "rankless.save.object_tier_save", "rankless.view"),
    *("rankless.save.object_drain", "rankless.save.offline_drain", "rankless.cli.rollback", "rankless.evaluation"),
    *("rankless.cli.alias", "rankless.run.rollback", "rankless.run.abandoned_tags"),
)
