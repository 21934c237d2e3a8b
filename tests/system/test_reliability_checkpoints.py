"""The faults of checkpoints, C1 to C15 of the catalogue: what must hold when it goes wrong, one named test or more for each."""

import dataclasses
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import Crash
from forked_work import end_of, in_child, start_child
from power_cuts import Disk, lay_out, recorded
from reliability_runs import do_work, is_whole, run_outcome, snapshot

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, Unreadable
from vitlab.core.runtime import restored_torch_globals
from vitlab.training import checkpoint
from vitlab.training.checkpoint import Saver

HERE = Path(__file__).parent
SOAK = os.environ.get("VITLAB_SOAK") == "1"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _as_it_was() -> Generator[None]:
    with restored_torch_globals():
        yield


def printed(kind: str, place: Path, how_many: int = 0) -> Any:
    return in_child(lambda: do_work(kind, place / kind, how_many), place)


def stored(folder: Path, *steps: int) -> Path:
    for step in steps:
        checkpoint.store(folder, snapshot(step))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest(folder: Path) -> tuple[int | None, list[str]]:
    """The step of the newest checkpoint that is whole, which then holds the right bits, and what was said of others."""
    found, complaints = checkpoint.newest_valid(folder)
    assert found is None or is_whole(found)
    return None if found is None else found.step, complaints


# --- SIGKILL ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return printed("saves", tmp_path_factory.mktemp("killed"))


def test_C01_sigkill_at_every_operation_of_a_save_leaves_the_one_before_or_the_new_one(
    killed: list[dict[str, Any]],
) -> None:
    saving = [end for end in killed if not end["point"].startswith("remove")]
    assert len(saving) >= 18
    for end in saving:
        assert end["died"] == -9, end["point"]
        assert end["whole"] and end["step"] in (2, 3), end["point"]
        assert end["names"] == ["step-000000002", "step-000000003"], "cleared away, and saved again where it was lost"
    steps = [end["step"] for end in saving]
    assert steps == sorted(steps) and set(steps) == {2, 3}, "the old one up to a moment, the new one from then on"


def test_C02_sigkill_at_random_moments_of_saving_beside_the_work(tmp_path: Path) -> None:
    how_many = 500 if SOAK else 10
    found = printed("moments", tmp_path, how_many)
    assert [end["died"] for end in found] == [-9] * how_many
    assert all(end["whole"] for end in found)
    assert {end["lost"] for end in found} == {0}, "what has its name is whole"
    assert len({end["step"] for end in found}) > 1, "the premise: they died at different moments"
    print(f"{how_many} savers killed at random moments: each left its newest checkpoint whole")


def test_C03_sigkill_in_the_midst_of_a_removal_leaves_one_that_is_whole(killed: list[dict[str, Any]]) -> None:
    removing = [end for end in killed if end["point"].startswith("remove")]
    assert len(removing) >= 6, "the manifest, four files and the folder"
    for end in removing:
        assert (end["died"], end["step"], end["whole"], end["printed"]) == (-9, 3, True, []), end["point"]
        assert end["names"] == ["step-000000002", "step-000000003"]


# --- a disk that refuses ----------------------------------------------------------------------------------------------


def on_a_small_disk(run: Run, kind: str, place: Path, size: str, how_many: str = "0") -> Any:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this machine does not let a test mount a small disk of its own")
    place.mkdir(exist_ok=True)
    mount = f'mount -t tmpfs -o size={size} tmpfs "$1" && exec "$2" -B "$3" {kind} "$1" {how_many}'
    script = str(HERE / "reliability_runs.py")
    return json.loads(run(["unshare", "-rm", "sh", "-c", mount, "sh", place, sys.executable, script], cwd=HERE).stdout)


ROOM = re.compile(r"No space left on device \(([\d,]+) bytes needed, ([\d,]+) bytes free there\)")


