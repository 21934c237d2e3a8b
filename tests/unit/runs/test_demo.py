"""The demo: parts named in overrides, folders never overwritten, and nothing begun that cannot end well."""

import re
import sys
import tomllib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from vitlab.core import config, fsio
from vitlab.core.errors import MissingExtra, UnknownName, UsageError
from vitlab.core.planned import Planned
from vitlab.core.runtime import Runtime
from vitlab.models.names import format_name
from vitlab.pipelines.digits_demo import DemoResult, demo, demo_config, demo_jobs
from vitlab.training.recipe import Recipe, recipe_from_dict

HELD_OUT = 359  # a fifth of the 1,797 digits
FRACTALS = "pretrain.data.source=fractals:categories=4,instances=8,image_size=16"
BODIES = [f"{part}.model.name=ViT-w16d2m32h2/2" for part in ("pretrain", "transfer")]
TINY = ["pretrain.train.steps=2", FRACTALS, *BODIES, "transfer.train.steps=2"]


def recipe_of(part: str, overrides: list[str], seed: int = 0) -> Recipe:
    return demo_jobs(overrides, seed)[part][0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@pytest.fixture(scope="module")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory, runtime: Runtime) -> DemoResult:
    out = tmp_path_factory.mktemp("demo") / "deep" / "out"
    return demo(str(out), overrides=TINY, device="cpu", threads=runtime.threads, quiet=True)


def test_demo_leaves_three_runs_and_a_report(tiny_demo: DemoResult) -> None:
    out = tiny_demo.report.parent
    assert {path.name for path in out.iterdir()} == {"pretrain", "transfer", "scratch", "report.html"}
    assert (tiny_demo.run, tiny_demo.bundle) == (out / "transfer", out / "transfer" / "bundle")
    assert {"pre-training.svg", "training.svg", "confusion.svg"} <= set(fsio.verify_folder(out / "transfer" / "plots"))


@pytest.mark.parametrize("name", ["pretrain", "transfer", "scratch"])
def test_every_run_has_its_own_page_and_plots(tiny_demo: DemoResult, name: str) -> None:
    folder = tiny_demo.report.parent / name
    found = {"pretrain": tiny_demo.pretrain_test, "transfer": tiny_demo.test, "scratch": tiny_demo.scratch_test}[name]
    assert f"{100 * found['top1']:.1f} %</span> of {found['n']} held-out images" in (folder / "report.html").read_text()
    assert "training.svg" in fsio.verify_folder(folder / "plots")


def test_result_has_the_accuracy_and_whether_it_was_expected(tiny_demo: DemoResult) -> None:
    for found in (tiny_demo.test, tiny_demo.scratch_test, tiny_demo.pretrain_test):
        assert set(found) == {"top1", "top5", "loss", "n"}
    assert tiny_demo.test["n"] == tiny_demo.scratch_test["n"] == HELD_OUT
    assert tiny_demo.expected_top1 is None, "two steps are another story than the one that was measured"
    assert "You should see" not in "".join(tiny_demo.sentences())


def test_report_shows_the_number_the_pictures_and_no_outside_world(tiny_demo: DemoResult) -> None:
    page = tiny_demo.report.read_text()
    top1, scratch = (f"{100 * test['top1']:.1f} %" for test in (tiny_demo.test, tiny_demo.scratch_test))
    assert f'<span class="big">{top1}</span> of {HELD_OUT} held-out images right, {scratch} from scratch' in page
    headings = set(re.findall("<h2>(.*?)</h2>", page))
    assert {
        "Pre-training",
        "Training",
        "Confusion",
        "Mistakes",
        "Answers",
        "What the model attended to",
        "Facts",
    } <= headings
    shown = HELD_OUT - round(tiny_demo.test["top1"] * HELD_OUT), round(tiny_demo.test["top1"] * HELD_OUT)
    assert page.count("data:image/png;base64,") == sum(min(12, count) for count in shown)  # mistakes and right answers
    assert page.count("data:image/jpeg;base64,") == 12  # with what the model looked at
    assert page.count("<script") == 1 and not re.search(r"https?://", page)
    links = re.findall(r'href="\./(.*?)"', page)
    assert links and all((tiny_demo.report.parent / link).exists() for link in links)


def test_command_in_the_card_repeats_the_demo(tiny_demo: DemoResult) -> None:
    card = (tiny_demo.bundle / "card.md").read_text()
    assert f"`vitlab demo --seed 0 {' '.join(f'--set {override}' for override in TINY)}`" in card


