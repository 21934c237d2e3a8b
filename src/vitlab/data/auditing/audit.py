"""Findings about a data set: bad files, odd classes, duplicates, leaks.

Owns what counts as a finding and its text. `scan.py` looks at the files, `duplicates.py` compares them.
Letters: N images, K classes, B batch, D features.
"""

import bisect
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vitlab.core.console import Console
from vitlab.data.auditing.duplicates import Group, How, find_duplicates
from vitlab.data.auditing.scan import FACTS, Facts, Faults, scan
from vitlab.data.dataset import LEARNT_FROM, Dataset, Opened, train_part
from vitlab.data.decode import FORMATS, bits_for

_Serious = Literal["unreadable", "damaged", "leak", "contradiction"]
_Odd = Literal["animated", "cmyk", "16-bit", "rotated", "tiny", "huge"]
Kind = _Serious | Literal["duplicate", "label", "class", "name"] | _Odd
Embed = Callable[[Sequence["bytes | np.ndarray[Any, Any]"]], Tensor]

# The most important first.
TITLES: Mapping[Kind, str] = {
    "unreadable": "Files that cannot be used",
    "damaged": "Corrupt files: they decode, but not to the original picture",
    "leak": "The same in two parts",
    "contradiction": "The same picture under different labels",
    "duplicate": "The same picture twice in one part",
    "label": "Labels that the nearest pictures contradict",
    "class": "Classes",
    "name": "Names",
    "animated": "Animated: only the first frame is used",
    "cmyk": "CMYK: colours for print, converted without a profile",
    "16-bit": "More than 8 bits per channel: reduced to 8",
    "rotated": "Turned by EXIF: shown sideways by programs that ignore EXIF",
    "tiny": "Much smaller than the others",
    "huge": "Very large: slow to decode",
}
SERIOUS: frozenset[Kind] = frozenset(get_args(_Serious))

_TINY_SIDE = 16  # one patch of the paper's models
_HUGE_PIXELS = 16_000_000  # more than the photos that phones store
_SMALL_SIDE = 112  # half of 224, the usual size of a model: smaller images would be upsampled more than 2x
IMBALANCE_RATIO = 10  # largest class to smallest; from here on overall accuracy says little about the smallest class
_LIKENESS: Mapping[How, str] = {
    "exact": "the same file",
    "near": "the same picture",
    "mirrored": "the same picture, mirrored,",
}
_FORMAT_OF = {f".{name.lower()}": name for name in FORMATS} | {".jpg": "JPEG", ".tif": "TIFF", ".heic": "HEIF"}
_NEIGHBOURS = 10
_AGREEMENT = 0.9  # of the neighbours' votes for one other class
_TEMPERATURE = 0.07  # of the votes' weights, as in the nearest-neighbour tests of DINO
_BATCH = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One image: its part, its name, its label in words, and its number in the part."""

    part: str
    key: str
    label: str
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong or odd, and with which images."""

    kind: Kind
    text: str
    items: tuple[Item, ...] = ()
    score: float | None = None  # of a label: the share of its neighbours that contradict it

    @property
    def serious(self) -> bool:
        return self.kind in SERIOUS


@dataclasses.dataclass(frozen=True)
class Scanned:
    """The facts of every image of some parts, concatenated."""

    parts: Mapping[str, Dataset]
    facts: Facts
    faults: Faults

    @property
    def bits(self) -> int | None:
        """Bits that the grey images of more than 8 make use of; None without such images."""
        return _bits_used(self.facts)

    def copies(self, part: str) -> list[list[str]]:
        """The names of images in a part that show the same picture, picture by picture."""
        keys, (start, stop) = self.parts[part].keys, self._rows(part)
        usable = np.array([row not in self.faults for row in range(start, stop)], bool)
        groups = find_duplicates(self.facts[start:stop], usable)
        return [[keys[member] for member in group.members] for group in groups]

    def for_parts(self, parts: Mapping[str, Dataset]) -> "Scanned":
        """The same facts for other parts of the same data.

        Each is one of these `Dataset` objects itself, not a copy of it, or else a subset of the training part, by its keys.
        """
        kept = {id(part): name for name, part in self.parts.items()}
        rows: list[int] = []
        for part in parts.values():
            source = kept.get(id(part)) or train_part(self.parts)
            start, stop = self._rows(source)
            row_of = dict(zip(self.parts[source].keys, range(start, stop), strict=True))
            rows += range(start, stop) if id(part) in kept else map(row_of.__getitem__, part.keys)
        faults = {new: self.faults[old] for new, old in enumerate(rows) if old in self.faults}
        return Scanned(parts, self.facts[rows], faults)

    def _rows(self, part: str) -> tuple[int, int]:
        number = list(self.parts).index(part)
        return self._starts[number], self._starts[number + 1]

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [0, *itertools.accumulate(map(len, self.parts.values()))]

    def locate(self, row: int) -> tuple[str, Dataset, int]:
        """The part of an image, by name too, and its number there."""
        number = bisect.bisect_right(self._starts, row) - 1
        return *list(self.parts.items())[number], row - self._starts[number]

    def item(self, row: int) -> Item:
        name, part, i = self.locate(row)
        return Item(name, part.keys[i], label_of(part, i), i)


