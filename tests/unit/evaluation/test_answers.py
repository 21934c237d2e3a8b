"""Right is right: top-k with ties, classes that several of the model's stand for, and the loss of what is right."""

import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics

from vitlab.core.runtime import generator
from vitlab.evaluation.answers import first_answers, judge
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.metrics import is_among

LOGITS = torch.randn(300, 7, generator=generator(0))
LABELS = torch.randint(0, 7, (300,), generator=generator(1))
SAME = Match(tuple((k,) for k in range(7)))


def test_plain_labels_give_the_numbers_of_scikit_learn_and_torch() -> None:
    answers = judge(LOGITS, LABELS, SAME)
    for k in range(1, 7):
        theirs = metrics.top_k_accuracy_score(LABELS, LOGITS, k=k, labels=range(7))
        assert float((answers.rank_B < k).double().mean()) == pytest.approx(theirs)
    assert float(answers.loss_B.mean()) == pytest.approx(metrics.log_loss(LABELS, LOGITS.double().softmax(1)))
    torch.testing.assert_close(answers.confidence_B, LOGITS.double().softmax(1).amax(1))
    assert torch.equal(answers.answer_B, LOGITS.argmax(1))


def test_ties_go_to_the_lower_index_in_rank_and_answer_alike() -> None:
    coarse = LOGITS.round()
    answers = judge(coarse, LABELS, SAME)
    assert [int((answers.rank_B < k).sum()) for k in range(1, 8)] == [
        int(is_among(coarse, LABELS, k).sum()) for k in range(1, 8)
    ]
    assert torch.equal(answers.right, answers.answer_B == LABELS)
    assert first_answers(torch.zeros(3, 5)).tolist() == [0, 0, 0]


def test_class_of_several_members_is_right_with_any_of_them() -> None:
    """Data class 0 is the model's 1 or 4, data class 1 its 6; everything else is none of the data's."""
    match = Match(((1, 4), (6,)))
    truth = LABELS % 2
    answers = judge(LOGITS, truth, match)
    best = LOGITS.argmax(1)
    wanted = [{1, 4}, {6}]
    assert answers.right.tolist() == [int(b) in wanted[t] for b, t in zip(best, truth.tolist(), strict=True)]
    owners = {1: 0, 4: 0, 6: 1}
    assert answers.answer_B.tolist() == [owners.get(int(b), 2) for b in best]
    top3 = LOGITS.topk(3).indices.tolist()
    assert (answers.rank_B < 3).tolist() == [
        bool(wanted[t] & {*row}) for row, t in zip(top3, truth.tolist(), strict=True)
    ]
    p = LOGITS.double().softmax(1)
    expected = torch.where(truth == 0, p[:, 1] + p[:, 4], p[:, 6])
    torch.testing.assert_close(answers.loss_B, -expected.log())


def test_restricting_leaves_only_the_classes_of_the_data() -> None:
    match, kept = Match(((1, 4), (6,))).restricted(7)
    assert (match.members, kept.tolist()) == (((0, 1), (2,)), [1, 4, 6])
    answers = judge(LOGITS[:, kept], LABELS % 2, match)
    assert int(answers.answer_B.max()) == 1


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_temperature_changes_confidence_and_loss_and_no_answer(temperature: float) -> None:
    plain, other = judge(LOGITS, LABELS, SAME), judge(LOGITS, LABELS, SAME, temperature)
    assert torch.equal(plain.answer_B, other.answer_B) and torch.equal(plain.rank_B, other.rank_B)
    assert bool(((other.confidence_B < plain.confidence_B) == (temperature > 1)).all())
    assert float(other.loss_B.mean()) == pytest.approx(float(F.cross_entropy(LOGITS.double() / temperature, LABELS)))


def test_one_image_and_one_class_are_judged_like_others() -> None:
    answers = judge(torch.tensor([[2.0]]), torch.tensor([0]), Match(((0,),)))
    assert (answers.right.tolist(), answers.confidence_B.tolist(), answers.loss_B.tolist()) == ([True], [1.0], [0.0])


def test_more_rows_than_are_judged_at_a_time_change_nothing() -> None:
    many = torch.randn(9000, 3, generator=generator(5))
    labels = torch.randint(0, 3, (9000,), generator=generator(6))
    answers = judge(many, labels, Match(((0,), (1,), (2,))))
    assert int(answers.right.sum()) == int((many.argmax(1) == labels).sum())
    assert float(answers.loss_B.mean()) == pytest.approx(float(F.cross_entropy(many.double(), labels)))
