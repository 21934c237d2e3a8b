"""Duplicate pictures: byte for byte, re-encoded or resized, or mirrored.

Equal files have equal SHA-256. Of the others, those whose 64-bit hashes differ in few bits are found by sorting, never by
comparing all with all, and their thumbnails must agree too. Time grows as N log N, memory as N.
"""

import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from vitlab.data.auditing.scan import MIRROR, Facts

How = Literal["exact", "near", "mirrored"]
_WEAKEST_FIRST: tuple[How, ...] = ("mirrored", "near", "exact")
Array = np.ndarray[Any, Any]

# Measured on 400 photos: copies at JPEG quality 50, half or double size differ in 5 bits at most, two photos in 14 at least.
_MAX_BITS = 5
_BYTES = 8
_TOGETHER = 3  # five wrong bits leave at least three bytes untouched, so that some three bytes agree
_WINDOW = 16  # neighbours compared in a bucket of three equal bytes: bounds the time per image whatever the images are
_MAX_DIFFERENCE = 0.2  # of the miniatures' contrast. The same copies: 0.08 at most, 15 % brighter 0.16
_MIN_CONTRAST = 4.0  # grey levels; an almost empty picture looks like every other one

_BIT_COUNT = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


class Group(NamedTuple):
    """Images that show the same thing, in rising order."""

    members: tuple[int, ...]
    how: How


def find_duplicates(facts: Facts, usable: Array) -> list[Group]:
    """The groups among `usable` images, each named by its weakest likeness."""
    leader = np.arange(len(facts))  # of every image: the lowest number of its group
    index = np.flatnonzero(usable)
    _, first, inverse = np.unique(facts["content"][index], return_index=True, return_inverse=True)
    leader[index] = index[first[inverse]]
    how: dict[int, How] = {}
    for a, b, mirrored in _alike(facts, np.sort(index[first])):
        apart = leader[a] != leader[b]  # in a bucket of look-alikes nearly all pairs are joined already
        a, b, mirrored = a[apart], b[apart], mirrored[apart]
        agree = np.flatnonzero(_same_miniature(facts["thumb"], a, b, mirrored))
        for k in agree[np.argsort(mirrored[agree], kind="stable")].tolist():
            i, j = sorted((_lead(leader, int(a[k])), _lead(leader, int(b[k]))))
            if i != j:
                leader[j] = i
                how[j] = "mirrored" if mirrored[k] else "near"
        while len(agree) and not np.array_equal(leader, leader[leader]):
            leader = leader[leader]
    return _groups(leader, how)


def _lead(leader: Array, i: int) -> int:
    while leader[i] != i:
        i = int(leader[i])
    return i


def _groups(leader: Array, how: dict[int, How]) -> list[Group]:
    order = np.argsort(leader, kind="stable")
    starts = np.flatnonzero(np.diff(leader[order], prepend=-1))
    groups: list[Group] = []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
        if stop - start > 1:
            members = tuple(order[start:stop].tolist())
            kinds = {how.get(member, "exact") for member in members}
            groups.append(Group(members, next(kind for kind in _WEAKEST_FIRST if kind in kinds)))
    return groups


def _alike(facts: Facts, index: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Candidate pairs of different content, and whether one is mirrored."""
    index = index[facts["contrast"][index] >= _MIN_CONTRAST]
    count = max(1, len(index))
    hashes = facts["hash"][index]
    for first, second in _near_pairs(np.concatenate([hashes, hashes ^ MIRROR])):
        # A mirrored pair is found from both sides, and a symmetrical picture is its own mirror image.
        proper = (first < count) & (first != second % count)
        yield index[first[proper]], index[second[proper] % count], second[proper] >= count


def _near_pairs(hashes_N8: Array) -> Iterator[tuple[Array, Array]]:
    """Pairs (lower, higher) within `_MAX_BITS` bits, some more than once.

    Sorted with three bytes in front, every three in turn, near ones become neighbours.
    """
    for front in itertools.combinations(range(_BYTES), _TOGETHER):
        bytes_in_turn = [*front, *(byte for byte in range(_BYTES) if byte not in front)]
        ordered = np.ascontiguousarray(hashes_N8[:, bytes_in_turn]).view(">u8")[:, 0].astype(np.uint64)
        order = np.argsort(ordered, kind="stable")
        ordered = ordered[order]
        heap = ordered >> np.uint64(64 - 8 * _TOGETHER)
        for step in range(1, _WINDOW + 1):
            same = np.flatnonzero(heap[step:] == heap[:-step])
            if not len(same):
                break
            bits = _BIT_COUNT[(ordered[same] ^ ordered[same + step])[:, None].view(np.uint8)].sum(axis=1)
            a, b = order[same[bits <= _MAX_BITS]], order[same[bits <= _MAX_BITS] + step]
            yield np.minimum(a, b), np.maximum(a, b)


def _same_miniature(thumbs: Array, first: Array, second: Array, mirrored: Array) -> Array:
    """Whether the thumbnails agree in colour, whatever their brightness."""
    agree = np.zeros(len(first), bool)
    block = 4096  # pairs at a time: some 20 MB
    for start in range(0, len(first), block):
        part = slice(start, start + block)
        a, b = thumbs[first[part]].astype(np.float32), thumbs[second[part]].astype(np.float32)
        b = np.where(mirrored[part, None, None, None], b[:, :, ::-1], b)
        a, b = (x - x.mean(axis=(1, 2, 3), keepdims=True) for x in (a, b))
        contrast = np.maximum(np.square(a).mean(axis=(1, 2, 3)), np.square(b).mean(axis=(1, 2, 3)))
        agree[part] = np.square(a - b).mean(axis=(1, 2, 3)) <= _MAX_DIFFERENCE**2 * contrast
    return agree