def test_C04_full_disk_at_every_operation_harms_nothing_and_names_what_is_needed_and_free(
    tmp_path: Path, run: Run
) -> None:
    found = on_a_small_disk(run, "full-save", tmp_path, "1m")
    assert len(found) >= 15
    assert [end["reached"] for end in found] == [True] * (len(found) - 1) + [False]
    refused = 0
    for end in found:
        assert end["whole"] and end["complaints"] == [], end
        if end["printed"]:
            refused += 1
            room = ROOM.search(end["printed"])
            assert room is not None, end["printed"]
            needed, free = (int(number.replace(",", "")) for number in room.groups())
            assert free < needed and needed > 7000, "the whole checkpoint, not the rest of one file"
            assert "step-000000003" in end["printed"]
            assert end["names"] == ["step-000000001", "step-000000002"], "nothing half written is left"
        assert end["again"], "with room, it is saved"
    assert refused >= 10
    print(f"disk full before each of {len(found) - 1} operations: {refused} refused, nothing harmed")


@pytest.mark.slow
def test_C04_run_on_a_full_disk_fails_with_a_reason_and_resumes_when_there_is_room(tmp_path: Path, run: Run) -> None:
    found = on_a_small_disk(run, "full-run", tmp_path / "disk", "2m", "0" if SOAK else "3")
    assert found["whole"] == [0]
    assert len(found["ends"]) == (found["total"] if SOAK else 3)
    for point, end in found["ends"].items():
        if end["code"]:  # not where the log alone found no room, and by the end there was some
            assert end["code"] == 1 and ROOM.search(end["printed"]) is not None, (point, end["printed"])
        assert (end["again"], end["same"]) == (0, True), point
    refused = sum(end["code"] == 1 for end in found["ends"].values())
    assert refused >= len(found["ends"]) // 2
    print(
        f"disk full from each of {len(found['ends'])} operations of a run: {refused} ended it, all went on bit by bit"
    )


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.EROFS, errno.EFBIG], ids=errno.errorcode.get)
def test_C05_error_of_the_disk_at_every_operation_is_reported_and_harms_nothing(tmp_path: Path, number: int) -> None:
    refused = 0
    for last in itertools.count():
        folder, count = stored(tmp_path / str(last), 1, 2), 0

        def refuse(_operation: fsio.Operation, _path: Path, last: int = last) -> None:
            nonlocal count
            count += 1
            if count == last + 1:
                raise OSError(number, os.strerror(number))

        try:
            with fsio.intercept(refuse):
                checkpoint.store(folder, snapshot(3))
        except FileProblem as problem:
            refused += 1
            assert "step-000000003" in problem.what and os.strerror(number) in problem.what
        step, complaints = newest(folder)
        assert step in (2, 3) and complaints == []
        assert names(folder)[:2] == ["step-000000001", "step-000000002"] and len(names(folder)) == step
        if count <= last:
            break
    assert refused == count >= 17, "every operation can refuse, and each refusal is reported"


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
static int shortened, interrupted;
ssize_t write(int file, const void *data, size_t count) {
    static ssize_t (*real)(int, const void *, size_t);
    struct stat about;
    if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    if (count > 1 && !fstat(file, &about) && S_ISREG(about.st_mode)) {
        if ((shortened + interrupted) % 3 == 2) { interrupted++; errno = EINTR; return -1; }
        shortened++;
        count /= 2;
    }
    return real(file, data, count);
}
__attribute__((destructor)) static void tell(void) { fprintf(stderr, "short %d interrupted %d\n", shortened, interrupted); }
"""


@pytest.mark.slow
def test_C06_short_and_interrupted_writes_give_the_right_file(tmp_path: Path, run: Run) -> None:
    """The system's own `write` is replaced by one that takes half, and every third time nothing."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    (tmp_path / "shim.c").write_text(SHIM)
    run([compiler, "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c", "-ldl"], cwd=tmp_path)
    command = [sys.executable, HERE / "reliability_runs.py", "store", tmp_path / "here"]
    done = run(command, cwd=tmp_path, env={"LD_PRELOAD": str(tmp_path / "shim.so")})
    shortened, interrupted = map(int, re.search(r"short (\d+) interrupted (\d+)", done.stderr).groups())  # pyright: ignore
    assert shortened >= 10 and interrupted >= 5, "the premise of this test"
    plain = checkpoint.store(tmp_path / "plain", snapshot(5))
    assert fsio.verify_folder(Path(json.loads(done.stdout)))
    assert (Path(json.loads(done.stdout)) / fsio.MANIFEST).read_bytes() == (plain / fsio.MANIFEST).read_bytes()


