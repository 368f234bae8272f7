"""Comparison of named values between ranks, by digests that the ranks post in a vote they hold anyway.

A rank posts 16 bytes for each name that it has. A name may be on some ranks only: those are compared with each other.

Each rank posts its table in the vote "looking at what to save", and rank 0 finds the differing values there
(:mod:`rankless.save.save_negotiation`). Digests are sent and not stored. They must not depend on the rank, nor on the
process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from rankless.engine.plan.tensor_specs import digest_bytes

#: The size in bytes of the digest of a name, and of the digest of a value.
DIGEST_BYTES = 8

_ENTRY_BYTES = 2 * DIGEST_BYTES

#: The prefix of names of values, such as ``stateful/scaler``, where only rank 0's value is stored for all ranks; and
#: the first byte of the digests of such names: no other digest has it.
OF_RANK_0, _MARK = "stateful/", 0xFF

Name = TypeVar("Name", str, bytes)


def encode_digests(digests: Mapping[str, bytes]) -> bytes:
    """Return a rank's table, given the digest of each value by name. It does not depend on the order of the names."""
    return b"".join(sorted(_digest_name(name) + digest for name, digest in digests.items()))


def has_name(table: bytes, name: str) -> bool:
    """Return whether a rank's table has a value of this name."""
    digest = _digest_name(name)
    return any(entry == digest for entry, _ in _iterate_entries(table))


def find_differing(posted: Iterable[bytes]) -> bytes:
    """Return the names with values that differ between the ranks that have them, encoded, given all ranks' tables.

    They include the names in :data:`OF_RANK_0` that rank 0 lacks.
    """
    first, *others = dict.fromkeys(posted)
    entries = [entry for table in (first, *others) for entry in _iterate_entries(table)]
    lacking = {name for name, _ in entries if name[0] == _MARK} - dict(_iterate_entries(first)).keys()
    return b"".join(sorted(select_unequal(entries) | lacking))


def select_unequal(entries: Iterable[tuple[Name, bytes]]) -> set[Name]:
    """Return the names that have several different digests, given the entries of all ranks.

    For example, ``[("a", b"1"), ("b", b"1"), ("a", b"2")]`` gives ``{"a"}``.
    """
    first_digests: dict[Name, bytes] = {}
    return {name for name, digest in entries if first_digests.setdefault(name, digest) != digest}


def select_differing(names: Iterable[str], differing: bytes) -> frozenset[str]:
    """Return the ones among a rank's ``names`` that :func:`find_differing` found."""
    encoded = _split_names(differing)
    return frozenset(name for name in names if _digest_name(name) in encoded) if encoded else frozenset()


def join_differing(known: bytes, differing: bytes) -> bytes:
    """Return the names in either result of :func:`find_differing`; ``known`` itself if it has them all."""
    return b"".join(sorted(_split_names(known) | _split_names(differing)))


def _split_names(differing: bytes) -> set[bytes]:
    return {differing[start : start + DIGEST_BYTES] for start in range(0, len(differing), DIGEST_BYTES)}


def _digest_name(name: str) -> bytes:
    digest = digest_bytes(name.encode(errors="surrogatepass"), DIGEST_BYTES)
    if name.startswith(OF_RANK_0):
        return bytes([_MARK]) + digest[1:]
    return digest if digest[0] != _MARK else bytes([_MARK - 1]) + digest[1:]


def _iterate_entries(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    for start in range(0, len(table), _ENTRY_BYTES):
        yield table[start : start + DIGEST_BYTES], table[start + DIGEST_BYTES : start + _ENTRY_BYTES]
