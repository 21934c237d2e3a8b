"""One update per step, the same bits every time, and never a step on numbers that are not finite."""

import dataclasses
import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vitlab.core.config import leaf_paths
from vitlab.core.errors import VitlabError
from vitlab.core.runtime import generator
from vitlab.models.build import build
from vitlab.models.spec import ViTSpec
from vitlab.runs.recipe import load_recipe
from vitlab.training.loop import Batch, StepRecord, fit
from vitlab.training.objective import softmax_cross_entropy

SMALL = ViTSpec(
    width=16, depth=1, mlp_dim=32, heads=2, patch=4, image_size=(8, 8), in_channels=1, num_classes=5, dropout=0.1
)


def batch_at(step: int) -> Batch:
    images = torch.randn(6, 1, 8, 8, generator=generator(0, step))
    return images, torch.randint(0, 5, (6,), generator=generator(1, step))


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def train(
    model: nn.Module,
    steps: int = 4,
    *,
    batches: Callable[[int], Batch] = batch_at,
    objective: Callable[[Tensor, Tensor], Tensor] = softmax_cross_entropy,
    lr: Callable[[int], float] = lambda step: 0.01,  # noqa: ARG005
    seed: int = 0,
    max_grad_norm: float = 1.0,
) -> list[StepRecord]:
    optimizer = torch.optim.SGD(model.parameters(), lr=99.0)
    return list(fit(model, optimizer, batches, objective, lr, steps=steps, seed=seed, max_grad_norm=max_grad_norm))


def test_same_seed_gives_the_same_weights_whatever_was_drawn_before() -> None:
    results = []
    for seed in (0, 0, 1):
        model = build(SMALL, seed=0)
        torch.rand(seed + 3)
        train(model, seed=seed)
        results.append(bits(model))
    assert results[0] == results[1]
    assert results[0] != results[2], "the seed keys the dropout"


def test_step_depends_on_its_number_and_not_on_how_the_run_began() -> None:
    whole = build(SMALL, seed=0)
    train(whole, steps=3)
    first = build(SMALL, seed=0)
    optimizer = torch.optim.SGD(first.parameters(), lr=1.0)
    run = fit(first, optimizer, batch_at, softmax_cross_entropy, lambda _: 0.01, steps=9, seed=0, max_grad_norm=1.0)
    records = []
    for _ in range(3):
        records.append(next(run))
        torch.rand(100)  # what the caller does between steps does not matter
    assert bits(first) == bits(whole)
    assert [record.step for record in records] == [1, 2, 3]


def test_learning_rate_is_the_one_asked_for_at_each_step() -> None:
    model = build(SMALL, seed=0)
    asked: list[int] = []

    def lr(step: int) -> float:
        asked.append(step)
        return 0.0 if step < 2 else 0.5

    before = bits(model)
    records = train(model, steps=2, lr=lr)
    assert bits(model) == before, "a rate of zero changes nothing, whatever the optimiser was made with"
    assert [record.lr for record in records] == [0.0, 0.0]
    assert asked == [0, 1]


def test_gradient_is_clipped_to_the_limit() -> None:
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    batch = (torch.tensor([[1.0]]), torch.tensor([0]))
    records = train(
        weight,
        steps=1,
        batches=lambda _: batch,
        objective=lambda out, _: -1000 * out.sum(),
        lr=lambda _: 1.0,
        max_grad_norm=0.25,
    )
    assert weight.weight.item() == pytest.approx(0.25)
    assert records[0].grad_norm == pytest.approx(1000), "the record tells the norm before clipping"


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_loss_that_is_not_finite_stops_with_the_weights_bit_for_bit(poison: float) -> None:
    model = build(SMALL, seed=0)
    seen: list[dict[str, bytes]] = []

    def objective(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(bits(model))
        return softmax_cross_entropy(logits, labels) * (poison if len(seen) == 3 else 1)

    with pytest.raises(VitlabError, match="training left the numbers at step 3"):
        train(model, objective=objective)
    assert bits(model) == seen[2]
    assert seen[2] != seen[1]


def test_finite_loss_with_a_gradient_that_is_not_stops_too() -> None:
    model = build(SMALL, seed=0)
    before = bits(model)
    with pytest.raises(VitlabError, match=r"step 1: loss 0\.0, gradient norm (nan|inf)"):
        train(model, objective=lambda logits, _: (logits - logits.detach()).square().sum().sqrt())
    assert bits(model) == before


def test_hint_names_only_config_keys_that_exist() -> None:
    with pytest.raises(VitlabError) as caught:
        train(build(SMALL, seed=0), objective=lambda logits, _: logits.sum() * float("nan"))
    named = set(re.findall(r"\b(?:optim|train|data|model)\.\w+", str(caught.value)))
    assert named
    assert named <= leaf_paths(load_recipe("demo-digits"))


def test_record_tells_speed_and_waiting_in_sane_numbers() -> None:
    for record in train(build(SMALL, seed=0)):
        assert record.images_per_second > 0
        assert 0 <= record.data_wait_frac <= 1
        assert all(math.isfinite(value) for value in dataclasses.astuple(record))


def test_model_is_trained_in_training_mode() -> None:
    model = build(SMALL, seed=0).eval()
    train(model, steps=1)
    assert model.training


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_zero_head_starts_at_exactly_ln_k(classes: int) -> None:
    model = build(dataclasses.replace(SMALL, num_classes=classes, dropout=0.0), seed=0)
    images, labels = batch_at(0)
    loss = softmax_cross_entropy(model(images), labels.clamp(max=classes - 1))
    assert loss.item() == pytest.approx(math.log(classes), rel=1e-6)


def test_label_smoothing_mixes_in_the_uniform_distribution() -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    log_p = logits.log_softmax(dim=1)
    expected = -(0.9 * log_p[range(4), labels] + 0.1 * log_p.mean(dim=1)).mean()
    torch.testing.assert_close(softmax_cross_entropy(logits, labels, 0.1), expected)