@dataclasses.dataclass(frozen=True)
class Audit:
    """All findings, the serious first; `parts` has the images of every class."""

    parts: Mapping[str, Mapping[str, int]]  # images of each class, by part
    sizes: Mapping[str, int]  # images per part; with several labels each, not the sum of its classes
    formats: Mapping[str, int]
    megabytes: float
    median_side: int
    findings: tuple[Finding, ...]  # the most serious first
    notes: tuple[str, ...]  # about the data as a whole
    bits: int | None = None  # that grey images of more than 8 bits make use of

    @property
    def images(self) -> int:
        return sum(self.sizes.values())

    @property
    def serious(self) -> bool:
        return any(finding.serious for finding in self.findings)

    @property
    def counts(self) -> dict[Kind, int]:
        """How many findings there are of each kind."""
        counts = Counter(finding.kind for finding in self.findings)
        return {kind: counts[kind] for kind in TITLES if counts[kind]}


def audit(
    opened: Opened,
    *,
    against: Mapping[str, Dataset] | None = None,
    embed: Embed | None = None,
    workers: int | None = None,
    console: Console | None = None,
    scanned: Scanned | None = None,
) -> Audit:
    """Decode every image once, unless it was `scanned`, and list what is wrong.

    `against` holds sets, by name, that must share no picture with this one. With `embed`, images to features [B, D], labels are
    compared with those of the nearest neighbours.
    """
    console = console or Console(quiet=True)
    num_audited = sum(map(len, opened.parts.values()))  # the first rows; those of `against` follow
    scanned = scanned or scan_parts({**opened.parts, **(against or {})}, workers=workers, console=console)
    facts, faults = scanned.facts, scanned.faults
    usable = np.ones(len(facts), bool)
    usable[list(faults)] = False
    groups = find_duplicates(facts, usable)
    findings = [
        *(Finding("unreadable", text, (scanned.item(i),)) for i, text in faults.items()),
        *_repeated(scanned, groups, num_audited),
        *_crossing_groups(opened),
        *_classes(opened),
        *_odd_files(scanned, facts[:num_audited], usable[:num_audited]),
        *_odd_names(scanned, facts[:num_audited]),
    ]
    notes = [*opened.notes]
    side = (
        int(np.median(np.minimum(facts["rows"], facts["cols"])[:num_audited][usable[:num_audited]]))
        if usable[:num_audited].any()
        else 0
    )
    if 0 < side < _SMALL_SIDE:
        notes.append(f"the images are small (shorter side {side} pixels): a smaller patch fits them better, as ViT-S/4")
    bits = _bits_used(facts[:num_audited])
    if bits is not None:
        notes.append(f"grey images of more than 8 bits make use of {bits}: `vitlab train` sets data.bits={bits}")
    if embed is not None:
        findings += _doubtful_labels(opened, scanned, usable[:num_audited], groups, embed, console, notes)
    order = {kind: number for number, kind in enumerate(TITLES)}
    names = ("pixels", *FORMATS)
    formats = np.bincount(facts["format"][:num_audited][usable[:num_audited]], minlength=len(names))
    return Audit(
        parts={name: class_counts(part) for name, part in opened.parts.items()},
        sizes={name: len(part) for name, part in opened.parts.items()},
        formats={name: int(count) for name, count in zip(names, formats, strict=True) if count},
        megabytes=float(facts["bytes"][:num_audited].sum()) / 1e6,
        median_side=side,
        findings=tuple(sorted(findings, key=lambda finding: order[finding.kind])),
        notes=tuple(notes),
        bits=bits,
    )


def _bits_used(facts: Facts) -> int | None:
    """Bits that the deep grey images among these make use of; None without such images."""
    largest = int(facts["largest"].max(initial=0))
    return bits_for(largest) if largest else None


def label_of(part: Dataset, i: int) -> str:
    """The label in words; several are joined by `;` in the order of the classes."""
    return ";".join(part.classes[label] for label in sorted(part.labels[i]))


