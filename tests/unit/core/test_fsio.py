"""Every write is all or nothing, whatever fails and wherever it fails."""

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, UsageError, VitlabError

Work = Callable[[], None]
Operations = Callable[[Work], list[tuple[str, Path]]]
FailAt = Callable[[int, BaseException, Work], None]

FILES: dict[str, bytes | str] = {"a.txt": "first", "b.bin": b"\x00\x01\x02"}
FILE_OPERATIONS = 5
FOLDER_OPERATIONS = 13


def make_folder_of_files(path: Path) -> None:
    with fsio.new_folder(path) as folder:
        for name, data in FILES.items():
            folder.write(name, data)


def kinds(seen: list[tuple[str, Path]]) -> list[str]:
    return [operation for operation, _ in seen]


# --- the order of operations ------------------------------------------------------------------------------------------


def test_write_file_syncs_before_the_rename_and_the_parent_after_it(tmp_path: Path, operations: Operations) -> None:
    target = tmp_path / "x.json"
    seen = operations(lambda: fsio.write_file(target, "text"))
    temporary = seen[0][1]
    made = [("create", temporary), ("write", temporary), ("fsync", temporary)]
    assert seen == [*made, ("rename", target), ("fsync", tmp_path)]
    assert temporary.parent == tmp_path
    assert temporary != target
    assert len(seen) == FILE_OPERATIONS


def test_new_folder_is_whole_and_on_disk_before_it_gets_its_name(tmp_path: Path, operations: Operations) -> None:
    target = tmp_path / "bundle"
    seen = operations(lambda: make_folder_of_files(target))
    temporary = seen[0][1]
    assert seen == [
        ("mkdir", temporary),
        *((step, temporary / name) for name in (*FILES, fsio.MANIFEST) for step in ("create", "write", "fsync")),
        ("fsync", temporary),
        ("rename", target),
        ("fsync", tmp_path),
    ]
    assert len(seen) == FOLDER_OPERATIONS


def test_make_folder_puts_each_level_on_disk_before_the_next(tmp_path: Path, operations: Operations) -> None:
    seen = operations(lambda: fsio.make_folder(tmp_path / "a" / "b") and None)
    a = tmp_path / "a"
    assert seen == [("mkdir", a), ("fsync", tmp_path), ("mkdir", a / "b"), ("fsync", a)]
    assert operations(lambda: fsio.make_folder(a / "b") and None) == []


def test_file_and_folder_are_really_synced_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(("fsync", os.fstat(descriptor).st_ino))

    def spy_replace(source: Path, target: Path) -> None:
        done.append(("rename", Path(source).stat().st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    fsio.write_file(tmp_path / "x", "new")
    file, parent = (tmp_path / "x").stat().st_ino, tmp_path.stat().st_ino
    assert done == [("fsync", file), ("rename", file), ("fsync", parent)]
    done.clear()
    make_folder_of_files(tmp_path / "bundle")
    folder = tmp_path / "bundle"
    files = [(folder / name).stat().st_ino for name in (*FILES, fsio.MANIFEST)]
    inner = folder.stat().st_ino
    assert done == [*(("fsync", file) for file in (*files, inner)), ("rename", inner), ("fsync", parent)]


def test_listener_is_forgotten_after_its_block(tmp_path: Path) -> None:
    heard: list[str] = []
    with fsio.intercept(lambda operation, _path: heard.append(operation)):
        pass
    fsio.write_file(tmp_path / "x", "1")
    assert heard == []


# --- a failure at every operation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(FILE_OPERATIONS))
@pytest.mark.parametrize("before", ["old", None])
def test_failed_write_file_leaves_the_old_content_or_the_new(
    tmp_path: Path, fail_at: FailAt, k: int, before: str | None
) -> None:
    target = tmp_path / "x"
    if before is not None:
        target.write_text(before)
    with pytest.raises(FileProblem, match="x"):
        fail_at(k, OSError(errno.EIO, "Input/output error"), lambda: fsio.write_file(target, "new"))
    renamed = k == FILE_OPERATIONS - 1
    assert (target.read_text() if target.exists() else None) == ("new" if renamed else before)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["x"]), "litter"


@pytest.mark.parametrize("k", range(FOLDER_OPERATIONS))
def test_failed_new_folder_leaves_nothing_or_the_whole(tmp_path: Path, fail_at: FailAt, k: int) -> None:
    target = tmp_path / "bundle"
    with pytest.raises(FileProblem, match="bundle"):
        fail_at(k, OSError(errno.EIO, "Input/output error"), lambda: make_folder_of_files(target))
    if k == FOLDER_OPERATIONS - 1:
        assert fsio.verify_folder(target) == list(FILES)
    else:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("k", range(FOLDER_OPERATIONS))
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("mine"), VitlabError("mine")], ids=repr)
def test_what_is_not_a_disk_error_passes_unchanged_and_leaves_no_litter(
    tmp_path: Path, fail_at: FailAt, k: int, error: BaseException
) -> None:
    with pytest.raises(type(error)) as caught:
        fail_at(k, error, lambda: make_folder_of_files(tmp_path / "bundle"))
    assert caught.value is error
    assert [path.name for path in tmp_path.iterdir()] == (["bundle"] if k == FOLDER_OPERATIONS - 1 else [])


