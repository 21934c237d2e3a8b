"""Measures of a representation from a model and data: who trains and tests, what comes out, what is refused before any work."""

import dataclasses
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.dataset import Dataset, Opened, several_labels
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.digits import load_digits
from vitlab.engines.classifier import Classifier
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation.features import FeatureRule, features_of
from vitlab.models.build import create_model
from vitlab.runs.evaluation.features import RepresentationRule, assign_roles, make_records, measure
from vitlab.weights.bundle import Bundle

QUIET = Console(quiet=True)
RULE = Preprocess(image_size=(8, 8), mode="L", mean=(0.5,), std=(0.5,))
# The first block of a random network still has most of what the pixels say.
ALL = RepresentationRule(shots=(1, 5), knn=5, probe=True, features=FeatureRule((0,), "patches"))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    model = create_model("ViT-w32d2m64h2/4", num_classes=0, image_size=8, in_channels=1, seed=0)
    return Classifier(Bundle(model, RULE, (), "card", {}), "cpu")


@pytest.fixture(scope="module")
def digits() -> Opened:
    whole = load_digits()
    cut = {"train": torch.arange(600), "test": torch.arange(600, 1000)}
    return Opened({name: whole.subset(index, name) for name, index in cut.items()})


def measured(classifier: Classifier, opened: Opened, rule: RepresentationRule, cache: Path) -> dict[str, Any]:
    return measure(classifier, opened, rule, console=QUIET, options=InferenceOptions(workers=0), cache=cache)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(classifier: Classifier, digits: Opened, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(classifier, digits, ALL, tmp_path_factory.mktemp("cache"))


def test_answer_has_the_promised_keys_and_sensible_numbers(found: dict[str, Any]) -> None:
    assert set(found) == {"features", "few_shot", "few_shot_detail", "knn", "probe"}
    assert set(found["few_shot"]) == {"1", "5"}
    assert found["knn"]["k"] == 5
    assert 0.2 < found["few_shot"]["1"] < found["few_shot"]["5"] < found["probe"]["top1"] <= 1.0
    assert found["knn"]["top1"] > 0.6
    assert found["knn"]["interval"][0] < found["knn"]["top1"] < found["knn"]["interval"][1]
    assert found["features"] | {"seconds": 0} == {
        **{
            "layers": [0],
            "tokens": "patches",
            "width": 4 * 32,
            "classes": 10,
            "train": 600,
            "test": 400,
            "part": "test",
        },
        **{"fingerprint": found["features"]["fingerprint"], "bad": 0, "computed": 1000, "seconds": 0},
        "notes": ["120 training images held out to choose the probe's l2"],
    }


def test_every_draw_stands_beside_the_mean(found: dict[str, Any]) -> None:
    row = found["few_shot_detail"]["5"]
    assert row["seeds"] == [0, 1, 2]
    assert len(set(row["values"])) > 1
    assert found["few_shot"]["5"] == pytest.approx(sum(row["values"]) / 3)
    assert (row["low"], row["high"]) == (min(row["values"]), max(row["values"]))


def test_probe_is_what_scikit_learn_gets_at_the_chosen_strength(
    found: dict[str, Any], classifier: Classifier, digits: Opened, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.mktemp("again")
    vectors = {
        name: torch.cat(list(features_of(classifier, part, ALL.features, cache=cache, console=QUIET).chunks))
        .double()
        .numpy()
        for name, part in digits.parts.items()
    }
    mean, std = vectors["train"].mean(0), np.maximum(vectors["train"].std(0), 1e-6)
    train, test = ((vectors[name] - mean) / std for name in ("train", "test"))
    peer = LogisticRegression(C=1 / (found["probe"]["l2"] * 600), tol=1e-8, max_iter=5000)
    peer.fit(train, digits.parts["train"].labels.single().numpy())
    right = (peer.predict(test) == digits.parts["test"].labels.single().numpy()).mean()
    assert abs(found["probe"]["top1"] - right) <= 1 / 400


def test_second_measure_of_the_same_runs_no_model(classifier: Classifier, digits: Opened, tmp_path: Path) -> None:
    first = measured(classifier, digits, RepresentationRule(knn=5), tmp_path)
    second = measured(classifier, digits, RepresentationRule(knn=5), tmp_path)
    assert (first["features"]["computed"], second["features"]["computed"]) == (1000, 0)
    assert first["knn"] | {"seconds": 0} == second["knn"] | {"seconds": 0}


def test_only_what_was_asked_for_is_measured(classifier: Classifier, digits: Opened, tmp_path: Path) -> None:
    rule = RepresentationRule(shots=(2,), features=FeatureRule((0,), "mean"))
    found = measured(classifier, digits, rule, tmp_path)
    assert set(found) == {"features", "few_shot", "few_shot_detail"}
    assert (found["features"]["layers"], found["features"]["tokens"]) == ([0], "mean")


def test_every_measure_becomes_a_record(found: dict[str, Any], classifier: Classifier, digits: Opened) -> None:
    records = make_records(found, classifier, digits, data="digits", command="a test")
    assert [record.measure for record in records] == ["few-shot-1", "few-shot-5", "knn-5", "probe"]
    assert [record.value for record in records[:2]] == pytest.approx(list(found["few_shot"].values()))
    assert records[0].seeds == (0, 1, 2)
    assert records[3].interval == tuple(found["probe"]["interval"])
    assert {record.n for record in records} == {400}
    rows = [*found["few_shot_detail"].values(), found["knn"], found["probe"]]
    whole = [found["features"]["seconds"] + row["seconds"] for row in rows]
    assert [record.seconds for record in records] == pytest.approx(whole, abs=1e-3)
    assert all(row["seconds"] > 0 for row in rows)


# --- who does what ----------------------------------------------------------------------------------------------------


def test_whole_set_is_shared_out() -> None:
    opened = Opened({"all": load_digits().subset(torch.arange(500))})
    roles, notes = assign_roles(opened, ALL)
    assert (len(roles["train"].images), len(roles["test"].images)) == (400, 100)
    assert abs(len(roles["tune"].images) - 80) <= 5  # a fifth, rounded in each of ten classes
    assert not set(roles["test"].images.tolist()) & set(roles["train"].images.tolist())
    assert set(roles["fit"].images.tolist()) | set(roles["tune"].images.tolist()) == set(roles["train"].images.tolist())
    assert notes[0] == "100 of 500 images held out to test on"


def test_val_is_the_test_set_without_one_and_is_not_used_for_validation(digits: Opened) -> None:
    opened = Opened({"train": digits.parts["train"], "val": digits.parts["test"]})
    roles, _ = assign_roles(opened, ALL)
    assert (roles["test"].part, roles["tune"].part, roles["fit"].part) == ("val", "train", "train")


def test_val_beside_a_test_part_is_the_validation_set(digits: Opened) -> None:
    train = digits.parts["train"]
    parts = {"train": train.subset(torch.arange(500)), "val": train.subset(torch.arange(500, 600))}
    roles, notes = assign_roles(Opened({**parts, "test": digits.parts["test"]}), ALL)
    assert {name: (role.part, len(role.images)) for name, role in roles.items()} == {
        **{"train": ("train", 500), "fit": ("train", 500), "tune": ("val", 100), "test": ("test", 400)}
    }
    assert notes == []


# --- refusals, before the model is run --------------------------------------------------------------------------------


class Refusing:
    """Stands where images would be read: nothing may ask it."""

    def __call__(self, i: int) -> bytes:
        raise AssertionError(f"image {i} was read")

    def version(self, i: int) -> str:
        raise AssertionError(f"image {i} was looked at")


def unread(opened: Opened) -> Opened:
    return Opened({name: dataclasses.replace(part, read=Refusing()) for name, part in opened.parts.items()})


@pytest.mark.parametrize(
    ("rule", "printed"),
    [
        (RepresentationRule(shots=(1, 100)), "100 shots"),
        (RepresentationRule(knn=601), "601 neighbours.*600"),
        (RepresentationRule(knn=0), "at least 1 neighbour"),
        (RepresentationRule(shots=(0,)), "at least 1 image per class"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    rule: RepresentationRule, printed: str, classifier: Classifier, digits: Opened, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=printed):
        measured(classifier, unread(digits), rule, tmp_path)


def test_one_class_is_refused(classifier: Classifier, digits: Opened, tmp_path: Path) -> None:
    train = digits.parts["train"]
    one = dataclasses.replace(train.subset((train.labels.single() == 0).nonzero()[:, 0]), classes=("0",))
    with pytest.raises(FileProblem, match="one class"):
        measured(classifier, unread(Opened({"train": one, "test": one})), ALL, tmp_path)


def test_one_image_per_class_cannot_be_shared_out(classifier: Classifier, digits: Opened, tmp_path: Path) -> None:
    train = digits.parts["train"]
    index = torch.stack([(train.labels.single() == label).nonzero()[0, 0] for label in range(10)])
    opened = Opened({"train": train.subset(index), "test": digits.parts["test"]})
    with pytest.raises(UsageError, match=r"0 has 1 image.* 5 more.*too few.*2 parts"):
        measured(classifier, unread(opened), RepresentationRule(probe=True), tmp_path)
    assert (
        measured(classifier, opened, dataclasses.replace(ALL, shots=(1,), knn=None, probe=False), tmp_path)["few_shot"][
            "1"
        ]
        > 0.2
    )


def test_images_of_several_labels_are_refused(classifier: Classifier, digits: Opened, tmp_path: Path) -> None:
    train = digits.parts["train"]
    several = several_labels([[int(label), (int(label) + 1) % 10] for label in train.labels.single()])
    opened = Opened({"train": dataclasses.replace(train, labels=several), "test": digits.parts["test"]})
    with pytest.raises(UsageError, match="several labels"):
        measured(classifier, unread(opened), ALL, tmp_path)


def test_data_without_a_training_part_is_refused(classifier: Classifier, digits: Opened, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to train on"):
        measured(classifier, unread(Opened({"test": digits.parts["test"]})), ALL, tmp_path)


def test_unreadable_images_are_left_out_and_counted(classifier: Classifier, digits: Opened, tmp_path: Path) -> None:
    train = digits.parts["train"]

    @dataclasses.dataclass(frozen=True)
    class SomeBad:
        inner: Any

        def __call__(self, i: int) -> Any:
            return b"no image" if i < 3 else self.inner(i)

    hurt: Dataset = dataclasses.replace(train, read=SomeBad(train.read))
    found = measured(
        classifier, Opened({"train": hurt, "test": digits.parts["test"]}), RepresentationRule(knn=3), tmp_path
    )
    assert (found["features"]["bad"], found["features"]["train"]) == (3, 597)
    assert "left out 3 images that could not be read" in found["features"]["notes"][-1]
