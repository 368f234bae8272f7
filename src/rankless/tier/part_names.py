"""The names of the files of generations in the local tier: the tables of parts and parities, and commons.

:mod:`rankless.tier.host_folder` and :mod:`rankless.tier.parts_in_run` name files so. The names are on disks, their
numbers have a fixed width, and keys sort from the oldest to the newest.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rankless.process.prepared_types import prepared

#: The suffixes of the tables of parts and parities, and of the values that a generation has in addition to these.
PART_SUFFIX, PARITY_SUFFIX, COMMON_SUFFIX = ".part", ".parity", ".common"

_NAME = re.compile(
    r"(?P<incarnation>\d{8})\.(?P<sequence>\d{20})\.(?P<id>[0-9a-f]{16})"
    r"(\.(?P<rank>\d{6})-of-(?P<size>\d{6})\.(?P<kind>part|parity)|\.common)(?P<draft>\.[0-9a-f]{16})?"
)


@prepared
class GenerationKey(NamedTuple):
    """The identity of a generation, in the order from the oldest to the newest.

    For example, incarnation 2 has names that begin with ``00000002.``.
    """

    incarnation: int
    sequence: int
    id: str

    @property
    def name(self) -> str:
        """The beginning of the names of its files."""
        return f"{self.incarnation:08d}.{self.sequence:020d}.{self.id}"


class PartName(NamedTuple):
    """The name of the table of a part: the generation, the rank that staged it, and the number of ranks that saved.

    For example, rank 3 of 8 has a name that ends with ``.000003-of-000008.part``.
    """

    key: GenerationKey
    rank: int
    size: int

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{self.key.name}.{self.rank:06d}-of-{self.size:06d}{PART_SUFFIX}"

    @property
    def parity_name(self) -> str:
        """The name of the table of the parity that the rank keeps."""
        return self.name.removesuffix(PART_SUFFIX) + PARITY_SUFFIX


def parse_generation_name(name: str) -> GenerationKey | None:
    """Return the generation of a table, a common, or a draft of one by its file's name; ``None`` for any other file.

    Drafts are left by processes that were killed before they could rename them.
    """
    match = _NAME.fullmatch(name)
    return None if match is None else GenerationKey(int(match["incarnation"]), int(match["sequence"]), match["id"])


def parse_part_name(name: str, kind: str = "part") -> PartName | None:
    """Parse a ``PartName.name``, or with the kind ``"parity"`` its parity's. Return ``None`` for any other name.

    For example, the rank is 3 if the name ends with ``.000003-of-000008.part``.
    """
    match, key = _NAME.fullmatch(name), parse_generation_name(name)
    if match is None or key is None or match["kind"] != kind or match["draft"] is not None:
        return None
    return PartName(key, int(match["rank"]), int(match["size"]))
