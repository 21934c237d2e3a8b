"""What an evaluation found, as data, as JSON and in words."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.evaluation.calibration import BINS
from vitlab.evaluation.metrics import SKEWED
from vitlab.runs.evaluation.files import NOT_KEPT, PAGE
from vitlab.runs.evaluation.vtab_runs import VtabResult


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What `vitlab evaluate --json` prints. Accuracies are fractions; what was not measured is None."""

    model: str
    data: str
    part: str | None = None
    n: int | None = None
    top1: float | None = None
    top5: float | None = None
    labels: int | None = None  # among which the model chose
    loss: float | None = None
    ece: float | None = None
    mean_ap: float | None = None
    intervals: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    macro: dict[str, float] | None = None
    micro_f1: float | None = None
    skew: float | None = None
    per_class: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    confused: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])
    calibration: dict[str, Any] | None = None
    selective: dict[str, Any] | None = None
    real: dict[str, Any] | None = None
    few_shot: dict[str, Any] | None = None
    knn: dict[str, Any] | None = None
    probe: dict[str, Any] | None = None
    features: dict[str, Any] | None = None
    vtab: dict[str, Any] | None = None
    published: dict[str, Any] | None = None
    left_out: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    notes: list[str] = dataclasses.field(default_factory=list[str])
    out: str | None = None
    temperature_bundle: str | None = None
    seconds: float = 0.0
    images_per_second: float | None = None

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        said = [f"note       {note}" for note in self.notes]
        if self.top1 is not None:
            said.append(f"top-1      {self.top1:.2%}{self._range('top1')} of {self.n:,} images ({self.part})")
            if self.labels is None or self.labels > 5:  # of five or fewer it says nothing
                said.append(f"top-5      {self.top5:.2%}{self._range('top5')}")
            said.append(f"loss       {self.loss:.4f}{self._range('loss', '.4f')}")
        if self.mean_ap is not None:
            said.append(f"mean AP    {self.mean_ap:.4f}{self._range('mean_ap', '.4f')}")
        if self.macro is not None:
            careful = f"; classes are skewed {self.skew:.0f} : 1" if self.skew and self.skew >= SKEWED else ""
            said.append(
                f"per class  recall {self.macro['recall']:.2%}, precision {self.macro['precision']:.2%}, "
                f"F1 {self.macro['f1']:.2%}{self._range('macro_f1')}, mean over classes{careful}"
            )
        if self.calibration is not None:
            said.append(f"ECE        {self.ece:.4f}{self._range('ece', '.4f')} ({BINS} bins of equal width)")
            if self.calibration["temperature"] is not None:
                said.append(
                    f"           {self.calibration['ece_after']:.4f} at temperature "
                    f"{self.calibration['temperature']:.3f}, fitted on {self.calibration['fitted_on']}"
                )
        if self.real is not None:
            said.append(f"ReaL       {self.real['top1']:.2%} of {self.real['n']:,} images with labels")
        said += [
            f"{row.name:<10} {row.top1:.2%} ({row.low:.2%} to {row.high:.2%}{row.draws})" for row in self.feature_rows()
        ]
        if self.vtab is not None:
            said += VtabResult(**self.vtab).sentences()
        if self.published is not None:
            said.append(
                f"published  {self.published['top1']:.2%}, ours {self.published['ours']:.2%}: "
                f"{100 * self.published['difference']:+.2f} points ({self.published['settings']})"
            )
        said += [f"left out   {name}: {reason}" for name, reason in self.left_out.items()]
        if self.out is not None:
            said.append(f"page       {Path(self.out) / PAGE}")
        elif self.top1 is not None or self.features is not None:  # VTAB alone keeps its own
            said.append(NOT_KEPT)
        return said + ([f"bundle     {self.temperature_bundle}"] if self.temperature_bundle is not None else [])

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

    def _range(self, name: str, form: str = ".2%") -> str:
        if name not in self.intervals:
            return ""
        low, high = self.intervals[name]
        return f" ({low:{form}} to {high:{form}})"


def to_json(result: EvaluationResult) -> dict[str, Any]:
    """As it is printed and stored. NaN is not JSON: what is not defined is null."""
    return _plain(dataclasses.asdict(result))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
