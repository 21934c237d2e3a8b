"""Pictures that a set shares with others, which must be left out before training on it."""

from collections.abc import Mapping

import numpy as np

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem
from vitlab.data.auditing.audit import scan_parts
from vitlab.data.auditing.duplicates import find_duplicates
from vitlab.data.dataset import Dataset

_OURS = ""  # a name that no part has


def shared_pictures(
    dataset: Dataset, others: Mapping[str, Dataset], *, console: Console, workers: int | None = None
) -> dict[int, str]:
    """The images of `dataset` that show a picture of one of `others`, by number, with the name of that part.

    Equal files and pixels, re-encoded, resized and mirrored ones, as in `find_duplicates`. Of several parts, the last named
    here counts. An error where none of `dataset` can be read.
    """
    scanned = scan_parts({_OURS: dataset, **others}, workers=workers, console=console)
    if len(dataset) and all(i in scanned.faults for i in range(len(dataset))):  # its rows are the first
        raise FileProblem(
            f"none of the {len(dataset):,} images of {dataset.name} can be read, the first is {dataset.keys[0]}: "
            f"{scanned.faults[0]}"
        )
    usable = np.ones(len(scanned.facts), bool)
    usable[list(scanned.faults)] = False
    order = {name: number for number, name in enumerate([_OURS, *others])}
    shared: dict[int, str] = {}
    for group in find_duplicates(scanned.facts, usable):
        places = [scanned.locate(row) for row in group.members]
        part = max((name for name, _, _ in places), key=order.__getitem__)
        if part != _OURS:
            shared |= {i: part for name, _, i in places if name == _OURS}
    return dict(sorted(shared.items()))
