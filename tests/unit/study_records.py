"""Studies and records by hand, for the tests of what is made of them: numbers of the kinds that each verb measures."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitlab.studies.cell_records import CellRecord, write_cell
from vitlab.studies.grid import Cell, StudyRun, list_cells
from vitlab.studies.inspected import head_key
from vitlab.studies.study import Scale, Study
from vitlab.studies.study_file import read_study

HOSTILE = "<img src=x onerror=alert(1)> & “such” | *so*"
HEAD = """
title = "Tiny"
question = "Does it?"
paper = "Figure 0"

[[drawings]]
x = "size"
line = "kind"
log_x = true
fit = true
"""
CLAIM = """
[[claims]]
name = "a-above-b"
says = "A is better than B"
where = "section 0"
[[claims.tests]]
statistic = "difference"
a = { kind = "A" }
b = { kind = "B" }
above = 0.0
"""
SCALE = """
[scales.laptop]
about = "Nothing to speak of."
[scales.laptop.stages.train]
recipe = "study-laptop-vit"
[scales.laptop.axes.kind]
A = {}
B = { train = { "optim.lr" = 1e-4 } }
[scales.laptop.axes.size]
"1" = { x = 1, train = { "data.train_images" = 100 } }
"2" = { x = 2, train = { "data.train_images" = 200 } }
"4" = { x = 4, train = { "data.train_images" = 400 } }
"""
TINY = HEAD + CLAIM + SCALE


def written_study(folder: Path, text: str = TINY, name: str = "tiny") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def tiny_study(folder: Path, text: str = TINY, name: str = "tiny") -> Study:
    return read_study(str(written_study(folder, text, name)))


def measured(run: StudyRun, level: float) -> dict[str, float]:
    """What a run of this verb would note, around a level between 0 and 1."""
    shape = {"params": 1000.0, "macs": 2000.0}
    match run.stage.verb:
        case "train":
            test = {"top1": level, "top5": level, "loss": 1 - level, "ece": 0.1, "n": 359.0, "knn": level}
            return {**shape, **test, "train_images": 1438.0, "images_seen": 100.0, "images_per_second": 100.0}
        case "noisy-student":
            return {**shape, "top1": level, "teacher_top1": level / 2, "margin": level / 2}
        case "few-shot":
            return {**shape, "few_shot_5": level}
        case "inspect":
            places = ("first_layer", "last_layer", "by_depth")
            heads = ("nearest_head", "farthest_head", "local_heads", "global_heads")
            names = [*(f"distance_{place}" for place in places), *(f"low_layers_{head}" for head in heads)]
            names += [head_key("distance", layer, head) for layer in range(2) for head in range(3)]
            return {
                **shape,
                **dict.fromkeys([*names, "row_column_excess", "position_nearness", "filter_low_frequency"], level),
            }
        case "speed":
            speed = {"images_per_second": 1000 * level, "milliseconds_per_image": 1 / level}
            return {**shape, **speed, "image_size": 64.0, "largest_batch": 64.0}


def record_of(run: StudyRun, numbers: Mapping[str, float], **changes: Any) -> CellRecord:
    plain = CellRecord(
        key=run.key,
        verb=run.stage.verb,
        model="ViT-w64d4m128h4/4",
        data="digits",
        seed=run.seed,
        numbers=dict(numbers),
        flops=1e9,
        seconds=2.0,
        workers=1,
        curve=((1.0, 2.3), (2.0, 1.9), (3.0, 1.1)),
        command=f"vitlab train digits --seed {run.seed} --set 'a=\"<b>\"'",
        hardware={"name": "some CPU"},
        versions={"torch": "2.0"},
        date="2026-01-02T03:04:05+00:00",
    )
    return dataclasses.replace(plain, **changes)


def level_of(scale: Scale, cell: Cell) -> float:
    """Rises along every line of an axis, and a little with the seed; lines overlap."""
    level = 0.3 + 0.003 * cell.seed
    for axis, value in cell.values.items():
        line = [other.label for other in scale.axes[axis] if other.lines == value.lines]
        level += 0.05 * line.index(value.label) + 0.01 * [other.label for other in scale.axes[axis]].index(value.label)
    return level


def records_of(
    scale: Scale, level: Callable[[Cell], float] | None = None, flops: Callable[[Cell], float] | None = None
) -> dict[str, CellRecord]:
    """A record for every run of a scale; what is better has cost more, unless `flops` says otherwise."""
    found: dict[str, CellRecord] = {}
    for cell in list_cells(scale):
        number = level_of(scale, cell) if level is None else level(cell)
        for run in cell.run.chain():
            spent = 1e9 * 10**number if flops is None else flops(cell)
            found[run.key] = record_of(run, measured(run, number), flops=spent)
    return found


def write_records(folder: Path, records: Mapping[str, CellRecord]) -> Path:
    for record in records.values():
        write_cell(folder, record)
    return folder