def test_failure_in_the_body_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), fsio.new_folder(tmp_path / "x") as folder:
        folder.write("a", "1")
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_failing_clean_up_does_not_hide_the_first_failure(tmp_path: Path) -> None:
    def dying_disk(operation: fsio.Operation, _path: Path) -> None:
        if operation in ("rename", "remove"):
            raise OSError(errno.EROFS, f"{operation} refused")

    with fsio.intercept(dying_disk), pytest.raises(FileProblem, match="rename refused"):
        fsio.write_file(tmp_path / "x", "new")
    assert not (tmp_path / "x").exists()


def test_append_line_touches_nothing_before_the_end(tmp_path: Path, fail_at: FailAt) -> None:
    log = tmp_path / "log"
    fsio.append_line(log, "one")
    fsio.append_line(log, "two\n")
    with pytest.raises(FileProblem, match="log"):
        fail_at(0, OSError(errno.ENOSPC, "No space left on device"), lambda: fsio.append_line(log, "three"))
    assert log.read_text() == "one\ntwo\n"


# --- a kill at every operation ----------------------------------------------------------------------------------------


def kill_everywhere(kind: str, place: Path) -> list[Path]:
    """The folder of each killed child, by the operation it died at, and at the end that of the one which lived."""
    script = Path(__file__).with_name("killed_writer.py")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "system")}  # where kill_points.py is
    command = [sys.executable, str(script), kind, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    ends = json.loads(done.stdout)
    assert ends == [-9] * (len(ends) - 1) + [0]
    return [place / str(k) for k in range(len(ends))]


def test_sigkill_at_every_operation_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    places = kill_everywhere("file", tmp_path)
    found = [(place / "target").read_text()[:4] for place in places]
    assert found == ["old "] * 4 + ["new "] * 2
    assert {len((place / "target").read_text()) for place in places} == {4000, 8000}


def test_sigkill_at_every_operation_leaves_no_folder_or_a_whole_one(tmp_path: Path) -> None:
    places = kill_everywhere("folder", tmp_path)
    assert len(places) == 18, (
        "two for the parent folder, one to make it, eleven to write (one file is empty), three to publish, and the last"
    )
    for place in places:
        target = place / "deep" / "target"
        if target.exists():
            assert fsio.verify_folder(target) == ["a.txt", "b.bin", "c.txt"]
        else:
            make_folder_of_files(target)  # what a killed writer left behind is in nobody's way
            assert fsio.verify_folder(target) == list(FILES)


# --- sentences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "No space left on device"),
        (errno.EDQUOT, "Disk quota exceeded"),
        (errno.EROFS, "Read-only file system"),
    ],
)
def test_refusal_names_the_file_the_reason_and_the_free_space(
    tmp_path: Path, fail_at: FailAt, number: int, reason: str
) -> None:
    with pytest.raises(FileProblem) as caught:
        fail_at(1, OSError(number, reason), lambda: fsio.write_file(tmp_path / "model.bin", b"x" * 1234))
    first, second = str(caught.value).splitlines()
    assert str(tmp_path / "model.bin") in first
    assert reason in first
    needed = "" if number == errno.EROFS else r"1,234 bytes needed, "
    assert re.search(rf"\({needed}[\d,]+ bytes free there\)$", first)
    assert second == "Choose another --out, or free some space."


