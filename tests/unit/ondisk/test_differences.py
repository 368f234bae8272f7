"""Differences of words: what is encoded is decoded, bit for bit, and nothing else is ever accepted as such."""

from __future__ import annotations

import itertools
import random
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.errors import CorruptCheckpointError
from rankless.ondisk.differences import (
    FAR,
    PLANES,
    RAW,
    SPARSE,
    EncodedRange,
    StoredRange,
    Words,
    decode_range,
    encode_range,
    encode_raw,
    word_type,
)
from tests.helpers.examples import examples

WIDTHS = [1, 2, 4, 8]


def stored(encoded: EncodedRange, words: Words) -> StoredRange:
    return StoredRange(encoded.encoding, encoded.changed, len(words), words.dtype, encoded.streams, "a range")


def apply(encoded: EncodedRange | None, old: Words) -> Words:
    words = old.copy()
    if encoded is not None:
        decode_range(stored(encoded, words)).apply(words)
    return words


def draw_words(seed: int, count: int, width: int) -> Words:
    generator = np.random.default_rng(seed)
    kind = word_type(width)
    return generator.integers(0, 256**kind.itemsize, count, dtype=np.uint64).astype(kind)


@settings(max_examples=examples(600), deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5000),
    st.sampled_from(WIDTHS),
    st.sampled_from([0.0, 0.0005, 0.003, 0.02, 0.3, 0.79, 0.9, 1.0]),
    st.sampled_from([1, 200, 300, 70_000]),
)
def test_any_change_is_decoded_exactly(seed: int, count: int, width: int, share: float, largest: int) -> None:
    old = draw_words(seed, count, width)
    generator = np.random.default_rng(seed + 1)
    changes = generator.integers(-largest, largest + 1, count) * (generator.random(count) < share)
    new = (old.astype(np.int64) + changes).astype(old.dtype)
    encoded = encode_range(old, new)
    assert (encoded is None) == bool((old == new).all())
    assert (apply(encoded, old) == new).all()
    if encoded is not None:
        assert encoded.changed == (count if encoded.encoding == RAW else np.count_nonzero(old != new))
        assert sum(encoded.sizes) <= new.nbytes


@pytest.mark.parametrize("width", WIDTHS)
def test_each_encoding_is_chosen_where_it_is_small(width: int) -> None:
    old = draw_words(0, 2**16, width)
    one = np.ones(1, old.dtype)[0]
    very_few, few, all_by_one = old.copy(), old.copy(), old + one
    very_few[::300] += one
    few[::100] += one
    kinds = [encode_range(old, new) for new in (very_few, few, all_by_one, draw_words(1, 2**16, width))]
    assert [kind.encoding for kind in kinds if kind] == [FAR, SPARSE, PLANES, RAW]


@pytest.mark.parametrize("positions", [[0], [99_999], [0, 99_999], [3, 700], [254, 255, 256, 511, 512, 65_279, 65_280]])
def test_words_that_are_far_apart(positions: list[int]) -> None:
    old = draw_words(0, 100_000, 2)
    new = old.copy()
    new[positions] += np.uint16(1)
    encoded = encode_range(old, new)
    assert encoded is not None
    assert encoded.encoding == FAR
    assert (apply(encoded, old) == new).all()


def test_gaps_that_are_far_apart_are_stored_at_their_entropy() -> None:
    """Positions and differences of one word in a thousand have 11.4 + 1 bits each at least."""
    old = draw_words(0, 2**21, 1)
    generator = np.random.default_rng(1)
    new = old + ((generator.random(2**21) < 0.001) * generator.choice([1, 255], 2**21)).astype(np.uint8)
    encoded = encode_range(old, new)
    assert encoded is not None
    assert sum(encoded.sizes) * 8 < 1.06 * (11.41 + 1) * encoded.changed


def test_words_that_are_not_far_apart_are_refused_as_such() -> None:
    """So a hostile range takes little memory."""
    old = draw_words(0, 2560, 2)
    new = old.copy()
    new[::257] += np.uint16(1)
    encoded = encode_range(old, new)
    assert encoded is not None
    assert encoded.encoding == SPARSE
    with pytest.raises(CorruptCheckpointError, match="says that 10 of 2560 words have changed"):
        decode_range(stored(encoded._replace(encoding=FAR), old))


def test_a_part_of_a_range_is_applied_alone() -> None:
    old, new = draw_words(0, 10_000, 2), draw_words(0, 10_000, 2)
    new[np.random.default_rng(1).random(10_000) < 0.1] += np.uint16(3)
    encoded = encode_range(old, new)
    assert encoded is not None
    decoded = decode_range(stored(encoded, old))
    for start, stop in [(0, 1), (17, 4000), (4000, 10_000), (9_999, 10_000), (0, 10_000)]:
        words = old[start:stop].copy()
        decoded.apply(words, start)
        assert (words == new[start:stop]).all()


def test_differences_add_up() -> None:
    versions = [draw_words(0, 5000, 2)]
    for seed in range(4):
        following = versions[-1].copy()
        following[np.random.default_rng(seed).random(5000) < 0.2] += np.uint16(40_000)
        versions.append(following)
    total = np.zeros_like(versions[0])
    for old, new in itertools.pairwise(versions):
        encoded = encode_range(old, new)
        assert encoded is not None
        decode_range(stored(encoded, old)).apply(total)
    assert (versions[0] + total == versions[-1]).all()


def test_nan_and_signed_zeros_are_bits_as_all_others() -> None:
    old = np.array([0.0, -0.0, np.nan, np.inf, 1.0], np.float32).view("<u4")
    new = np.array([-0.0, 0.0, -np.nan, -np.inf, 1.0], np.float32).view("<u4")
    assert (apply(encode_range(old, new), old) == new).all()


def mutate(encoded: EncodedRange, generator: random.Random) -> EncodedRange:
    """Return a range with random damage: bits, cuts, additions, bombs, other numbers."""
    streams = [bytearray(stream) for stream in encoded.streams]
    numbers = [encoded.encoding, encoded.changed]
    for _ in range(generator.randint(1, 4)):
        stream, kind = generator.choice(streams), generator.random()
        if kind < 0.5 and stream:
            stream[generator.randrange(len(stream))] ^= 1 << generator.randrange(8)
        elif kind < 0.65:
            del stream[generator.randrange(len(stream) + 1) :]
        elif kind < 0.75:
            stream += generator.randbytes(9)
        elif kind < 0.85:
            stream[:] = zlib.compress(bytes(10**7))[2:-4]
        else:
            numbers[generator.randrange(2)] = generator.choice([0, 1, 2, 3, 4, 5, 2**40])
    return EncodedRange(numbers[0], numbers[1], tuple(bytes(stream) for stream in streams))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_damage_is_refused_or_harmless(width: int) -> None:
    """What is accepted changes words of the range and nothing else: the CRCs of the version find it then."""
    old = draw_words(0, 20_000, width)
    far, sparse, dense = old.copy(), old.copy(), old + np.ones(1, old.dtype)[0]
    far[::400] += np.ones(1, old.dtype)[0]
    sparse[::23] += np.ones(1, old.dtype)[0]
    ranges = [encode_range(old, far), encode_range(old, sparse), encode_range(old, dense), encode_raw(dense)]
    generator = random.Random(width)
    tracemalloc.start()
    began = time.process_time()
    for _ in range(examples(3000, 300)):
        encoded = mutate(generator.choice([each for each in ranges if each]), generator)
        words = old.copy()
        try:
            decode_range(stored(encoded, words)).apply(words)
        except CorruptCheckpointError as error:
            assert "a range" in str(error)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20
    assert time.process_time() - began < 60