def scan_parts(parts: Mapping[str, Dataset], *, workers: int | None, console: Console) -> Scanned:
    """Decode every image once, in several processes."""
    total, start, faults = sum(map(len, parts.values())), 0, Faults()
    facts = np.zeros(total, FACTS)
    with console.progress("checking", total) as show:
        for part in parts.values():
            place = facts[start : start + len(part)]
            wrong = scan(part, place, workers=workers, advance=lambda done, first=start: show(first + done, "images"))
            faults.update({start + i: text for i, text in wrong.items()})
            start += len(part)
    return Scanned(parts, facts, faults)


# --- the same thing twice ---------------------------------------------------------------------------------------------


def _repeated(scanned: Scanned, groups: Sequence[Group], num_audited: int) -> Iterator[Finding]:
    """Duplicates: a leak across parts, a contradiction under two labels, or both."""
    for members, how in groups:
        items = tuple(map(scanned.item, members))
        audited = items[: int(np.searchsorted(members, num_audited))]
        if not audited:
            continue  # copies within `against` alone do not matter here
        parts = list(dict.fromkeys(item.part for item in items))
        labels = sorted({item.label for item in audited})
        if len(parts) > 1:
            yield Finding("leak", f"{_LIKENESS[how]} in {_listed(parts)}", items)
        if len(labels) > 1:
            yield Finding("contradiction", f"{_LIKENESS[how]} as {_listed(labels)}", audited)
        if len(parts) == len(labels) == 1:
            yield Finding("duplicate", f"{_LIKENESS[how]} {len(audited)} times in {parts[0]}", audited)


def _crossing_groups(opened: Opened) -> Iterator[Finding]:
    """Leaks of groups, as of patients or videos, whose pictures are alike."""
    seen: dict[str, dict[str, Item]] = {}
    for name, part in opened.parts.items():
        for i, group in enumerate(part.groups or ()):
            if group and name not in seen.setdefault(group, {}):
                seen[group][name] = Item(name, part.keys[i], label_of(part, i), i)
    for group, where in sorted(seen.items()):
        if len(where) > 1:
            yield Finding("leak", f"the group {group} in {_listed(list(where))}", tuple(where.values()))


# --- classes ----------------------------------------------------------------------------------------------------------


def class_counts(part: Dataset) -> dict[str, int]:
    return dict(zip(part.classes, part.labels.counts(len(part.classes)).tolist(), strict=True))


def _classes(opened: Opened) -> Iterator[Finding]:
    for name, part in opened.parts.items():
        counts = class_counts(part)
        missing = [label for label, count in counts.items() if not count]
        single = [label for label, count in counts.items() if count == 1]
        if missing:
            yield Finding("class", f"{name} has no image of {_listed(missing)}")
        if single and name in LEARNT_FROM:
            yield Finding("class", f"{name} has a single image of {_listed(single)}")
        present = {label: count for label, count in counts.items() if count}
        if len(present) > 1 and name in LEARNT_FROM:
            most, least = max(present, key=present.__getitem__), min(present, key=present.__getitem__)
            if present[most] >= IMBALANCE_RATIO * present[least]:
                text = f"{name} has {present[most]:,} images of {most} and {present[least]:,} of {least}"
                yield Finding("class", f"{text}, {present[most] / present[least]:,.0f} times fewer")


# --- odd files and names ----------------------------------------------------------------------------------------------


def _odd_files(scanned: Scanned, facts: Facts, usable: "np.ndarray[Any, Any]") -> Iterator[Finding]:
    sides = np.minimum(facts["rows"], facts["cols"])
    pixels = facts["rows"].astype(np.int64) * facts["cols"]
    median = float(np.median(sides[usable])) if usable.any() else 0.0
    odd: dict[Kind, np.ndarray[Any, Any]] = {
        "damaged": facts["damaged"],
        "animated": facts["animated"],
        "cmyk": facts["cmyk"],
        "16-bit": facts["deep"],
        "rotated": facts["turned"],
        "tiny": (sides < _TINY_SIDE) & (2 * sides < median),  # a set of small images is not odd
        "huge": pixels > _HUGE_PIXELS,
    }
    for kind, which in odd.items():
        for i in np.flatnonzero(which & usable).tolist():
            yield Finding(kind, f"{facts['cols'][i]:,}x{facts['rows'][i]:,} pixels", (scanned.item(i),))


