"""A run leaves a folder that tells everything, can be run again, and is either whole or has no bundle."""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_jobs import live_run, rule_of
from slow_cases import slow_after

from vitlab.core import config, fsio
from vitlab.core.console import Console
from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.dataset import Dataset, several_labels
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.engines.classifier import load
from vitlab.models.build import build
from vitlab.models.names import format_name
from vitlab.models.spec import BiTSpec, bit_trunk
from vitlab.report.page import render
from vitlab.runs.training import run_folder
from vitlab.runs.training.run_report import build_report
from vitlab.training import checkpoint, loop
from vitlab.training.assemble import start_model
from vitlab.training.loop import NonFinite
from vitlab.training.recipe import Recipe, read_recipe, recipe_from_dict, with_changes
from vitlab.training.recipe_data import open_recipe
from vitlab.weights.bundle import Bundle, save_bundle

Tiny = Callable[..., Recipe]
Call = Callable[..., Any]
FILES = {
    "config.toml",
    "env.json",
    "run.json",
    "split.csv",
    "metrics.jsonl",
    "metrics.csv",
    "checkpoints",
    "bundle",
    "log.txt",
}


def steps_saved(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint.list_checkpoints(folder / "checkpoints")]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- what is in the folder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pretraining", "transfer"])
def test_folder_holds_the_promised_files(request: pytest.FixtureRequest, name: str) -> None:
    folder = request.getfixturevalue(name).result.folder
    assert {path.name for path in folder.iterdir()} == FILES | {fsio.LOCK}


def test_metrics_have_one_row_per_step_in_both_forms(transfer: Any) -> None:
    folder = transfer.result.folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = list(csv.DictReader(io.StringIO((folder / "metrics.csv").read_text())))
    assert [line["step"] for line in lines] == [1, 2]
    assert [{key: float(value) for key, value in row.items()} for row in rows] == lines
    measured = {"images_per_second", "data_wait_frac", "memory_gb", "seconds_left"}
    assert set(lines[0]) == {"step", "loss", "lr", "grad_norm"} | measured


def test_split_file_has_the_part_of_every_image(transfer: Any) -> None:
    rows = list(csv.DictReader(io.StringIO((transfer.result.folder / "split.csv").read_text())))
    assert len({row["path"] for row in rows}) == 1797
    count = {part: sum(row["split"] == part for row in rows) for part in ("train", "test")}
    assert count["train"] + count["test"] == 1797
    assert count["test"] == pytest.approx(0.2 * 1797, abs=5)
    assert transfer.result.scores.n == count["test"]


def test_environment_has_what_the_bits_depend_on(transfer: Any) -> None:
    env = json.loads((transfer.result.folder / "env.json").read_text())
    assert {"command", "device", "threads", "world", "torch", "vitlab", "python", "packages"} <= env.keys()
    assert (env["command"], env["device"], env["threads"], env["world"]) == ("a test", "cpu", 1, 1)
    run = json.loads((transfer.result.folder / "run.json").read_text())
    assert set(run["data"]) == {"train", "test"} and run["command"] == "a test"
    assert run["progress"] == {"step": 2, "steps": 2, "finished": True}


def test_log_holds_what_was_printed(transfer: Any) -> None:
    log = (transfer.result.folder / "log.txt").read_text()
    recipe, count = transfer.recipe, 1797 - transfer.result.scores.n
    assert f"{recipe.title}: {format_name(recipe.model)} on {count:,} images, 10 classes" in log
    assert "replaced by a zero head, 4 -> 10" in log
    assert "training   2/2" in log


def test_bundle_answers_like_the_run_and_knows_its_labels(transfer: Any) -> None:
    result = transfer.result
    clf = load(result.folder, device="cpu")
    assert clf.labels == tuple("0123456789")
    image = result.test.read(int(result.scores.ids[0]))
    assert clf(image)[0].p == pytest.approx(float(result.scores.logits_BK[0].softmax(0).max()), abs=1e-5)
    assert "test top-1" in clf.bundle.card


# --- again ------------------------------------------------------------------------------------------------------------


def test_stored_config_repeats_the_run_bit_for_bit(pretraining: Any, tmp_path: Path, run: Call) -> None:
    first = pretraining.result.folder
    again, parts = open_recipe(config.load_toml(first / "config.toml"))
    assert again == pretraining.recipe
    torch.rand(17)
    second = run(again, tmp_path / "again", parts).folder
    for name in ("config.toml", "split.csv", "bundle/model.safetensors", "bundle/config.json"):
        assert fsio.hash_file(second / name) == fsio.hash_file(first / name), name


