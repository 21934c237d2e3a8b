"""Run as a program: performs one write again and again, each time in a forked child that is killed one operation later.

    python killed_writer.py file|folder PLACE

For k = 0, 1, ... the child works in PLACE/k and gets SIGKILL before its k-th disk operation; the last child, for which
there is no k-th operation left, finishes. Prints how each child ended, as JSON. Imports no torch, so it is quick and has
one thread.
"""

import json
import os
import signal
import sys
from pathlib import Path

from vitlab.core import fsio

OLD, NEW = "old " * 1000, "new " * 2000
FILES = {"a.txt": "first", "b.bin": b"\x00\x01\x02", "c.txt": ""}


def write_file(place: Path) -> None:
    fsio.write_file(place / "target", NEW)


def write_folder(place: Path) -> None:
    with fsio.new_folder(place / "deep" / "target") as folder:
        for name, data in FILES.items():
            folder.write(name, data)


WORK = {"file": write_file, "folder": write_folder}


def killed_at(wanted: int, kind: str, place: Path) -> int:
    """The wait status of a child that is killed before operation number `wanted`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0

    def kill(_operation: fsio.Operation, _path: Path) -> None:
        nonlocal count
        if count == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    with fsio.intercept(kill):
        WORK[kind](place)
    os._exit(0)


def main(kind: str, root: Path) -> None:
    ends: list[int] = []
    while not ends or ends[-1] != 0:
        place = root / str(len(ends))
        place.mkdir()
        (place / "target").write_text(OLD)
        ends.append(killed_at(len(ends), kind, place))
    print(json.dumps(ends))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
