"""Temperature and thresholds come from the images they are fitted on, never from those that are measured."""

import dataclasses

import pytest
import torch
from torch import Tensor

from vitlab.core.runtime import generator
from vitlab.data.dataset import from_arrays, several_labels
from vitlab.evaluation.calibration import fit_sigmoid_temperature, fit_temperature
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.metrics import best_thresholds
from vitlab.evaluation.scoring import CountRule, Scored, count

CLASSES = ("a", "b", "c")
SAME = Match(tuple((k,) for k in range(3)))
RULE = CountRule(temperature=1.0, thresholds=(), resamples=2, seed=0)


def scored(sure: float, seed: int, *, several: bool) -> Scored:
    """Answers that are `sure` times too certain."""
    logits_BK = 2 * torch.randn(60, 3, generator=generator(seed))
    labels_B = torch.multinomial(logits_BK.softmax(1), 1, generator=generator(seed, 1))[:, 0]
    data = from_arrays(torch.zeros(60, 1, 1, 1, dtype=torch.uint8), labels_B, CLASSES)
    targets: Tensor = labels_B
    if several:
        targets = (torch.rand(60, 3, generator=generator(seed, 2)) < logits_BK.sigmoid()).float()
        data = dataclasses.replace(data, labels=several_labels([row.nonzero()[:, 0].tolist() for row in targets]))
    return Scored(data, SAME, sure * logits_BK, targets, torch.arange(60), {}, 0.0)


@pytest.mark.parametrize("several", [False, True], ids=["one label", "several"])
def test_what_is_fitted_is_fitted_on_the_other_part(several: bool) -> None:
    measured, fit = scored(1.0, 0, several=several), scored(3.0, 9, several=several)
    found = count(measured, fit, "val", RULE)
    fitted = found.numbers["calibration"]["temperature"]
    if several:
        assert fitted == fit_sigmoid_temperature(fit.logits_BM, fit.targets)
        thresholds = best_thresholds(fit.logits_BM, fit.targets).sigmoid().tolist()
        assert [row["threshold"] for row in found.numbers["per_class"]] == pytest.approx(thresholds)
    else:
        assert fitted == fit_temperature(fit.logits_BM, fit.targets, SAME)
    assert fitted > 1.5, "the premise: the answers of the other part are too certain"


@pytest.mark.parametrize("several", [False, True], ids=["one label", "several"])
@pytest.mark.parametrize(
    ("own", "reported"),
    [(1.0, "no temperature was fitted: there is no"), (1.6583, "the bundle's own temperature 1.66 is used")],
)
def test_without_images_to_fit_on_the_temperature_that_is_used_is_reported(
    several: bool, own: float, reported: str
) -> None:
    measured = scored(1.0, 0, several=several)
    rule = dataclasses.replace(RULE, temperature=own)
    (note,) = count(measured, None, "", rule).numbers["notes"]
    assert note.startswith(reported)
