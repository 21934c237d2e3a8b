"""The whole account of a set of answers, held to the libraries of the field, also for awkward sets."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics

from vitlab.core.runtime import generator
from vitlab.evaluation.answers import judge
from vitlab.evaluation.classify import score
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.metrics import mean_average_precision, wilson_interval
from vitlab.evaluation.summary import summarise, summarise_several

LOGITS = torch.randn(150, 6, generator=generator(0))
LABELS = torch.randint(0, 6, (150,), generator=generator(1))
SAME = Match(tuple((k,) for k in range(6)))


def test_numbers_are_those_of_the_scores_that_training_reports() -> None:
    ours = summarise(judge(LOGITS, LABELS, SAME), 6, resamples=20)
    theirs = score(LOGITS, LABELS, torch.arange(150))
    assert (ours.n, ours.top1, ours.top5) == (theirs.n, theirs.top1, theirs.top5)
    assert ours.loss == pytest.approx(theirs.loss)
    assert theirs.confusion_KK is not None
    assert ours.confusion_KA[:, :6].tolist() == theirs.confusion_KK.tolist()
    assert ours.confusion_KA[:, 6].tolist() == [0] * 6


def test_intervals_are_those_of_scipy_over_the_same_draws() -> None:
    answers = judge(LOGITS, LABELS, SAME)
    ours = summarise(answers, 6, resamples=60, seed=4).intervals
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
    answers = judge(LOGITS, LABELS, SAME)
    found = summarise(answers, 6, resamples=1, seed=2)
    index = np.random.default_rng(2).integers(0, 150, (1, 150))[0]
    drawn = summarise(answers.chosen(torch.from_numpy(index)), 6, resamples=1)
    assert found.intervals["ece"] == pytest.approx((drawn.ece, drawn.ece))


def test_one_image_one_class_and_absent_classes_have_numbers() -> None:
    single = summarise(judge(LOGITS[:1], LABELS[:1], SAME), 6, resamples=5)
    assert single.n == 1 and all(math.isfinite(end) for ends in single.intervals.values() for end in ends)
    same_class = torch.full((20,), 3)
    one = summarise(judge(LOGITS[:20], same_class, SAME), 6, resamples=5)
    assert one.classes.macro()["recall"] == one.top1 and one.classes.skew == 1


def test_perfect_score_of_few_images_does_not_promise_perfection() -> None:
    found = summarise(judge(LOGITS[:12], LOGITS[:12].argmax(1), SAME), 6, resamples=10)
    assert found.top1 == 1 and found.intervals["top1"] == wilson_interval(12, 12) == found.intervals["top5"]
    assert found.intervals["top1"][0] < 0.8


SEVERAL = (torch.rand(150, 6, generator=generator(2)) < 0.3).float()


def test_several_labels_agree_with_scikit_learn() -> None:
    found = summarise_several(LOGITS, SEVERAL, None, resamples=10)
    said = (LOGITS > 0).numpy()
    assert found.mean_ap == pytest.approx(metrics.average_precision_score(SEVERAL, LOGITS, average="macro"))
    assert found.micro_f1 == pytest.approx(metrics.f1_score(SEVERAL, said, average="micro"))
    assert found.classes.macro()["f1"] == pytest.approx(metrics.f1_score(SEVERAL, said, average="macro"))
    assert found.loss == pytest.approx(score(LOGITS, SEVERAL, torch.arange(150)).loss)
    low, high = found.intervals["mean_ap"]
    assert low < found.mean_ap < high


def test_intervals_of_several_labels_hold_the_value_of_each_draw() -> None:
    found = summarise_several(LOGITS, SEVERAL, None, resamples=1, seed=5)
    index = torch.from_numpy(np.random.default_rng(5).integers(0, 150, (1, 150))[0])
    drawn = summarise_several(LOGITS[index], SEVERAL[index], None, resamples=1)
    values = {"ece": drawn.ece, "macro_f1": drawn.classes.macro()["f1"], "micro_f1": drawn.micro_f1, "top1": drawn.top1}
    for name, value in values.items():
        assert found.intervals[name] == pytest.approx((value, value)), name


def test_images_without_any_label_have_finite_numbers() -> None:
    found = summarise_several(LOGITS[:3], torch.zeros(3, 6), None, resamples=5)
    assert found.micro_f1 == 0 and math.isnan(found.intervals["macro_f1"][0])


def test_thresholds_decide_what_is_said() -> None:
    never = summarise_several(LOGITS, SEVERAL, torch.full((6,), 99.0).double(), resamples=1)
    always = summarise_several(LOGITS, SEVERAL, torch.full((6,), -99.0).double(), resamples=1)
    assert (never.micro_f1, always.classes.macro()["recall"]) == (0, 1)
    assert never.mean_ap == always.mean_ap == pytest.approx(mean_average_precision(LOGITS, SEVERAL))
