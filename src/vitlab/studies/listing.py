"""`vitlab study list` and `show`: the studies that ship, and the published tables. Loads no torch."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vitlab.core.command import command_line
from vitlab.evaluation.published import published_tables
from vitlab.studies.study import Scale, Study, count_cells
from vitlab.studies.study_file import list_study_names, read_study


@dataclasses.dataclass(frozen=True)
class StudyRow:
    """One line of `vitlab study list`: a study that can be run, or a published table."""

    name: str
    kind: str  # study or table
    title: str
    versions: tuple[str, ...]  # of a table; the scales of a study
    cells: int  # of a study: at the scale of one GPU
    source: str
    # of a study, by scale
    minutes: Mapping[str, float | None] = dataclasses.field(default_factory=dict[str, float | None])


def list_studies() -> list[StudyRow]:
    """The studies that can be run, and the published tables that vitlab has as data."""
    return [*map(_study_row, list_study_names()), *_table_rows()]


def _study_row(name: str) -> StudyRow:
    study = read_study(name)
    scale = study.scales.get("gpu") or next(iter(study.scales.values()))
    minutes = {at.name: at.minutes for at in study.scales.values()}
    return StudyRow(name, "study", study.title, tuple(study.scales), count_cells(scale), study.paper, minutes)


def _table_rows() -> list[StudyRow]:
    return [
        StudyRow(
            name=name,
            kind="table",
            title=versions[0].title,
            versions=tuple(table.version for table in versions),
            cells=sum(len(row.cells) for row in versions[0].rows),
            source=versions[0].source,
        )
        for name, versions in published_tables().items()
    ]


@dataclasses.dataclass(frozen=True)
class ShownStudy:
    """What `vitlab study show` prints."""

    study: Study
    scales: tuple[Scale, ...]
    name: str  # as it was given: a file keeps its ending

    def to_json(self) -> dict[str, Any]:
        study = self.study
        return {
            "name": study.name,
            "title": study.title,
            "question": study.question,
            "paper": study.paper,
            "claims": [{"claim": one.name, "says": one.says, "where": one.where} for one in study.claims],
            "scales": {
                scale.name: {
                    "about": scale.about,
                    "measure": scale.measure,
                    "seeds": list(scale.seeds),
                    "axes": {axis: [value.label for value in values] for axis, values in scale.axes.items()},
                    "cells": count_cells(scale),
                    "runs": count_runs(study, scale),
                    "minutes": scale.minutes,
                }
                for scale in self.scales
            },
        }

    def sentences(self) -> list[str]:
        study = self.study
        lines = [f"{study.name}: {study.title} ({study.paper})", study.question, "", "claims"]
        lines += [f"  {one.says} ({one.where})" for one in study.claims]
        for scale in self.scales:
            took = f"{scale.takes}, " if scale.takes else ""
            cells, runs = count_cells(scale), count_runs(study, scale)
            lines += ["", f"{scale.name}: {cells} cells, {runs} runs, {took}seeds {', '.join(map(str, scale.seeds))}"]
            lines += [
                f"  {axis:<12}{' | '.join(value.label for value in values)}" for axis, values in scale.axes.items()
            ]
            for name, stage in scale.stages.items():
                data = f"on {stage.data}" if stage.data else ""
                lines.append(f"  {name:<12}{' '.join(filter(None, (stage.verb, stage.recipe, data)))}")
            lines.append(f"  {scale.about}")
        return [*lines, "", "Run it: " + command_line("study run", self.name, options={"scale": self.scales[0].name})]


def count_runs(study: Study, scale: Scale) -> int:
    """Runs behind the cells, each counted once."""
    from vitlab.studies.grid import list_runs  # reads every recipe: more than a list has time for

    return len(list_runs([(study, scale)]))


def show_study(name: str, scale: str | None = None) -> ShownStudy:
    """The question of a study, its claims and its grid.

    Args:
        name: A study of `list_studies`, or a TOML file of your own.
        scale: laptop, gpu or paper; default: all.
    """
    study = read_study(name)
    return ShownStudy(study, tuple(study.scales.values()) if scale is None else (study.at(scale),), name)
