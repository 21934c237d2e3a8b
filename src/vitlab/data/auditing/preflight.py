"""A quick look at the images before training: their size, bits and copies, and what the audit finds in the parts used."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
import torch

from vitlab.core.console import Console
from vitlab.core.environment import usable_cores
from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.auditing.audit import (
    IMBALANCE_RATIO,
    SERIOUS,
    TITLES,
    Audit,
    Item,
    Kind,
    Scanned,
    audit,
    class_counts,
    scan_parts,
)
from vitlab.data.dataset import Dataset, Opened, some_of
from vitlab.data.decode import bits_for, bytes_of_array, largest_value
from vitlab.data.decode import opened as opened_image
from vitlab.data.rules import MOST_BITS

_AUDITED = 50_000  # images; larger sets are audited by `vitlab data check`, which takes its time
_SAMPLED = 200  # images of a larger set whose size is looked at
_USUAL_SIDE = 224  # where none could be read
_WHITE = 255
_BRIEF: Mapping[Kind, str] = {"name": "Odd names of files"}  # where no list follows the title
_LEAST_STD = 1 / _WHITE  # of a channel that is the same everywhere
_SHOWN = 3  # images, and pictures that several show, in a warning
_DIGITS = 4  # of means: finer than one level of 255


class Preflight(NamedTuple):
    """Sentences about the data: what is worth knowing, and what endangers the scores."""

    notes: list[str]
    warnings: list[str]


def scan_used(opened: Opened, used: Sequence[Dataset], console: Console) -> Scanned | None:
    """Every image scanned once; None where they are too many for that, or synthetic."""
    if opened.synthetic or sum(map(len, used)) > _AUDITED:
        return None
    return scan_parts(opened.parts, workers=usable_cores(), console=console)


def audit_used(
    opened: Opened, used: dict[str, Dataset], scanned: Scanned | None, *, max_bad: int, fitted: Set[str], check: str
) -> Preflight:
    """What the audit of the parts that are used finds, a line for each kind.

    `fitted` are the parts that are learnt from, `check` is the command that shows every finding.
    """
    if opened.synthetic:
        return Preflight([], [])  # instances of a category are near-copies of each other, and meant to be
    if scanned is None:
        return Preflight([f"a large set: not audited; run `{check}`"], [])
    found = audit(dataclasses.replace(opened, parts=used), scanned=scanned.for_parts(used))
    bad = found.counts.get("unreadable", 0)
    if bad > max_bad:
        raise UsageError(
            f"{bad:,} files cannot be used, and data.max_bad allows {max_bad}",
            hint=f"`{check}` shows them. Remove them, or --set data.max_bad={bad}.",
        )
    kinds: list[Kind] = [kind for kind in found.counts if kind not in SERIOUS and kind != "class"]
    notes = [f"{_BRIEF.get(kind, TITLES[kind])}: {found.counts[kind]:,}" for kind in kinds]
    if small := _small_classes(used):
        notes.append(f"Classes with few images: {small:,}")
    warnings = [
        f"{TITLES[kind]}: {count:,}{_named(found, kind)}" for kind, count in found.counts.items() if kind in SERIOUS
    ]
    if leaked := sum(_num_leaked(one.items, fitted) for one in found.findings if one.kind == "leak"):
        warnings.append(f"{leaked:,} test or validation images are trained on, too: scores may be too good")
    if notes or warnings:
        notes.append(f"`{check}` shows what was found")
    return Preflight(notes, warnings)


def _named(found: Audit, kind: Kind) -> str:
    """The first of the images that a warning is about, so that nobody has to look for them."""
    groups = [
        some_of([item.key for item in one.items], _SHOWN) for one in found.findings if one.kind == kind and one.items
    ]
    return f" ({some_of(groups, _SHOWN, '; ')})" if groups else ""


def _small_classes(used: Mapping[str, Dataset]) -> int:
    """Classes with one image or none in all parts together, or far fewer than the largest has."""
    counts = Counter[str]()
    for part in used.values():
        counts.update(class_counts(part))
    most = max(counts.values(), default=0)
    return sum(count <= 1 or most >= IMBALANCE_RATIO * count for count in counts.values())


def _num_leaked(items: Sequence[Item], fitted: Set[str]) -> int:
    """How many of these images, which show the same thing, test or validate what was fitted to one of another part."""
    parts = {item.part for item in items} & fitted
    return sum(item.part != "train" and bool(parts - {item.part}) for item in items)


def _sample(dataset: Dataset) -> list[int]:
    return torch.linspace(0, len(dataset) - 1, min(_SAMPLED, len(dataset))).long().tolist()


def median_side(dataset: Dataset) -> int:
    """Of a sample, by the files' headers."""
    sides: list[int] = []
    for i in _sample(dataset):
        # What cannot be read is met again in training, and counted there.
        with contextlib.suppress(VitlabError, OSError):
            source = dataset.read(i)
            if isinstance(source, np.ndarray):
                sides.append(min(source.shape[:2]))
                continue
            with opened_image(source) as image:
                sides.append(min(image.size))
    return sorted(sides)[len(sides) // 2] if sides else _USUAL_SIDE


class Bands(NamedTuple):
    """Mean and standard deviation of every channel, on the 0-1 scale, and the bits of those that have more than 8."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    bits: int | None = None


def measured_bands(dataset: Dataset, bits: int | None = None) -> Bands | None:
    """Of a sample of images that are neither grey nor RGB, as of satellites; None of any others.

    `bits` are those that white has in images of more than 8, if known; else those that the sample makes use of.
    """
    bits = bits or sampled_bits(dataset)
    channels, count, total_C, squares_C = 0, 0, np.zeros(1), np.zeros(1)
    for i in _sample(dataset):
        try:
            source = dataset.read(i)
        except (VitlabError, OSError):
            continue
        if not isinstance(source, np.ndarray) or source.shape[2] in (1, 3):
            return None
        channels = channels or source.shape[2]
        if source.shape[2] != channels:
            raise UsageError(f"{dataset.keys[i]} has {source.shape[2]} channels, and others have {channels}")
        pixels_PC = bytes_of_array(source, bits or MOST_BITS).reshape(-1, channels) / _WHITE
        count += len(pixels_PC)
        total_C, squares_C = total_C + pixels_PC.sum(axis=0), squares_C + (pixels_PC**2).sum(axis=0)
    if not count:
        return None
    mean_C = total_C / count
    std_C = np.sqrt(np.maximum(squares_C / count - mean_C**2, _LEAST_STD**2))
    mean, std = (tuple(round(float(value), _DIGITS) for value in values) for values in (mean_C, std_C))
    return Bands(mean, std, bits)


def sampled_bits(dataset: Dataset) -> int | None:
    """What the deep grey images of a sample make use of; None where the first is not one, and no further shard is fetched."""
    largest = 0
    for i in _sample(dataset):
        with contextlib.suppress(VitlabError, OSError):
            largest = max(largest, largest_value(dataset.read(i)))
        if not largest:
            break
    return bits_for(largest) if largest else None
