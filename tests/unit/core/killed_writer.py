"""Run as a program: performs one write again and again, each time in a forked child that is killed one operation later.

    python killed_writer.py file|folder PLACE

For k = 0, 1, ... the child works in PLACE/k and gets SIGKILL before its k-th disk operation; the last child, for which
there is none left, finishes. Prints how each child ended, as JSON. `kill_points.py` must be on the path. Imports no
torch, so it is quick and has one thread.
"""

import json
import os
import sys
from pathlib import Path

from kill_points import killed_at

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


def child(wanted: str | None, kind: str, place: Path) -> int:
    """How a child ended that is killed before the operation `wanted`; without one it notes the names of all."""
    number = os.fork()
    if number:
        return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    with killed_at(place, wanted) as seen:
        WORK[kind](place)
    (place / "operations").write_text(json.dumps(seen))
    os._exit(0)


def main(kind: str, root: Path) -> None:
    def place(name: str) -> Path:
        (root / name).mkdir()
        (root / name / "target").write_text(OLD)
        return root / name

    whole = place("whole")
    child(None, kind, whole)
    points = [*json.loads((whole / "operations").read_text()), None]
    print(json.dumps([child(point, kind, place(str(k))) for k, point in enumerate(points)]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