# --- a power cut ------------------------------------------------------------------------------------------------------


def test_C07_power_cut_at_any_moment_leaves_a_checkpoint_that_is_whole(tmp_path: Path) -> None:
    """While a third one is saved and the two before it are removed."""
    folder = stored(tmp_path / "checkpoints", 1, 2)
    disk = Disk(folder)

    def work() -> None:
        checkpoint.store(folder, snapshot(3))
        checkpoint.prune(folder, keep=1, best=None)

    states = {tuple(sorted(state.items())) for state in disk.follow(recorded(work))}
    found: list[int | None] = []
    for state in states:
        place = lay_out(dict(state), tmp_path / "after")
        found.append(newest(place)[0])
        shutil.rmtree(place)
    assert len(found) > 100
    assert set(found) == {2, 3}
    print(f"{len(found)} states that a power cut can leave: each has a whole checkpoint")


def test_C07_model_of_the_power_cut_sees_what_a_writer_without_fsync_loses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    outcomes: dict[bool, set[bytes | None]] = {}
    for synced in (True, False):
        folder = tmp_path / str(synced)
        folder.mkdir()
        (folder / "file").write_text("old")
        disk = Disk(folder)
        operations = recorded(lambda folder=folder: fsio.write_file(folder / "file", "new content"))
        kept = [entry for entry in operations if synced or entry[0] != "fsync"]
        outcomes[synced] = {state.get("/file") for state in disk.follow(kept)}
    assert outcomes[True] == {b"old", b"new content"}
    assert b"" in outcomes[False], "a name whose content was lost, or the model is blind"


# --- damage -----------------------------------------------------------------------------------------------------------


