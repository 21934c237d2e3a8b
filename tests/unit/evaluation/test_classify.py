"""Every image counts once, whatever the batches, and only those that could be read."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess
from vitlab.engines.inference import run_model
from vitlab.evaluation.classify import Scores, score

ALONE = World(0, 1, torch.device("cpu"))
RULE = Preprocess(mode="L", image_size=(1, 6), mean=(0.5,), std=(0.5,))
PIXELS = torch.randint(0, 256, (107, 1, 1, 6), dtype=torch.uint8, generator=generator(0))
LOGITS = PIXELS.flatten(1).float() / 127.5 - 1
LABELS = torch.randint(0, 6, (107,), generator=generator(1))


class Pixels(nn.Module):
    """The six pixels of an image are its scores."""

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        return x.flatten(1)


def batches(size: int, order: Tensor | None = None, bad: tuple[int, ...] = ()) -> Iterator[Batch]:
    """With padding at the end, as the loader has it: invalid places that show image 0."""
    ids = torch.arange(107) if order is None else order
    for part in ids.split(size):
        padded = torch.cat([part, part.new_zeros(size - len(part))])
        inside = torch.arange(size) < len(part)
        valid = inside & torch.tensor([int(i) not in bad for i in padded])
        yield Batch(PIXELS[padded], LABELS[padded], valid, padded, padded * 0, padded * 0, torch.arange(size))


def scored(given: Iterator[Batch]) -> Scores:
    return score(*run_model(Pixels().train(), given, RULE, ALONE))


@pytest.mark.parametrize("size", [1, 10, 50, 106, 107, 500])
def test_result_does_not_depend_on_the_batches_and_counts_the_last_partial_one(size: int) -> None:
    scores, whole = scored(batches(size)), scored(batches(107))
    assert scores.n == 107
    assert scores.confusion_KK is not None and int(scores.confusion_KK.sum()) == 107
    assert (scores.top1, scores.top5, scores.interval) == (whole.top1, whole.top5, whole.interval)
    assert scores.loss == pytest.approx(whole.loss)


def test_rows_come_in_the_order_of_the_images() -> None:
    shuffled = torch.randperm(107, generator=generator(2))
    logits, targets, ids = run_model(Pixels(), batches(10, shuffled), RULE, ALONE)
    assert torch.equal(ids, torch.arange(107))
    assert torch.equal(targets, LABELS)
    torch.testing.assert_close(logits, LOGITS)


def test_image_that_could_not_be_read_is_left_out() -> None:
    scores = scored(batches(10, bad=(0, 55)))
    assert scores.n == 105
    assert not {0, 55} & set(scores.ids.tolist())


def test_numbers_are_what_they_say() -> None:
    scores = scored(batches(20))
    right = LOGITS.argmax(dim=1) == LABELS
    log_p = LOGITS.log_softmax(dim=1)[range(107), LABELS]
    assert scores.top1 == pytest.approx(float(right.float().mean()))
    assert scores.loss == pytest.approx(-float(log_p.mean()))
    assert scores.interval[0] < scores.top1 < scores.interval[1]
    among_five = (LOGITS.topk(5).indices == LABELS[:, None]).any(dim=1)
    assert scores.top1 < scores.top5 < 1
    assert scores.top5 == pytest.approx(float(among_five.float().mean()))
    assert scores.mean_ap is None
    assert scores.summary() == {"top1": scores.top1, "top5": scores.top5, "loss": scores.loss, "n": 107}


def test_several_labels_have_their_own_numbers() -> None:
    targets = (torch.rand(107, 6, generator=generator(3)) < 0.4).float()
    scores = score(LOGITS, targets, torch.arange(107))
    best = LOGITS.argmax(dim=1)
    assert scores.top1 == pytest.approx(float(targets[range(107), best].mean()))
    assert scores.mean_ap is not None and scores.summary()["mean_ap"] == scores.mean_ap
    assert scores.confusion_KK is None
    p = LOGITS.sigmoid()
    terms = -(targets * p.log() + (1 - targets) * (1 - p).log())
    assert scores.loss == pytest.approx(float(terms.sum(dim=1).mean()))


def test_model_of_equal_logits_has_the_loss_of_chance() -> None:
    assert score(torch.zeros(12, 6), LABELS[:12], torch.arange(12)).loss == pytest.approx(math.log(6))


def test_half_precision_is_used_where_asked_and_answers_are_float32() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 6))
    full, _, _ = run_model(model, batches(50), RULE, ALONE)
    half, _, _ = run_model(model, batches(50), RULE, ALONE, torch.autocast("cpu", torch.bfloat16))
    assert half.dtype == torch.float32
    assert not torch.equal(half, full)
    torch.testing.assert_close(half, full, rtol=0, atol=0.02)


@pytest.mark.parametrize("given", [[], list(batches(107, bad=tuple(range(107))))], ids=["none", "none readable"])
def test_nothing_to_evaluate_on_is_refused(given: list[Batch]) -> None:
    with pytest.raises(UsageError, match="no examples"):
        scored(iter(given))
