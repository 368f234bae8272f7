"""The difference between two versions of a range of tensor elements, as a part of a published version stores it. Pure.

An element is a *word*, the unsigned integer that its bits are (see :func:`word_type`). The difference of two words is
taken modulo two to the power of their width: so every dtype is exact, also NaN and -0. A step of training changes few
words of a bf16 model, most of them by a few units: both the gaps between changed words and the differences are small
numbers, which Huffman codes store at their entropy. XOR, as others use, does not have small numbers.

The publisher encodes in threads of each rank (:mod:`rankless.weights.version_parts`); readers decode
(:mod:`rankless.formats.weights.difference_parts`). The encodings are parts of the format: see ``docs/format.md``. If a
part is corrupt or hostile, :func:`decode_range` refuses its encodings, or the CRCs of the version show the error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rankless.errors import CorruptCheckpointError

#: How a range is stored. The numbers are in files. A range that is not stored is unchanged.
SPARSE, PLANES, RAW, FAR = 1, 2, 3, 4

#: The number of streams of a range. Unused ones are empty.
STREAMS = 3

#: Words of a range, an array of unsigned integers.
Words = npt.NDArray[np.unsignedinteger[Any]]

#: The widest word in bytes: an element of 8 bytes is two words.
_WIDEST = 4

_WORDS: dict[int, npt.DTypeLike] = {1: "<u1", 2: "<u2", 4: "<u4"}
_SIGNED: dict[int, npt.DTypeLike] = {1: "<i1", 2: "<i2", 4: "<i4"}

#: Above this share of changed words, the differences of all words are stored.
_MOST_SPARSE = 0.8

#: A range is stored as it is, unless its differences have fewer bytes than this share.
_WORTH_CODING = 0.97

#: The words that are compared at a time, so that they stay in the processor's cache.
_PIECE = 2**17

#: The sign of a byte that more follows: of a gap, 255 more words; of a difference, its value among the escapes.
_MORE = 255

#: The bytes of the size of a stream that is one of several.
_SIZE_BYTES = 4

#: Words are far apart if their gaps have more than these bits on average. The lower bits of such gaps are as good as
#: random: they are stored as they are, because a Huffman code would give each more than 8 bits.
_LOW_BITS = 8


def word_type(itemsize: int) -> np.dtype[Any]:
    """Return the type of the words of elements that have ``itemsize`` bytes, a power of two."""
    return np.dtype(_WORDS[min(itemsize, _WIDEST)])


class EncodedRange(NamedTuple):
    """A range that has changed: its encoding, the number of changed words, and its streams."""

    encoding: int
    changed: int
    streams: tuple[bytes, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each stream in bytes."""
        return tuple(len(stream) for stream in self.streams)


class DecodedRange(NamedTuple):
    """The changed words of a range.

    Without ``positions`` all words have changed. ``values`` are added to the words. With ``replaces`` they replace the
    words. For example, positions ``[2, 5]`` and values ``[1, -1]`` raise word 2 by one and lower word 5 by one.
    """

    positions: npt.NDArray[np.signedinteger[Any]] | None
    values: Words
    replaces: bool = False

    @property
    def nbytes(self) -> int:
        """The memory that it takes, in bytes."""
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def apply(self, words: Words, start: int = 0) -> None:
        """Change the words of the range from number ``start`` on, in place."""
        stop = start + len(words)
        if self.positions is None:
            if self.replaces:
                words[:] = self.values[start:stop]
            else:
                words += self.values[start:stop]
            return
        first, last = 0, len(self.positions)
        if start or (last and self.positions[-1] >= stop):
            first, last = np.searchsorted(self.positions, [start, stop]).tolist()
        at = self.positions[first:last]
        words[at - start if start else at] += self.values[first:last]


def encode_range(old: Words, new: Words) -> EncodedRange | None:
    """Return the difference between two arrays of words; ``None`` if they are equal."""
    changed = list(_iterate_changed(old, new))
    positions = np.concatenate([at for at, _ in changed]) if changed else np.empty(0, np.int64)
    if not len(positions):
        return None
    if len(positions) > _MOST_SPARSE * len(new):
        encoded = _encode_all(old, new, len(positions))
    else:
        encoded = _encode_sparse(positions, np.concatenate([difference for _, difference in changed]), len(new))
    return encoded if sum(encoded.sizes) < _WORTH_CODING * new.nbytes else encode_raw(new)


def encode_raw(new: Words) -> EncodedRange:
    """Return the encoded form of words that do not depend on older ones."""
    return EncodedRange(RAW, len(new), (new.tobytes(), b"", b""))


