"""Pages of evaluations: readable for two classes and for hundreds, whole without a network, silent where nothing is wrong."""

import dataclasses
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core.runtime import generator
from vitlab.data.dataset import Dataset, from_arrays, several_labels
from vitlab.data.preprocess import Preprocess
from vitlab.engines.classifier import Classifier
from vitlab.evaluation.answers import OneLabel, SeveralLabels
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.measures import estimate
from vitlab.evaluation.result import EvaluationResult
from vitlab.evaluation.scoring import Account, Scored
from vitlab.models.build import create_model
from vitlab.report.charts import Chart
from vitlab.report.evaluation_page import build_evaluation_page
from vitlab.report.page import Bars, Examples, Gallery, Matrix, Report, Table, place, render
from vitlab.report.pictures import spread_over_classes
from vitlab.report.sections import class_bars, confusion
from vitlab.weights.bundle import Bundle

RESULT = EvaluationResult(
    model="m",
    data="d",
    notes=["a note"],
    knn={"k": 5, "top1": 0.5, "interval": (0.48, 0.52)},
    calibration={"temperature": 1.5, "fitted_on": "val"},
)


def built_page(
    case: OneLabel | SeveralLabels, classifier: Classifier, dataset: Dataset, calibrated: OneLabel | None = None
) -> Report:
    estimates = estimate(case, resamples=5)
    scored = Scored(dataset, Match(()), torch.zeros(0), torch.zeros(0), torch.arange(len(dataset)), {}, 0.0)
    account = Account(scored, case, calibrated, estimates, {})
    result = dataclasses.replace(RESULT, measures=dict(estimates.values), intervals=dict(estimates.intervals))
    return build_evaluation_page(result, classifier, "vitlab evaluate m d", account)


def page(classes: int, *, images: int = 9, wrong: bool = True, model: str = "ViT-w16d1m32h2/8") -> Report:
    names = tuple(f"class {k}" for k in range(classes))
    count = images * classes
    truth = torch.arange(count) % classes
    logits = 4.0 * torch.nn.functional.one_hot(truth, classes)
    if wrong:
        logits += 3 * torch.randn(count, classes, generator=generator(0))
    case = OneLabel(logits, truth, Match(tuple((k,) for k in range(classes))))
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, 16, 16), dtype=np.uint8)
    net = create_model(model, num_classes=classes, image_size=16, seed=0).eval()
    rule = Preprocess(image_size=(16, 16))
    classifier = Classifier(Bundle(net, rule, names, "", {}), "cpu")
    return built_page(case, classifier, from_arrays(pixels, truth, names), case)


@pytest.mark.parametrize("classes", [4, 10, 37, 120])
def test_page_has_everything_and_loads_nothing(classes: int) -> None:
    built = page(classes)
    text = render(built)
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#|\./)""", text) and text.count("<script") == 1
    assert "<title>m on d · vitlab</title>" in text and "a note" in text
    kinds = [type(part) for part in built.sections]
    assert {Matrix, Bars, Chart, Examples, Gallery} <= set(kinds)
    assert len(text) < 5_000_000


@pytest.mark.parametrize("classes", [4, 10, 24, 25, 30, 31, 120])
def test_every_row_of_the_page_is_filled(classes: int) -> None:
    halves = 0
    for one in place(page(classes, images=3).sections):
        assert not (one.wide and halves % 2), f"{one.anchor} leaves half a row before it"
        halves += not one.wide
    assert not halves % 2


def test_mistake_that_happened_once_is_shown_once() -> None:
    kinds = [type(part) for part in page(10, images=3).sections]
    assert Gallery in kinds and Examples not in kinds


def test_page_of_a_model_without_mistakes_shows_none() -> None:
    kinds = [type(part) for part in page(4, wrong=False).sections]
    assert Examples not in kinds
    assert [part.title for part in page(4, wrong=False).sections if isinstance(part, Gallery)] == ["Answers"]


