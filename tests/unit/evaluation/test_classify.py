"""Every example counts once, whatever the batches."""

import math

import pytest
import torch
from torch import Tensor, nn

from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator
from vitlab.evaluation.classify import score

LOGITS = torch.randn(107, 6, generator=generator(0))
LABELS = torch.randint(0, 6, (107,), generator=generator(1))


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(LOGITS.split(size), LABELS.split(size), strict=True))


@pytest.mark.parametrize("size", [1, 10, 50, 106, 107, 500])
def test_result_does_not_depend_on_the_batches_and_counts_the_last_partial_one(size: int) -> None:
    scores, whole = score(nn.Identity(), batches(size)), score(nn.Identity(), batches(107))
    assert scores.n == 107
    assert int(scores.confusion_KK.sum()) == 107
    assert (scores.top1, scores.top5, scores.interval) == (whole.top1, whole.top5, whole.interval)
    assert scores.loss == pytest.approx(whole.loss)


def test_numbers_are_what_they_say() -> None:
    scores = score(nn.Identity(), batches(20))
    right = LOGITS.argmax(dim=1) == LABELS
    log_p = LOGITS.log_softmax(dim=1)[range(107), LABELS]
    assert scores.top1 == pytest.approx(float(right.float().mean()))
    assert scores.loss == pytest.approx(-float(log_p.mean()))
    assert scores.interval[0] < scores.top1 < scores.interval[1]
    assert scores.top1 < scores.top5 < 1
    torch.testing.assert_close(scores.probabilities_BK, LOGITS.softmax(dim=1))
    assert scores.summary() == {"top1": scores.top1, "top5": scores.top5, "loss": scores.loss, "n": 107}


def test_model_that_says_nothing_has_the_loss_of_chance() -> None:
    scores = score(nn.Identity(), [(torch.zeros(12, 6), LABELS[:12])])
    assert scores.loss == pytest.approx(math.log(6))


def test_model_is_evaluated_in_eval_mode_and_without_gradients() -> None:
    class Probe(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.training
            assert not torch.is_grad_enabled()
            return x

    assert score(Probe().train(), batches(50)).n == 107


def test_nothing_to_evaluate_on_is_refused() -> None:
    with pytest.raises(UsageError, match="no examples"):
        score(nn.Identity(), [])
