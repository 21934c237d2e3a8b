"""How the measure of a study is called, which way it is better, and how its numbers are written. Loads no torch."""

import dataclasses
import re
from collections.abc import Mapping

from vitlab.core.errors import amount
from vitlab.evaluation.fits import Estimate

_LOWER_IS_BETTER = ("loss", "milliseconds", "seconds", "ece")
_PLAIN = 1e7  # below, thousands are read more easily than powers of ten
# What a stage of each verb writes; of images with several labels mean_ap instead of top5, without labels knn alone.
MEASURES: Mapping[str, tuple[str, ...]] = {
    "train": ("top1", "top5", "mean_ap", "loss", "ece", "knn", "n", "train_images", "images_seen", "images_per_second"),
    "noisy-student": (
        *(f"{whose}{name}" for whose in ("", "teacher_") for name in ("top1", "top5", "mean_ap", "loss", "ece", "n")),
        "margin",
    ),
    "few-shot": ("few_shot_5",),
    "inspect": (
        *("distance_first_layer", "distance_last_layer", "distance_by_depth", "distance_layer1_head1"),
        *("low_layers_nearest_head", "low_layers_farthest_head", "low_layers_local_heads", "low_layers_global_heads"),
        *(
            "distance_growth",
            "second_half_wide_heads",
            "row_column_excess",
            "position_nearness",
            "filter_low_frequency",
        ),
    ),
    "speed": ("images_per_second", "milliseconds_per_image", "largest_batch", "image_size"),
}
ANY_MEASURES = ("flops", "seconds", "params", "macs", "macs_per_second")  # whatever the last stage is
_SHARES = ("top1", "top5", "knn", "margin", "filter_low_frequency", "second_half_wide_heads")
_TIMED = ("images_per_second", "macs_per_second", "milliseconds_per_image", "largest_batch")
_SPOKEN = {
    "top1": "test accuracy",
    "teacher_top1": "test accuracy of the teacher",
    "few_shot_5": "5-shot accuracy",
    "knn": "20-NN accuracy",
    "margin": "student over teacher",
    "macs": "multiply-adds",
    "macs_per_second": "multiply-adds per second",
    "flops": "FLOPs",
    "distance_by_depth": "slope of the attention distance over depth",
    "distance_growth": "attention distance of the last layer minus that of the first",
    "second_half_wide_heads": "share of the heads in the second half of the layers that attend widely",
    "low_layers_nearest_head": "attention distance of the most local head in the low layers (uniform attention = 1)",
    "low_layers_farthest_head": "attention distance of the most global head in the low layers (uniform attention = 1)",
    "row_column_excess": "cosine of positions of one row or column above that of others",
    "position_nearness": "correlation of the cosine of positions with how near they are",
    "filter_low_frequency": "share of the filters' power at low frequencies",
}


def is_measure(name: str, verb: str) -> bool:
    """Whether a last stage of this verb may write such a number."""
    return name in (*MEASURES[verb], *ANY_MEASURES) or re.fullmatch(r"distance_layer\d+_head\d+", name) is not None


def measure_label(measure: str) -> str:
    """A measure in words."""
    return _SPOKEN.get(measure, measure.replace("_", " "))


def goodness(measure: str, value: float) -> float:
    """A number that is larger where a measure is better."""
    return -value if measure.removeprefix("teacher_").startswith(_LOWER_IS_BETTER) else value


def is_share(measure: str) -> bool:
    """Whether a measure is an accuracy or another share, to be shown in per cent."""
    return measure.removeprefix("teacher_") in _SHARES or measure.startswith("few_shot_")


def percent_unit(measure: str) -> str:
    """What stands behind a share times a hundred."""
    return "points" if measure == "margin" else "%"


def format_estimate(found: Estimate, measure: str, *, counted: bool = True) -> str:
    """The estimate of a measure in its own unit, with the number of seeds unless that is said elsewhere."""
    number = format_mean(clipped(found, measure), share=is_share(measure), signed=measure == "margin")
    return f"{number}, {count_in_words(found, measure)}" if counted else number


def clipped(found: Estimate, measure: str) -> Estimate:
    """The estimate with its interval within the bounds of a share: t knows none, and an accuracy has two."""
    if found.interval is None or not is_share(measure) or measure == "margin":
        return found
    low, high = found.interval
    return dataclasses.replace(found, interval=(max(0.0, low), min(1.0, high)))


def is_timed(measure: str) -> bool:
    """Whether a number is of the machine as much as of the model."""
    return measure in _TIMED or measure == "seconds"


def count_in_words(found: Estimate, measure: str, missing: int = 0) -> str:
    """What an estimate is a mean of: a seed changes nothing about a speed, which is measured anew."""
    what = "measurement" if measure in _TIMED else "seed"
    count = f"{found.n} of {amount(found.n + missing, what)}" if missing else amount(found.n, what)
    return f"{count}, all alike" if _has_no_spread(found) else count  # a formula has no spread


def _has_no_spread(found: Estimate) -> bool:
    return found.interval is not None and found.interval[0] == found.interval[1]


def format_mean(found: Estimate, *, share: bool, signed: bool = False) -> str:
    """A mean with its interval, where it has one."""
    scale, unit = (100, " points" if signed else " %") if share else (1, "")
    sign = "+" if signed else ""

    def text(value: float) -> str:
        if share:
            return f"{scale * value:{sign}.2f}"
        rounded = float(f"{value:.3g}")
        return f"{rounded:{sign},.0f}" if 1e3 <= abs(rounded) < _PLAIN else f"{value:{sign}.3g}"

    if found.interval is None or _has_no_spread(found):
        return f"{text(found.mean)}{unit}"
    low, high = found.interval
    return f"{text(found.mean)}{unit} ({text(low)} to {text(high)})"
