"""Who does which run, among workers on one machine or on several with a shared folder. Loads no torch.

A worker takes a run by creating `leases/KEY.1`, which a file system lets only one do, and rewrites it every few seconds while
it works. A lease that has not changed for a while belongs to a worker that is gone; who wants the run creates `KEY.2`, which
again only one can. The highest number counts. No two clocks are compared: each waits by its own. On one machine nobody has to
wait, because a process that is gone can be seen to be.
"""

import contextlib
import dataclasses
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Generator
from pathlib import Path

from vitlab.core import fsio, reading
from vitlab.core.errors import FileProblem, VitlabError

LEASES = "leases"
BEAT_S, GONE_S = 5.0, 60.0  # a beat may fail ten times over before its worker is taken for dead


class LeaseLost(VitlabError):
    """Another worker has taken the run over, because this one was silent for too long."""


@dataclasses.dataclass
class Leases:
    """The leases in one folder, as one worker sees them."""

    folder: Path
    beat_s: float = BEAT_S
    gone_s: float = GONE_S
    _seen: dict[Path, tuple[str, float]] = dataclasses.field(default_factory=dict[Path, tuple[str, float]])

    @contextlib.contextmanager
    def take(self, key: str) -> Generator["Lease | None"]:
        """Hold the lease of a run while the block is executed; None, and nothing is held, where another worker has it."""
        lease = self._acquire(key)
        if lease is None:
            yield None
            return
        held = _Held(lease.path, self.beat_s)
        held.start()
        try:
            yield lease
        finally:
            held.close()
            if not held.lost:  # what is done has a record, and what failed may be tried again
                fsio.remove_file(lease.path)
        if held.lost:
            raise LeaseLost(f"{lease.path}: another worker has taken over, because this one was silent for too long")

    def holder(self, key: str) -> str | None:
        """The host and process that hold a run; None where nobody does."""
        path = self._newest(key)
        return None if path is None else _owner(_read(path))

    def _acquire(self, key: str) -> "Lease | None":
        fsio.make_folder(self.folder)
        newest = self._newest(key)
        dead = newest is not None and _is_dead(_read(newest))
        if newest is not None and not dead and not self._is_silent(newest):
            return None
        path = self.folder / f"{key}.1" if newest is None else _next(newest)
        try:
            fsio.write_new_file(path, _text(0))
        except fsio.Taken:
            return None
        if newest is not None:  # its holder, should it wake up, finds it gone
            fsio.remove_file(newest)
        return Lease(path, 1 if newest is None or dead else int(path.suffix[1:]))

    def _newest(self, key: str) -> Path | None:
        found = [path for path in self.folder.glob(f"{key}.*") if path.suffix[1:].isdigit()]
        return max(found, key=lambda path: int(path.suffix[1:]), default=None)

    def _is_silent(self, path: Path) -> bool:
        text, now = _read(path), time.monotonic()
        before, since = self._seen.get(path, ("", now))
        if text != before:
            self._seen[path] = (text, now)
            return False
        return now - since > self.gone_s


@dataclasses.dataclass(frozen=True)
class Lease:
    """`attempt` is above 1 where the one before may still be writing: it was silent, but nobody could see it dead."""

    path: Path
    attempt: int


class _Held(threading.Thread):
    """Rewrites a lease until it is closed, and notices when another worker has taken it over."""

    def __init__(self, path: Path, beat_s: float) -> None:
        super().__init__(daemon=True)
        self._path, self._beat_s = path, beat_s
        self._closed, self.lost = threading.Event(), False

    def run(self) -> None:
        beat = 0
        while not self._closed.wait(self._beat_s):
            if self._is_taken_over():
                self.lost = True
                return
            beat += 1
            with contextlib.suppress(FileProblem):  # a disk that is full for a moment
                fsio.write_file(self._path, _text(beat))

    def close(self) -> None:
        self._closed.set()
        self.join()
        self.lost = self.lost or self._is_taken_over()

    def _is_taken_over(self) -> bool:
        return _next(self._path).exists() or not self._path.exists()


def _next(path: Path) -> Path:
    return path.with_suffix(f".{int(path.suffix[1:]) + 1}")


_TOKEN = secrets.token_hex(4)  # of this process: numbers of processes are used again


def _text(beat: int) -> str:
    owner = {"host": platform.node(), "pid": os.getpid(), "started": _started(os.getpid()), "token": _TOKEN}
    return fsio.json_text({**owner, "beat": beat})


def _read(path: Path) -> str:
    try:
        return reading.read_text(path)
    except (OSError, FileProblem):  # being replaced, or given back meanwhile
        return ""


def _owner(text: str) -> str:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        owner = json.loads(text)
        return f"{owner['host']}, process {owner['pid']}"
    return "an unknown worker"


def _is_dead(text: str) -> bool:
    """Whether the lease is of a process of this machine that is no longer there."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        owner = json.loads(text)
        if owner["host"] == platform.node() and owner["started"] is not None:
            return _started(int(owner["pid"])) != owner["started"]
    return False


def _started(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None where it is gone, or the system does not say (not Linux)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])  # field 22
    except (OSError, ValueError, IndexError):
        return None
