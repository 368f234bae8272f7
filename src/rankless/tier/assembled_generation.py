"""A generation as the hosts of a job have it together.

:mod:`rankless.load.part_assembler` makes it on each rank of a load or drain, and a drain without a job makes one
(:mod:`rankless.save.offline_drain`). :meth:`Assembly.rank_that_drains` must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankless.tier.generation import Generation


@dataclass(frozen=True)
class Assembly:
    """A generation as the hosts of a job have it together.

    ``places`` has, for each part, the data file on each host that holds it. ``host_of`` is the number of each rank's
    host, ``host`` the number of the own host. ``problems`` describe the corrupt parts.
    """

    generation: Generation
    places: Mapping[int, Mapping[int, str]]
    host_of: Sequence[int]
    host: int
    fetched: Mapping[int, Path] = field(default_factory=dict)
    folder: Path = Path()
    problems: Sequence[str] = ()

    def path_of(self, part: int) -> Path:
        """Return the file of this host with the bytes of a part; of a part on other hosts, with those that it got."""
        name = self.places[part].get(self.host)
        return self.fetched[part] if name is None else self.folder / name

    @property
    def is_spread(self) -> bool:
        """True if there are several hosts."""
        return len(set(self.host_of)) > 1

    def rank_that_drains(self, part: int) -> int:
        """Return the rank that writes a part into the run directory: one of a host that holds it.

        For example, if two hosts hold part 3, the second one in order drains it.
        """
        hosts = sorted(self.places[part])
        host = hosts[part % len(hosts)]
        ranks = [rank for rank, of_rank in enumerate(self.host_of) if of_rank == host]
        return ranks[part % len(ranks)]
