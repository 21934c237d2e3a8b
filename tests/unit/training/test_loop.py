"""One update per step, the same bits every time however it is cut up, and never a step on numbers that are not finite."""

import dataclasses
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

import pytest
import torch
from config_reads import leaf_paths
from torch import Tensor, nn

from vitlab.core.dist import World
from vitlab.core.runtime import generator
from vitlab.data.augmentation.mixing import MixRule, mix
from vitlab.data.loader import Batch
from vitlab.models.build import build
from vitlab.models.spec import ViTSpec
from vitlab.training import loop
from vitlab.training.ema import start_ema, update_ema
from vitlab.training.loop import NonFinite, StepRecord, StepRule, TrainState, accumulate_gradients, fit, prefetch_batch
from vitlab.training.objective import softmax_losses
from vitlab.training.optim import make_optimizer, optimizer_state
from vitlab.training.precision import grad_scaler
from vitlab.training.recipe import read_recipe, recipe_from_dict
from vitlab.training.rules import OptimName, OptimRule

SMALL = ViTSpec(
    width=16, depth=1, mlp_dim=32, heads=2, patch=4, image_size=(8, 8), in_channels=1, num_classes=5, dropout=0.1
)
STILL = dataclasses.replace(SMALL, dropout=0.0)
ALONE = World(0, 1, torch.device("cpu"))
RULE = StepRule(
    prepare=lambda batch, _: (batch.images, batch.targets),
    losses=lambda _, logits, targets: softmax_losses(logits, targets),
    lr_at=lambda _: 0.01,
    seed=0,
    max_grad_norm=1.0,
)


def batch_at(step: int, size: int = 6) -> Batch:
    images = torch.randn(size, 1, 8, 8, generator=generator(0, step))
    targets = torch.randint(0, 5, (size,), generator=generator(1, step))
    ids = torch.arange(size) + 100 * step
    return Batch(images, targets, torch.ones(size, dtype=torch.bool), ids, ids * 0, ids * 0, torch.arange(size))


def batches(steps: int, first: int = 0) -> Iterator[Batch]:
    return map(batch_at, range(first, steps))


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def start(spec: ViTSpec = SMALL) -> TrainState:
    model = build(spec, seed=0)
    return TrainState(model, model, make_optimizer(model, OptimRule(name="sgd", lr=99.0)))


def train(state: TrainState, given: Iterable[Batch] | int = 4, **changes: Any) -> list[StepRecord]:
    rule = dataclasses.replace(RULE, **changes)
    return list(fit(state, batches(given) if isinstance(given, int) else given, rule, ALONE))


def test_same_seed_gives_the_same_weights_whatever_was_drawn_before() -> None:
    results = []
    for seed in (0, 0, 1):
        state = start()
        torch.rand(seed + 3)
        train(state, seed=seed)
        results.append(bits(state.model))
    assert results[0] == results[1]
    assert results[0] != results[2], "the seed keys the dropout"


def test_step_depends_on_its_number_and_not_on_how_the_run_began() -> None:
    whole, first = start(), start()
    train(whole, 3)
    run = fit(first, batches(9), RULE, ALONE)
    records = []
    for _ in range(3):
        records.append(next(run))
        torch.rand(100)  # what the caller does between steps does not matter
    assert bits(first.model) == bits(whole.model)
    assert [record.step for record in records] == [1, 2, 3]
    assert first.step == 3


def test_run_resumes_at_the_step_of_the_state() -> None:
    whole, parts = start(), start()
    train(whole, 5)
    train(parts, 2)
    records = train(parts, batches(5, first=2))
    assert [record.step for record in records] == [3, 4, 5]
    assert bits(parts.model) == bits(whole.model)


def test_learning_rate_is_the_one_asked_for_at_each_step_times_that_of_the_layer() -> None:
    state = start()
    asked: list[int] = []

    def lr(step: int) -> float:
        asked.append(step)
        return 0.0

    before = bits(state.model)
    records = train(state, 2, lr_at=lr)
    assert bits(state.model) == before, "a rate of zero changes nothing, whatever the optimiser was made with"
    assert [record.lr for record in records] == [0.0, 0.0]
    assert asked == [0, 1]
    state.optimizer = make_optimizer(state.model, OptimRule(lr=1.0, layer_decay=0.5))
    train(state, 1, lr_at=lambda _: 0.25)
    assert {group["lr"] for group in state.optimizer.param_groups} == {0.25, 0.125, 0.0625}


