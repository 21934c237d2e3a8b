"""The linear probe: the same optimum as scikit-learn, in whatever pieces, with its l2 chosen on held-out images."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from slow_cases import slow_after

from vitlab.core.errors import UsageError
from vitlab.evaluation import linear_probe
from vitlab.evaluation.linear_probe import (
    DECADES,
    NEARLY_FLAT,
    TRIALS,
    Head,
    Row,
    fit,
    judge,
    loss_and_slope,
    most_right,
    plain_head,
    pose,
    search,
)


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64))


def standardised(x: torch.Tensor) -> np.ndarray[Any, Any]:
    wide = x.double().numpy()
    return (wide - wide.mean(0)) / np.maximum(wide.std(0), 1e-6)


@pytest.mark.parametrize("l2", slow_after(1, [1e-3, 1e-1, 1e-5]))
def test_loss_is_the_optimum_that_scikit_learn_finds(l2: float, digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = digits[0][:600], digits[1][:600]
    problem = pose(x.split(128), y, 10)
    ours, slope = loss_and_slope(problem, fit(problem, l2), l2)
    # scikit-learn's C weighs the summed loss against |W|²/2.
    peer = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-10, max_iter=20_000).fit(standardised(x), y.numpy())
    weight = torch.from_numpy(np.concatenate([peer.coef_, peer.intercept_[:, None]], axis=1))
    theirs, _ = loss_and_slope(problem, weight, l2)
    assert abs(float(ours - theirs)) <= 1e-6 * float(theirs)
    assert slope.abs().max() < 1e-6


def test_loss_is_the_mean_cross_entropy_and_its_slope_is_autograds(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = digits[0][:97], digits[1][:97]
    problem = pose(x.split(20), y, 10)
    weight = torch.randn(10, 65, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logits = torch.from_numpy(standardised(x)) @ weight[:, :-1].T + weight[:, -1]
    wanted = torch.nn.functional.cross_entropy(logits, y) + 0.05 * weight[:, :-1].square().sum()
    wanted.backward()
    loss, slope = loss_and_slope(problem, weight.detach(), 0.1)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(slope, weight.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_start_and_pieces_do_not_change_where_it_ends(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = digits[0][:300], digits[1][:300]
    whole, pieces = pose([x], y, 10), pose(x.split(37), y, 10)
    cold = fit(whole, 1e-2)
    torch.testing.assert_close(fit(pieces, 1e-2), cold, rtol=0, atol=1e-4)
    torch.testing.assert_close(fit(whole, 1e-2, fit(whole, 1.0)), cold, rtol=0, atol=1e-4)


def test_features_too_large_to_be_kept_give_the_same(
    digits: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = digits[0][:200], digits[1][:200]
    kept = pose(x.split(64), y, 10)
    monkeypatch.setattr(linear_probe, "_CPU_BYTES", 0)
    streamed = pose(x.split(64), y, 10)
    assert kept.ready and not streamed.ready
    assert streamed.chunks[0].dtype == torch.float32
    assert torch.equal(fit(kept, 1e-2), fit(streamed, 1e-2))


def test_head_takes_plain_features(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = digits[0][:400], digits[1][:400]
    problem = pose(x.split(100), y, 10)
    weight = fit(problem, 1e-3)
    inside = torch.cat([problem.standard(chunk) for chunk in problem.chunks]) @ weight[:, :-1].T + weight[:, -1]
    torch.testing.assert_close(plain_head(problem, weight).scores(x), inside, rtol=0, atol=1e-9)


def test_search_finds_a_strength_between_the_decades(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = digits
    problem = pose(x[:200].split(64), y[:200], 10)

    def trial(l2: float, heads: Sequence[Head]) -> Row:
        right, loss = judge(heads[0].scores, x[200:900].split(64), y[200:900])
        return {"l2": l2, "top1": right / 700, "loss": loss}

    rows, best = search([problem], trial, most_right, NEARLY_FLAT)
    strengths = [row["l2"] for row in rows]
    assert len(rows) <= TRIALS
    assert set(DECADES) <= set(strengths)
    assert strengths == sorted(strengths, reverse=True)
    assert best == most_right(rows)
    chosen = best["l2"]
    assert min(abs(np.log10(chosen) - np.log10(other)) for other in strengths if other != chosen) < 0.5
    right, loss = judge(plain_head(problem, fit(problem, chosen)).scores, x[200:900].split(50), y[200:900])
    assert abs(right - 700 * best["top1"]) <= 1.01  # of the warm start's last digits
    assert right > 700 * rows[0]["top1"] and right >= 700 * rows[-1]["top1"]  # neither end of the range is better
    assert loss < min(rows[0]["loss"], rows[-1]["loss"])


def test_of_equal_accuracies_the_least_loss_is_chosen() -> None:
    rows = [
        {"l2": l2, "top1": top1, "loss": loss} for l2, top1, loss in ((1, 0.9, 0.5), (0.1, 0.9, 0.3), (0.01, 0.8, 0.1))
    ]
    assert most_right(rows)["l2"] == 0.1


def test_one_class_is_refused() -> None:
    with pytest.raises(UsageError, match="one class only"):
        pose([torch.randn(5, 3)], torch.ones(5, dtype=torch.int64), 4)


def test_a_feature_that_never_changes_is_harmless() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    x[:, 1] = 7.0
    y = (x[:, 0] > 0).long()
    head = plain_head(problem := pose([x], y, 2), fit(problem, 1e-3))
    assert judge(head.scores, [x], y)[0] == 40
    assert head.weight_KD.isfinite().all()
