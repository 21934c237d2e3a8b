"""`vitlab data`: list, check (exits with status 1 when it is serious), split and shard."""

import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitlab.core import fsio
from vitlab.data.sources.shards import open_shards
from vitlab.runs.data_tools import shard_data

Call = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(1)
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(draw.integers(0, 256, (150, 150, 3), dtype=np.uint8)).save(
                tmp_path / "pets" / name / f"{i}.png"
            )
    return tmp_path / "pets"


def test_clean_data_exits_with_0(call: Call, folder: Path) -> None:
    printed = call("data", "check", str(folder), "--workers", "1")
    assert printed.code == 0
    assert printed.out.startswith("all      20 images of 2 classes\nfiles    PNG 20")
    assert printed.out.endswith("nothing to report\n")
    assert "checking   20/20" in printed.err


def test_broken_file_exits_with_1_and_a_name_cannot_command_the_terminal(call: Call, folder: Path) -> None:
    table = folder / "list.csv"
    (folder / "x\x1b[31m.png").write_bytes(b"")
    table.write_text("path,label\nx\x1b[31m.png,cat\ncat/1.png,cat\n")
    printed = call("data", "check", str(table), "-q", "--workers", "1")
    assert printed.code == 1
    assert "\x1b" not in printed.out
    assert "!!  Files that cannot be used: 1\n      x\\x1b[31m.png: is empty" in printed.out
    assert "1 serious finding in" in printed.err


def test_json_is_the_whole_answer(call: Call, folder: Path) -> None:
    (folder / "dog" / "same.png").write_bytes((folder / "cat" / "3.png").read_bytes())
    printed = call("data", "check", str(folder), "-q", "--json", "--workers", "1")
    found = json.loads(printed.out)
    assert (printed.code, found["counts"], found["parts"]["all"]) == (1, {"contradiction": 1}, {"cat": 10, "dog": 11})


@pytest.mark.parametrize("workers", ["0", "-1"])
def test_no_workers_is_a_wrong_call(call: Call, folder: Path, workers: str) -> None:
    assert call("data", "check", str(folder), "--workers", workers).code == 2


def test_split_writes_a_table(call: Call, folder: Path) -> None:
    printed = call("data", "split", str(folder), "--out", "split.csv", "--val", "0", "--test", "0.2")
    assert printed.out == ("train    16 images of 2 classes\ntest     4 images of 2 classes\ntable    split.csv\n")
    assert len(Path("split.csv").read_text().splitlines()) == 21


@pytest.mark.parametrize("options", [["--val", "0.5"], ["--out", "x.txt"], ["--group-by", "("], ["--train", "nan"]])
def test_wrong_split_is_a_wrong_call(call: Call, folder: Path, options: list[str]) -> None:
    out = [] if "--out" in options else ["--out", "split.csv"]
    printed = call("data", "split", str(folder), *out, *options)
    assert printed.code == 2
    assert not Path("split.csv").exists()


# --- list and shard ---------------------------------------------------------------------------------------------------


