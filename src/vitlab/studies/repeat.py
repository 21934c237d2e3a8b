"""The commands that repeat the runs of a study, for wherever a reader is. Loads no torch."""

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from vitlab.studies.cell_records import CellRecord


def repeat_commands(stages: Sequence[CellRecord]) -> str:
    """The commands of a run and of those that it starts from, the first one first, each with its folder in `runs`."""
    starts = [None, *(stage.key for stage in stages)]
    return "\n".join(_anywhere(stage, start) for stage, start in zip(stages, starts, strict=False))


def _anywhere(record: CellRecord, start: str | None) -> str:
    """A command without the folders of the machine that ran it."""
    try:
        words = shlex.split(record.command)
    except ValueError:  # no quotation mark at the end
        return record.command
    for i in range(1, len(words)):
        if words[i - 1] == "--out":
            words[i] = f"runs/{record.key}"
        elif start is not None and (words[i - 1] == "--init" or _is_folder_of(start, words[i])):
            words[i] = f"runs/{start}"
    return shlex.join(words)


def _is_folder_of(key: str, word: str) -> bool:
    """Whether a word is the folder of a run, or of a later try: `runs/KEY-2`."""
    return re.fullmatch(rf"{re.escape(key)}(-\d+)?", PurePosixPath(word).name) is not None
