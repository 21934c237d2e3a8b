"""Pseudo-labels: which are kept, by a loop that a reader can check; the file; and the training set that they make."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.dataset import from_arrays
from vitlab.training import pseudo_labels
from vitlab.training.pseudo_labels import (
    PseudoLabels,
    Selection,
    read_pseudo_labels,
    repeats_of,
    select,
    sentence,
    student_set,
    summary,
    write_pseudo_labels,
)
from vitlab.training.rules import NoisyStudentRule

CLASSES = ("a", "b", "c", "d")


def labels_of(probabilities_NK: Tensor) -> PseudoLabels:
    classes = tuple(f"class{k}" for k in range(probabilities_NK.shape[1]))
    names = tuple(f"image{i}" for i in range(len(probabilities_NK)))
    return PseudoLabels(names, classes, probabilities_NK, "teacher")


def drawn(count: int, classes: int, seed: int, levels: int = 20) -> PseudoLabels:
    """Probabilities in few levels, so that many confidences are equal; class 1 is never the likeliest."""
    raw_NK = torch.randint(1, levels, (count, classes), generator=torch.Generator().manual_seed(seed)).float()
    raw_NK[:, 1] = 0.5
    return labels_of(raw_NK / raw_NK.sum(dim=1, keepdim=True))


def select_by_loop(labels: PseudoLabels, threshold: float, per_class: int) -> list[int]:
    """The rule in words: argmax, filter, sort by confidence with the earlier image first, cut or repeat from the top."""
    rows = labels.probabilities_NK.tolist()
    by_class: dict[int, list[tuple[float, int]]] = {}
    for i, row in enumerate(rows):
        best = max(row)
        k = min(k for k, value in enumerate(row) if value == best)
        if best >= threshold:
            by_class.setdefault(k, []).append((-best, i))
    chosen: list[int] = []
    for k in sorted(by_class):
        ranked = [i for _, i in sorted(by_class[k])]
        chosen += list(itertools.islice(itertools.cycle(ranked), per_class))
    return chosen


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("per_class", [1, 7, 40])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.45])
def test_selection_is_that_of_the_loop(seed: int, per_class: int, threshold: float) -> None:
    labels = drawn(60, 4, seed)
    rule = NoisyStudentRule(threshold=float(torch.tensor(threshold)), per_class=per_class)
    chosen = select(labels, rule)
    assert chosen.rows.tolist() == select_by_loop(labels, rule.threshold, per_class)
    assert int(chosen.kept_K[1]) == int(chosen.confident_K[1]) == 0


def test_the_most_confident_stay_and_the_earlier_of_equal_ones() -> None:
    p = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    chosen = select(labels_of(p), NoisyStudentRule(per_class=3))
    assert chosen.rows.tolist() == [1, 3, 0, 4, 4, 4]
    assert [
        column.tolist() for column in (chosen.confident_K, chosen.kept_K, chosen.duplicated_K, chosen.dropped_K)
    ] == [
        [4, 1],
        [3, 3],
        [0, 2],
        [1, 0],
    ]


def test_a_confidence_at_the_threshold_is_kept() -> None:
    p = torch.tensor([[0.5, 0.5], [0.75, 0.25]])
    assert sorted(select(labels_of(p), NoisyStudentRule(threshold=0.5, per_class=2)).rows.tolist()) == [0, 1]
    assert select(labels_of(p), NoisyStudentRule(threshold=0.75, per_class=1)).rows.tolist() == [1]


def test_without_a_number_it_is_the_mean_of_the_classes_that_have_some() -> None:
    p = torch.tensor([[0.8, 0.1, 0.1]] * 5 + [[0.1, 0.8, 0.1]] * 2)
    chosen = select(labels_of(p), NoisyStudentRule())
    assert chosen.per_class == 4  # 3.5, rounded to the even one
    assert chosen.kept_K.tolist() == [4, 4, 0]
    assert chosen.empty_classes == [2]


def test_none_above_the_threshold_is_an_error_that_says_the_highest() -> None:
    with pytest.raises(UsageError, match=r"confidence of 0\.9 .*highest is 0\.60") as caught:
        select(labels_of(torch.tensor([[0.6, 0.4]])), NoisyStudentRule(threshold=0.9))
    assert caught.value.hint is not None and "--threshold" in caught.value.hint


def test_counts_add_up() -> None:
    labels, rule = drawn(60, 4, 1), NoisyStudentRule(per_class=15)
    chosen = select(labels, rule)
    found = summary(labels, chosen, rule)
    assert found["kept"] == len(chosen.rows) == found["different"] + found["duplicated"]
    assert found["different"] == len(chosen.rows.unique())
    assert found["images"] == 60 == found["below_threshold"] + found["different"] + found["dropped"]
    assert [row["label"] for row in found["classes"]] == list(labels.classes)
    assert "15 of each class (as asked)" in sentence(found, rule)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_what_is_stored_is_read_back(tmp_path: Path) -> None:
    labels = drawn(10, 4, 0)
    used = write_pseudo_labels(tmp_path / "labels.npz", labels)
    found = read_pseudo_labels(tmp_path / "labels.npz")
    assert (found.names, found.classes, found.teacher) == (labels.names, labels.classes, "teacher")
    assert torch.equal(found.probabilities_NK, used.probabilities_NK)
    assert torch.equal(found.probabilities_NK, labels.probabilities_NK)
    with np.load(tmp_path / "labels.npz", allow_pickle=False) as table:
        assert sorted(table) == ["classes", "names", "probabilities", "teacher"]


def test_many_are_stored_in_half_precision_and_used_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pseudo_labels, "_HALF_FROM", 39)
    labels = drawn(10, 4, 0)
    used = write_pseudo_labels(tmp_path / "labels.npz", labels)
    assert not torch.equal(used.probabilities_NK, labels.probabilities_NK)
    assert torch.equal(used.probabilities_NK, labels.probabilities_NK.half().float())
    assert torch.equal(read_pseudo_labels(tmp_path / "labels.npz").probabilities_NK, used.probabilities_NK)
    torch.testing.assert_close(used.shares_NK.sum(dim=1), torch.ones(10))


@pytest.mark.parametrize("damage", ["cut", "shape", "nan", "text"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "labels.npz"
    write_pseudo_labels(path, drawn(10, 4, 0))
    names, classes = np.array(["x"]), np.array(list(CLASSES))
    tables = {"shape": np.zeros((2, 4), np.float32), "nan": np.full((1, 4), np.nan, np.float32)}
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "text":
        path.write_text("no archive")
    else:
        np.savez(path, names=names, classes=classes, probabilities=tables[damage], teacher=np.array("t"))
    with pytest.raises(FileProblem, match=r"labels\.npz"):
        read_pseudo_labels(path)


# --- what the student learns from -------------------------------------------------------------------------------------


def test_labelled_images_make_up_their_share() -> None:
    times = repeats_of(10, 90, 0.25, seed=0)
    assert len(times) == 30
    assert torch.bincount(times).tolist() == [3] * 10
    uneven = repeats_of(10, 100, 0.2, seed=0)  # a quarter of 100
    assert len(uneven) == 25
    assert sorted(torch.bincount(uneven).tolist()) == [2] * 5 + [3] * 5
    assert repeats_of(10, 4, 0.25, seed=0).tolist() == list(range(10))  # each once, however few the others
    assert not torch.equal(repeats_of(10, 100, 0.2, seed=1), uneven)


def sets(targets: str, *, foreign: bool = False) -> tuple[Selection, PseudoLabels, object]:
    labelled = from_arrays(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), [1, 0], ("a", "b"), "known")
    unlabelled = from_arrays(torch.ones(3, 1, 4, 4, dtype=torch.uint8), [0, 0, 0], ("a", "b"), "new")
    labels = labels_of(torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]]))
    rule = NoisyStudentRule(targets=targets, per_class=2, labelled_share=0.5, label_smoothing=0.2)  # type: ignore[arg-type]
    chosen = select(labels, rule)
    made = student_set(labelled, unlabelled, labels, chosen, rule, seed=0, foreign=foreign)
    return chosen, labels, made


@pytest.mark.parametrize(
    ("targets", "pseudo"),
    [
        ("soft", [[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.2, 0.8]]),
        ("hard", [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]),
    ],
)
def test_labelled_images_are_smoothed_and_pseudo_labels_are_as_the_teacher_gave_them(
    targets: str, pseudo: list[list[float]]
) -> None:
    _, _, made = sets(targets)
    wanted = torch.tensor([[0.1, 0.9], [0.9, 0.1]] * 2 + pseudo)
    torch.testing.assert_close(made.labels.targets(torch.arange(8), 2), wanted)  # type: ignore[attr-defined]
    assert [int(made.read(i).max()) for i in range(8)] == [0] * 4 + [1] * 4  # type: ignore[attr-defined]
    assert made.keys == ["known/0", "known/1"] * 2 + ["new/1", "new/0", "new/2", "new/2"]  # type: ignore[attr-defined]


def test_images_of_another_source_get_names_of_their_own() -> None:
    _, _, made = sets("soft", foreign=True)
    assert made.keys[4:] == [f"unlabelled/new/{i}" for i in (1, 0, 2, 2)]  # type: ignore[attr-defined]


def test_the_rule_refuses_what_cannot_be() -> None:
    rule = NoisyStudentRule(generations=3, students=("A", "B", "C"))
    assert [rule.student_of(g) for g in (1, 2, 3)] == ["A", "B", "C"]
    assert [NoisyStudentRule(generations=2, students=("A",)).student_of(g) for g in (1, 2)] == ["A", "A"]
    assert NoisyStudentRule().student_of(1) is None
    for wrong in (
        {"generations": 0},
        {"generations": 3, "students": ("A", "B")},
        {"threshold": 1.5},
        {"labelled_share": 1.0},
        {"labelled": 5, "labelled_per_class": 1},
        {"per_class": -1},
        {"dropout": 1.0},
        {"finish_epochs": 0.0},
    ):
        with pytest.raises(UsageError):
            dataclasses.replace(NoisyStudentRule(), **wrong)  # type: ignore[arg-type]
