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


@pytest.mark.parametrize(("label", "correct_at"), [(0, 1), (1, 2), (2, 3)])
def test_of_equal_scores_the_lower_index_wins(label: int, correct_at: int) -> None:
    tie = torch.zeros(1, 3)
    found = [count_correct(tie, torch.tensor([label]), k) for k in (1, 2, 3)]
    assert found == [int(k >= correct_at) for k in (1, 2, 3)]
    assert count_correct(tie, torch.tensor([label]), 1) == int(tie.argmax(dim=1) == label)


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
