"""Classes of the data and classes of the model: found by name, by number, by a file, or reported as unknown."""

import json
from pathlib import Path
from typing import Any

import pytest

from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.data.sources.synsets import ilsvrc_synsets
from vitlab.evaluation.label_match import match_by_file, match_by_name

LABELS = ("tabby cat", "Golden_Retriever", "coffee mug", "crane", "crane", "beer mug")


def test_same_names_match_whatever_their_order() -> None:
    match = match_by_name(("b", "a"), ("a", "b"), "data")
    assert (match.members, match.note) == (((1,), (0,)), "")


def test_case_spelling_and_underscores_do_not_matter() -> None:
    assert match_by_name(("golden retriever", "Tabby_Cat"), LABELS, "data").members == ((1,), (0,))
    assert match_by_name(("cafe\u0301",), ("caf\u00e9",), "data").members == ((0,),)


def test_exact_name_wins_over_one_that_is_alike() -> None:
    assert match_by_name(("Cat",), ("cat", "Cat"), "data").members == ((1,),)


def test_model_with_more_classes_is_reported() -> None:
    assert "4 classes that the data does not have" in match_by_name(("coffee mug", "beer mug"), LABELS, "data").note


def test_unknown_labels_are_named_with_their_number_and_what_to_do() -> None:
    with pytest.raises(UsageError) as caught:
        match_by_name(("tabby cat", *(f"x{i}" for i in range(9))), LABELS, "photos")
    assert "does not know 9 of the 10 classes of photos: x0, x1, x2, x3, x4 and 4 more" in caught.value.what
    assert "--label-map" in str(caught.value.hint)


def test_name_that_the_model_has_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="several classes of the name 'crane'"):
        match_by_name(("crane",), LABELS, "data")


def test_model_of_numbers_takes_the_classes_in_their_order_and_reports_it() -> None:
    match = match_by_name(("n01", "n02", "n03"), ("0", "1", "2"), "data")
    assert match.members == ((0,), (1,), (2,)) and "numbers only" in match.note
    with pytest.raises(UsageError, match="does not know"):
        match_by_name(("n01", "n02"), ("0", "1", "2"), "data")


ILSVRC = ilsvrc_synsets()
SOME = ("n01443537", "n02007558", "n03710721")  # goldfish, flamingo, the second of two called maillot
PLACES = tuple((list(ILSVRC).index(wnid),) for wnid in SOME)


@pytest.mark.parametrize(
    "labels",
    [
        tuple(ILSVRC),
        tuple(str(i) for i in range(1000)),
        tuple(ILSVRC.values()),
        tuple(f"{name.title()}, some other name" for name in ILSVRC.values()),
        tuple(f"{wnid}|{name}" for wnid, name in ILSVRC.items()),
    ],
    ids=["synsets", "numbers", "names", "several-names", "both"],
)
def test_synsets_find_their_class_in_a_model_of_imagenets_thousand(labels: tuple[str, ...]) -> None:
    match = match_by_name(SOME, labels, "imagenet-a")
    assert match.members == PLACES
    assert "997 classes that the data does not have" in match.note
    assert match.restricted(1000)[1].tolist() == sorted(place for (place,) in PLACES)


def test_synsets_find_nothing_in_a_thousand_other_classes() -> None:
    for labels in (
        tuple(reversed(ILSVRC.values())),
        tuple(f"class {i}" for i in range(1000)),
        tuple(map(str, range(999))),
    ):
        with pytest.raises(UsageError, match="does not know 3 of the 3 classes"):
            match_by_name(SOME, labels, "imagenet-a")


def test_labels_with_synsets_match_in_any_order() -> None:
    assert match_by_name(("n02007558", "n01443537_goldfish"), ("n01443537|x", "n02007558|y"), "data").members == (
        (1,),
        (0,),
    )


def write(path: Path, table: Any) -> Path:
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return path


def test_file_names_labels_numbers_or_several_and_may_leave_classes_out(tmp_path: Path) -> None:
    path = write(tmp_path / "map.json", {"mug": ["coffee mug", 5], "cat": "tabby cat", "dog": 1})
    match = match_by_file(path, ("cat", "dog", "mug", "spoon"), LABELS)
    assert match.members == ((0,), (1,), (2, 5), ())
    assert match.known.tolist() == [True, True, True, False]
    assert "3 of 4 classes" in match.note
    assert match.owners(6).tolist() == [0, 1, 2, 4, 4, 2]
    assert match.table.tolist() == [[0, -1], [1, -1], [2, 5], [-1, -1]]


@pytest.mark.parametrize(
    ("table", "error", "printed"),
    [
        ({"cta": "tabby cat"}, UnknownName, "'cta'"),
        ({"cat": "tabby"}, UnknownName, "'tabby'"),
        ({"cat": 6}, UsageError, "0 to 5"),
        ({"cat": -1}, UsageError, "0 to 5"),
        ({"cat": True}, FileProblem, "must have a label"),
        ({"cat": {"a": 1}}, FileProblem, "must have a label"),
        ({"cat": 0, "dog": 0}, UsageError, "stands for both 'cat' and 'dog'"),
        ({}, FileProblem, "must hold a table"),
        ([1], FileProblem, "must hold a table"),
        ("{", FileProblem, "not valid JSON"),
        ("[" * 100_000, FileProblem, "nested too deeply"),
    ],
)
def test_wrong_file_is_refused_in_a_sentence(tmp_path: Path, table: Any, error: type[Exception], printed: str) -> None:
    with pytest.raises(error) as caught:
        match_by_file(write(tmp_path / "map.json", table), ("cat", "dog"), LABELS)
    assert printed in str(caught.value) and "map.json" in str(caught.value)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"none\.json cannot be read"):
        match_by_file(tmp_path / "none.json", ("cat",), LABELS)
