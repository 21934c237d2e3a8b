"""VTAB from one call: real raw files in tiny copies, a tiny model, real training."""

import dataclasses
import errno
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.core.session import open_session
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.vtab import VTAB
from vitlab.engines.classifier import load
from vitlab.evaluation.published import find_table
from vitlab.evaluation.records import read_records
from vitlab.evaluation.vtab import VtabResult, aggregate
from vitlab.models.build import create_model
from vitlab.models.spec import ViTSpec
from vitlab.runs.evaluation import vtab
from vitlab.runs.evaluation.vtab import VtabRule, VtabWork, sweep_grid, task_table
from vitlab.training.recipe import recipe_from_dict
from vitlab.weights.bundle import Bundle, save_bundle

_found = importlib.util.spec_from_file_location("vtab_copies", Path(__file__).parents[1] / "data" / "vtab_copies.py")
assert _found and _found.loader
copies = importlib.util.module_from_spec(_found)
_found.loader.exec_module(copies)

# A few steps of a tiny model: enough to go through everything.
SMALL = (
    "data.image_size=[16,16]",
    "train.steps=3",
    "train.batch_size=8",
    "train.precision=fp32",
    "schedule.warmup=1",
)
ALONE: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vtab")
    for name in ("svhn", "eurosat", "dsprites", "sun397"):
        copies.SETS[name](root)
    return root


