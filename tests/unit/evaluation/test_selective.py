"""Risk over coverage: by a loop, and where confidences are equal, by the mean over all orders."""

import itertools

import pytest
import torch

from vitlab.core.runtime import generator
from vitlab.evaluation.selective import risk_coverage


def test_curve_is_the_share_of_mistakes_among_the_surest() -> None:
    confidence = torch.rand(50, generator=generator(0)).double()
    right = torch.rand(50, generator=generator(1)) < 0.7
    order = confidence.argsort(descending=True).tolist()
    expected = [sum(not right[i] for i in order[: n + 1]) / (n + 1) for n in range(50)]
    curve = risk_coverage(confidence, right)
    assert curve.risk_B.tolist() == pytest.approx(expected)
    assert curve.area == pytest.approx(sum(expected) / 50)


def test_equal_confidences_count_as_the_mean_over_all_orders() -> None:
    confidence = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.2]).double()
    right = torch.tensor([True, True, False, False, True])
    curves = []
    for middle in itertools.permutations([1, 2, 3]):
        wrong = [not right[i] for i in (0, *middle, 4)]
        curves.append([sum(wrong[: n + 1]) / (n + 1) for n in range(5)])
    means = [sum(column) / len(curves) for column in zip(*curves, strict=True)]
    assert risk_coverage(confidence, right).risk_B.tolist() == pytest.approx(means)
    shuffled = torch.tensor([3, 0, 4, 2, 1])
    assert risk_coverage(confidence[shuffled], right[shuffled]).risk_B.tolist() == pytest.approx(means)


def test_coverage_is_the_largest_share_within_the_risk() -> None:
    curve = risk_coverage(torch.tensor([0.9, 0.8, 0.7, 0.6]).double(), torch.tensor([True, True, False, True]))
    assert [curve.coverage_at(risk) for risk in (0.0, 0.25, 0.3, 1.0)] == [0.5, 1.0, 1.0, 1.0]


def test_model_that_is_surest_where_it_is_wrong_covers_nothing() -> None:
    curve = risk_coverage(torch.tensor([0.9, 0.1]).double(), torch.tensor([False, True]))
    assert (curve.coverage_at(0.01), curve.coverage_at(0.5)) == (0.0, 1.0)


def test_single_image_is_a_curve() -> None:
    assert risk_coverage(torch.tensor([0.3]).double(), torch.tensor([True])).area == 0
