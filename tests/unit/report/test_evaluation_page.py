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
from vitlab.evaluation.calibration import reliability
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.measures import estimate
from vitlab.evaluation.result import EvaluationResult
from vitlab.evaluation.scoring import Account, Scored
from vitlab.evaluation.selective import risk_coverage
from vitlab.models.build import create_model
from vitlab.report.evaluation_figures import confusion_overview, reliability_diagram, risk_curve, sorted_curve
from vitlab.report.evaluation_page import build_evaluation_page, confusion_section
from vitlab.report.page import Bars, Examples, Figure, Gallery, Matrix, Report, render
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


@pytest.mark.parametrize("classes", [2, 10, 120])
def test_page_has_everything_and_loads_nothing(classes: int) -> None:
    built = page(classes)
    text = render(built)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text) and "<script" not in text
    assert "<title>m on d · vitlab</title>" in text and "a note" in text
    kinds = [type(part) for part in built.sections]
    assert (Matrix in kinds) == (classes <= 30)
    assert {Bars, Figure, Examples, Gallery} <= set(kinds)


def test_mistake_that_happened_once_is_shown_once() -> None:
    kinds = [type(part) for part in page(10, images=3).sections]
    assert Gallery in kinds and Examples not in kinds


def test_page_of_a_model_without_mistakes_shows_none() -> None:
    kinds = [type(part) for part in page(4, wrong=False).sections]
    assert Examples not in kinds and Gallery not in kinds


def test_mistakes_of_a_model_with_attention_have_their_rollout_beside_them() -> None:
    gallery = next(part for part in page(4).sections if isinstance(part, Gallery))
    width, height = Image.open(io.BytesIO(gallery.tiles[0].data)).size
    assert gallery.double and width == 2 * height
    without = next(part for part in page(4, model="Axial-ViT-w16d1m32h2/8").sections if isinstance(part, Gallery))
    width, height = Image.open(io.BytesIO(without.tiles[0].data)).size
    assert not without.double and width == height


def test_matrix_counts_every_image_and_shows_other_answers_only_where_there_are_some() -> None:
    counts = torch.tensor([[5, 1, 0], [0, 4, 0]])
    (matrix,) = confusion_section(counts, ("a", "b", "something else"))
    assert isinstance(matrix, Matrix) and list(matrix.columns) == ["a", "b"]
    assert [[cell.text for cell in row] for _, row in matrix.cells] == [["5", "1"], ["", "4"]]
    counts[1, 2] = 3
    (matrix,) = confusion_section(counts, ("a", "b", "something else"))
    assert isinstance(matrix, Matrix) and list(matrix.columns) == ["a", "b", "something else"]


def test_drawings_are_pictures_and_the_same_each_time() -> None:
    confidence = torch.rand(60, generator=generator(1)).double()
    right = torch.rand(60, generator=generator(2)) < 0.7
    rows = reliability(confidence, right)
    made = [reliability_diagram(rows, rows), risk_curve(risk_coverage(confidence, right)), sorted_curve(confidence)]
    again = [reliability_diagram(rows, rows), risk_curve(risk_coverage(confidence, right)), sorted_curve(confidence)]
    assert made == again and all(b"<svg" in drawing for drawing in made)
    many = torch.randint(0, 4, (50, 51), generator=generator(3))
    assert confusion_overview(many) == confusion_overview(many)
    assert confusion_overview(torch.eye(50, 51).long()).startswith(b"\x89PNG")


def test_single_image_and_single_class_can_be_drawn() -> None:
    assert b"<svg" in reliability_diagram(reliability(torch.ones(1).double(), torch.ones(1).bool()), None)
    assert b"<svg" in risk_curve(risk_coverage(torch.ones(1).double(), torch.ones(1).bool()))


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
