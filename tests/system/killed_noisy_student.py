"""Calls of `vitlab noisy-student`, each stopped at another of its disk operations or by a signal.

To be imported by a child that was forked for it, because it changes `vitlab.training.health`.

A whole call tells which operations there are. `how_many` of those, evenly spread (0: all), and one each in the midst of teacher
training, labelling and student training are then each the last of a new call, which goes on by `--resume`, or begins anew where
nothing of it is left. More calls get SIGTERM while images are labelled and while the student trains. Returns what each said and
left.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from kill_points import killed_at, named_operations, spread
from killed_several import OUT, content, forked, paint, vitlab, without_times

from vitlab.pipelines import noisy_student_run  # noqa: F401  so that those who are forked need not wait for it

SETTINGS = (
    *("data.image_size=[8,8]", "data.workers=0", "train.precision=fp32", "train.steps=8", "train.batch_size=8"),
    *("train.save_every=25%", "optim.lr=0.003", "data.val_frac=0"),
)
INSIDE = {
    "teacher training": f"append {OUT}/generation-0/metrics.jsonl #3",
    "labelling": f"create {OUT}/pseudo_labels-1.npz (new) #1",
    "storing pseudo-labels": f"rename {OUT}/pseudo_labels-1.npz #1",
    "student training": f"append {OUT}/generation-1/metrics.jsonl #4",
}
STOPPED = {"labelling": INSIDE["labelling"], "student training": INSIDE["student training"]}


def command(photos: Path) -> list[str]:
    words = ["noisy-student", str(photos), "--labelled", "12", "--model", "ViT-w16d1m32h2/4", "--init", "scratch"]
    words += [word for setting in SETTINGS for word in ("--set", setting)]
    return [*words, "--device", "cpu", "--threads", "1", "--quiet", "--json", "--out", OUT]


def go_on(place: Path, photos: Path) -> int:
    resumed = ["noisy-student", "--resume", OUT, "--threads", "1", "--device", "cpu", "--quiet", "--json"]
    return forked(place, lambda: vitlab(*(resumed if (place / OUT).exists() else command(photos))))


def left(place: Path) -> dict[str, Any]:
    """Every file by its name, but for those with times and places in them; of JSON, all but these."""
    folder = place / OUT
    kept = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    kept = [path for path in kept if path.name not in {"log.txt", "metrics.csv", "env.json", "run.json", ".lock"}]
    files: dict[str, Any] = {}
    for path in kept:
        name = (
            f"{path.parent.parent.name}/the record" if path.parent.name == "records" else str(path.relative_to(folder))
        )
        found = content(path)
        if path.name == "noisy_student.json":
            found = without_times(json.loads(path.read_text()))
            del found["cwd"]
        files.setdefault(name, []).append(found)
    printed = (place / "stdout").read_text()
    return {
        "files": files,
        "printed": without_times(json.loads(printed)) if printed else (place / "stderr").read_text(),
    }


def stopped_at(point: str, place: Path, photos: Path) -> dict[str, Any]:
    def heard(name: str) -> None:
        if name == point:
            os.kill(os.getpid(), signal.SIGTERM)

    def task() -> int:
        with named_operations(place, heard):
            return vitlab(*command(photos))

    place.mkdir()
    code, reported = forked(place, task), (place / "stderr").read_text()
    return {"code": code, "reported": reported, "again": go_on(place, photos), "left": left(place)}


def main(root: Path, how_many: int | None) -> dict[str, Any]:
    """Without a number, one kill in the midst of student training is all."""
    photos = paint(root / "photos")

    def killed(place: Path, point: str | None) -> int:
        def task() -> int:
            with killed_at(place, point) as seen:
                code = vitlab(*command(photos))
            Path("operations.json").write_text(json.dumps(seen))
            return code

        place.mkdir()
        return forked(place, task)

    whole = root / "whole"
    code = killed(whole, None)
    points = json.loads((whole / "operations.json").read_text()) if code == 0 else []
    found: dict[str, Any] = {}
    chosen = [INSIDE["student training"]] if how_many is None else [*INSIDE.values(), *spread(points, how_many)]
    for number, point in enumerate(dict.fromkeys(chosen)):
        place = root / str(number)
        died = killed(place, point)
        found[point] = {"died": died, "again": go_on(place, photos), "left": left(place)}
        shutil.rmtree(place)
    stopped = {} if how_many is None else STOPPED
    signals = {name: stopped_at(point, root / name.replace(" ", "-"), photos) for name, point in stopped.items()}
    return {"whole": code, "points": points, "left": left(whole), "kills": found, "signals": signals}