def test_list_says_what_is_here_and_where_to_put_the_rest(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITLAB_DATA", raising=False)
    monkeypatch.setenv("VITLAB_CACHE", "cache")
    lines = call("data", "list").out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    assert rows["digits"][-2:] == ["present", "scikit-learn"]
    assert rows["cifar100"][-2:] == ["download", "cache/data/cifar100"]
    assert rows["fractals"][-3:] == ["synthetic", "no", "files"]
    at = lines.index(next(line for line in lines if line.startswith("resisc45")))
    assert lines[at].endswith("by hand   cache/data/resisc45")
    assert lines[at + 1].strip() == "put there: NWPU-RESISC45"
    (found,) = json.loads(call("data", "list", "CIFAR10", "--json").out)
    assert (found["state"], found["files"]) == ("download", ["cifar-10-binary.tar.gz"])
    assert call("data", "list", "cifar11").code == 2


def test_shard_writes_the_data_and_reports_it(call: Call, folder: Path) -> None:
    printed = call("data", "shard", str(folder), "out", "--per-shard", "8", "--workers", "1")
    assert printed.code == 0
    assert printed.out.startswith("images   20\nshards   3, ") and printed.out.endswith(" MB\nfolder   out\n")
    found = json.loads(call("data", "shard", str(folder), "out", "--per-shard", "8", "-q", "--json").out)
    assert (found["images"], found["shards"]) == (20, 3)
    opened = open_shards("out").parts["all"]
    assert (opened.classes, len(opened), opened.labels.counts(2).tolist()) == (("cat", "dog"), 20, [10, 10])
    assert call("data", "shard", str(folder), "out", "--per-shard", "9").code == 2
    assert call("data", "shard", str(folder), "out", "--per-shard", "0").code == 2


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_killed_shard_resumes_and_ends_bit_equal_and_no_process_stays(tmp_path: Path) -> None:
    """SIGKILL when some shards are there and it works on the next, again when more are; then a call that is left alone."""
    source, options = "shapes:count=120,image_size=48", {"per_shard": 8, "workers": 2, "quiet": True}
    shard_data(source, tmp_path / "whole", **options)
    out = tmp_path / "out"
    for shards in (2, 12):
        child = multiprocessing.get_context("fork").Process(target=_shard_up_to, args=(shards, source, out, options))
        child.start()
        _wait_until(lambda shards=shards: len(list(out.glob("*.tar"))) >= shards)
        workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert len(workers) == 2
        assert not (out / "index.json").exists(), "it was killed in the middle"
        _wait_until(lambda workers=workers: not any(_runs(pid) for pid in workers))
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    shard_data(source, out, **options)
    assert len(kept) == 12
    assert sum(path.stat().st_mtime_ns == kept.get(path.name) for path in out.glob("*.tar")) == 12
    contents = [{path.name: path.read_bytes() for path in place.iterdir()} for place in (tmp_path / "whole", out)]
    assert contents[0] == contents[1]


def _shard_up_to(shards: int, source: str, out: Path, options: dict[str, Any]) -> None:
    """Stands still, its workers at work, when so many shards are there: however slowly the test looks, it is in the middle."""

    def stand_still(operation: fsio.Operation, path: Path) -> None:
        if operation == "rename" and path.suffix == ".tar" and int(path.stem.rpartition("-")[2]) >= shards:
            time.sleep(600)

    with fsio.intercept(stand_still):
        shard_data(source, out, **options)


def _wait_until(true: Callable[[], bool], seconds: float = 100) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.002)


def _runs(pid: str) -> bool:
    """A process whose parent was killed may stay in the table, dead, until the system's first process asks after it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- tables with names of their own -----------------------------------------------------------------------------------


@pytest.fixture
def table(folder: Path) -> Path:
    rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in sorted(folder.rglob("*.png"))]
    (folder / "list.csv").write_text("\n".join(["file,kind", *rows]) + "\n")
    return folder / "list.csv"


COLUMNS = ("--columns", "path=file,label=kind")


def test_split_reads_a_table_by_the_names_of_its_columns(call: Call, table: Path, tmp_path: Path) -> None:
    words = ("data", "split", str(table), "--out", "split.csv", "-q")
    assert "has no column 'path'; it has: file, kind" in call(*words).err
    assert call(*words, *COLUMNS).code == 0
    rows = (tmp_path / "split.csv").read_text().splitlines()
    assert rows[0] == "path,label,split" and len(rows) == 21


def test_shard_reads_a_table_by_the_names_of_its_columns(call: Call, table: Path, tmp_path: Path) -> None:
    words = ("data", "shard", str(table), "out", "--workers", "1", "-q")
    assert "has no column 'path'; it has: file, kind" in call(*words).err
    assert call(*words, *COLUMNS).code == 0
    (shards,) = open_shards(tmp_path / "out").parts.values()
    assert (len(shards), shards.classes) == (20, ("cat", "dog"))