def test_gradient_is_clipped_to_the_limit() -> None:
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    optimizer = torch.optim.SGD([{"params": weight.parameters(), "lr_scale": 1.0}], lr=99.0)
    batch = batch_at(0, 1)._replace(images=torch.ones(1, 1))
    records = train(
        TrainState(weight, weight, optimizer),
        [batch],
        losses=lambda _, out, __: -1000 * out[:, 0],
        lr_at=lambda _: 1.0,
        max_grad_norm=0.25,
    )
    assert weight.weight.item() == pytest.approx(0.25)
    assert records[0].grad_norm == pytest.approx(1000), "the record has the norm before clipping"


@pytest.mark.parametrize(("slope", "moved"), [(0.125, 0.125), (1000.0, 0.25)])
def test_limit_applies_to_the_gradient_and_not_to_its_fp16_scale(slope: float, moved: float) -> None:
    """Clipped before it is unscaled, the gradient would be smaller by the whole loss scale."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    optimizer = torch.optim.SGD([{"params": weight.parameters(), "lr_scale": 1.0}], lr=99.0)
    state = TrainState(weight, weight, optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    records = train(
        state,
        [batch_at(0, 1)._replace(images=torch.ones(1, 1))],
        losses=lambda _, out, __: -slope * out[:, 0],
        lr_at=lambda _: 1.0,
        max_grad_norm=0.25,
    )
    assert weight.weight.item() == pytest.approx(moved)
    assert records[0].grad_norm == pytest.approx(slope)


@pytest.mark.parametrize("warmup", [True, False])
def test_ema_follows_the_weights_from_step_to_step(warmup: bool) -> None:
    state = start()
    state.ema = start_ema(state.model)
    expected = {name: value.clone() for name, value in state.ema.items()}
    rule = dataclasses.replace(RULE, ema_decay=0.999, ema_warmup=warmup)
    for record in fit(state, batches(3), rule, ALONE):
        decay = min(0.999, (1 + record.step) / (10 + record.step)) if warmup else 0.999
        update_ema(expected, state.model.state_dict(), decay)
    assert all(torch.equal(state.ema[name], value) for name, value in expected.items())
    assert any(not torch.equal(value, expected[name]) for name, value in state.model.state_dict().items())


def test_record_has_plausible_speed_waiting_time_and_memory() -> None:
    for record in train(start()):
        assert record.images_per_second > 0
        assert 0 <= record.data_wait_frac <= 1
        assert 0 < record.memory_gb < 1000
        assert all(math.isfinite(value) for value in dataclasses.astuple(record))


def test_dropout_draws_anew_at_every_step() -> None:
    state, seen = start(), list[Tensor]()
    nn.init.normal_(state.model.get_parameter("head.weight"), generator=generator(0))

    def losses(_: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        seen.append(logits.detach())
        return softmax_losses(logits, targets)

    train(state, [batch_at(0), batch_at(0)], losses=losses, lr_at=lambda _: 0.0)
    assert not torch.equal(seen[0], seen[1])


def test_model_is_trained_in_training_mode() -> None:
    state = start()
    state.model.eval()
    train(state, 1)
    assert state.model.training


# --- numbers that are none --------------------------------------------------------------------------------------------


def fused(spec: ViTSpec = SMALL) -> TrainState:
    """With the kernel that a GPU has: a flag on the device says whether to leave the weights alone."""
    model = build(spec, seed=0)
    return TrainState(
        model, model, torch.optim.AdamW([{"params": list(model.parameters()), "lr_scale": 1.0}], fused=True)
    )


@pytest.mark.parametrize("begin", [start, fused])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_loss_that_is_not_finite_stops_with_the_weights_bit_for_bit(
    poison: float, begin: Callable[[], TrainState]
) -> None:
    state = begin()
    state.ema = start_ema(state.model)
    seen: list[tuple[dict[str, bytes], dict[str, bytes]]] = []

    def losses(_: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        assert state.ema is not None
        seen.append((bits(state.model), {name: value.numpy().tobytes() for name, value in state.ema.items()}))
        return softmax_losses(logits, targets) * (poison if len(seen) == 3 else 1)

    with pytest.raises(NonFinite, match=r"non-finite.*step 3") as caught:
        train(state, losses=losses, ema_decay=0.9, eval_every=10**9)
    assert (bits(state.model), {name: value.numpy().tobytes() for name, value in state.ema.items()}) == seen[2]
    assert seen[2][0] != seen[1][0]
    assert (state.step, caught.value.step, caught.value.ids) == (2, 3, batch_at(2).ids.tolist())


def test_bad_step_does_not_keep_the_optimiser_from_a_later_one() -> None:
    state, bad = fused(), batch_at(0)._replace(images=batch_at(0).images * math.nan)
    with pytest.raises(NonFinite):
        train(state, [bad])
    before = bits(state.model)
    state.optimizer.zero_grad()
    state.model(batch_at(0).images).sum().backward()
    state.optimizer.step()
    assert bits(state.model) != before


def test_images_of_a_finished_step_are_gone_when_the_next_forward_pass_begins() -> None:
    state, seen = fused(), list[weakref.ref[Tensor]]()

    def prepare(batch: Batch, _step: int) -> tuple[Tensor, Tensor]:
        images_BCYX = batch.images.clone()
        seen.append(weakref.ref(images_BCYX))
        return images_BCYX, batch.targets

    alive: list[int] = []
    state.model.register_forward_pre_hook(lambda *_: alive.append(sum(one() is not None for one in seen)))
    train(state, 4, prepare=prepare, eval_every=10**9)
    assert alive == [1] * 4, "memory for one batch of images"


@pytest.mark.parametrize(("begin", "alone", "passes"), [(fused, True, 2), (fused, False, 1), (start, True, 1)])
def test_next_forward_pass_is_sent_before_the_record_where_nobody_touches_the_weights(
    begin: Callable[[], TrainState], alone: bool, passes: int
) -> None:
    state, sent = begin(), list[int]()
    state.model.register_forward_pre_hook(lambda *_: sent.append(1))
    record = next(fit(state, batches(3), dataclasses.replace(RULE, eval_every=10**9 if alone else 1), ALONE))
    assert (record.step, state.step, len(sent)) == (1, 1, passes)


def test_finite_loss_with_a_gradient_that_is_not_stops_too() -> None:
    state = start()
    before = bits(state.model)
    with pytest.raises(NonFinite, match=r"step 1\b.*loss 0\.0.*gradient norm (nan|inf)"):
        train(state, losses=lambda _, logits, __: (logits - logits.detach()).square().sum(dim=1).sqrt())
    assert bits(state.model) == before


def test_update_that_is_sent_ahead_is_the_one_that_waits_to_the_bit() -> None:
    ahead, plain = fused(), fused()
    train(ahead, 3, eval_every=2)  # the next forward pass is sent ahead too, but once
    plain.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)  # with it, updates wait until the numbers were looked at
    train(plain, 3)
    assert bits(ahead.model) == bits(plain.model)
    assert bits(ahead.model) != bits(start().model)


@pytest.mark.parametrize("begin", [start, fused])
@pytest.mark.parametrize("where", ["pixel", "weight"])
def test_single_nan_anywhere_stops_before_the_update(where: str, begin: Callable[[], TrainState]) -> None:
    state = begin()
    batch = batch_at(0)
    if where == "pixel":
        batch.images[3, 0, 2, 2] = math.nan
    else:
        state.model.get_parameter("head.bias").data[0] = math.nan
    before = bits(state.model)
    with pytest.raises(NonFinite) as caught:
        train(state, [batch])
    assert bits(state.model) == before
    assert caught.value.ids == list(range(6))


def test_half_precision_leaves_an_overflowing_step_out_and_lowers_its_scale() -> None:
    state = start(STILL)
    scaler = state.scaler = grad_scaler("fp16", ALONE.device)
    before, high = bits(state.model), scaler.get_scale()
    state.ema = {name: value + 1 for name, value in start_ema(state.model).items()}  # apart from the weights
    ema = {name: value.clone() for name, value in state.ema.items()}
    calls: list[int] = []

    def losses(_: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        steep = 1e35 if len(calls) == 1 else 1.0  # times the scale of 65,536 this is not a float32 any more
        return softmax_losses(logits, targets) + steep * (logits - logits.detach()).sum(dim=1)

    records = train(state, 1, losses=losses, precision="fp16", ema_decay=0.9)
    assert records[0].grad_norm is None and math.isfinite(records[0].loss)
    assert bits(state.model) == before
    assert scaler.get_scale() == high / 2
    assert all(torch.equal(state.ema[name], value) for name, value in ema.items())
    assert math.isfinite(train(state, batches(2, 1), losses=losses, precision="fp16")[0].grad_norm or math.nan)
    assert bits(state.model) != before


def test_hint_names_only_config_keys_that_exist() -> None:
    with pytest.raises(NonFinite) as caught:
        train(start(), losses=lambda _, logits, __: logits.sum(dim=1) * math.nan)
    named = set(re.findall(r"\b(?:optim|train|data|model)\.\w+", str(caught.value)))
    assert named
    assert named <= leaf_paths(recipe_from_dict(read_recipe("demo-digits"), 10))


# --- a batch in pieces ------------------------------------------------------------------------------------------------


def _mixed(batch: Batch, step: int) -> tuple[Tensor, Tensor]:
    targets = nn.functional.one_hot(batch.targets, 5).float()
    return mix(batch.images, targets, batch.positions, MixRule(mixup=0.5, cutmix=1.0), seed=0, step=step, total=8)


def _with_bad(batch: Batch, bad: tuple[int, ...]) -> Batch:
    valid = torch.tensor([i not in bad for i in range(len(batch.ids))])
    return batch._replace(valid=valid, images=torch.where(valid.view(-1, 1, 1, 1), batch.images, 0))


Prepare = Callable[[Batch, int], tuple[Tensor, Tensor]]


def gradients(batch: Batch, micro_batch: int, prepare: Prepare) -> tuple[float, dict[str, Tensor]]:
    state = start(STILL)
    train(state, 2)  # a head of zeros would pass no gradient to the body
    state.scaler = grad_scaler("fp32", ALONE.device)
    rule = dataclasses.replace(RULE, prepare=prepare, micro_batch=micro_batch)
    shares = accumulate_gradients(state, prefetch_batch(batch, rule, state.step), rule, ALONE)
    loss = sum(share.item() for share in shares)
    return loss, {name: p.grad.clone() for name, p in state.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "bad",
    [(0, 5), *(pytest.param(bad, marks=pytest.mark.slow) for bad in ((), (0, 1, 2, 3), tuple(range(8))))],
    ids=str,
)
@pytest.mark.parametrize("mixing", [False, True], ids=["plain", "mixed"])
def test_micro_batches_change_neither_loss_nor_gradients(mixing: bool, bad: tuple[int, ...]) -> None:
    batch, prepare = _with_bad(batch_at(0, 8), bad), _mixed if mixing else RULE.prepare
    loss, grads = gradients(batch, 0, prepare)
    for size in (2, 4, 6, 8, 100) if mixing else (1, 2, 3, 4, 8, 100):
        other_loss, other = gradients(batch, size, prepare)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert other.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(other[name], grad, rtol=1e-6, atol=1e-6 * float(grad.abs().max()), msg=name)
    assert (loss == 0) == (len(bad) == 8)


def test_bad_image_counts_for_nothing_and_the_others_fully() -> None:
    whole = batch_at(0, 8)
    without = Batch(*(field[torch.tensor([1, 2, 3, 4, 6, 7])] for field in whole))
    loss, grads = gradients(_with_bad(whole, (0, 5)), 0, RULE.prepare)
    other_loss, other = gradients(without, 0, RULE.prepare)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(other[name], grad, rtol=1e-5, atol=1e-6 * float(grad.abs().max()))


@pytest.mark.parametrize("name", get_args(OptimName))
def test_an_update_that_was_sent_before_the_loss_was_read_is_taken_back(
    name: OptimName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which computes the update while Python still waits for the loss."""
    ahead, sent = loop._update_ahead, list[bool]()

    def noted(state: TrainState, metrics: Tensor) -> Callable[[], None] | None:
        undo = ahead(state, metrics)
        sent.append(undo is not None)
        return undo

    monkeypatch.setattr(loop, "_computes_ahead", lambda _: True)
    monkeypatch.setattr(loop, "_update_ahead", noted)
    model = build(STILL, seed=0)
    state = TrainState(model, model, make_optimizer(model, OptimRule(name=name, lr=0.01)))
    bad = batch_at(2)._replace(images=torch.full((6, 1, 8, 8), math.nan))

    def values() -> list[Tensor]:
        return [*model.state_dict().values(), *optimizer_state(state.optimizer, model).values()]

    kept: list[Tensor] = []
    with pytest.raises(NonFinite, match="step 3"):
        for _ in fit(state, [*batches(2), bad], dataclasses.replace(RULE, eval_every=10**9), ALONE):
            kept = [value.clone() for value in values()]
    assert sent == [False, True, True], "the first one waits: there is nothing yet to put back"
    assert kept and all(torch.equal(now, then) for now, then in zip(values(), kept, strict=True))
