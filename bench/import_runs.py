"""Cell records of studies from runs that were made with `bench/gpu.sh masked` and `student`, by the same recipes and seeds.

    python bench/import_runs.py RUNS OUT     RUNS has masked-0, after-masked-0, ..., student-2; records go below OUT

Everything is read from the run folders; the date is that of the last change of run.json. What a run has not stored is not in
the record: top-5 and loss of its test, neighbours.
"""

import csv
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from vitlab.evaluation.records import read_records
from vitlab.models.cost import count_macs, count_params
from vitlab.models.names import format_name
from vitlab.studies.cell_records import CellRecord, write_cell
from vitlab.studies.cell_run import tested, thinned_curve
from vitlab.studies.grid import StudyRun, list_cells
from vitlab.studies.study_file import read_study
from vitlab.training.pretext_rules import count_task_macs
from vitlab.training.recipe_book import show_recipe

SOURCE = "imported by bench/import_runs.py from a run of bench/gpu.sh with the same recipe and seed"
WORKERS = 7  # runs that shared the GPU
FOLDERS = {"scratch": ("short",), "masked patches": ("masked", "after-masked"), "MAE": ("mae", "after-mae")}


def main(runs: Path, out: Path) -> None:
    machine = read_records(runs / "short-0" / "records")[0]
    shared = {"workers": WORKERS, "hardware": machine.hardware, "versions": machine.versions, "source": SOURCE}
    for cell in list_cells(read_study("self-supervised").at("gpu")):
        folders = FOLDERS.get(cell.labels["start"], ())
        for name, run in zip(folders, cell.run.chain() if folders else (), strict=True):
            write_cell(out, trained(run, runs / f"{name}-{cell.seed}", shared))
    for cell in list_cells(read_study("noisy-student").at("gpu")):
        write_cell(out, student(cell.run, runs / f"student-{cell.seed}", shared))


def trained(run: StudyRun, folder: Path, shared: dict[str, Any]) -> CellRecord:
    file = json.loads((folder / "run.json").read_text())
    with (folder / "metrics.csv").open() as table:
        steps = [
            (int(row["step"]), float(row["loss"]), float(row["images_per_second"])) for row in csv.DictReader(table)
        ]
    recipe = show_recipe(file["recipe"]).recipe
    batch, measured = recipe.train.batch_size, folder / "records"
    numbers = {"images_seen": float(batch * len(steps)), "train_images": 50_000.0}
    if measured.is_dir():
        record = read_records(measured)[0]
        numbers |= {"top1": record.value, "n": float(record.n)}
    return CellRecord(
        key=run.key,
        verb="train",
        model=format_name(recipe.model),
        data=recipe.data.source,
        seed=run.seed,
        numbers={**numbers, **sizes(recipe.model)},
        flops=6.0 * count_task_macs(recipe.objective, recipe.model) * batch * len(steps),
        seconds=round(sum(batch / speed for _, _, speed in steps), 3),
        curve=thinned_curve([(step, loss) for step, loss, _ in steps]),
        command=file["command"],
        date=changed(folder / "run.json"),
        **shared,
    )


def student(run: StudyRun, folder: Path, shared: dict[str, Any]) -> CellRecord:
    file = json.loads((folder / "noisy_student.json").read_text())
    (generation,) = file["generations"]
    numbers = tested(generation["test"])
    numbers |= {f"teacher_{name}": value for name, value in tested(generation["teacher"]["test"]).items()}
    model = show_recipe(file["recipe"]).recipe.model
    return CellRecord(
        key=run.key,
        verb="noisy-student",
        model=format_name(model),
        data=file["call"]["data"],
        seed=run.seed,
        numbers={**numbers, "margin": numbers["top1"] - numbers["teacher_top1"], **sizes(model)},
        flops=0.0,
        seconds=float(generation["seconds"]),
        command=file["command"],
        date=changed(folder / "noisy_student.json"),
        **shared,
    )


def sizes(model: Any) -> dict[str, float]:
    return {"params": float(count_params(model)), "macs": float(count_macs(model))}


def changed(path: Path) -> str:
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
