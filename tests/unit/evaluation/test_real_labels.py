"""ImageNet-ReaL's rule on cases made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.core.errors import FileProblem, UsageError
from vitlab.evaluation.metrics import wilson_interval
from vitlab.evaluation.real_labels import read_real, score_real

KEYS = [f"val/n0{i}/ILSVRC2012_val_0000000{i}.JPEG" for i in (3, 1, 2, 4)]


def write(tmp_path: Path, table: Any) -> Path:
    path = tmp_path / "real.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return path


def test_answer_among_the_labels_is_right_and_images_without_labels_are_not_counted(tmp_path: Path) -> None:
    """Image 1 has label 7, image 2 none, image 3 the labels 1 and 2, image 4 label 5."""
    labels = read_real(write(tmp_path, [[7], [], [1, 2], [5], [9]]), KEYS, 10)
    assert labels == [{1, 2}, {7}, set(), {5}]
    found = score_real(torch.tensor([2, 7, 7, 1]), labels)  # right, right, not counted, wrong
    assert (found.top1, found.n, found.excluded) == (pytest.approx(2 / 3), 3, 1)
    assert found.interval == wilson_interval(2, 3)


def test_table_by_name_is_taken_too(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.png": [0], "x/b.png": [1]})
    assert read_real(path, ["some/folder/a.png", "x/b.png"], 2) == [{0}, {1}]


def test_published_file_and_a_model_of_other_classes_are_distinguished(tmp_path: Path) -> None:
    """Its numbers are those of ImageNet's 1,000 classes, and mean nothing to a head of 21,843."""
    path = write(tmp_path, [[7]] * 50_000)
    assert read_real(path, KEYS[:1], 1000) == [{7}]
    with pytest.raises(UsageError, match="21,843 classes"):
        read_real(path, KEYS[:1], 21_843)


def test_no_image_with_labels_is_reported() -> None:
    with pytest.raises(UsageError, match="no image has a ReaL label"):
        score_real(torch.tensor([1]), [frozenset()])


@pytest.mark.parametrize(
    ("table", "keys", "error", "printed"),
    [
        ([[1]], ["cat.jpg"], UsageError, "cat.jpg has none"),
        ([[1]], KEYS[:1], UsageError, "is number 3"),
        ({"a": [1]}, ["b.png"], UsageError, "no labels of b.png"),
        ([[10]], KEYS[1:2], FileProblem, "0 to 9"),
        (["x"], KEYS[1:2], FileProblem, "list of numbers"),
        ([[1.5]], KEYS[1:2], FileProblem, "list of numbers"),
        ("nonsense", KEYS, FileProblem, "not valid JSON"),
        ("3", KEYS, FileProblem, "list or a table"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(
    tmp_path: Path, table: Any, keys: list[str], error: type[Exception], printed: str
) -> None:
    with pytest.raises(error, match=printed):
        read_real(write(tmp_path, table), keys, 10)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="cannot be read"):
        read_real(tmp_path / "none.json", KEYS, 10)
