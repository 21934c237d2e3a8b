"""Who does which run, among workers on one machine or on several with a shared folder: leases with heartbeats. Loads no torch.

A worker acquires a run by creating `leases/KEY.1`, which a file system lets only one do, and rewrites it every few seconds
while it works. A lease that has not changed for a while belongs to a worker that is gone; who wants the run creates `KEY.2`,
which again only one can. The highest number counts. No two clocks are compared: each waits by its own. On one machine nobody
has to wait, because a process that is gone can be seen to be. One that was silent may wake up and write on, so whoever takes
its run over does so in a folder of its own: an attempt.
"""

import contextlib
import dataclasses
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

from vitlab.core import fsio, reading
from vitlab.core.errors import FileProblem, VitlabError

LEASES = "leases"
MOST_BEGINNINGS = 3  # of a run whose workers are killed, in one call
HEARTBEAT_S, LEASE_TIMEOUT_S = 5.0, 60.0  # a heartbeat may fail ten times over before its worker is taken for dead
_ENDED = ("Z", "X")  # states of a process that has ended, and that its parent has not asked about


class LeaseLost(VitlabError):
    """Another worker has taken the run over, because this one was silent for too long."""


@dataclasses.dataclass
class Leases:
    """The leases in one folder, as one worker sees them."""

    folder: Path
    heartbeat_s: float = HEARTBEAT_S
    timeout_s: float = LEASE_TIMEOUT_S
    call: str = ""  # the workers of one call know each other by it
    gpu: str = ""  # the only one that this worker sees; empty where it has none of its own
    _seen: dict[Path, tuple[str, float]] = dataclasses.field(default_factory=dict[Path, tuple[str, float]])

    @contextlib.contextmanager
    def acquire(self, key: str) -> Generator["Lease | None"]:
        """Hold the lease of a run while the block is executed; None, and nothing is held, where another worker has it."""
        lease = self._try_acquire(key)
        if lease is None:
            yield None
            return
        held = _Held(lease, self.heartbeat_s)
        try:
            held.start()
            yield lease
        finally:
            held.close()
            if not held.lost:  # what is done has a record, and what failed may be tried again
                _release(lease)
        if held.lost:
            raise LeaseLost(f"{lease.path}: another worker has taken over, because this one was silent for too long")

    def holder(self, key: str) -> str | None:
        """The host and process that hold a run; None where nobody does."""
        path = self._newest(key)
        owner = _owner(path)
        return (
            None if path is None or owner.get("free") else f"{owner.get('host', '?')}, process {owner.get('pid', '?')}"
        )

    def count_here(self) -> int:
        """How many runs are being done on this machine, by whichever call; not those that have another GPU."""
        owners = [_owner(path) for path in self.folder.glob("[!.]*.*")]  # not what a heartbeat is being written to
        here = platform.node(), _system()
        return sum(
            (owner.get("host"), owner.get("system")) == here
            and not _is_dead(owner)
            and not (self.gpu and owner.get("gpu") and owner["gpu"] != self.gpu)
            for owner in owners
        )

    def _try_acquire(self, key: str) -> "Lease | None":
        fsio.make_folder(self.folder)
        newest = self._newest(key)
        before = _owner(newest)
        ended = before.get("free") or _is_dead(before)
        if newest is not None and not ended and not self._is_expired(newest):
            return None
        path = self.folder / f"{key}.1" if newest is None else _next(newest)
        number = int(path.suffix[1:])
        attempt = 1 if newest is None else before.get("attempt", number) if ended else number
        begun = 1
        if self.call and before.get("call") == self.call:
            begun = before.get("begun", 1) + _is_dead(before)
        lease = Lease(path, attempt, begun, self.call, self.gpu)
        try:
            fsio.write_new_file(path, _text(lease, 0))
        except fsio.Taken:
            return None
        if newest is not None:  # its holder, should it wake up, finds it gone
            fsio.remove_file(newest)
        if self._newest(key) != path:  # others took it over, and over again, since the look at it above
            fsio.remove_file(path)
            return None
        return lease

    def release_all(self) -> None:
        """Whatever this process holds. A signal may come after a lease was made and before `take` could give it back."""
        for path in self.folder.glob("[!.]*.*"):
            if (owner := _owner(path)).get("token") == _TOKEN:
                _release(Lease(path, owner["attempt"], owner["begun"], owner["call"]))

    def _newest(self, key: str) -> Path | None:
        found = [path for path in self.folder.glob(f"{key}.*") if path.suffix[1:].isdigit()]
        return max(found, key=lambda path: int(path.suffix[1:]), default=None)

    def _is_expired(self, path: Path) -> bool:
        text, now = _read(path), time.monotonic()
        before, since = self._seen.get(path, (None, now))
        if text != before:
            self._seen[path] = (text, now)
            return False
        return now - since > self.timeout_s


