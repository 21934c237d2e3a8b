"""Running statistics of batch norm: part of the state that an update changes, and of nothing else."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from slow_cases import slow_after
from torch import Tensor, nn

from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator
from vitlab.data.loader import Batch
from vitlab.models.build import build
from vitlab.models.efficientnet_spec import EfficientNetSpec
from vitlab.models.spec import AxialResNetSpec, BiTSpec, ModelSpec, bit_trunk
from vitlab.training.assemble import recompute_blocks
from vitlab.training.ema import start_ema, trained_weights, update_ema
from vitlab.training.loop import NonFinite, StepRule, TrainState, fit
from vitlab.training.microbatch import largest_that_runs
from vitlab.training.objective import softmax_losses
from vitlab.training.optim import OptimRule, make_optimizer
from vitlab.training.precision import grad_scaler
from vitlab.training.running_stats import RunningStats

TINY = EfficientNetSpec(
    stem_width=4,
    widths=(4, 4, 8, 8, 8, 8, 8),
    depths=(1, 2, 1, 1, 1, 1, 1),
    last_width=16,
    image_size=(16, 16),
    num_classes=5,
)
# Each family that has batch norm; the last map of 16x16 images is a single position in all of them.
FAMILIES: dict[str, ModelSpec] = {
    "efficientnet": TINY,
    "axial-resnet": AxialResNetSpec(stages=(1, 1, 1), width=4, heads=2, image_size=(16, 16), num_classes=5),
    "bit-non-local": BiTSpec(
        trunk=dataclasses.replace(bit_trunk((1, 2, 2), 1), non_local=(1, 2)), image_size=(16, 16), num_classes=5
    ),
}
ALONE = World(0, 1, torch.device("cpu"))
RULE = StepRule(
    prepare=lambda batch, _: (batch.images, batch.targets),
    losses=lambda _, logits, targets: softmax_losses(logits, targets),
    lr_at=lambda _: 0.01,
    seed=0,
    max_grad_norm=1.0,
    eval_every=10
    ** 9,  # nobody uses the model between steps, so the next forward pass may begin early where that is safe
)


def batch_at(step: int, size: int = 6) -> Batch:
    images = torch.randn(size, 3, 16, 16, generator=generator(0, step)) + step
    targets = torch.randint(0, 5, (size,), generator=generator(1, step))
    ids = torch.arange(size)
    return Batch(images, targets, torch.ones(size, dtype=torch.bool), ids, ids * 0, ids * 0, ids)


def batches(steps: int, first: int = 0) -> Iterator[Batch]:
    return map(batch_at, range(first, steps))


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def start(spec: ModelSpec = TINY, train: str = "full") -> TrainState:
    model = build(spec, seed=0)
    assert model.head is not None
    nn.init.normal_(model.head.weight, std=0.1, generator=generator(2))  # a zero head sends no gradient further back
    return TrainState(model, model, make_optimizer(model, OptimRule(name="sgd", lr=0.01, train=train)))


def fused(spec: ModelSpec = TINY) -> TrainState:
    """As on a GPU, where the next forward pass begins before the caller sees the record."""
    state = start(spec)
    state.optimizer = torch.optim.AdamW([{"params": list(state.model.parameters()), "lr_scale": 1.0}], fused=True)
    return state


# BiT is by far the widest, and what its non-local blocks have are the batch norms that the others have too.
every_family = pytest.mark.parametrize("spec", slow_after(2, FAMILIES.values()), ids=FAMILIES.keys())


@every_family
@pytest.mark.parametrize("begin", [start, fused])
def test_what_a_caller_sees_after_a_step_has_seen_that_many_batches(begin: Any, spec: ModelSpec) -> None:
    state = begin(spec)
    for record in fit(state, batches(4), RULE, ALONE):
        counts = {int(v) for name, v in state.model.named_buffers() if name.endswith("num_batches_tracked")}
        assert counts == {record.step}, "a snapshot taken now must not hold the next batch"


@every_family
def test_run_that_resumes_from_a_snapshot_has_the_same_bits(spec: ModelSpec) -> None:
    whole, parts, again = fused(spec), fused(spec), fused(spec)
    list(fit(whole, batches(5), RULE, ALONE))
    for record in fit(parts, batches(5), RULE, ALONE):
        if record.step == 2:
            again.model.load_state_dict(parts.model.state_dict())
            again.optimizer.load_state_dict(parts.optimizer.state_dict())
            again.step = 2
            break
    list(fit(again, batches(5, first=2), RULE, ALONE))
    assert same(dict(again.model.state_dict()), dict(whole.model.state_dict()))


@every_family
@pytest.mark.parametrize("begin", [start, fused])
@pytest.mark.parametrize("where", ["images", "loss"])
def test_step_that_is_not_finite_leaves_the_statistics_as_they_were(begin: Any, where: str, spec: ModelSpec) -> None:
    state, before = begin(spec), dict[str, Tensor]()

    def prepare(batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        if step == 2 and where == "images":
            batch.images[1, 0, 3, 3] = math.inf
        return batch.images, batch.targets

    def losses(_: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        return softmax_losses(logits, targets) * (math.nan if state.step == 2 and where == "loss" else 1)

    rule = dataclasses.replace(RULE, prepare=prepare, losses=losses)
    with pytest.raises(NonFinite, match="step 3"):
        for _ in fit(state, batches(4), rule, ALONE):
            before = statistics(state.model)
    assert same(statistics(state.model), before)
    assert all(bool(value.isfinite().all()) for value in before.values())


def test_step_that_overflows_in_half_precision_is_skipped_with_its_statistics() -> None:
    state = start()
    state.scaler = grad_scaler("fp16", ALONE.device)
    before = statistics(state.model)
    steep = dataclasses.replace(
        RULE,
        precision="fp16",
        losses=lambda _, logits, targets: (
            softmax_losses(logits, targets) + 1e35 * (logits - logits.detach()).sum(dim=1)
        ),
    )
    records = list(fit(state, batches(1), steep, ALONE))
    assert records[0].grad_norm is None and same(statistics(state.model), before)
    list(fit(state, batches(2, first=1), dataclasses.replace(RULE, precision="fp16"), ALONE))
    assert not same(statistics(state.model), before)


@every_family
def test_trying_micro_batches_leaves_no_trace(spec: ModelSpec) -> None:
    state = start(spec)
    before = statistics(state.model)
    assert largest_that_runs(state, RULE, batch_at(0), ALONE, 4, room=0) == 4
    assert state.model.training and same(statistics(state.model), before)


@every_family
@pytest.mark.parametrize("steps", [1, 3])
def test_recomputing_counts_each_batch_once_and_changes_no_bit(steps: int, spec: ModelSpec) -> None:
    plain, again = start(spec), start(spec)
    recompute_blocks(again.model)  # pyright: ignore[reportArgumentType]
    for state in (plain, again):
        list(fit(state, batches(steps), RULE, ALONE))
    assert same(dict(again.model.state_dict()), dict(plain.model.state_dict()))
    counts = {int(v) for name, v in again.model.named_buffers() if name.endswith("num_batches_tracked")}
    assert counts == {steps}


@pytest.mark.parametrize(
    ("family", "train", "moving"),
    [
        ("efficientnet", "head", ()),
        ("efficientnet", "last:2", ("stages.5.", "stages.6.", "norm.")),
        ("axial-resnet", "head", ()),
        ("axial-resnet", "last:1", ("stages.2.",)),
        pytest.param("bit-non-local", "head", (), marks=pytest.mark.slow),
        ("bit-non-local", "last:1", ("trunk.stages.2.",)),
    ],
)
def test_frozen_parts_keep_their_statistics_and_the_ema_of_them(
    family: str, train: str, moving: tuple[str, ...]
) -> None:
    state = start(FAMILIES[family], train)
    state.ema = start_ema(state.model)
    before, averaged = statistics(state.model), {name: value.clone() for name, value in state.ema.items()}
    list(fit(state, batches(2), dataclasses.replace(RULE, ema_decay=0.5), ALONE))
    moved = {name for name, value in statistics(state.model).items() if not torch.equal(value, before[name])}
    expected = {name for name in before if moving and name.startswith(moving)}
    assert bool(expected) == bool(moving)
    assert moved == expected
    sources = trained_weights(state.model)
    assert expected <= sources.keys() and not sources.keys() & (before.keys() - expected)
    assert {name for name in before if not torch.equal(state.ema[name], averaged[name])} == expected


def test_ema_includes_statistics_and_copies_counts() -> None:
    model = build(TINY, seed=0)
    ema = start_ema(model)
    name, count = "norm.running_mean", "norm.num_batches_tracked"
    assert ema[count].dtype == torch.int64 and ema[name].dtype == torch.float32
    model.get_buffer(name).fill_(8.0)
    model.get_buffer(count).fill_(2**24 + 1)  # more than a float32 can count
    update_ema(ema, trained_weights(model), 0.75)
    assert torch.equal(ema[name], torch.full_like(ema[name], 2.0))
    assert int(ema[count]) == 2**24 + 1 and ema[count].dtype == torch.int64


@every_family
def test_one_image_whose_features_are_one_position_is_refused_in_words(spec: ModelSpec) -> None:
    with pytest.raises(UsageError, match="batch norm"):
        list(fit(start(spec), [batch_at(0, size=1)], RULE, ALONE))
    with pytest.raises(UsageError, match="batch norm"):
        list(fit(start(spec), [batch_at(0, size=5)], dataclasses.replace(RULE, micro_batch=2), ALONE))


def test_models_without_batch_norm_have_nothing_to_keep() -> None:
    stats = RunningStats(nn.Linear(2, 2))
    assert not stats
    with stats.preserved():
        stats.average(World(0, 2, torch.device("cpu")))
