"""Numbers against their reference implementations."""

import math

import pytest
import torch
from scipy import stats
from sklearn import metrics

from vitlab.core.runtime import generator
from vitlab.evaluation.metrics import (
    best_thresholds,
    class_scores,
    confusion_matrix,
    is_among,
    label_scores,
    mean_average_precision,
    micro_f1,
    wilson_interval,
)

LOGITS = torch.randn(200, 9, generator=generator(0))
LABELS = torch.randint(0, 9, (200,), generator=generator(1))


@pytest.mark.parametrize("k", range(1, 10))
def test_top_k_agrees_with_scikit_learn(k: int) -> None:
    theirs = metrics.top_k_accuracy_score(LABELS, LOGITS, k=k, normalize=False, labels=range(9)) if k < 9 else 200
    assert int(is_among(LOGITS, LABELS, k).sum()) == theirs


@pytest.mark.parametrize("classes", [3, 1000])
def test_of_equal_scores_the_lower_index_wins(classes: int) -> None:
    tie, labels = torch.zeros(classes, classes), torch.arange(classes)
    assert [int(is_among(tie, labels, k).sum()) for k in (1, 2, 3)] == [1, 2, 3]
    assert [int(is_among(tie[:1], labels[k - 1 : k], k).sum()) for k in (1, 2, 3)] == [1, 1, 1]
    assert int(tie.argmax(dim=1)[0]) == 0


def test_k_beyond_the_number_of_classes_counts_everything() -> None:
    assert int(is_among(LOGITS, LABELS, 50).sum()) == 200


SEVERAL = (torch.rand(200, 9, generator=generator(2)) < 0.3).float()


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_with_several_labels_any_of_them_counts(k: int) -> None:
    best = LOGITS.topk(k).indices
    expected = sum(any(SEVERAL[i, j] for j in best[i]) for i in range(200))
    assert int(is_among(LOGITS, SEVERAL, k).sum()) == expected
    one = torch.nn.functional.one_hot(LABELS, 9)
    assert int(is_among(LOGITS, one, k).sum()) == int(is_among(LOGITS, LABELS, k).sum())


@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_agrees_with_scikit_learn(ties: bool) -> None:
    logits = LOGITS.round() if ties else LOGITS
    theirs = metrics.average_precision_score(SEVERAL.numpy(), logits.numpy(), average="macro")
    assert mean_average_precision(logits, SEVERAL) == pytest.approx(theirs)


def test_average_precision_leaves_classes_without_images_out() -> None:
    targets = SEVERAL.clone()
    targets[:, 4] = 0
    kept = [k for k in range(9) if k != 4]
    assert mean_average_precision(LOGITS, targets) == pytest.approx(
        mean_average_precision(LOGITS[:, kept], SEVERAL[:, kept])
    )
    assert math.isnan(mean_average_precision(LOGITS, targets * 0))


def test_confusion_agrees_with_scikit_learn() -> None:
    answers = LOGITS.argmax(dim=1)
    ours = confusion_matrix(answers, LABELS, (9, 9))
    assert ours.tolist() == metrics.confusion_matrix(LABELS, answers, labels=range(9)).tolist()
    assert int(ours.trace()) == int(is_among(LOGITS, LABELS, 1).sum())


def test_confusion_has_a_row_for_classes_that_do_not_occur() -> None:
    assert confusion_matrix(torch.tensor([1]), torch.tensor([0]), (3, 3)).tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("correct", "total"), [(0, 10), (10, 10), (1, 1), (0, 1), (352, 359), (50, 100), (1, 10**6)])
def test_wilson_agrees_with_scipy(correct: int, total: int) -> None:
    theirs = stats.binomtest(correct, total).proportion_ci(method="wilson")
    assert wilson_interval(correct, total) == pytest.approx((theirs.low, theirs.high), abs=1e-7)


def test_wilson_holds_what_was_measured_whatever_rounding_does() -> None:
    for total in range(1, 200):
        for correct in (0, total // 2, total):
            low, high = wilson_interval(correct, total)
            assert 0 <= low <= correct / total <= high <= 1


# --- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [(), (4,), (0, 8)], ids=str)
def test_precision_recall_and_f1_agree_with_scikit_learn(absent: tuple[int, ...]) -> None:
    kept = torch.tensor([label not in absent for label in LABELS.tolist()])
    labels, answers = LABELS[kept], LOGITS[kept].argmax(dim=1)
    ours = class_scores(confusion_matrix(answers, labels, (9, 9)))
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        labels, answers, labels=range(9), zero_division=0
    )
    there = [k for k in range(9) if k not in absent]
    assert ours.support_K.tolist() == support.tolist()
    assert ours.precision_K.tolist() == pytest.approx(precision.tolist())
    assert ours.recall_K[there].tolist() == pytest.approx(recall[there].tolist())
    assert ours.f1_K.tolist() == pytest.approx(f1.tolist())
    assert all(math.isnan(ours.recall_K[k]) for k in absent)
    theirs = metrics.precision_recall_fscore_support(labels, answers, labels=there, average="macro", zero_division=0)
    assert list(ours.macro().values()) == pytest.approx(list(theirs[:3]))


def test_class_that_is_never_the_answer_has_no_precision_and_no_f1() -> None:
    scores = class_scores(torch.tensor([[0, 3], [0, 5]]))
    assert (scores.precision_K.tolist(), scores.f1_K.tolist()) == ([0, 0.625], [0, pytest.approx(10 / 13)])
    assert scores.skew == pytest.approx(5 / 3)


def test_answers_outside_the_classes_cost_recall_and_no_precision() -> None:
    scores = class_scores(torch.tensor([[4, 0, 4], [0, 2, 0]]))
    assert scores.recall_K.tolist() == [0.5, 1]
    assert scores.precision_K.tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_several_labels_agree_with_scikit_learn(seed: int) -> None:
    given = torch.rand(80, 5, generator=generator(seed, 1)) < 0.4
    truth = torch.rand(80, 5, generator=generator(seed, 2)) < 0.3
    theirs = metrics.precision_recall_fscore_support(truth.numpy(), given.numpy(), average="macro", zero_division=0)
    assert list(label_scores(given, truth.float()).macro().values()) == pytest.approx(list(theirs[:3]))
    assert micro_f1(given, truth.float()) == pytest.approx(
        metrics.f1_score(truth.numpy(), given.numpy(), average="micro")
    )


@pytest.mark.parametrize("ties", [False, True])
def test_fitted_threshold_has_the_greatest_f1_of_all_thresholds(ties: bool) -> None:
    logits, truth = (LOGITS.round() if ties else LOGITS)[:24, :4], SEVERAL[:24, :4]
    thresholds = best_thresholds(logits, truth)
    for k in range(4):
        ours = metrics.f1_score(truth[:, k], logits[:, k].double() > thresholds[k])
        every = [metrics.f1_score(truth[:, k], logits[:, k] >= level) for level in logits[:, k].unique()]
        assert ours == pytest.approx(max(every))


def test_threshold_of_a_class_that_all_or_no_images_have_is_an_even_chance() -> None:
    targets = SEVERAL.clone()
    targets[:, 0], targets[:, 1] = 0, 1
    assert best_thresholds(LOGITS, targets)[:2].tolist() == [0, 0]