def test_scratch_differs_from_the_transfer_in_its_start_alone(tiny_demo: DemoResult) -> None:
    transfer, scratch = (
        tomllib.loads((tiny_demo.run.with_name(name) / "config.toml").read_text()) for name in ("transfer", "scratch")
    )
    assert transfer.pop("init") == str(tiny_demo.run.with_name("pretrain") / "bundle")
    assert scratch.pop("init") == "scratch"
    assert transfer == scratch


# --- overrides --------------------------------------------------------------------------------------------------------


def test_override_reaches_its_part_alone_and_the_seed_both() -> None:
    jobs = demo_jobs([FRACTALS, "transfer.optim.lr=0.5"], seed=7)
    assert jobs["transfer"][0].optim.lr == 0.5
    assert jobs["pretrain"][0].optim.lr != 0.5
    assert [recipe.seed for recipe, _ in jobs.values()] == [7, 7]


@pytest.mark.parametrize("override", ["optim.lr=1", "transfr.optim.lr=1", "transfer=1", "", "=", "."])
def test_override_without_a_part_is_refused_with_an_example(override: str) -> None:
    with pytest.raises(UnknownName, match=r"--set transfer\.optim\.lr=3e-4"):
        demo_jobs([override])


def test_missing_digits_are_reported_before_anything_is_made(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # Python's own way to make an import fail
    with pytest.raises(MissingExtra, match=r"vitlab\[demo\]"):
        demo(overrides=TINY, quiet=True)
    assert list(here.iterdir()) == []


WRONG = [
    "transfer.data.image_size=[15,16]",
    "transfer.data.test_frac=1",
    "transfer.data.test_frac=0",
    "pretrain.data.test_frac=1",
    "transfer.model.depth=3",
    "transfer.model.name=BiT-R50x1",
    "pretrain.data.image_size=[7,8]",
    "pretrain.data.image_size=[-8,8]",
    "pretrain.data.source=fractals:categories=0",
    "pretrain.data.source=fractals:instances=1",
]


@pytest.mark.parametrize("override", WRONG)
def test_dry_run_refuses_what_the_run_would_refuse(here: Path, override: str) -> None:
    with pytest.raises(UsageError):
        demo(overrides=[*TINY, override], dry_run=True)


@pytest.mark.parametrize("override", WRONG[:2])
def test_what_cannot_end_well_is_refused_before_anything_is_made(here: Path, override: str) -> None:
    with pytest.raises(UsageError):
        demo(overrides=[*TINY, override], quiet=True, device="cpu")
    assert list(here.iterdir()) == []


# --- config -----------------------------------------------------------------------------------------------------------


def test_printed_config_is_one_toml_document_with_a_table_per_part() -> None:
    tables = tomllib.loads(config.dump_toml(demo_config(overrides=[FRACTALS, "transfer.optim.lr=0.5"], seed=3)))
    assert set(tables) == {"pretrain", "transfer"}
    assert recipe_from_dict(tables["transfer"], 10).optim.lr == 0.5
    assert recipe_from_dict(tables["pretrain"], 4).seed == 3


def test_printed_config_is_the_one_that_would_run() -> None:
    printed = tomllib.loads(config.dump_toml(demo_config(overrides=TINY)))["transfer"]
    assert recipe_from_dict(printed, 10) == recipe_of("transfer", TINY)


# --- folders ----------------------------------------------------------------------------------------------------------


def would(*given: Any, **options: Any) -> Mapping[str, Any]:
    """What a dry run of the demo says."""
    planned: Any = demo(*given, dry_run=True, **options)
    assert isinstance(planned, Planned)
    return planned.would


def test_default_folder_is_the_next_free_one(here: Path) -> None:
    assert would(overrides=TINY)["out"] == "runs/demo"
    (here / "runs" / "demo").mkdir(parents=True)
    assert would(overrides=TINY)["out"] == "runs/demo-2"
    (here / "runs" / "demo-2").touch()
    assert would(overrides=TINY)["out"] == "runs/demo-3"


def test_dry_run_writes_nothing_and_prints_the_plan(here: Path) -> None:
    plan = would("x", overrides=[*TINY[:-1], "transfer.train.steps=9"], device="cpu")
    assert list(here.iterdir()) == []
    assert plan["device"] == "cpu"
    name = format_name(recipe_of("transfer", TINY).model)
    assert plan["transfer"].startswith(f"{name}, 9 steps on {1797 - HELD_OUT:,} images of 16x16 pixels")
    assert set(plan) == {"device", "out", "pretrain", "transfer"}


@pytest.mark.parametrize("dry_run", [False, True])
def test_existing_folder_is_refused(here: Path, dry_run: bool) -> None:
    (here / "old").mkdir()
    with pytest.raises(UsageError, match="old exists already"):
        demo("old", overrides=TINY, dry_run=dry_run)
