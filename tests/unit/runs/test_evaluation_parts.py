"""Scores in the order of the images, the same for any workers; parts of a run as the run made them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlab
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.runtime import Runtime
from vitlab.core.session import Session
from vitlab.data.dataset import Dataset, Opened, from_arrays
from vitlab.data.preprocess import Preprocess
from vitlab.engines.classifier import Classifier
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.scoring import Scored, score_images
from vitlab.models.build import create_model
from vitlab.runs.evaluation.parts import as_in_the_run, choose_parts, data_of_run, without_learnt
from vitlab.runs.training import run_folder as folders
from vitlab.weights.bundle import Bundle

PIXELS = np.random.default_rng(0).integers(0, 256, (41, 3, 16, 16), dtype=np.uint8)
SETS = from_arrays(PIXELS, [i % 3 for i in range(41)], ("a", "b", "c"))
SAME = Match(((0,), (1,), (2,)))


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    model = create_model("ViT-w32d2m64h2/8", num_classes=3, image_size=16, seed=0).eval()
    with torch.no_grad():
        assert model.head is not None
        model.head.weight.copy_(torch.randn(3, 32, generator=torch.Generator().manual_seed(0)))
    return Classifier(Bundle(model, Preprocess(image_size=(16, 16)), ("a", "b", "c"), "card", {}), "cpu")


def scores(classifier: Classifier, batch_size: int, workers: int = 0) -> Scored:
    console, world = Console(quiet=True), World(0, 1, torch.device("cpu"))
    session = Session(Runtime(torch.device("cpu"), 0, 1), world, console)
    return score_images(classifier, SETS, SAME, InferenceOptions(batch_size, workers), session, "test")


@pytest.mark.parametrize("batch_size", [7, 64])
def test_workers_change_no_bit(classifier: Classifier, batch_size: int) -> None:
    alone, helped = scores(classifier, batch_size), scores(classifier, batch_size, workers=2)
    assert torch.equal(alone.logits_BM, helped.logits_BM)
    assert torch.equal(alone.ids_B, helped.ids_B) and alone.ids_B.tolist() == list(range(41))


@pytest.mark.parametrize("batch_size", [1, 7, 40, 64])
def test_batch_size_changes_order_and_targets_not_and_scores_by_rounding_alone(
    classifier: Classifier, batch_size: int
) -> None:
    whole, other = scores(classifier, 41), scores(classifier, batch_size)
    assert torch.equal(whole.targets, other.targets) and torch.equal(whole.ids_B, other.ids_B)
    torch.testing.assert_close(other.logits_BM, whole.logits_BM, rtol=0, atol=1e-5)


# --- parts ------------------------------------------------------------------------------------------------------------


def run_folder(
    tmp_path: Path, split: dict[str, str], source: str, method: str = "steps", cwd: Path | None = None, more: str = ""
) -> Path:
    folder = tmp_path / "run"
    config = f'[data]\nsource = "{source}"\n{more}[train]\nmethod = "{method}"\n'
    rows = [f"{key},a,{part}" for key, part in split.items()]
    begun = folders.RunFile("a test", "" if cwd is None else str(cwd))
    folders.start(folder, config, "\n".join(["path,label,split", *rows]) + "\n", begun, [])
    return folder


def keys_of(opened: Opened) -> dict[str, list[str]]:
    return {name: list(part.keys) for name, part in opened.parts.items()}


def part(*indices: int) -> Dataset:
    return SETS.subset(torch.tensor(indices))


SPLIT = {"arrays/0": "train", "arrays/1": "val", "arrays/2": "test", "arrays/3": "train"}


def test_data_without_parts_gets_those_of_the_run(tmp_path: Path) -> None:
    found = as_in_the_run(run_folder(tmp_path, SPLIT, "some/data"), "some/data", Opened({"all": part(0, 1, 2, 3)}))
    assert keys_of(found) == {"train": ["arrays/0", "arrays/3"], "val": ["arrays/1"], "test": ["arrays/2"]}


def test_validation_folder_is_the_test_set_where_the_run_had_no_other(tmp_path: Path) -> None:
    split = {"arrays/0": "train", "arrays/1": "val", "arrays/5": "test"}
    opened = Opened({"train": part(0, 1), "val": part(5)})
    found = as_in_the_run(run_folder(tmp_path, split, "d"), "d", opened)
    assert keys_of(found) == {"train": ["arrays/0"], "val": ["arrays/1"], "test": ["arrays/5"]}


def test_head_that_was_fitted_to_the_validation_images_too_has_no_validation_part(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, SPLIT, "d", method="probe")
    found = as_in_the_run(folder, "d", Opened({"all": part(0, 1, 2, 3)}))
    assert keys_of(found) == {"train": ["arrays/0", "arrays/1", "arrays/3"], "test": ["arrays/2"]}
    assert choose_parts(found, None, None).fit is None


def test_validation_part_of_the_data_that_a_head_was_fitted_to_is_not_fitted_on(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, SPLIT, "d", method="probe")
    opened = Opened({"train": part(0, 3), "val": part(1), "test": part(2)})
    for found in (as_in_the_run(folder, "d", opened), without_learnt(folder, "d", opened, "test")):
        assert keys_of(found) == {"train": ["arrays/0", "arrays/3"], "test": ["arrays/2"]}
        assert choose_parts(found, None, None).fit is None
        assert any("fitted to the validation part too" in note for note in found.notes)
    asked = without_learnt(folder, "d", opened, "val")
    assert keys_of(asked) == keys_of(opened) and "memorised" in asked.notes[-1]
    assert without_learnt(folder, "other", opened) is opened


@pytest.mark.parametrize("method", ["probe", "steps"])
def test_validation_part_that_no_weight_was_fitted_to_is_fitted_on(tmp_path: Path, method: str) -> None:
    """Of a head that was validated on a share of the training images, and of a run that only chose on it."""
    more = 'val_from = "train"\nval_frac = 0.5\n' if method == "probe" else ""
    folder = run_folder(tmp_path, {**SPLIT, "arrays/3": "val"}, "d", method=method, more=more)
    opened = Opened({"train": part(0, 3), "val": part(1), "test": part(2)})
    for found in (as_in_the_run(folder, "d", opened), without_learnt(folder, "d", opened, "test")):
        assert choose_parts(found, None, None).fit_part == "val"


@pytest.mark.parametrize(
    ("data", "images"), [("other", (0, 1, 2, 3)), ("d", (0, 1, 2, 3, 4))], ids=["source", "images"]
)
def test_other_data_keeps_its_own_parts(tmp_path: Path, data: str, images: tuple[int, ...]) -> None:
    opened = Opened({"all": part(*images)})
    assert as_in_the_run(run_folder(tmp_path, SPLIT, "d"), data, opened) is opened


def test_data_of_a_run_is_found_from_another_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its own images would count as other data, and those it has learnt as images to test on."""
    home = tmp_path / "home"
    (home / "photos").mkdir(parents=True)
    run = run_folder(tmp_path, SPLIT, "photos", cwd=home)
    monkeypatch.chdir(tmp_path)
    assert data_of_run(run) == str(home / "photos")
    found = as_in_the_run(run, home / "photos", Opened({"all": part(0, 1, 2, 3)}))
    assert set(found.parts) == {"train", "val", "test"}
    monkeypatch.chdir(home)
    assert data_of_run(run) == "photos"


