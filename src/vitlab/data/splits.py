"""Deterministic stratified splits: the same data and seed give the same split."""

import bisect
import contextlib
import csv
import hashlib
import io
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from vitlab.core.errors import UsageError, amount
from vitlab.data.dataset import PARTS, Dataset, some_of

_SHOWN = 5  # classes in an error; the number of the others follows


def split_shares(
    dataset: Dataset,
    shares: Mapping[str, float],
    seed: int,
    groups: Sequence[str] | None,
    copies: Sequence[Sequence[int]] = (),
) -> list[str]:
    """The part of every image, by a stratified split that keeps groups together.

    Images are ordered by a hash of name and seed. Without groups, one more image moves at most one other of its class across
    each border, so that a set can grow and keep its split. `copies` of a picture, by number, stay together too, except in
    classes that have fewer pictures than there are parts.
    """
    _require_shares(shares)
    if groups is None and not dataset.labels.multi:
        return _by_borders(dataset, shares, seed, copies)
    given = groups or [""] * len(dataset)
    # What copies join may be too large to split, or the whole of a class; the groups alone need not be.
    for together in (copies, _without_scarce(dataset, given, copies, len(shares))) if copies else ():
        with contextlib.suppress(UsageError):
            return _by_groups(dataset, shares, seed, _joined(dataset, given, together))
    return _by_groups(dataset, shares, seed, given)


def copies_in(dataset: Dataset, copies: Sequence[Sequence[str]]) -> list[list[int]]:
    """The copies of each picture by number, of those that are in `dataset`."""
    picture_of = {key: number for number, keys in enumerate(copies) for key in keys}
    members: dict[int, list[int]] = {}
    for i, key in enumerate(dataset.keys if copies else ()):
        if key in picture_of:
            members.setdefault(picture_of[key], []).append(i)
    return list(members.values())


def splittable(
    dataset: Dataset, parts: int, groups: Sequence[str] | None, copies: Sequence[Sequence[int]] = ()
) -> Tensor:
    """bool [N]: images of classes that have images, or groups, for every one of so many parts.

    The images of other classes are left out with their groups and copies, which may leave too few of a further class.
    """
    if groups is None and not dataset.labels.multi:
        counts_K = dataset.labels.counts(len(dataset.classes))
        if not ((counts_K > 0) & (counts_K < parts)).any():  # as mostly, and quick for a million images
            return torch.ones(len(dataset), dtype=torch.bool)
    given = groups or [""] * len(dataset)
    named, tied = [_group_name(dataset, given, i) for i in range(len(dataset))], _joined(dataset, given, copies)
    labels = [own or (len(dataset.classes),) for own in dataset.labels]
    left = set(tied)
    while True:
        scarce = _scarce(((labels[i], named[i]) for i, tie in enumerate(tied) if tie in left), parts)
        if not scarce:
            return torch.tensor([tie in left for tie in tied], dtype=torch.bool)
        left -= {tie for tie, own in zip(tied, labels, strict=True) if scarce.intersection(own)}


def _require_shares(shares: Mapping[str, float]) -> None:
    if unknown := [name for name in shares if name not in PARTS]:
        raise UsageError(f"'{unknown[0]}' is not a part", hint=f"Parts: {', '.join(PARTS)}.")
    if len(shares) < 2 or not all(0 < share < 1 for share in shares.values()):
        raise UsageError("a split needs two parts or three, each with a share between 0 and 1")
    if abs(sum(shares.values()) - 1) > 1e-6:  # what rounding leaves of 0.8 + 0.1 + 0.1
        raise UsageError(f"the shares of {', '.join(shares)} must add up to 1, not {sum(shares.values()):g}")


