"""Leases: one holder at a time, the dead followed at once, the silent after a while, and nobody who is alive."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitlab.core import fsio
from vitlab.core.signals import Stopped
from vitlab.studies import leases as module
from vitlab.studies.leases import Lease, LeaseLost, Leases

KEY = "0123456789abcdef"
GONE = 0.3


def elsewhere(path: Path, **changes: Any) -> dict[str, Any]:
    """Make a lease look as if another machine had written it."""
    owner = {
        **json.loads(path.read_text()),
        "host": "elsewhere",
        "system": "another boot",
        "token": "theirs",
        **changes,
    }
    path.write_text(json.dumps(owner))
    return owner


def left_by(folder: Path, **changes: Any) -> Path:
    """The lease of a worker that went without giving it back."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{KEY}.1"
    path.write_text(module._text(Lease(path, 1), 0))
    path.write_text(json.dumps({**json.loads(path.read_text()), "token": "theirs", **changes}))
    return path


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_has_it_until_it_is_given_back(tmp_path: Path) -> None:
    mine, other = Leases(tmp_path), Leases(tmp_path)
    with mine.acquire(KEY) as lease:
        assert lease is not None and lease.attempt == 1
        assert str(os.getpid()) in (other.holder(KEY) or "")
        with other.acquire(KEY) as second:
            assert second is None
        with other.acquire("f" * 16) as another:
            assert another is not None
    assert other.holder(KEY) is None and list(tmp_path.iterdir()) == []
    with other.acquire(KEY) as lease:
        assert lease is not None and lease.attempt == 1


def test_given_back_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Leases(tmp_path).acquire(KEY):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_who_looked_before_another_took_it_does_not_get_it(tmp_path: Path) -> None:
    class Early(Leases):
        looked = False

        def _newest(self, key: str) -> Path | None:
            if not self.looked:  # nobody has it at the first look
                self.looked = True
                return None
            return super()._newest(key)

    with Leases(tmp_path).acquire(KEY) as lease:
        assert lease is not None
        text = lease.path.read_text()
        with Early(tmp_path).acquire(KEY) as second:
            assert second is None
        assert lease.path.read_text() == text


def test_many_at_once_and_one_gets_it(tmp_path: Path) -> None:
    got: list[int] = []
    together = threading.Barrier(8)

    def take() -> None:
        leases = Leases(tmp_path)
        together.wait()
        with leases.acquire(KEY) as lease:
            got.append(lease is not None)
            together.wait()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]


def test_dead_process_of_this_machine_is_followed_at_once_in_its_own_folder(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        started = module._started(gone.pid) or 1
    left_by(tmp_path, pid=gone.pid, started=started)
    with Leases(tmp_path).acquire(KEY) as lease:
        assert lease is not None and (lease.attempt, lease.path.name) == (1, f"{KEY}.2")
        assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.2"]
    assert list(tmp_path.iterdir()) == []


def test_ended_process_that_nobody_has_asked_about_is_dead(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as ended:
        left_by(tmp_path, pid=ended.pid, started=module._started(ended.pid))
        leases = Leases(tmp_path)
        with leases.acquire(KEY) as lease:
            assert lease is None
        ended.kill()
        wait_until(lambda: module._started(ended.pid) is None)
        with leases.acquire(KEY) as lease:
            assert lease is not None


def test_number_of_a_process_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    left_by(tmp_path, pid=os.getpid(), started=1)
    with Leases(tmp_path).acquire(KEY) as lease:
        assert lease is not None


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"system": "a container of the same name"}])
def test_silent_one_elsewhere_is_taken_over_after_a_while_and_not_before(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    left_by(tmp_path, pid=1, started=1, **changes)
    leases, began = Leases(tmp_path, timeout_s=GONE), time.monotonic()
    while True:
        with leases.acquire(KEY) as lease:
            if lease is not None:
                break
        time.sleep(0.02)
    assert time.monotonic() - began > GONE
    assert (lease.attempt, lease.path.name) == (2, f"{KEY}.2")


def test_one_that_beats_is_never_taken_over(tmp_path: Path) -> None:
    path = left_by(tmp_path, pid=1, started=1, host="elsewhere")
    leases = Leases(tmp_path, timeout_s=GONE)
    for beat in range(20):  # twice the time after which a silent one is gone
        elsewhere(path, beat=beat)
        with leases.acquire(KEY) as lease:
            assert lease is None
        time.sleep(GONE / 10)


def test_holder_beats_while_it_works(tmp_path: Path) -> None:
    with Leases(tmp_path, heartbeat_s=0.02).acquire(KEY) as lease:
        assert lease is not None
        wait_until(lambda: json.loads(lease.path.read_text())["heartbeat"] >= 2)


@pytest.mark.parametrize("heartbeat_s", [0.02, 60.0])
def test_one_that_wakes_up_learns_that_it_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heartbeat_s: float
) -> None:
    """Whether it notices at a beat or only at its end."""
    with (
        pytest.raises(LeaseLost, match="another worker has taken over"),
        Leases(tmp_path, heartbeat_s=heartbeat_s).acquire(KEY) as mine,
    ):
        assert mine is not None
        theirs = mine.path.with_name(f"{KEY}.2")
        theirs.write_text(module._text(Lease(theirs, 2), 0))
        mine.path.unlink()
        time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.2"], "theirs stays, and ours does not come back"