def test_refusal_in_the_cache_names_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(FileProblem, match=r"Not a directory.*\n.*VITLAB_CACHE"):
        fsio.make_folder(tmp_path / "file" / "features")


def test_real_file_size_limit_leaves_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    code = (
        "import sys; from pathlib import Path; from vitlab.core import fsio, errors\n"
        "try: fsio.write_file(Path(sys.argv[1]), b'n' * 100_000)\n"
        "except errors.FileProblem as problem: print(problem)"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(target)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert f"cannot write {target}: File too large" in done.stdout
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_real_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from vitlab.core import fsio, errors\n"
        "place = Path(sys.argv[1])\n"
        "try:\n"
        "    with fsio.new_folder(place / 'bundle') as folder:\n"
        "        for i in range(99): folder.write(str(i), bytes(100_000))\n"
        "except errors.FileProblem as problem: print(problem, list(place.iterdir()))"
    )
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -B -c "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, code]
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this machine does not let a test mount a small disk of its own")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = re.search(
        r"bundle: No space left on device \(([\d,]+) bytes needed, ([\d,]+) bytes free there\)", done.stdout
    )
    assert printed is not None, done.stdout
    needed, free = (int(number.replace(",", "")) for number in printed.groups())
    assert needed == 11 * 100_000, "the files until then and the one that found no room"
    assert 1_000_000 < free <= 2**20, "what was given back counts"
    assert done.stdout.strip().endswith("[]")


def test_space_known_beforehand_is_reported_in_total(tmp_path: Path, fail_at: FailAt) -> None:
    def build() -> None:
        with fsio.new_folder(tmp_path / "x", size=5000) as folder:
            folder.write("a", b"1" * 1000)

    for k in range(4):  # the folder, the file, its content, its sync
        with pytest.raises(FileProblem, match=r"5,000 bytes needed.*[\d,]+ bytes free"):
            fail_at(k, OSError(errno.ENOSPC, "No space left on device"), build)


def test_large_file_is_announced_in_pieces(tmp_path: Path, operations: Operations) -> None:
    """So that a kill or a full disk can come in its midst."""
    piece = fsio._PIECE
    seen = operations(lambda: fsio.write_file(tmp_path / "x", bytes(3 * piece + 1)))
    assert kinds(seen) == ["create", *["write"] * 4, "fsync", "rename", "fsync"]
    small = operations(lambda: fsio.write_file(tmp_path / "y", (b"123" for _ in range(1000))))
    assert kinds(small).count("write") == 1


def test_folder_that_goes_on_changing_has_no_manifest(tmp_path: Path) -> None:
    with fsio.new_folder(tmp_path / "x", manifest=False) as folder:
        folder.write("a", "1")
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["a"]


# --- files in pieces --------------------------------------------------------------------------------------------------


def test_pieces_are_asked_for_one_by_one_and_hashed_as_one_file(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes | memoryview]:
        for i in range(3):
            held = next(tmp_path.glob(".*.tmp"), None)
            asked.append((i, held is not None))
            yield memoryview(bytes([i]) * 100_000)

    asked: list[tuple[int, bool]] = []
    whole = b"".join(pieces())
    asked.clear()
    fsio.write_file(tmp_path / "file", pieces())
    with fsio.new_folder(tmp_path / "folder") as folder:
        folder.write("a", pieces())
    assert (tmp_path / "file").read_bytes() == (tmp_path / "folder" / "a").read_bytes() == whole
    assert fsio.verify_folder(tmp_path / "folder") == ["a"]
    assert asked == [(0, True), (1, True), (2, True)] * 2, "made while the file stood under its temporary name"


