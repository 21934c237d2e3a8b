"""Shared by the tests of the lowest room: faults at the k-th disk operation, and a child without root's powers."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from vitlab.core import fsio

Work = Callable[[], None]
NOBODY = 65534


def _operations(work: Work) -> list[tuple[str, Path]]:
    """What `work` announces, in order."""
    seen: list[tuple[str, Path]] = []
    with fsio.intercept(lambda operation, path: seen.append((operation, path))):
        work()
    return seen


def _fail_at(wanted: int, error: BaseException, work: Work) -> None:
    """Runs `work`, with `error` in place of its disk operation number `wanted`."""
    count = -1

    def listener(_operation: fsio.Operation, _path: Path) -> None:
        nonlocal count
        count += 1
        if count == wanted:
            raise error

    with fsio.intercept(listener):
        work()


@pytest.fixture
def operations() -> Callable[[Work], list[tuple[str, Path]]]:
    return _operations


@pytest.fixture
def fail_at() -> Callable[[int, BaseException, Work], None]:
    return _fail_at


@pytest.fixture
def open_place() -> Generator[Path]:
    """A folder that any user may enter, unlike pytest's own."""
    place = Path(tempfile.mkdtemp(prefix="vitlab-test-"))
    place.chmod(0o755)
    yield place
    for folder in [place, *place.rglob("*")]:
        if folder.is_dir():
            folder.chmod(0o755)
    shutil.rmtree(place)


@pytest.fixture
def as_ordinary_user() -> Callable[[str, Path], str]:
    """Runs Python code (with `path`, `fsio`, `errors`) without root's power to write anywhere; gives what it prints."""

    def run(code: str, path: Path) -> str:
        # Powers are dropped after the imports, because root's Python may lie where nobody else can read it.
        lines = [
            "import os, sys",
            "from pathlib import Path",
            "from vitlab.core import errors, fsio",
            f"if os.geteuid() == 0: os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})",
            "path = Path(sys.argv[1])",
            code,
        ]
        command = [sys.executable, "-c", "\n".join(lines), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