def _iterate_changed(old: Words, new: Words) -> Iterator[tuple[npt.NDArray[np.int64], Words]]:
    """Yield the positions of changed words, and their differences, piece by piece."""
    for start in range(0, len(new), _PIECE):
        differences = new[start : start + _PIECE] - old[start : start + _PIECE]
        at = np.flatnonzero(differences != 0)  # NumPy finds true values four times as fast as integers
        if len(at):
            yield at + start, differences[at]


def _encode_sparse(positions: npt.NDArray[np.int64], differences: Words, count: int) -> EncodedRange:
    gaps = np.diff(positions, prepend=-1) - 1
    zigzag = _to_zigzag(differences)
    is_large = zigzag >= _MORE
    small, escapes = zigzag.astype(np.uint8), b""
    if is_large.any():
        small[is_large] = _MORE
        escapes = _deflate(zigzag[is_large].tobytes())
    if _are_far(len(positions), count):
        encoding, lows = FAR, gaps.astype(np.uint8).tobytes()
        stream = lows + _deflate(_encode_gaps(gaps >> _LOW_BITS).tobytes())
    else:
        encoding, stream = SPARSE, _deflate(_encode_gaps(gaps).tobytes())
    return EncodedRange(encoding, len(positions), (stream, _deflate(small.tobytes()), escapes))


def _are_far(changed: int, count: int) -> bool:
    return changed << _LOW_BITS < count