def test_lease_of_the_same_number_by_another_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(LeaseLost), Leases(tmp_path, heartbeat_s=60).acquire(KEY) as mine:
        assert mine is not None
        elsewhere(mine.path)
    assert json.loads((tmp_path / f"{KEY}.1").read_text())["host"] == "elsewhere"


def test_who_follows_a_dead_attempt_keeps_out_of_the_folder_of_the_silent_one(tmp_path: Path) -> None:
    """1 fell silent and may wake up; 2 took over beside it and died; 3 goes on where 2 was."""
    path = left_by(tmp_path, pid=os.getpid(), started=1, attempt=2)
    path.rename(tmp_path / f"{KEY}.2")
    with Leases(tmp_path).acquire(KEY) as lease:
        assert lease is not None and (lease.attempt, lease.path.name) == (2, f"{KEY}.3")
    # It failed, and gave the lease back: the next one must not begin in the folder of the first either.
    assert Leases(tmp_path).holder(KEY) is None
    with Leases(tmp_path).acquire(KEY) as lease:
        assert lease is not None and (lease.attempt, lease.path.name) == (2, f"{KEY}.4")


def test_late_look_does_not_take_a_lease_that_has_moved_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While this worker looked at 1, others took 2, died, and 3 is at work: 2 is free again, and not to be had."""
    left_by(tmp_path, pid=os.getpid(), started=1)
    late, look = Leases(tmp_path), module._is_dead

    def moved_on(owner: dict[str, Any]) -> bool:
        (tmp_path / f"{KEY}.1").unlink()
        third = tmp_path / f"{KEY}.3"
        third.write_text(module._text(Lease(third, 1), 0))
        return look(owner)

    monkeypatch.setattr(module, "_is_dead", moved_on)
    with late.acquire(KEY) as lease:
        assert lease is None
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.3"]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"pid": "x"}'])
def test_lease_that_cannot_be_read_counts_as_somebodys_until_it_is_silent(tmp_path: Path, text: str) -> None:
    (tmp_path / f"{KEY}.1").write_text(text)
    leases = Leases(tmp_path, timeout_s=0.05)
    assert leases.holder(KEY) is not None
    with leases.acquire(KEY) as lease:
        assert lease is None
    time.sleep(0.1)
    with leases.acquire(KEY) as lease:
        assert lease is not None and lease.attempt == 2


def test_what_a_signal_left_is_given_back_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM may come a moment after the file is there, and before anybody knows of it."""
    write = fsio.write_new_file

    def stopped_after(path: Path, data: str) -> None:
        write(path, data)
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(fsio, "write_new_file", stopped_after)
    leases, another = Leases(tmp_path / "leases"), tmp_path / "leases" / "b.1"
    with pytest.raises(Stopped), leases.acquire("a"):
        raise AssertionError
    write(another, '{"token": "of another worker", "attempt": 1}')
    assert len(list(leases.folder.iterdir())) == 2
    leases.release_all()
    assert list(leases.folder.iterdir()) == [another]


def test_workers_of_one_call_count_how_often_they_died_at_a_run(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        dead = {"pid": gone.pid, "started": module._started(gone.pid) or 1}
    for call, begun in (("mine", 3), ("another", 1), ("", 1)):
        left_by(tmp_path, **dead, call="mine", begun=2)
        with Leases(tmp_path, call=call).acquire(KEY) as lease:
            assert lease is not None and (lease.begun, lease.kills) == (begun, False)
            assert json.loads(lease.path.read_text())["begun"] == begun
        assert list(tmp_path.iterdir()) == []
    left_by(tmp_path, **dead, call="mine", begun=3)
    for call, begun in (("mine", 4), ("mine", 4), ("another", 1)):  # all workers of the call shall know
        with Leases(tmp_path, call=call).acquire(KEY) as lease:
            assert lease is not None and (lease.begun, lease.kills, lease.attempt) == (begun, begun > 3, 1)
    assert list(tmp_path.iterdir()) == []


def test_runs_that_are_counted_here_share_what_this_one_computes_on(tmp_path: Path) -> None:
    on_one, on_other, anywhere = (Leases(tmp_path, gpu=gpu) for gpu in ("0", "1", ""))
    with on_one.acquire(KEY), anywhere.acquire("f" * 16):
        counts = [leases.count_here() for leases in (on_one, on_other, anywhere)]
        assert counts == [2, 1, 2]
        (tmp_path / f".{KEY}.1.0a1b.tmp").write_text((tmp_path / f"{KEY}.1").read_text())
        assert on_one.count_here() == 2, "a beat that is being written is no run"
        left_by(tmp_path / "other", host="elsewhere")
        (tmp_path / "other" / f"{KEY}.1").rename(tmp_path / "0000000000000000.1")
        (tmp_path / "1111111111111111.2").write_text(json.dumps({"free": True, "attempt": 2}))
        assert on_one.count_here() == 2, "neither what another machine does, nor what nobody does"


def test_a_beat_outlives_a_folder_that_is_gone_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shared file system answers while its server starts anew."""
    seen = threading.Event()

    def stale(*_: Any) -> bool:
        if seen.is_set():
            return False
        seen.set()
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(module._Held, "_is_taken_over", stale)
    with Leases(tmp_path, heartbeat_s=0.01).acquire(KEY) as lease:
        assert lease is not None
        wait_until(lambda: json.loads(lease.path.read_text())["heartbeat"] >= 2)
    assert seen.is_set()