def _odd_names(scanned: Scanned, facts: Facts) -> Iterator[Finding]:
    seen: dict[str, int] = {}
    misnamed: list[tuple[int, str]] = []
    for i, number in enumerate(facts["format"].tolist()):
        _, part, at = scanned.locate(i)
        key = part.keys[at]
        named = _FORMAT_OF.get(PurePosixPath(key).suffix.lower())
        if number and named and FORMATS[number - 1] != named:
            misnamed.append((i, FORMATS[number - 1]))
        if not key.isprintable() or key != key.strip():
            yield Finding("name", "has invisible characters in its name", (scanned.item(i),))
        first = seen.setdefault(key.casefold(), i)
        if first != i and scanned.item(first).key != key:
            yield Finding("name", "names that differ only in capital letters", (scanned.item(first), scanned.item(i)))
    if 2 * len(misnamed) > max(len(facts), 2):  # a habit of the whole set, as after re-encoding: one finding
        yield Finding("name", f"{len(misnamed):,} of {len(facts):,} files have the wrong extension")
    else:
        yield from (Finding("name", f"is {kind} despite its extension", (scanned.item(i),)) for i, kind in misnamed)


# --- labels -----------------------------------------------------------------------------------------------------------


def _doubtful_labels(
    opened: Opened,
    scanned: Scanned,
    usable: "np.ndarray[Any, Any]",
    groups: Sequence[Group],
    embed: Embed,
    console: Console,
    notes: list[str],
) -> list[Finding]:
    """Labels that nearly all nearest neighbours contradict, the surest first."""
    if any(part.labels.multi for part in opened.parts.values()):
        notes.append("labels were not compared with those of their neighbours: the images have several each")
        return []
    index = np.flatnonzero(usable)
    features_ND = _features(scanned, index, embed, console)
    labels_N = torch.cat([part.labels.single() for part in opened.parts.values()])[index]
    # Copies add no evidence, and neither does the picture itself: no votes within a group.
    group = np.arange(len(usable))
    for members, _ in groups:
        group[[member for member in members if member < len(usable)]] = members[0]
    group_N = torch.from_numpy(group[index])
    share_N, winner_N = _vote(features_ND, labels_N, group_N, len(opened.classes))
    # A class that cannot fill a neighbourhood would lose every vote.
    enough_K = torch.bincount(labels_N, minlength=len(opened.classes)) > _NEIGHBOURS
    doubtful = (winner_N != labels_N) & (share_N >= _AGREEMENT) & enough_K[labels_N]
    if not bool(enough_K.all()):
        notes.append(f"labels of classes with at most {_NEIGHBOURS} images were not compared with their neighbours'")
    order = sorted(doubtful.nonzero()[:, 0].tolist(), key=lambda i: -round(float(share_N[i]), 4))
    looks = {i: f"looks like {opened.classes[int(winner_N[i])]}" for i in order}
    return [Finding("label", looks[i], (scanned.item(int(index[i])),), round(float(share_N[i]), 4)) for i in order]


def _features(scanned: Scanned, index: "np.ndarray[Any, Any]", embed: Embed, console: Console) -> Tensor:
    if not len(index):
        return torch.zeros(0, 1)
    features: list[Tensor] = []
    with console.progress("embedding", len(index)) as show:
        for start in range(0, len(index), _BATCH):
            places = [scanned.locate(i) for i in index[start : start + _BATCH].tolist()]
            features.append(embed([part.read(at) for _, part, at in places]).float())
            show(start + len(places), "images")
    return torch.nn.functional.normalize(torch.cat(features), dim=1)


def _vote(features_ND: Tensor, labels_N: Tensor, group_N: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The share and number of the class that the weighted nearest neighbours vote for."""
    shares: list[Tensor] = []
    winners: list[Tensor] = []
    count = min(_NEIGHBOURS, max(0, len(labels_N) - 1))
    for block in torch.arange(len(labels_N)).split(_BATCH):
        alike_BN = features_ND[block] @ features_ND.T
        alike_BN[group_N[block][:, None] == group_N[None]] = -1
        near_Bk, index_Bk = alike_BN.topk(count, dim=1)
        weight_Bk = (near_Bk / _TEMPERATURE).softmax(dim=1)
        votes_BK = torch.zeros(len(block), classes).scatter_add(1, labels_N[index_Bk], weight_Bk)
        share_B, winner_B = votes_BK.max(dim=1)
        shares.append(share_B)
        winners.append(winner_B)
    return torch.cat(shares), torch.cat(winners)


def _listed(names: Sequence[str], shown: int = 5) -> str:
    """`a, b and c`, or the first few and the number of the others."""
    if len(names) > shown:
        return f"{', '.join(names[:shown])} and {len(names) - shown:,} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
