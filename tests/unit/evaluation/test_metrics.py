"""Numbers against their reference implementations."""

import pytest
import torch
from scipy import stats
from sklearn import metrics

from vitlab.core.runtime import generator
from vitlab.evaluation.metrics import confusion_matrix, count_correct, wilson_interval

LOGITS = torch.randn(200, 9, generator=generator(0))
LABELS = torch.randint(0, 9, (200,), generator=generator(1))


@pytest.mark.parametrize("k", range(1, 10))
def test_top_k_agrees_with_scikit_learn(k: int) -> None:
    theirs = metrics.top_k_accuracy_score(LABELS, LOGITS, k=k, normalize=False, labels=range(9)) if k < 9 else 200
    assert count_correct(LOGITS, LABELS, k) == theirs


@pytest.mark.parametrize("classes", [3, 1000])
def test_of_equal_scores_the_lower_index_wins(classes: int) -> None:
    tie, labels = torch.zeros(classes, classes), torch.arange(classes)
    assert [count_correct(tie, labels, k) for k in (1, 2, 3)] == [1, 2, 3]
    assert [count_correct(tie[:1], labels[k - 1 : k], k) for k in (1, 2, 3)] == [1, 1, 1]
    assert int(tie.argmax(dim=1)[0]) == 0


def test_k_beyond_the_number_of_classes_counts_everything() -> None:
    assert count_correct(LOGITS, LABELS, 50) == 200


def test_confusion_agrees_with_scikit_learn() -> None:
    answers = LOGITS.argmax(dim=1)
    ours = confusion_matrix(answers, LABELS, 9)
    assert ours.tolist() == metrics.confusion_matrix(LABELS, answers, labels=range(9)).tolist()
    assert int(ours.trace()) == count_correct(LOGITS, LABELS, 1)


def test_confusion_has_a_row_for_classes_that_do_not_occur() -> None:
    assert confusion_matrix(torch.tensor([1]), torch.tensor([0]), 3).tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("correct", "total"), [(0, 10), (10, 10), (1, 1), (0, 1), (352, 359), (50, 100), (1, 10**6)])
def test_wilson_agrees_with_scipy(correct: int, total: int) -> None:
    theirs = stats.binomtest(correct, total).proportion_ci(method="wilson")
    assert wilson_interval(correct, total) == pytest.approx((theirs.low, theirs.high), abs=1e-7)