def test_another_seed_gives_other_bits(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    first, other = (run(tiny(f"seed={seed}", "train.steps=1"), tmp_path / str(seed)).folder for seed in (0, 1))
    name = "bundle/model.safetensors"
    assert fsio.hash_file(other / name) != fsio.hash_file(first / name)


def test_another_seed_holds_out_other_digits() -> None:
    tables = [
        open_recipe(with_changes(read_recipe("demo-digits"), [f"data.split_seed={seed}"]))[1].table()
        for seed in (0, 0, 1)
    ]
    assert tables[0] == tables[1] != tables[2]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_newest_checkpoints_are_kept(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    assert steps_saved(run(tiny(), tmp_path / "two").folder) == [6, 8]
    assert steps_saved(run(tiny("train.keep=1"), tmp_path / "one").folder) == [8]
    assert steps_saved(run(tiny("train.keep=9", "train.save_every=100%"), tmp_path / "all").folder) == [8]


def test_best_checkpoint_stays_and_its_weights_are_the_result(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call
) -> None:
    # A rate this high makes a model of noise worse, not better.
    recipe = tiny("optim.lr=0.3", "train.eval_every=12.5%", "train.save_every=100%", "train.keep=1", "train.steps=16")
    console = Console(quiet=True)
    result = run(recipe, tmp_path / "run", parts(val=True), console=console)
    rows = result.evaluations
    assert [row["step"] for row in rows] == list(range(2, 17, 2))
    best = max(rows, key=lambda row: (row["top1"], -row["loss"]))
    assert steps_saved(result.folder) == sorted({int(best["step"]), 16})
    assert best["step"] < 16, "the premise of this test"
    stored = checkpoint.restore(result.folder / "checkpoints" / f"step-{int(best['step']):09d}")
    assert stored.progress["best"] == best
    for name, value in result.classifier.model.state_dict().items():
        assert torch.equal(value, stored.model[name])
    assert f"kept: the weights of step {int(best['step'])}, the best on the validation images" in console.lines


@pytest.mark.slow
def test_of_equally_many_right_answers_the_lower_loss_is_kept(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call
) -> None:
    """One tuning image is right or not: most evaluations are level, and the first is of a model which knows least."""
    data = parts(val=True)
    data = dataclasses.replace(data, val=data.train.subset(torch.tensor([0])))
    result = run(tiny("train.eval_every=2", "train.steps=16", "train.ema=0.5"), tmp_path / "run", data)
    top = max(row["top1"] for row in result.evaluations)
    level = [row for row in result.evaluations if row["top1"] == top]
    best = min(level, key=lambda row: row["loss"])
    assert len(level) > 1 and best != level[0], "the premise of this test"
    stored = checkpoint.restore(result.folder / "checkpoints" / f"step-{int(best['step']):09d}")
    assert stored.ema is not None
    for name, value in result.classifier.model.state_dict().items():
        assert torch.equal(value, stored.ema[name])


@pytest.mark.slow
def test_evaluations_find_no_forward_pass_under_way(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel that GPUs get, which is why the next pass is sent ahead; an evaluation puts the averaged weights in."""

    class Fused(torch.optim.AdamW):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **{**named, "fused": True})

    monkeypatch.setattr(torch.optim, "AdamW", Fused)
    recipe = tiny("train.ema=0.9", "train.eval_every=3", "model.dropout=0.1")
    ahead = run(recipe, tmp_path / "ahead", parts(val=True))
    monkeypatch.setattr(loop, "_update_ahead", lambda *_: None)
    plain = run(recipe, tmp_path / "plain", parts(val=True))
    assert len(ahead.evaluations) == 3
    assert ahead.evaluations == plain.evaluations
    assert losses(ahead.folder) == losses(plain.folder)
    first, second = (fsio.hash_file(result.folder / "bundle" / "model.safetensors") for result in (ahead, plain))
    assert first == second


def test_patience_ends_a_run_that_gets_no_better(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    recipe = tiny(
        "optim.lr=1e-30", "train.eval_every=12.5%", "train.patience=3", "train.steps=16", "train.save_every=100%"
    )
    result = run(recipe, tmp_path / "run", parts(val=True))
    assert [row["step"] for row in result.evaluations] == [2, 4, 6, 8]
    assert len(result.records) == 8
    best = min(result.evaluations, key=lambda row: row["loss"])
    assert steps_saved(result.folder) == sorted({int(best["step"]), 8})
    again = run(recipe, tmp_path / "run", parts(val=True), resume=True)
    assert again.evaluations == result.evaluations, "resumed, it has still waited long enough"
    assert len(again.records) == 8


def test_without_test_images_there_is_no_score(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    result = run(tiny(), tmp_path / "run", parts(test=False))
    assert result.scores is None
    assert "none: the data has no part for it" in result.classifier.bundle.card


def test_class_weights_reach_the_loss(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    given = parts()
    few = torch.tensor([i for i in range(24) if i % 4 != 3 or i < 8])
    lopsided = dataclasses.replace(given, train=given.train.subset(few))
    plain = run(tiny("train.steps=2"), tmp_path / "plain", lopsided)
    weighed = run(tiny("train.steps=2", "objective.class_weights=auto"), tmp_path / "weighed", lopsided)
    assert losses(plain.folder)[0] == pytest.approx(math.log(4))
    assert losses(weighed.folder)[0] != pytest.approx(math.log(4), rel=1e-3)


@pytest.mark.slow
def test_class_weights_by_hand_and_adjusted_logits_reach_the_loss(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call
) -> None:
    """A new head is zero, so the first loss follows from labels and weights alone."""
    given = parts()
    few = torch.tensor([i for i in range(24) if i % 4 != 3 or i < 8])
    lopsided = dataclasses.replace(given, train=given.train.subset(few))
    first = lopsided.train.classes[0]
    twice = run(tiny("train.steps=2", f"objective.class_weights={{{first}=2.0}}"), tmp_path / "table", lopsided)
    listed = run(tiny("train.steps=2", "objective.class_weights=[2.0,1,1,1]"), tmp_path / "list", lopsided)
    assert math.log(4) < losses(twice.folder)[0] < 2 * math.log(4)
    assert losses(twice.folder) == losses(listed.folder)
    adjusted = run(tiny("train.steps=2", "objective.logit_adjustment=1.0"), tmp_path / "adjusted", lopsided)
    counts = lopsided.train.labels.counts(4).double()
    shares = counts / counts.sum()
    assert losses(adjusted.folder)[0] != pytest.approx(math.log(4), rel=1e-3)
    assert float(-shares.max().log()) < losses(adjusted.folder)[0] < float(-shares.min().log())
    with pytest.raises(UsageError, match="no such class"):
        run(tiny("objective.class_weights={'no such class'=2.0}"), tmp_path / "wrong", lopsided)


def test_run_with_class_weights_by_hand_is_resumed(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    rules = (
        "train.steps=4",
        "objective.class_weights={'0'=3.0}",
        "objective.logit_adjustment=0.5",
        "train.save_every=2",
    )
    given = parts()
    rules = (rules[0], f"objective.class_weights={{{given.train.classes[0]}=3.0}}", *rules[2:])
    whole = run(tiny(*rules), tmp_path / "whole", given)
    recipe = recipe_from_dict(config.load_toml(whole.folder / "config.toml"), len(given.train.classes))
    assert recipe.objective == tiny(*rules).objective
    again = run(recipe, whole.folder, given, resume=True)
    assert losses(again.folder) == losses(whole.folder)


def with_several_labels(given: Any) -> Any:
    def several(part: Dataset) -> Dataset:
        return dataclasses.replace(part, labels=several_labels([[i % 4, (i + 1) % 4] for i in range(len(part))]))

    return dataclasses.replace(given, train=several(given.train), test=several(given.test))


def test_images_with_several_labels_train_with_sigmoid_only(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    given = with_several_labels(parts())
    with pytest.raises(UsageError, match=r"objective\.kind.*sigmoid"):
        run(tiny(), tmp_path / "soft", given)
    result = run(tiny("objective.kind=sigmoid", "data.mix.mixup=0.2"), tmp_path / "run", given)
    assert 0 < result.scores.mean_ap < 1


@pytest.mark.slow
def test_report_of_several_labels_has_classes_mistakes_and_overlays(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call
) -> None:
    result = run(tiny("objective.kind=sigmoid"), tmp_path / "run", with_several_labels(parts()))
    titles = [section.title for section in build_report(result).sections]
    assert {"Classes", "Mistakes", "Answers", "What the model attended to"} <= set(titles)
    assert "likeliest label is right on" in build_report(result).headline
    page = render(build_report(result))
    assert "average precision" in page and "true a, b" in page


def test_head_can_start_from_no(tmp_path: Path, tiny: Tiny, run: Call, pretraining: Any) -> None:
    """Of four classes at a bias of -3, each image costs three confident noes and one wrong one."""
    recipe = tiny("objective.kind=sigmoid", "head_bias=-3", "train.steps=1")
    first = losses(run(recipe, tmp_path / "run").folder)[0]
    assert first == pytest.approx(3 * math.log1p(math.exp(-3)) + math.log1p(math.exp(3)), rel=1e-6)
    start = f"init={pretraining.result.folder}"
    model = start_model(tiny(start, "head_bias=-3", "model.name=ViT-w16d2m32h2/2"), Console(quiet=True))
    assert model.head is not None
    assert model.head.bias.tolist() == [-3.0] * 4


def test_teacher_is_learned_from(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    teacher = run(tiny("seed=5", "train.steps=2"), tmp_path / "teacher").folder
    learn = (f"teacher={teacher}", "objective.distillation.weight=0.5", "objective.distillation.temperature=2.0")
    briefly = "train.steps=1"
    alone, taught = run(tiny(briefly), tmp_path / "alone"), run(tiny(*learn, briefly), tmp_path / "taught")
    assert losses(alone.folder)[0] == pytest.approx(math.log(4))
    assert losses(taught.folder)[0] != pytest.approx(math.log(4), rel=1e-3)
    with pytest.raises(UsageError, match="prepared in another way"):
        run(tiny(*learn, "data.std=[0.25]"), tmp_path / "other")


def test_teacher_of_other_classes_is_refused(tmp_path: Path, tiny: Tiny, run: Call, transfer: Any) -> None:
    with pytest.raises(UsageError, match="other classes"):
        run(tiny(f"teacher={transfer.result.folder}", "objective.distillation.weight=1"), tmp_path / "run")


@pytest.mark.parametrize(
    ("mode", "moved"), [("head", {"head"}), ("last:1", {"blocks.1", "norm", "head"}), ("full", None)]
)
def test_only_what_the_mode_names_has_moved(
    tmp_path: Path, tiny: Tiny, run: Call, mode: str, moved: set[str] | None
) -> None:
    recipe = tiny(f"optim.train={mode}", "optim.weight_decay=0.1")
    before = build(recipe.model, seed=0).state_dict()
    after = run(recipe, tmp_path / "run").classifier.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"head.weight", "head.bias"} <= changed
    if moved is None:
        assert len(changed) > len(before) / 2
    else:
        assert all(name.startswith(tuple(moved)) for name in changed)


def test_lora_moves_what_it_should_and_leaves_a_plain_bundle(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    recipe = tiny("optim.train=lora", "lora.rank=2", 'lora.parts=["q","v"]', "train.ema=0.9")
    before = build(recipe.model, seed=0).state_dict()
    after = run(recipe, tmp_path / "run").classifier.model.state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"blocks.{i}.attn.qkv.weight" for i in (0, 1)} | {"head.weight", "head.bias"}


def test_recomputing_activations_changes_no_bit(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    often = ("model.dropout=0.2", "model.stochastic_depth=0.2", "train.ema=0.9")
    plain, again = (
        run(tiny(*often, f"train.recompute={value}"), tmp_path / value).folder for value in ("false", "true")
    )
    assert losses(again) == losses(plain)
    for name in ("bundle/model.safetensors", "checkpoints/step-000000008/optimizer.safetensors"):
        assert fsio.hash_file(again / name) == fsio.hash_file(plain / name), name


@pytest.mark.parametrize("precision", slow_after(1, ["bf16", "fp16"]))
def test_half_precision_runs_on_the_cpu_and_stays_close(tmp_path: Path, tiny: Tiny, run: Call, precision: str) -> None:
    full = run(tiny("train.steps=4"), tmp_path / "fp32").folder
    half = run(tiny("train.steps=4", f"train.precision={precision}"), tmp_path / "half").folder
    assert losses(half) == pytest.approx(losses(full), rel=0.02)
    assert losses(half) != losses(full)
    weights = checkpoint.restore(half / "checkpoints" / "step-000000004").model
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_micro_batches_give_the_same_curve(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    briefly = ("data.mix.mixup=0.4", "train.steps=3")
    whole = losses(run(tiny(*briefly), tmp_path / "whole").folder)
    for size in (2, 4):
        cut = run(tiny(*briefly, f"train.micro_batch={size}"), tmp_path / str(size))
        assert losses(cut.folder) == pytest.approx(whole, rel=1e-5)
    with pytest.raises(UsageError, match="even"):
        run(tiny("data.mix.mixup=0.4", "train.micro_batch=1"), tmp_path / "odd")


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_existing_folder_is_refused_before_any_work(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(UsageError, match="exists"):
        run(tiny(), tmp_path / "old")
    assert list((tmp_path / "old").iterdir()) == []


def test_run_with_non_finite_loss_leaves_no_bundle_and_names_the_images(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    with pytest.raises(VitlabError, match=r"non-finite|NaN"):
        run(tiny("optim.lr=1e30", "train.steps=9", "train.save_every=100%"), tmp_path / "run")
    assert not (tmp_path / "run" / "bundle").exists()
    assert (tmp_path / "run" / "config.toml").exists()
    assert steps_saved(tmp_path / "run") == []
    noted = json.loads((tmp_path / "run" / "bad_batch.json").read_text())
    assert len(noted["images"]) == 8
    assert set(noted["images"]) <= {f"train/{i}" for i in range(24)}
    assert len(losses(tmp_path / "run")) == noted["step"] - 1


def test_no_weight_that_is_none_is_ever_saved(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    """The last update may be the one that breaks the weights, and no further loss would tell."""
    with pytest.raises(VitlabError, match=r"NaN.*step 1.*nothing was saved"):
        run(tiny("optim.lr=1e37", "optim.weight_decay=1e3", "train.steps=1"), tmp_path / "run")
    assert steps_saved(tmp_path / "run") == []
    assert not (tmp_path / "run" / "bundle").exists()


def test_transfer_from_a_resnet_is_refused(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    spec = BiTSpec(trunk=bit_trunk((1,), 1), image_size=(8, 8), in_channels=1, num_classes=2)
    rule = Preprocess(mode="L", image_size=(8, 8), mean=(0.5,), std=(0.5,))
    save_bundle(tmp_path / "resnet", Bundle(build(spec, seed=0), rule, ("a", "b"), "card", {}))
    with pytest.raises(UsageError, match=r"start weights.*BiT-R"):
        run(tiny(f"init={tmp_path / 'resnet'}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_image_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    given = parts()
    good = given.train.read
    broken = dataclasses.replace(given, train=dataclasses.replace(given.train, read=_Broken(good, 3)))
    result = run(tiny(), tmp_path / "run", broken)
    assert set(result.bad) == {"train/3"}
    assert "left out: train/3" in (result.folder / "log.txt").read_text()
    with pytest.raises(VitlabError, match=r"not be read.*train/3"):
        run(tiny("data.max_bad=0"), tmp_path / "strict", broken)


@dataclasses.dataclass(frozen=True)
class _Broken:
    read: Any
    number: int

    def __call__(self, i: int) -> Any:
        return b"no image" if i == self.number else self.read(i)


def test_recipe_for_other_classes_cannot_be_made() -> None:
    with pytest.raises(UsageError, match=r"model\.num_classes.*data"):
        recipe_from_dict(with_changes(read_recipe("demo-digits"), ["model.num_classes=7"]), 10)


def test_not_finite_is_a_failure_of_the_work() -> None:
    assert NonFinite(1, math.nan, 1.0, []).exit_code == 1


def test_a_bad_image_gives_nothing_to_its_partner(tmp_path: Path, tiny: Any, parts: Any) -> None:
    recipe = tiny("data.mix.mixup=1.0", "data.mix.per=sample", "train.batch_size=4", "data.augment.mirror=0")
    live = live_run(recipe, parts(), tmp_path)
    images, numbers = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8), torch.arange(4)
    valid = torch.tensor([True, False, True, True])
    batch = Batch(images, numbers, valid, numbers, torch.zeros_like(numbers), torch.zeros_like(numbers), numbers)
    x_BCYX, targets_BK = rule_of(live).prepare(batch, 0)
    assert targets_BK[0].tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(x_BCYX[0], normalise(recipe.data.preprocess(), images)[0])
    assert (targets_BK[2] > 0).sum() == 2, "valid neighbours are mixed"


def test_log_holds_control_characters_as_escapes(tmp_path: Path) -> None:
    run_folder.start(tmp_path / "run", "", "", run_folder.RunFile("", ""), ["from \x1b[31mred"])
    assert (tmp_path / "run" / "log.txt").read_text() == "from \\x1b[31mred\n"
