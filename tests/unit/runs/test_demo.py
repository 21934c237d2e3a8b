"""The demo: parts named in overrides, folders never overwritten, and nothing begun that cannot end well."""

import re
import sys
import tomllib
from collections.abc import Generator
from pathlib import Path

import pytest

from vitlab.core import config
from vitlab.core import fsio
from vitlab.core.errors import MissingExtra, UnknownName, UsageError
from vitlab.core.runtime import Runtime
from vitlab.models.names import format_name
from vitlab.runs.digits_demo import DemoResult, demo, demo_config, demo_recipes, plan_demo
from vitlab.runs.recipe import recipe_from_dict

TINY = ["pretrain.train.steps=2", "pretrain.data.count=52", "transfer.train.steps=2"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@pytest.fixture(scope="module")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory, runtime: Runtime) -> DemoResult:
    out = tmp_path_factory.mktemp("demo") / "deep" / "out"
    return demo(str(out), overrides=TINY, device="cpu", threads=runtime.threads, quiet=True)


def test_demo_leaves_two_runs_and_a_report(tiny_demo: DemoResult) -> None:
    out = tiny_demo.report.parent
    assert {path.name for path in out.iterdir()} == {"pretrain", "transfer", "report.html"}
    assert (tiny_demo.run, tiny_demo.bundle) == (out / "transfer", out / "transfer" / "bundle")
    assert {"pre-training.svg", "training.svg", "confusion.svg"} <= set(fsio.verify_folder(out / "transfer" / "plots"))


def test_result_tells_what_was_found_and_whether_it_was_expected(tiny_demo: DemoResult) -> None:
    assert set(tiny_demo.test) == set(tiny_demo.pretrain_test) == {"top1", "top5", "loss", "n"}
    assert tiny_demo.test["n"] == 359
    assert tiny_demo.expected_top1 is None, "two steps are another story than the one that was measured"
    assert "You should see" not in "".join(tiny_demo.sentences())


def test_report_shows_the_number_the_pictures_and_no_outside_world(tiny_demo: DemoResult) -> None:
    page = tiny_demo.report.read_text()
    assert f"{tiny_demo.test['top1']:.1%} right on 359 held-out images" in page
    headings = set(re.findall("<h2>(.*?)</h2>", page))
    assert {
        "Pre-training",
        "Training",
        "Confusion",
        "Mistakes",
        "Answers",
        "What the model looked at",
        "Facts",
    } <= headings
    assert page.count("data:image/png;base64,") == 3 * 12
    assert not re.search(r"https?://|<script", page)


def test_command_in_the_card_repeats_the_demo(tiny_demo: DemoResult) -> None:
    card = (tiny_demo.bundle / "card.md").read_text()
    assert f"`vitlab demo --seed 0 {' '.join(f'--set {override}' for override in TINY)}`" in card


def test_demo_from_scratch_leaves_the_pretraining_out(tmp_path: Path, runtime: Runtime) -> None:
    result = demo(tmp_path / "out", overrides=TINY[2:], from_scratch=True, device="cpu", threads=1, quiet=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"transfer", "report.html"}
    assert result.pretrain_test is None
    assert result.expected_top1 is None, "the recipe's number is for the whole story"
    assert "<h2>Pre-training</h2>" not in result.report.read_text()
    assert "--from-scratch`" in (result.bundle / "card.md").read_text()


def test_from_scratch_the_body_may_differ(here: Path) -> None:
    plan = plan_demo(overrides=["transfer.model.depth=3"], from_scratch=True)
    assert set(plan) == {"device", "out", "digits", "transfer"}


# --- overrides --------------------------------------------------------------------------------------------------------


def test_override_reaches_its_part_alone_and_the_seed_both() -> None:
    recipes = demo_recipes(["transfer.optim.lr=0.5"], seed=7)
    assert recipes["transfer"].optim.lr == 0.5
    assert recipes["pretrain"].optim.lr != 0.5
    assert [recipe.seed for recipe in recipes.values()] == [7, 7]


@pytest.mark.parametrize("override", ["optim.lr=1", "transfr.optim.lr=1", "transfer=1", "", "=", "."])
def test_override_without_a_part_is_refused_with_an_example(override: str) -> None:
    with pytest.raises(UnknownName, match=r"--set transfer\.optim\.lr=3e-4"):
        demo_recipes([override])


def test_missing_digits_are_told_before_anything_is_made(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # Python's own way to make an import fail
    with pytest.raises(MissingExtra, match=r"vitlab\[demo\]"):
        demo(overrides=TINY, quiet=True)
    assert list(here.iterdir()) == []


WRONG = [
    "transfer.data.image_size=[15,16]",
    "transfer.data.test_frac=0",
    "transfer.model.depth=3",
    "transfer.model.name=BiT-R50x1",
    "pretrain.data.image_size=[7,8]",
    "pretrain.data.image_size=[-8,8]",
    "pretrain.data.count=30",
]


@pytest.mark.parametrize("override", WRONG)
def test_dry_run_refuses_what_the_run_would_refuse(here: Path, override: str) -> None:
    with pytest.raises(UsageError):
        plan_demo(overrides=[override])


@pytest.mark.parametrize("override", WRONG[:2])
def test_what_cannot_end_well_is_refused_before_anything_is_made(here: Path, override: str) -> None:
    with pytest.raises(UsageError):
        demo(overrides=[*TINY, override], quiet=True, device="cpu")
    assert list(here.iterdir()) == []


# --- config -----------------------------------------------------------------------------------------------------------


def test_printed_config_is_one_toml_document_with_a_table_per_part() -> None:
    tables = tomllib.loads(config.dump_toml(demo_config(["transfer.optim.lr=0.5"], seed=3)))
    assert set(tables) == {"pretrain", "transfer"}
    assert recipe_from_dict(tables["transfer"]).optim.lr == 0.5
    assert recipe_from_dict(tables["pretrain"]).seed == 3


def test_printed_config_is_the_one_that_would_run() -> None:
    assert recipe_from_dict(tomllib.loads(config.dump_toml(demo_config()))["transfer"]) == demo_recipes()["transfer"]


# --- folders ----------------------------------------------------------------------------------------------------------


def test_default_folder_is_the_next_free_one(here: Path) -> None:
    assert plan_demo()["out"] == "runs/demo"
    (here / "runs" / "demo").mkdir(parents=True)
    assert plan_demo()["out"] == "runs/demo-2"
    (here / "runs" / "demo-2").touch()
    assert plan_demo()["out"] == "runs/demo-3"


def test_dry_run_makes_nothing_and_tells_the_plan(here: Path) -> None:
    plan = plan_demo("x", overrides=["transfer.train.steps=9"], device="cpu")
    assert list(here.iterdir()) == []
    assert plan["device"] == "cpu"
    assert plan["transfer"].startswith(f"{format_name(demo_recipes()['transfer'].model)}, 9 steps of digits")
    assert set(plan) == {"device", "out", "digits", "pretrain", "transfer"}


@pytest.mark.parametrize("function", [demo, plan_demo])
def test_existing_folder_is_refused(here: Path, function: object) -> None:
    (here / "old").mkdir()
    with pytest.raises(UsageError, match="old exists already"):
        function("old")  # type: ignore[operator]
