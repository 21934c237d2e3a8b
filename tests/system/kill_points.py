"""The disk operations of some work, named whatever turns its threads take, and SIGKILL before one of them."""

import collections
import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

from vitlab.core import fsio

Point = TypeVar("Point")
_TEMPORARY = re.compile(r"\.([^/]+)\.[0-9a-f]{8}\.tmp")
_RECORD = re.compile(r"records/\d{14}-[^/ ]+\.json")  # its name begins with the time, which no second run has again


@contextlib.contextmanager
def named_operations(root: Path, heard: Callable[[str], None]) -> Generator[None]:
    """Calls `heard` before each operation with its name: what is done, to which path under `root`, and for which time."""
    counts = collections.Counter[str]()
    turn = threading.Lock()

    def listener(operation: fsio.Operation, path: Path) -> None:
        place = _RECORD.sub("records/record.json", _TEMPORARY.sub(r"\1 (new)", os.path.relpath(path, root)))
        with turn:
            counts[f"{operation} {place}"] += 1
            name = f"{operation} {place} #{counts[f'{operation} {place}']}"
        heard(name)

    with fsio.intercept(listener):
        yield


@contextlib.contextmanager
def killed_at(root: Path, point: str | None) -> Generator[list[str]]:
    """SIGKILL before the operation of that name; without one, the list of all names is filled instead."""
    seen: list[str] = []

    def heard(name: str) -> None:
        seen.append(name)
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    with named_operations(root, heard):
        yield seen


def spread(points: list[Point], how_many: int) -> list[Point]:
    """`how_many` of them, evenly spread, the first and the last among them; all for 0."""
    if not how_many or how_many >= len(points):
        return points
    return [points[round(i * (len(points) - 1) / (how_many - 1))] for i in range(how_many)]