@pytest.fixture
def bundle(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that was trained on something else, with the data of five tasks around."""
    monkeypatch.setenv("VITLAB_DATA", str(data))
    monkeypatch.setenv("VITLAB_CACHE", str(data / "cache"))
    monkeypatch.chdir(tmp_path)
    model = create_model("ViT-w16d1m32h2/8", num_classes=2, image_size=16, seed=0)
    rule = Preprocess(image_size=(16, 16), mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2))
    save_bundle(tmp_path / "start", Bundle(model, rule, ("a", "b"), "card", {}))
    return str(tmp_path / "start")


def run_vtab(model: str, *, out: str, device: str, threads: int, quiet: bool, seed: int = 0, **rule: Any) -> VtabResult:
    with open_session(device, seed, threads, quiet=quiet) as session:
        return vtab.run_vtab(model, VtabRule(**rule), session, out=out, pretrained_on="")


def test_what_is_here_is_run_and_what_is_missing_is_reported(bundle: str) -> None:
    found = run_vtab(bundle, out="out", overrides=SMALL, **ALONE)
    here = {"svhn", "eurosat", "dsprites-location", "dsprites-orientation", "sun397"}
    assert set(found.tasks) == here and set(found.missing) == set(VTAB) - here
    assert all(0 <= top1 <= 1 for top1 in found.tasks.values())
    assert found.groups == {"natural": None, "specialized": None, "structured": None} and found.mean is None
    assert "data_object_image_2.zip" in found.missing["kitti-distance"]
    reported = "\n".join(found.sentences())
    assert "5 of 19 tasks, so no mean" in reported and "missing: dtd: Describable Textures is not here" in reported
    json.dumps(found.to_json())
    page = found.page.read_text()
    assert "5 of 19 tasks measured" in page
    assert (
        "2 of 8 tasks, so no mean" in page and "Describable Textures is not here" in page and page.count("<script") == 1
    )
    records = {record.data: record for record in read_records(found.records)}
    assert set(records) == {f"vtab:{task}" for task in here}
    svhn = records["vtab:svhn"]
    assert (svhn.value, svhn.n, svhn.part, svhn.seeds, svhn.recipe) == (
        *(found.tasks["svhn"], 100, "test", (0,), "transfer-vtab"),
    )
    assert svhn.interval is not None and svhn.settings["train_images"] == 1000 and svhn.settings["steps"] == 3
    assert svhn.weights != svhn.settings["start_weights"]
    # What mirrors or cuts would change the answer of is left alone.
    assert (svhn.settings["mirror"], svhn.settings["crop"]) == (0.5, "squash")
    ours = records["vtab:dsprites-location"].settings
    assert (ours["mirror"], ours["crop"]) == (0.0, "whole")


def _times(folder: str) -> dict[Path, int]:
    """Of every file but the page, which is made again by every call."""
    files = (path for path in Path(folder).rglob("*") if path.is_file() and path != Path(folder) / "report.html")
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_a_second_call_measures_nothing_again_and_a_wider_one_only_what_is_new(bundle: str) -> None:
    first = run_vtab(bundle, out="out", tasks=["svhn"], overrides=SMALL, **ALONE)
    before = _times("out")
    again = run_vtab(bundle, out="out", tasks=["svhn"], overrides=SMALL, **ALONE)
    assert again.tasks == first.tasks
    assert _times("out") == before
    wider = run_vtab(bundle, out="out", tasks=["svhn", "eurosat"], overrides=SMALL, **ALONE)
    assert wider.tasks["svhn"] == first.tasks["svhn"] and set(wider.tasks) == {"svhn", "eurosat"}
    assert len(read_records(first.records)) == 2
    assert not list(Path("out").rglob("step-*"))  # the checkpoints of finished tasks are gone


@pytest.mark.slow
def test_a_task_that_was_stopped_resumes(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_vtab(bundle, out="whole", tasks=["svhn"], overrides=SMALL, **ALONE)

    def fill_the_disk(_operation: str, path: Path) -> None:
        if path.parent.name == "records":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with fsio.intercept(fill_the_disk), pytest.raises(FileProblem, match="No space left"):
        run_vtab(bundle, out="stopped", tasks=["svhn"], overrides=SMALL, **ALONE)
    found = run_vtab(bundle, out="stopped", tasks=["svhn"], overrides=SMALL, **{**ALONE, "quiet": False})
    assert found.tasks == whole.tasks
    assert "resuming at step 3 of 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_chooses_on_the_validation_images_alone(bundle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = vtab.open_data
    monkeypatch.setattr(vtab, "open_data", lambda source: (opened.append(source), real(source))[1])
    found = run_vtab(
        bundle, out="out", tasks=["svhn", "eurosat"], sweep=["optim.lr=0.0001,0.3"], overrides=SMALL, **ALONE
    )
    # Every look before the choice is at the 800 and 200; the test images come after it.
    assert opened == [*(["vtab:svhn/800", "vtab:eurosat/800"] * 2), "vtab:svhn/1000", "vtab:eurosat/1000"]
    assert [trial["setting"] for trial in found.sweep] == [["optim.lr=0.0001"], ["optim.lr=0.3"]]
    best = max(found.sweep, key=lambda trial: trial["mean"])
    assert list(found.chosen) == best["setting"]
    records = read_records(found.records)
    assert [record.part for record in records].count("val") == 4 and {
        record.n for record in records if record.part == "val"
    } == {200}
    final = next(record for record in records if record.part == "test" and record.data == "vtab:svhn")
    assert f"optim.lr={final.settings['lr']:g}" == found.chosen[0]


@pytest.mark.slow
def test_several_seeds_are_one_record(bundle: str) -> None:
    found = run_vtab(bundle, out="out", tasks=["svhn"], overrides=SMALL, seeds=2, seed=5, **ALONE)
    (record,) = read_records(found.records)
    assert record.seeds == (5, 6) == found.seeds and len(record.values) == 2 and record.interval is None
    assert found.tasks["svhn"] == pytest.approx(sum(record.values) / 2)


def test_bad_calls_end_before_any_work(bundle: str) -> None:
    for asked, error, text in (
        ({"tasks": ["cifar10"]}, UnknownName, "'cifar10'"),
        ({"sweep": ["optim.lr"]}, UsageError, "'optim.lr'.*sweep"),
        ({"sweep": ["optim.lr=1,,2"]}, UsageError, "is not a sweep"),
        ({"seeds": 0}, UsageError, "--seeds"),
        ({"tasks": ["dtd"]}, FileProblem, "none of the 1 VTAB tasks"),
    ):
        with pytest.raises(error, match=text):
            run_vtab(bundle, out="out", overrides=SMALL, **{**ALONE, **asked})
    assert not Path("out").exists()


# --- settings and means, without training -----------------------------------------------------------------------------


def test_every_task_has_the_papers_one_setting_and_its_own_exceptions(bundle: str) -> None:
    start = load(bundle, device="cpu", quiet=True)
    for task in VTAB.values():
        table = task_table(task, 1000, bundle, start, ())
        recipe = recipe_from_dict(table, task.classes)
        assert recipe.data.source == f"vtab:{task.name}/1000" and recipe.model.num_classes == task.classes
        assert (recipe.optim.lr, recipe.train.steps, recipe.train.batch_size) == (0.01, 2500, 512)
        assert (recipe.schedule.decay, recipe.data.image_size, recipe.optim.weight_decay) == ("cosine", (384, 384), 0)
        assert recipe.data.augment.mirror == (0.5 if task.flip else 0)
        assert recipe.data.crop.how == ("squash" if task.crop else "whole")
        assert recipe.data.mean == (0.4, 0.5, 0.6)  # the start's own


def test_a_task_keeps_the_dropout_of_the_recipe_that_its_record_names(bundle: str) -> None:
    start = load(bundle, device="cpu", quiet=True)
    spec = recipe_from_dict(task_table(VTAB["svhn"], 1000, bundle, start, ()), 10).model
    assert isinstance(spec, ViTSpec) and (spec.dropout, spec.head, spec.width) == (0.1, "linear", 16)
    asked = recipe_from_dict(task_table(VTAB["svhn"], 1000, bundle, start, ["model.dropout=0.2"]), 10).model
    assert isinstance(asked, ViTSpec) and asked.dropout == 0.2


def test_patches_of_14_get_378_pixels(bundle: str, tmp_path: Path) -> None:
    model = create_model("ViT-w16d1m32h2/14", num_classes=2, image_size=28, seed=0)
    rule = Preprocess(image_size=(28, 28))
    save_bundle(tmp_path / "fourteen", Bundle(model, rule, ("a", "b"), "card", {}))
    start = load(tmp_path / "fourteen", device="cpu", quiet=True)
    assert task_table(VTAB["svhn"], 800, "x", start, ())["data"]["image_size"] == [378, 378]


def test_means_are_those_of_table_9() -> None:
    """The paper's own cells give its own means, and the groups that follow from them."""
    (table,) = find_table("table9")
    expected = {
        "ViT-H/14 (JFT)": (86.7, 87.0, 65.0, 77.6),
        "ViT-L/16 (JFT)": (85.6, 86.7, 63.0, 76.3),
        "ViT-L/16 (I21k)": (83.3, 84.7, 57.5, 72.7),
    }
    for i, column in enumerate(table.columns):
        cells = [row.cells[i].values for row in table.rows[:-1]]
        groups, mean = aggregate(dict(zip(VTAB, cells, strict=True)))
        assert tuple(round(value or 0, 1) for value in (*groups.values(), mean)) == expected[column.title]
    assert [row.about["data"] for row in table.rows[:-1]] == [f"vtab:{name}" for name in VTAB]


def test_a_missing_task_takes_the_means_of_its_group_and_of_all_away() -> None:
    values = {name: [0.5] for name in VTAB if name != "dmlab"}
    groups, mean = aggregate(values)
    assert groups == {"natural": 0.5, "specialized": 0.5, "structured": None} and mean is None
    assert aggregate({**values, "dmlab": [1.0]})[1] == pytest.approx((18 * 0.5 + 1) / 19)


def test_a_sweep_is_every_combination() -> None:
    assert sweep_grid(["optim.lr=0.003,0.01", "train.steps=500,2500"]) == [
        ("optim.lr=0.003", "train.steps=500"),
        ("optim.lr=0.003", "train.steps=2500"),
        ("optim.lr=0.01", "train.steps=500"),
        ("optim.lr=0.01", "train.steps=2500"),
    ]
    assert sweep_grid([]) == []


def test_whole_groups_are_recorded_once(bundle: str, tmp_path: Path) -> None:
    """From the records of all tasks, made from a real one: means seed by seed, and no second file for the same."""
    found = run_vtab(bundle, out="out", tasks=["svhn"], overrides=SMALL, **ALONE)
    (one,) = read_records(found.records)
    final = {
        name: dataclasses.replace(one, data=f"vtab:{name}", seeds=(0, 1), values=(i / 19, 0.5), interval=None)
        for i, name in enumerate(VTAB)
    }
    start = load(bundle, device="cpu", quiet=True)
    with open_session("cpu", threads=1, quiet=True) as session:
        work = VtabWork(bundle, start, one.weights, "jft", tmp_path / "means", "a test", session)
        for _ in range(2):
            vtab._record_means(work, final)
    records = {record.data: record for record in read_records(tmp_path / "means" / "records")}
    assert set(records) == {"vtab", "vtab:natural", "vtab:specialized", "vtab:structured"}
    assert records["vtab"].values == pytest.approx((9 / 19, 0.5)) and records["vtab"].n == 1900
    assert records["vtab:natural"].values == pytest.approx((3 / 19, 0.5))
    assert len(list((tmp_path / "means" / "records").iterdir())) == 4