def test_C08_one_flipped_bit_is_reported_and_the_one_before_is_used(tmp_path: Path) -> None:
    """In a real run, in every file; every bit of a small one is flipped in tests/unit/training/test_checkpoint_damage.py."""
    folder = tmp_path / "run"
    assert run_outcome(folder, "train.save_every=34%")[0] == 0
    shutil.rmtree(folder / "bundle")
    path = checkpoint.list_checkpoints(folder / "checkpoints")[-1]
    files = sorted(path.iterdir())
    assert len(files) == 5
    for file in files:
        whole = file.read_bytes()
        for position in range(0, len(whole), max(1, len(whole) // 5)):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            file.write_bytes(damaged)
            found, complaints = checkpoint.newest_valid(path.parent)
            assert found is not None and found.step == 4
            assert complaints[0].startswith("step-000000006 cannot be used: "), (file.name, position)
        file.write_bytes(whole)
    files[0].write_bytes(b"")
    code, text = run_outcome(folder, "train.save_every=34%", resume=True)
    assert code == 0
    assert "step-000000006 cannot be used: " in text and "resuming at step 4 of 6" in text


def test_C09_file_that_is_missing_or_from_another_step_is_noticed(tmp_path: Path) -> None:
    folder = stored(tmp_path / "checkpoints", 1, 2, 3)
    first, second = folder / "step-000000002", folder / "step-000000003"
    files = names(second)
    assert len(files) == 5
    tried = 0
    for chosen in (list(group) for size in (1, 2, 4) for group in itertools.combinations(files, size)):
        for change in ("missing", "swapped"):
            kept = {name: (path / name).read_bytes() for path in (second,) for name in chosen}
            for name in chosen:
                (second / name).unlink()
                if change == "swapped":
                    (second / name).write_bytes((first / name).read_bytes())
            step, complaints = newest(folder)
            assert (step, len(complaints)) == (2, 1), (change, chosen)
            tried += 1
            for name, content in kept.items():
                (second / name).write_bytes(content)
    assert tried == 2 * (5 + 10 + 5)
    assert newest(folder) == (3, [])
    shutil.rmtree(second)
    shutil.copytree(first, second)  # all files of another step, so all hashes agree
    step, (complaint,) = newest(folder)
    assert step == 2 and "was renamed: it holds step 2" in complaint


def test_C09_file_too_many_is_in_nobodys_way(tmp_path: Path) -> None:
    folder = stored(tmp_path / "checkpoints", 1, 2)
    (folder / "step-000000002" / "model-old.safetensors").write_bytes(b"no weights at all")
    (folder / "notes.txt").write_text("mine")
    assert newest(folder) == (2, [])
    checkpoint.prune(folder, keep=1, best=None)
    assert names(folder) == ["notes.txt", "step-000000002"]


# --- one run folder, several processes and old leftovers --------------------------------------------------------------


def has_ended(process: int) -> bool:
    """Without taking note of it, so that its number stays its own."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_C10_second_process_is_refused_at_once_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "long" / "run"
    long = ("train.steps=20000", "train.save_every=0.01%")
    process = start_child(lambda: do_work("long", tmp_path / "long"), tmp_path)
    try:
        until = time.monotonic() + 300
        while not checkpoint.list_checkpoints(folder / "checkpoints"):
            assert not has_ended(process) and time.monotonic() < until
            time.sleep(0.01)
        started = time.monotonic()
        with pytest.raises(FileProblem, match="is in use by another process"), fsio.locked(folder):
            pass
        assert time.monotonic() - started < 10, "it waited for the other"
        code, text = run_outcome(folder, *long, resume=True)
        assert code == 1 and f"{folder} is in use by another process" in text
        assert not has_ended(process), "the first one did not notice"
    finally:
        os.kill(process, signal.SIGKILL)
        end_of(process)

    def stop(_operation: fsio.Operation, path: Path) -> None:
        if path.name == "metrics.jsonl" and _operation == "append":
            raise Crash

    with pytest.raises(Crash), fsio.intercept(stop):  # it gets as far as its first step
        run_outcome(folder, *long, resume=True)


def test_C11_leftovers_of_a_crash_are_cleared_never_counted_and_in_nobodys_way(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run_outcome(folder)[0] == 0
    shutil.rmtree(folder / "bundle")
    checkpoints = folder / "checkpoints"
    checkpoint.remove_after(checkpoints, 4)
    planted = [checkpoints / f".step-{step:09d}.{token}.tmp" for step in (4, 6) for token in ("0123abcd", "99999999")]
    for path in planted:
        shutil.copytree(checkpoints / "step-000000004", path)
    (folder / ".bundle.0a0a0a0a.tmp").mkdir()
    (folder / ".config.toml.0b0b0b0b.tmp").write_text("half")
    assert [path.name for path in checkpoint.list_checkpoints(checkpoints)] == ["step-000000004"]
    assert run_outcome(folder, resume=True)[0] == 0
    assert names(checkpoints) == ["step-000000004", "step-000000006"]
    assert list(folder.rglob("*.tmp")) == []


# --- saving beside training -------------------------------------------------------------------------------------------


def test_C12_saved_bits_are_those_of_the_call_whatever_happens_to_the_weights_afterwards(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(100, 100)}
    made, gate = snapshot(1), threading.Event()

    def wait(_operation: fsio.Operation, _path: Path) -> None:
        assert gate.wait(30)

    saver = Saver(tmp_path, keep=1)
    with fsio.intercept(wait):
        saver.submit(dataclasses.replace(made, model=checkpoint.copied(weights)), None)
        weights["w"] += 1  # before a single byte is written
        gate.set()
        saver.close()
    assert checkpoint.restore(tmp_path / "step-000000001").model["w"].count_nonzero() == 0


def test_C13_disk_that_is_slower_than_training_holds_it_back_with_one_save_in_flight(tmp_path: Path) -> None:
    """Each operation takes a while; every step wants to save."""
    flying, most, lock = set[str](), 0, threading.Lock()

    def slow(operation: fsio.Operation, path: Path) -> None:
        nonlocal most
        time.sleep(0.005)
        with lock:
            if operation == "mkdir" and "step-" in path.name:
                flying.add(path.name.split(".")[1])
            most = max(most, len(flying))
            if operation == "rename" and "step-" in path.name:
                flying.remove(path.name)

    with fsio.intercept(slow):
        assert run_outcome(tmp_path / "run", "train.save_every=1%", "train.keep=10")[0] == 0
    assert most == 1
    saved = checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in saved] == [f"step-{step:09d}" for step in range(1, 7)], "none was left out"


# --- checkpoints of others --------------------------------------------------------------------------------------------


def test_C14_checkpoint_of_an_older_release_loads(tmp_path: Path) -> None:
    """Stored when the format was new."""
    found = checkpoint.restore(HERE / "stored" / "checkpoint-format-1" / "step-000000007")
    assert found.step == 7
    assert found.model["w"].tolist() == [[0.0, 0.25], [0.5, 0.75], [1.0, 1.25]]
    assert found.optimizer["w/exp_avg"].dtype == torch.bfloat16
    assert found.ema is not None and found.ema["w"].tolist() == [-1.5]
    assert found.progress["best"] == {"step": 5, "top1": 0.5}


def test_C14_checkpoint_of_a_later_vitlab_is_refused_with_both_versions(tmp_path: Path) -> None:
    folder = stored(tmp_path / "checkpoints", 1)
    path = checkpoint.store(folder, snapshot(2))
    kept = {name: (path / name).read_bytes() for name in names(path) if name != fsio.MANIFEST}
    shutil.rmtree(path)
    with fsio.new_folder(path) as new:
        for name, content in kept.items():
            new.write(name, content.replace(b'"format": 1', b'"format": 99'))
    with pytest.raises(Unreadable, match=r"format 99.* 1"):
        newest(folder)
    assert fsio.verify_folder(path), "it is whole, and stays"


HOSTILE = """
import json, pickle, sys
from pathlib import Path
place, canary = Path(sys.argv[1]), Path(sys.argv[2])

class Payload:
    def __reduce__(self):
        return (exec, (f"open({str(canary)!r}, 'w').close()",))

from vitlab.core import fsio
from vitlab.core.errors import FileProblem
from vitlab.training import checkpoint

code = pickle.dumps(Payload())
texts = {
    "pickle": code,
    "torch": b"PK" + code,
    "json": b'{"__reduce__": ["exec", "open"], "step": 1, "ema": true, "format": 1}',
    "deep": b"[" * 100_000,
    "header": (2**62).to_bytes(8, "little") + code,
    "yaml": b"!!python/object/apply:os.system ['true']",
    "empty": b"",
}
files = (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.EMA, checkpoint.PROGRESS, fsio.MANIFEST)
heard = []
watched = ("pickle.find_class", "os.system", "subprocess.Popen")
sys.addaudithook(lambda event, _: heard.append(event) if event in watched else None)
nothing = (8).to_bytes(8, "little") + b"{}      "  # a safetensors file without tensors
refused = tried = 0
for number, (target, text) in enumerate((target, text) for target in files for text in texts.values()):
    folder = place / str(number)
    path = folder / "step-000000001"
    good = json.dumps({"step": 1, "ema": True, "format": 1}).encode()
    with fsio.new_folder(path) as new:  # hashes that fit: whoever made it knew how
        for name in files[:-1]:
            new.write(name, text if name == target else good if name == checkpoint.PROGRESS else nothing)
        for extra in (".metadata", "data.pkl", "__init__.py", "optimizer.pt"):
            new.write(extra, code)
    if target == fsio.MANIFEST:
        (path / target).write_bytes(text)
    tried += 1
    try:
        checkpoint.restore(path)
    except FileProblem:
        refused += 1
found = {"tried": tried, "refused": refused, "heard": heard, "ran": canary.exists()}
"""


def test_C15_hostile_checkpoint_runs_no_code(tmp_path: Path) -> None:
    def work() -> Any:
        sys.argv = ["hostile", str(tmp_path / "made"), str(tmp_path / "canary")]
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(HOSTILE, names)  # an audit hook stays for as long as its process
        return names["found"]

    found = in_child(work, tmp_path)
    assert (found["ran"], found["heard"]) == (False, [])
    assert found["tried"] == 35
    assert found["refused"] >= 34, "what is well formed may be read as the nothing that it holds"