def _rank(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{name}".encode("utf-8", "surrogateescape")).digest()


def _by_borders(dataset: Dataset, shares: Mapping[str, float], seed: int, copies: Sequence[Sequence[int]]) -> list[str]:
    split, labels = [""] * len(dataset), dataset.labels.single().tolist()
    members: list[list[int]] = [[] for _ in dataset.classes]
    for i, label in enumerate(labels):
        members[label].append(i)
    counts = {name: len(images) for name, images in zip(dataset.classes, members, strict=True) if images}
    _require_enough(dataset, counts, "image", shares)
    copy_of = {i: number for number, images in enumerate(copies) for i in images}
    # A picture under two labels is no use in a test, so it goes to the first part, which is usually train.
    contradicted = {number for number, images in enumerate(copies) if len({labels[i] for i in images}) > 1}
    for images in filter(None, members):
        ordered = sorted(images, key=lambda i: _rank(seed, dataset.keys[i]))
        pictures: dict[int, list[int]] = {}
        for i in ordered:
            pictures.setdefault(copy_of.get(i, -1 - i), []).append(i)
        pinned = sum(number in contradicted for number in pictures)
        if len(pictures) - pinned < len(shares) - bool(pinned):
            pictures, pinned = {-1 - i: [i] for i in ordered}, 0
        # The largest first: single images then fill the small parts to their shares.
        order = sorted(pictures, key=lambda number: (number not in contradicted, -len(pictures[number])))
        cuts = _cuts([len(pictures[number]) for number in order], shares, pinned)
        for part, (start, stop) in zip(shares, itertools.pairwise(cuts), strict=True):
            for i in itertools.chain.from_iterable(pictures[number] for number in order[start:stop]):
                split[i] = part
    return split


def _cuts(sizes: Sequence[int], shares: Mapping[str, float], pinned: int) -> list[int]:
    """Where to cut pictures, `sizes` of images each, to come nearest to the shares.

    Each part gets one at least, and the first those that are `pinned`. One more image moves no cut by more than 1.
    """
    middles = [end - size / 2 for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    cuts = [0]
    for number, total in enumerate(itertools.accumulate(shares.values()), start=1):
        last = len(sizes) - (len(shares) - number)  # leaves one for each part that follows
        nearest = bisect.bisect_left(middles, round(total * sum(sizes)))
        cuts.append(min(max(nearest, pinned, cuts[-1] + 1), last))
    return cuts


def _joined(dataset: Dataset, groups: Sequence[str], copies: Sequence[Sequence[int]]) -> list[str]:
    """Groups that have a picture in common as one group."""
    joined_to: dict[str, str] = {}

    def root(group: str) -> str:
        while group in joined_to:
            group = joined_to[group]
        return group

    named = [_group_name(dataset, groups, i) for i in range(len(dataset))]
    for images in copies:
        first, *others = sorted({root(named[i]) for i in images})
        joined_to.update(dict.fromkeys(others, first))
    return [root(group) for group in named]


def _without_scarce(
    dataset: Dataset, groups: Sequence[str], copies: Sequence[Sequence[int]], parts: int
) -> list[Sequence[int]]:
    """The copies without those of classes with fewer groups than parts."""
    labels = [own or (len(dataset.classes),) for own in dataset.labels]
    scarce = _scarce(zip(labels, _joined(dataset, groups, copies), strict=True), parts)
    return [found for found in copies if not any(scarce.intersection(labels[i]) for i in found)]


def _scarce(images: Iterable[tuple[Sequence[int], str]], parts: int) -> set[int]:
    """The labels that have fewer groups than there are parts, from the labels and the group of each image."""
    groups_of: dict[int, set[str]] = {}
    for labels, group in images:
        for label in labels:
            groups_of.setdefault(label, set()).add(group)
    return {label for label, groups in groups_of.items() if len(groups) < parts}


def _group_name(dataset: Dataset, groups: Sequence[str], i: int) -> str:
    return groups[i] or f"\0{dataset.keys[i]}"  # an image without a group is its own


def _by_groups(dataset: Dataset, shares: Mapping[str, float], seed: int, groups: Sequence[str]) -> list[str]:
    """The largest groups first, each into the part that it fits best."""
    members: dict[str, list[int]] = {}
    for i in range(len(groups)):
        members.setdefault(_group_name(dataset, groups, i), []).append(i)
    none = len(dataset.classes)  # counts as a class: images may have no label at all
    counts = {
        name: Counter(c for i in images for c in dataset.labels[i] or (none,)) for name, images in members.items()
    }
    left = Counter(label for count in counts.values() for label in count)  # groups that still have the class
    totals = Counter(itertools.chain.from_iterable(count.elements() for count in counts.values()))
    named = {dataset.classes[label] if label < none else "no label": left[label] for label in sorted(left)}
    _require_enough(dataset, named, "group" if any(groups) else "image", shares)
    _require_room(dataset, shares, members)
    wanted = {part: {label: share * total for label, total in totals.items()} for part, share in shares.items()}
    filled: dict[str, Counter[int]] = {part: Counter() for part in shares}
    split = [""] * len(dataset)
    for name in sorted(members, key=lambda name: (-len(members[name]), _rank(seed, name))):
        part = _best_part(counts[name], wanted, filled, left)
        filled[part].update(counts[name])
        left.subtract(counts[name].keys())
        for i in members[name]:
            split[i] = part
    for part, label in itertools.product(shares, totals):
        if not filled[part][label]:
            name = dataset.classes[label] if label < none else "images without a label"
            raise UsageError(
                f"{dataset.name}: no group with {name} could go to {part}: mixed-class groups make this split impossible",
                hint="Try another seed, other shares or fewer parts.",
            )
    return split


def _best_part(
    count: Counter[int],
    wanted: Mapping[str, Mapping[int, float]],
    filled: Mapping[str, Counter[int]],
    left: Counter[int],
) -> str:
    """The part whose squared relative distance from the wanted numbers falls most.

    When only as many groups with a class are left as there are parts without it, those parts have the first right.
    """
    candidates = list(wanted)
    for label in sorted(count, key=lambda label: left[label]):
        lacking = [part for part in candidates if not filled[part][label]]
        if lacking and left[label] <= sum(not filled[part][label] for part in wanted):
            candidates = lacking

    def change(part: str) -> float:
        return sum(
            (number**2 - 2 * number * (wanted[part][label] - filled[part][label])) / wanted[part][label]
            for label, number in count.items()
        )

    return min(candidates, key=change)


def _require_enough(dataset: Dataset, counts: Mapping[str, int], of_what: str, shares: Mapping[str, float]) -> None:
    """One error for all classes that are too small for the split."""
    small = [f"{name} has {amount(count, of_what)}" for name, count in counts.items() if count < len(shares)]
    if small:
        raise UsageError(
            f"{dataset.name}: {some_of(small, _SHOWN)}, too few to be in {len(shares)} parts",
            hint=f"Add some, leave {'the classes' if len(small) > 1 else 'the class'} out, or split into fewer parts.",
        )


def _require_room(dataset: Dataset, shares: Mapping[str, float], members: Mapping[str, Sequence[int]]) -> None:
    largest = max(members, key=lambda name: len(members[name]))
    part = max(shares, key=lambda name: shares[name])
    if len(members[largest]) > (room := math.ceil(shares[part] * len(dataset))):
        raise UsageError(f"the group {largest} has {len(members[largest]):,} images, more than the {room:,} of {part}")


def split_table(paths: Sequence[str], labels: Sequence[str], split: Sequence[str], groups: Sequence[str] | None) -> str:
    """The split as CSV: `path,label,split`, and `group` where there are groups."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["path", "label", "split", *(["group"] if groups else [])])
    rows.writerows(zip(paths, labels, split, *([groups] if groups else []), strict=True))
    return text.getvalue()