@dataclasses.dataclass(frozen=True)
class Lease:
    """`attempt` is above 1 where an earlier one may still be writing: it was silent, but nobody could see it dead."""

    path: Path
    attempt: int
    begun: int = 1  # how often workers of one call began the run; above 1, those before died at it
    call: str = ""
    gpu: str = ""

    @property
    def kills(self) -> bool:
        """Whether the run has killed so many workers of a call that this one had better not begin it."""
        return self.begun > MOST_BEGINNINGS


class _Held(threading.Thread):
    """Rewrites a lease until it is closed, and notices when another worker has taken it over."""

    def __init__(self, lease: Lease, heartbeat_s: float) -> None:
        super().__init__(daemon=True)
        self._lease, self._heartbeat_s = lease, heartbeat_s
        self._closed, self.lost = threading.Event(), False

    def run(self) -> None:
        heartbeat = 0
        while not self._closed.wait(self._heartbeat_s):
            with contextlib.suppress(OSError, FileProblem):  # a shared folder that is gone, or full, for a moment
                if self._is_taken_over():
                    self.lost = True
                    return
                heartbeat += 1
                fsio.write_file(self._lease.path, _text(self._lease, heartbeat))

    def close(self) -> None:
        self._closed.set()
        if self.ident is not None:  # a signal may have come before it was started
            self.join()
        self.lost = self.lost or self._is_taken_over()

    def _is_taken_over(self) -> bool:
        path = self._lease.path
        return _next(path).exists() or not path.exists() or _owner(path).get("token", _TOKEN) != _TOKEN


def _next(path: Path) -> Path:
    return path.with_suffix(f".{int(path.suffix[1:]) + 1}")


def _release(lease: Lease) -> None:
    """Give a lease back.

    After a silent one, and of a run that kills its workers, the file stays: who comes next must not count from 1 again.
    """
    if lease.attempt == 1 and not lease.kills:
        fsio.remove_file(lease.path)
    else:
        kept = {"attempt": lease.attempt, "begun": lease.begun, "call": lease.call}
        fsio.write_file(lease.path, fsio.json_text({"free": True, **kept}))


_TOKEN = secrets.token_hex(4)  # of this process: numbers of processes are used again


def _text(lease: Lease, heartbeat: int) -> str:
    owner = {"host": platform.node(), "system": _system(), "pid": os.getpid(), "started": _started(os.getpid())}
    what = {"attempt": lease.attempt, "begun": lease.begun, "call": lease.call, "gpu": lease.gpu}
    return fsio.json_text({**owner, "token": _TOKEN, **what, "heartbeat": heartbeat})


def _read(path: Path) -> str:
    try:
        return reading.read_text(path)
    except (OSError, FileProblem):  # being replaced, or given back meanwhile
        return ""


def _owner(path: Path | None) -> dict[str, Any]:
    """What a lease says; nothing where it cannot be read."""
    with contextlib.suppress(ValueError):
        owner = json.loads("" if path is None else _read(path))
        return cast(dict[str, Any], owner) if isinstance(owner, dict) else {}
    return {}


def _is_dead(owner: Mapping[str, Any]) -> bool:
    """Whether the lease is of a process of this machine that is no longer there."""
    here = owner.get("host") == platform.node() and owner.get("system") == _system() and _system() != ""
    return here and owner.get("started") is not None and _started(owner.get("pid")) != owner["started"]


def _system() -> str:
    """The boot of this machine and the processes that can be seen here: containers may share the name of their host."""
    try:
        boot = reading.read_text("/proc/sys/kernel/random/boot_id").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return ""


def _started(pid: Any) -> int | None:
    """When a process began, in ticks since the machine did; None where it is gone, or the system does not say (not Linux)."""
    try:
        state = reading.read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return None if state[0] in _ENDED else int(state[19])  # field 22
    except (OSError, FileProblem, ValueError, IndexError):
        return None
