"""Which pictures are the same one: byte for byte, re-encoded or resized, or mirrored.

Owns the search. Equal files have equal SHA-256. Of the others, those whose 64-bit hashes differ in few bits are found by
sorting, never by comparing all with all, and their miniatures must agree too. Time grows as N log N, memory as N.
"""

import itertools
from typing import Any, Literal, NamedTuple

import numpy as np

from vitlab.data.scan import MIRROR, Facts

How = Literal["exact", "near", "mirrored"]
_WEAKEST_FIRST: tuple[How, ...] = ("mirrored", "near", "exact")
Array = np.ndarray[Any, Any]

# Measured on 400 photos: copies at JPEG quality 50, half or double size differ in 5 bits at most, two photos in 14 at least.
_MAX_BITS = 5
_BYTES = 8
_TOGETHER = 3  # five wrong bits leave at least three bytes untouched, so that some three bytes agree
_WINDOW = 16  # neighbours looked at in a heap of three equal bytes: bounds the time per image whatever the images are
_MAX_DIFFERENCE = 0.2  # of the miniatures' contrast. The same copies: 0.08 at most, 15 % brighter 0.16
_MIN_CONTRAST = 4.0  # grey levels; an almost empty picture looks like every other one

_BIT_COUNT = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


class Group(NamedTuple):
    """Images that show the same thing, in rising order."""

    members: tuple[int, ...]
    how: How


def find_duplicates(facts: Facts, usable: Array) -> list[Group]:
    """The groups among the `usable` images, by their first member; the weakest of the likenesses names the group."""
    parent = np.arange(len(facts))
    how: dict[int, How] = {}
    index = np.flatnonzero(usable)
    _, first, inverse = np.unique(facts["content"][index], return_index=True, return_inverse=True)
    copies = np.flatnonzero(first[inverse] != np.arange(len(index)))
    for i in copies.tolist():
        _join(parent, int(index[i]), int(index[first[inverse[i]]]))
    for mirrored, a, b in _alike(facts, np.sort(index[first])):
        for i, j in zip(a.tolist(), b.tolist(), strict=True):
            if _root(parent, i) != _root(parent, j):
                how[i] = "mirrored" if mirrored else "near"
                _join(parent, i, j)
    return _groups(parent, how)


def _groups(parent: Array, how: dict[int, How]) -> list[Group]:
    roots = np.array([_root(parent, i) for i in range(len(parent))], dtype=np.int64)
    order = np.argsort(roots, kind="stable")
    starts = np.flatnonzero(np.diff(roots[order], prepend=-1))
    found: list[Group] = []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
        if stop - start > 1:
            members = tuple(order[start:stop].tolist())
            kinds = {how.get(member, "exact") for member in members}
            found.append(Group(members, next(kind for kind in _WEAKEST_FIRST if kind in kinds)))
    return found


def _alike(facts: Facts, index: Array) -> list[tuple[bool, Array, Array]]:
    """Pairs among images of different content, in a fixed order: first upright, then mirrored."""
    index = index[facts["contrast"][index] >= _MIN_CONTRAST]
    count = max(1, len(index))
    hashes = facts["hash"][index]
    first, second = _near_hashes(np.concatenate([hashes, hashes ^ MIRROR]))
    # A mirrored pair is found from both sides, and a symmetrical picture is its own mirror image.
    proper = (first < count) & (first % count != second % count)
    first, second = first[proper], second[proper]
    mirrored = second >= count
    first, second = index[first], index[second % count]
    agree = _same_miniature(facts["thumb"], first, second, mirrored)
    return [(flag, first[agree & (mirrored == flag)], second[agree & (mirrored == flag)]) for flag in (False, True)]


def _near_hashes(hashes_N8: Array) -> tuple[Array, Array]:
    """The pairs within `_MAX_BITS` bits: sorted with three bytes in front, in turn, near ones come to lie side by side."""
    count = max(1, len(hashes_N8))
    pairs = np.zeros(0, np.int64)
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
            same = same[bits <= _MAX_BITS]
            a, b = order[same], order[same + step]
            found = np.minimum(a, b) * count + np.maximum(a, b)
            pairs = np.union1d(pairs, found) if len(found) else pairs
    return pairs // count, pairs % count


def _same_miniature(thumbs: Array, first: Array, second: Array, mirrored: Array) -> Array:
    """Whether the small pictures agree, colours included, when a difference in brightness is taken out."""
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


def _root(parent: Array, i: int) -> int:
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = int(parent[i])
    return i


def _join(parent: Array, i: int, j: int) -> None:
    """The lower number leads, so that the result does not depend on the order of the pairs."""
    i, j = sorted((_root(parent, i), _root(parent, j)))
    parent[j] = i
