"""The names of the modules that a process imports before it forks jobs."""

from __future__ import annotations

MODULES = (
    *("rankless.load.fallback", "rankless.load.tier_load", "rankless.save.tier_content", "rankless.cli.prune"),
    *("rankless.save.generation_content", "rankless.save.object_output", "rankless.view"),
    *("rankless.save.offline_drain", "rankless.cli.rollback", "rankless.evaluation"),
    *("rankless.cli.alias", "rankless.run.rollback", "rankless.run.abandoned_tags"),
)
