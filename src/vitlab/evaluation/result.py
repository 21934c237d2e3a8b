"""What an evaluation found, as data, as JSON and in words."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.evaluation.measures import MEASURES
from vitlab.evaluation.metrics import SKEWED
from vitlab.evaluation.vtab import VtabResult

PAGE = "report.html"
NOT_KEPT = "not kept   --out DIR keeps these numbers, with records, tables and a page"  # where there is no folder


class FeatureRow(NamedTuple):
    """One measure of features, and between what it lies."""

    name: str
    top1: float
    low: float
    high: float
    draws: str = ""

    def short(self) -> str:
        """In per cent, for the end of a bar."""
        return f"{100 * self.top1:.1f} ({100 * self.low:.0f}–{100 * self.high:.0f})"


def _value(key: str) -> property:
    """An attribute for one of the measures; None where it was not measured."""

    def get(result: "EvaluationResult") -> float | None:
        return result.measures.get(key)

    return property(get)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What `vitlab evaluate --json` prints. Accuracies are fractions; what was not measured is None."""

    model: str
    data: str
    part: str | None = None  # test, val, train or all
    n: int | None = None  # images that were measured
    measures: dict[str, float] = dataclasses.field(default_factory=dict[str, float])  # by the keys of `MEASURES`
    labels: int | None = None  # among which the model chose
    intervals: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    macro: dict[str, float] | None = None  # precision, recall and f1, each the mean over classes
    skew: float | None = None  # images of the largest class for each of the smallest
    per_class: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    confused: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    calibration: dict[str, Any] | None = None  # temperature, fitted_on, ece_after, loss_after, reliability
    selective: dict[str, Any] | None = None  # aurc, coverage_at_risk
    real: dict[str, Any] | None = None  # by the labels of ImageNet-ReaL
    few_shot: dict[str, Any] | None = None  # by images of each class
    knn: dict[str, Any] | None = None  # k, top1
    probe: dict[str, Any] | None = None  # top1 of a linear head
    features: dict[str, Any] | None = None
    vtab: dict[str, Any] | None = None  # by task
    published: dict[str, Any] | None = None  # the accuracy of the catalogue beside this one
    left_out: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    notes: list[str] = dataclasses.field(default_factory=list[str])
    out: str | None = None  # the folder of the results
    temperature_bundle: str | None = None  # the folder of save_temperature
    seconds: float = 0.0
    images_per_second: float | None = None

    top1, top5, loss, ece = _value("top1"), _value("top5"), _value("loss"), _value("ece")
    mean_ap, micro_f1 = _value("mean_ap"), _value("micro_f1")

    def to_json(self) -> dict[str, Any]:
        """As it is printed and stored. NaN is not JSON: what is not defined is null."""
        table = dataclasses.asdict(self)
        found = table.pop("measures")
        return _plain(table | {measure.key: found.get(measure.key) for measure in MEASURES if not measure.nested})

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        lines = [f"note       {note}" for note in self.notes] + self._measure_lines()
        if self.calibration is not None and self.calibration["temperature"] is not None:  # below the ECE
            lines.append(
                f"           {self.calibration['ece_after']:.4f} at temperature "
                f"{self.calibration['temperature']:.3f}, fitted on {self.calibration['fitted_on']}"
            )
        if self.real is not None:
            lines.append(f"ReaL       {self.real['top1']:.2%} of {self.real['n']:,} images with labels")
        lines += [
            f"{row.name:<10} {row.top1:.2%} ({row.low:.2%} to {row.high:.2%}{row.draws})" for row in self.feature_rows()
        ]
        if self.vtab is not None:
            lines += VtabResult(**self.vtab).sentences()
        if self.published is not None:
            lines.append(
                f"published  {self.published['top1']:.2%}, ours {self.published['ours']:.2%}: "
                f"{100 * self.published['difference']:+.2f} points ({self.published['settings']})"
            )
        lines += [f"left out   {name}: {reason}" for name, reason in self.left_out.items()]
        if self.out is not None:
            lines.append(f"page       {Path(self.out) / PAGE}")
        elif self.top1 is not None or self.features is not None:  # VTAB alone keeps its own
            lines.append(NOT_KEPT)
        return lines + ([f"bundle     {self.temperature_bundle}"] if self.temperature_bundle is not None else [])

    def feature_rows(self) -> list[FeatureRow]:
        """What was measured of features: few-shot with the range of its draws, the others with their 95 % interval."""
        rows: list[FeatureRow] = []
        for shots, found in (self.features or {}).get("few_shot_detail", {}).items():
            mean = (self.few_shot or {})[shots]
            draws = f" in {len(found['seeds'])} draws" if len(found["seeds"]) > 1 else " in one draw"
            rows.append(FeatureRow(f"{shots}-shot", mean, found["low"], found["high"], draws))
        if self.knn is not None:
            rows.append(FeatureRow(f"{self.knn['k']}-NN", self.knn["top1"], *self.knn["interval"]))
        if self.probe is not None:
            rows.append(FeatureRow("probe", self.probe["top1"], *self.probe["interval"]))
        return rows

    def _measure_lines(self) -> list[str]:
        skew = f"; classes are skewed {self.skew:.0f} : 1" if self.skew and self.skew >= SKEWED else ""
        context = {"n": self.n, "part": self.part, "macro": self.macro, "skew": skew}
        lines: list[str] = []
        for measure in MEASURES:
            if measure.title and measure.key in self.measures and (self.labels or 0) >= measure.min_labels:
                value, interval = self.measures[measure.key], self.intervals.get(measure.key)
                texts = {"value": measure.text(value), "interval": measure.interval_text(interval)}
                lines.append(f"{measure.title:<10} {measure.line.format(**texts, **context)}")
        return lines


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
