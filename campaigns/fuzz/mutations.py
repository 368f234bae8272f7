"""Mutations of bytes, JSON and checksums (so that these do not detect all of them). Pure functions."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

#: Numbers that replace sizes, offsets and counts.
_NUMBERS = (
    0,
    1,
    -1,
    127,
    255,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)

_VALUES: tuple[Any, ...] = (
    *(None, True, 1.5, 1e308, "", "x" * 5000, "../c", "/etc/passwd", "\ud800", [], {}, [[[[]]]], {"$tensor": "x"}),
    *({"$inline": ["F32", [2**40], ""]}, {"$type": "os.system"}, *_NUMBERS),
)

Mutation = Callable[[bytearray, random.Random], bytearray]


def _flip_bit(raw: bytearray, chance: random.Random) -> bytearray:
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    return raw


def _set_byte(raw: bytearray, chance: random.Random) -> bytearray:
    raw[chance.randrange(len(raw))] = chance.choice((0, 1, 0x2E, 0x52, 0x63, 0x7F, 0x80, 0x93, 0xFF))
    return raw


def _set_number(raw: bytearray, chance: random.Random) -> bytearray:
    size, at = chance.choice((1, 2, 4, 8)), chance.randrange(len(raw))
    raw[at : at + size] = (chance.choice(_NUMBERS) % 256**size).to_bytes(size, "little")
    return raw


def _truncate_bytes(raw: bytearray, chance: random.Random) -> bytearray:
    return raw[: chance.randrange(len(raw))]


def _delete_range(raw: bytearray, chance: random.Random) -> bytearray:
    start = chance.randrange(len(raw))
    del raw[start : start + chance.randint(1, 64)]
    return raw


def _repeat_range(raw: bytearray, chance: random.Random) -> bytearray:
    start, at = chance.randrange(len(raw)), chance.randrange(len(raw))
    raw[at:at] = raw[start : start + chance.randint(1, 256)] * chance.randint(1, 20)
    return raw


def _copy_range(raw: bytearray, chance: random.Random) -> bytearray:
    size, start, at = chance.randint(1, 64), chance.randrange(len(raw)), chance.randrange(len(raw))
    raw[at : at + size] = raw[start : start + size]
    return raw


def _zero_range(raw: bytearray, chance: random.Random) -> bytearray:
    start, size = chance.randrange(len(raw)), chance.randint(1, 512)
    raw[start : start + size] = bytes(len(raw[start : start + size]))
    return raw


def _append_bytes(raw: bytearray, chance: random.Random) -> bytearray:
    return raw + chance.randbytes(chance.randint(1, 300))


_MUTATIONS: tuple[Mutation, ...] = (
    *(
        _flip_bit,
        _flip_bit,
        _flip_bit,
        _set_byte,
        _set_byte,
        _set_number,
        _set_number,
        _set_number,
        _copy_range,
        _copy_range,
        _zero_range,
        _truncate_bytes,
        _delete_range,
        _repeat_range,
        _append_bytes,
    ),
)


def mutate_file(raw: bytes, name: str, chance: random.Random) -> bytes:
    """Return the contents of a file, changed in one to three places."""
    if name.endswith((".json", ".safetensors")) and chance.random() < 0.6:
        changed = _mutate_json(raw, chance) if name.endswith(".json") else _mutate_header(raw, chance)
        if changed is not None:
            return changed
    content = bytearray(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if content:
            content = chance.choice(_MUTATIONS)(content, chance)
    return _clear_crcs(content) if chance.random() < 0.5 else bytes(content)


def _clear_crcs(raw: bytearray) -> bytes:
    """Set the CRCs in zip directories to 0, which means that there is none."""
    at = raw.find(b"PK\1\2")
    while at >= 0:
        raw[at + 16 : at + 20] = bytes(len(raw[at + 16 : at + 20]))
        at = raw.find(b"PK\1\2", at + 4)
    return bytes(raw)


def _mutate_json(raw: bytes, chance: random.Random) -> bytes | None:
    try:
        tree = json.loads(raw)
    except ValueError:
        return None
    for _ in range(chance.randint(1, 3)):
        tree = _mutate_tree(tree, chance)
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def _mutate_header(raw: bytes, chance: random.Random) -> bytes | None:
    size = int.from_bytes(raw[:8], "little") + 8
    changed = _mutate_json(raw[8:size], chance)
    return None if changed is None else len(changed).to_bytes(8, "little") + changed + raw[size:]


def _mutate_tree(tree: Any, chance: random.Random) -> Any:
    """Return the tree with one node replaced, removed or renamed."""
    if not isinstance(tree, dict | list) or not tree or chance.random() < 0.15:
        return copy.deepcopy(chance.choice(_VALUES))
    keys: list[Any] = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = chance.choice(keys)
    action = chance.random()
    if action < 0.15:
        del tree[key]
    elif action < 0.3 and isinstance(tree, dict):
        tree[chance.choice([*keys, "x", "../x", ""])] = tree.pop(key)
    else:
        tree[key] = _mutate_tree(tree[key], chance)
    return tree