def _encode_gaps(gaps: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return a byte for each gap below 255, and one byte of 255 more for each 255 words of a longer one.

    For example, the gaps 3 and 600 give the bytes 3, 255, 255 and 90.
    """
    more = gaps // _MORE
    if not more.any():
        return gaps.astype(np.uint8)
    ends = np.cumsum(more + 1) - 1
    encoded = np.full(int(ends[-1]) + 1, _MORE, np.uint8)
    encoded[ends] = gaps - more * _MORE
    return encoded


def _encode_all(old: Words, new: Words, changed: int) -> EncodedRange:
    """Return the differences of all words, a stream for each of their bytes."""
    zigzag = _to_zigzag(new - old)
    planes = zigzag.view(np.uint8).reshape(-1, new.itemsize)
    first = [_deflate(np.ascontiguousarray(plane).tobytes(), has_runs=True) for plane in planes.T]
    streams = (first[0], b"".join(first[1:2]), b"".join(_with_size(plane) for plane in first[2:]))
    return EncodedRange(PLANES, changed, streams)


def _with_size(stream: bytes) -> bytes:
    return len(stream).to_bytes(_SIZE_BYTES, "little") + stream


def _to_zigzag(differences: Words) -> Words:
    """Return 0, -1, 1, -2, 2, … as 0, 1, 2, 3, 4, …, in the width of the words."""
    signed = differences.view(_SIGNED[differences.itemsize])
    zigzag: Words = ((signed << 1) ^ (signed >> (8 * differences.itemsize - 1))).view(differences.dtype)
    return zigzag


def _from_zigzag(zigzag: Words) -> Words:
    one = zigzag.dtype.type(1)
    differences: Words = (zigzag >> one) ^ -(zigzag & one)
    return differences


def _deflate(data: bytes, *, has_runs: bool = False) -> bytes:
    """Return data as a raw deflate stream: Huffman codes alone, which is faster, unless it has runs."""
    strategy = zlib.Z_DEFAULT_STRATEGY if has_runs else zlib.Z_HUFFMAN_ONLY
    coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, strategy)
    return coder.compress(data) + coder.flush()


def _inflate(data: memoryview | bytes, most: int, subject: str) -> bytes:
    """Return the data in a deflate stream, at most that many bytes. The memory is bounded before it is used."""
    decoder = zlib.decompressobj(-15)
    try:
        inflated = decoder.decompress(data, most + 1)
    except zlib.error as error:
        raise CorruptCheckpointError(f"{subject} cannot be decoded: {error}") from error
    if len(inflated) > most or not decoder.eof or decoder.unused_data or decoder.unconsumed_tail:
        raise CorruptCheckpointError(f"{subject} cannot be decoded: a stream has another size than its range allows")
    return inflated


class StoredRange(msgspec.Struct, frozen=True):
    """A range as a part has it: its encoding, how many of its ``count`` words have changed, and its streams.

    ``subject`` names it in errors.
    """

    encoding: int
    changed: int
    count: int
    word: np.dtype[Any]
    streams: Sequence[memoryview | bytes]
    subject: str


def decode_range(stored: StoredRange) -> DecodedRange:
    """Return the changed words of a range.

    Each position is in the range. Raises ``CorruptCheckpointError`` for streams that :func:`encode_range` never makes.
    """
    changed, count, word = stored.changed, stored.count, stored.word
    encoding, streams, subject = stored.encoding, stored.streams, stored.subject
    if encoding == RAW:
        if len(streams[0]) != count * word.itemsize or streams[1] or streams[2] or changed != count:
            raise CorruptCheckpointError(f"{subject} has {len(streams[0])} bytes, but {count} words")
        return DecodedRange(None, np.frombuffer(streams[0], word), replaces=True)
    if not 0 < changed <= count or (encoding == FAR and not _are_far(changed, count)):
        raise CorruptCheckpointError(f"{subject} says that {changed} of {count} words have changed")
    if encoding in (SPARSE, FAR):
        return _decode_sparse(stored)
    if encoding == PLANES:
        return _decode_all(stored)
    raise CorruptCheckpointError(f"{subject} has the encoding {encoding}, which this rankless does not know: update it")


def _decode_sparse(stored: StoredRange) -> DecodedRange:
    changed, count, word = stored.changed, stored.count, stored.word
    streams, subject = stored.streams, stored.subject
    positions = _decode_far(stored) if stored.encoding == FAR else _decode_near(stored)
    small = np.frombuffer(_inflate(streams[1], changed, subject), np.uint8)
    if len(positions) != changed or len(small) != changed or positions[-1] >= count:
        raise CorruptCheckpointError(f"{subject} cannot be decoded: its changed words are not those of its range")
    zigzag = small.astype(word)
    is_large = small == _MORE
    large = int(np.count_nonzero(is_large))
    if large:
        raw = _inflate(streams[2], large * word.itemsize, subject)
        if len(raw) != large * word.itemsize:
            raise CorruptCheckpointError(f"{subject} cannot be decoded: it lacks large differences")
        zigzag[is_large] = np.frombuffer(raw, word)
    elif streams[2]:
        raise CorruptCheckpointError(f"{subject} cannot be decoded: it has large differences too many")
    return DecodedRange(positions, _from_zigzag(zigzag))


def _decode_near(stored: StoredRange) -> npt.NDArray[np.int32]:
    """Return the positions for the bytes of :func:`_encode_gaps`."""
    most = stored.changed + stored.count // _MORE
    encoded = np.frombuffer(_inflate(stored.streams[0], most, stored.subject), np.uint8)
    is_end = encoded != _MORE
    steps = encoded + is_end.astype(np.int16)
    positions: npt.NDArray[np.int32] = np.cumsum(steps, dtype=np.int32)
    positions -= 1
    return positions if is_end.all() else positions[is_end]


def _decode_far(stored: StoredRange) -> npt.NDArray[np.int64]:
    """Return the positions for the lower bytes of gaps, and the upper bits as the bytes of :func:`_encode_gaps`."""
    changed, stream = stored.changed, stored.streams[0]
    most = changed + (stored.count >> _LOW_BITS) // _MORE
    encoded = np.frombuffer(_inflate(stream[changed:], most, stored.subject), np.uint8)
    highs = np.diff(np.cumsum(encoded, dtype=np.int64)[encoded != _MORE], prepend=0)
    if len(highs) != changed:
        raise CorruptCheckpointError(f"{stored.subject} cannot be decoded: it has {len(highs)} of {changed} gaps")
    lows = np.frombuffer(stream[:changed], np.uint8)
    return np.cumsum((highs << _LOW_BITS) + lows + 1) - 1


def _decode_all(stored: StoredRange) -> DecodedRange:
    count, word, streams, subject = stored.count, stored.word, stored.streams, stored.subject
    zigzag = np.empty((count, word.itemsize), np.uint8)
    for number, stream in enumerate(_split_planes(word.itemsize, streams, subject)):
        plane = np.frombuffer(_inflate(stream, count, subject), np.uint8)
        if len(plane) != count:
            raise CorruptCheckpointError(f"{subject} cannot be decoded: a plane has {len(plane)} of {count} bytes")
        zigzag[:, number] = plane
    return DecodedRange(None, _from_zigzag(zigzag.reshape(-1).view(word)))


def _split_planes(width: int, streams: Sequence[memoryview | bytes], subject: str) -> list[memoryview | bytes]:
    planes = [*streams[: min(width, 2)]]
    rest = memoryview(streams[2])
    while len(planes) < width and len(rest) >= _SIZE_BYTES:
        size = int.from_bytes(rest[:_SIZE_BYTES], "little")
        planes.append(rest[_SIZE_BYTES : _SIZE_BYTES + size])
        rest = rest[_SIZE_BYTES + size :]
    if len(planes) != width or len(rest) or (width == 1 and streams[1]):
        raise CorruptCheckpointError(f"{subject} cannot be decoded: it has not one stream for each byte of a word")
    return planes
