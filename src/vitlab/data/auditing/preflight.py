"""A quick look at the images before training: their size, bits and copies, and what the audit finds in the parts used."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence, Set
from typing import NamedTuple

import torch

from vitlab.core.console import Console
from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.auditing.audit import SERIOUS, TITLES, Item, Scanned, audit, scan_parts
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.decode import bits_for, largest_value
from vitlab.data.decode import opened as opened_image

_AUDITED = 50_000  # images; larger sets are audited by `vitlab data check`, when one has the time
_SAMPLED = 200  # images of a larger set whose size is looked at
_USUAL_SIDE = 224  # where none could be


class Preflight(NamedTuple):
    """Sentences about the data: what is worth knowing, and what endangers the scores."""

    notes: list[str]
    warnings: list[str]


def scan_used(opened: Opened, used: Sequence[Dataset], console: Console) -> Scanned | None:
    """Every image looked at once; None where they are too many for that."""
    if sum(map(len, used)) > _AUDITED:
        return None
    return scan_parts(opened.parts, workers=max(1, (os.cpu_count() or 1)), console=console)


def audit_used(
    opened: Opened, used: dict[str, Dataset], scanned: Scanned | None, *, max_bad: int, fitted: Set[str]
) -> Preflight:
    """What the audit of the parts that are used finds, a line for each kind. `fitted` are the parts that are learnt from."""
    if scanned is None:
        return Preflight(["a large set: not audited; `vitlab data check` does it"], [])
    found = audit(dataclasses.replace(opened, parts=used), scanned=scanned.for_parts(used))
    bad = found.counts.get("unreadable", 0)
    if bad > max_bad:
        raise UsageError(
            f"{bad:,} files cannot be used, and data.max_bad allows {max_bad}",
            hint=f"`vitlab data check DATA --out DIR` shows them. Take them away, or --set data.max_bad={bad}.",
        )
    notes = [f"-- {TITLES[kind]}: {count:,}" for kind, count in found.counts.items() if kind not in SERIOUS]
    warnings = [f"{TITLES[kind]}: {count:,}" for kind, count in found.counts.items() if kind in SERIOUS]
    if leaked := sum(_num_leaked(one.items, fitted) for one in found.findings if one.kind == "leak"):
        warnings.append(f"{leaked:,} test or validation images are trained on, too: scores may be too good")
    if notes or warnings:
        notes.append("`vitlab data check DATA --out DIR` shows what was found")
    return Preflight(notes, warnings)


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
        with contextlib.suppress(VitlabError, OSError), opened_image(dataset.read(i)) as image:
            sides.append(min(image.size))
    return sorted(sides)[len(sides) // 2] if sides else _USUAL_SIDE


def sampled_bits(dataset: Dataset) -> int | None:
    """What the deep grey images of a sample make use of; None where the first is not one, and no further shard is fetched."""
    largest = 0
    for i in _sample(dataset):
        with contextlib.suppress(VitlabError, OSError):
            largest = max(largest, largest_value(dataset.read(i)))
        if not largest:
            break
    return bits_for(largest) if largest else None