def test_failure_between_two_pieces_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"first"
        raise UsageError("no second")

    with pytest.raises(UsageError, match="no second"):
        fsio.write_file(tmp_path / "file", broken())
    with pytest.raises(UsageError, match="no second"), fsio.new_folder(tmp_path / "folder") as folder:
        folder.write("a", broken())
    assert list(tmp_path.iterdir()) == []


# --- verify_folder ----------------------------------------------------------------------------------------------------


def rewrite_manifest(folder: Path, hashes: Any) -> None:
    (folder / fsio.MANIFEST).write_text(json.dumps({"sha256": hashes}))


def test_every_single_flipped_bit_is_detected(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    make_folder_of_files(folder)
    flips = 0
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for position in range(len(whole) * 8):
            damaged = bytearray(whole)
            damaged[position // 8] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises(FileProblem):
                fsio.verify_folder(folder)
            flips += 1
        path.write_bytes(whole)
    assert fsio.verify_folder(folder) == list(FILES)
    assert flips > 1500


@pytest.mark.parametrize("name", ["a.txt", "manifest.json"])
def test_listed_file_that_would_never_end_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "x"
    make_folder_of_files(folder)
    path = folder / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FileProblem, match=f"{name} is a FIFO"):
        fsio.verify_folder(folder)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(FileProblem, match=f"{name} has 1,099,511,627,776 bytes"):
        fsio.verify_folder(folder)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(FileProblem, match=f"{name} is a link.*outside"):
        fsio.verify_folder(folder)


def test_flipped_bit_that_turns_one_name_into_another_is_detected(tmp_path: Path) -> None:
    with fsio.new_folder(tmp_path / "x") as folder:
        folder.write("a.bin", "1")
        folder.write("c.bin", "2")
    manifest = tmp_path / "x" / fsio.MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"a.bin"', b'"c.bin"'))  # 'a' and 'c' are one bit apart
    with pytest.raises(FileProblem):
        fsio.verify_folder(tmp_path / "x")


@pytest.mark.parametrize("name", [*FILES, fsio.MANIFEST])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    make_folder_of_files(tmp_path / "x")
    (tmp_path / "x" / name).unlink()
    with pytest.raises(FileProblem, match=name):
        fsio.verify_folder(tmp_path / "x")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/file", "..", ".", ""])
def test_manifest_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("s")
    make_folder_of_files(tmp_path / "x")
    digest = fsio.hash_file(tmp_path / "secret")
    rewrite_manifest(tmp_path / "x", {name: digest})
    with pytest.raises(FileProblem):
        fsio.verify_folder(tmp_path / "x")


@pytest.mark.parametrize("name", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
def test_manifest_with_an_impossible_name_is_a_file_problem(tmp_path: Path, name: str) -> None:
    make_folder_of_files(tmp_path / "x")
    rewrite_manifest(tmp_path / "x", {name: "0"})
    with pytest.raises(FileProblem):
        fsio.verify_folder(tmp_path / "x")


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", '{"sha256": 3}', '{"sha256": []}', "{}", "[" * 100_000, '{"sha256": {"a.txt": 5}}']
)
def test_malformed_manifest_is_a_file_problem(tmp_path: Path, text: str) -> None:
    make_folder_of_files(tmp_path / "x")
    (tmp_path / "x" / fsio.MANIFEST).write_text(text)
    with pytest.raises(FileProblem):
        fsio.verify_folder(tmp_path / "x")


# --- where things may go ----------------------------------------------------------------------------------------------

ASK_FOR_PLACE = "try: fsio.require_free(path)\nexcept errors.UsageError as problem: print(problem)"


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_nothing_that_exists_is_overwritten(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "x"
    if kind == "file":
        target.write_text("mine")
    elif kind == "folder":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists"):
        fsio.require_free(target)
    with pytest.raises(UsageError, match="exists"):
        make_folder_of_files(target)


def test_free_path_is_returned_and_nothing_is_made(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    assert fsio.require_free(wanted) == wanted
    assert list(tmp_path.iterdir()) == []


def test_path_below_a_file_is_refused_before_work_and_during_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    below = tmp_path / "file" / "a" / "b"
    with pytest.raises(UsageError, match="is a file"):
        fsio.require_free(below)
    for write in (fsio.make_folder, lambda path: fsio.write_file(path, "x"), lambda path: fsio.append_line(path, "x")):
        with pytest.raises(FileProblem, match="file"):
            write(below)
    with pytest.raises(FileProblem, match=r"file.*folder is needed"):
        fsio.make_folder(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux has /proc")
def test_place_where_even_root_cannot_write_is_a_file_problem() -> None:
    with pytest.raises(FileProblem, match="/proc/vitlab"):
        fsio.make_folder(Path("/proc/vitlab"))


def test_folder_without_write_permission_is_refused_before_work(
    open_place: Path, as_ordinary_user: Callable[[str, Path], str]
) -> None:
    printed = as_ordinary_user(ASK_FOR_PLACE, open_place / "new" / "run")
    assert f"no permission to write in {open_place}" in printed


def test_folder_without_search_permission_is_refused_before_work(
    open_place: Path, as_ordinary_user: Callable[[str, Path], str]
) -> None:
    locked = open_place / "locked"
    locked.mkdir(mode=0o700)
    if os.geteuid() != 0:
        locked.chmod(0o000)
    assert "permission" in as_ordinary_user(ASK_FOR_PLACE, locked / "run")


@pytest.mark.parametrize("name", ["n" * 300, "a\0b"], ids=["too long", "nul"])
def test_impossible_name_is_refused_before_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        fsio.require_free(tmp_path / name)


def test_written_text_is_utf8_and_json_is_readable(tmp_path: Path) -> None:
    fsio.write_json(tmp_path / "x.json", {"name": "Grüße", "n": [1, 2]})
    raw = (tmp_path / "x.json").read_bytes()
    assert "Grüße".encode() in raw
    assert raw.endswith(b"}\n")
    assert json.loads(raw) == {"name": "Grüße", "n": [1, 2]}


# --- two at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_of_two_that_write_to_one_place_the_second_is_refused(tmp_path: Path, kind: str) -> None:
    """Another process is there first, between the check that the place is free and the rename."""
    target = tmp_path / "x"

    def meanwhile(operation: fsio.Operation, path: Path) -> None:
        if operation == "rename":
            if kind == "folder":
                target.mkdir()
            (target / "theirs" if kind == "folder" else target).write_text("theirs")

    work = (lambda: make_folder_of_files(target)) if kind == "folder" else lambda: fsio.write_new_file(target, "ours")
    with pytest.raises(UsageError, match="exists"), fsio.intercept(meanwhile):
        work()
    assert (target / "theirs" if kind == "folder" else target).read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target], "nothing half written is left"


def test_new_file_is_whole_and_leaves_no_second_name(tmp_path: Path, operations: Operations) -> None:
    seen = operations(lambda: fsio.write_new_file(tmp_path / "x", "ours"))
    assert kinds(seen) == ["create", "write", "fsync", "rename", "remove", "fsync"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").stat().st_nlink == 1


def test_new_file_on_a_disk_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    fsio.write_new_file(tmp_path / "x", "ours")
    with pytest.raises(UsageError, match="exists"):
        fsio.write_new_file(tmp_path / "x", "others")
    assert (tmp_path / "x").read_text() == "ours"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


# --- a folder for one process -----------------------------------------------------------------------------------------


def test_locked_folder_is_refused_to_others_and_free_afterwards(tmp_path: Path) -> None:
    try_it = (
        "import sys; from pathlib import Path; from vitlab.core import errors, fsio; fsio._PAUSE_S = 0.001\n"
        "try:\n with fsio.locked(Path(sys.argv[1])): print('mine')\n"
        "except errors.FileProblem as error: print(error.what)"
    )

    def other() -> str:
        done = subprocess.run([sys.executable, "-c", try_it, tmp_path], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with fsio.locked(tmp_path):
        assert other() == f"{tmp_path} is in use by another process"
    assert other() == "mine"


@pytest.mark.slow
def test_lock_ends_with_its_holder_though_forked_processes_live_on(tmp_path: Path) -> None:
    """As those do that load images, for some seconds, when the one they work for is killed."""
    hold = (
        "import os, sys, time; from pathlib import Path; from vitlab.core import fsio\n"
        "with fsio.locked(Path(sys.argv[1])):\n"
        "    if not os.fork(): print(os.getpid(), flush=True)\n"
        "    time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold, tmp_path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(FileProblem, match="in use"), fsio.locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with fsio.locked(tmp_path):
            os.kill(child, 0)  # it lives
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_lock_that_is_let_go_within_a_moment_is_taken(tmp_path: Path) -> None:
    """As that of a killed process is, once what it had just forked runs."""
    with contextlib.ExitStack() as first:
        first.enter_context(fsio.locked(tmp_path))
        letting_go = threading.Timer(0.2, first.close)
        letting_go.start()
        with fsio.locked(tmp_path):
            letting_go.join()


def test_lock_clears_what_a_killed_writer_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    left = [tmp_path / ".x.json.0123abcd.tmp", tmp_path / "deep" / ".step.89abcdef.tmp"]
    left[0].write_text("half")
    left[1].mkdir()
    (left[1] / "part").write_text("half")
    mine = [tmp_path / "notes.tmp", tmp_path / ".mine.tmp", tmp_path / ".x.0123ABCD.tmp", tmp_path / "deep" / "x.json"]
    for path in mine:
        path.write_text("mine")
    with fsio.locked(tmp_path):
        assert not any(path.exists() for path in left)
    assert all(path.exists() for path in mine)


def test_lock_bears_that_a_folder_inside_loses_folders_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of one of several runs does, where another process goes on with it and removes old checkpoints."""
    (tmp_path / "seed-0" / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / ".x.json.0123abcd.tmp").write_text("half")
    listed = os.scandir

    def slow(place: str) -> Any:
        """Between the look at a folder and that at what is in it, the checkpoint goes."""
        if str(place).endswith("step-1"):
            (tmp_path / "seed-0" / "checkpoints" / "step-1").rmdir()
        return listed(place)

    monkeypatch.setattr(os, "scandir", slow)
    with fsio.locked(tmp_path):
        assert not (tmp_path / ".x.json.0123abcd.tmp").exists()
    assert not (tmp_path / "seed-0" / "checkpoints" / "step-1").exists(), "what should have happened did"


def test_folder_that_is_not_there_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="nowhere"), fsio.locked(tmp_path / "nowhere"):
        pass


def test_removed_folder_loses_its_manifest_first(tmp_path: Path, operations: Operations) -> None:
    target = tmp_path / "bundle"
    make_folder_of_files(target)
    seen = operations(lambda: fsio.remove_folder(target))
    inside = [("remove", target / name) for name in sorted(FILES)]
    assert seen == [("remove", target / fsio.MANIFEST), ("fsync", target), *inside, ("remove", target)]
    assert list(tmp_path.iterdir()) == []


# --- two things at once -----------------------------------------------------------------------------------------------


def test_verifying_passes_when_all_is_well_and_reports_damage_whatever_the_reading_found(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    make_folder_of_files(target)
    with fsio.verifying(target, required=("a.txt",)):
        assert (target / "a.txt").read_text() == "first"
    with pytest.raises(ZeroDivisionError), fsio.verifying(target):
        raise ZeroDivisionError  # the files are whole, so the error is the reader's own
    (target / "b.bin").write_bytes(b"\x00\x01\x03")
    with pytest.raises(FileProblem, match="damaged"), fsio.verifying(target):
        pass
    with pytest.raises(FileProblem, match="damaged"), fsio.verifying(target):
        raise ZeroDivisionError
    with pytest.raises(FileProblem, match=r"not list c\.txt"), fsio.verifying(target, required=("c.txt",)):
        pass


def test_failure_while_making_what_is_written_leaves_nothing_and_no_thread(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield from [bytes(fsio._PIECE)] * 600  # more than may wait for their hash
        raise ZeroDivisionError

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), fsio.new_folder(tmp_path / "x") as folder:
        folder.write("a", chunks())
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before
