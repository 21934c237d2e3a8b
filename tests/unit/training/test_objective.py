"""Every loss against its formula in NumPy's float64, one number per image."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlab.core import config
from vitlab.core.errors import UsageError
from vitlab.training.objective import (
    Objective,
    class_weights,
    distillation_losses,
    log_prior_of,
    losses,
    sigmoid_losses,
    softmax_losses,
    weights_of,
)
from vitlab.training.rules import Distillation

B, K = 6, 5
DRAW = torch.Generator().manual_seed(0)
LOGITS = 4 * torch.randn(B, K, generator=DRAW)
TEACHER = 4 * torch.randn(B, K, generator=DRAW)
LABELS = torch.randint(K, (B,), generator=DRAW)
SHARES = torch.rand(B, K, generator=DRAW).softmax(dim=1)
SEVERAL = (torch.rand(B, K, generator=DRAW) < 0.4).float()
WEIGHTS = torch.tensor([0.5, 1.0, 3.0, 2.0, 0.1])


def wide(value: Tensor) -> Any:
    return value.double().numpy()


def one_hot(targets: Tensor) -> Any:
    return np.eye(K)[targets.numpy()] if targets.ndim == 1 else wide(targets)


def log_softmax(logits: Any) -> Any:
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("targets", [LABELS, SHARES], ids=["labels", "shares"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["even", "weighted"])
def test_softmax(targets: Tensor, smoothing: float, weights: Tensor | None) -> None:
    y = one_hot(targets)
    expected = -((1 - smoothing) * y + smoothing / K)
    expected = (expected * log_softmax(wide(LOGITS))).sum(axis=1) * (1 if weights is None else y @ wide(weights))
    np.testing.assert_allclose(softmax_losses(LOGITS, targets, smoothing, weights).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("targets", [LABELS, SHARES, SEVERAL], ids=["labels", "shares", "several"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["even", "weighted"])
def test_sigmoid(targets: Tensor, smoothing: float, weights: Tensor | None) -> None:
    y = (1 - smoothing) * one_hot(targets) + smoothing / K
    yes = 1 / (1 + np.exp(-wide(LOGITS)))
    weight = 1 if weights is None else wide(weights)
    expected = -(weight * y * np.log(yes) + (1 - y) * np.log(1 - yes)).sum(axis=1)
    np.testing.assert_allclose(sigmoid_losses(LOGITS, targets, smoothing, weights).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("targets", [LABELS, SHARES], ids=["labels", "shares"])
@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_logit_adjustment(targets: Tensor, tau: float) -> None:
    """Menon et al. 2021, eq. 10: -log softmax(f + tau log pi), with pi the share of each class in the training set."""
    counts = np.array([50, 20, 5, 3, 2])
    adjusted = wide(LOGITS) + tau * np.log(counts / counts.sum())
    expected = -(one_hot(targets) * log_softmax(adjusted)).sum(axis=1)
    rule = Objective(logit_adjustment=tau)
    prior = log_prior_of(rule, torch.from_numpy(counts))
    np.testing.assert_allclose(losses(rule, LOGITS, targets, log_prior_K=prior).numpy(), expected, rtol=1e-5)


def test_adjusted_logits_stay_wide_and_the_teacher_sees_those_that_are_used() -> None:
    prior = torch.tensor([0.7, 0.1, 0.1, 0.05, 0.05]).log()
    rule = Objective(logit_adjustment=1.0, distillation=Distillation(weight=1.0))
    found = losses(rule, LOGITS, LABELS, log_prior_K=prior, teacher_BK=TEACHER)
    torch.testing.assert_close(found, distillation_losses(LOGITS, TEACHER, 1.0))
    assert losses(Objective(logit_adjustment=1.0), LOGITS.half(), LABELS, log_prior_K=prior).dtype == torch.float32


def test_class_without_images_is_adjusted_as_if_it_had_one() -> None:
    prior = log_prior_of(Objective(logit_adjustment=1.0), torch.tensor([3, 0]))
    assert prior is not None
    torch.testing.assert_close(prior, torch.tensor([0.75, 0.25]).log())
    assert log_prior_of(Objective(), torch.tensor([3, 0])) is None


def test_class_weights_by_hand_are_used_as_they_are() -> None:
    counts, classes = torch.tensor([90, 9, 1]), ("ant", "bee", "wasp")
    for given, wanted in (((1.0, 2.0, 5.0), [1, 2, 5]), ({"wasp": 4.0}, [1, 1, 4]), ({}, [1, 1, 1])):
        found = weights_of(Objective(class_weights=given), classes, counts)  # pyright: ignore[reportArgumentType]
        assert found is not None
        assert found.tolist() == wanted
    assert weights_of(Objective(), classes, counts) is None
    automatic = weights_of(Objective(class_weights="auto"), classes, counts)
    assert automatic is not None
    assert torch.equal(automatic, class_weights(counts))


def test_class_weights_that_do_not_fit_the_classes_are_refused() -> None:
    counts, classes = torch.tensor([90, 9, 1]), ("ant", "bee", "wasp")
    with pytest.raises(UsageError, match=r"wsap.\s*Nearest: wasp"):
        weights_of(Objective(class_weights={"wsap": 2.0}), classes, counts)
    with pytest.raises(UsageError, match=r"2 numbers.*3 classes"):
        weights_of(Objective(class_weights=(1.0, 2.0)), classes, counts)


@pytest.mark.parametrize(
    "given", ["sometimes", [1.0, -1.0], [0.0, 0.0], [1.0, math.inf], ["a"], {"ant": "much"}, 3.0, []]
)
def test_class_weights_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"objective\.class_weights"):
        config.from_dict(Objective, {"class_weights": given}, "objective.")


@pytest.mark.parametrize("given", ["none", "auto", [1.0, 2.5], {"ant": 1.0, "hooded crow.x": 2.0}])
def test_class_weights_survive_a_file(given: Any) -> None:
    rule = config.from_dict(Objective, {"class_weights": given}, "objective.")
    text = config.dump_toml({"objective": config.to_dict(rule)})
    again = config.parse_toml(text, "text")["objective"]
    assert again["class_weights"] == given
    assert config.from_dict(Objective, again) == rule


@pytest.mark.parametrize("wrong", [{"logit_adjustment": -1.0}, {"logit_adjustment": math.inf}])
def test_adjustment_out_of_range_or_with_sigmoid_is_refused(wrong: dict[str, Any]) -> None:
    for table in (wrong, {"logit_adjustment": 1.0, "kind": "sigmoid"}):
        with pytest.raises(UsageError, match=r"objective\.logit_adjustment"):
            config.from_dict(Objective, table, "objective.")


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distillation(temperature: float) -> None:
    student, teacher = (log_softmax(wide(logits) / temperature) for logits in (LOGITS, TEACHER))
    expected = temperature**2 * (np.exp(teacher) * (teacher - student)).sum(axis=1)
    np.testing.assert_allclose(distillation_losses(LOGITS, TEACHER, temperature).numpy(), expected, rtol=1e-5)


def test_student_that_answers_like_its_teacher_has_nothing_to_learn() -> None:
    student = LOGITS.clone().requires_grad_()
    loss = distillation_losses(student, LOGITS, 2.0)
    loss.sum().backward()
    assert loss.abs().max() < 1e-6
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-6


def test_teacher_gets_no_gradient() -> None:
    teacher = TEACHER.clone().requires_grad_()
    student = LOGITS.clone().requires_grad_()
    distillation_losses(student, teacher, 1.0).sum().backward()
    assert teacher.grad is None


@pytest.mark.parametrize("classes", [2, 10, 1000, 21843])
def test_zero_head_gives_exactly_ln_k(classes: int) -> None:
    expected = torch.tensor([math.log(classes)] * 3)
    found = softmax_losses(torch.zeros(3, classes), torch.tensor([0, 1, classes - 1]))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "autocast"])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_result_is_float32_whatever_the_model_computed_in(kind: Any, inside: bool, dtype: torch.dtype) -> None:
    narrow = LOGITS.to(dtype)
    rule = Objective(kind=kind, class_weights="auto")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        found = losses(rule, narrow, SHARES, class_weights_K=WEIGHTS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, losses(rule, narrow.float(), SHARES, class_weights_K=WEIGHTS), rtol=1e-6, atol=0)


def test_rule_puts_the_parts_together() -> None:
    rule = Objective(label_smoothing=0.1, class_weights="auto", distillation=Distillation(weight=0.25, temperature=2.0))
    found = losses(rule, LOGITS, LABELS, class_weights_K=WEIGHTS, teacher_BK=TEACHER)
    expected = 0.75 * softmax_losses(LOGITS, LABELS, 0.1, WEIGHTS) + 0.25 * distillation_losses(LOGITS, TEACHER, 2.0)
    torch.testing.assert_close(found, expected)
    assert config.from_dict(Objective, config.parse_toml(config.dump_toml(config.to_dict(rule)), "here")) == rule


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"kind": "sigmoid", "distillation": {"weight": 0.5}}, "objective.kind=softmax"),
        ({"distillation": {"weight": 1.5}}, "distillation.weight"),
        ({"distillation": {"temperature": 0.0}}, "distillation.temperature"),
    ],
)
def test_impossible_rules_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        config.from_dict(Objective, settings)


def test_class_weights_are_inverse_frequencies_with_mean_one_over_images() -> None:
    counts = torch.tensor([10, 0, 40, 50])
    found = class_weights(counts)
    torch.testing.assert_close(found, torch.tensor([100 / 30, 1.0, 100 / 120, 100 / 150]))
    assert (found * counts).sum() / counts.sum() == pytest.approx(1)
    assert torch.equal(class_weights(torch.tensor([7, 7])), torch.ones(2))
    with pytest.raises(UsageError, match="at least one image"):
        class_weights(torch.zeros(3))
