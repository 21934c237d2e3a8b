"""`vitlab convert`: weights from one format to another, lossless, with an account of every array."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from vitlab.core import fsio
from vitlab.core.errors import require_choice
from vitlab.engines.classifier import open_weights
from vitlab.weights.foreign import TARGETS, ConvertReport, Target, write_foreign


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: Target = "vitlab",
    drop: Sequence[str] = (),
    trust_pickle: bool = False,
) -> ConvertReport:
    """Reads `source`, whatever it is, and writes it to the new place `out` in the format `to`.

    `drop` names arrays of the source to leave out. `trust_pickle` lets a torch file run code, and is for files you made.
    """
    require_choice("to", to, TARGETS)
    fsio.require_free(Path(out))
    bundle, read = open_weights(Path(source), drop=drop, trust_pickle=trust_pickle)
    written = write_foreign(bundle, Path(out), to)
    if read is None:
        return written
    return dataclasses.replace(
        written,
        source=read.source,
        matched=read.matched,
        unexpected=read.unexpected,
        notes=(*read.notes, *written.notes),
    )
