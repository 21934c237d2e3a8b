"""Whether an exported file gives the answers of the model that it was made from, on real images.

Letters: B batch, C channels, Y X rows and columns, K classes.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.dataset import Dataset
from vitlab.data.decode import decode
from vitlab.data.preprocess import Preprocess, normalise, resize
from vitlab.engines.exported import Run
from vitlab.exporting.graph import GraphRule
from vitlab.models.model import Model
from vitlab.models.spec import Pair
from vitlab.options.exporting_options import Precision
from vitlab.weights.bundle import Bundle

BATCHES = (1, 3, 8)
_COSINE = 0.99  # of vectors that are alike
_SMALLER_BATCHES = 3  # of each size below the largest: a fault that depends on the batch shows in the first
# Largest difference of a score, as a share of the largest score where that is above 1, and least share of equal first answers.
_LIMITS: Mapping[Precision, tuple[float, float]] = {
    "fp32": (1e-4, 1.0),
    "fp16": (1e-2, 0.98),
    "bf16": (5e-2, 0.95),
    "int8": (2.5e-1, 0.9),
}
_LIMITS_PREPROCESS_INSIDE = (5e-2, 0.95)  # a grey level of rounding in the pixels comes on top


@dataclasses.dataclass(frozen=True)
class BatchComparison:
    """One batch size at one image size."""

    batch: int
    image_size: Pair
    images: int
    difference: float  # the largest of any score
    agreement: float  # share of images with the same first answer; without a head, with a vector of cosine 0.99 or more


@dataclasses.dataclass(frozen=True)
class Parity:
    """The account of all comparisons. `speed` is times as fast as torch, both with the same threads, in turns."""

    data: str
    images: int
    comparisons: tuple[BatchComparison, ...]
    difference: float
    largest_score: float
    agreement: float
    grey_levels: float | None  # of the pixels that the model sees, where the graph prepares them
    images_per_second: float
    speed: float  # 0 where the images were too few to measure it

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def sentences(self) -> list[str]:
        sizes = ", ".join(dict.fromkeys(f"{rows}x{cols}" for rows, cols in (c.image_size for c in self.comparisons)))
        batches = ", ".join(dict.fromkeys(str(c.batch) for c in self.comparisons))
        pixels = "" if self.grey_levels is None else f"; pixels to {self.grey_levels:.1f} grey levels"
        return [
            f"compared   {self.images:,} images of {self.data}, {sizes}, {batches} at a time",
            f"scores     differ by at most {self.difference:.1e}, the largest is {self.largest_score:.3g}{pixels}",
            f"answers    {self.agreement:.2%} of the first ones are the same",
            *(
                [f"speed      {self.images_per_second:,.1f} img/s, {self.speed:.2f} times torch's"]
                if self.speed
                else []
            ),
        ]


def compare(run: Run, bundle: Bundle, rule: GraphRule, photos: Sequence[Tensor], data: str) -> Parity:
    """The model and the exported file on the same photos, uint8 [C, Y, X]."""
    model = bundle.model.float().eval()
    rows: list[BatchComparison] = []
    largest, grey, ours_s, torch_s, timed = 0.0, None, 0.0, 0.0, 0
    for size in _sizes(bundle, rule):
        prepare = dataclasses.replace(bundle.preprocess, image_size=size)
        for batch in (rule.batch,) if rule.batch else BATCHES:
            differences, same, count = [0.0], 0, 0
            for given, x_BCYX in _batches(photos, prepare, rule, batch):
                expected_BK, seconds = _timed(model, x_BCYX)
                started = time.perf_counter()
                found = run(given.numpy())
                took = time.perf_counter() - started
                scores_BK = torch.from_numpy(found["features" if model.head is None else "logits"])
                differences.append(_largest((scores_BK - expected_BK).abs()))
                same += int(_same(scores_BK, expected_BK, headless=model.head is None).sum())
                largest = max(largest, float(expected_BK.abs().max()))
                if count and batch == _largest_batch(rule):  # the first warms up
                    ours_s, torch_s, timed = ours_s + took, torch_s + seconds, timed + len(x_BCYX)
                count += len(x_BCYX)
                if rule.preprocess_inside:
                    grey = max(grey or 0.0, _grey_levels(torch.from_numpy(found["pixels"]), x_BCYX, prepare))
            rows.append(BatchComparison(batch, size, count, max(differences), same / count))
    most = max(row.images for row in rows)  # the other batch sizes have a few of the same photos again
    return Parity(
        data=data,
        images=len(photos),
        comparisons=tuple(rows),
        difference=max(row.difference for row in rows),
        largest_score=largest,
        agreement=min(row.agreement for row in rows if row.images == most),
        grey_levels=None if grey is None else round(grey, 3),
        images_per_second=round(timed / ours_s, 1) if ours_s else 0.0,
        speed=round(torch_s / ours_s, 3) if ours_s else 0.0,
    )


def _timed(model: Model, x_BCYX: Tensor) -> tuple[Tensor, float]:
    started = time.perf_counter()
    with torch.inference_mode():
        scores_BK = model(x_BCYX)
    return scores_BK, time.perf_counter() - started


def _largest(values: Tensor) -> float:
    """Infinity where one is not a number: Python's own `max` would pass over it, and half precision can overflow."""
    return float(values.max()) if bool(values.isfinite().all()) else math.inf


