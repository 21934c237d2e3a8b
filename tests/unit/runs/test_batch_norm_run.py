"""Runs of a model with batch norm: resumed, averaged, recomputed or frozen, its running statistics are exact."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow_after

from vitlab.core import fsio
from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.parts import Parts
from vitlab.models.build import build
from vitlab.training import checkpoint, health
from vitlab.training.assemble import require_possible
from vitlab.training.memory import estimate_memory
from vitlab.training.microbatch import describe_update, estimate_microbatch, without_lone_image
from vitlab.training.recipe import Recipe, recipe_from_dict, with_changes
from vitlab.weights.bundle import read_bundle

Call = Callable[..., Any]
TABLE: dict[str, Any] = {
    "title": "Noise",
    "data": {"source": "noise", "image_size": [16, 16], "mode": "L"},
    "model": {
        "kind": "efficientnet",
        "stem_width": 4,
        "widths": [4, 4, 8, 8, 8, 8, 8],
        "depths": [1, 2, 1, 1, 1, 1, 1],
        "last_width": 16,
    },
    "train": {"steps": 4, "batch_size": 8, "save_every": "50%"},
    "optim": {"lr": 1e-2},
}
AVERAGED = ("train.ema=0.9", "train.eval_every=75%")


def recipe(*overrides: str) -> Recipe:
    return recipe_from_dict(with_changes(TABLE, overrides), 4)


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


class Crash(BaseException):
    """Nothing in vitlab expects this."""


def crash_at(step: int) -> fsio.Listener:
    def listener(_operation: fsio.Operation, path: Path) -> None:
        if path.name == "metrics.jsonl" and path.exists() and len(path.read_text().splitlines()) == step:
            raise Crash

    return listener


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, parts: Call, run: Call) -> Path:
    """A run that was never stopped."""
    return run(recipe(*AVERAGED), tmp_path_factory.mktemp("whole") / "run", parts(val=True)).folder


@pytest.mark.parametrize("after", slow_after(1, [3, 1, 2]))
def test_resumed_run_has_the_statistics_of_one_that_was_never_stopped(
    tmp_path: Path, parts: Call, run: Call, whole: Path, after: int
) -> None:
    data, made, folder = parts(val=True), recipe(*AVERAGED), tmp_path / "run"
    with pytest.raises(Crash), fsio.intercept(crash_at(after)):
        run(made, folder, data)
    run(made, folder, data, resume=True)
    for name in ("checkpoints/step-000000004", "bundle"):
        assert manifest(folder / name) == manifest(whole / name), name
    stored = checkpoint.restore(whole / "checkpoints" / "step-000000004")
    assert int(stored.model["norm.num_batches_tracked"]) == 4
    assert not torch.equal(stored.model["norm.running_var"], torch.ones(16))


def test_ema_of_the_statistics_is_what_the_bundle_holds(tmp_path: Path, run: Call) -> None:
    folder = run(recipe("train.ema=0.9"), tmp_path / "run").folder
    stored = checkpoint.restore(folder / "checkpoints" / "step-000000004")
    assert stored.ema is not None
    assert not torch.equal(stored.ema["norm.running_mean"], stored.model["norm.running_mean"])
    held = read_bundle(folder / "bundle").model.state_dict()
    assert all(torch.equal(held[name], value) for name, value in stored.ema.items())
    assert held["norm.num_batches_tracked"].dtype == torch.int64 and int(held["norm.num_batches_tracked"]) == 4


@pytest.mark.slow
def test_recomputing_activations_changes_no_bit(tmp_path: Path, run: Call) -> None:
    plain, again = (run(recipe(f"train.recompute={value}"), tmp_path / value).folder for value in ("false", "true"))
    assert fsio.hash_file(again / "bundle/model.safetensors") == fsio.hash_file(plain / "bundle/model.safetensors")


@pytest.mark.parametrize(
    "changes", [["train.method=probe"], pytest.param(["optim.train=head"], marks=pytest.mark.slow)]
)
def test_backbone_that_is_not_trained_keeps_its_statistics(tmp_path: Path, run: Call, changes: list[str]) -> None:
    made = recipe(*changes)
    before = build(made.model, seed=0).state_dict()
    after = run(made, tmp_path / "run").classifier.model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_on_the_cpu(tmp_path: Path, run: Call, precision: str) -> None:
    folder = run(recipe(f"train.precision={precision}", "train.steps=4"), tmp_path / "run").folder
    weights = checkpoint.restore(folder / "checkpoints" / "step-000000004").model
    assert {value.dtype for value in weights.values()} == {torch.float32, torch.int64}


def test_run_with_non_finite_loss_saves_only_finite_statistics(tmp_path: Path, run: Call) -> None:
    with pytest.raises(VitlabError, match=r"non-finite|NaN"):
        run(recipe("optim.lr=1e30", "train.save_every=1"), tmp_path / "run")
    for path in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints"):
        for name, value in checkpoint.restore(path).model.items():
            assert bool(value.isfinite().all()), (path.name, name)


def test_batch_of_one_position_says_what_to_do(tmp_path: Path, run: Call) -> None:
    with pytest.raises(UsageError, match=r"(?s)batch norm.*train\.micro_batch"):
        run(recipe("train.batch_size=1"), tmp_path / "run")


def test_what_running_statistics_cannot_bear_is_refused_before_any_work(parts: Call) -> None:
    data: Parts = parts()
    with pytest.raises(UsageError, match=r"train\.sharded.*running statistics"):
        require_possible(recipe("train.sharded=true"), data, 2)
    require_possible(recipe("train.sharded=true"), data, 1)  # nothing is shared out
    with pytest.raises(UsageError, match=r"train\.recompute and train\.compiled"):
        require_possible(recipe("train.recompute=true", "train.compiled=true"), data, 1)


@pytest.mark.parametrize("changes", [("train.batch_size=33", "train.micro_batch=16"), ("train.micro_batch=1",)])
def test_image_left_alone_is_refused_before_any_work(parts: Call, changes: tuple[str, ...]) -> None:
    data: Parts = parts()
    with pytest.raises(UsageError, match=r"(?s)batch norm.*leave one image alone.*train\.micro_batch"):
        require_possible(recipe(*changes), data, 1)
    require_possible(recipe(*changes, "data.image_size=[64,64]"), data, 1)  # a map of 2x2 has a variance
    require_possible(recipe(*changes, "optim.train=head"), data, 1)  # nothing is normalised by the batch
    require_possible(recipe("train.batch_size=34", "train.micro_batch=16"), data, 1)


@pytest.mark.parametrize(
    ("images", "size", "mixup", "found"),
    [(33, 16, 0, 15), (33, 16, 0.5, 14), (33, 4, 0, 3), (34, 16, 0, 16), (32, 16, 0, 16), (33, 2, 0, 2)],
)
def test_micro_batch_that_is_found_leaves_no_image_alone(
    tiny: Call, images: int, size: int, mixup: float, found: int
) -> None:
    assert without_lone_image(recipe(f"data.mix.mixup={mixup}"), images, size) == found
    assert without_lone_image(tiny(), images, size) == size, "nothing but batch norm minds"


def test_estimated_micro_batch_leaves_no_image_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe("train.batch_size=33")
    room = estimate_memory(made).peak(16, accumulates=True)
    monkeypatch.setattr("vitlab.training.microbatch.free_memory", lambda _device: room)
    assert estimate_memory(made).at_once(33, room) == 16, "the premise of this test"
    cut, printed = estimate_microbatch(made, torch.device("cpu"), 1)
    assert cut.train.micro_batch == 15 and printed is not None and "micro-batches of 15" in printed


def test_micro_batches_are_reported_to_change_what_batch_norm_sees(tiny: Call) -> None:
    assert describe_update(recipe(), 2) == "an update is that of 8 still, but batch norm sees 2 images at a time"
    assert describe_update(tiny(), 2) == "an update is that of 8 still"


@pytest.mark.slow
def test_run_too_short_for_its_statistics_is_warned_of(tmp_path: Path, run: Call, tiny: Call) -> None:
    """0.99^229 is the last above a tenth."""
    model = recipe().model
    assert "keeps 10% of the statistics" in (health.slow_statistics(model, 229) or "")
    assert health.slow_statistics(model, 230) is None
    assert health.slow_statistics(tiny().model, 1) is None
    warnings = run(recipe("train.steps=8"), tmp_path / "run").warnings
    assert any("batch norm keeps 92%" in warning and "model.bn_momentum=0.1" in warning for warning in warnings)
    quick = run(recipe("model.bn_momentum=0.5"), tmp_path / "quick").warnings
    assert not any("batch norm" in warning for warning in quick)


def test_adapters_have_no_place(tmp_path: Path, run: Call) -> None:
    with pytest.raises(UsageError, match="LoRA needs matrices called q, v"):
        run(recipe("optim.train=lora"), tmp_path / "run")
