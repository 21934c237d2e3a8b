"""Calls of `vitlab train` that make several runs, each stopped at another of its disk operations.

To be imported by a child that was forked for it, because it changes `vitlab.training.health`.

A whole call tells which operations there are. `how_many` of those, evenly spread (0: all), are then each the last of a
new call, which goes on by `--resume`, or begins anew where nothing of it is left. One more call gets a signal in the
midst of its second run: SIGINT for seeds, SIGTERM for a sweep, and one call each for both where `how_many` is 0.
Returns what each said and left. Forking from one parent saves importing torch.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kill_points import killed_at, named_operations, spread
from PIL import Image

from vitlab.cli import main
from vitlab.core import fsio
from vitlab.runs.training import training_run  # noqa: F401  so that those who are forked need not wait for it
from vitlab.training import health

# Seconds of waiting for images, of which a run warns: on a machine that has other work, one of two equal runs may wait.
health._WORTH_TELLING = float("inf")

SETTINGS = (
    *("data.image_size=[8,8]", "data.workers=0", "train.precision=fp32", "train.epochs=2", "train.batch_size=8"),
    *("train.eval_every=25%", "train.save_every=25%", "data.augment.erase=0.5", "optim.lr=0.003"),
)
KINDS = {"seeds": ("--seeds", "3"), "sweep": ("--sweep", "optim.lr=0.001,0.01")}
SECOND = {"seeds": "seed-1", "sweep": "try-2"}
SIGNALS = {"seeds": signal.SIGINT, "sweep": signal.SIGTERM}  # of a sample; otherwise both
TIMES = {"images_per_second", "data_wait_frac", "memory_gb", "seconds_left", "seconds", "date", "sha256"}
_TIMES_TOLD = re.compile(r"[\d,.]+ (?:s\b|images/s)")
OUT = "out"


def paint(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    for k, name in enumerate(("green", "red", "blue")):
        (folder / name).mkdir(parents=True)
        for i in range(14):
            pixels = draw.integers(0, 156, (8, 8, 3), dtype=np.uint8)
            pixels[..., k] += 99
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def forked(place: Path, task: Callable[[], int]) -> int:
    """How a child ended that did `task` in `place`, with what it said in files there."""
    child = os.fork()
    if not child:
        os.chdir(place)
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        try:
            code = task()
        except BaseException:
            traceback.print_exc()
            code = 99
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def vitlab(*words: str) -> int:
    """The command as it is started from a shell."""
    sys.argv = ["vitlab", *words]
    try:
        main.main()
    except SystemExit as leave:
        return int(leave.code or 0)


def command(kind: str, photos: Path) -> list[str]:
    words = ["train", str(photos), "--model", "ViT-w16d1m32h2/4", "--device", "cpu", "--threads", "1", "--quiet"]
    words += [word for setting in SETTINGS for word in ("--set", setting)]
    return [*words, "--out", OUT, "--json", *KINDS[kind]]


def go_on(place: Path, kind: str, photos: Path) -> int:
    resumed = ["train", "--resume", OUT, "--threads", "1", "--device", "cpu", "--quiet", "--json"]
    return forked(place, lambda: vitlab(*(resumed if (place / OUT).exists() else command(kind, photos))))


# --- what is left -----------------------------------------------------------------------------------------------------


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(inner) for name, inner in value.items() if name not in TIMES}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def content(path: Path) -> Any:
    """What two calls that should be equal must have in common of a file: all of it but times."""
    if path.name == "metrics.jsonl":
        return [without_times(json.loads(line)) for line in path.read_text().splitlines()]
    if path.name == "report.html":
        return hashlib.sha256(_TIMES_TOLD.sub("", path.read_text()).encode()).hexdigest()
    if path.parent.name == "records":
        return without_times(json.loads(path.read_text()))
    return fsio.hash_file(path)


def left(place: Path) -> dict[str, Any]:
    """Every file by its name but the log, the table of the metrics and the environment, which have times and places in them."""
    folder = place / OUT
    kept = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    kept = [path for path in kept if path.name not in {"log.txt", "metrics.csv", "env.json", "run.json", ".lock"}]
    files: dict[str, Any] = {}
    for path in kept:
        name = "records/the record" if path.parent.name == "records" else str(path.relative_to(folder))
        files.setdefault(name, []).append(content(path))
    printed = (place / "stdout").read_text()
    return {
        "files": files,
        "printed": without_times(json.loads(printed)) if printed else (place / "stderr").read_text(),
    }


# --- ways to be stopped -----------------------------------------------------------------------------------------------


def stopped_by(number: int, place: Path, kind: str, photos: Path) -> dict[str, Any]:
    """The signal comes before the third step of the second run is noted."""

    def heard(name: str) -> None:
        if name == f"append {OUT}/{SECOND[kind]}/metrics.jsonl #3":
            os.kill(os.getpid(), number)

    def task() -> int:
        with named_operations(place, heard):
            return vitlab(*command(kind, photos))

    place.mkdir()
    code, reported = forked(place, task), (place / "stderr").read_text()
    saved = sorted(path.name for path in (place / OUT / SECOND[kind] / "checkpoints").iterdir())
    return {
        "code": code,
        "reported": reported,
        "saved": saved,
        "again": go_on(place, kind, photos),
        "left": left(place),
    }


def operations(root: Path, kind: str, how_many: int) -> dict[str, Any]:
    photos = paint(root / "photos")

    def killed(place: Path, point: str | None) -> int:
        def task() -> int:
            with killed_at(place, point) as seen:
                code = vitlab(*command(kind, photos))
            Path("operations.json").write_text(json.dumps(seen))
            return code

        place.mkdir()
        return forked(place, task)

    whole = root / "whole"
    code = killed(whole, None)
    points = json.loads((whole / "operations.json").read_text()) if code == 0 else []
    found: dict[str, Any] = {}
    for number, point in enumerate(spread(points, how_many)):
        place = root / str(number)
        died = killed(place, point)
        found[point] = {"died": died, "again": go_on(place, kind, photos), "left": left(place)}
        shutil.rmtree(place)
    numbers = (SIGNALS[kind],) if how_many else (signal.SIGINT, signal.SIGTERM)
    signals = {number.name: stopped_by(number, root / number.name, kind, photos) for number in numbers}
    return {"whole": code, "total": len(points), "left": left(whole), "kills": found, "signals": signals}
