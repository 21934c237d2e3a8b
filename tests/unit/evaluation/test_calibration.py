"""Calibration against direct references: bins by a loop, the temperature by SciPy."""

import numpy as np
import pytest
import torch
from scipy import optimize, special

from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator
from vitlab.evaluation.calibration import (
    BINS,
    brier_scores,
    fit_sigmoid_temperature,
    fit_temperature,
    is_at_the_edge,
    reliability,
)
from vitlab.evaluation.label_match import Match


def reference_ece(confidence: np.ndarray, right: np.ndarray, bins: int) -> float:
    total, edges = 0.0, np.linspace(0, 1, bins + 1)
    for j in range(bins):
        inside = (confidence > edges[j]) & (confidence <= edges[j + 1])
        if j == 0:
            inside |= confidence == 0
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    return total


@pytest.mark.parametrize("seed", range(3))
def test_ece_agrees_with_a_loop_over_the_bins(seed: int) -> None:
    confidence = torch.rand(500, generator=generator(seed)).double()
    confidence[:40] = torch.from_numpy(np.linspace(0, 1, BINS + 1))[torch.arange(40) % (BINS + 1)]  # on the edges
    right = torch.rand(500, generator=generator(seed, 1)) < confidence
    found = reliability(confidence, right)
    assert found.ece == pytest.approx(reference_ece(confidence.numpy(), right.numpy(), BINS))
    assert int(found.count_J.sum()) == 500


def test_perfect_knowledge_has_no_error_and_false_certainty_all_of_it() -> None:
    sure = torch.ones(10).double()
    assert reliability(sure, torch.ones(10).bool()).ece == 0
    assert reliability(sure, torch.zeros(10).bool()).ece == 1
    assert reliability(torch.tensor([0.5]).double(), torch.tensor([True])).ece == pytest.approx(0.5)


LOGITS = 4 * torch.randn(400, 5, generator=generator(3))
LABELS = torch.where(
    torch.rand(400, generator=generator(4)) < 0.7, LOGITS.argmax(1), torch.randint(0, 5, (400,), generator=generator(5))
)
SAME = Match(tuple((k,) for k in range(5)))


def test_temperature_is_the_one_that_scipy_finds() -> None:
    z, y = LOGITS.double().numpy(), LABELS.numpy()

    def loss(t: float) -> float:
        return float((special.logsumexp(z / t, axis=1) - z[np.arange(len(y)), y] / t).mean())

    theirs = optimize.minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-10})
    assert fit_temperature(LOGITS, LABELS, SAME) == pytest.approx(theirs.x, rel=1e-6)


def test_scores_that_were_scaled_have_a_temperature_scaled_alike() -> None:
    once = fit_temperature(LOGITS, LABELS, SAME)
    assert fit_temperature(3 * LOGITS, LABELS, SAME) == pytest.approx(3 * once, rel=1e-6)


def test_fitted_temperature_mends_an_overconfident_model_on_other_images() -> None:
    """Labels are drawn as if the scores were three times too large."""
    scores = 6 * torch.randn(2000, 5, generator=generator(7))
    labels = torch.multinomial((scores / 3).softmax(1), 1, generator=generator(8))[:, 0]
    fitted = fit_temperature(scores[:1000], labels[:1000], SAME)
    before, after = (
        reliability((scores[1000:].double() / t).softmax(1).amax(1), scores[1000:].argmax(1) == labels[1000:]).ece
        for t in (1.0, fitted)
    )
    assert fitted == pytest.approx(3, rel=0.1) and after < before / 3


def test_sigmoid_temperature_is_the_one_that_scipy_finds() -> None:
    targets = (torch.rand(400, 5, generator=generator(6)) < (LOGITS / 3).sigmoid()).float()
    z, y = LOGITS.double().numpy(), targets.double().numpy()

    def loss(t: float) -> float:
        return float((np.logaddexp(0, z / t) - y * z / t).mean())

    theirs = optimize.minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-10})
    assert fit_sigmoid_temperature(LOGITS, targets) == pytest.approx(theirs.x, rel=1e-6)


def test_images_without_a_mistake_or_without_a_hit_end_at_a_bound_that_is_reported() -> None:
    assert is_at_the_edge(fit_temperature(LOGITS, LOGITS.argmax(1), SAME))
    assert is_at_the_edge(fit_temperature(LOGITS, LOGITS.argmin(1), SAME))
    assert not is_at_the_edge(fit_temperature(LOGITS, LABELS, SAME))


def test_brier_score_is_the_squared_distance_from_the_truth() -> None:
    p = special.softmax(LOGITS.double().numpy() / 2, axis=1)
    wanted = ((p - np.eye(5)[LABELS.numpy()]) ** 2).sum(axis=1)
    assert brier_scores(LOGITS, LABELS, SAME, temperature=2.0).numpy() == pytest.approx(wanted)


def test_brier_score_counts_the_classes_of_a_right_answer_as_one() -> None:
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    joined = Match(((0, 1), (2,), (3,)))
    assert brier_scores(p.log(), torch.tensor([0]), joined).tolist() == pytest.approx([0.3**2 + 0.2**2 + 0.1**2])


def test_nothing_to_fit_on_is_reported() -> None:
    with pytest.raises(UsageError, match="no images"):
        fit_temperature(LOGITS[:0], LABELS[:0], SAME)


def test_bins_are_those_of_the_field() -> None:
    """Fifteen, as Guo et al. 2017 have it: the error depends on their number."""
    assert len(reliability(LOGITS.softmax(1).amax(1), LOGITS.argmax(1) == LABELS).count_J) == 15
