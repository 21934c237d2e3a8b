"""Notices that another process has died, and says which one: without this, those that are left wait for it.

Each process tells once a second that it is there, in the table through which they found each other. The first looks at all and
writes down who is silent; the others look at the first, and at what it wrote. So the table is asked a few things by each, also
with a thousand of them. What hangs in a call that waits for the dead (NCCL does, gloo does not) is ended from here.
Beside its sign of life, each tells where its work is, so that one which lives and hangs is told from those that wait for it.
"""

# pyright: reportPrivateImportUsage=false
# torch's tables of addresses are documented under `torch.distributed`, but do not count as public there.

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

from torch.distributed import DistError, Store

from vitlab.core.errors import VitlabError

_BEAT_S = 1.0
_SILENCE_S = 15.0  # a dozen missed beats: longer than a busy machine holds a thread back
_GRACE_S = 10.0  # for the work to notice by itself, and to leave in order
_LEFT, _FAILED = "left", "failed"  # told instead of a beat, by a process on its way out
_WAITS = "waiting for others"
_OURS = Path(__file__).parents[1]


class ProcessLost(VitlabError):
    """Another process is gone; the last checkpoint is not."""

    def __init__(self, who: str) -> None:
        super().__init__(f"{who}; the others stop", hint="Go on from the last checkpoint with --resume.")


class Watch:
    """Looks after the other processes of a group, in a thread. `lost` names one that is gone, and is empty until then."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.lost = ""
        # A connection of its own: others block theirs. torch's types do not know of it.
        self._store: Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._rank, self._size = rank, size
        self._name, self._work = f"pid {os.getpid()} on {socket.gethostname()}", threading.get_ident()
        self._over = threading.Event()
        self._reachable = True
        self._thread = threading.Thread(target=self._look_after, name="vitlab-watch", daemon=True)

    def start(self) -> None:
        """Returns when all are there, which may take as long as the slowest needs to start."""
        self._store.set(self._key(self._rank), f"0 {self._name}")
        if self._rank == 0:
            self._store.wait([self._key(rank) for rank in range(self._size)])
            self._store.set("lost", "")
        else:
            self._store.wait(["lost"])
        self._thread.start()

    def wait_for_verdict(self) -> str:
        """Who is lost, as soon as it is known; empty if nobody is."""
        until = time.monotonic() + _SILENCE_S + _GRACE_S / 2
        while not self.lost and time.monotonic() < until:
            time.sleep(_BEAT_S / 10)
        return self.lost

    def stuck(self) -> str:
        """Who lives but does not come along; empty where all wait, or nothing can be learned."""
        told = self._exchange(list(range(self._size)), f"0 {self._name}, {_WAITS}")
        names = {rank: text.partition(" ")[2] for rank, text in told.items() if text not in (_LEFT, _FAILED)}
        behind = [f"process {rank} of {self._size} ({name})" for rank, name in names.items() if _WAITS not in name]
        return f"{behind[0]} does not come along" if behind else ""

    def stop(self, *, failed: bool) -> None:
        self._over.set()
        self._thread.join()
        self._tell(_FAILED if failed else _LEFT)

    def _look_after(self) -> None:
        watched = [rank for rank in range(self._size) if rank != self._rank] if self._rank == 0 else [0]
        told = dict.fromkeys(watched, "")  # what each said last,
        since = dict.fromkeys(watched, time.monotonic())  # when a sign of life was new,
        names = dict.fromkeys(watched, "")  # and who it is
        beats = 0
        while not self._over.wait(_BEAT_S):
            beats += 1
            now = time.monotonic()
            for rank, text in self._exchange(watched, f"{beats} {self._name}, {_place(self._work)}").items():
                if text not in (told[rank], _FAILED):
                    since[rank] = now
                    names[rank] = text.partition(" ")[2] or names[rank]
                told[rank] = text
            silent = [rank for rank in watched if told[rank] != _LEFT and now - since[rank] > _SILENCE_S]
            if silent and not self.lost:
                how = "failed" if told[silent[0]] == _FAILED else f"has given no sign for {_SILENCE_S:.0f} seconds"
                self.lost = f"process {silent[0]} of {self._size} ({names[silent[0]]}) {how}"
            if self.lost:
                self._end()

    def _exchange(self, watched: list[int], beat: str) -> dict[int, str]:
        """Tells that this process is there, and asks for the others; no news where the table is gone with its keeper."""
        self._tell(beat)
        if not self._reachable:
            return {}
        try:
            if self._rank != 0 and not self.lost:
                self.lost = self._store.get("lost").decode()
            values = self._store.multi_get([self._key(rank) for rank in watched])
        except RuntimeError:  # torch's errors of the network are such
            self._reachable = False
            return {}
        return {rank: value.decode() for rank, value in zip(watched, values, strict=True)}

    def _tell(self, text: str, key: str = "") -> None:
        if self._reachable:
            try:
                self._store.set(key or self._key(self._rank), text)
            except RuntimeError:
                self._reachable = False

    def _end(self) -> None:
        """Tells the others, gives the work time to leave in order, and ends the process if it cannot."""
        if self._rank == 0:
            self._tell(self.lost, "lost")
        if not self._over.wait(_GRACE_S):
            print(f"vitlab: {ProcessLost(self.lost)}", file=sys.stderr, flush=True)
            os._exit(1)

    @staticmethod
    def _key(rank: int) -> str:
        return f"beat/{rank}"


@contextlib.contextmanager
def watching(store: Store, rank: int, size: int) -> Generator[Watch]:
    """Looks after the others while it lasts. An error that came from a lost process is told as that."""
    watch = Watch(store, rank, size)
    watch.start()
    failed = True
    try:
        yield watch
        failed = False
    except RuntimeError as error:
        late = "Timed out" in str(error)  # nobody has died, then
        if _from_the_network(error) and (who := watch.stuck() if late else watch.wait_for_verdict()):
            raise ProcessLost(who) from error
        raise
    finally:
        watch.stop(failed=failed)


def _place(thread: int) -> str:
    """Where the work of that thread is: the innermost line of ours, and whether it waits for others there."""
    frame, waits = sys._current_frames().get(thread), False
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_OURS):
            place = f"in {frame.f_code.co_name} ({path.relative_to(_OURS)}, line {frame.f_lineno})"
            return f"{_WAITS} {place}" if waits or path == Path(__file__) else place
        # torch meets others in its own files, and in the backward pass, where gradients are added up.
        waits |= "distributed" in path.parts or frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return ""


def _from_the_network(error: RuntimeError) -> bool:
    return isinstance(error, DistError) or "gloo" in str(error)  # gloo's own have no type
