"""The page of several runs: their curves over each other, and which of their settings differ."""

import dataclasses
from collections.abc import Mapping, Sequence

from vitlab.report.charts import COLOURS, Chart, Mark, Point, Series, smooth
from vitlab.report.page import Report, Section, Snippets, Table, percent

_MOST_SETTINGS = 40  # rows of the table; runs of different kinds differ in nearly all


@dataclasses.dataclass(frozen=True)
class RunCurves:
    """What a run has measured: step and value each. `settings` are those of its config, by key."""

    name: str
    loss: Sequence[Point]
    lr: Sequence[Point]
    val_loss: Sequence[Point] = ()
    val_metric: Sequence[Point] = ()
    metric: str = "accuracy"  # which one; "mean average precision" where images have several labels
    test: float | None = None
    seconds: float = 0.0
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    @property
    def smooth_loss(self) -> list[Point]:
        steps, losses = zip(*self.loss, strict=True)
        return list(zip(steps, smooth(losses), strict=True))

    @property
    def last_step(self) -> int:
        return int(self.loss[-1][0])

    @property
    def last_loss(self) -> float:
        return self.smooth_loss[-1][1]

    @property
    def best_metric(self) -> float:
        return max(value for _, value in self.val_metric)


def build_curves_page(runs: Sequence[RunCurves], command: str) -> Report:
    """The page of these runs, in their order."""
    number, headline = _headline(runs)
    charts = [
        _chart("Training loss", "Smoothed.", "loss", [(one.name, one.smooth_loss) for one in runs]),
        _chart(
            f"Validation {_metric(runs)}",
            "On the validation images of each run.",
            _metric(runs),
            [(one.name, one.val_metric) for one in runs],
            mark="dots",
            shares=True,
        ),
        _chart("Validation loss", "", "loss", [(one.name, one.val_loss) for one in runs], mark="dots"),
        _chart("Learning rate", "", "learning rate", [(one.name, one.lr) for one in runs]),
    ]
    drawn = [chart for chart in charts if any(one.points for one in chart.series)]
    if len(drawn) % 2:
        drawn[0] = dataclasses.replace(drawn[0], wide=True)
    sections: list[Section] = [*drawn, _results(runs), *_settings(runs)]
    return Report(
        title=f"{len(runs)} runs",
        number=number,
        headline=headline,
        subline="",
        stats=[
            ("runs", f"{len(runs)}"),
            ("longest", f"{max(one.last_step for one in runs):,} steps"),
            ("lowest loss", f"{min(one.last_loss for one in runs):.3g}"),
        ],
        facts=[],
        sections=[*sections, Snippets("Repeat it", "", [("On the command line", command)])],
        footer="from the metrics.jsonl and the checkpoints of each run",
    )


def _headline(runs: Sequence[RunCurves]) -> tuple[str, str]:
    """The best on validation images; without any, the lowest training loss. Validation parts may differ: the page says so."""
    validated = [one for one in runs if one.val_metric]
    if validated:
        best = max(validated, key=lambda one: one.best_metric)
        return percent(best.best_metric), f"is the best validation {best.metric}, of {best.name}"
    best = min(runs, key=lambda one: one.last_loss)
    return f"{best.last_loss:.3g}", f"is the lowest training loss at the end, of {best.name}"


def _chart(
    title: str,
    caption: str,
    y_label: str,
    curves: Sequence[tuple[str, Sequence[Point]]],
    *,
    mark: Mark = "line",
    shares: bool = False,
) -> Chart:
    series = [
        # The ninth run has the first colour again, and is dashed.
        Series(name, points, mark if number < COLOURS else "dashed", number)
        for number, (name, points) in enumerate(curves)
        if points
    ]
    return Chart(title, caption, series, "step", y_label, percent=shares)


def _metric(runs: Sequence[RunCurves]) -> str:
    return " or ".join(dict.fromkeys(one.metric for one in runs if one.val_metric)) or "accuracy"


def _results(runs: Sequence[RunCurves]) -> Table:
    columns = {
        "run": [one.name for one in runs],
        "steps": [f"{one.last_step:,}" for one in runs],
        "training loss": [f"{one.last_loss:.4g}" for one in runs],
        "best validation": [percent(one.best_metric) if one.val_metric else "" for one in runs],
        "test": ["" if one.test is None else percent(one.test) for one in runs],
        "time of the steps": [f"{one.seconds:,.0f} s" for one in runs],
    }
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    rows = list(zip(*filled.values(), strict=True))
    return Table("Results", "The training loss is the smoothed one of the last step.", list(filled), rows)


def _settings(runs: Sequence[RunCurves]) -> list[Section]:
    """The settings that are not the same in all runs."""
    keys = list(dict.fromkeys(key for one in runs for key in one.settings))
    differing = [key for key in keys if len({one.settings.get(key) for one in runs}) > 1]
    if not differing:
        return []
    rows = [(key, *(one.settings.get(key, "") for one in runs)) for key in differing[:_MOST_SETTINGS]]
    left = len(differing) - len(rows)
    notes = [f"and {left} more, in the config.toml of each run"] if left else []
    return [Table("Settings that differ", "", ("key", *(one.name for one in runs)), rows, notes)]