def _same(scores_BK: Tensor, expected_BK: Tensor, *, headless: bool) -> Tensor:
    """Which images have the same first answer; without a head, whose vectors point the same way."""
    if headless:
        return torch.cosine_similarity(scores_BK, expected_BK) >= _COSINE
    return scores_BK.argmax(1) == expected_BK.argmax(1)


def _sizes(bundle: Bundle, rule: GraphRule) -> list[Pair]:
    """The model's own, and where the size is open one that is larger and oblong, and one that is smaller if there is."""
    (rows, cols), stride = bundle.preprocess.image_size, bundle.model.spec.stride
    if not rule.dynamic_size:
        return [(rows, cols)]
    smaller = [(rows - stride, cols - stride)] if min(rows, cols) > stride else []
    return [(rows, cols), (rows + stride, cols + 2 * stride), *smaller]


def _largest_batch(rule: GraphRule) -> int:
    return rule.batch or BATCHES[-1]


def _batches(
    photos: Sequence[Tensor], prepare: Preprocess, rule: GraphRule, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """What the file is given and what the model is given. All photos at the largest batch size, a few at the others."""
    is_largest = size == _largest_batch(rule)
    stop = len(photos) if is_largest else min(len(photos), _SMALLER_BATCHES * size)
    for start in range(0, stop, size):
        part = list(photos[start : start + size])
        part += part[:1] * (size - len(part)) if rule.batch else []
        if rule.preprocess_inside:  # the images of one call are equally large
            height, width = (min(photo.shape[axis] for photo in part) for axis in (1, 2))
            raw_BCYX = torch.stack([photo[:, :height, :width] for photo in part])
            yield raw_BCYX.permute(0, 2, 3, 1).contiguous(), normalise(prepare, resize(prepare, raw_BCYX))
        else:
            x_BCYX = normalise(prepare, torch.cat([resize(prepare, photo[None]) for photo in part]))
            yield x_BCYX.contiguous(), x_BCYX


def _grey_levels(pixels_BCYX: Tensor, expected_BCYX: Tensor, rule: Preprocess) -> float:
    std_C = torch.tensor(rule.std).view(-1, 1, 1)
    return _largest(((pixels_BCYX - expected_BCYX) * std_C * 255).abs())


def calibration_batches(photos: Sequence[Tensor], rule: Preprocess, graph: GraphRule) -> list[Any]:
    """The photos as the graph takes them, for the ranges of int8."""
    size = graph.batch or 1
    return [given.numpy() for given, _ in _batches(photos, rule, dataclasses.replace(graph, batch=size), size)]


def decoded(dataset: Dataset, count: int, rule: Preprocess) -> list[Tensor]:
    """Up to `count` photos, evenly from all of them; those that cannot be read are left out."""
    if count < 1:
        raise UsageError(f"--check-images must be at least 1, not {count}")
    found: list[Tensor] = []
    for i in torch.linspace(0, len(dataset) - 1, min(count, len(dataset))).round().long().unique().tolist():
        try:
            found.append(decode(dataset.read(i), rule.mode, rule.bits))
        except (OSError, VitlabError):
            continue
    if not found:
        raise VitlabError(f"none of the images of {dataset.name} could be read")
    return found


def require_parity(
    parity: Parity, precision: Precision, rule: GraphRule, limit: float | None, agreement: float | None
) -> None:
    """Raise unless the file agrees with the model within the limits."""
    share, min_agreement = _LIMITS[precision]
    if rule.preprocess_inside:
        inside_share, inside_agreement = _LIMITS_PREPROCESS_INSIDE
        share, min_agreement = max(share, inside_share), min(min_agreement, inside_agreement)
    max_difference = share * max(1.0, parity.largest_score) if limit is None else limit
    min_agreement = min_agreement if agreement is None else agreement
    if not parity.difference <= max_difference:
        raise VitlabError(
            f"the exported scores differ by up to {parity.difference:.2e} from the model's, "
            f"and {max_difference:.2e} is the limit; nothing was written",
            hint="--limit sets another, and another --precision changes the difference.",
        )
    if parity.agreement < min_agreement:
        raise VitlabError(
            f"only {parity.agreement:.2%} of the first answers are the model's, and {min_agreement:.2%} is the least; "
            "nothing was written",
            hint="--agreement sets another. "
            "int8 improves with more, and more representative, calibration images: --calibration DATA.",
        )
