"""The whole account of a set of answers, held to the libraries of the field, also for awkward sets."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics

from vitlab.core.runtime import generator
from vitlab.evaluation.answers import OneLabel, SeveralLabels
from vitlab.evaluation.classify import score
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.measures import MEASURES, estimate
from vitlab.evaluation.metrics import mean_average_precision, wilson_interval

LOGITS = torch.randn(150, 6, generator=generator(0))
LABELS = torch.randint(0, 6, (150,), generator=generator(1))
SAME = Match(tuple((k,) for k in range(6)))


def test_numbers_are_those_of_the_scores_that_training_reports() -> None:
    case = OneLabel(LOGITS, LABELS, SAME)
    ours, theirs = estimate(case, resamples=20).values, score(LOGITS, LABELS, torch.arange(150))
    assert (case.num_images, ours["top1"], ours["top5"]) == (theirs.n, theirs.top1, theirs.top5)
    assert ours["loss"] == pytest.approx(theirs.loss)
    assert theirs.confusion_KK is not None
    assert case.confusion_KA[:, :6].tolist() == theirs.confusion_KK.tolist()
    assert case.confusion_KA[:, 6].tolist() == [0] * 6


def test_intervals_are_those_of_scipy_over_the_same_draws() -> None:
    case = OneLabel(LOGITS, LABELS, SAME)
    ours, answers = estimate(case, resamples=60, seed=4).intervals, case.answers
    truth, answer, loss = LABELS.numpy(), answers.answer_B.numpy(), answers.loss_B.numpy()

    def macro_f1(index: np.ndarray) -> float:
        return metrics.f1_score(
            truth[index], answer[index], labels=np.unique(truth[index]), average="macro", zero_division=0
        )

    def mean_loss(index: np.ndarray) -> float:
        return loss[index].mean()

    for name, statistic in (("macro_f1", macro_f1), ("loss", mean_loss)):
        theirs = stats.bootstrap(
            (np.arange(150),),
            statistic,
            n_resamples=60,
            method="percentile",
            vectorized=False,
            rng=np.random.default_rng(4),
        ).confidence_interval
        assert ours[name] == pytest.approx((theirs.low, theirs.high))


def test_interval_of_the_calibration_error_holds_its_value_for_each_draw() -> None:
    found = estimate(OneLabel(LOGITS, LABELS, SAME), resamples=1, seed=2)
    index = torch.from_numpy(np.random.default_rng(2).integers(0, 150, (1, 150))[0])
    drawn = OneLabel(LOGITS[index], LABELS[index], SAME).reliability.ece
    assert found.intervals["ece"] == pytest.approx((drawn, drawn))


def test_one_image_one_class_and_absent_classes_have_numbers() -> None:
    single = estimate(OneLabel(LOGITS[:1], LABELS[:1], SAME), resamples=5)
    assert all(math.isfinite(end) for ends in single.intervals.values() for end in ends)
    one = OneLabel(LOGITS[:20], torch.full((20,), 3), SAME)
    assert one.classes.macro()["recall"] == estimate(one, resamples=5).values["top1"] and one.classes.skew == 1


def test_perfect_score_of_few_images_does_not_promise_perfection() -> None:
    found = estimate(OneLabel(LOGITS[:12], LOGITS[:12].argmax(1), SAME), resamples=10)
    assert found.values["top1"] == 1
    assert found.intervals["top1"] == wilson_interval(12, 12) == found.intervals["top5"]
    assert found.intervals["top1"][0] < 0.8


SEVERAL = (torch.rand(150, 6, generator=generator(2)) < 0.3).float()


@pytest.mark.parametrize("targets", [LABELS, SEVERAL], ids=["one label", "several"])
def test_accuracy_has_the_interval_that_training_reports(targets: torch.Tensor) -> None:
    case = OneLabel(LOGITS, targets, SAME) if targets.ndim == 1 else SeveralLabels.of(LOGITS, targets)
    trained = score(LOGITS, targets, torch.arange(150))
    assert 0 < trained.top1 < 1
    assert estimate(case, resamples=3).intervals["top1"] == tuple(trained.test_summary()["top1_interval"])


def test_several_labels_agree_with_scikit_learn() -> None:
    case = SeveralLabels.of(LOGITS, SEVERAL)
    found, theirs = estimate(case, resamples=10), score(LOGITS, SEVERAL, torch.arange(150))
    printed = (LOGITS > 0).numpy()
    assert found.values["mean_ap"] == pytest.approx(metrics.average_precision_score(SEVERAL, LOGITS, average="macro"))
    assert found.values["micro_f1"] == pytest.approx(metrics.f1_score(SEVERAL, printed, average="micro"))
    assert found.values["macro_f1"] == pytest.approx(metrics.f1_score(SEVERAL, printed, average="macro"))
    assert (found.values["top1"], found.values["top5"]) == (theirs.top1, theirs.top5)
    assert found.values["loss"] == pytest.approx(theirs.loss)
    low, high = found.intervals["mean_ap"]
    assert low < found.values["mean_ap"] < high


def test_intervals_of_several_labels_hold_the_value_of_each_draw() -> None:
    found = estimate(SeveralLabels.of(LOGITS, SEVERAL), resamples=1, seed=5)
    index = torch.from_numpy(np.random.default_rng(5).integers(0, 150, (1, 150))[0])
    drawn = estimate(SeveralLabels.of(LOGITS[index], SEVERAL[index]), resamples=1).values
    assert found.intervals.keys() == drawn.keys() - {"top5"}
    for name, ends in found.intervals.items() - {
        ("top1", found.intervals["top1"])
    }:  # Wilson's, as the next test has it
        assert ends == pytest.approx((drawn[name], drawn[name])), name


def test_images_without_any_label_have_finite_numbers() -> None:
    found = estimate(SeveralLabels.of(LOGITS[:3], torch.zeros(3, 6)), resamples=5)
    assert found.values["micro_f1"] == 0 and math.isnan(found.intervals["macro_f1"][0])


def test_thresholds_decide_what_is_predicted() -> None:
    never, always = (SeveralLabels.of(LOGITS, SEVERAL, torch.full((6,), t).double()) for t in (99.0, -99.0))
    of_never, of_always = (estimate(case, resamples=1).values for case in (never, always))
    assert (of_never["micro_f1"], always.classes.macro()["recall"]) == (0, 1)
    assert of_never["mean_ap"] == of_always["mean_ap"] == pytest.approx(mean_average_precision(LOGITS, SEVERAL))


def test_keys_are_unique_and_every_printed_line_can_be_filled() -> None:
    assert len({measure.key for measure in MEASURES}) == len(MEASURES)
    for measure in MEASURES:
        context = {"n": 3, "part": "test", "macro": {"recall": 0.5, "precision": 0.5}, "skew": ""}
        line = measure.line.format(value=measure.text(0.5), interval=measure.interval_text((0.25, 0.75)), **context)
        assert measure.text(0.5) in line and measure.interval_text((0.25, 0.75)) in line