def test_mistakes_of_a_model_with_attention_have_their_rollout_beside_them() -> None:
    gallery = next(part for part in page(4).sections if isinstance(part, Gallery))
    width, height = Image.open(io.BytesIO(gallery.tiles[0].data)).size
    assert gallery.double and width == 2 * height
    assert "does not prove what the answer depends on" in gallery.caption
    assert gallery.legend is not None and "times the mean patch" in gallery.legend.data.decode()
    without = next(part for part in page(4, model="BiT-R26x1").sections if isinstance(part, Gallery))
    width, height = Image.open(io.BytesIO(without.tiles[0].data)).size
    assert not without.double and without.legend is None and width == height and "ttention" not in without.caption


def test_matrix_counts_every_image_and_shows_other_answers_only_where_there_are_some() -> None:
    counts = torch.tensor([[5, 1, 0], [0, 4, 0]])
    (matrix,) = confusion(counts, ("a", "b", "something else"))
    assert isinstance(matrix, Matrix) and list(matrix.columns) == ["a", "b"]
    assert [[cell.text for cell in row] for _, row in matrix.cells] == [["5", "1"], ["", "4"]]
    assert matrix.cells[0][1][1].hint == "true a, predicted b: 1 of 6 (16.7 %)"
    assert list(matrix.errors) == [1, 1], "one that was not recognised, and one that another was taken for"
    counts[1, 2] = 3
    (matrix,) = confusion(counts, ("a", "b", "something else"))
    assert isinstance(matrix, Matrix) and list(matrix.columns) == ["a", "b", "something else"]


def test_of_many_classes_the_most_confused_come_first_and_names_stay() -> None:
    names = tuple(f"class {k}" for k in range(200))
    counts = 9 * torch.eye(200, dtype=torch.int64)
    counts[150, 3] = 7
    pairs, matrix = confusion(counts, names)
    assert isinstance(pairs, Table) and list(pairs.rows) == [("class 150", "7", "44 %", "class 3")]
    assert isinstance(matrix, Matrix) and len(matrix.cells) == len(matrix.columns) == 60
    assert {"class 150", "class 3"} <= set(matrix.columns)


def test_bars_name_what_a_class_is_taken_for() -> None:
    shown = class_bars(torch.tensor([[8, 2, 0], [0, 5, 0], [0, 0, 0]]), ("cat", "dog", "no image"))
    assert [(bar.name, bar.text, bar.note, bar.marked) for bar in shown.bars] == [
        ("cat", "80 % of 10", "2 predicted as dog", True),
        ("dog", "100 % of 5", "", False),
    ]


def test_pictures_are_spread_over_the_classes() -> None:
    truth = torch.tensor([0] * 20 + [1] * 2 + [2])
    doubt = torch.linspace(1, 0, 23)
    rows = spread_over_classes(truth, doubt, 6)
    assert truth[rows].tolist() == [0, 0, 0, 1, 1, 2], "the class with most images gives what the others cannot"
    assert rows == [0, 1, 2, 20, 21, 22], "the most doubtful of each, and those first"
    assert sorted(spread_over_classes(truth, doubt, 100)) == list(range(23))


def test_worst_mistakes_of_several_labels_are_judged_by_their_thresholds() -> None:
    names = ("a", "b")
    p_BK = torch.tensor([[0.3, 0.1], [0.9, 0.6], [0.4, 0.7], [0.05, 0.1]], dtype=torch.float64)
    targets_BK = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    labels = several_labels([(), (0,), (0, 1), (0,)])
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 16, 16), dtype=np.uint8)
    dataset = dataclasses.replace(from_arrays(pixels, torch.zeros(4, dtype=torch.int64), names), labels=labels)
    net = create_model("ViT-w16d1m32h2/8", num_classes=2, image_size=16, seed=0).eval()
    classifier = Classifier(Bundle(net, Preprocess(image_size=(16, 16)), names, "", {}), "cpu")

    def worst(*thresholds: float) -> list[str]:
        scores = torch.tensor(thresholds, dtype=torch.float64).logit()
        case = SeveralLabels.of(p_BK.logit(), targets_BK, scores)
        built = built_page(case, classifier, dataset)
        return [tile.caption for part in built.sections if isinstance(part, Gallery) for tile in part.tiles]

    assert worst(0.5, 0.5) == ["missed a (5 %)", "predicted b (60 %), not true", "missed a (40 %)"]
    assert worst(0.2, 0.65) == ["missed a (5 %)", "predicted a (30 %), not true"]