@pytest.mark.parametrize("written", [None, 1])
def test_run_of_another_version_is_refused_by_its_bundle_too(tmp_path: Path, written: int | None) -> None:
    """Which images it has learnt is not known, and they would count as images to test on; a copy elsewhere is a model alone."""
    run, opened = run_folder(tmp_path, SPLIT, "d"), Opened({"all": part(0, 1, 2, 3)})
    (run / "bundle").mkdir()
    assert set(as_in_the_run(run / "bundle", "d", opened).parts) == {"train", "val", "test"}
    table = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**table, "format": written}))
    if written is None:
        (run / "run.json").unlink()
    for model in (run, run / "bundle"):
        with pytest.raises(
            UsageError, match=r"run\.json" if written is None else "run format 1; this version"
        ) as caught:
            as_in_the_run(model, "d", opened)
        assert f"copy {run / 'bundle'}" in str(caught.value.hint)
    copy = (run / "bundle").rename(tmp_path / "copy")
    assert as_in_the_run(copy, "d", opened) is opened and data_of_run(copy) is None


def test_damaged_run_is_refused_by_its_bundle_too(tmp_path: Path) -> None:
    """Else the images that were held out would count as unknown, and all of them be tested on."""
    run = run_folder(tmp_path, SPLIT, "d")
    (run / "run.json").write_text('{"format": "x"}')
    with pytest.raises(FileProblem, match=r"run\.json is damaged"):
        as_in_the_run(run / "bundle", "d", Opened({"all": part(0, 1, 2, 3)}))


def test_test_set_of_other_parts_fits_no_temperature() -> None:
    """Without a test part, val is the test set."""
    assert choose_parts(Opened({"train": part(0), "val": part(1)}), "train", None).fit is None
    assert choose_parts(Opened({"train": part(0), "val": part(1), "test": part(2)}), "train", None).fit_part == "val"


def test_damaged_folder_that_is_not_a_path_is_passed_over(tmp_path: Path) -> None:
    assert data_of_run(run_folder(tmp_path, SPLIT, "photos", cwd=Path("a" * 5000))) == "photos"


# --- a real model -----------------------------------------------------------------------------------------------------

DATA = Path(os.environ.get("VITLAB_DATA") or Path(__file__).parents[4] / "shared" / "data")


@pytest.mark.skipif(not os.environ.get("VITLAB_SOAK"), reason="DINOv2 on 396 photos takes minutes: VITLAB_SOAK=1")
@pytest.mark.skipif(not (DATA / "dinov2_vits14").is_dir(), reason="needs dinov2_vits14 and hymenoptera in VITLAB_DATA")
def test_real_run_is_evaluated_as_it_tested_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLAB_DATA", str(DATA))
    weights = DATA / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors"
    run = vitlab.train("hymenoptera", init=str(weights), out=tmp_path / "run", device="cpu", quiet=True)
    found = vitlab.evaluate(tmp_path / "run", out=tmp_path / "out", device="cpu", quiet=True)
    assert (found.n, found.top1) == (153, run.test["top1"])
    assert found.loss == pytest.approx(run.test["loss"], rel=1e-3)
    assert found.top1 is not None and found.top1 > 0.9
    assert "attention rollout" in (tmp_path / "out" / "report.html").read_text()
